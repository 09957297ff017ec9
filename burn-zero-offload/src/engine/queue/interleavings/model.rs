//! The threads as programs of atomic steps, and what holds in every state they can come to.

use std::hash::{Hash, Hasher};

use super::*;

mod others;
mod trainer;

pub(super) const SLOTS: usize = 3;
/// Weights that have been promised and are not there.
const PENDING: Rounds = 1 << 7;
/// Values from a record: the gradient of no round may come on top of them.
const RESTORED: Rounds = !PENDING;
/// Parameters whose landing is waited for together.
const LANDINGS: usize = 2;

/// Whether the thread could move; an error if something came out wrong.
type Moved = Result<bool, String>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Thread {
    /// The training loop.
    Trainer,
    /// Downloads gradients.
    Reader,
    /// Works the queue off.
    Updater,
    /// Uploads weights.
    Sender,
    /// Does something else with the engine.
    Watcher,
    /// Lets go of the engine when nobody has it any more.
    Dropper,
}

impl Thread {
    pub(super) const ALL: [Self; 6] = [
        Self::Trainer,
        Self::Reader,
        Self::Updater,
        Self::Sender,
        Self::Watcher,
        Self::Dropper,
    ];
}

#[derive(Clone, Copy, Debug, Hash)]
struct Job {
    round: usize,
    /// What it adds to the masters.
    gradient: Rounds,
    /// What the weights are that it sends, if they are computed.
    image: Rounds,
}

/// A parameter. Masters and weights come in two tiles.
#[derive(Clone, Copy, Debug, Default, Hash)]
struct Param {
    master: [Rounds; 2],
    /// What the model holds.
    weights: [Rounds; 2],
    /// What the masters have and the model does not hold, and whether somebody has seen it.
    ahead: Option<(Rounds, bool)>,
    shows: bool,
    /// The round whose update was queued last.
    round: usize,
    collected: Rounds,
    sealed: Rounds,
    /// What the last forward pass saw.
    seen: Rounds,
    /// Rounds whose walk has passed.
    passed: Rounds,
    /// What a flush found done.
    flushed: Rounds,
    /// Work on it has begun and is not done.
    worked: bool,
    /// A tile of it could not be sent.
    broken: bool,
}

#[derive(Clone, Debug, Hash)]
enum Phase {
    Begin,
    Waiting(Until),
    Reached,
    /// The walk has looked at a parameter and queues what is to be done.
    Pushing(VecDeque<(Kind, Job)>),
}

