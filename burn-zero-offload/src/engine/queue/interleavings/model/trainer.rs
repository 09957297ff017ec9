//! The training loop: forward, backward, the verdict and the walk.

use super::*;

impl State {
    /// What a thread does that waits at a parameter. `None`: it goes on.
    pub(super) fn wait(&mut self, slot: usize, until: Until) -> Result<Option<bool>, OffloadError> {
        if self.queue.reached(slot, until)? {
            return Ok(None);
        }
        let before = self.queue.slots[slot].urgent;
        self.queue.urge(slot, until);
        Ok(Some(self.queue.slots[slot].urgent != before))
    }

    /// Whether the updater holds the lock of a parameter's values.
    pub(super) fn locked(&self, slot: usize) -> bool {
        let held = |&(at, kind, _, steps): &_| at == slot && kind != Kind::Step && steps == 1;
        self.work.as_ref().is_some_and(held)
    }

    pub(super) fn train(&mut self) -> Moved {
        let plan = self.plan.clone();
        let Some(&(round, op)) = plan.program.get(self.at) else {
            return Ok(false);
        };
        let (slot, until) = match (op, &self.phase) {
            (Op::Use(slot), Phase::Begin) => {
                // Read once, before it waits: somebody may flush meanwhile.
                self.phase = Phase::Waiting(match self.params[slot].shows {
                    true => Until::Settled,
                    false => Until::Visible,
                });
                return Ok(true);
            }
            (Op::Use(slot), Phase::Waiting(until)) => (slot, *until),
            (Op::Use(slot), _) => return self.see(slot, round),
            (Op::Meet(slot, rank), Phase::Pushing(_)) => return Ok(self.push(slot, rank)),
            (Op::Meet(slot, _) | Op::Restore(slot), _) => (slot, Until::Settled),
            (Op::HandOver(slot), _) => {
                let room = self.handed.is_none();
                if room {
                    self.handed = Some((slot, round));
                    self.go_on();
                }
                return Ok(room);
            }
            (Op::Judge, _) => return Ok(self.judge(round)),
        };
        match (self.wait(slot, until), op) {
            (Ok(Some(urged)), _) => return Ok(urged),
            (Err(_), Op::Use(_) | Op::Meet(..)) => {
                // The walk or the pass ends here.
                self.params.iter_mut().for_each(|param| param.sealed = 0);
                (self.told, self.at, self.phase) = (true, plan.end, Phase::Begin);
                return Ok(true);
            }
            _ => {}
        }
        match op {
            Op::Use(_) => self.phase = Phase::Reached,
            Op::Meet(..) if !self.locked(slot) => self.meet(slot, round)?,
            Op::Restore(_) if !self.locked(slot) => {
                ensure(!self.params[slot].worked, "values at work are replaced")?;
                self.params[slot] = Param {
                    master: [RESTORED; 2],
                    weights: [RESTORED; 2],
                    passed: RESTORED,
                    ..Default::default()
                };
                self.queue.forgive(slot);
                self.go_on();
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(super) fn go_on(&mut self) {
        self.phase = Phase::Begin;
        self.at += 1;
        if self.at == self.plan.end && !self.told {
            self.at = self.plan.program.len();
        }
    }

    /// A forward pass looks at weights that it has waited for.
    pub(super) fn see(&mut self, slot: usize, round: usize) -> Moved {
        if self.params[slot].shows && self.locked(slot) {
            return Ok(false);
        }
        let param = &mut self.params[slot];
        let [seen, other] = match (&mut param.ahead, param.shows) {
            (Some((image, seen)), true) => {
                *seen = true;
                [*image; 2]
            }
            (None, true) => {
                param.shows = false;
                param.weights
            }
            (_, false) => param.weights,
        };
        param.seen = seen;
        let scenario = &self.plan.scenario;
        let due = seen == scenario.visible(slot, round);
        let all = seen == scenario.applied(slot, round);
        let flushing = scenario.watch == Watch::Flush && self.watching != Watching::Downloads;
        let flushed = match self.watching {
            Watching::Over => param.flushed,
            _ => 0,
        };
        ensure(seen == other, "weights are torn")?;
        ensure(
            due || flushing && all,
            "a forward pass sees another version",
        )?;
        ensure(
            flushed & !seen == 0,
            "a flush does not show all that was done",
        )?;
        self.go_on();
        Ok(true)
    }

    /// Waits for the gradients of the round and decides about them.
    pub(super) fn judge(&mut self, round: usize) -> bool {
        if self.handed.is_some() || self.reading.is_some() {
            return false;
        }
        let scenario = &self.plan.scenario;
        for param in &mut self.params {
            if scenario.mode(round) == Mode::Delayed && (1..round).contains(&param.round) {
                param.shows = true;
            }
            param.sealed |= std::mem::take(&mut param.collected);
            if scenario.rounds[round - 1].skipped {
                param.sealed = 0;
            }
        }
        self.go_on();
        true
    }

    /// The walk looks at a parameter that nothing is left to be done to.
    pub(super) fn meet(&mut self, slot: usize, round: usize) -> Result<(), String> {
        let scenario = &self.plan.scenario;
        let param = &mut self.params[slot];
        ensure(!param.worked, "the walk meets a parameter at work")?;
        let gradient = std::mem::take(&mut param.sealed);
        let skipped = scenario.rounds[round - 1].skipped;
        let expected = if skipped { 0 } else { 1 << round };
        ensure(gradient == expected, "gradients of rounds are mixed")?;
        let mut work = VecDeque::new();
        let job = |gradient, image| Job {
            round,
            gradient,
            image,
        };
        match scenario.mode(round) {
            Mode::Now | Mode::Behind if skipped => {}
            Mode::Now => {
                param.master = param.master.map(|master| master | gradient);
                param.weights = param.master;
                param.passed |= gradient;
            }
            Mode::Behind => {
                param.weights = [PENDING; 2];
                work.push_back((Kind::Update, job(gradient, 0)));
            }
            Mode::Delayed => {
                param.shows = false;
                let ahead = param.ahead.take();
                if let Some((image, seen)) = ahead {
                    param.weights = if seen { [image; 2] } else { [PENDING; 2] };
                }
                let published = ahead.filter(|(_, seen)| !seen);
                work.extend(published.map(|(image, _)| (Kind::Publish, job(0, image))));
                if !skipped {
                    // Where two walks follow one pass, it is the training loop that is late.
                    let misses = param.master[0] != param.seen;
                    let known = misses == published.is_some();
                    let passed = !scenario.rounds[round - 1].forward.is_empty();
                    ensure(known || !passed, "a gradient's age is mistaken")?;
                    work.push_back((Kind::Step, job(gradient, 0)));
                }
            }
        }
        self.phase = Phase::Pushing(work);
        Ok(())
    }

    pub(super) fn push(&mut self, slot: usize, rank: u32) -> bool {
        if let Phase::Pushing(work) = &mut self.phase
            && let Some((kind, job)) = work.pop_front()
        {
            if job.gradient != 0 {
                self.params[slot].round = job.round;
                self.params[slot].passed |= job.gradient;
            }
            self.queue.push(slot, rank, kind, job);
            if !work.is_empty() {
                return true;
            }
        }
        self.go_on();
        true
    }
}
