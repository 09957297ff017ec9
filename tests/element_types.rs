//! Which element types a model's parameters may have, and have on the device.

use burn::module::{Module, Param, ParamGroup};
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_zero_offload::{OffloadConfig, OffloadError, WithOffload};

use crate::common::{config, devices, param, read, step, tensor, weights};

const LR: f64 = 1e-2;

fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_weight_decay(0.1)
}

#[derive(Module, Debug)]
struct Mixed {
    body: Linear,
    head: Linear,
}

/// acceptance.md, parameters 56: half-precision and full-precision parameters in one model; a group
/// is kept in f32 and the model casts its input.
#[test]
fn a_head_kept_in_full_precision() {
    for device in devices() {
        let layer = |i| Linear {
            weight: param([4, 4], i, &device),
            bias: None,
        };
        let model = Mixed {
            body: layer(1),
            head: layer(2),
        };
        let config =
            config(FloatDType::BF16).with_full_precision(Some(ParamGroup::from_predicate("head")));
        let (mut model, offload) = adamw().with_offload(config).init(model).unwrap();
        assert_eq!(model.body.weight.val().dtype(), DType::BF16);
        assert_eq!(model.head.weight.val().dtype(), DType::F32);
        assert_eq!(offload.memory().device_weights, 16 * 2 + 16 * 4);
        let mut optimizer = offload.optimizer();
        let before = weights(&model);
        for _ in 0..2 {
            let x = tensor([2, 4], 5, &device).cast(offload.dtype());
            let h = model.body.forward(x).cast(FloatDType::F32);
            let loss = model.head.forward(h).powf_scalar(2.0).mean();
            model = step(&mut optimizer, LR, model, loss);
        }
        for ((path, before), (_, after)) in before.iter().zip(weights(&model)) {
            assert_ne!(*before, after, "{path}");
        }
    }
}

#[test]
fn a_model_that_is_in_half_precision_already() {
    for device in devices() {
        let weight = param([4, 4], 1, &device)
            .map(|t| Tensor::from_inner(t.inner().cast(FloatDType::F16)).require_grad());
        let model = Linear { weight, bias: None };
        let start = read(&model.weight.val());
        let (model, offload) = adamw()
            .with_offload(config(FloatDType::BF16))
            .init(model)
            .unwrap();
        assert_eq!(model.weight.val().dtype(), DType::BF16);
        assert_eq!(offload.memory().host_master, 64);
        // The master keeps what f16 had and bf16 has not.
        let plain = LinearConfig::new(4, 4).with_bias(false).init(&device);
        let saved = plain.load_record(model.into_record());
        assert_eq!(read(&saved.weight.val()), start);
    }
}

#[test]
fn f64_parameters_are_refused_by_name() {
    let device = Device::flex().autodiff();
    let weight = Param::from_tensor(Tensor::<2>::ones([2, 2], (&device, DType::F64)));
    let model = Linear { weight, bias: None };
    let error = adamw()
        .with_offload(OffloadConfig::new())
        .init(model)
        .unwrap_err();
    assert!(
        matches!(&error, OffloadError::UnsupportedParameter { path, dtype: DType::F64 }
        if path == "weight")
    );
}
