//! Station 5: half weights to the device, and what the engine knows of the weights there.
//!
//! Large parameters go in tiles: while the device takes one, the CPU step computes the next
//! ([`Uploader`]). Small ones, and all on devices without buffers to write into, go whole.

mod options;
mod promise;
mod sender;
mod storage;
mod target;
mod uploader;
mod weights;

pub(crate) use options::UploadOptions;
pub(crate) use storage::{StorageId, release};
pub(crate) use target::Target;
pub(crate) use uploader::{Place, Upload, Uploader};
pub(crate) use weights::{
    AutodiffContext, as_f32, lend, on_flex, read, to_device, to_dtype, to_precision,
};
