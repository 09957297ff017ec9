//! A step of the optimizer at one parameter: its update now, or queued for behind the training loop.

use std::sync::atomic::Ordering;
use std::time::Instant;

use burn::tensor::Tensor;

use super::core::Held;
use super::queue::{Kind, Until};
use super::round::{Decision, Mode, Verdicted};
use super::values::foreign;
use super::wait::taken;
use super::work::{Job, Output, Step};
use super::{Engine, or_panic, verify};
use crate::boundary::Boundary;
use crate::error::OffloadError;
use crate::report::{WaitedFor, Work};
use crate::upload::{self, Place, StorageId, Target};

impl Engine {
    /// Applies what the round collected for `slot` to its master weights and returns the new
    /// weights for the device. `weights` are returned as they are if nothing was collected, or if the
    /// round is skipped.
    ///
    /// `gradient` is what came through Burn's containers: a placeholder, or a real gradient that
    /// reached the optimizer past the taps, which then counts as one more contribution.
    ///
    /// # Panics
    ///
    /// If the round cannot be judged, with no weight changed. If a gradient came past the taps that
    /// cannot be used: Burn shows those only one by one, so parameters before it are updated.
    pub(crate) fn update<const D: usize>(
        &self,
        slot: usize,
        lr: f64,
        weights: Tensor<D>,
        gradient: Tensor<D>,
    ) -> Tensor<D> {
        let layout = self.layout(slot);
        assert_eq!(
            weights.shape(),
            layout.shape,
            "parameter `{}` has another shape than the model given to `init` had. Give `step` the \
             model that `init` returned, or call `init` on the new one",
            layout.path
        );
        let past_the_taps = or_panic(self.full_size(slot, gradient));
        let verdicted = self.or_abandon(self.decide(slot, past_the_taps));
        // What an earlier round left to do here comes first.
        if let Err(failed) = self.wait(slot, Until::Settled, Work::WaitStep) {
            // An older clone makes up for an update that failed: its values count.
            if self.is_newest(slot, &weights) {
                self.or_abandon(Err(failed))
            }
            self.core.updates.forgive(slot);
            let mut held = self.core.slots[slot].held.lock();
            (held.ahead, held.on_device) = (None, None);
        }
        let step = match verdicted.decision {
            Decision::Apply(factor) => {
                self.core
                    .gradients
                    .take(slot)
                    .map(|(collected, judgement)| Step {
                        lr,
                        factor,
                        collected,
                        judgement,
                        misses_an_update: false,
                    })
            }
            Decision::Nothing | Decision::Skip => None,
        };
        let updated = match verdicted.mode {
            // A walk without any gradient does nothing.
            _ if matches!(verdicted.decision, Decision::Nothing) => weights,
            Mode::Now => self.update_now(slot, verdicted, step, weights),
            Mode::Behind => self.update_behind(slot, verdicted, step, weights),
            Mode::Delayed => self.update_delayed(slot, verdicted, step, weights),
        };
        self.core.phases.walked();
        updated
    }

    /// The model's weights count where they are not what this engine gave it: an older clone, or weights
    /// edited since.
    fn adopt<const D: usize>(&self, slot: usize, held: &mut Held, weights: &Tensor<D>) {
        let layout = self.layout(slot);
        let values = self.or_abandon(foreign(layout, &held.state, &held.on_device, weights));
        let Some(values) = values else { return };
        if held.ahead.is_some() {
            self.core.gradients.clear_sealed();
            panic!(
                "the weights of `{}` are not those that the last step returned, and an update waits to be \
                 put into those. Under a delayed schedule call `Offload::settle` on the model before you \
                 change its weights, or on an older clone before you go back to it",
                layout.path
            );
        }
        let behind = self.core.slots[slot].round.load(Ordering::Relaxed) > 0;
        assert!(
            !behind || values.is_empty() || !values.iter().all(|value| value.is_nan()),
            "the weights of `{}` were changed before their update had arrived: they are NaN throughout. \
             Call `Offload::flush` before you look at weights through `base()`, or change them",
            layout.path
        );
        let state = &mut held.state;
        self.core.pool.install(|| state.set_master(&values));
        held.delta = None;
    }

