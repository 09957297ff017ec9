//! burn-train's `Learner` runs unchanged: epochs, validation, accumulation, checkpoints, resuming.

use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::module::Module;
use burn::nn::Linear;
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn::train::logger::InMemoryMetricLogger;
use burn::train::metric::LossMetric;
use burn::train::{
    InferenceStep, Learner, LearnerModel, RegressionOutput, SupervisedTraining, TrainOutput,
    TrainStep,
};
use burn_zero_offload::{LossScaleConfig, Offload, Schedule, WithOffload};

use crate::common::{assert_models_close, config, devices, param, values, weights};

#[derive(Module, Debug)]
struct Net {
    a: Linear,
    b: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        // Drawn from no generator: a device's is shared by all threads, and tests run side by side.
        let layer = |shape: [usize; 2], seed| Linear {
            weight: param(shape, seed, device),
            bias: Some(param([shape[1]], seed + 1, device)),
        };
        Self {
            a: layer([3, 8], 21),
            b: layer([8, 2], 23),
        }
    }

    fn output(&self, batch: Batch) -> RegressionOutput {
        let dtype = FloatDType::from(self.a.weight.base().dtype());
        let h = self
            .b
            .forward(self.a.forward(batch.inputs.cast(dtype)).tanh());
        let h = h.cast(FloatDType::F32);
        let loss = (h.clone() - batch.targets.clone()).powf_scalar(2.0).mean();
        RegressionOutput::new(loss, h, batch.targets)
    }
}

#[derive(Clone, Debug)]
struct Batch {
    inputs: Tensor<2>,
    targets: Tensor<2>,
}

#[derive(Clone)]
struct Points;

impl Batcher<u64, Batch> for Points {
    fn batch(&self, items: Vec<u64>, device: &Device) -> Batch {
        let gather = |width: usize, shift: u64| {
            let data: Vec<f32> = items
                .iter()
                .flat_map(|i| values(width, i + shift))
                .collect();
            Tensor::from_data(TensorData::new(data, [items.len(), width]), device)
        };
        Batch {
            inputs: gather(3, 1),
            targets: gather(2, 1000),
        }
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let output = self.output(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> RegressionOutput {
        self.output(batch)
    }
}

fn loader(items: std::ops::Range<u64>) -> Arc<dyn DataLoader<Batch>> {
    DataLoaderBuilder::new(Points)
        .batch_size(4)
        .build(InMemDataset::new(items.collect()))
}

struct Run<'a> {
    folder: &'a Path,
    epochs: usize,
    accumulation: usize,
    resume: Option<usize>,
}

impl Run<'_> {
    fn launch<M>(&self, model: M, optimizer: ModuleOptimizer) -> M
    where
        M: TrainStep<Input = Batch, Output = RegressionOutput>
            + InferenceStep<Input = Batch, Output = RegressionOutput>
            + LearnerModel,
    {
        let schedule = LinearLrSchedulerConfig::new(1e-2, 1e-3, 40).init().unwrap();
        // 20 items in batches of 4: five batches, so windows of 4 end with a short one.
        let mut training = SupervisedTraining::new(self.folder, loader(0..20), loader(50..54))
            .num_epochs(self.epochs)
            .grads_accumulation(self.accumulation)
            .with_default_checkpointers()
            .with_checkpointing_strategy(KeepLastNCheckpoints::new(9))
            .with_metric_logger(InMemoryMetricLogger::new())
            .metric_train_numeric(LossMetric::new())
            .metric_valid_numeric(LossMetric::new())
            .with_application_logger(None);
        if let Some(epoch) = self.resume {
            training = training.checkpoint(epoch);
        }
        let result = training.launch(Learner::new(model, optimizer, schedule));
        assert!(result.error.is_none(), "{:?}", result.error);
        result.model
    }
}

fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_weight_decay(0.1)
}

fn offloaded(dtype: FloatDType, device: &Device) -> (Net, ModuleOptimizer) {
    scheduled(dtype, Schedule::Synchronous, device)
}

fn scheduled(dtype: FloatDType, schedule: Schedule, device: &Device) -> (Net, ModuleOptimizer) {
    let config = config(dtype).with_schedule(schedule);
    let made = adamw().with_offload(config).init(Net::new(device));
    let (model, offload) = made.unwrap();
    (model, offload.optimizer())
}

