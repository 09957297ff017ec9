use std::sync::Arc;

use burn::module::{Module, ParamGroup};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{FloatDType, Tensor};

use super::slot::{NotOffloaded, SlotOptimizer};
use super::{collect, settle};
use crate::capture::{self, Passes};
use crate::config::Schedule;
use crate::engine::Engine;
use crate::error::OffloadError;
use crate::optimize::SimdLevel;
use crate::report::{MemoryReport, StepReport, Trace};

/// The host side of an offloaded model, made by
/// [`OffloadOptimizerConfig::init`](super::OffloadOptimizerConfig::init).
///
/// A cheap handle: clones, the optimizers it makes and the model itself share one engine, which ends
/// with the last of them.
#[derive(Clone)]
pub struct Offload {
    engine: Arc<Engine>,
    passes: Passes,
    dtype: FloatDType,
}

impl Offload {
    pub(super) fn new(engine: Arc<Engine>, passes: Passes, dtype: FloatDType) -> Self {
        Self {
            engine,
            passes,
            dtype,
        }
    }

    /// An optimizer for the model, to be used as any other of Burn: in a plain loop, with
    /// `GradientsAccumulator`, `ModuleLearningRate` and schedulers, or in burn-train's `Learner`.
    ///
    /// The moments live in the engine. All optimizers of one `Offload`, clones included, continue
    /// the same state; a record loaded into one of them replaces it for all. `to_record` copies the
    /// state: 8 bytes per parameter of host memory with Adam (12 with AMSGrad) for as long as the record
    /// lives. Records are interchangeable with those of Burn's own optimizers; they carry the loss scale
    /// and its history besides.
    ///
    /// Options belong to the configuration given before `init`: gradient clipping set on the
    /// optimizer returned here would clip placeholders and do nothing, and a group added to it
    /// would meet placeholders where it expects gradients and panic on their shape.
    pub fn optimizer(&self) -> ModuleOptimizer {
        let slot = |slot| SlotOptimizer {
            engine: self.engine.clone(),
            slot,
        };
        let mut optimizer = ModuleOptimizer::from(NotOffloaded);
        // The last group that matches wins. Ids come last: they are right also where a part of the
        // model is stepped on its own and paths are shorter. Paths are right where ids have changed,
        // because a record was loaded.
        for (index, layout) in self.engine.layouts().enumerate() {
            let group = ParamGroup::from_path(&layout.path);
            optimizer = optimizer.with_group(group, slot(index), None);
        }
        for (index, layout) in self.engine.layouts().enumerate() {
            let group = ParamGroup::from_ids(vec![layout.id]);
            optimizer = optimizer.with_group(group, slot(index), None);
        }
        optimizer
    }

    /// Scales the gradients of `loss` by the loss scale; call it on what `backward` is called on.
    ///
    /// The value stays what it is, so it can be logged. In backward its gradient is multiplied by the
    /// scale of that moment, a power of two, and the step divides by the same number in `f32`, whatever
    /// has become of the scale in between. The gradients of a loss that did not go through here are
    /// not scaled and not divided. With scaling off (the default in BF16 and F32) and on a device without
    /// autodiff it does nothing.
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::{AdamWConfig, GradientsParams};
    /// # use burn::tensor::{Device, FloatDType, Tensor};
    /// # use burn_zero_offload::{OffloadConfig, OffloadError, WithOffload};
    /// # fn main() -> Result<(), OffloadError> {
    /// # let device = Device::flex().autodiff();
    /// # let config = OffloadConfig::new().with_dtype(Some(FloatDType::F16));
    /// # let model = LinearConfig::new(2, 2).init(&device);
    /// # let (model, offload) = AdamWConfig::new().with_offload(config).init(model)?;
    /// # let mut optim = offload.optimizer();
    /// # let input = Tensor::<2>::ones([4, 2], &device).cast(offload.dtype());
    /// let loss = model.forward(input).cast(FloatDType::F32).mean();
    /// let grads = GradientsParams::from_grads(offload.scale(loss).backward(), &model);
    /// let model = optim.step(1e-3, model, grads);
    /// assert_eq!(offload.report().loss_scale, 65536.0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Under burn-train's `Learner` the model's `TrainStep` calls it: a field
    /// `#[module(skip)] offload: Option<Offload>`, filled in after `init`, keeps the handle.
    ///
    /// Where several models share a backward, one of their `Offload`s scales the loss for all. Do not
    /// scale a loss twice, nor add an unscaled one to it: the sum's gradients would be scaled in part.
    pub fn scale<const D: usize>(&self, loss: Tensor<D>) -> Tensor<D> {
        if !loss.is_autodiff() {
            return loss;
        }
        capture::scale(loss, self.passes.clone())
    }

