//! The loop of the README: a model, one added line, and Burn's training loop as it always was.
//!
//! ```sh
//! cargo run --release -p quickstart
//! ```

use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use burn::tensor::{Distribution, FloatDType};
use burn_zero_offload::{OffloadConfig, OffloadError, WithOffload};

/// Learns to turn points of the plane into their distance from the origin.
#[derive(Module, Debug)]
struct Model {
    hidden: Linear,
    output: Linear,
}

impl Model {
    fn loss(&self, points: Tensor<2>) -> Tensor<1> {
        let distance = points.clone().powf_scalar(2.0).sum_dim(1).sqrt();
        let error = self.output.forward(self.hidden.forward(points).tanh()) - distance;
        error.cast(FloatDType::F32).powf_scalar(2.0).mean()
    }
}

fn main() -> Result<(), OffloadError> {
    let device = Device::flex().autodiff();
    device.clone().inner().seed(0);
    let model = Model {
        hidden: LinearConfig::new(2, 256).init(&device),
        output: LinearConfig::new(256, 1).init(&device),
    };

    let (mut model, offload) = AdamWConfig::new()
        .with_weight_decay(0.01)
        .with_offload(OffloadConfig::new())
        .init(model)?;
    let mut optim = offload.optimizer();

    for step in 0..=500 {
        let points = Tensor::<2>::random([256, 2], Distribution::Uniform(-1.0, 1.0), &device);
        // Weights in half precision want inputs in half precision.
        let loss = model.loss(points.cast(offload.dtype()));
        if step % 100 == 0 {
            println!(
                "step {step:>3}  loss {:.5}",
                loss.clone().into_scalar::<f32>()
            );
        }
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-3, model, grads);
    }
    println!(
        "\nweights on the device: {:?}\n{}",
        offload.dtype(),
        offload.memory()
    );
    Ok(())
}
