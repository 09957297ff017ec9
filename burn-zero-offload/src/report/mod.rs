//! What a user can see of an offloaded model.

mod json_float;
mod memory;
mod meter;
mod step;

pub use crate::optimize::StatePrecision;
pub use memory::MemoryReport;
pub(crate) use meter::{Judged, Meter};
pub use step::{GroupReport, Outcome, Overflow, StepReport};