    /// The loss scale of the next backward pass that is scaled; 1 with scaling off.
    pub fn loss_scale(&self) -> f32 {
        self.engine.current_loss_scale()
    }

    /// Hands gradients over that did not come through `val()`: gradients registered in `grads`, or of
    /// weights used through `base()`.
    ///
    /// They are added to what the taps collected and leave placeholders in `grads`, so they are part
    /// of the norm and of the verdict. Without this call `step` adds them one by one as it meets them,
    /// which it refuses where it would be wrong: with `max_grad_norm`, and for values that are not
    /// finite. They count as scaled like the last backward pass of the round.
    ///
    /// # Errors
    ///
    /// [`OffloadError::Gradient`] if one could not be read from the device, or belongs to a weight that was
    /// used through both `val()` and `base()` in one backward pass. The gradients of the round are dropped.
    pub fn collect<M: Module>(
        &self,
        model: &M,
        grads: GradientsParams,
    ) -> Result<GradientsParams, OffloadError> {
        collect::collect(&self.engine, model, grads)
    }

    /// Element type of the weights on the device, and so of the inputs they want.
    pub fn dtype(&self) -> FloatDType {
        self.dtype
    }

    /// Where the model state lives.
    pub fn memory(&self) -> MemoryReport {
        self.engine.memory()
    }

    /// What the last round did, moved and waited for; `Display` prints it as a block.
    ///
    /// A round is reported from its verdict on. Burn's optimizers do not say when
    /// their walk is over, so the report is complete when `step` has returned and, with a schedule that runs updates
    /// behind the training loop, when nothing is `pending`.
    pub fn report(&self) -> StepReport {
        self.engine.report()
    }

    /// The reports of the last rounds, up to five, the oldest first.
    ///
    /// Where updates run behind the training loop the newest is not final (`pending` counts what is left), and
    /// the one before is: this is where to read it.
    pub fn reports(&self) -> Vec<StepReport> {
        self.engine.reports()
    }

    /// Instruction set of the CPU step.
    pub fn simd(&self) -> SimdLevel {
        self.engine.simd()
    }

    /// Threads of the CPU step.
    pub fn threads(&self) -> usize {
        self.engine.threads()
    }

    /// Drops the gradients collected since the last step.
    ///
    /// Gradients collect on the host until `step`, as in PyTorch. Where Burn's own loop would let a
    /// set of gradients go unused, say so. The usual case is a GAN, whose discriminator loss also
    /// reaches the generator:
    ///
    /// ```
    /// # use burn::module::Module;
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::optim::{AdamConfig, GradientsParams};
    /// # use burn::tensor::{Device, FloatDType, Tensor};
    /// # use burn_zero_offload::{OffloadConfig, WithOffload};
    /// # fn main() -> Result<(), burn_zero_offload::OffloadError> {
    /// # let device = Device::flex().autodiff();
    /// # let config = OffloadConfig::new().with_dtype(Some(FloatDType::F32));
    /// # let adam = || AdamConfig::new().with_offload(config.clone());
    /// # let (g, generator) = adam().init(LinearConfig::new(2, 2).init(&device))?;
    /// # let (d, discriminator) = adam().init(LinearConfig::new(2, 1).init(&device))?;
    /// # let noise = Tensor::<2>::ones([4, 2], &device);
    /// # let mut optimizer = discriminator.optimizer();
    /// let loss = d.forward(g.forward(noise)).mean();
    /// let grads = GradientsParams::from_grads(loss.backward(), &d);
    /// let d = optimizer.step(1e-3, d, grads);
    /// generator.discard_gradients(); // the generator learns from its own loss
    /// # Ok(())
    /// # }
    /// ```
    pub fn discard_gradients(&self) {
        self.engine.discard_gradients();
    }

