//! Where the stations meet: what happens to a gradient from its tap to the weights it changed.
//!
//! A *round* is everything between two updates: any number of backward passes, each handing over
//! gradients, then the walk of Burn's `ModuleOptimizer` over the parameters. The first parameter of
//! the walk waits until all gradients handed over are on the host and has them judged, so a round
//! whose download failed, or whose gradients are not finite, changes no weight.

mod build;
mod round;
mod values;
mod verify;

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use burn::tensor::{Tensor, TensorData};
use parking_lot::Mutex;

use crate::boundary::{Boundaries, Boundary};
use crate::capture::{DeviceGradient, GradientSink, placeholder_shape};
use crate::download::{Downloader, Handover};
use crate::error::OffloadError;
use crate::host::{Borrowed, GradientStore, Halves, HostState};
use crate::layout::SlotLayout;
use crate::optimize::{ImageMut, Noise, SimdLevel, StatePrecision, TileStep};
use crate::report::{MemoryReport, Meter, StepReport};
use crate::upload::{self, StorageId, Target, Upload, Uploader};

pub(crate) use build::EngineOptions;
pub(crate) use round::RoundPolicy;
use round::{Decision, Round, scaling};
use values::foreign;
pub(crate) use values::send;
use verify::Samples;

/// The host side of an offloaded model. Shared by taps, record mappers and optimizers.
pub(crate) struct Engine {
    id: u64,
    slots: Vec<Slot>,
    gradients: Arc<GradientStore>,
    downloader: Downloader,
    uploader: Uploader,
    pool: Arc<rayon::ThreadPool>,
    step: TileStep,
    seed: u64,
    /// What the optimizer's own parameters are kept in.
    kept: StatePrecision,
    verify: bool,
    round: Mutex<Round>,
    meter: Arc<Meter>,
    boundaries: Boundaries,
    /// Slots that got state from an optimizer record since the last update.
    restored: Mutex<HashSet<usize>>,
}

/// A parameter and its state.
pub(crate) struct Slot {
    layout: SlotLayout,
    held: Mutex<Held>,
}

struct Held {
    state: HostState,
    /// The buffer handed to the model last: it holds the image of `state`'s master weights.
    on_device: Option<StorageId>,
}

impl Slot {
    pub(crate) fn layout(&self) -> &SlotLayout {
        &self.layout
    }

    /// A slot whose master weights have just been copied from a model to `state`; `on_device` is the
    /// buffer with their image.
    pub(crate) fn new(layout: SlotLayout, state: HostState, on_device: Option<StorageId>) -> Self {
        assert_eq!(layout.len(), state.len());
        Self {
            layout,
            held: Mutex::new(Held { state, on_device }),
        }
    }
}

impl Engine {
    pub(crate) fn layout(&self, slot: usize) -> &SlotLayout {
        &self.slots[slot].layout
    }

    pub(crate) fn layouts(&self) -> impl Iterator<Item = &SlotLayout> {
        self.slots.iter().map(|slot| &slot.layout)
    }

    pub(crate) fn simd(&self) -> SimdLevel {
        self.step.simd
    }

    pub(crate) fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

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
        let Slot { layout, held } = &self.slots[slot];
        let shape = weights.shape();
        assert_eq!(
            shape, layout.shape,
            "parameter `{}` has another shape than the model given to `init` had. Give `step` the \
             model that `init` returned, or call `init` on the new one",
            layout.path
        );
        let past_the_taps = or_panic(self.full_size(slot, gradient));
        let Decision::Apply(factor) = self.or_abandon(self.decide(slot, past_the_taps)) else {
            return weights;
        };
        let Some((collected, judgement)) = self.gradients.take(slot) else {
            return weights;
        };

        let started = Instant::now();
        let mut held = held.lock();
        let Held { state, on_device } = &mut *held;
        if let Some(values) = self.or_abandon(foreign(layout, state, on_device, &weights)) {
            self.pool.install(|| state.set_master(&values));
        }
        let target = Target::of(&weights);
        // The old weights go before the new ones come, if nobody else holds them.
        upload::release(weights);

