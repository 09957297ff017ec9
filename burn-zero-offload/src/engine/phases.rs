//! What the training loop is doing, for the timeline.

use std::time::Instant;

use parking_lot::Mutex;

use crate::report::Work;
use crate::report::trace::Recorder;

/// The phase that the training loop is in. Burn tells when one begins, not when one ends: each ends with the
/// beginning of the next, a walk with its last parameter.
#[derive(Debug, Default)]
pub(super) struct Phases(Mutex<Phase>);

#[derive(Debug, Default)]
struct Phase {
    work: Option<(Work, Instant)>,
    /// End of the walk's last parameter.
    walked: Option<Instant>,
    round: u64,
}

impl Phases {
    fn begin(&self, trace: &Recorder, work: Work, round: impl FnOnce(&Phase) -> u64) {
        let now = Instant::now();
        let mut phase = self.0.lock();
        let next = round(&phase);
        if let Some((work, from)) = phase.work.replace((work, now)) {
            let to = phase.walked.take().unwrap_or(now);
            trace.between(work, phase.round, None, from, to);
        }
        phase.walked = None;
        phase.round = next;
    }

    /// A forward pass begins.
    pub(super) fn forward(&self, trace: &Recorder) {
        self.begin(trace, Work::Forward, |phase| match phase.work {
            None | Some((Work::Walk, _)) => phase.round + 1,
            Some(_) => phase.round,
        });
    }

    /// A backward pass of `round` begins.
    pub(super) fn backward(&self, trace: &Recorder, round: u64) {
        self.begin(trace, Work::Backward, |_| round);
    }

    /// The optimizer begins to walk over the parameters.
    pub(super) fn walk(&self, trace: &Recorder, round: u64) {
        self.begin(trace, Work::Walk, |_| round);
    }

    /// The walk has come so far.
    pub(super) fn walked(&self) {
        self.0.lock().walked = Some(Instant::now());
    }

    /// Writes down a walk that may be over.
    pub(super) fn so_far(&self, trace: &Recorder) {
        let mut phase = self.0.lock();
        if let (Some((Work::Walk, from)), Some(to)) = (phase.work, phase.walked) {
            trace.between(Work::Walk, phase.round, None, from, to);
            phase.work = None;
            phase.walked = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_phase_ends_with_the_next_and_a_walk_with_its_last_parameter() {
        let (phases, trace) = (Phases::default(), Recorder::new(vec![]));
        for round in 1..3 {
            phases.forward(&trace);
            phases.backward(&trace, round);
            phases.walk(&trace, round);
            phases.walked();
        }
        phases.so_far(&trace);
        phases.so_far(&trace);
        let spans = trace.snapshot();
        let seen: Vec<_> = spans.spans().iter().map(|s| (s.work, s.round)).collect();
        let of = |round| [Work::Forward, Work::Backward, Work::Walk].map(|work| (work, round));
        assert_eq!(seen, [of(1), of(2)].concat());
    }
}
