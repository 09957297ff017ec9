//! Station 3: where the big memory lives. Master weights and optimizer state of every parameter, and the
//! gradients of the round that is being collected.

mod arena;
mod gradients;
mod halves;
mod memory;
mod state;
mod threads;
mod tiles;
mod topology;

pub(crate) use gradients::{Collected, Contribution, GradientStore};
pub(crate) use halves::Halves;
pub(crate) use memory::AlignedBuffer;
pub use state::HostState;
pub(crate) use state::{Borrowed, SavedState};
pub(crate) use threads::pool;
pub(crate) use tiles::TileRing;
pub(crate) use topology::Placement;
