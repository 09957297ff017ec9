//! The model of most tests: one linear layer.

use burn::nn::Linear;
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_zero_offload::{Offload, WithOffload};

use super::{config, param, tensor};

/// A layer from 4 to 4 values, the same for the same seed.
pub fn layer(seed: u64, device: &Device) -> Linear {
    Linear {
        weight: param([4, 4], seed, device),
        bias: Some(param([4], seed + 1, device)),
    }
}

/// A loss on fixed inputs, in `f32` whatever the weights are in.
pub fn loss(model: &Linear) -> Tensor<1> {
    let weight = model.weight.base();
    let x = tensor([3, 4], 5, &weight.device()).cast(FloatDType::from(weight.dtype()));
    model
        .forward(x)
        .cast(FloatDType::F32)
        .powf_scalar(2.0)
        .mean()
}

/// The layer of seed 1, offloaded in `f32` with AdamW's defaults.
pub fn offloaded(device: &Device) -> (Linear, Offload, ModuleOptimizer) {
    let adamw = AdamWConfig::new().with_offload(config(FloatDType::F32));
    let (model, offload) = adamw.init(layer(1, device)).unwrap();
    let optimizer = offload.optimizer();
    (model, offload, optimizer)
}
