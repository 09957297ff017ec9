//! The devices a run can train on, one for each Cargo feature of the same name.

use anyhow::{Result, bail};
use burn::tensor::Device;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// A backend of Burn, named as its Cargo feature is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// Pure Rust on the CPU; needs nothing installed.
    Flex,
    /// CubeCL's CPU backend.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
    /// AMD GPUs.
    Rocm,
    /// Apple GPUs.
    Metal,
    /// GPUs through Vulkan.
    Vulkan,
    /// GPUs through WebGPU.
    Webgpu,
    /// GPUs through whichever graphics API wgpu picks.
    Wgpu,
}

impl Backend {
    /// The name of the backend, which is also the name of the Cargo feature that compiles it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Flex => "flex",
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Rocm => "rocm",
            Self::Metal => "metal",
            Self::Vulkan => "vulkan",
            Self::Webgpu => "webgpu",
            Self::Wgpu => "wgpu",
        }
    }

    /// The default device of the backend, without autodiff.
    ///
    /// # Errors
    ///
    /// Fails if the backend was not compiled in, naming the feature to build with.
    pub fn device(self) -> Result<Device> {
        #[cfg(any(
            feature = "metal",
            feature = "vulkan",
            feature = "webgpu",
            feature = "wgpu"
        ))]
        use burn::tensor::DeviceKind;

        match self {
            #[cfg(feature = "flex")]
            Self::Flex => Ok(Device::flex()),
            #[cfg(feature = "cpu")]
            Self::Cpu => Ok(Device::cpu()),
            #[cfg(feature = "cuda")]
            Self::Cuda => Ok(Device::cuda(0usize)),
            #[cfg(feature = "rocm")]
            Self::Rocm => Ok(Device::rocm(0usize)),
            #[cfg(feature = "metal")]
            Self::Metal => Ok(Device::metal(DeviceKind::DefaultDevice)),
            #[cfg(feature = "vulkan")]
            Self::Vulkan => Ok(Device::vulkan(DeviceKind::DefaultDevice)),
            #[cfg(feature = "webgpu")]
            Self::Webgpu => Ok(Device::webgpu(DeviceKind::DefaultDevice)),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => Ok(Device::wgpu(DeviceKind::DefaultDevice)),
            // Reached only by the backends that this build leaves out.
            #[allow(unreachable_patterns)]
            missing => {
                let name = missing.name();
                bail!(
                    "the {name} backend is not part of this build: \
                     add `--features {name}` to the cargo command"
                )
            }
        }
    }
}
