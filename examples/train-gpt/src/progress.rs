//! How a run shows its progress.

use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressStyle};

use crate::config::TrainConfig;
use crate::history::Point;

/// Lines printed in the course of a run where no progress bar can be drawn.
const LOG_LINES: usize = 10;

/// A progress bar in a terminal, a few lines elsewhere.
pub struct Progress {
    bar: Option<ProgressBar>,
    total: usize,
    tokens_per_step: usize,
}

impl Progress {
    /// The progress of a run that has taken `done` steps.
    pub fn new(config: &TrainConfig, done: usize) -> Self {
        let total = config.steps;
        let bar = io::stderr().is_terminal().then(|| {
            let style =
                ProgressStyle::with_template("{bar:30} {pos}/{len} [{elapsed}, {eta} left] {msg}")
                    .unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::new(total as u64)
                .with_style(style)
                .with_position(done as u64)
        });
        Self {
            bar,
            total,
            tokens_per_step: config.tokens_per_step(),
        }
    }

    /// Show what step number `step` gave.
    pub fn report(&self, step: usize, point: Point) {
        let message = format!(
            "loss {:.3}, {:.0} tokens/s, {:.0} ms/step",
            point.loss,
            point.tokens_per_second,
            1e3 * self.tokens_per_step as f64 / point.tokens_per_second,
        );
        match &self.bar {
            Some(bar) => {
                bar.set_position(step as u64);
                bar.set_message(message);
            }
            None if step == 1 || step.is_multiple_of(self.total.div_ceil(LOG_LINES)) => {
                eprintln!("step {step}/{}: {message}", self.total);
            }
            None => {}
        }
    }

    /// Leave the last state on the screen.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}
