//! The device a benchmark runs on: that of the first CubeCL backend compiled in, else Flex.

use burn::tensor::{Device, FloatDType};

/// The device, without autodiff.
pub fn device() -> Device {
    #[cfg(any(
        feature = "metal",
        feature = "vulkan",
        feature = "webgpu",
        feature = "wgpu"
    ))]
    use burn::tensor::DeviceKind::DefaultDevice;

    // The first of these blocks that is compiled in returns.
    #[cfg(feature = "cuda")]
    return Device::cuda(0);
    #[cfg(feature = "rocm")]
    #[allow(unreachable_code)]
    return Device::rocm(0);
    #[cfg(feature = "metal")]
    #[allow(unreachable_code)]
    return Device::metal(DefaultDevice);
    #[cfg(feature = "vulkan")]
    #[allow(unreachable_code)]
    return Device::vulkan(DefaultDevice);
    #[cfg(feature = "webgpu")]
    #[allow(unreachable_code)]
    return Device::webgpu(DefaultDevice);
    #[cfg(feature = "wgpu")]
    #[allow(unreachable_code)]
    return Device::wgpu(DefaultDevice);
    #[cfg(feature = "cpu")]
    #[allow(unreachable_code)]
    return Device::cpu();
    #[allow(unreachable_code)]
    Device::flex()
}

/// Element type for models with matrix products on it; `None` is the best it has. CubeCL's CPU runtime
/// refuses products of half matrices of many sizes.
#[allow(dead_code)]
pub fn dtype() -> Option<FloatDType> {
    let other = cfg!(any(
        feature = "cuda",
        feature = "rocm",
        feature = "metal",
        feature = "vulkan",
        feature = "webgpu",
        feature = "wgpu"
    ));
    (cfg!(feature = "cpu") && !other).then_some(FloatDType::F32)
}

/// A whole number among the arguments, counted from 0; cargo adds flags of its own.
pub fn argument(position: usize, name: &str) -> Option<usize> {
    let mut words = std::env::args()
        .skip(1)
        .filter(|word| !word.starts_with('-'));
    words.nth(position).map(|word| match word.parse() {
        Ok(number) => number,
        Err(_) => {
            eprintln!("{name} is a whole number, not `{word}`");
            std::process::exit(2);
        }
    })
}
