//! Looking at parameters whose updates run behind the training loop.

use std::sync::atomic::Ordering;
use std::time::Instant;

use burn::tensor::{Device, Tensor};

use super::core::{Ahead, Held, Slot};
use super::queue::Until;
use super::values::send_image;
use super::{Engine, or_panic};
use crate::config::Schedule;
use crate::error::OffloadError;
use crate::optimize::DeviceImage;
use crate::report::Work;
use crate::upload::{self, AutodiffContext, StorageId, Target};

impl Engine {
    /// The model uses the weights of `slot`, in a forward pass that will run backward if `tracked`. Waits for
    /// them. `false` if their update failed.
    pub(super) fn use_weights(&self, slot: usize, tracked: bool) -> bool {
        if tracked && self.order.used(slot) {
            self.core.phases.forward(&self.core.trace);
        }
        let until = match self.shows(slot) {
            true => Until::Settled,
            false => Until::Visible,
        };
        self.wait(slot, until, Work::WaitForward).is_ok()
    }

    /// The tensor of `slot` is on `device` now. On Flex whoever copies it waits for it; other devices copy what
    /// there is.
    pub(super) fn check_move(&self, slot: usize, device: &Device) {
        let late = !matches!(self.core.updates.reached(slot, Until::Visible), Ok(true));
        let _ = self.settled(slot);
        let elsewhere = *self.target.device() != device.clone().inner();
        assert!(
            !(late && elsewhere && self.target.takes_tiles()),
            "the model was moved to another device before the update of `{}` had arrived. Call \
             `Offload::flush` first",
            self.layout(slot).path
        );
    }

    /// From here on, uses of parameters see the delayed updates of rounds before `round`, also those of
    /// parameters that the walk of `round` does not meet. Those it meets are given to the model instead.
    pub(super) fn show_what_is_due(&self, round: u64) {
        for slot in &self.core.slots {
            if (1..round).contains(&slot.round.load(Ordering::Relaxed)) {
                slot.shows.store(true, Ordering::Release);
            }
        }
    }

    /// Waits until `slot` has no update left to be done, for a step or whoever else looks at it.
    pub(super) fn wait(&self, slot: usize, until: Until, work: Work) -> Result<(), OffloadError> {
        let core = &self.core;
        if core.updates.reached(slot, until)? {
            return Ok(());
        }
        let started = Instant::now();
        let waited_for = core.updates.wait(slot, until)?;
        let round = core.slots[slot].round.load(Ordering::Relaxed);
        core.trace.span(work, round, Some(slot), started);
        let path = &core.slots[slot].layout.path;
        core.meter
            .exposed(round, work, path, waited_for, started.elapsed());
        Ok(())
    }

    /// Waits until every gradient handed over is on the host and every update is done. From here on, uses of
    /// parameters see all of them.
    pub(crate) fn flush(&self) -> Result<(), OffloadError> {
        self.finish_downloads()?;
        self.finish_updates()
    }

    /// The same for updates alone.
    pub(crate) fn finish_updates(&self) -> Result<(), OffloadError> {
        let (core, started) = (&self.core, Instant::now());
        let busy = core.updates.is_busy();
        core.updates.wait_for_all()?;
        if busy {
            let round = core.meter.round();
            core.trace.span(Work::WaitFlush, round, None, started);
        }
        for slot in &self.core.slots {
            let held = slot.held.lock();
            if held.ahead.is_some() {
                slot.shows.store(true, Ordering::Release);
            }
        }
        Ok(())
    }

    /// Has the rounds that are judged from here on follow `schedule`.
    pub(crate) fn set_schedule(&self, schedule: Schedule) -> Result<(), OffloadError> {
        self.finish_updates()?;
        self.round.lock().set_schedule(schedule);
        Ok(())
    }

    /// Whether uses of the parameter in `slot` are to see more than its model holds.
    pub(super) fn shows(&self, slot: usize) -> bool {
        self.core.slots[slot].shows.load(Ordering::Acquire)
    }

    /// The newest weights for a model that holds `base`: others than `base` if an update waits for a step to
    /// hand it over.
    pub(super) fn newest_weights<const D: usize>(&self, slot: usize, base: Tensor<D>) -> Tensor<D> {
        let Slot { held, shows, .. } = &self.core.slots[slot];
        let mut held = held.lock();
        if StorageId::of(&base) != held.on_device {
            // An older clone: it keeps its values.
            return base;
        }
        or_panic(self.core.updates.reached(slot, Until::Visible));
        let Held { state, ahead, .. } = &mut *held;
        let Some(ahead) = ahead else {
            shows.store(false, Ordering::Release);
            return base;
        };
        ahead.used |= base.is_autodiff() && base.is_require_grad();
        let shown = ahead.shown.as_ref().and_then(|s| s.downcast_ref());
        let shown: Tensor<D> = shown.cloned().unwrap_or_else(|| {
            let device = base.device();
            let shown = send_image(state, ahead.image.take(), base.shape(), &device);
            ahead.shown = Some(Box::new(shown.clone()));
            shown
        });
        AutodiffContext::of(&base).restore(shown)
    }

    /// Whether `weights` are those that the last step returned, or will be when its updates are done.
    pub(super) fn is_newest<const D: usize>(&self, slot: usize, weights: &Tensor<D>) -> bool {
        StorageId::of(weights) == self.core.slots[slot].held.lock().on_device
    }

    /// Waits until nothing is left to be done to a parameter.
    pub(crate) fn settled(&self, slot: usize) -> Result<(), OffloadError> {
        self.wait(slot, Until::Settled, Work::WaitFlush)
    }

    /// The weights that a model which holds `base` should hold: the newest, if `base` is what it was given
    /// last. Otherwise what it holds counts, and an update that waited to be handed over is dropped.
    ///
    /// Only for parameters that are [`settled`](Self::settled).
    pub(crate) fn settle<const D: usize>(&self, slot: usize, base: Tensor<D>) -> Tensor<D> {
        let slot = &self.core.slots[slot];
        let mut held = slot.held.lock();
        let Some(ahead) = held.ahead.take() else {
            return base;
        };
        slot.shows.store(false, Ordering::Release);
        held.delta = None;
        if StorageId::of(&base) != held.on_device {
            held.on_device = None;
            return base;
        }
        let (context, shape) = (AutodiffContext::of(&base), base.shape());
        let target = Target::of(&base);
        let newest = match taken::<D>(ahead) {
            Ok(shown) => shown,
            Err(image) => {
                upload::release(base);
                send_image(&held.state, image, shape, target.device())
            }
        };
        held.on_device = StorageId::of(&newest);
        context.restore(newest)
    }
}

/// The tensor that somebody was shown already, or else what the weights are sent from.
pub(super) fn taken<const D: usize>(ahead: Ahead) -> Result<Tensor<D>, Option<DeviceImage>> {
    let Ahead { image, shown, .. } = ahead;
    match shown.map(|shown| shown.downcast::<Tensor<D>>()) {
        Some(Ok(shown)) => Ok(*shown),
        _ => Err(image),
    }
}
