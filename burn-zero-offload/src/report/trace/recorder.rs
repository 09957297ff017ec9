use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Lane, Span, Trace, Work};

/// Events kept of each lane: 1 MiB.
const BOUND: usize = 1 << 15;

/// The slot of an event that is about no parameter.
const NO_SLOT: u32 = u32::MAX;

/// Writes down spans. Cheap enough to be always on: one lock that only threads of the same lane
/// share, and 32 bytes.
#[derive(Debug)]
pub(crate) struct Recorder {
    built: Instant,
    /// Paths of the parameters, by slot.
    paths: Vec<String>,
    /// One per lane, so that training, downloads and the step do not contend.
    lanes: [Mutex<Ring>; Lane::ALL.len()],
    /// Up to when the device has been seen working.
    device: Mutex<Option<Instant>>,
}

/// A span as it is kept; names are looked up when somebody looks.
#[derive(Clone, Copy, Debug)]
struct Event {
    round: u64,
    /// Nanoseconds since the engine was built.
    start: u64,
    /// Nanoseconds.
    took: u64,
    slot: u32,
    work: Work,
}

/// The last events of a lane.
#[derive(Debug)]
struct Ring {
    /// Without memory until the first event.
    events: Vec<Event>,
    /// The oldest event, once the ring is full: the next to be overwritten.
    oldest: usize,
    dropped: u64,
    bound: usize,
}

impl Recorder {
    /// A recorder whose clock starts now, of parameters with these paths.
    pub(crate) fn new(paths: Vec<String>) -> Self {
        Self::bounded(paths, BOUND)
    }

    fn bounded(paths: Vec<String>, bound: usize) -> Self {
        let ring = |_| {
            Mutex::new(Ring {
                events: Vec::new(),
                oldest: 0,
                dropped: 0,
                bound,
            })
        };
        Self {
            built: Instant::now(),
            paths,
            lanes: Lane::ALL.map(ring),
            device: Mutex::default(),
        }
    }

    /// Something that began at `from` ends now.
    pub(crate) fn span(&self, work: Work, round: u64, slot: Option<usize>, from: Instant) {
        self.between(work, round, slot, from, Instant::now());
    }

    /// Something lasted from `from` to `to`.
    pub(crate) fn between(
        &self,
        work: Work,
        round: u64,
        slot: Option<usize>,
        from: Instant,
        to: Instant,
    ) {
        let event = Event {
            round,
            start: nanoseconds(from.saturating_duration_since(self.built)),
            took: nanoseconds(to.saturating_duration_since(from)),
            slot: slot
                .and_then(|slot| u32::try_from(slot).ok())
                .unwrap_or(NO_SLOT),
            work,
        };
        self.lanes[work.lane() as usize].lock().push(event);
    }

    /// The device begins to compute gradients.
    pub(crate) fn device_from_here(&self) {
        *self.device.lock() = Some(Instant::now());
    }

    /// The device has computed the gradient of `slot`, and nothing else since its last gradient.
    pub(crate) fn device_until(&self, round: u64, slot: usize) {
        let now = Instant::now();
        let from = self.device.lock().replace(now);
        self.between(Work::Gradient, round, Some(slot), from.unwrap_or(now), now);
    }

    /// What is known now.
    pub(crate) fn snapshot(&self) -> Trace {
        let mut events = Vec::new();
        let mut dropped = 0;
        for lane in &self.lanes {
            let ring = lane.lock();
            events.extend_from_slice(&ring.events);
            dropped += ring.dropped;
        }
        // Of spans that begin together the longest is first. The sort is stable.
        events.sort_by_key(|event| (event.start, event.work.lane(), u64::MAX - event.took));
        let span = |event: &Event| Span {
            work: event.work,
            round: event.round,
            parameter: self.paths.get(event.slot as usize).cloned(),
            start: Duration::from_nanos(event.start),
            took: Duration::from_nanos(event.took),
        };
        Trace {
            spans: events.iter().map(span).collect(),
            dropped,
        }
    }
}

impl Ring {
    fn push(&mut self, event: Event) {
        if self.events.len() < self.bound {
            if self.events.is_empty() {
                // At once, so that a span never waits for older ones to be moved.
                self.events.reserve_exact(self.bound);
            }
            self.events.push(event);
        } else {
            self.events[self.oldest] = event;
            self.oldest = (self.oldest + 1) % self.bound;
            self.dropped += 1;
        }
    }
}

/// 64 bits of nanoseconds last for 584 years.
fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn spans_are_named_and_in_the_order_in_which_they_began() {
        let recorder = Recorder::new(vec!["a.weight".into(), "b.weight".into()]);
        let zero = recorder.built;
        recorder.between(Work::Upload, 2, Some(1), zero + 3 * MS, zero + 5 * MS);
        recorder.between(Work::Step, 2, Some(1), zero + MS, zero + 3 * MS);
        recorder.between(Work::Forward, 3, None, zero + 2 * MS, zero + 2 * MS);
        let span = |work, round, parameter: Option<&str>, start, took| Span {
            work,
            round,
            parameter: parameter.map(Into::into),
            start: start * MS,
            took: took * MS,
        };
        let expected = [
            span(Work::Step, 2, Some("b.weight"), 1, 2),
            span(Work::Forward, 3, None, 2, 0),
            span(Work::Upload, 2, Some("b.weight"), 3, 2),
        ];
        assert_eq!(recorder.snapshot().spans(), expected);
    }

    #[test]
    fn a_full_lane_forgets_its_oldest_spans_and_no_other_lane_does() {
        let recorder = Recorder::bounded(Vec::new(), 3);
        let zero = recorder.built;
        recorder.between(Work::Forward, 9, None, zero, zero + MS);
        for round in 1..=5 {
            let from = zero + round as u32 * MS;
            recorder.between(Work::Step, round, None, from, from + MS);
        }
        let trace = recorder.snapshot();
        let rounds: Vec<u64> = trace.spans().iter().map(|span| span.round).collect();
        assert_eq!(rounds, [9, 3, 4, 5]);
        assert_eq!(trace.dropped(), 2);
    }

    #[test]
    fn a_span_lasts_until_now() {
        let recorder = Recorder::new(Vec::new());
        let from = Instant::now();
        std::thread::sleep(2 * MS);
        recorder.span(Work::WaitStep, 1, None, from);
        assert!(recorder.snapshot().spans()[0].took >= 2 * MS);
    }

    /// Clocks of threads, or of before the engine was built, end in no panic.
    #[test]
    fn times_before_the_beginning_are_zero() {
        let recorder = Recorder::new(vec!["a".into()]);
        let zero = recorder.built;
        recorder.between(Work::Walk, 1, Some(7), zero, zero - MS);
        recorder.between(Work::Walk, 1, None, zero - 2 * MS, zero - MS);
        let trace = recorder.snapshot();
        let times = |span: &Span| (span.start, span.took);
        let times: Vec<_> = trace.spans().iter().map(times).collect();
        assert_eq!(
            times,
            [(Duration::ZERO, MS), (Duration::ZERO, Duration::ZERO)]
        );
        assert_eq!(trace.spans()[1].parameter, None, "there is no slot 7");
    }

    #[test]
    fn an_event_is_32_bytes_and_a_lane_has_no_memory_before_its_first() {
        assert_eq!(size_of::<Event>(), 32);
        let recorder = Recorder::new(Vec::new());
        assert_eq!(recorder.lanes[0].lock().events.capacity(), 0);
    }
}