#[test]
fn epochs_with_and_without_accumulation_equal_the_plain_run() {
    for device in devices() {
        for accumulation in [1, 4] {
            let folder = tempfile::tempdir().unwrap();
            let run = Run {
                folder: folder.path(),
                epochs: 2,
                accumulation,
                resume: None,
            };
            let expected = run.launch(Net::new(&device), adamw().init());
            let (model, optimizer) = offloaded(FloatDType::F32, &device);
            let actual = run.launch(model, optimizer);
            assert_models_close(&actual, &expected, 1e-6, 1e-6);
        }
    }
}

/// Two epochs, then two more from the checkpoint in a fresh model, against four at a stretch.
#[test]
fn a_run_resumes_from_the_learners_checkpoint() {
    for device in devices() {
        for dtype in [FloatDType::F32, FloatDType::BF16] {
            let folder = tempfile::tempdir().unwrap();
            let run = |epochs, resume| Run {
                folder: folder.path(),
                epochs,
                accumulation: 1,
                resume,
            };
            let (model, optimizer) = offloaded(dtype, &device);
            run(2, None).launch(model, optimizer);
            let (model, optimizer) = offloaded(dtype, &device);
            let resumed = run(4, Some(2)).launch(model, optimizer);

            let folder = tempfile::tempdir().unwrap();
            let (model, optimizer) = offloaded(dtype, &device);
            let stretch = Run {
                folder: folder.path(),
                epochs: 4,
                accumulation: 1,
                resume: None,
            };
            assert_eq!(
                weights(&resumed),
                weights(&stretch.launch(model, optimizer))
            );
        }
    }
}

/// Validation, checkpoints and the clone that the learner keeps meet updates that are still running; with an
/// update pending for a round, it is no other run whether a checkpoint is taken or not.
#[test]
fn schedules_run_under_the_learner() {
    for device in devices() {
        let run = |schedule, accumulation| {
            let folder = tempfile::tempdir().unwrap();
            let run = Run {
                folder: folder.path(),
                epochs: 2,
                accumulation,
                resume: None,
            };
            let (model, optimizer) = scheduled(FloatDType::BF16, schedule, &device);
            let model = run.launch(model, optimizer);
            weights(&Net::new(&Device::flex()).load_record(model.into_record()))
        };
        // CubeCL's CPU runtime takes its time.
        let windows = if device == Device::flex().autodiff() {
            1..3
        } else {
            2..3
        };
        for accumulation in windows {
            let synchronous = run(Schedule::Synchronous, accumulation);
            assert_eq!(run(Schedule::ForwardOverlapped, accumulation), synchronous);
            let delayed = run(Schedule::Delayed { warmup: 2 }, accumulation);
            assert_ne!(delayed, synchronous);
            assert_eq!(run(Schedule::Delayed { warmup: 2 }, accumulation), delayed);
        }
    }
}

/// What a fit returns is in validation mode; its record still holds the masters.
#[test]
fn the_model_a_fit_returns_saves_its_masters() {
    for device in devices() {
        let folder = tempfile::tempdir().unwrap();
        let (model, optimizer) = offloaded(FloatDType::BF16, &device);
        let run = Run {
            folder: folder.path(),
            epochs: 1,
            accumulation: 1,
            resume: None,
        };
        let model = run.launch(model, optimizer);
        let plain = Net::new(&Device::flex()).load_record(model.clone().into_record());
        let (half, full) = (weights(&model), weights(&plain));
        assert_ne!(half, full);
        for ((_, half), (_, full)) in half.iter().zip(&full) {
            crate::common::assert_close(half, full, 1e-6, 0.005);
        }
    }
}

/// With `InPlace` the learner trains the same weights, also across a checkpoint, with one handle.
#[cfg(feature = "train")]
#[test]
fn in_place_changes_nothing_but_the_second_handle() {
    use burn_zero_offload::InPlace;

    for device in devices() {
        let folder = tempfile::tempdir().unwrap();
        let run = |epochs, resume| Run {
            folder: folder.path(),
            epochs,
            accumulation: 2,
            resume,
        };
        let (model, optimizer) = offloaded(FloatDType::BF16, &device);
        run(2, None).launch(InPlace::new(model), optimizer);
        let (model, optimizer) = offloaded(FloatDType::BF16, &device);
        let in_place = run(4, Some(2)).launch(InPlace::new(model), optimizer);

        let folder = tempfile::tempdir().unwrap();
        let (model, optimizer) = offloaded(FloatDType::BF16, &device);
        let plain = Run {
            folder: folder.path(),
            epochs: 4,
            accumulation: 2,
            resume: None,
        };
        let plain = plain.launch(model, optimizer);
        assert_eq!(weights(&in_place.into_inner()), weights(&plain));
    }
}

