//! The training loop. It is Burn's plain loop, with offload as without.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::{GradientsAccumulator, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use burn_zero_offload::{MemoryReport, Offload, Trace};

use crate::checkpoint::{Checkpoint, State};
use crate::config::{Schedule, TrainConfig};
use crate::data::Corpus;
use crate::history::{History, Point};
use crate::interrupt;
use crate::model::Gpt;
use crate::optim;
use crate::progress::Progress;

/// A run: a model in training and all that belongs to it.
pub struct Run {
    device: Device,
    optim: ModuleOptimizer,
    scheduler: ModuleLrScheduler,
    /// The model, on a device with autodiff.
    pub model: Gpt,
    offload: Option<Offload>,
    /// Where the state of an offloaded model lived in the last step, before the gradients were used.
    pub memory: Option<MemoryReport>,
    /// The settings and the losses so far.
    pub state: State,
    /// Time spent in the steps of this process.
    pub elapsed: Duration,
    /// Steps taken in this process.
    pub steps: usize,
}

impl Run {
    /// Start a run with freshly initialized weights.
    ///
    /// # Errors
    ///
    /// Fails if the device is not part of this build or lacks the dtype.
    pub fn start(config: TrainConfig, corpus: &Corpus) -> Result<Self> {
        let device = config.device.device()?.autodiff();
        device.seed(config.seed);
        let (model, optim, offload) = optim::optimizer(&config, config.model().init(&device))?;
        Ok(Self {
            device,
            optim,
            scheduler: optim::scheduler(&config)?,
            model,
            memory: offload.as_ref().map(Offload::memory),
            offload,
            state: State {
                config,
                text: corpus.fingerprint(),
                history: History::default(),
            },
            elapsed: Duration::ZERO,
            steps: 0,
        })
    }

    /// Continue the run that `checkpoint` holds, with the settings `config`.
    ///
    /// # Errors
    ///
    /// Fails as [`start`](Self::start) does, and if the checkpoint cannot be read or the text has
    /// changed since.
    pub fn resume(config: TrainConfig, corpus: &Corpus, checkpoint: &Checkpoint) -> Result<Self> {
        let mut run = Self::start(config, corpus)?;
        ensure!(
            checkpoint.state.text == run.state.text,
            "the text is not the one the run was started on (the files of the cargo registry \
             change when crates are added): name a file of your own with --data to be able to \
             resume at any time"
        );
        (run.model, run.optim, run.scheduler) =
            checkpoint.load(run.model, run.optim, run.scheduler)?;
        run.state.history = checkpoint.state.history.clone();
        Ok(run)
    }

    /// Train until the last step or Ctrl-C, then finish all updates and save a checkpoint in `out`.
    ///
    /// # Errors
    ///
    /// Fails if the loss is no longer a number or the checkpoint cannot be written.
    pub fn train(&mut self, corpus: &Corpus, out: &Path) -> Result<()> {
        let progress = Progress::new(&self.state.config, self.state.history.points.len());
        while !self.finished() && !interrupt::requested() {
            let point = self.step(corpus);
            progress.report(self.state.history.points.len(), point);
            ensure!(
                point.loss.is_finite(),
                "the loss is {}: lower the learning rate",
                point.loss
            );
        }
        progress.finish();
        self.settle()?;
        self.save(out)
    }

    /// Finish the updates that are pending, and have the model hold them.
    ///
    /// With the delayed schedule the model lacks the last update. Between two steps that is as it should be:
    /// the next forward pass computes with the same weights, and `valid()` evaluates what it will see. After
    /// the last step nothing would ever put the update into the model, while the checkpoint has it. A run that
    /// goes on from here has a gradient that misses no update, as one that is resumed has.
    ///
    /// # Errors
    ///
    /// Fails if an update did.
    fn settle(&mut self) -> Result<()> {
        if let Some(offload) = &self.offload {
            self.model = offload.settle(self.model.clone())?;
        }
        Ok(())
    }

    /// Save a checkpoint in `out`.
    ///
    /// # Errors
    ///
    /// Fails if a file cannot be written.
    pub fn save(&self, out: &Path) -> Result<()> {
        Checkpoint::save(out, &self.model, &self.optim, &self.scheduler, &self.state)
    }

    /// How the weights are kept, in a few words.
    pub fn description(&self) -> String {
        match &self.offload {
            Some(offload) => {
                let updates = match self.state.config.schedule {
                    Schedule::Synchronous => "",
                    Schedule::Overlapped => ", updates overlapped",
                    Schedule::Delayed => ", updates delayed",
                };
                format!("{:?} with offload{updates}", offload.dtype()).to_lowercase()
            }
            None => "f32 without offload".into(),
        }
    }

    /// What became of the loss scale, if there is one.
    pub fn loss_scale(&self) -> Option<String> {
        let report = self.offload.as_ref()?.report();
        let scaled = report.loss_scale != 1.0 || report.next_loss_scale != 1.0;
        scaled.then(|| {
            let (scale, skips) = (report.next_loss_scale, report.skips);
            format!("Loss scale: {scale} in the end, {skips} steps skipped on the way to it")
        })
    }

    /// What the library wrote down of the steps of this process, if there is offload.
    pub fn trace(&self) -> Option<Trace> {
        self.offload.as_ref().map(Offload::trace)
    }

    /// Whether all steps are taken.
    pub fn finished(&self) -> bool {
        self.state.history.points.len() >= self.state.config.steps
    }

