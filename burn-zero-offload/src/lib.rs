//! x
mod capture;
mod config;
mod download;
mod engine;
mod error;
mod host;
mod layout;
pub mod optimize;
mod optimizer;
mod report;
mod upload;

pub use config::OffloadConfig;
pub use error::OffloadError;
pub use optimize::SimdLevel;
pub use optimizer::{Offload, OffloadOptimizerConfig, WithOffload};
pub use report::MemoryReport;
