//! Whether there is a CUDA device.

/// Says in a sentence why there is none.
#[cfg(feature = "cuda")]
pub fn cuda() -> Result<(), String> {
    use std::panic::{catch_unwind, set_hook, take_hook};

    use burn::tensor::{Device, DeviceType};

    // CubeCL looks for the driver before it asks it, but a driver that does not fit panics: quietly.
    let hook = take_hook();
    set_hook(Box::new(|_| ()));
    let found = catch_unwind(|| Device::enumerate(DeviceType::Cuda).len());
    set_hook(hook);
    match found {
        Ok(1..) => Ok(()),
        Ok(0) => Err(
            "this machine has no CUDA device (or no NVIDIA driver): choose another with \
                      `--device flex` or `--device cpu`"
                .into(),
        ),
        Err(_) => Err(
            "the NVIDIA driver of this machine could not be used: choose another device \
                       with `--device flex` or `--device cpu`"
                .into(),
        ),
    }
}

/// Says in a sentence why there is none.
#[cfg(not(feature = "cuda"))]
pub fn cuda() -> Result<(), String> {
    Err(
        "this build has no CUDA: add `--features cuda,fusion` to the cargo command, or choose \
         another device with `--device flex`"
            .into(),
    )
}