    /// Waits until every gradient of the backward passes so far is on the host, and every update of the
    /// steps so far is done.
    ///
    /// With [`Schedule::ForwardOverlapped`] the model's weights are all on the device then, also for who
    /// looks at them through `base()`. With [`Schedule::Delayed`] an update is one step ahead of the model's
    /// own tensors; after this, `val()`, `valid()` copies and forward passes see it anyway (at the price of a
    /// second set of weights on the device until the next step, of those parameters that are used), and
    /// [`settle`](Self::settle) puts it into the model.
    ///
    /// # Errors
    ///
    /// [`OffloadError::Download`] if a gradient could not be read. The gradients of the round are dropped
    /// and no weight has changed. [`OffloadError::Upload`], [`OffloadError::Update`] or
    /// [`OffloadError::Verify`] if an update failed: the parameter cannot be used until it is loaded from a
    /// record. `step`, and `val()` where it meets such a parameter, would panic with the same sentence.
    pub fn flush(&self) -> Result<(), OffloadError> {
        self.engine.flush()
    }

    /// Finishes pending updates and puts them into `model`.
    ///
    /// Only [`Schedule::Delayed`] has updates that a model does not hold when they are done; otherwise the
    /// model comes back as it is. Call it at the end of training, before weights are changed in
    /// between steps, and before going back to an older clone. Parameters of `model` that are not what the last
    /// step returned keep their values, and the update that was pending for them is dropped.
    ///
    /// # Errors
    ///
    /// As [`flush`](Self::flush); the model is consumed.
    pub fn settle<M: Module>(&self, model: M) -> Result<M, OffloadError> {
        self.engine.flush()?;
        settle::settle(&self.engine, model)
    }

    /// When updates run.
    pub fn schedule(&self) -> Schedule {
        self.engine.schedule()
    }

    /// Has the rounds from the next `step` on follow another schedule. Finishes what is pending, as
    /// [`flush`](Self::flush) does, so that no gradient of the new schedule misses an update of the old one
    /// if this is called before its forward pass.
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::SgdConfig;
    /// # use burn::tensor::Device;
    /// # use burn_zero_offload::{OffloadConfig, OffloadError, Schedule, WithOffload};
    /// # fn main() -> Result<(), OffloadError> {
    /// # let model = LinearConfig::new(2, 2).init(&Device::flex().autodiff());
    /// # let (model, offload) = SgdConfig::new().with_offload(OffloadConfig::new()).init(model)?;
    /// offload.set_schedule(Schedule::Delayed { warmup: 40 })?;
    /// // ... and for the last epochs
    /// offload.set_schedule(Schedule::ForwardOverlapped)?;
    /// assert_eq!(offload.schedule(), Schedule::ForwardOverlapped);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`flush`](Self::flush), without those of downloads.
    pub fn set_schedule(&self, schedule: Schedule) -> Result<(), OffloadError> {
        self.engine.set_schedule(schedule)
    }

    /// What the stations and the training loop did when: the last 32768 spans of each lane.
    ///
    /// ```no_run
    /// # use burn_zero_offload::Offload;
    /// # fn timeline(offload: &Offload) -> std::io::Result<()> {
    /// offload.trace().save("timeline.json")?; // for Perfetto or chrome://tracing
    /// offload.trace().save_svg("timeline.svg")?; // to look at
    /// # Ok(())
    /// # }
    /// ```
    pub fn trace(&self) -> Trace {
        self.engine.trace()
    }
}

impl std::fmt::Debug for Offload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Offload")
            .field("engine", &self.engine)
            .field("dtype", &self.dtype)
            .finish()
    }
}
