//! A whole optimizer walk over many small parameters, against one parameter of the same total: what a
//! tensor costs besides its elements.
//!
//! ```sh
//! cargo bench -p burn-zero-offload --bench tensors -- [TENSORS] [ELEMENTS]
//! ```
//!
//! 10000 tensors of 6400 elements unless the arguments say otherwise. Medians of nine walks after two that
//! do not count, with gradients in place; Burn's own AdamW in f32 beside it. The device is that of the first
//! CubeCL backend compiled in, else Flex.

#![allow(missing_docs)]

#[path = "common/device.rs"]
mod device;

use std::time::Instant;

use burn::module::{Module, Param};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_zero_offload::{Offload, OffloadConfig, StatePrecision, WithOffload};

#[derive(Module, Debug)]
struct Many {
    tensors: Vec<Param<Tensor<1>>>,
}

impl Many {
    fn new(count: usize, len: usize, device: &Device) -> Self {
        let tensor = |_| Param::from_tensor(Tensor::full([len], 0.01, device));
        Self {
            tensors: (0..count).map(tensor).collect(),
        }
    }

    /// A loss of which every element has a gradient.
    fn loss(&self) -> Tensor<1> {
        let sums = self.tensors.iter().map(|tensor| tensor.val().sum());
        sums.map(|sum| sum.cast(FloatDType::F32))
            .reduce(|all, sum| all + sum)
            .expect("a model has parameters")
    }
}

/// Median seconds of a walk.
fn walk(mut model: Many, mut optimizer: ModuleOptimizer, offload: Option<&Offload>) -> f64 {
    let mut seconds = Vec::new();
    for number in 0..11 {
        let grads = GradientsParams::from_grads(model.loss().backward(), &model);
        if let Some(offload) = offload {
            offload.flush().expect("gradients arrive");
        }
        let started = Instant::now();
        model = optimizer.step(1e-4, model, grads);
        if number >= 2 {
            seconds.push(started.elapsed().as_secs_f64());
        }
    }
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn main() {
    let count = device::argument(0, "TENSORS").unwrap_or(10_000).max(1);
    let len = device::argument(1, "ELEMENTS").unwrap_or(6400).max(1);
    let device = device::device().autodiff();
    let adamw = || AdamWConfig::new().with_weight_decay(0.01);
    let row = |name: &str, [many, one]: [f64; 2]| {
        println!(
            "{name:<28} {count} tensors {:>9.2} ms, one {:>9.2} ms, {:>5.2} x, {:>6.2} us more per tensor",
            many * 1e3,
            one * 1e3,
            many / one,
            (many - one) / count as f64 * 1e6
        );
    };
    for kept in [StatePrecision::SplitMaster, StatePrecision::Bf16Moments] {
        row(
            &format!("offloaded, {kept:?}"),
            [(count, len), (1, count * len)].map(|(count, len)| {
                let config = OffloadConfig::new()
                    .with_dtype(Some(FloatDType::BF16))
                    .with_state_precision(Some(kept));
                let model = adamw()
                    .with_offload(config)
                    .init(Many::new(count, len, &device));
                let (model, offload) = model.expect("vectors can be offloaded");
                walk(model, offload.optimizer(), Some(&offload))
            }),
        );
    }
    row(
        "Burn's AdamW in f32",
        [(count, len), (1, count * len)].map(|(count, len)| {
            let model = Many::new(count, len, &device);
            walk(model, adamw().init(), None)
        }),
    );
}
