//! What happened when: a timeline of the last rounds, for Perfetto and as a picture.

mod chrome;
mod marks;
mod picture;
mod recorder;
mod rows;
mod span;

use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::path::Path;

pub(crate) use recorder::Recorder;
pub use span::{Lane, Span, Work};

/// A snapshot of the timeline.
///
/// It has the last spans of each lane, up to a bound: older ones are overwritten and only counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// In the order in which they began.
    spans: Vec<Span>,
    dropped: u64,
}

impl Trace {
    /// The spans, in the order in which they began.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Spans of any round that newer ones had overwritten when the snapshot was taken.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// The first and the last round of which there are spans. `None` if there are no spans.
    pub fn rounds(&self) -> Option<RangeInclusive<u64>> {
        let rounds = || self.spans.iter().map(|span| span.round);
        Some(rounds().min()?..=rounds().max()?)
    }

    /// Keeps only the spans of these rounds.
    pub fn of_rounds(mut self, rounds: RangeInclusive<u64>) -> Self {
        self.spans.retain(|span| rounds.contains(&span.round));
        self
    }

    /// The timeline in the Chrome trace event format, which Perfetto and `chrome://tracing` open.
    ///
    /// Times are in microseconds since the engine was built. Each lane is a thread; spans of a lane
    /// that overlap each other are on further threads of the lane.
    pub fn to_json(&self) -> String {
        chrome::json(self)
    }

    /// The timeline as a picture that browsers show, with tooltips.
    ///
    /// Times are in milliseconds since the first span. Spans shorter than a quarter of a pixel that
    /// follow each other closely are drawn as one. Meant for a few rounds; see
    /// [`of_rounds`](Self::of_rounds).
    pub fn to_svg(&self) -> String {
        picture::svg(self)
    }

    /// Writes [`to_json`](Self::to_json) to a file.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> io::Result<()> {
        fs::write(path, self.to_json())
    }

    /// Writes [`to_svg`](Self::to_svg) to a file.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn save_svg(&self, path: impl AsRef<Path>) -> io::Result<()> {
        fs::write(path, self.to_svg())
    }

    /// The spans of one lane, in the order in which they began.
    fn lane(&self, lane: Lane) -> impl Iterator<Item = &Span> + Clone {
        self.spans
            .iter()
            .filter(move |span| span.work.lane() == lane)
    }
}

#[cfg(test)]
impl Trace {
    /// A trace of spans without parameters: work, round, start and duration in microseconds.
    fn of(spans: &[(Work, u64, u64, u64)]) -> Self {
        use std::time::Duration;
        let span = |&(work, round, start, took): &(Work, u64, u64, u64)| Span {
            work,
            round,
            parameter: None,
            start: Duration::from_micros(start),
            took: Duration::from_micros(took),
        };
        Self {
            spans: spans.iter().map(span).collect(),
            dropped: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_can_be_cut_out() {
        let trace = Trace::of(&[
            (Work::Forward, 3, 0, 5),
            (Work::Step, 2, 1, 5),
            (Work::Forward, 4, 6, 5),
            (Work::Forward, 5, 12, 5),
        ]);
        assert_eq!(trace.rounds(), Some(2..=5));
        let cut = trace.of_rounds(3..=4);
        assert_eq!(cut.rounds(), Some(3..=4));
        assert_eq!(cut.spans().len(), 2);
        assert_eq!(cut.of_rounds(9..=9).rounds(), None);
    }

    #[test]
    fn files_hold_what_is_returned() {
        let trace = Trace::of(&[(Work::Forward, 1, 0, 5)]);
        let name = |extension| {
            let process = std::process::id();
            std::env::temp_dir().join(format!("burn-zero-offload-trace-{process}.{extension}"))
        };
        trace.save(name("json")).unwrap();
        trace.save_svg(name("svg")).unwrap();
        assert_eq!(fs::read_to_string(name("json")).unwrap(), trace.to_json());
        assert_eq!(fs::read_to_string(name("svg")).unwrap(), trace.to_svg());
        fs::remove_file(name("json")).unwrap();
        fs::remove_file(name("svg")).unwrap();
        assert!(trace.save("/no such folder/trace.json").is_err());
    }
}
