//! The command line, and what follows from it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use burn::tensor::{Device, FloatDType};
use clap::Parser;

use crate::device::Backend;

/// Check and measure ZeRO-Offload for Burn on the device at hand.
#[derive(Parser, Debug)]
#[command(name = "gpu-check")]
pub struct Args {
    /// Device to run on; left out, an NVIDIA GPU is expected
    #[arg(long, value_enum)]
    pub device: Option<Backend>,
    /// Shrink everything: seconds instead of minutes, numbers without meaning
    #[arg(long)]
    pub small: bool,
    /// Write the table to this file as well
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Only these sections, separated by commas: parity, streams, memory, transfers, overlap, tokens,
    /// largest
    #[arg(long, value_name = "SECTIONS", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Start no measurement after so many seconds
    #[arg(long, value_name = "N", default_value_t = 480)]
    pub seconds: u64,
    /// Device memory left free while the largest model is looked for, in GiB
    #[arg(long, value_name = "GIB", default_value_t = 4)]
    pub card_gib: u64,
    /// Play a part for a parent process: this program starts itself
    #[arg(long, hide = true)]
    pub child: Option<String>,
    /// Number of layers, for the child that looks whether a model fits
    #[arg(long, hide = true, default_value_t = 1)]
    pub layers: usize,
}

/// What every check needs to know.
pub struct Setting {
    /// Which backend.
    pub backend: Backend,
    /// Its first device, without autodiff.
    pub device: Device,
    /// Whether everything is to be shrunk.
    pub small: bool,
    /// See [`Args::card_gib`].
    pub card_gib: u64,
    /// When to start no more measurements.
    pub end: Instant,
}

impl Setting {
    /// The setting that `args` ask for.
    ///
    /// # Errors
    ///
    /// Fails if the backend is not part of this build.
    pub fn new(backend: Backend, args: &Args) -> Result<Self> {
        Ok(Self {
            backend,
            device: backend.device()?,
            small: args.small,
            card_gib: args.card_gib,
            end: Instant::now() + Duration::from_secs(args.seconds),
        })
    }

    /// Time left for measurements.
    pub fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// `small` or `full`, as is asked for.
    pub fn size<T>(&self, small: T, full: T) -> T {
        if self.small { small } else { full }
    }

    /// The half precision the device computes in, bf16 first; f32 if it has none.
    pub fn half(&self) -> FloatDType {
        [FloatDType::BF16, FloatDType::F16]
            .into_iter()
            .find(|&dtype| self.device.supports_dtype(dtype))
            .unwrap_or(FloatDType::F32)
    }

    /// The type in which models with matrix products train: half precision where there is any.
    ///
    /// CubeCL's CPU runtime computes in half precision, but refuses products of half matrices of many
    /// sizes where the caches of the processor are small.
    pub fn products(&self) -> FloatDType {
        if self.backend == Backend::Cpu {
            FloatDType::F32
        } else {
            self.half()
        }
    }

    /// Why a GPT is not trained on this device, if it is not.
    pub fn no_gpt(&self) -> Option<&'static str> {
        (self.backend == Backend::Cpu).then_some(
            "CubeCL's CPU runtime takes a tenth of a second for each product of matrices",
        )
    }

    /// Whether the device is a GPU.
    pub fn is_gpu(&self) -> bool {
        !matches!(self.backend, Backend::Flex | Backend::Cpu)
    }
}
