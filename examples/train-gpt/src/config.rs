//! The settings of a run.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use burn::config::Config;
use burn::tensor::FloatDType;
use burn_zero_offload::StatePrecision;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::device::Backend;
use crate::model::GptConfig;

/// Tokens are bytes.
pub const VOCAB: usize = 256;

/// The first steps move the weights far, and a gradient that misses such an update points elsewhere. The
/// ZeRO-Offload paper delays from step 40 on.
const DELAY_WARMUP: u64 = 40;

/// Everything that decides what a run computes.
#[derive(Config, Debug, PartialEq)]
pub struct TrainConfig {
    /// Transformer blocks.
    #[config(default = 4)]
    pub layers: usize,
    /// Width of the residual stream.
    #[config(default = 128)]
    pub width: usize,
    /// Attention heads.
    #[config(default = 4)]
    pub heads: usize,
    /// Tokens the model sees at once.
    #[config(default = 128)]
    pub context: usize,
    /// Sequences in a micro-batch.
    #[config(default = 8)]
    pub batch: usize,
    /// Micro-batches whose gradients are accumulated for one step.
    #[config(default = 1)]
    pub accumulation: usize,
    /// Optimizer steps.
    #[config(default = 500)]
    pub steps: usize,
    /// Steps over which the learning rate rises before it follows a cosine down; a tenth of all if
    /// left out.
    pub warmup: Option<usize>,
    /// Highest learning rate.
    #[config(default = 2e-3)]
    pub lr: f64,
    /// Decoupled weight decay of the matrices; embeddings and norms have none.
    #[config(default = 0.1)]
    pub weight_decay: f32,
    /// Largest norm of the gradients of all parameters together; 0 for no limit. Without offload there
    /// is none: Burn clips each parameter on its own.
    #[config(default = 1.0)]
    pub max_grad_norm: f32,
    /// Seed of the initial weights, of the order of the data and of the sample.
    #[config(default = 42)]
    pub seed: u64,
    /// Dtype of the weights on the device.
    #[config(default = "Precision::Auto")]
    pub dtype: Precision,
    /// What master weights and Adam's moments are kept in; the library's default if left out.
    pub state: Option<State>,
    /// When updates run; all but synchronous need offload.
    #[config(default = "Schedule::Synchronous")]
    pub schedule: Schedule,
    /// Number of the first step whose update is delayed, 40 if left out; for the delayed schedule.
    pub delay_warmup: Option<u64>,
    /// How much gradients are corrected for the update they miss, not at all if left out; for the delayed
    /// schedule.
    pub delay_compensation: Option<f32>,
    /// Where to train.
    #[config(default = "Backend::Flex")]
    pub device: Backend,
    /// Whether master weights and optimizer state live on the host.
    #[config(default = true)]
    pub offload: bool,
    /// File or directory of text; the Markdown files of the local cargo registry if none is given.
    pub data: Option<PathBuf>,
}

/// Dtype of the weights on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// The best the device supports: bf16, else f16, else f32.
    Auto,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// Single precision.
    F32,
}

/// What master weights and moments are kept in on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Single precision.
    Full,
    /// The same, the device's bf16 weight as its upper half.
    Split,
    /// Moments in bf16.
    Bf16,
    /// Moments in 8 bits.
    Int8,
    /// Moments in 8 bits and masters of 24.
    Int8Master24,
}

impl State {
    /// The name of the setting.
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Split => "split",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Int8Master24 => "int8-master24",
        }
    }

    /// What the library calls it.
    pub fn precision(self) -> StatePrecision {
        match self {
            Self::Full => StatePrecision::Full,
            Self::Split => StatePrecision::SplitMaster,
            Self::Bf16 => StatePrecision::Bf16Moments,
            Self::Int8 => StatePrecision::Int8Moments,
            Self::Int8Master24 => StatePrecision::Int8Master24,
        }
    }
}

/// When updates run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Within the step.
    Synchronous,
    /// Behind the next forward pass, with the same results.
    Overlapped,
    /// Behind the next forward and backward pass: every gradient misses one update.
    Delayed,
}

