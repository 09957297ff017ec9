//! What the library wrote down of a run: a picture of it, and how well its updates were hidden.

use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use burn_zero_offload::{Lane, Schedule, Trace, Work};

/// Rounds in the picture.
const DRAWN: u64 = 3;
/// Rounds at the end of a run that are measured. Each lane of a trace has its last 32768 spans, and every
/// parameter takes some in each round: of so few rounds the lanes of most models have all.
const MEASURED: u64 = 100;

/// The updates of the rounds that were measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Updates {
    /// Time they took in a round, on average.
    pub took: Duration,
    /// Part of it, of 1, that the training loop waited for.
    pub exposed: f64,
}

/// How long the last updates took, and how well they were hidden; `None` if there were none.
///
/// This adds up the spans of the trace. The library's own report of a round has the same numbers, but a
/// delayed update is waited for in the next step, which begins the next report.
pub fn updates(trace: Trace, schedule: Schedule) -> Option<Updates> {
    let (_, last) = trace.rounds()?.into_inner();
    // The last update has nothing to hide behind.
    let first = first_of(schedule).max(last.saturating_sub(MEASURED));
    let measured = trace.of_rounds(first..=last.saturating_sub(1));
    let total = |counts: fn(Work) -> bool| -> Duration {
        let spans = measured.spans().iter();
        spans.filter(|s| counts(s.work)).map(|s| s.took).sum()
    };
    let took = total(|work| work == Work::Step);
    let waited = match schedule {
        // The step does them itself.
        Schedule::Synchronous => took,
        _ => total(|work| matches!(work, Work::WaitForward | Work::WaitStep | Work::WaitFlush)),
    };
    let (first, last) = measured.rounds()?.into_inner();
    (took > Duration::ZERO).then(|| Updates {
        took: took.div_f64((last - first + 1) as f64),
        exposed: waited.div_duration_f64(took),
    })
}

/// The first round that is as `schedule` has it.
fn first_of(schedule: Schedule) -> u64 {
    match schedule {
        Schedule::Delayed { warmup } => warmup,
        Schedule::Synchronous | Schedule::ForwardOverlapped => 1,
    }
}

/// Write `PREFIX.json`, a timeline for Perfetto, and `PREFIX.svg`, a picture of a few rounds.
///
/// # Errors
///
/// Fails if a file cannot be written.
pub fn write(trace: &Trace, schedule: Schedule, prefix: &Path) -> Result<()> {
    let Some(rounds) = middle(trace, schedule) else {
        println!("There is no timeline: this process has trained nothing");
        return Ok(());
    };
    let (first, last) = (*rounds.start(), *rounds.end());
    let json = prefix.with_added_extension("json");
    let svg = prefix.with_added_extension("svg");
    let cannot = |path: &Path| format!("cannot write {}", path.display());
    trace.save(&json).with_context(|| cannot(&json))?;
    let few = trace.clone().of_rounds(rounds);
    few.save_svg(&svg).with_context(|| cannot(&svg))?;
    println!(
        "Wrote the timeline {} (for ui.perfetto.dev), and steps {first} to {last} of it as {}",
        json.display(),
        svg.display()
    );
    Ok(())
}

/// Rounds in the middle of those that are as `schedule` has them, and of which every lane has all spans.
fn middle(trace: &Trace, schedule: Schedule) -> Option<RangeInclusive<u64>> {
    let (mut first, last) = trace.rounds()?.into_inner();
    if trace.dropped() > 0 {
        // The busiest lane forgets first.
        let oldest = |lane| {
            let mut spans = trace.spans().iter();
            spans.find(|span| span.work.lane() == lane)
        };
        let oldest = Lane::ALL.into_iter().filter_map(oldest);
        first = oldest.map(|span| span.round).max()?;
    }
    // A run that was stopped in its warm-up has nothing better.
    first = first.max(first_of(schedule)).min(last);
    let start = (first + (last - first) / 2).saturating_sub(DRAWN / 2);
    let start = start.max(first);
    Some(start..=(start + DRAWN - 1).min(last))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::config::TrainConfig;
    use crate::data::Corpus;
    use crate::train::Run;
    use crate::turns::turn;

    /// The trace of a run of `steps` with the schedule `schedule`.
    fn trace(schedule: crate::config::Schedule, steps: usize) -> Trace {
        let config = TrainConfig::new()
            .with_layers(1)
            .with_width(16)
            .with_heads(2)
            .with_context(8)
            .with_batch(2)
            .with_steps(steps)
            .with_schedule(schedule);
        let text = b"Every text is a good text to test with. ".repeat(40);
        let corpus = Corpus::split(text, 8).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut run = Run::start(config, &corpus).unwrap();
        run.train(&corpus, dir.path()).unwrap();
        run.trace().unwrap()
    }

    #[test]
    fn three_rounds_of_the_middle_are_drawn() {
        let _turn = turn();
        let trace = trace(crate::config::Schedule::Overlapped, 7);
        let overlapped = Schedule::ForwardOverlapped;
        assert_eq!(middle(&trace, overlapped), Some(3..=5));
        assert_eq!(middle(&trace, Schedule::Delayed { warmup: 5 }), Some(5..=7));
        assert_eq!(middle(&trace, Schedule::Delayed { warmup: 9 }), Some(7..=7));
        let few = trace.clone().of_rounds(4..=5);
        assert_eq!(middle(&few, overlapped), Some(4..=5));
        assert_eq!(middle(&Trace::default(), overlapped), None);

        let dir = tempfile::tempdir().unwrap();
        write(&trace, overlapped, &dir.path().join("run.1")).unwrap();
        for name in ["run.1.json", "run.1.svg"] {
            assert!(fs::metadata(dir.path().join(name)).unwrap().len() > 0);
        }
    }

    #[test]
    fn only_synchronous_updates_are_all_waited_for() {
        let _turn = turn();
        let synchronous = trace(crate::config::Schedule::Synchronous, 4);
        let measured = updates(synchronous.clone(), Schedule::Synchronous).unwrap();
        assert!(measured.took > Duration::ZERO);
        assert_eq!(measured.exposed, 1.0);
        // Nothing waits for what the step does itself.
        let measured = updates(synchronous, Schedule::ForwardOverlapped).unwrap();
        assert_eq!(measured.exposed, 0.0);
        assert_eq!(updates(Trace::default(), Schedule::Synchronous), None);
    }
}
