//! Every interleaving of the threads that share a [`Queue`], walked through.
//!
//! The engine changes the queue under one lock and wakes whoever waits on every change, so a program of
//! atomic steps is all there is to a thread, and a thread that waits may go on exactly when
//! [`reached`](Queue::reached) says so. [`model`] has those programs. Here they are run in every order that
//! there is, and every state is looked at that any order leads to.

mod model;

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

use super::*;
use model::{State, Thread};

/// Sets of rounds; number `n` is bit `n`. What weights are is told by the rounds whose gradients they have.
type Rounds = u8;

/// When updates are done, as in [`Schedule`](crate::config::Schedule).
#[derive(Clone, Copy, Debug)]
enum Schedule {
    ForwardOverlapped,
    Delayed { warmup: usize },
}

/// How the updates of one walk are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Now,
    Behind,
    Delayed,
}

/// What a training loop does between two walks, and the walk, which meets the parameters that have gradients.
#[derive(Clone, Copy, Debug)]
struct Round {
    /// Parameters in the order in which the forward pass uses them; none if there was no pass, or an earlier
    /// one.
    forward: &'static [usize],
    /// Parameters in the order in which the walk meets them.
    gradients: &'static [usize],
    /// Whether a gradient is not finite.
    skipped: bool,
}

/// What a second thread does meanwhile, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Watch {
    Nothing,
    Save,
    Flush,
}

/// What the trainer does at a time.
#[derive(Clone, Copy, Debug)]
enum Op {
    Use(usize),
    HandOver(usize),
    Judge,
    /// The walk meets a parameter, which the model will need at this place.
    Meet(usize, u32),
    /// A record is loaded after a failure.
    Restore(usize),
}

/// What is run in every order.
#[derive(Clone, Copy, Debug)]
struct Scenario {
    schedule: Schedule,
    rounds: &'static [Round],
    watch: Watch,
    /// The parameter whose weights cannot be sent, and in which round.
    fails: Option<(usize, usize)>,
}

impl Scenario {
    fn mode(&self, round: usize) -> Mode {
        match self.schedule {
            Schedule::ForwardOverlapped => Mode::Behind,
            Schedule::Delayed { warmup } if round >= warmup => Mode::Delayed,
            Schedule::Delayed { .. } => Mode::Now,
        }
    }

    /// Number of parameters.
    fn slots(&self) -> usize {
        self.rounds[0].forward.len()
    }

    /// The rounds before `round` whose gradients of `slot` are applied.
    fn applied(&self, slot: usize, round: usize) -> Rounds {
        let rounds = (1..).zip(self.rounds).take(round - 1);
        let applied = rounds.filter(|(_, r)| !r.skipped && r.gradients.contains(&slot));
        applied.fold(0, |set, (number, _)| set | 1 << number)
    }

    /// Those that the forward pass of `round` is to see: all, or all but the one before it.
    fn visible(&self, slot: usize, round: usize) -> Rounds {
        match round > 1 && self.mode(round - 1) == Mode::Delayed {
            true => self.applied(slot, round - 1),
            false => self.applied(slot, round),
        }
    }

    /// What the trainer does, with the number of the round, and where it goes on after a failure.
    fn program(&self) -> (Vec<(usize, Op)>, usize) {
        let mut program = Vec::new();
        let mut ranks = [u32::MAX; model::SLOTS];
        for (number, round) in (1..).zip(self.rounds) {
            for (rank, &slot) in (0..).zip(round.forward) {
                ranks[slot] = rank;
                program.push((number, Op::Use(slot)));
            }
            let backward = round.gradients.iter().rev();
            program.extend(backward.map(|&slot| (number, Op::HandOver(slot))));
            if !round.gradients.is_empty() {
                program.push((number, Op::Judge));
            }
            let walk = round.gradients.iter();
            program.extend(walk.map(|&slot| (number, Op::Meet(slot, ranks[slot]))));
        }
        let end = program.len();
        program.extend((0..self.slots()).map(|slot| (0, Op::Restore(slot))));
        (program, end)
    }

