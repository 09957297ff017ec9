//! What happens when data is late, damaged or lost between two stations.
//!
//! Hooks at the boundaries ([`Boundaries`](crate::boundary::Boundaries)) sleep, fail or panic, and every
//! buffer that is about to be filled is first overwritten with NaN: gradients on the device before they
//! are packed, memory of the host before they are stored, tiles before the step writes them.

mod delays;
mod events;
mod failures;
mod fixture;
mod interrupted;
mod overlap;
mod schedules;
mod simulated;
mod verify;
