//! A model built with half precision as the device's default: constants are in half precision from
//! the start, so nothing in the model has to be cast.
//!
//! A test binary of its own, since a device's defaults hold for the whole process.

#![allow(missing_docs)]

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, RotaryEncoding, RotaryEncodingConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{DType, Device, Distribution, FloatDType, IntDType, Tensor};
use burn_zero_offload::{OffloadConfig, WithOffload};

#[derive(Module, Debug)]
struct Rotary {
    query: Linear,
    rope: RotaryEncoding,
    out: Linear,
}

impl Rotary {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.out
            .forward(self.rope.forward(self.query.forward(x)).tanh())
    }
}

#[test]
fn a_rotary_encoding_without_any_cast() {
    let mut device = Device::flex();
    device.configure((FloatDType::BF16, IntDType::I32)).unwrap();
    let device = device.autodiff();
    device.clone().inner().seed(3);
    let model = Rotary {
        query: LinearConfig::new(8, 8).init(&device),
        rope: RotaryEncodingConfig::new(4, 8).init(&device),
        out: LinearConfig::new(8, 8).init(&device),
    };
    let (mut model, offload) = AdamWConfig::new()
        .with_offload(OffloadConfig::new())
        .init(model)
        .unwrap();
    assert_eq!(offload.dtype(), FloatDType::BF16);
    let mut optimizer = offload.optimizer();
    let x = Tensor::<3>::random([2, 4, 8], Distribution::Default, &device);
    assert_eq!(x.dtype(), DType::BF16);
    let mut curve = vec![];
    for _ in 0..60 {
        let loss = (model.forward(x.clone()) - x.clone())
            .powf_scalar(2.0)
            .mean();
        curve.push(loss.clone().into_scalar::<f32>());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, grads);
    }
    assert!(curve[59] < 0.5 * curve[0], "{curve:?}");
    // Masters and records are fp32 all the same.
    let record = model.into_record().into_bytes().unwrap();
    let plain = LinearConfig::new(8, 8).init(&Device::flex());
    let record = burn::store::ModuleRecord::from_bytes(record).unwrap();
    #[derive(Module, Debug)]
    struct Parts {
        query: Linear,
        out: Linear,
    }
    let loaded = Parts {
        query: plain.clone(),
        out: plain,
    }
    .load_record(record);
    assert_eq!(loaded.query.weight.val().dtype(), DType::F32);
}
