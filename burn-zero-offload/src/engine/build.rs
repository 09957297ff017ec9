//! How an engine is put together.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::core::Core;
use super::order::ForwardOrder;
use super::round::{Round, RoundPolicy};
use super::updates::{Updater, Updates};
use super::{Engine, Slot};
use crate::boundary::{Boundaries, Boundary};
use crate::config::Schedule;
use crate::download::{Arrived, Delivery, Downloader};
use crate::error::OffloadError;
use crate::host::{Contribution, GradientStore};
use crate::optimize::{LossScale, LossScaler, SimdLevel, StatePrecision, TileStep};
use crate::report::trace::Recorder;
use crate::report::{GroupReport, Meter, StepReport};
use crate::upload::{Target, UploadOptions, Uploader};

/// What a user may choose about an engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineOptions {
    /// Instruction set of the CPU step.
    pub(crate) simd: SimdLevel,
    /// Keys the random bits of what is rounded stochastically.
    pub(crate) seed: u64,
    /// What the optimizer's own parameters are kept in.
    pub(crate) kept: StatePrecision,
    /// Bytes of gradients in flight.
    pub(crate) in_flight: Option<usize>,
    /// How weights are sent.
    pub(crate) upload: UploadOptions,
    /// When updates run.
    pub(crate) schedule: Schedule,
    /// How much gradients are corrected for an update they miss.
    pub(crate) compensation: Option<f32>,
    /// What is decided about the gradients of a round.
    pub(crate) policy: RoundPolicy,
    /// How the loss is scaled.
    pub(crate) loss_scale: LossScale,
    /// Check every step.
    pub(crate) verify: bool,
    /// Groups with rules of their own, the optimizer's own included.
    pub(crate) groups: usize,
}

/// Bytes that may be in flight at least: a few packs of small gradients.
const IN_FLIGHT: usize = 4 << 20;

impl Engine {
    /// An engine for `slots`, whose weights are on the device of `target`.
    pub(crate) fn new(
        slots: Vec<Slot>,
        target: &Target,
        options: EngineOptions,
        (pool, placement): (Arc<rayon::ThreadPool>, String),
    ) -> Result<Self, OffloadError> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let threads = |reason: String| OffloadError::Threads { reason };
        let layouts = slots.iter().map(|slot| &slot.layout);
        let largest = layouts.max_by_key(|layout| layout.device_bytes());
        let needed = largest.map_or(0, |layout| layout.device_bytes());
        let budget = options.in_flight.unwrap_or(IN_FLIGHT.max(2 * needed));
        if budget < needed {
            return Err(OffloadError::BudgetTooSmall {
                budget,
                path: largest.map_or_else(String::new, |layout| layout.path.clone()),
                needed,
            });
        }

        let boundaries = Boundaries::current();
        // Split masters are sent from where they are; others go through buffers.
        let halves = slots.iter().map(|slot| slot.held.lock().state.pinned());
        let halves: usize = halves.sum();
        let buffered = slots
            .iter()
            .filter(|slot| slot.held.lock().state.halves().is_none());
        let buffered = buffered.map(|slot| (slot.layout.len(), slot.layout.precision));
        let upload = options.upload.less_pinned(halves);
        let paths = slots.iter().map(|slot| slot.layout.path.clone());
        let trace = Arc::new(Recorder::new(paths.collect()));
        let uploader = Uploader::start(target, upload, buffered, &boundaries, trace.clone())
            .map_err(|error| threads(error.to_string()))?;
        let (pinned_up, pinning) = uploader.pinning();
        let pinned_up = pinned_up + halves;
        let scaler = LossScaler::new(options.loss_scale);
        let meter = Arc::new(Meter::new(StepReport {
            next_loss_scale: scaler.state().scale,
            groups: groups(&slots, options.groups),
            in_flight_budget: budget,
            pinned_up,
            pinning: pinning.to_string(),
            simd: options.simd,
            threads: pool.current_num_threads(),
            placement,
            state_precision: options.kept,
            ..Default::default()
        }));
        let gradients = Arc::new(GradientStore::new(slots.len(), options.simd));
        let delivery = Delivery {
            store: Box::new(store(&slots, &gradients, &meter, &boundaries)),
            settle: Box::new({
                // The threads of the step have nothing to do during backward: they help with the norm.
                let (gradients, pool) = (gradients.clone(), pool.clone());
                move |slot| gradients.settle(slot, &pool)
            }),
        };
        let stations = (meter.clone(), trace.clone(), boundaries.clone());
        let downloader = Downloader::start(budget, needed, delivery, stations)
            .map_err(|error| threads(error.to_string()))?;
        let count = slots.len();
        let round = Round::new(options.policy, options.schedule, scaler, count);
        let core = Arc::new(Core {
            updates: Arc::new(Updates::new(count)),
            slots,
            gradients,
            uploader,
            pool,
            step: TileStep::new(options.simd),
            seed: options.seed,
            verify: options.verify,
            compensation: options.compensation,
            meter,
            trace,
            phases: Default::default(),
            boundaries,
        });
        let updater = Updater::start(core.clone()).map_err(|error| threads(error.to_string()))?;
        Ok(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            _updater: updater,
            downloader,
            order: ForwardOrder::new(count),
            target: target.clone(),
            core,
            kept: options.kept,
            round: Mutex::new(round),
            restored: Mutex::default(),
        })
    }
}

/// What is known of the groups before the first round.
fn groups(slots: &[Slot], count: usize) -> Vec<GroupReport> {
    let mut groups = vec![GroupReport::default(); count];
    for layout in slots.iter().map(|slot| &slot.layout) {
        let kept = &mut groups[layout.group].state_precision;
        if !kept.contains(&layout.kept) {
            kept.push(layout.kept);
        }
    }
    groups
}

/// What the download station does with a gradient that has arrived.
fn store(
    slots: &[Slot],
    gradients: &Arc<GradientStore>,
    meter: &Arc<Meter>,
    boundaries: &Boundaries,
) -> impl Fn(Arrived<'_>) -> Result<(), String> + Send + Sync + use<> {
    let lens: Vec<usize> = slots.iter().map(|slot| slot.layout.len()).collect();
    let (gradients, meter, boundaries) = (gradients.clone(), meter.clone(), boundaries.clone());
    move |arrived| {
        let Arrived {
            slot,
            precision,
            bytes,
            non_finite,
            scale,
        } = arrived;
        let (got, expected) = (bytes.len(), lens[slot] * precision.size());
        if got != expected {
            return Err(format!(
                "it has {got} bytes of {precision:?}, the parameter needs {expected}"
            ));
        }
        boundaries.pass(Boundary::Stored { slot })?;
        meter.non_finite(non_finite);
        let contribution = Contribution {
            precision,
            bytes,
            scale,
        };
        gradients.add(slot, contribution, |memory| boundaries.poison(memory));
        Ok(())
    }
}