    /// Visits every state. Returns their number.
    fn check(self) -> usize {
        let mut known = HashSet::new();
        let start = State::new(self);
        known.insert(fingerprint(&start));
        let mut open: Vec<(State, Option<Rc<Path>>)> = vec![(start, None)];
        while let Some((state, path)) = open.pop() {
            let mut moves = 0;
            for thread in Thread::ALL {
                let mut next = state.clone();
                let moved = next.advance(thread);
                if matches!(moved, Ok(false)) {
                    continue;
                }
                moves += 1;
                let path = Rc::new(Path(thread, path.clone()));
                if let Err(reason) = moved.and_then(|_| next.consistent()) {
                    panic!("{reason} after {:?}\n{next:?}", path.threads());
                }
                if known.insert(fingerprint(&next)) {
                    open.push((next, Some(path)));
                }
            }
            if moves == 0
                && let Err(reason) = state.ended()
            {
                let threads = path.map(|path| path.threads());
                panic!("{reason} after {threads:?}\n{state:?}");
            }
        }
        known.len()
    }
}

/// The last thread that moved, and what was before.
struct Path(Thread, Option<Rc<Path>>);

impl Path {
    fn threads(&self) -> Vec<Thread> {
        let mut threads = self.1.as_ref().map_or_else(Vec::new, |path| path.threads());
        threads.push(self.0);
        threads
    }
}

/// 128 bits of hash: two of a million states are the same once in 10^26 programs.
fn fingerprint(state: &State) -> (u64, u64) {
    let mut hasher = DefaultHasher::new();
    state.hash(&mut hasher);
    let first = hasher.finish();
    hasher.write_u8(0);
    (first, hasher.finish())
}

const fn round(forward: &'static [usize], gradients: &'static [usize]) -> Round {
    Round {
        forward,
        gradients,
        skipped: false,
    }
}

/// The model uses its parameters in another order than it holds them in. The last round only looks.
const THREE: &[Round] = &[
    round(&[1, 0, 2], &[0, 1, 2]),
    round(&[1, 0, 2], &[0, 1, 2]),
    round(&[1, 0, 2], &[0, 1, 2]),
    round(&[1, 0, 2], &[]),
];

/// The same with two parameters, as all that follow.
const PLAIN: &[Round] = &[
    round(&[1, 0], &[0, 1]),
    round(&[1, 0], &[0, 1]),
    round(&[1, 0], &[0, 1]),
    round(&[1, 0], &[]),
];

/// The second round does not use a parameter.
const UNUSED: &[Round] = &[
    round(&[1, 0], &[0, 1]),
    round(&[0], &[0]),
    round(&[1, 0], &[0, 1]),
    round(&[1, 0], &[]),
];

/// The second round is skipped.
const SKIPPED: &[Round] = &[
    round(&[1, 0], &[0, 1]),
    Round {
        skipped: true,
        ..round(&[1, 0], &[0, 1])
    },
    round(&[1, 0], &[0, 1]),
    round(&[1, 0], &[]),
];

/// Two walks without a forward pass in between: both backward passes belong to the first.
const TWO_WALKS: &[Round] = &[
    round(&[1, 0], &[0, 1]),
    round(&[], &[0, 1]),
    round(&[1, 0], &[0, 1]),
    round(&[1, 0], &[]),
];

/// The engine goes while updates are queued.
const UNSEEN: &[Round] = &[
    round(&[1, 0], &[0, 1]),
    round(&[1, 0], &[0, 1]),
    round(&[1, 0], &[0, 1]),
];

const BEHIND: Schedule = Schedule::ForwardOverlapped;
const DELAYED: Schedule = Schedule::Delayed { warmup: 1 };
const WARMED_UP: Schedule = Schedule::Delayed { warmup: 2 };

const fn scenario(schedule: Schedule, rounds: &'static [Round]) -> Scenario {
    Scenario {
        schedule,
        rounds,
        watch: Watch::Nothing,
        fails: None,
    }
}

