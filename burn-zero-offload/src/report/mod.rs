//! What a user can see of an offloaded model.

mod json_float;
mod memory;
mod meter;
mod step;
pub(crate) mod trace;

pub use crate::optimize::StatePrecision;
pub use memory::MemoryReport;
pub(crate) use meter::{Judged, Meter};
pub use step::{GroupReport, LongestWait, Outcome, Overflow, StepReport, WaitedFor};
pub use trace::{Lane, Span, Trace, Work};
