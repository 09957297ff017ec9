//! Burn's value semantics hold: a clone keeps its values, and what a model holds is what counts.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::Linear;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_zero_offload::{Offload, WithOffload};

use crate::common::layer::{layer, loss};
use crate::common::{assert_models_close, config, devices, read, step, tensor, weights};

const LR: f64 = 1e-2;

fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_weight_decay(0.1)
}

fn offloaded(dtype: FloatDType, device: &Device) -> (Linear, Offload) {
    adamw()
        .with_offload(config(dtype))
        .init(layer(1, device))
        .unwrap()
}

fn record_values(model: &Linear) -> Vec<f32> {
    let device = Device::flex();
    read(
        &layer(1, &device)
            .load_record(model.clone().into_record())
            .weight
            .val(),
    )
}

#[test]
fn a_clone_keeps_its_values_when_the_model_trains_on() {
    for device in devices() {
        for dtype in [FloatDType::F32, FloatDType::BF16] {
            let (mut model, offload) = offloaded(dtype, &device);
            let mut optimizer = offload.optimizer();
            let clone = model.clone();
            let before = weights(&clone);
            for _ in 0..2 {
                let loss = loss(&model);
                model = step(&mut optimizer, LR, model, loss);
            }
            assert_eq!(weights(&clone), before);
            assert_ne!(weights(&model), before);
        }
    }
}

/// Saving an older clone saves what the clone holds, in the precision it has on the device; saving
/// the current model saves the master weights.
#[test]
fn saving_an_older_clone_saves_the_older_values() {
    for device in devices() {
        let (mut model, offload) = offloaded(FloatDType::BF16, &device);
        let mut optimizer = offload.optimizer();
        let clone = model.clone();
        for _ in 0..2 {
            let loss = loss(&model);
            model = step(&mut optimizer, 0.1, model, loss);
        }
        assert_eq!(record_values(&clone), read(&clone.weight.base()));
        let master = record_values(&model);
        assert_ne!(
            master,
            read(&model.weight.base()),
            "the master has more bits"
        );
        crate::common::assert_close(&master, &read(&model.weight.base()), 0.0, 0.005);
    }
}

/// Going on from an older clone goes on from its values.
#[test]
fn stepping_an_older_clone_continues_from_its_values() {
    for device in devices() {
        let (mut model, offload) = offloaded(FloatDType::F32, &device);
        let mut optimizer = offload.optimizer();
        let (mut reference, mut plain) = (layer(1, &device), adamw().init());
        let (older, reference_older) = (model.clone(), reference.clone());
        for _ in 0..2 {
            let (a, b) = (loss(&model), loss(&reference));
            model = step(&mut optimizer, LR, model, a);
            reference = step(&mut plain, LR, reference, b);
        }
        let (mut model, mut reference) = (older, reference_older);
        for _ in 0..2 {
            let (a, b) = (loss(&model), loss(&reference));
            model = step(&mut optimizer, LR, model, a);
            reference = step(&mut plain, LR, reference, b);
        }
        assert_models_close(&model, &reference, 1e-6, 1e-6);
    }
}

/// Loading into an older clone makes it the model that trains; the others keep what they hold.
#[test]
fn loading_into_an_older_clone_continues_from_the_record() {
    for device in devices() {
        let (mut model, offload) = offloaded(FloatDType::BF16, &device);
        let mut optimizer = offload.optimizer();
        let start = model.clone().into_record();
        let older = model.clone();
        for _ in 0..2 {
            let loss = loss(&model);
            model = step(&mut optimizer, LR, model, loss);
        }
        let kept = weights(&model);
        let back = older.load_record(start);
        assert_eq!(weights(&model), kept);
        assert_eq!(record_values(&back), read(&layer(1, &device).weight.val()));
        let loss = loss(&back);
        let stepped = step(&mut optimizer, LR, back.clone(), loss);
        assert_ne!(weights(&stepped), weights(&back));
    }
}