        state.time += 1;
        let (scaling, _) = scaling(&judgement, factor, layout.rule.clipping());
        let update = layout.rule.begin(state.time, lr, scaling);
        let update = update.with_noise(Noise::new(self.seed, slot as u64, state.time));
        let mut upload = self.begin_upload(target, slot, state);
        let verified = collected.gradient().with_view(|view| {
            let samples = self
                .verify
                .then(|| Samples::before(layout, self.meter.round(), &update, state, view));
            for (tile, range) in pieces(&upload, state).into_iter().enumerate() {
                let boundary = Boundary::Stepped { slot, tile };
                // Only tests have something to say here, and only by delay or damage.
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
                        self.step.update(&update, piece, view, image);
                    };
                    if single {
                        step();
                    } else {
                        self.pool.install(step);
                    }
                };
                match halves {
                    Some(halves) => {
                        step(ImageMut::Bf16(halves.piece_mut(tile)));
                        upload.send(range.start, halves.lend(tile));
                    }
                    None => {
                        let poison = |buffer: &mut [u8]| self.boundaries.poison(buffer);
                        upload.tile(range.clone(), poison, step);
                    }
                }
                self.damage(boundary, state, range);
            }
            samples.map_or(Ok(0), |samples| samples.compare(layout, state))
        });
        self.gradients.recycle(slot, collected);
        let copied = state.borrow().halves.map(Halves::take_copied);
        self.meter.copied(copied.unwrap_or_default());
        let sent = upload.finish();
        // The masters have changed: whatever the model holds from here on, it is not their image
        // unless this upload is.
        *on_device = None;
        let (updated, sent) = self.or_abandon(sent.map_err(|reason| OffloadError::Upload {
            path: layout.path.clone(),
            reason,
        }));
        self.meter
            .uploaded(layout.device_bytes(), sent.transfers, sent.waited);
        let mut verified = self.or_abandon(verified);
        if self.verify {
            let all = 0..layout.len();
            self.damage(Boundary::HandedBack { slot }, state, all);
            verified += self.or_abandon(verify::weights(layout, state, &updated));
        }
        *on_device = StorageId::of(&updated);
        self.meter.verified(verified);
        self.meter.updated(layout.group, lr, started.elapsed());
        let _ = self.boundaries.pass(Boundary::HandedBack { slot });
        updated
    }

    /// Begins to send the weights of `slot`.
    fn begin_upload(&self, target: Target, slot: usize, state: &mut HostState) -> Upload<'_> {
        let layout = &self.slots[slot].layout;
        let granularity = state.borrow().state.granularity();
        self.uploader.begin(
            target,
            slot,
            layout.shape.clone(),
            layout.precision,
            granularity,
        )
    }

    /// Has a test damage the master weights of `range`.
    fn damage(&self, boundary: Boundary, state: &mut HostState, range: Range<usize>) {
        if self.boundaries.damages() {
            let mut master = state.master_of(range.clone());
            self.boundaries.damage(boundary, &mut master);
            state.write_master(range.start, &master, None);
        }
    }

    /// Ends a walk that cannot go on: gradients of the parameters it has not met must not turn up in the
    /// next round.
    #[track_caller]
    fn or_abandon<T>(&self, result: Result<T, OffloadError>) -> T {
        if result.is_err() {
            self.gradients.clear_sealed();
        }
        or_panic(result)
    }

    /// A gradient that came through Burn's containers, if it is more than a placeholder. One that
    /// cannot be used drops the gradients of the round.
    fn full_size<const D: usize>(
        &self,
        slot: usize,
        gradient: Tensor<D>,
    ) -> Result<Option<TensorData>, OffloadError> {
        let layout = &self.slots[slot].layout;
        let came = gradient.shape();
        if came == placeholder_shape(&layout.shape) {
            return Ok(None);
        }
        assert_eq!(
            came, layout.shape,
            "the gradient of parameter `{}` has another shape than the parameter",
            layout.path
        );
        let real = upload::read(gradient).and_then(|data| {
            // A placeholder added to a gradient makes all of it NaN.
            if data.num_elements() > 0 && data.iter::<f32>().all(f32::is_nan) {
                return Err(
                    "it is NaN throughout. If the model's own arithmetic is not the cause, \
                     the weight was used through both `val()` and `base()` in one backward pass: \
                     use `val()` alone"
                        .into(),
                );
            }
            Ok(data)
        });
        real.map(Some).map_err(|reason| {
            // Waits for those still on their way: they must not turn up in the next round.
            self.discard_gradients();
            OffloadError::Gradient {
                path: layout.path.clone(),
                reason,
            }
        })
    }

    /// What the last round moved.
    pub(crate) fn report(&self) -> StepReport {
        self.meter.report()
    }

    pub(crate) fn memory(&self) -> MemoryReport {
        let mut report = MemoryReport {
            host_gradients: self.gradients.bytes(),
            host_gradient_buffers: self.gradients.capacity(),
            in_flight_budget: self.downloader.limit(),
            pinned: self.uploader.pinning().0,
            state_precision: self.kept,
            ..Default::default()
        };
        for Slot { layout, held } in &self.slots {
            let state = &held.lock().state;
            report.parameters += layout.len();
            report.device_weights += layout.len() * layout.precision.size();
            report.host_master += state.master_bytes();
            report.host_moments += state.state_bytes();
            report.pinned_masters += state.pinned();
        }
        report
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Engine {{ id: {}, slots: {} }}",
            self.id,
            self.slots.len()
        )
    }
}

impl GradientSink for Engine {
    fn id(&self) -> u64 {
        self.id
    }

    fn arrived(&self, slot: usize, gradient: DeviceGradient, remaining: usize, scale: f32) {
        self.downloader.hand_over(Handover {
            slot,
            precision: self.slots[slot].layout.precision,
            remaining,
            scale,
            gradient,
        });
    }

    fn pass_began(&self, scale: Option<f32>) {
        self.begin_pass(scale);
    }

    fn loss_scale(&self) -> f32 {
        self.current_loss_scale()
    }
}

/// The pieces to step and to send: those of a split master are where its upper halves are.
fn pieces(upload: &Upload<'_>, state: &HostState) -> Vec<Range<usize>> {
    match state.halves() {
        Some(halves) => halves.ranges(),
        None => upload.tiles(),
    }
}

/// Burn's optimizer and record interfaces return no errors: they end here, with their sentence.
#[track_caller]
fn or_panic<T>(result: Result<T, OffloadError>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}
