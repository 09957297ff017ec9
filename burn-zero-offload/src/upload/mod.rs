//! Station 5: half weights to the device, and what the engine knows of the weights there.

mod storage;
mod weights;

pub(crate) use storage::StorageId;
pub(crate) use weights::{
    AutodiffContext, as_f32, on_flex, read, to_device, to_dtype, to_precision,
};
