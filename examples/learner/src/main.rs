//! The model of the quickstart under burn-train's `Learner`: epochs, validation, checkpoints, the
//! dashboard. Nothing in it knows about offloading but the two lines that make model and optimizer, and
//! two metrics that show what offloading does.
//!
//! ```sh
//! cargo run --release -p learner
//! ```

use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn::tensor::FloatDType;
use burn::train::metric::LossMetric;
use burn::train::{
    InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_zero_offload::{InPlace, OffloadConfig, OffloadError, OffloadMetric, WithOffload};

const EPOCHS: usize = 5;
const BATCH: usize = 64;
const TRAIN: usize = 8192;

#[derive(Module, Debug)]
struct Model {
    hidden: Linear,
    output: Linear,
}

/// Points of the plane and their distance from the origin.
#[derive(Clone, Debug)]
struct Batch {
    points: Tensor<2>,
    distances: Tensor<2>,
}

#[derive(Clone)]
struct Points;

impl Batcher<[f32; 2], Batch> for Points {
    fn batch(&self, items: Vec<[f32; 2]>, device: &Device) -> Batch {
        let rows = items.len();
        let distances: Vec<f32> = items.iter().map(|[x, y]| x.hypot(*y)).collect();
        let points = TensorData::new(items.concat(), [rows, 2]);
        Batch {
            points: Tensor::from_data(points, device),
            distances: Tensor::from_data(TensorData::new(distances, [rows, 1]), device),
        }
    }
}

impl Model {
    fn run(&self, batch: Batch) -> RegressionOutput {
        // Weights in half precision want inputs in half precision; the loss is in f32.
        let dtype = FloatDType::from(self.hidden.weight.base().dtype());
        let hidden = self.hidden.forward(batch.points.cast(dtype)).tanh();
        let output = self.output.forward(hidden).cast(FloatDType::F32);
        let loss = (output.clone() - batch.distances.clone())
            .powf_scalar(2.0)
            .mean();
        RegressionOutput::new(loss, output, batch.distances)
    }
}

impl TrainStep for Model {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let output = self.run(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Model {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> RegressionOutput {
        self.run(batch)
    }
}

/// Points on a fine spiral over the unit square: no file, no download, the same on every run.
fn loader(first: usize, count: usize) -> Arc<dyn DataLoader<Batch>> {
    let fraction = |i: usize, step: f64| ((i as f64 * step).fract() * 2.0 - 1.0) as f32;
    let points = (first..first + count).map(|i| [fraction(i, 0.618_034), fraction(i, 0.754_878)]);
    DataLoaderBuilder::new(Points)
        .batch_size(BATCH)
        .shuffle(1)
        .build(InMemDataset::new(points.collect()))
}

fn main() -> Result<(), OffloadError> {
    let device = Device::flex().autodiff();
    let model = Model {
        hidden: LinearConfig::new(2, 256).init(&device),
        output: LinearConfig::new(256, 1).init(&device),
    };

    let (model, offload) = AdamWConfig::new()
        .with_offload(OffloadConfig::new())
        .init(model)?;
    let steps = EPOCHS * TRAIN / BATCH;
    let schedule = CosineAnnealingLrSchedulerConfig::new(2e-3, steps)
        .init()
        .expect("the rate and the number of steps are constants of this file");

    let result = SupervisedTraining::new("learner-out", loader(0, TRAIN), loader(TRAIN, 1024))
        .metric_train_numeric(LossMetric::new())
        .metric_train_numeric(OffloadMetric::grad_norm(&offload))
        .metric_train_numeric(OffloadMetric::skipped_steps(&offload))
        .metric_valid_numeric(LossMetric::new())
        .with_default_checkpointers()
        .num_epochs(EPOCHS)
        .summary()
        // `InPlace` spares the second handle to the weights that `Learner` keeps during a step.
        .launch(Learner::new(
            InPlace::new(model),
            offload.optimizer(),
            schedule,
        ));

    // The trained model is in validation mode; what it saves are the fp32 master weights.
    result
        .model
        .save_file("learner-out/model")
        .expect("the output folder can be written");
    println!("{}", offload.memory());
    Ok(())
}
