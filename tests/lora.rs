//! LoRA adapters attached before `init` train offloaded: the factors are parameters like others,
//! their base stays frozen and as it is.

use burn::module::{Lora, Module};
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_zero_offload::{OffloadConfig, OffloadError, WithOffload};

use crate::common::{assert_close, config, devices, param, read, step, tensor};

fn adapted(device: &Device) -> Linear {
    device.clone().inner().seed(5);
    let base = Linear {
        weight: param([6, 4], 1, device),
        bias: Some(param([4], 2, device)),
    };
    base.apply_lora(Lora::new(2, 4.0))
}

fn loss(model: &Linear, dtype: FloatDType) -> Tensor<1> {
    let x = tensor([3, 6], 9, &model.weight.device()).cast(dtype);
    model
        .forward(x)
        .cast(FloatDType::F32)
        .powf_scalar(2.0)
        .mean()
}

#[test]
fn factors_train_as_without_offload() {
    for device in devices() {
        let mut reference = adapted(&device);
        let (mut model, offload) = AdamWConfig::new()
            .with_offload(config(FloatDType::F32))
            .init(reference.clone())
            .unwrap();
        let mut optimizer = offload.optimizer();
        let mut plain = AdamWConfig::new().init();
        assert_eq!(offload.memory().parameters, 6 * 2 + 2 * 4);
        for _ in 0..5 {
            let (a, b) = (
                loss(&model, FloatDType::F32),
                loss(&reference, FloatDType::F32),
            );
            model = step(&mut optimizer, 1e-2, model, a);
            reference = step(&mut plain, 1e-2, reference, b);
        }
        assert_close(
            &read(&model.weight.val()),
            &read(&reference.weight.val()),
            1e-6,
            1e-6,
        );
        assert_eq!(read(&model.weight.base()), read(&reference.weight.base()));
    }
}

#[test]
fn factors_are_in_half_precision_and_the_base_stays_as_it_is() {
    for device in devices() {
        let start = adapted(&device);
        let base = read(&start.weight.base());
        let (mut model, offload) = AdamWConfig::new()
            .with_offload(config(FloatDType::BF16))
            .init(start)
            .unwrap();
        let mut optimizer = offload.optimizer();
        let before = read(&model.weight.val());
        for _ in 0..3 {
            let loss = loss(&model, offload.dtype());
            model = step(&mut optimizer, 1e-2, model, loss);
        }
        assert_eq!(model.weight.base().dtype(), DType::F32);
        assert_eq!(read(&model.weight.base()), base);
        assert_eq!(model.weight.adapter().unwrap().a.val().dtype(), DType::BF16);
        assert_ne!(read(&model.weight.val()), before);
        let merged = model.valid().materialize();
        assert_eq!(merged.weight.dims(), [6, 4]);
    }
}

#[test]
fn a_trainable_base_is_refused() {
    let device = Device::flex().autodiff();
    let model = adapted(&device).unfreeze();
    let error = AdamWConfig::new()
        .with_offload(OffloadConfig::new())
        .init(model)
        .unwrap_err();
    let OffloadError::TrainableReparameterization { path, name } = &error else {
        panic!("{error}");
    };
    assert_eq!((path.as_str(), name.as_str()), ("weight", "lora"));
    assert!(error.to_string().contains("Freeze the base"));
}

/// A record of the factors goes into another process and back into a plain model.
#[test]
fn records_carry_the_factors() {
    for device in devices() {
        let (mut model, offload) = AdamWConfig::new()
            .with_offload(config(FloatDType::F32))
            .init(adapted(&device))
            .unwrap();
        let mut optimizer = offload.optimizer();
        for _ in 0..2 {
            let loss = loss(&model, FloatDType::F32);
            model = step(&mut optimizer, 1e-2, model, loss);
        }
        let plain = LinearConfig::new(6, 4)
            .init(&device)
            .apply_lora(Lora::new(2, 4.0));
        let plain = plain.load_record(model.clone().into_record());
        assert_eq!(read(&plain.weight.val()), read(&model.weight.val()));
    }
}
