//! Which parameters are to be updated and sent, in which order, and who may go on when.
//!
//! Nothing here waits or runs: the thread that works the queue off and the threads that wait for it are in
//! [`updates`](super::updates). So every interleaving of theirs can be walked through in a test.

use std::collections::{BTreeSet, VecDeque};

use crate::error::OffloadError;
use crate::report::WaitedFor;

/// What is to be done to a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// Update the masters and send the device's weights along with them.
    Update,
    /// Send the device's weights as an earlier [`Step`](Kind::Step) left them.
    Publish,
    /// Update the masters; the device's weights wait on the host.
    Step,
}

impl Kind {
    /// Whether the model's weights are not there before it is done.
    fn fills(self) -> bool {
        self != Self::Step
    }
}

/// What somebody waits for at a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Until {
    /// The weights that the model holds are on the device.
    Visible,
    /// Nothing is left to be done.
    Settled,
}

impl Until {
    /// Whether it is reached no sooner than work of this kind is done.
    fn concerns(self, kind: Kind) -> bool {
        self == Self::Settled || kind.fills()
    }
}

/// What is to be done, by parameter. `J` is what a piece of work needs to know.
#[derive(Clone, Debug)]
pub(crate) struct Queue<J> {
    slots: Vec<Slot<J>>,
    /// Slots whose first piece of work may begin, the most urgent first.
    ready: BTreeSet<Key>,
    /// Pieces of work that are queued or begun.
    outstanding: usize,
    /// Slots whose work failed.
    failed: usize,
    closed: bool,
}

/// Work that the model's weights wait for comes before other work, and what is waited for before both;
/// then the order in which the last forward used the parameters; then that of the model.
type Key = (u8, u32, usize);

#[derive(Clone, Debug)]
struct Slot<J> {
    queued: VecDeque<(Kind, J)>,
    /// Begun, not done. The next piece of work of the same parameter waits for it.
    begun: Option<Kind>,
    /// All that is left of it is on its way to the device.
    sending: bool,
    /// What somebody waits for, as long as there is queued work that it takes.
    urgent: Option<Until>,
    rank: u32,
    failure: Option<OffloadError>,
}

impl<J> Slot<J> {
    fn waits_for(&self, until: Until) -> bool {
        self.queues(until) || self.begun.is_some_and(|kind| until.concerns(kind))
    }

    fn queues(&self, until: Until) -> bool {
        self.queued.iter().any(|(kind, _)| until.concerns(*kind))
    }

    fn key(&self, index: usize) -> Option<Key> {
        let (kind, _) = self.queued.front()?;
        let class = match (self.urgent.is_some(), kind.fills()) {
            (true, _) => 0,
            (false, true) => 1,
            (false, false) => 2,
        };
        self.begun.is_none().then_some((class, self.rank, index))
    }
}

impl<J> Queue<J> {
    /// Nothing to do for `slots` parameters.
    pub(crate) fn new(slots: usize) -> Self {
        let slot = |_| Slot {
            queued: VecDeque::new(),
            begun: None,
            sending: false,
            urgent: None,
            rank: u32::MAX,
            failure: None,
        };
        Self {
            slots: (0..slots).map(slot).collect(),
            ready: BTreeSet::new(),
            outstanding: 0,
            failed: 0,
            closed: false,
        }
    }

    fn change(&mut self, index: usize, change: impl FnOnce(&mut Slot<J>)) {
        let slot = &mut self.slots[index];
        if let Some(key) = slot.key(index) {
            self.ready.remove(&key);
        }
        change(slot);
        self.ready.extend(slot.key(index));
    }

    /// Adds a piece of work; `rank` says when the model will need the parameter, compared with others.
    ///
    /// After a failure at `slot` it is returned, to be dropped elsewhere: it would build on what failed.
    pub(crate) fn push(&mut self, slot: usize, rank: u32, kind: Kind, job: J) -> Option<J> {
        if self.slots[slot].failure.is_some() {
            return Some(job);
        }
        self.outstanding += 1;
        self.change(slot, |slot| {
            slot.rank = rank;
            slot.queued.push_back((kind, job));
        });
        None
    }

    /// Begins the most urgent piece of work there is.
    pub(crate) fn begin(&mut self) -> Option<(usize, Kind, J)> {
        let (_, _, index) = self.ready.pop_first()?;
        let slot = &mut self.slots[index];
        let (kind, job) = slot.queued.pop_front()?;
        slot.begun = Some(kind);
        slot.sending = kind == Kind::Publish;
        Some((index, kind, job))
    }

    /// What was begun at `slot` is done. After a failure, what is queued there is dropped: it would build on
    /// what failed. Returns that, to be dropped elsewhere.
    pub(crate) fn done(&mut self, index: usize, result: Result<(), OffloadError>) -> Vec<J> {
        self.outstanding -= 1;
        let mut dropped = Vec::new();
        let mut failed = false;
        self.change(index, |slot| {
            slot.begun = None;
            if let Err(error) = result {
                failed = slot.failure.is_none();
                slot.failure.get_or_insert(error);
                dropped.extend(slot.queued.drain(..).map(|(_, job)| job));
            }
            slot.urgent = slot.urgent.filter(|until| slot.queues(*until));
        });
        self.outstanding -= dropped.len();
        self.failed += usize::from(failed);
        dropped
    }