#[derive(Clone, Copy, Debug, Hash)]
enum Message {
    Tile {
        slot: usize,
        tile: usize,
        round: usize,
        image: Rounds,
    },
    Land(usize),
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Watching {
    Downloads,
    All,
    /// At a parameter.
    Look(usize),
    /// It is the parameter's turn; what its masters had when it was waited for.
    Found(usize, Rounds),
    Over,
}

/// What is run.
#[derive(Debug)]
struct Plan {
    scenario: Scenario,
    program: Vec<(usize, Op)>,
    /// Where the trainer ends, or goes on after a failure.
    end: usize,
}

#[derive(Clone, Debug)]
pub(super) struct State {
    plan: Rc<Plan>,
    queue: Queue<Job>,
    params: [Param; SLOTS],
    /// Place of the trainer in its program.
    at: usize,
    phase: Phase,
    /// Some weights could not be sent.
    failed: bool,
    /// The trainer was told so.
    told: bool,
    /// A gradient on its way: there is budget for one besides that which is read.
    handed: Option<(usize, usize)>,
    reading: Option<(usize, usize)>,
    /// A begun piece of work, and how many of its steps are done.
    work: Option<(usize, Kind, Job, usize)>,
    updater_over: bool,
    channel: Option<Message>,
    landings: VecDeque<usize>,
    /// The landings have been waited for and are reported one by one.
    draining: bool,
    watching: Watching,
}

impl Hash for Queue<Job> {
    fn hash<H: Hasher>(&self, into: &mut H) {
        for slot in &self.slots {
            let failed = slot.failure.is_some();
            (&slot.queued, slot.begun, slot.sending).hash(into);
            (slot.urgent, slot.rank, failed).hash(into);
        }
        (&self.ready, self.outstanding, self.failed, self.closed).hash(into);
    }
}

impl Hash for State {
    fn hash<H: Hasher>(&self, into: &mut H) {
        (&self.queue, self.params, self.at, &self.phase).hash(into);
        (self.failed, self.told).hash(into);
        (self.handed, self.reading, self.work, self.updater_over).hash(into);
        (self.channel, &self.landings, self.draining, self.watching).hash(into);
    }
}

fn ensure(holds: bool, otherwise: &str) -> Result<(), String> {
    match holds {
        true => Ok(()),
        false => Err(otherwise.into()),
    }
}

impl State {
    pub(super) fn new(scenario: Scenario) -> Self {
        let (program, end) = scenario.program();
        let watching = match scenario.watch {
            Watch::Nothing => Watching::Over,
            Watch::Save => Watching::Look(0),
            Watch::Flush => Watching::Downloads,
        };
        Self {
            plan: Rc::new(Plan {
                scenario,
                program,
                end,
            }),
            queue: Queue::new(scenario.slots()),
            params: Default::default(),
            at: 0,
            phase: Phase::Begin,
            failed: false,
            told: false,
            handed: None,
            reading: None,
            work: None,
            updater_over: false,
            channel: None,
            landings: VecDeque::new(),
            draining: false,
            watching,
        }
    }

    /// The next step of a thread, if it need not wait.
    pub(super) fn advance(&mut self, thread: Thread) -> Moved {
        match thread {
            Thread::Trainer => self.train(),
            Thread::Reader => Ok(self.read()),
            Thread::Updater => self.update(),
            Thread::Sender => self.send(),
            Thread::Watcher => self.watch(),
            Thread::Dropper => Ok(self.let_go()),
        }
    }

    /// What holds at all times.
    pub(super) fn consistent(&self) -> Result<(), String> {
        let queue = &self.queue;
        let slots = (0..).zip(&queue.slots);
        let keys: BTreeSet<Key> = slots.filter_map(|(index, slot)| slot.key(index)).collect();
        ensure(keys == queue.ready, "the queue has lost work")?;
        let begun = queue.slots.iter().filter(|s| s.begun.is_some()).count();
        let queued: usize = queue.slots.iter().map(|s| s.queued.len()).sum();
        ensure(begun + queued == queue.outstanding, "work is miscounted")?;
        let failed = || queue.slots.iter().filter(|slot| slot.failure.is_some());
        ensure(failed().count() == queue.failed, "failures are miscounted")?;
        let builds = failed().any(|slot| !slot.queued.is_empty());
        ensure(!builds, "work is queued that builds on what failed")
    }

    /// What holds when no thread can move.
    pub(super) fn ended(&self) -> Result<(), String> {
        let scenario = &self.plan.scenario;
        let idle = self.handed.is_none() && self.channel.is_none() && self.landings.is_empty();
        let over = self.at == self.plan.program.len() && self.watching == Watching::Over;
        ensure(
            over && idle && self.updater_over,
            "threads wait for each other",
        )?;
        ensure(
            self.queue.is_over() && self.queue.is_quiet(),
            "work is left",
        )?;
        // What a flush shows need not be sent any more.
        let fails = scenario.fails.is_some() && (self.failed || scenario.watch != Watch::Flush);
        ensure(self.failed == fails, "what was to fail did not")?;
        ensure(self.told == self.failed, "somebody was not told")?;
        for slot in 0..scenario.slots() {
            let all = scenario.applied(slot, scenario.rounds.len() + 1);
            let master = if self.told { RESTORED } else { all };
            ensure(
                self.params[slot].master == [master; 2],
                "masters miss an update",
            )?;
        }
        Ok(())
    }
}
