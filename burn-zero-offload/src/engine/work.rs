//! An update of one parameter: the step on the host, and its weights on their way to the device.

use std::ops::Range;
use std::time::Instant;

use burn::tensor::Bytes;

use super::core::{Ahead, Core, Held};
use super::judge::scaling;
use super::queue::Kind;
use super::verify::Samples;
use crate::boundary::Boundary;
use crate::error::OffloadError;
use crate::host::{Borrowed, Collected, Halves, HostState};
use crate::optimize::{DeviceImage, GradientView, ImageMut, Judgement, Noise, Update};
use crate::report::trace::Work;
use crate::upload::{Place, Upload};

/// What is to be done to a parameter; which parts there are depends on its [`Kind`].
pub(super) struct Job {
    /// The round it is counted to.
    pub(super) round: u64,
    /// The gradient to apply.
    pub(super) step: Option<Step>,
    /// Where the weights go.
    pub(super) to: Option<Place>,
    /// The weights, if they are neither computed by the step nor the upper halves of the master.
    pub(super) image: Option<DeviceImage>,
    /// Reads the weights back and compares them with what they should be. Returns their number.
    pub(super) check: Option<Box<Check>>,
}

pub(super) type Check = dyn FnOnce(&HostState) -> Result<u64, OffloadError> + Send;

/// A gradient, and how it is applied.
pub(super) struct Step {
    pub(super) lr: f64,
    /// The round's factor on it.
    pub(super) factor: f64,
    pub(super) collected: Collected,
    pub(super) judgement: Judgement,
    /// The gradient was taken before the last update of the masters.
    pub(super) misses_an_update: bool,
}

/// Where the step's image of the masters goes.
pub(super) enum Output<'a, 'u> {
    /// To the device, tile by tile.
    Upload(&'a mut Upload<'u>),
    /// To the host, for later. Split masters have it in themselves.
    Wait(&'a mut Option<DeviceImage>),
}

impl Core {
    /// Does a piece of work that [`Updates`](super::updates::Updates) was given, and reports it done there;
    /// not if it returns an error.
    pub(super) fn work(&self, slot: usize, kind: Kind, job: Job) -> Result<(), OffloadError> {
        let started = Instant::now();
        let round = job.round;
        match kind {
            Kind::Update => {
                let mut held = self.slots[slot].held.lock();
                let mut upload = self.fill(slot, round, &mut held.state, job.to)?;
                let step = job.step.ok_or_else(|| self.incomplete(slot))?;
                let lr = step.lr;
                let output = Output::Upload(&mut upload);
                let verified = self.step(slot, round, &mut held.state, None, step, output)?;
                self.trace.span(Work::Step, round, Some(slot), started);
                drop(held);
                let took = started.elapsed();
                let then = move |core: &Self| core.updated(slot, round, lr, took, verified);
                self.land(slot, (round, true), upload, job.check, then)
            }
            Kind::Publish => {
                let mut held = self.slots[slot].held.lock();
                let mut upload = self.fill(slot, round, &mut held.state, job.to)?;
                send(&mut upload, &held.state, job.image);
                drop(held);
                self.land(slot, (round, false), upload, job.check, |_| ())
            }
            Kind::Step => {
                let step = job.step.ok_or_else(|| self.incomplete(slot))?;
                let lr = step.lr;
                let verified = self.step_ahead(slot, round, step)?;
                self.trace.span(Work::Step, round, Some(slot), started);
                self.updated(slot, round, lr, started.elapsed(), verified);
                self.meter.completed(round);
                self.updates.done(slot, Ok(()));
                Ok(())
            }
        }
    }

    fn incomplete(&self, slot: usize) -> OffloadError {
        self.failed(
            slot,
            "it has no gradient, or no place for its weights".into(),
        )
    }

    /// Notes that a parameter has been updated.
    fn updated(&self, slot: usize, round: u64, lr: f64, took: std::time::Duration, verified: u64) {
        let group = self.slots[slot].layout.group;
        self.meter.verified(round, verified);
        self.meter.updated(round, group, lr, took);
    }

