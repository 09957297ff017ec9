//! Where the stations meet: what happens to a gradient from its tap to the weights it changed.
//!
//! A *round* is everything between two updates: any number of backward passes, each handing over
//! gradients, then the walk of Burn's `ModuleOptimizer` over the parameters. The first parameter of
//! the walk waits until all gradients handed over are on the host and has them judged, so a round
//! whose download failed, or whose gradients are not finite, changes no weight.
//!
//! The walk updates a parameter itself, or queues its update ([`walk`]) for a thread behind the training loop
//! ([`updates`], [`work`]), and everybody who looks at the parameter waits for that ([`wait`]).

mod build;
mod core;
mod judge;
mod order;
mod phases;
mod queue;
mod round;
mod updates;
mod values;
mod verify;
mod wait;
mod walk;
mod work;

use std::collections::HashSet;
use std::sync::Arc;

use burn::tensor::kind::BridgeTensor;
use burn::tensor::{Device, Tensor, TensorData};
use parking_lot::Mutex;

use crate::capture::{DeviceGradient, GradientSink, placeholder_shape};
use crate::config::Schedule;
use crate::download::{Downloader, Handover};
use crate::error::OffloadError;
use crate::layout::SlotLayout;
use crate::optimize::{SimdLevel, StatePrecision};
use crate::rank::with_rank;
use crate::report::{MemoryReport, StepReport, Trace};
use crate::upload::{self, Target};

use self::core::{Core, Held};
use order::ForwardOrder;
use round::Round;
use updates::Updater;

pub(crate) use build::EngineOptions;
pub(crate) use core::Slot;
pub(crate) use round::RoundPolicy;
pub(crate) use values::send;

/// The host side of an offloaded model. Shared by taps, record mappers and optimizers.
pub(crate) struct Engine {
    id: u64,
    /// Ends first: it works with all that follows.
    _updater: Updater,
    downloader: Downloader,
    core: Arc<Core>,
    order: ForwardOrder,
    /// Where the weights are.
    target: Target,
    /// What the optimizer's own parameters are kept in.
    kept: StatePrecision,
    round: Mutex<Round>,
    /// Slots that got state from an optimizer record since the last update.
    restored: Mutex<HashSet<usize>>,
}

impl Engine {
    pub(crate) fn layout(&self, slot: usize) -> &SlotLayout {
        &self.core.slots[slot].layout
    }

    pub(crate) fn layouts(&self) -> impl Iterator<Item = &SlotLayout> {
        self.core.slots.iter().map(|slot| &slot.layout)
    }

    pub(crate) fn simd(&self) -> SimdLevel {
        self.core.step.simd
    }

    pub(crate) fn threads(&self) -> usize {
        self.core.pool.current_num_threads()
    }

    pub(crate) fn trace(&self) -> Trace {
        self.core.phases.so_far(&self.core.trace);
        self.core.trace.snapshot()
    }

    pub(crate) fn schedule(&self) -> Schedule {
        self.round.lock().schedule()
    }

    /// A gradient that came through Burn's containers, if it is more than a placeholder. One that
    /// cannot be used drops the gradients of the round.
    fn full_size<const D: usize>(
        &self,
        slot: usize,
        gradient: Tensor<D>,
    ) -> Result<Option<TensorData>, OffloadError> {
        let layout = self.layout(slot);
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
        self.core.meter.report()
    }

    /// What the rounds before it moved, too.
    pub(crate) fn reports(&self) -> Vec<StepReport> {
        self.core.meter.reports()
    }

    pub(crate) fn memory(&self) -> MemoryReport {
        let mut report = MemoryReport {
            host_gradients: self.core.gradients.bytes(),
            host_gradient_buffers: self.core.gradients.capacity(),
            in_flight_budget: self.downloader.limit(),
            pinned: self.core.uploader.pinning().0,
            state_precision: self.kept,
            ..Default::default()
        };
        for Slot { layout, held, .. } in &self.core.slots {
            let held = held.lock();
            let state = &held.state;
            report.parameters += layout.len();
            report.device_weights += layout.len() * layout.precision.size();
            report.host_master += state.master_bytes();
            report.host_moments += state.state_bytes();
            report.pinned_masters += state.pinned();
            report.host_waiting += held.waiting_bytes();
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
            self.core.slots.len()
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
            precision: self.layout(slot).precision,
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

    fn ready(&self, slot: usize, tracked: bool) -> bool {
        self.use_weights(slot, tracked)
    }

    fn moved(&self, slot: usize, device: &Device) {
        self.check_move(slot, device);
    }

    fn is_ahead(&self, slot: usize) -> bool {
        self.shows(slot)
    }

    fn newest(&self, slot: usize, rank: usize, base: BridgeTensor) -> BridgeTensor {
        with_rank!(rank, D => {
            self.newest_weights(slot, Tensor::<D>::from_bridge(base)).into_bridge()
        })
    }
}

impl Held {
    /// Bytes of what only delayed updates need.
    fn waiting_bytes(&self) -> usize {
        let image = self.ahead.as_ref().and_then(|ahead| ahead.image.as_ref());
        let delta = self
            .delta
            .as_ref()
            .map_or(0, |delta| size_of_val(&delta[..]));
        image.map_or(0, |image| image.as_bytes().len()) + delta
    }
}

/// Burn's optimizer and record interfaces return no errors: they end here, with their sentence.
#[track_caller]
fn or_panic<T>(result: Result<T, OffloadError>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}
