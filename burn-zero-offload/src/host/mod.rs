//! Station 3: where the big memory lives. Master weights and moments of every parameter, and the
//! gradients of the round that is being collected.

mod arena;
mod gradients;
mod state;

pub(crate) use arena::Arena;
pub(crate) use gradients::{GradientStore, HostGradient};
pub(crate) use state::{SavedState, SlotState};
