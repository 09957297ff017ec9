//! Ctrl-C as a flag that loops look at between two steps.

use std::process;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Exit code of a process that Ctrl-C ended.
const EXIT_CODE: i32 = 130;

/// Let the first Ctrl-C ask for an orderly end; the second ends the process at once.
///
/// # Errors
///
/// Fails if the system refuses the handler.
pub fn install() -> Result<()> {
    ctrlc::set_handler(|| {
        if REQUESTED.swap(true, Ordering::Relaxed) {
            process::exit(EXIT_CODE);
        }
    })
    .context("cannot listen for Ctrl-C")
}

/// Whether Ctrl-C was pressed.
pub fn requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}