/// Weights edited between steps (clamping, as in a Wasserstein GAN) are where the next step starts.
#[test]
fn edited_weights_are_where_the_next_step_starts() {
    struct Clamp;
    impl ModuleMapper for Clamp {
        fn map_float<const D: usize>(&mut self, p: Param<Tensor<D>>) -> Param<Tensor<D>> {
            p.map(|t| Tensor::from_inner(t.inner().clamp(-0.25, 0.25)).require_grad())
        }
    }
    for device in devices() {
        let (mut model, offload) = offloaded(FloatDType::F32, &device);
        let mut optimizer = offload.optimizer();
        let (mut reference, mut plain) = (layer(1, &device), adamw().init());
        for _ in 0..2 {
            let (a, b) = (loss(&model), loss(&reference));
            model = step(&mut optimizer, LR, model, a).map(&mut Clamp);
            reference = step(&mut plain, LR, reference, b).map(&mut Clamp);
        }
        assert_models_close(&model, &reference, 1e-6, 1e-6);
        let mut greatest = record_values(&model);
        greatest.iter_mut().for_each(|w| *w = w.abs());
        assert!(greatest.iter().all(|w| *w <= 0.25));
    }
}

#[test]
fn a_validation_copy_has_the_values_and_no_taps() {
    for device in devices() {
        let (model, offload) = offloaded(FloatDType::BF16, &device);
        let mut optimizer = offload.optimizer();
        let loss_before = loss(&model);
        let model = step(&mut optimizer, LR, model, loss_before);
        let valid = model.valid();
        assert_eq!(weights(&valid), weights(&model));
        assert!(!valid.weight.val().is_autodiff());
        let x = tensor([2, 4], 1, &device.clone().inner()).cast(FloatDType::BF16);
        assert_eq!(
            read(&valid.forward(x.clone())),
            read(&model.forward(Tensor::from_inner(x)))
        );
        assert_eq!(offload.memory().host_gradients, 0);
        assert_eq!(record_values(&valid), record_values(&model));
    }
}

/// Evaluating another checkpoint in a validation copy must not disturb the run.
#[test]
fn loading_into_a_validation_copy_leaves_training_alone() {
    for device in devices() {
        let (model, offload) = offloaded(FloatDType::BF16, &device);
        let mut optimizer = offload.optimizer();
        let start = model.clone().into_record();
        let first = loss(&model);
        let model = step(&mut optimizer, 0.1, model, first);
        let master = record_values(&model);
        let valid = model.valid().load_record(start);
        assert_eq!(
            read(&valid.weight.val()),
            read(&offloaded(FloatDType::BF16, &device).0.weight.val())
        );
        assert_eq!(record_values(&model), master);
    }
}

#[test]
fn a_fork_trains_as_the_model_does() {
    for device in devices() {
        let (model, offload) = offloaded(FloatDType::BF16, &device);
        let mut optimizer = offload.optimizer();
        let master = record_values(&model);
        let fork = model.clone().fork(&device);
        assert_eq!(weights(&fork), weights(&model));
        assert_eq!(record_values(&fork), master);
        let loss = loss(&fork);
        let stepped = step(&mut optimizer, LR, fork, loss);
        assert_ne!(weights(&stepped), weights(&model));
        assert_eq!(record_values(&stepped).len(), master.len());
    }
}

/// An optimizer's clone shares the state.
#[test]
fn a_cloned_optimizer_continues_the_same_state() {
    for device in devices() {
        let (mut model, offload) = offloaded(FloatDType::F32, &device);
        let mut turns = [offload.optimizer(), offload.optimizer()];
        turns[1] = turns[0].clone();
        let (mut reference, mut plain) = (layer(1, &device), adamw().init());
        for i in 0..4 {
            let (a, b) = (loss(&model), loss(&reference));
            model = step(&mut turns[i % 2], LR, model, a);
            reference = step(&mut plain, LR, reference, b);
        }
        assert_models_close(&model, &reference, 1e-6, 1e-6);
        let states = crate::common::optimizer_state(&turns[0]);
        assert!(states.iter().all(|state| state.time == 4));
    }
}
