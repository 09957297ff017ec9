//! Runs sections within the time there is, and keeps what a section that panics or hangs left.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::args::Setting;
use crate::table::{Row, Table};

/// After the end of the time, what is running may take so much longer.
const GRACE: Duration = Duration::from_secs(75);

/// Keeps the time.
pub struct Watch {
    end: Instant,
    table: Arc<Table>,
    only: Vec<String>,
}

impl Watch {
    /// Starts to watch. A device that hangs would keep the process for ever: a thread prints the table
    /// and ends it once the time and the grace are over.
    pub fn start(setting: &Setting, table: Arc<Table>, only: Vec<String>) -> Self {
        let (end, kept) = (setting.end, table.clone());
        std::thread::spawn(move || {
            std::thread::sleep((end + GRACE).saturating_duration_since(Instant::now()));
            let name = "the section that was running when the time was over";
            let long = format!("{} s after the end", GRACE.as_secs());
            kept.add("time", vec![Row::check(name, long, "", false)]);
            println!("{}", kept.print());
            std::process::exit(1);
        });
        Self { end, table, only }
    }

    /// Runs a section and adds its rows to the table. A panic is a row too.
    pub fn section(&self, name: &'static str, run: impl FnOnce() -> Vec<Row>) {
        if !self.only.is_empty() && !self.only.iter().any(|only| only == name) {
            return;
        }
        if Instant::now() >= self.end {
            let rows = vec![Row::skip("all of it", "the time was used up")];
            return self.table.add(name, rows);
        }
        eprintln!("gpu-check: {name}");
        let started = Instant::now();
        let rows = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
            let message = panic.downcast_ref::<String>().map(String::as_str);
            let message = message.or(panic.downcast_ref::<&str>().copied());
            let message = message.unwrap_or("a panic without a message");
            vec![Row::check(
                "the section ended in a panic",
                message,
                "",
                false,
            )]
        });
        self.table.add(name, rows);
        eprintln!(
            "gpu-check: {name} took {:.1} s",
            started.elapsed().as_secs_f64()
        );
    }
}
