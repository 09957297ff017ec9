//! Policy: what a user may choose. Nothing here does anything.

use burn::config::Config;
use burn::module::ParamGroup;
use burn::tensor::FloatDType;

use crate::optimize::{SimdLevel, StatePrecision};

/// How a model is offloaded.
///
/// ```
/// use burn::tensor::FloatDType;
/// use burn_zero_offload::OffloadConfig;
///
/// let config = OffloadConfig::new().with_dtype(Some(FloatDType::BF16)).with_threads(Some(2));
/// assert_eq!(config.dtype, Some(FloatDType::BF16));
/// ```
#[derive(Config, Debug)]
pub struct OffloadConfig {
    /// Element type of the weights on the device: BF16, F16 or F32.
    ///
    /// Left out, the best the device computes in is taken: BF16, else F16, else F32. Half precision
    /// costs 2 bytes per parameter on the device, F32 costs 4; the host holds fp32 master weights
    /// either way. Burn does not promote: a model with weights in half precision wants inputs and
    /// constants in half precision too.
    pub dtype: Option<FloatDType>,

    /// Parameters to keep in F32 on the device, whatever `dtype` says: a head whose input the model
    /// casts, for example. 4 bytes per parameter there.
    pub full_precision: Option<ParamGroup>,

    /// What master weights and optimizer state are kept in on the host. Left out,
    /// [`SplitMaster`](StatePrecision::SplitMaster) for weights in BF16 on the device and
    /// [`Full`](StatePrecision::Full) for others: both exact. Parts of the model can have their own, see
    /// [`with_state_precision`](crate::OffloadOptimizerConfig::with_state_precision).
    pub state_precision: Option<StatePrecision>,

    /// Keys the random bits by which state in less than `f32` is rounded.
    #[config(default = 0)]
    pub seed: u64,

    /// Threads of the CPU step. Left out, one per physical core that the process may use by affinity
    /// and cgroup quota; of those the cores of the NUMA node that the GPU is attached to, where that is known;
    /// and of those this process's share where a launcher (torchrun, Open MPI, MPICH, Slurm) says
    /// that several share the machine. A launcher that binds each process to cores of its own has cut
    /// them already: set the number then.
    ///
    /// They are threads of their own. Burn's threads compute forward and backward, these the step and,
    /// during backward, norms; with [`Schedule::Synchronous`] `step` waits meanwhile, so the two do not ask for the
    /// same cores. With the other schedules, and the device a CPU, they do.
    pub threads: Option<usize>,

    /// Instruction set of the CPU step. Left out, the one that the environment variable
    /// `BURN_OFFLOAD_SIMD` names (`scalar`, `avx2`, `avx512`, `neon`), or the fastest this machine has. All
    /// give the same bits; forcing one is for tests and measurements.
    pub simd: Option<SimdLevel>,

    /// Bytes of gradients that may be on their way from the device to the host at once. Left out,
    /// twice the largest parameter's gradient and at least 4 MiB; [`StepReport`](crate::StepReport)
    /// shows it.
    ///
    /// A backward pass that is ahead of the downloads waits when it is used up, so the device never
    /// holds more than this and one gradient besides. It must hold the largest parameter's gradient.
    ///
    /// The budget also bounds sums on the device. A parameter in half precision that is used three
    /// times or more in a backward (a recurrent cell, a shared block), or twice in single precision,
    /// is summed there in f32 and comes down once, if the sum fits into the budget beside the largest
    /// gradient; otherwise, and always on Flex, every use comes down. A tied embedding (two uses)
    /// comes down twice: 4 bytes either way.
    pub in_flight: Option<usize>,

    /// Elements per tile of an upload, rounded up to an even number. Left out, 4 Mi elements.
    ///
    /// While one tile is on its way to the device the CPU step computes the next. Smaller parameters,
    /// and all on Flex, go in one piece. Changes speed, never a bit of the result.
    pub upload_tile: Option<usize>,

    /// Bytes of pinned host memory that uploads may use; 0 switches pinning off. Left out, four tiles,
    /// and all upper halves of split masters of more than one tile: those are uploaded from where they
    /// are. With less than two tiles there are none besides. Changes speed, never a bit of the result.
    pub pinned: Option<usize>,

    /// How the loss is scaled, so that small gradients do not vanish in half precision. Left out:
    /// [`LossScaleConfig::dynamic`] if `dtype` comes to F16, else off.
    ///
    /// Only a loss that goes through [`Offload::scale`](crate::Offload::scale) is scaled.
    pub loss_scale: Option<LossScaleConfig>,

    /// Rounds that may be skipped in a row because some gradient was not finite; one more is
    /// [`OffloadError::TooManySkips`](crate::OffloadError::TooManySkips).
    #[config(default = 50)]
    pub max_consecutive_skips: u64,

    /// Limit on the L2 norm of the gradients of all parameters together, each counted once. A larger
    /// norm is scaled down to it before any other clipping. Left out, there is no limit.
    ///
    /// The clipping of Burn's optimizer configs, which acts on each parameter alone, comes after it.
    pub max_grad_norm: Option<f32>,

    /// What becomes of the gradients of several backward passes before a step.
    #[config(default = "Accumulation::Sum")]
    pub accumulation: Accumulation,

    /// Backward passes that every step has to have; another number is
    /// [`OffloadError::MicroBatches`](crate::OffloadError::MicroBatches). Left out, any number is
    /// right, as burn-train's accumulation needs it, whose last window of an epoch may be short.
    pub micro_batches: Option<usize>,

    /// When updates run, and what they are hidden behind.
    #[config(default = "Schedule::Synchronous")]
    pub schedule: Schedule,

