//! The threads behind the training loop, and the one that looks on.

use super::*;

impl State {
    pub(super) fn read(&mut self) -> bool {
        match self.reading.take() {
            Some((slot, round)) => self.params[slot].collected |= 1 << round,
            None => {
                self.reading = self.handed.take();
                return self.reading.is_some();
            }
        }
        true
    }

    pub(super) fn update(&mut self) -> Moved {
        let Some((slot, kind, job, steps)) = self.work else {
            return self.begin();
        };
        let param = &mut self.params[slot];
        match (kind, steps) {
            (Kind::Step, 0) => {
                for master in &mut param.master {
                    ensure(
                        *master & job.gradient == 0,
                        "an update comes where it must not",
                    )?;
                    *master |= job.gradient;
                }
                ensure(param.ahead.is_none(), "an update is lost")?;
                param.ahead = Some((param.master[0], false));
            }
            (Kind::Step, _) => {
                self.work = None;
                return self.done(slot, Ok(())).map(|()| true);
            }
            _ if self.channel.is_some() => return Ok(false),
            (_, tile @ 0..2) => {
                let master = &mut param.master[tile];
                ensure(
                    *master & job.gradient == 0,
                    "an update comes where it must not",
                )?;
                *master |= job.gradient;
                let intact = kind == Kind::Update || *master == job.image;
                ensure(intact, "masters changed before they were published")?;
                self.channel = Some(Message::Tile {
                    slot,
                    tile,
                    round: job.round,
                    image: *master,
                });
            }
            _ => {
                self.channel = Some(Message::Land(slot));
                self.queue.sending(slot);
                self.work = None;
                return Ok(true);
            }
        }
        self.work = Some((slot, kind, job, steps + 1));
        Ok(true)
    }

    pub(super) fn begin(&mut self) -> Moved {
        if self.updater_over {
            return Ok(false);
        }
        // With another thread that waits, it may be either's turn.
        let alone = self.plan.scenario.watch == Watch::Nothing;
        let awaited = match (self.plan.program.get(self.at), &self.phase) {
            (Some(&(_, Op::Use(slot))), Phase::Waiting(_)) if alone => Some(slot),
            _ => None,
        };
        let awaited = awaited.filter(|&index| {
            let key = self.queue.slots[index].key(index);
            key.is_some_and(|(class, ..)| class == 0)
        });
        let Some((slot, kind, job)) = self.queue.begin() else {
            self.updater_over = self.queue.is_over();
            return Ok(self.updater_over);
        };
        let first = awaited.is_none_or(|awaited| awaited == slot);
        ensure(first, "what is waited for comes later")?;
        let param = &mut self.params[slot];
        ensure(!param.worked, "two pieces of work on one parameter")?;
        param.worked = true;
        self.work = Some((slot, kind, job, 0));
        Ok(true)
    }

    pub(super) fn done(
        &mut self,
        slot: usize,
        result: Result<(), OffloadError>,
    ) -> Result<(), String> {
        let worked = std::mem::take(&mut self.params[slot].worked);
        ensure(worked, "work is done twice")?;
        self.queue.done(slot, result);
        Ok(())
    }

    pub(super) fn send(&mut self) -> Moved {
        let full = self.landings.len() == LANDINGS;
        if self.draining || full || self.channel.is_none() {
            let Some(slot) = self.landings.pop_front() else {
                return Ok(false);
            };
            self.draining = !self.landings.is_empty();
            let failure = || OffloadError::Upload {
                path: String::new(),
                reason: String::new(),
            };
            let broken = std::mem::take(&mut self.params[slot].broken);
            self.failed |= broken;
            let result = if broken { Err(failure()) } else { Ok(()) };
            return self.done(slot, result).map(|()| true);
        }
        match self.channel.take() {
            None => return Ok(false),
            Some(Message::Land(slot)) => self.landings.push_back(slot),
            Some(Message::Tile { slot, round, .. })
                if self.plan.scenario.fails == Some((slot, round)) =>
            {
                self.params[slot].broken = true;
            }
            Some(Message::Tile {
                slot, tile, image, ..
            }) => {
                let weights = &mut self.params[slot].weights[tile];
                ensure(*weights == PENDING, "weights are sent over others")?;
                *weights = image;
            }
        }
        Ok(true)
    }

    pub(super) fn watch(&mut self) -> Moved {
        let slots = self.plan.scenario.slots();
        let next = |slot| match slot + 1 < slots {
            true => Watching::Look(slot + 1),
            false => Watching::Over,
        };
        let saves = self.plan.scenario.watch == Watch::Save;
        self.watching = match self.watching {
            Watching::Over => return Ok(false),
            Watching::Downloads if self.handed.or(self.reading).is_some() => return Ok(false),
            Watching::Downloads => Watching::All,
            Watching::All if self.queue.outstanding() > 0 => return Ok(false),
            Watching::All if self.queue.failure().is_some() => Watching::Over,
            Watching::All => {
                for param in &mut self.params {
                    param.flushed = param.passed;
                }
                Watching::Look(0)
            }
            Watching::Look(slot) if saves => match self.wait(slot, Until::Settled) {
                Ok(Some(urged)) => return Ok(urged),
                Ok(None) => Watching::Found(slot, self.params[slot].passed),
                Err(_) => Watching::Over,
            },
            Watching::Look(slot) | Watching::Found(slot, _) if self.locked(slot) => {
                return Ok(false);
            }
            Watching::Look(slot) => match self.params[slot].ahead {
                Some(_) => Watching::Found(slot, 0),
                None => next(slot),
            },
            Watching::Found(slot, passed) if saves => {
                let Param {
                    master: [master, other],
                    passed: now,
                    ..
                } = self.params[slot];
                ensure(master == other, "a record has torn values")?;
                let in_time = passed & !master == 0 && master & !now == 0;
                ensure(in_time, "a record has another version")?;
                next(slot)
            }
            Watching::Found(slot, _) => {
                self.params[slot].shows = true;
                next(slot)
            }
        };
        Ok(true)
    }

    pub(super) fn let_go(&mut self) -> bool {
        let trained = self.at == self.plan.program.len();
        let last = trained && self.watching == Watching::Over && !self.queue.closed;
        if last {
            self.queue.close();
        }
        last
    }
}