    /// Has the work that `slot` is waited for come before all other.
    pub(crate) fn urge(&mut self, slot: usize, until: Until) {
        self.change(slot, |slot| {
            if slot.queues(until) {
                slot.urgent = slot.urgent.max(Some(until));
            }
        });
    }

    /// Whether a thread that waits at `slot` may go on; an error if it never can.
    pub(crate) fn reached(&self, slot: usize, until: Until) -> Result<bool, OffloadError> {
        let slot = &self.slots[slot];
        match &slot.failure {
            Some(error) => Err(error.clone()),
            None => Ok(!slot.waits_for(until)),
        }
    }

    /// What was begun at `slot` is on its way to the device.
    pub(crate) fn sending(&mut self, slot: usize) {
        self.slots[slot].sending = true;
    }

    /// What keeps `slot` now.
    pub(crate) fn stage(&self, slot: usize) -> WaitedFor {
        match &self.slots[slot] {
            Slot { begun: None, .. } => WaitedFor::Turn,
            Slot { sending: true, .. } => WaitedFor::Upload,
            _ => WaitedFor::Step,
        }
    }

    /// The first failure in the order of the model.
    pub(crate) fn failure(&self) -> Option<OffloadError> {
        self.slots.iter().find_map(|slot| slot.failure.clone())
    }

    /// Forgets that work at `slot` failed: its values have been replaced.
    pub(crate) fn forgive(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        if slot.failure.take().is_some() {
            self.failed -= 1;
        }
    }

    /// Pieces of work that are not done.
    pub(crate) fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Whether somebody might have to wait, or be told of a failure.
    pub(crate) fn is_quiet(&self) -> bool {
        self.outstanding == 0 && self.failed == 0
    }

    /// No more work will come.
    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    /// Whether the thread that works it off may end.
    pub(crate) fn is_over(&self) -> bool {
        self.closed && self.outstanding == 0
    }
}

#[cfg(test)]
mod interleavings;

#[cfg(test)]
mod tests {
    use super::*;

    fn order(queue: &mut Queue<u32>) -> Vec<u32> {
        let mut all = vec![];
        while let Some((slot, _, job)) = queue.begin() {
            all.push(job);
            queue.done(slot, Ok(()));
        }
        all
    }

    fn error() -> OffloadError {
        OffloadError::Upload {
            path: "w".into(),
            reason: "no".into(),
        }
    }

    #[test]
    fn work_comes_in_the_order_of_need() {
        let mut queue = Queue::new(4);
        queue.push(0, 9, Kind::Update, 0);
        queue.push(1, 3, Kind::Step, 1);
        queue.push(2, 5, Kind::Publish, 2);
        queue.push(3, 5, Kind::Update, 3);
        assert_eq!(order(&mut queue.clone()), [2, 3, 0, 1]);
        queue.urge(1, Until::Settled);
        assert_eq!(order(&mut queue), [1, 2, 3, 0]);
        assert!(queue.is_quiet());
    }

    #[test]
    fn work_on_one_parameter_keeps_its_order() {
        let mut queue = Queue::new(2);
        queue.push(0, 1, Kind::Publish, 10);
        queue.push(0, 1, Kind::Step, 11);
        queue.push(1, 2, Kind::Update, 12);
        assert_eq!(queue.begin(), Some((0, Kind::Publish, 10)));
        assert_eq!(queue.begin(), Some((1, Kind::Update, 12)));
        assert_eq!(queue.begin(), None, "the step waits for the publication");
        assert_eq!(queue.reached(0, Until::Visible).ok(), Some(false));
        queue.done(0, Ok(()));
        assert_eq!(queue.reached(0, Until::Visible).ok(), Some(true));
        assert_eq!(queue.reached(0, Until::Settled).ok(), Some(false));
        assert_eq!(queue.begin(), Some((0, Kind::Step, 11)));
        assert_eq!(queue.stage(0), WaitedFor::Step);
        queue.sending(1);
        assert_eq!(queue.stage(1), WaitedFor::Upload);
        queue.done(0, Ok(()));
        queue.done(1, Ok(()));
        assert_eq!(queue.reached(0, Until::Settled).ok(), Some(true));
        assert_eq!(queue.outstanding(), 0);
    }

    #[test]
    fn a_failure_stays_until_the_values_are_replaced() {
        let mut queue = Queue::new(2);
        queue.push(1, 0, Kind::Publish, 1);
        queue.push(1, 0, Kind::Step, 2);
        assert!(queue.begin().is_some());
        assert_eq!(queue.done(1, Err(error())), [2]);
        assert!(queue.reached(1, Until::Visible).is_err());
        assert!(queue.reached(0, Until::Settled).is_ok());
        assert!(queue.failure().is_some() && !queue.is_quiet());
        queue.forgive(1);
        assert!(queue.failure().is_none() && queue.is_quiet());
        queue.close();
        assert!(queue.is_over());
    }
}
