//! Station 3: where the big memory lives. Master weights and optimizer state of every parameter, and the
//! gradients of the round that is being collected.

mod arena;
mod gradients;
mod state;
mod tiles;

pub(crate) use arena::{AlignedBuffer, Arena};
pub(crate) use gradients::{Contribution, GradientStore};
pub(crate) use state::{SavedState, SlotState};
pub(crate) use tiles::{Tile, TileRing};