    /// Correct gradients for the update they miss under [`Schedule::Delayed`], by this much (`lambda`).
    ///
    /// The gradient `g` was taken at weights `w'`, and is applied to weights `w` that are one update further.
    /// With this, `g + lambda * g * g * (w - w')`, element by element, is applied instead: the first terms of
    /// the gradient at `w`, with the squared gradient in place of the Hessian's diagonal (Zheng et al.,
    /// *Asynchronous Stochastic Gradient Descent with Delay Compensation*, arXiv 1609.08326). It comes after
    /// `max_grad_norm` and before the clipping of each optimizer config, whose norm is that of `g`. Costs 4
    /// bytes per parameter of host memory, as much again for the parameter being updated, and three passes
    /// over them. Without effect where gradients miss no update.
    pub delay_compensation: Option<f32>,

    /// Check every step: the plain scalar loop computes three tiles of 4096 elements of each parameter
    /// once more, and all weights are read back from the device and compared with what their masters
    /// should have become. The first difference is
    /// [`OffloadError::Verify`](crate::OffloadError::Verify).
    ///
    /// Costs 2 bytes per half parameter of transfers down in each step, and host time: a step takes
    /// several times as long.
    #[config(default = false)]
    pub verify: bool,
}

/// When the updates of a round run.
///
/// Can be changed between steps, see [`Offload::set_schedule`](crate::Offload::set_schedule).
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Schedule {
    /// Within `step`: when it returns, the model has its new weights. Downloads overlap with backward, and
    /// the upload of a tile with the update of the next.
    Synchronous,
    /// Behind the next forward pass. `step` returns as soon as the verdict on the round is in. Updates run in
    /// the order in which the last forward pass used the parameters, and each `param.val()` waits for its
    /// own parameter only.
    ///
    /// The same bits as `Synchronous`. Whatever looks at weights in another way waits, too: `valid()`,
    /// records, `materialize()`, and on Flex every use of a tensor. On other devices `Param::base`, module visitors
    /// and mappers, and moves to another device see NaN in weights that are still to come (on the thread that called `step`): call
    /// [`Offload::flush`](crate::Offload::flush) first.
    ForwardOverlapped,
    /// Behind the next forward and backward pass: the delayed parameter update of ZeRO-Offload.
    ///
    /// Rounds before number `warmup` (counted from 1) are as in `Synchronous`; the update of round `warmup` is
    /// the first that is delayed. From there on the update of round `n` runs during round `n + 1` and the
    /// weights of round `n + 2` are the first to have it: every gradient misses exactly one update. This is
    /// another optimizer than `Synchronous`: see the README for what it costs.
    ///
    /// Gradients have two sets of buffers on the host: 2 bytes per half parameter more, and where the weights
    /// are F16 or F32 as much again for updated weights that wait. Split masters on Flex, where the model's
    /// weights are their upper halves, are copied once per round (2 bytes per parameter).
    ///
    /// `into_record` and [`Offload::flush`](crate::Offload::flush) finish the pending update and see it;
    /// [`Offload::settle`](crate::Offload::settle) puts it into a model. `valid()` has the weights of the next
    /// forward pass, and after a `flush` the newest.
    Delayed {
        /// Number of the first round whose update is delayed.
        warmup: u64,
    },
}

/// What becomes of the gradients of several backward passes before a step. They add up in `f32` on the
/// host either way.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Accumulation {
    /// Their sum, as Burn's `GradientsAccumulator` has it.
    Sum,
    /// Their sum, divided by the number of passes.
    Mean,
}

/// How the loss is scaled (Micikevicius et al., arXiv 1710.03740).
///
/// Scales are powers of two, so scaling and unscaling round nothing.
///
/// ```
/// use burn_zero_offload::{DynamicLossScaleConfig, LossScaleConfig, OffloadConfig};
///
/// let dynamic = DynamicLossScaleConfig::new().with_initial(1024.0).with_growth_interval(500);
/// let config = OffloadConfig::new().with_loss_scale(Some(LossScaleConfig::Dynamic(dynamic)));
/// # let _ = config;
/// ```
#[derive(Config, Debug, PartialEq)]
pub enum LossScaleConfig {
    /// Not at all.
    Off,
    /// By the same power of two always.
    Static(f32),
    /// By as much as the gradients allow.
    Dynamic(DynamicLossScaleConfig),
}

impl LossScaleConfig {
    /// Dynamic with its defaults.
    pub fn dynamic() -> Self {
        Self::Dynamic(DynamicLossScaleConfig::new())
    }
}

/// A loss scale that grows while gradients stay finite and backs off when they do not.
#[derive(Config, Debug, PartialEq)]
pub struct DynamicLossScaleConfig {
    /// The scale to begin with, 2^16.
    #[config(default = 65536.0)]
    pub initial: f32,
    /// The scale is multiplied by this when it grows.
    #[config(default = 2.0)]
    pub growth_factor: f32,
    /// The scale is multiplied by this when it backs off.
    #[config(default = 0.5)]
    pub backoff_factor: f32,
    /// The scale grows after so many applied rounds in which it did not change and none was skipped.
    #[config(default = 2000)]
    pub growth_interval: u64,
    /// The scale backs off from the overflow of this number on, counted since it grew last: 1 is at
    /// the first, 2 tolerates one.
    #[config(default = 1)]
    pub hysteresis: u64,
    /// It never backs off below this.
    #[config(default = 1.0)]
    pub minimum: f32,
    /// It never grows beyond this, 2^24.
    #[config(default = 16777216.0)]
    pub maximum: f32,
}
