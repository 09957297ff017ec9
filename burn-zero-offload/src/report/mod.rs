//! What a user can see of an offloaded model.

mod memory;
mod meter;
mod step;

pub use memory::MemoryReport;
pub(crate) use meter::Meter;
pub use step::StepReport;
