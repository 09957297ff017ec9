//! Makes events wait for each other, so that an order of theirs can be shown without looking at a clock.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::boundary::{Boundary, Hook};

/// What would take so long has hung.
const HUNG: Duration = Duration::from_secs(60);

pub(super) type Place = Box<dyn Fn(Boundary) -> bool + Send>;

/// The boundaries that data has passed, and one that it cannot pass.
#[derive(Default)]
pub(super) struct Events {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Boundaries that somebody has come to, whether held there or not.
    seen: Vec<Boundary>,
    held: Option<Place>,
}

impl Events {
    pub(super) fn new() -> Arc<Self> {
        Arc::default()
    }

    pub(super) fn hook(self: &Arc<Self>) -> Arc<Hook> {
        let events = self.clone();
        Arc::new(move |boundary| {
            let mut state = events.state.lock();
            state.seen.push(boundary);
            events.changed.notify_all();
            while state.held.as_ref().is_some_and(|held| held(boundary)) {
                let waited = events.changed.wait_for(&mut state, HUNG);
                assert!(!waited.timed_out(), "{boundary:?} was held for too long");
            }
            Ok(())
        })
    }

    /// From here on, whoever comes to `place` waits there.
    pub(super) fn hold(&self, place: impl Fn(Boundary) -> bool + Send + 'static) {
        self.state.lock().held = Some(Box::new(place));
        // Who was held elsewhere goes on.
        self.changed.notify_all();
    }

    /// Lets everybody pass.
    pub(super) fn release(&self) {
        self.state.lock().held = None;
        self.changed.notify_all();
    }

    /// Forgets what has been seen.
    pub(super) fn forget(&self) {
        self.state.lock().seen.clear();
    }

    /// Waits until somebody has come to `place`.
    pub(super) fn wait_for(&self, place: impl Fn(Boundary) -> bool) {
        let mut state = self.state.lock();
        while !state.seen.iter().any(|&seen| place(seen)) {
            let waited = self.changed.wait_for(&mut state, HUNG);
            assert!(!waited.timed_out(), "nobody came; seen: {:?}", state.seen);
        }
    }

    /// Slots in the order in which their steps began.
    pub(super) fn stepped(&self) -> Vec<usize> {
        let seen = self.state.lock().seen.clone();
        let stepped = seen.into_iter().filter_map(|boundary| match boundary {
            Boundary::Stepped { slot, tile: 0 } => Some(slot),
            _ => None,
        });
        stepped.collect()
    }
}