    /// Updates a parameter and waits until its weights are on the device.
    fn update_now<const D: usize>(
        &self,
        slot: usize,
        Verdicted { round, .. }: Verdicted,
        step: Option<Step>,
        weights: Tensor<D>,
    ) -> Tensor<D> {
        let core = &self.core;
        let Some(step) = step else {
            return self.hand_over(slot, weights);
        };
        let (started, lr) = (Instant::now(), step.lr);
        let layout = self.layout(slot);
        let shape = weights.shape();
        let mut held = core.slots[slot].held.lock();
        self.adopt(slot, &mut held, &weights);
        let target = Target::of(&weights);
        // The old weights go before the new ones come, if nobody else holds them.
        upload::release(weights);
        held.ahead = None;
        core.slots[slot].shows.store(false, Ordering::Release);

        let Held {
            state, on_device, ..
        } = &mut *held;
        let granularity = state.borrow().state.granularity();
        let precision = layout.precision;
        let place = (slot, round);
        let mut upload = core
            .uploader
            .begin(target, place, shape, precision, granularity);
        let output = Output::Upload(&mut upload);
        let verified = core.step(slot, round, state, None, step, output);
        core.trace.span(Work::Step, round, Some(slot), started);
        let sent = upload.finish();
        // The masters have changed: whatever the model holds from here on, it is not their image
        // unless this upload is.
        *on_device = None;
        let (updated, sent) = self.or_abandon(sent.map_err(|reason| OffloadError::Upload {
            path: layout.path.clone(),
            reason,
        }));
        core.meter
            .uploaded(round, layout.device_bytes(), sent.transfers);
        core.meter.waited_for_upload(round, sent.waited);
        let mut verified = self.or_abandon(verified);
        if core.verify {
            let all = 0..layout.len();
            core.damage(Boundary::HandedBack { slot }, state, all);
            verified += self.or_abandon(verify::weights(layout, state, &updated));
        }
        *on_device = StorageId::of(&updated);
        let took = started.elapsed();
        core.meter.verified(round, verified);
        core.meter.updated(round, layout.group, lr, took);
        core.meter
            .exposed(round, Work::WaitStep, &layout.path, WaitedFor::Step, took);
        let _ = core.boundaries.pass(Boundary::HandedBack { slot });
        updated
    }

    /// Weights that an earlier, delayed update left for this step, or `weights` if there are none.
    fn hand_over<const D: usize>(&self, slot: usize, weights: Tensor<D>) -> Tensor<D> {
        {
            let mut held = self.core.slots[slot].held.lock();
            if held.ahead.is_none() {
                return weights;
            }
            self.adopt(slot, &mut held, &weights);
        }
        self.settle(slot, weights)
    }

    /// Queues an update whose weights the model waits for where it uses them.
    fn update_behind<const D: usize>(
        &self,
        slot: usize,
        Verdicted { round, .. }: Verdicted,
        step: Option<Step>,
        weights: Tensor<D>,
    ) -> Tensor<D> {
        let Some(step) = step else {
            return self.hand_over(slot, weights);
        };
        let core = &self.core;
        let layout = self.layout(slot);
        let mut held = core.slots[slot].held.lock();
        self.adopt(slot, &mut held, &weights);
        held.ahead = None;
        core.slots[slot].shows.store(false, Ordering::Release);
        let (weights, place) = self.reserve(slot, weights);
        held.on_device = StorageId::of(&weights);
        drop(held);
        let job = Job {
            round,
            step: Some(step),
            to: Some(place),
            image: None,
            check: core.verify.then(|| verify::later(layout, &weights)),
        };
        self.queue(slot, Kind::Update, job);
        weights
    }

    /// Hands the model what the last round's update left, and queues this round's.
    fn update_delayed<const D: usize>(
        &self,
        slot: usize,
        Verdicted { round, .. }: Verdicted,
        step: Option<Step>,
        weights: Tensor<D>,
    ) -> Tensor<D> {
        let core = &self.core;
        let layout = self.layout(slot);
        let mut held = core.slots[slot].held.lock();
        self.adopt(slot, &mut held, &weights);
        core.slots[slot].shows.store(false, Ordering::Release);
        let ahead = held.ahead.take();
        // Unless the last forward has seen the update, its gradient misses it.
        let misses_an_update = ahead.as_ref().is_some_and(|ahead| !ahead.used);
        let (weights, published) = match ahead.map(taken::<D>) {
            None => (weights, None),
            Some(Ok(shown)) => (shown, None),
            Some(Err(image)) => {
                let (weights, place) = self.reserve(slot, weights);
                (weights, Some((place, image)))
            }
        };
        held.on_device = StorageId::of(&weights);
        drop(held);
        if let Some((place, image)) = published {
            let job = Job {
                round,
                step: None,
                to: Some(place),
                image,
                check: core.verify.then(|| verify::later(layout, &weights)),
            };
            self.queue(slot, Kind::Publish, job);
        }
        if let Some(step) = step {
            let job = Job {
                round,
                step: Some(Step {
                    misses_an_update,
                    ..step
                }),
                to: None,
                image: None,
                check: None,
            };
            self.queue(slot, Kind::Step, job);
        }
        weights
    }

    /// Memory for new weights in place of `weights`, which go first.
    fn reserve<const D: usize>(&self, slot: usize, weights: Tensor<D>) -> (Tensor<D>, Place) {
        let target = Target::of(&weights);
        upload::release(weights);
        let layout = self.layout(slot);
        let shape = layout.shape.clone();
        self.core.uploader.reserve(target, shape, layout.precision)
    }

    fn queue(&self, slot: usize, kind: Kind, job: Job) {
        let core = &self.core;
        if job.step.is_some() {
            core.slots[slot].round.store(job.round, Ordering::Relaxed);
            core.meter.queued(job.round);
        }
        core.updates.push(slot, self.order.rank(slot), kind, job);
    }

    /// Ends a walk that cannot go on: gradients of the parameters it has not met must not turn up in the
    /// next round.
    #[track_caller]
    fn or_abandon<T>(&self, result: Result<T, OffloadError>) -> T {
        if result.is_err() {
            self.core.gradients.clear_sealed();
        }
        or_panic(result)
    }
}
