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