    /// One optimizer step, over all micro-batches.
    fn step(&mut self, corpus: &Corpus) -> Point {
        let start = Instant::now();
        let config = &self.state.config;
        let first = self.state.history.points.len() * config.accumulation;

        let mut accumulator = GradientsAccumulator::new();
        let mut losses = Vec::with_capacity(config.accumulation);
        for index in first..first + config.accumulation {
            let batch = corpus.batch(config.seed, index as u64, config.batch, config.context);
            let (inputs, targets) = batch.into_tensors(&self.device);
            // The gradients of the micro-batches add up to that of their mean.
            let loss = self
                .model
                .loss(inputs, targets)
                .div_scalar(config.accumulation as f64);
            // In f16 small gradients would vanish unscaled; in other types this does nothing.
            let scaled = match &self.offload {
                Some(offload) => offload.scale(loss.clone()),
                None => loss.clone(),
            };
            let grads = GradientsParams::from_grads(scaled.backward(), &self.model);
            accumulator.accumulate(&self.model, grads);
            losses.push(loss.inner());
        }

        self.memory = self.offload.as_ref().map(Offload::memory);
        let lr = self.scheduler.step();
        let rate = lr.base();
        self.model = self.optim.step(lr, self.model.clone(), accumulator.grads());

        // Read once a step, so that the device need not wait for the host at each micro-batch.
        let loss = Tensor::cat(losses, 0).sum().into_scalar();
        let elapsed = start.elapsed();
        self.elapsed += elapsed;
        self.steps += 1;
        let tokens_per_second = config.tokens_per_step() as f64 / elapsed.as_secs_f64();
        let point = Point {
            lr: rate,
            loss,
            tokens_per_second,
        };
        self.state.history.points.push(point);
        point
    }
}

#[cfg(test)]
mod schedules;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Precision;
    use crate::turns::turn;

    pub fn config() -> TrainConfig {
        TrainConfig::new()
            .with_layers(1)
            .with_width(16)
            .with_heads(2)
            .with_context(8)
            .with_batch(2)
            .with_steps(4)
            .with_warmup(Some(1))
    }

    pub fn corpus() -> Corpus {
        Corpus::split(b"Every text is a good text to test with. ".repeat(40), 8).unwrap()
    }

    pub fn losses(run: &Run) -> Vec<f64> {
        run.state.history.losses()
    }

    #[test]
    fn a_resumed_run_goes_on_as_if_it_had_not_stopped() {
        let _turn = turn();
        let corpus = corpus();
        let half = config().with_accumulation(2);
        for config in [
            half.clone(),
            half.with_dtype(Precision::F16),
            config().with_schedule(Schedule::Overlapped),
            config().with_offload(false),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let mut whole = Run::start(config.clone(), &corpus).unwrap();
            let mut stopped = Run::start(config.clone(), &corpus).unwrap();
            for _ in 0..4 {
                whole.step(&corpus);
            }
            for _ in 0..2 {
                stopped.step(&corpus);
            }
            // The second checkpoint takes the place of the first.
            stopped.save(dir.path()).unwrap();
            stopped.save(dir.path()).unwrap();

            let checkpoint = Checkpoint::open(dir.path()).unwrap();
            assert_eq!(checkpoint.state.config, config);
            let mut resumed = Run::resume(config, &corpus, &checkpoint).unwrap();
            assert_eq!(losses(&resumed), losses(&whole)[..2]);
            for _ in 0..2 {
                resumed.step(&corpus);
            }
            assert_eq!(losses(&resumed), losses(&whole));
            let rates = |run: &Run| {
                run.state
                    .history
                    .points
                    .iter()
                    .map(|p| p.lr)
                    .collect::<Vec<_>>()
            };
            assert_eq!(rates(&resumed), rates(&whole));
        }
    }

    #[test]
    fn only_f16_scales_its_loss() {
        let _turn = turn();
        for (dtype, scaled) in [(Precision::F16, true), (Precision::Bf16, false)] {
            let mut run = Run::start(config().with_dtype(dtype), &corpus()).unwrap();
            run.step(&corpus());
            assert_eq!(run.loss_scale().is_some(), scaled);
        }
    }

    #[test]
    fn a_checkpoint_of_another_text_is_refused() {
        let _turn = turn();
        let dir = tempfile::tempdir().unwrap();
        Run::start(config(), &corpus())
            .unwrap()
            .save(dir.path())
            .unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let other = Corpus::split(b"This is another text. ".repeat(40), 8).unwrap();
        assert!(Run::resume(config(), &other, &checkpoint).is_err());
    }

    #[test]
    fn the_loss_does_not_depend_on_the_number_of_micro_batches() {
        let _turn = turn();
        for accumulation in [1, 4] {
            let mut run = Run::start(config().with_accumulation(accumulation), &corpus()).unwrap();
            let loss = run.step(&corpus()).loss;
            assert!((loss - 256f32.ln()).abs() < 0.2, "{loss}");
        }
    }

    #[test]
    fn offload_and_plain_adamw_start_from_the_same_weights() {
        let _turn = turn();
        let offloaded = config().with_dtype(Precision::F32);
        let [first, second] = [offloaded, config().with_offload(false)]
            .map(|config| Run::start(config, &corpus()).unwrap().step(&corpus()).loss);
        assert_eq!(first, second);
    }
}