/// Checks with a second thread that does nothing, one that saves a record and one that flushes. There were
/// `states` of each.
fn check(scenario: Scenario, states: [usize; 3]) {
    let watches = [Watch::Nothing, Watch::Save, Watch::Flush];
    let visited = watches.map(|watch| Scenario { watch, ..scenario }.check());
    // Far fewer would mean that something is not tried any more.
    let enough = visited
        .iter()
        .zip(states)
        .all(|(got, then)| 10 * got >= 9 * then);
    assert!(
        enough,
        "{visited:?} states of {scenario:?}, there were {states:?}"
    );
}

#[test]
fn updates_behind_the_next_forward_pass() {
    check(scenario(BEHIND, PLAIN), [630, 5_374, 7_240]);
    check(scenario(BEHIND, UNUSED), [639, 5_046, 6_182]);
    check(scenario(BEHIND, SKIPPED), [441, 3_307, 3_795]);
    check(scenario(BEHIND, TWO_WALKS), [987, 7_945, 9_286]);
    check(scenario(BEHIND, UNSEEN), [549, 4_041, 5_199]);
}

#[test]
fn updates_behind_the_next_round() {
    check(scenario(DELAYED, PLAIN), [1_363, 12_557, 62_036]);
    check(scenario(DELAYED, UNUSED), [550, 4_533, 18_458]);
    check(scenario(DELAYED, SKIPPED), [562, 4_204, 14_988]);
    check(scenario(DELAYED, TWO_WALKS), [1_291, 12_053, 57_448]);
    check(scenario(DELAYED, UNSEEN), [1_166, 9_617, 43_128]);
}

#[test]
fn updates_behind_the_next_round_after_one_that_waits() {
    check(scenario(WARMED_UP, PLAIN), [760, 7_574, 39_694]);
    check(scenario(WARMED_UP, UNUSED), [305, 2_758, 10_216]);
    check(scenario(WARMED_UP, SKIPPED), [157, 1_165, 2_893]);
    check(scenario(WARMED_UP, TWO_WALKS), [754, 7_532, 39_628]);
    check(scenario(WARMED_UP, UNSEEN), [563, 4_634, 20_786]);
}

#[test]
fn three_parameters() {
    let visited = [BEHIND, DELAYED, WARMED_UP].map(|schedule| scenario(schedule, THREE).check());
    let enough = visited
        .iter()
        .zip([1_500, 4_900, 2_600])
        .all(|(got, least)| *got >= least);
    assert!(enough, "{visited:?} states");
    let saved = Scenario {
        watch: Watch::Save,
        ..scenario(DELAYED, THREE)
    };
    assert!(saved.check() >= 70_000);
}

#[test]
fn a_failure_reaches_everybody() {
    let failing = |schedule, slot, round| Scenario {
        fails: Some((slot, round)),
        ..scenario(schedule, PLAIN)
    };
    check(failing(BEHIND, 0, 2), [424, 3_156, 3_484]);
    check(failing(BEHIND, 1, 2), [403, 2_956, 3_332]);
    check(failing(BEHIND, 1, 3), [610, 5_109, 6_842]);
    check(failing(DELAYED, 0, 2), [602, 4_780, 26_721]);
    check(failing(DELAYED, 1, 2), [596, 4_616, 18_561]);
    check(failing(DELAYED, 1, 3), [1_217, 10_881, 51_302]);
    check(failing(WARMED_UP, 1, 3), [614, 5_898, 28_960]);
}

/// Warm-up 3 and one tenth per update: 1, .9, .81, .81, .729.
#[test]
fn the_update_of_round_three_is_the_first_that_is_late() {
    const ROUNDS: &[Round] = &[round(&[0], &[0]); 5];
    let schedule = Schedule::Delayed { warmup: 3 };
    let scenario = scenario(schedule, ROUNDS);
    let updates = [1, 2, 3, 4, 5].map(|round| scenario.visible(0, round).count_ones());
    assert_eq!(updates, [0, 1, 2, 2, 3]);
    assert!(scenario.check() >= 160);
}
