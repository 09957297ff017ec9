//! The front door: from Burn's optimizer configs to an offloaded model and its optimizer.

mod collect;
mod config;
mod install;
mod kept;
mod names;
mod offload;
mod options;
mod rule;
mod scan;
mod settle;
mod slot;

pub use config::{OffloadOptimizerConfig, WithOffload};
pub use offload::Offload;