impl TrainConfig {
    /// The model these settings describe.
    pub fn model(&self) -> GptConfig {
        GptConfig {
            vocab: VOCAB,
            layers: self.layers,
            width: self.width,
            heads: self.heads,
            context: self.context,
        }
    }

    /// Steps over which the learning rate rises.
    pub fn warmup_steps(&self) -> usize {
        self.warmup.unwrap_or(self.steps / 10)
    }

    /// When updates run, as the library calls it.
    pub fn update_schedule(&self) -> burn_zero_offload::Schedule {
        match self.schedule {
            Schedule::Synchronous => burn_zero_offload::Schedule::Synchronous,
            Schedule::Overlapped => burn_zero_offload::Schedule::ForwardOverlapped,
            Schedule::Delayed => burn_zero_offload::Schedule::Delayed {
                warmup: self.first_delayed(),
            },
        }
    }

    /// Number of the first step whose update is delayed, where updates are.
    fn first_delayed(&self) -> u64 {
        self.delay_warmup.unwrap_or(DELAY_WARMUP)
    }

    /// Tokens in one optimizer step.
    pub fn tokens_per_step(&self) -> usize {
        self.accumulation * self.batch * self.context
    }

    /// Check the values against each other and against what the program can do.
    ///
    /// # Errors
    ///
    /// Fails on the first value that cannot be honoured.
    pub fn validate(&self) -> Result<()> {
        for (name, value) in [
            ("layers", self.layers),
            ("width", self.width),
            ("heads", self.heads),
            ("context", self.context),
            ("batch", self.batch),
            ("accumulation", self.accumulation),
            ("steps", self.steps),
        ] {
            ensure!(value > 0, "{name} must be at least 1");
        }
        ensure!(
            self.width.is_multiple_of(self.heads),
            "heads must divide width, and {} does not divide {}",
            self.heads,
            self.width
        );
        ensure!(
            self.warmup_steps() < self.steps,
            "warmup must be shorter than the run, and {} steps are not fewer than {}",
            self.warmup_steps(),
            self.steps
        );
        ensure!(
            self.lr > 0.0 && self.lr <= 1.0,
            "lr must be greater than 0 and at most 1, and is {}",
            self.lr
        );
        ensure!(
            (0.0..=1.0).contains(&self.weight_decay),
            "weight_decay must be between 0 and 1, and is {}",
            self.weight_decay
        );
        ensure!(
            self.max_grad_norm >= 0.0 && self.max_grad_norm.is_finite(),
            "max_grad_norm must be a number of at least 0, and is {}",
            self.max_grad_norm
        );
        ensure!(
            self.offload || matches!(self.dtype, Precision::Auto | Precision::F32),
            "without offload the example trains in f32: leave out --dtype or --no-offload"
        );
        ensure!(
            self.offload || self.state.is_none(),
            "without offload there is no state on the host: leave out --state or --no-offload"
        );
        self.validate_schedule()
    }

    fn validate_schedule(&self) -> Result<()> {
        ensure!(
            self.offload || self.schedule == Schedule::Synchronous,
            "without offload updates are synchronous: leave out --schedule or --no-offload"
        );
        if self.schedule != Schedule::Delayed {
            for (name, given) in [
                ("delay_warmup", self.delay_warmup.is_some()),
                ("delay_compensation", self.delay_compensation.is_some()),
            ] {
                ensure!(!given, "{name} is for --schedule delayed alone");
            }
            return Ok(());
        }
        let first = self.first_delayed();
        ensure!(
            (1..=self.steps as u64).contains(&first),
            "delay_warmup is the number of the first step whose update is delayed, and {first} is not one of \
             {} steps",
            self.steps
        );
        let compensation = self.delay_compensation.unwrap_or_default();
        ensure!(
            compensation >= 0.0 && compensation.is_finite(),
            "delay_compensation must be a number of at least 0, and is {compensation}"
        );
        Ok(())
    }
}

impl Precision {
    /// The dtype to ask the library for; `None` leaves the choice to it.
    pub fn float_dtype(self) -> Option<FloatDType> {
        match self {
            Self::Auto => None,
            Self::Bf16 => Some(FloatDType::BF16),
            Self::F16 => Some(FloatDType::F16),
            Self::F32 => Some(FloatDType::F32),
        }
    }
}