    /// The step of a delayed update: the model's weights stay what they are.
    fn step_ahead(&self, slot: usize, round: u64, step: Step) -> Result<u64, OffloadError> {
        let mut held = self.slots[slot].held.lock();
        let Held {
            state,
            ahead,
            delta,
            ..
        } = &mut *held;
        let before = self.compensation.map(|_| state.master());
        let missed = delta.take().filter(|_| step.misses_an_update);
        let mut image = None;
        let output = Output::Wait(&mut image);
        let verified = self.step(slot, round, state, missed.as_deref(), step, output)?;
        *delta = before.map(|mut before| {
            let change = |(before, after): (&mut f32, f32)| *before = after - *before;
            before.iter_mut().zip(state.master()).for_each(change);
            before
        });
        *ahead = Some(Ahead {
            image,
            ..Default::default()
        });
        let _ = self.boundaries.pass(Boundary::HandedBack { slot });
        Ok(verified)
    }

    /// Begins to fill the memory that a model's new weights have.
    fn fill(
        &self,
        slot: usize,
        round: u64,
        state: &mut HostState,
        to: Option<Place>,
    ) -> Result<Upload<'_>, OffloadError> {
        let to = to.ok_or_else(|| self.incomplete(slot))?;
        let granularity = state.borrow().state.granularity();
        let upload = self.uploader.fill(to, (slot, round), granularity);
        upload.ok_or_else(|| self.lost(slot, "the thread that sends weights has ended".into()))
    }

    fn lost(&self, slot: usize, reason: String) -> OffloadError {
        let path = self.path(slot);
        OffloadError::Upload { path, reason }
    }

    /// Lets the weights land; then the piece of work is done, and with it the update of the parameter if
    /// `completes`.
    fn land(
        &self,
        slot: usize,
        (round, completes): (u64, bool),
        upload: Upload<'_>,
        check: Option<Box<Check>>,
        then: impl FnOnce(&Self),
    ) -> Result<(), OffloadError> {
        let bytes = self.slots[slot].layout.device_bytes();
        let path = self.path(slot);
        let (updates, meter) = (self.updates.clone(), self.meter.clone());
        let sent = move |result: Result<u64, String>| {
            let transfers = result.map_err(|reason| OffloadError::Upload { path, reason })?;
            meter.uploaded(round, bytes, transfers);
            if completes {
                meter.completed(round);
            }
            Ok(())
        };
        self.updates.sending(slot);
        self.meter.waited_for_upload(round, upload.waited());
        let Some(check) = check else {
            // What is counted is counted before anybody can know that the work is done.
            then(self);
            let boundaries = self.boundaries.clone();
            upload.land(Box::new(move |result| {
                updates.done(slot, sent(result));
                // Only tests have something to say here.
                let _ = boundaries.pass(Boundary::HandedBack { slot });
            }));
            return Ok(());
        };
        let (tell, told) = std::sync::mpsc::channel();
        upload.land(Box::new(move |result| drop(tell.send(sent(result)))));
        let landed = told.recv();
        landed.unwrap_or_else(|_| Err(self.lost(slot, "it was given up".into())))?;
        let mut held = self.slots[slot].held.lock();
        let all = 0..held.state.len();
        self.damage(Boundary::HandedBack { slot }, &mut held.state, all);
        self.meter.verified(round, check(&held.state)?);
        drop(held);
        then(self);
        self.updates.done(slot, Ok(()));
        let _ = self.boundaries.pass(Boundary::HandedBack { slot });
        Ok(())
    }

    /// Updates the masters of a parameter. Returns the number of values that were verified.
    pub(super) fn step(
        &self,
        slot: usize,
        round: u64,
        state: &mut HostState,
        missed: Option<&[f32]>,
        step: Step,
        mut output: Output<'_, '_>,
    ) -> Result<u64, OffloadError> {
        let layout = &self.slots[slot].layout;
        state.time += 1;
        let (scaling, _) = scaling(&step.judgement, step.factor, layout.rule.clipping());
        let update = layout.rule.begin(state.time, step.lr, scaling);
        let update = update.with_noise(Noise::new(self.seed, slot as u64, state.time));
        let collected = step.collected;
        let verified = collected.gradient().with_view(|view| {
            let Some((lambda, missed)) = self.compensation.zip(missed) else {
                return self.step_pieces(slot, round, state, &update, view, &mut output);
            };
            let factor = step.factor / step.judgement.scale as f64;
            let corrected = compensated(view, factor, lambda, missed);
            let view = GradientView::F32(&corrected);
            self.step_pieces(slot, round, state, &update, view, &mut output)
        });
        self.gradients.recycle(slot, collected);
        let copied = state.borrow().halves.map(Halves::take_copied);
        self.meter.copied(round, copied.unwrap_or_default());
        verified
    }

