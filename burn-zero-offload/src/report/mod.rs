//! What a user can see of an offloaded model.

mod json_float;
mod memory;
mod meter;
mod step;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use memory::MemoryReport;
pub(crate) use meter::{Judged, Meter};
pub use step::{GroupReport, Outcome, Overflow, StepReport};

/// Precision of master weights and optimizer state on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StatePrecision {
    /// Single precision for all of them.
    #[default]
    Fp32,
}

impl fmt::Display for StatePrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fp32 => f.write_str("fp32"),
        }
    }
}
