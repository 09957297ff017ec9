//! Passes over gradients on the device, each over all elements once.
//!
//! Small gradients travel together: [`pack`] gathers them in one buffer, the wire, in the wire's
//! element type, and counts what is not finite on the way, so that an overflow is known without
//! another look at every element. Gradients that travel as they are get the count alone
//! ([`count_non_finite`]). [`accumulate`] keeps the sum of several passes on the device.
//! [`fill`] marks weights that are still to be written.
//!
//! The kernels use no shared memory, no barriers and no float comparison. Each has its slow twin on
//! the host in [`twin`]; the tests compare them bit for bit on CubeCL's CPU runtime, and look at what
//! they become for CUDA.

pub(crate) mod twin;

#[cfg(feature = "cubecl-backend")]
mod accumulate;
#[cfg(feature = "cubecl-backend")]
mod count;
#[cfg(feature = "cubecl-backend")]
mod fill;
#[cfg(feature = "cubecl-backend")]
mod launch;
#[cfg(feature = "cubecl-backend")]
mod pack;

#[cfg(feature = "cubecl-backend")]
pub(crate) use accumulate::accumulate;
#[cfg(feature = "cubecl-backend")]
pub(crate) use count::count_non_finite;
#[cfg(feature = "cubecl-backend")]
pub(crate) use fill::fill;
#[cfg(feature = "cubecl-backend")]
pub(crate) use launch::elem_type;
#[cfg(feature = "cubecl-backend")]
pub(crate) use pack::{WIRE_ALIGNMENT, pack};

#[cfg(all(test, feature = "cpu"))]
mod fixtures;
#[cfg(all(test, feature = "cuda"))]
mod lowering;