/// A model that scales its loss: the handle to the host side is a field that records leave out.
#[derive(Module, Debug)]
struct Scaled {
    net: Net,
    #[module(skip)]
    offload: Option<Offload>,
}

impl TrainStep for Scaled {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let output = self.net.output(batch);
        let loss = match &self.offload {
            Some(offload) => offload.scale(output.loss.clone()),
            None => output.loss.clone(),
        };
        TrainOutput::new(self, loss.backward(), output)
    }
}

impl InferenceStep for Scaled {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> RegressionOutput {
        self.net.output(batch)
    }
}

fn scaled(device: &Device) -> (Scaled, Offload) {
    let model = Scaled {
        net: Net::new(device),
        offload: None,
    };
    let scale = LossScaleConfig::Static(1024.0);
    let config = adamw().with_offload(config(FloatDType::F16).with_loss_scale(Some(scale)));
    let (mut model, offload) = config.init(model).unwrap();
    model.offload = Some(offload.clone());
    (model, offload)
}

/// In f16 under the learner, with a checkpoint in the middle: the same weights, and rounds are counted on.
#[test]
fn a_scaled_loss_trains_and_resumes_under_the_learner() {
    for device in devices() {
        let run =
            |folder: &tempfile::TempDir, epochs, resume, (model, offload): (Scaled, Offload)| {
                let run = Run {
                    folder: folder.path(),
                    epochs,
                    accumulation: 2,
                    resume,
                };
                let model = run.launch(model, offload.optimizer());
                (weights(&model), offload.report())
            };
        let folder = tempfile::tempdir().unwrap();
        run(&folder, 2, None, scaled(&device));
        let resumed = run(&folder, 4, Some(2), scaled(&device));
        let stretch = run(&tempfile::tempdir().unwrap(), 4, None, scaled(&device));
        assert_eq!(resumed.0, stretch.0);
        assert_eq!(resumed.1.round, stretch.1.round);
        assert_eq!((stretch.1.loss_scale, stretch.1.skips), (1024.0, 0));
        assert_eq!(stretch.1.passes, 1, "the last window of an epoch is short");
    }
}

/// Loss scale, gradient norm and skipped steps as metrics.
#[cfg(feature = "train")]
#[test]
fn the_dashboard_shows_scale_norm_and_skips() {
    use burn::data::dataloader::Progress;
    use burn::train::metric::{Metric, MetricMetadata, Numeric};
    use burn_zero_offload::OffloadMetric;

    let device = Device::flex().autodiff();
    let folder = tempfile::tempdir().unwrap();
    let (model, offload) = scaled(&device);
    let training = SupervisedTraining::new(folder.path(), loader(0..20), loader(50..54))
        .num_epochs(1)
        .metric_train_numeric(OffloadMetric::loss_scale(&offload))
        .metric_train_numeric(OffloadMetric::grad_norm(&offload))
        .metric_train_numeric(OffloadMetric::skipped_steps(&offload))
        .with_application_logger(None);
    let result = training.launch(Learner::new(model, offload.optimizer(), 1e-2));
    assert!(result.error.is_none(), "{:?}", result.error);
    let logged = |name: &str| {
        let path = folder.path().join(format!("train/epoch-1/{name}.log"));
        std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    };
    assert!(logged("Loss_Scale").starts_with("1024"));
    assert!(logged("Skipped_Steps").starts_with('0'));

    let mut norm = OffloadMetric::grad_norm(&offload);
    let metadata = MetricMetadata {
        progress: Progress::new(1, 1, None),
        iteration: Some(1),
        lr: None,
    };
    norm.update(&(), &metadata).unwrap();
    let expected = offload.report().grad_norm;
    assert_eq!(norm.value().map(|entry| entry.current()), Some(expected));
}
