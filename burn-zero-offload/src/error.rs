//! What can go wrong in a correct program.

use burn::tensor::{DType, FloatDType};

use crate::optimize::{SimdLevel, StatePrecision};
use crate::report::Overflow;

/// An error of offloaded training. Every message says what was expected, what came and what to do.
#[derive(Debug, Clone, thiserror::Error)]
pub enum OffloadError {
    /// The model has already been offloaded.
    #[error(
        "parameter `{path}` is offloaded already: `init` was called before on this model. \
         Call `init` once, or call `materialize()` on the model to take the earlier offload off"
    )]
    AlreadyOffloaded {
        /// Path of the first such parameter.
        path: String,
    },

    /// A trainable parameter carries a reparameterization of its own.
    #[error(
        "parameter `{path}` requires gradients and carries the reparameterization `{name}`: its \
         value is computed, so there is no weight to keep a master of. Freeze the base (LoRA does) \
         or call `materialize()` on the model before `init`"
    )]
    TrainableReparameterization {
        /// Path of the parameter.
        path: String,
        /// Name of its reparameterization.
        name: String,
    },

    /// Two fields of the model hold the same parameter.
    #[error(
        "`{first}` and `{second}` are the same parameter (equal ids), but Burn's optimizers update \
         only the first of them. Keep one field and call `val()` on it wherever the weight is used, \
         or give the copy an id of its own"
    )]
    SharedParameter {
        /// Path of the first field.
        first: String,
        /// Path of the second field.
        second: String,
    },

    /// An update that ran behind the training loop failed.
    #[error(
        "the update of parameter `{path}` failed: {reason}. Its master weights may have changed in \
         part: load the last record into model and optimizer"
    )]
    Update {
        /// Path of the parameter.
        path: String,
        /// What happened.
        reason: String,
    },

    /// The device cannot compute in the element type asked for.
    #[error(
        "the device {device} does not compute in {dtype:?}. Choose another type with \
         `OffloadConfig::with_dtype`, or leave it out: the best supported one is then taken"
    )]
    UnsupportedDType {
        /// The device, as it prints itself.
        device: String,
        /// The type asked for.
        dtype: FloatDType,
    },

    /// Weights can be kept on the device in this type, but not masters of them on the host.
    #[error(
        "parameter `{path}` has element type {dtype:?}; master weights are f32, so parameters have \
         to be F32, F16 or BF16. Cast the model before `init`"
    )]
    UnsupportedParameter {
        /// Path of the parameter.
        path: String,
        /// Its element type.
        dtype: DType,
    },

    /// The model has nothing to train.
    #[error(
        "no float parameter of the model requires gradients. Build the model on an autodiff \
         device (`device.autodiff()`) and unfreeze what should train"
    )]
    NothingToTrain,

    /// A parameter group matches nothing.
    #[error(
        "the parameter group {group} matches no parameter it could apply to. Paths look like `{example}`"
    )]
    EmptyGroup {
        /// Which group: of `with_group` by number, or that of `with_full_precision`.
        group: String,
        /// A path of the model.
        example: String,
    },

    /// An optimizer config could not be read.
    #[error("the optimizer config could not be read: {reason}")]
    Config {
        /// Why.
        reason: String,
    },

    /// A value of a config is out of its range.
    #[error("`{name}` is {value}, expected {expected}")]
    OutOfRange {
        /// The option.
        name: &'static str,
        /// What it was set to.
        value: String,
        /// What would be accepted.
        expected: &'static str,
    },

    /// The instruction set asked for is not there.
    #[error(
        "this machine has no {0:?} instructions. Leave `OffloadConfig::with_simd` and the variable \
         `BURN_OFFLOAD_SIMD` out to take the best it has"
    )]
    UnsupportedSimd(SimdLevel),

    /// Master weights and state of a parameter cannot be kept as asked.
    #[error(
        "master weights and state of `{path}` cannot be kept as `{kept:?}`: {reason}. Choose another \
         `StatePrecision` with `OffloadConfig::with_state_precision`, or for its group with \
         `with_state_precision` after `with_offload`"
    )]
    StatePrecision {
        /// Path of the parameter.
        path: String,
        /// What was asked for.
        kept: StatePrecision,
        /// Why not.
        reason: String,
    },

    /// The thread pool of the CPU step could not be built.
    #[error("the threads of the CPU step could not be started: {reason}")]
    Threads {
        /// What the system said.
        reason: String,
    },

    /// The in-flight budget cannot hold the largest gradient.
    #[error(
        "the in-flight budget is {budget} bytes, but the gradient of `{path}` takes {needed}. Give \
         `OffloadConfig::with_in_flight` at least that, or leave it out"
    )]
    BudgetTooSmall {
        /// The budget asked for, in bytes.
        budget: usize,
        /// Path of the parameter with the largest gradient.
        path: String,
        /// Bytes its gradient takes.
        needed: usize,
    },

    /// A gradient could not be brought to the host.
    #[error(
        "the gradient of `{path}` could not be read from the device: {reason}. No weight has changed \
         and the gradients of this round are dropped"
    )]
    Download {
        /// Path of the parameter.
        path: String,
        /// What the backend said.
        reason: String,
    },

    /// A gradient that did not come through a tap cannot be used.
    #[error(
        "the gradient of `{path}` that did not come from `val()` cannot be used: {reason}. If this \
         happened in `step`, parameters before it in the model have been updated already; go back to an \
         earlier clone or checkpoint then"
    )]
    Gradient {
        /// Path of the parameter.
        path: String,
        /// What is wrong with it.
        reason: String,
    },

    /// The gradients of a round are not those of as many backward passes as there have to be.
    #[error(
        "`with_micro_batches({expected})` was given, but {got} backward passes came before this \
         `step`. No weight has changed and the gradients of this round are dropped. Call `step` after \
         every {expected} passes, or leave `with_micro_batches` out if windows may be shorter"
    )]
    MicroBatches {
        /// Passes there had to be.
        expected: usize,
        /// Passes there were.
        got: usize,
    },

    /// One round after the other was skipped.
    #[error(
        "{skips} rounds in a row were skipped, more than `max_consecutive_skips`, the last one at loss \
         scale {scale}: {overflow}. No weight has changed. If it goes on at a loss scale of 1, the model \
         itself produces these values: look at that parameter, lower the learning rate, or go back to \
         a checkpoint"
    )]
    TooManySkips {
        /// Rounds skipped in a row.
        skips: u64,
        /// Loss scale of the last of them; 1 if the loss was not scaled.
        scale: f32,
        /// Where it happened.
        overflow: Overflow,
    },

    /// The verify mode found a value that is not what it should be.
    #[error(
        "verification failed: {what}, element {element} of `{path}`, is {got}, expected {expected}. \
         This is a fault of burn-zero-offload, of the backend or of the machine, not of the model: \
         please report it, and go back to an earlier checkpoint"
    )]
    Verify {
        /// Path of the parameter.
        path: String,
        /// Which of its values: master weights, part of the optimizer state, weights on the device.
        what: &'static str,
        /// Element, counted from 0 in row-major order.
        element: usize,
        /// The value it should have; for weights on the device the master weight that it should be the
        /// image of.
        expected: String,
        /// The value it has.
        got: String,
    },

    /// Updated weights could not be sent to the device.
    #[error(
        "the weights of `{path}` could not be sent to the device: {reason}. Parameters before it in \
         the model have been updated already; go back to an earlier clone or checkpoint"
    )]
    Upload {
        /// Path of the parameter.
        path: String,
        /// What went wrong.
        reason: String,
    },

    /// A parameter's value could not be brought to the host.
    #[error("the value of `{path}` could not be read from the device: {reason}")]
    ReadWeights {
        /// Path of the parameter.
        path: String,
        /// What the backend said.
        reason: String,
    },
}

impl OffloadError {
    /// [`OutOfRange`](Self::OutOfRange) unless the value of an option `holds`.
    pub(crate) fn unless(
        holds: bool,
        name: &'static str,
        value: impl ToString,
        expected: &'static str,
    ) -> Result<(), Self> {
        match holds {
            true => Ok(()),
            false => Err(Self::OutOfRange {
                name,
                value: value.to_string(),
                expected,
            }),
        }
    }
}