    /// The pieces of a step, each sent when it is done.
    fn step_pieces(
        &self,
        slot: usize,
        round: u64,
        state: &mut HostState,
        update: &Update,
        view: GradientView<'_>,
        output: &mut Output<'_, '_>,
    ) -> Result<u64, OffloadError> {
        let layout = &self.slots[slot].layout;
        let samples = self
            .verify
            .then(|| Samples::before(layout, round, update, state, view));
        for (tile, range) in pieces(output, state).into_iter().enumerate() {
            let boundary = Boundary::Stepped { slot, tile };
            // Only tests have something to say here, and only by delay, damage or panic.
            let _ = self.boundaries.pass(boundary);
            let view = view.slice(range.clone());
            let single = self.step.is_one_task(range.len());
            let Borrowed {
                state: mut borrowed,
                halves,
            } = state.borrow();
            let mut step = |image: ImageMut<'_>| {
                let step = || {
                    let piece = borrowed.slice(range.clone());
                    self.step.update(update, piece, view, image);
                };
                if single {
                    step();
                } else {
                    self.pool.install(step);
                }
            };
            match (halves, &mut *output) {
                (Some(halves), output) => {
                    step(ImageMut::Bf16(halves.piece_mut(tile)));
                    if let Output::Upload(upload) = output {
                        upload.send(range.start, halves.lend(tile));
                    }
                }
                (None, Output::Upload(upload)) => {
                    let poison = |buffer: &mut [u8]| self.boundaries.poison(buffer);
                    upload.tile(range.clone(), poison, step);
                }
                (None, Output::Wait(image)) => {
                    let image = image
                        .get_or_insert_with(|| DeviceImage::zeroed(layout.precision, layout.len()));
                    self.boundaries.poison(image.as_bytes_mut());
                    step(image.as_mut());
                }
            }
            self.damage(boundary, state, range);
        }
        samples.map_or(Ok(0), |samples| samples.compare(layout, state))
    }
}

/// The pieces to step and to send: those of a split master are where its upper halves are.
fn pieces(output: &Output<'_, '_>, state: &HostState) -> Vec<Range<usize>> {
    match (state.halves(), output) {
        (Some(halves), _) => halves.ranges(),
        (None, Output::Upload(upload)) => upload.tiles(),
        (None, Output::Wait(_)) => std::iter::once(0..state.len()).collect(),
    }
}

/// Sends weights that are computed already.
fn send(upload: &mut Upload<'_>, state: &HostState, image: Option<DeviceImage>) {
    if let Some(halves) = state.halves() {
        for (index, range) in halves.ranges().into_iter().enumerate() {
            upload.send(range.start, halves.lend(index));
        }
        return;
    }
    let image = image.unwrap_or_else(|| state.image());
    let size = image.precision().size();
    let bytes = bytes::Bytes::from_owner(Owner(image));
    for range in upload.tiles() {
        let piece = bytes.slice(range.start * size..range.end * size);
        let piece = Bytes::from_shared(piece, burn::tensor::AllocationProperty::Native);
        upload.send(range.start, piece);
    }
}

struct Owner(DeviceImage);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// The gradient `g` as it would be after the update `missed`: `g + lambda * g * g * missed`, where `g` is the
/// stored gradient times `factor`; it is returned without the factor, as it was stored.
fn compensated(view: GradientView<'_>, factor: f64, lambda: f32, missed: &[f32]) -> Vec<f32> {
    let mut gradient = vec![0.0; view.len()];
    view.widen_into(0..view.len(), &mut gradient);
    let weight = (lambda as f64 * factor) as f32;
    for (g, missed) in gradient.iter_mut().zip(missed) {
        *g += weight * *g * *g * missed;
    }
    gradient
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Zheng et al., arXiv 1609.08326: `g + lambda g^2 (w - w')`, with numbers by hand.
    #[test]
    fn compensation_is_the_first_term_of_the_expansion() {
        let stored = [4.0f32, -8.0, 0.0];
        // Loss scale 4: the gradient is 1, -2, 0.
        let corrected = compensated(GradientView::F32(&stored), 0.25, 0.5, &[0.1, -0.2, 3.0]);
        let gradient: Vec<f32> = corrected.iter().map(|g| g * 0.25).collect();
        for (got, expected) in gradient.iter().zip([1.05f32, -2.4, 0.0]) {
            assert!((got - expected).abs() < 1e-6, "{got} {expected}");
        }
    }
}
