//! What cannot work is refused with a sentence that says what to do, and with no weight changed.

use burn::module::{Module, Param, ParamGroup};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_zero_offload::{OffloadConfig, OffloadError, SimdLevel, WithOffload};

use crate::common::layer::{layer, loss, offloaded};
use crate::common::{config, devices, panic_of, step, tensor, weights};

const LR: f64 = 1e-2;

#[test]
fn calling_init_twice_is_refused() {
    for device in devices() {
        let (model, ..) = offloaded(&device);
        let error = AdamConfig::new()
            .with_offload(OffloadConfig::new())
            .init(model)
            .unwrap_err();
        assert!(matches!(&error, OffloadError::AlreadyOffloaded { path } if path == "weight"));
        assert!(error.to_string().contains("Call `init` once"), "{error}");
    }
}

#[test]
fn a_model_without_anything_to_train_is_refused() {
    let device = Device::flex();
    for model in [
        layer(1, &device),
        layer(1, &device.clone().autodiff()).no_grad(),
    ] {
        let error = AdamConfig::new()
            .with_offload(OffloadConfig::new())
            .init(model)
            .unwrap_err();
        assert!(matches!(error, OffloadError::NothingToTrain));
    }
}

#[test]
fn options_that_cannot_be_honoured_are_errors() {
    let device = Device::flex().autodiff();
    let init = |config: OffloadConfig| {
        AdamConfig::new()
            .with_offload(config)
            .init(layer(1, &device))
            .unwrap_err()
    };
    let error = init(config(FloatDType::F64));
    assert!(matches!(
        error,
        OffloadError::UnsupportedDType {
            dtype: FloatDType::F64,
            ..
        }
    ));
    let error = init(OffloadConfig::new().with_threads(Some(0)));
    assert!(matches!(
        error,
        OffloadError::OutOfRange {
            name: "threads",
            ..
        }
    ));
    let foreign = SimdLevel::ALL
        .into_iter()
        .find(|simd| !simd.is_available())
        .unwrap();
    let error = init(OffloadConfig::new().with_simd(Some(foreign)));
    assert!(matches!(error, OffloadError::UnsupportedSimd(level) if level == foreign));
    let error = AdamConfig::new()
        .with_offload(OffloadConfig::new())
        .with_group(ParamGroup::all(), AdamWConfig::new().with_beta_1(2.0))
        .init(layer(1, &device))
        .unwrap_err();
    assert!(matches!(
        error,
        OffloadError::OutOfRange { name: "beta_1", .. }
    ));
}

#[test]
fn unfreezing_what_was_frozen_at_init_is_refused() {
    let device = Device::flex().autodiff();
    let model = layer(1, &device).freeze_group(ParamGroup::from_predicate("bias"));
    let (model, offload) = AdamWConfig::new()
        .with_offload(config(FloatDType::F32))
        .init(model)
        .unwrap();
    let mut optimizer = offload.optimizer();
    let model = model.unfreeze();
    let loss = loss(&model);
    let text = panic_of(|| drop(step(&mut optimizer, LR, model, loss)));
    assert!(
        text.contains("was frozen") && text.contains("before `init`"),
        "{text}"
    );
}

/// burn-train's DDP marks parameters as distributed and all-reduces gradients on the devices. Burn
/// itself refuses it on Flex.
#[cfg(feature = "cpu")]
#[test]
fn distributed_data_parallel_is_refused() {
    let device = Device::cpu().autodiff();
    let (model, ..) = offloaded(&device);
    let model = model.map(&mut burn::train::ModuleSharder);
    let text = panic_of(|| drop(loss(&model)));
    assert!(text.contains("distributed data parallel"), "{text}");
}

#[test]
fn stepping_a_model_of_another_shape_is_refused() {
    let device = Device::flex().autodiff();
    let (_, _, mut optimizer) = offloaded(&device);
    let other = LinearConfig::new(3, 3).init(&device);
    let loss = other.forward(tensor([2, 3], 1, &device)).mean();
    let text = panic_of(|| drop(step(&mut optimizer, LR, other, loss)));
    assert!(text.contains("`weight` has another shape"), "{text}");
}

/// A use through `val()` leaves a placeholder, one through `base()` a real gradient: in one backward
/// they cannot be told apart. That is refused, with no weight changed.
#[test]
fn using_a_weight_through_the_tap_and_past_it_in_one_backward_is_refused() {
    for device in devices() {
        let (model, offload, mut optimizer) = offloaded(&device);
        let kept = model.clone();
        let before = weights(&kept);
        let x = tensor([3, 4], 5, &device);
        let mixed = model.forward(x).mean() + model.weight.base().mean();
        let text = panic_of(|| drop(step(&mut optimizer, LR, model, mixed)));
        assert!(text.contains("both `val()` and `base()`"), "{text}");
        assert_eq!(weights(&kept), before);
        assert_eq!(offload.memory().host_gradients, 0);
        let x = tensor([3, 4], 5, &device);
        let mixed = kept.forward(x).mean() + kept.weight.base().mean();
        let grads = GradientsParams::from_grads(mixed.backward(), &kept);
        let text = offload.collect(&kept, grads).err().map(|e| e.to_string());
        let text = text.expect("it is refused before the step, too");
        assert!(text.contains("both `val()` and `base()`"), "{text}");
        assert_eq!(offload.memory().host_gradients, 0);
        let again = loss(&kept);
        assert_ne!(weights(&step(&mut optimizer, LR, kept, again)), before);
    }
}

/// A parameter added after `init` has no place on the host.
#[test]
fn a_parameter_added_after_init_is_refused() {
    let device = Device::flex().autodiff();
    let model = Linear {
        bias: None,
        ..layer(1, &device)
    };
    let (mut model, offload) = AdamWConfig::new()
        .with_offload(config(FloatDType::F32))
        .init(model)
        .unwrap();
    model.bias = Some(Param::from_tensor(Tensor::zeros([4], &device)));
    let mut optimizer = offload.optimizer();
    let loss = loss(&model);
    let text = panic_of(|| drop(step(&mut optimizer, LR, model, loss)));
    assert!(text.contains("not part of the model"), "{text}");
}

/// A misspelt group would otherwise go unnoticed.
#[test]
fn a_group_that_matches_nothing_is_refused() {
    let device = Device::flex().autodiff();
    let init = |config: OffloadConfig, group: &str| {
        let error = AdamWConfig::new()
            .with_offload(config)
            .with_group(ParamGroup::from_predicate("bias"), AdamWConfig::new())
            .with_group(ParamGroup::from_predicate(group), AdamWConfig::new())
            .init(layer(1, &device))
            .err();
        error.map(|error| error.to_string())
    };
    let config = OffloadConfig::new;
    let text = init(config(), "biass").expect("it matches nothing");
    assert!(
        text.contains("group number 1 (counted from 0)") && text.contains("`weight`"),
        "{text}"
    );
    // One that is overruled by a later group matches all the same.
    assert_eq!(init(config(), "bias"), None);
    let head = config().with_full_precision(Some(ParamGroup::from_predicate("head")));
    let text = init(head, "bias").expect("there is no head");
    assert!(text.contains("`with_full_precision`"), "{text}");
}
