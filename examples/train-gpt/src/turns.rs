//! Turns for the tests that draw weights.

use std::sync::{Mutex, MutexGuard, PoisonError};

static TURN: Mutex<()> = Mutex::new(());

/// Wait for other tests that draw weights: the generator of a device is one for all threads, so
/// that a seed stands for nothing while two of them draw.
pub fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
