//! Ways to use an offloaded model that are not the plain loop, and what they do. Those that are refused
//! are in `refusals.rs`.

use burn::grad_clipping::GradientClipping;
use burn::module::{Module, ParamGroup};
use burn::nn::Linear;
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams};
use burn::tensor::{Device, FloatDType};
use burn_zero_offload::{OffloadConfig, WithOffload};

use crate::common::layer::{layer, loss, offloaded};
use crate::common::{assert_models_close, config, devices, read, step, tensor, weights};

const LR: f64 = 1e-2;

/// Left out, the element type is the best the device computes in.
#[test]
fn the_element_type_is_the_devices_best() {
    for device in devices() {
        let (model, offload) = AdamConfig::new()
            .with_offload(OffloadConfig::new())
            .init(layer(1, &device))
            .unwrap();
        let best = [FloatDType::BF16, FloatDType::F16, FloatDType::F32]
            .into_iter()
            .find(|&dtype| device.supports_dtype(dtype))
            .unwrap();
        assert_eq!(offload.dtype(), best);
        assert_eq!(FloatDType::from(model.weight.val().dtype()), best);
    }
}

/// Two losses in turn: the discriminator's also reaches the generator, whose gradients are dropped.
#[test]
fn a_gan_trains_two_models_in_turn() {
    for device in devices() {
        let adam = || AdamConfig::new();
        let offload = |model| {
            adam()
                .with_offload(config(FloatDType::F32))
                .init(model)
                .unwrap()
        };
        let (mut g, generator) = offload(layer(1, &device));
        let (mut d, discriminator) = offload(layer(3, &device));
        let (mut rg, mut rd) = (layer(1, &device), layer(3, &device));
        let (mut og, mut od) = (generator.optimizer(), discriminator.optimizer());
        let (mut pg, mut pd) = (adam().init(), adam().init());
        let noise = tensor([3, 4], 9, &device);
        let judge = |g: &Linear, d: &Linear| d.forward(g.forward(noise.clone()).tanh()).mean();
        for _ in 0..4 {
            let (a, b) = (judge(&g, &d), judge(&rg, &rd));
            d = step(&mut od, LR, d, a);
            generator.discard_gradients();
            rd = step(&mut pd, LR, rd, b);

            let (a, b) = (judge(&g, &d) * -1.0, judge(&rg, &rd) * -1.0);
            g = step(&mut og, LR, g, a);
            discriminator.discard_gradients();
            rg = step(&mut pg, LR, rg, b);
        }
        assert_models_close(&g, &rg, 1e-6, 1e-6);
        assert_models_close(&d, &rd, 1e-6, 1e-6);
    }
}

#[derive(Module, Debug)]
struct Gan {
    generator: Linear,
    discriminator: Linear,
}

/// One `Offload` for both halves, each stepped on its own: slots are found although the paths within
/// a half are shorter than within the whole.
#[test]
fn parts_of_a_model_can_be_stepped_on_their_own() {
    for device in devices() {
        let build = || Gan {
            generator: layer(1, &device),
            discriminator: layer(3, &device),
        };
        let (mut gan, offload) = AdamConfig::new()
            .with_offload(config(FloatDType::F32))
            .init(build())
            .unwrap();
        let mut reference = build();
        let (mut ours, mut plain) = (offload.optimizer(), AdamConfig::new().init());
        for _ in 0..3 {
            let (a, b) = (loss(&gan.generator), loss(&reference.generator));
            gan.generator = step(&mut ours, LR, gan.generator, a);
            reference.generator = step(&mut plain, LR, reference.generator, b);
            let (a, b) = (loss(&gan.discriminator), loss(&reference.discriminator));
            gan.discriminator = step(&mut ours, LR, gan.discriminator, a);
            reference.discriminator = step(&mut plain, LR, reference.discriminator, b);
        }
        assert_models_close(&gan, &reference, 1e-6, 1e-6);
    }
}

#[test]
fn discarded_gradients_leave_no_trace() {
    for device in devices() {
        let (model, offload, mut optimizer) = offloaded(&device);
        (loss(&model) * 100.0).backward();
        offload.discard_gradients();
        assert_eq!(offload.memory().host_gradients, 0);
        let first = loss(&model);
        let model = step(&mut optimizer, LR, model, first);
        let (fresh, _, mut other) = offloaded(&device);
        let first = loss(&fresh);
        let fresh = step(&mut other, LR, fresh, first);
        assert_eq!(weights(&model), weights(&fresh));
    }
}

