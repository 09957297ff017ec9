//! One weight `w` with the loss `w^2 / 2`, whose gradient is `w`: SGD can be followed by hand.

use burn::module::{Module, Param};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_zero_offload::{Offload, OffloadConfig, WithOffload};

use super::read;

/// A model of one weight.
#[derive(Module, Debug)]
pub struct Scalar {
    pub w: Param<Tensor<1>>,
}

impl Scalar {
    /// The weight is 1.
    pub fn new(device: &Device) -> Self {
        Self {
            w: Param::from_data([1.0f32], device),
        }
    }

    pub fn loss(&self) -> Tensor<1> {
        let w = self.w.val();
        w.clone() * w / 2.0
    }

    /// What a use of the weight sees.
    pub fn value(&self) -> f32 {
        read(&self.w.val())[0]
    }

    /// What a record of the model has.
    pub fn saved(&self) -> f32 {
        let plain = Self::new(&Device::flex()).load_record(self.clone().into_record());
        plain.value()
    }
}

/// The model in f32, trained by SGD.
pub fn offloaded(config: OffloadConfig, device: &Device) -> (Scalar, Offload, ModuleOptimizer) {
    let config = config.with_dtype(Some(FloatDType::F32));
    let made = SgdConfig::new().with_offload(config);
    let (model, offload) = made.init(Scalar::new(device)).unwrap();
    let optimizer = offload.optimizer();
    (model, offload, optimizer)
}

/// A round at learning rate 0.1; the loss is multiplied by `factor`.
pub fn round(optimizer: &mut ModuleOptimizer, model: Scalar, factor: f32) -> Scalar {
    let loss = model.loss() * factor;
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    optimizer.step(0.1, model, grads)
}

/// Exact up to the rounding of `f32`.
#[track_caller]
pub fn assert_values(got: &[f32], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        let close = (*got as f64 - expected).abs() <= 3e-7;
        assert!(close, "{got} instead of {expected}");
    }
}