/// Freezing after `init` stops a parameter, unfreezing lets it go on where it was.
#[test]
fn freezing_and_unfreezing_after_init() {
    for device in devices() {
        let (mut model, _, mut optimizer) = offloaded(&device);
        let (mut reference, mut plain) = (layer(1, &device), AdamWConfig::new().init());
        let bias = || ParamGroup::from_predicate("bias");
        for i in 0..6 {
            match i {
                2 => {
                    (model, reference) =
                        (model.freeze_group(bias()), reference.freeze_group(bias()))
                }
                4 => {
                    (model, reference) = (
                        model.unfreeze_group(bias()),
                        reference.unfreeze_group(bias()),
                    )
                }
                _ => {}
            }
            let resting = read(&model.bias.as_ref().unwrap().val());
            let (a, b) = (loss(&model), loss(&reference));
            model = step(&mut optimizer, LR, model, a);
            reference = step(&mut plain, LR, reference, b);
            let moved = read(&model.bias.as_ref().unwrap().val()) != resting;
            assert_eq!(moved, !(2..4).contains(&i));
        }
        assert_models_close(&model, &reference, 1e-6, 1e-6);
    }
}

/// `materialize` takes the taps off. Gradients then stay on the device and reach the optimizer in
/// full, which still updates the master weights.
#[test]
fn materialize_drops_the_taps() {
    for device in devices() {
        let (model, offload, mut optimizer) = offloaded(&device);
        let (mut reference, mut plain) = (layer(1, &device), AdamWConfig::new().init());
        let mut model = model.materialize();
        loss(&model).backward();
        assert_eq!(offload.memory().host_gradients, 0);
        for _ in 0..3 {
            let (a, b) = (loss(&model), loss(&reference));
            let grads = a.backward();
            let full = model.weight.grad(&grads).unwrap();
            assert_eq!(full.dims(), [4, 4]);
            let grads = GradientsParams::from_grads(grads, &model);
            model = optimizer.step(LR, model, grads);
            reference = step(&mut plain, LR, reference, b);
        }
        assert_models_close(&model, &reference, 1e-6, 1e-6);
        // Offloading the result anew is fine.
        let again = AdamConfig::new()
            .with_offload(config(FloatDType::F32))
            .init(model);
        assert!(again.is_ok());
    }
}

/// Groups belong to the builder: one added to the optimizer meets placeholders, which are NaN, so that
/// the loss shows it instead of the group silently not training.
#[test]
fn a_group_added_to_the_optimizer_shows_as_nan() {
    for device in devices() {
        let (model, _, optimizer) = offloaded(&device);
        let mut optimizer =
            optimizer.with_group(ParamGroup::all(), AdamConfig::new().build(), None);
        let first = loss(&model);
        let model = step(&mut optimizer, LR, model, first);
        assert!(loss(&model).into_scalar::<f32>().is_nan());
    }
}

/// Clipping belongs to the builder: set on the optimizer it has no gradient to clip, as documented.
#[test]
fn clipping_set_on_the_optimizer_has_nothing_to_clip() {
    for device in devices() {
        let (model, _, optimizer) = offloaded(&device);
        let mut optimizer = optimizer.with_grad_clipping(GradientClipping::Norm(1e-9));
        let first = loss(&model);
        let clipped = step(&mut optimizer, LR, model, first);
        let (fresh, _, mut other) = offloaded(&device);
        let first = loss(&fresh);
        assert_eq!(
            weights(&clipped),
            weights(&step(&mut other, LR, fresh, first))
        );
    }
}

#[test]
fn the_engine_ends_with_its_last_handle() {
    let device = Device::flex().autodiff();
    for _ in 0..50 {
        let (model, offload, optimizer) = offloaded(&device);
        loss(&model).backward();
        drop((offload, optimizer));
        drop(model);
    }
    let threads = std::fs::read_dir("/proc/self/task")
        .map(|tasks| tasks.count())
        .unwrap_or(0);
    assert!(threads < 200, "{threads} threads are left of 50 engines");
}
