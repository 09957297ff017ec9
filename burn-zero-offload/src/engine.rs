//! Where the stations meet: what happens to a gradient from its tap to the weights it changed.
//!
//! A *round* is everything between two updates: any number of backward passes, each handing over
//! gradients, then the walk of Burn's `ModuleOptimizer` over the parameters. The first parameter of
//! the walk waits until all gradients handed over are on the host, so a round whose download
//! failed changes no weight.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::{Tensor, TensorData};
use parking_lot::Mutex;

use crate::capture::{DeviceGradient, GradientSink, placeholder_shape};
use crate::download::Reader;
use crate::error::OffloadError;
use crate::host::{GradientStore, HostGradient, SavedState, SlotState};
use crate::layout::SlotLayout;
use crate::optimize::{DeviceImage, Precision, SimdLevel, TileStep, l2_norm};
use crate::report::MemoryReport;
use crate::upload::{self, AutodiffContext, StorageId};

/// The host side of an offloaded model. Shared by taps, record mappers and optimizers.
pub(crate) struct Engine {
    id: u64,
    slots: Vec<Slot>,
    gradients: Arc<GradientStore>,
    reader: Reader,
    pool: rayon::ThreadPool,
    step: TileStep,
    /// Slots that got state from an optimizer record since the last update.
    restored: Mutex<HashSet<usize>>,
}

/// A parameter and its state.
pub(crate) struct Slot {
    layout: SlotLayout,
    held: Mutex<Held>,
}

struct Held {
    state: SlotState,
    /// The buffer handed to the model last: it holds the image of `state`'s master weights.
    on_device: Option<StorageId>,
}

impl Slot {
    /// A slot whose master weights have just been copied from a model; `on_device` is the buffer
    /// with their image.
    pub(crate) fn new(layout: SlotLayout, master: &[f32], on_device: Option<StorageId>) -> Self {
        assert_eq!(layout.len(), master.len());
        let state = SlotState::new(master, layout.rule.amsgrad);
        Self {
            layout,
            held: Mutex::new(Held { state, on_device }),
        }
    }
}

impl Engine {
    /// An engine for `slots`; `threads` of `None` uses what rayon finds.
    pub(crate) fn new(
        slots: Vec<Slot>,
        threads: Option<usize>,
        simd: SimdLevel,
    ) -> Result<Self, OffloadError> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads.unwrap_or(0))
            .thread_name(|index| format!("offload-step-{index}"))
            .build()
            .map_err(|error| OffloadError::Threads {
                reason: error.to_string(),
            })?;
        let reader = Reader::start().map_err(|error| OffloadError::Threads {
            reason: error.to_string(),
        })?;
        Ok(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            gradients: Arc::new(GradientStore::new(slots.len())),
            slots,
            reader,
            pool,
            step: TileStep::new(simd),
            restored: Mutex::default(),
        })
    }

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

    /// Waits until every gradient handed over is on the host. If one did not make it, the
    /// gradients of the round are dropped: a part of them must not be applied.
    pub(crate) fn finish_downloads(&self) -> Result<(), OffloadError> {
        self.reader.finish().map_err(|failure| {
            self.gradients.clear();
            OffloadError::Download {
                path: self.slots[failure.slot].layout.path.clone(),
                reason: failure.reason,
            }
        })
    }

    /// Drops the gradients of the round, failed ones included.
    pub(crate) fn discard_gradients(&self) {
        let _dropped_with_the_rest = self.reader.finish();
        self.gradients.clear();
    }

    /// Applies what the round collected for `slot` to its master weights and returns the new
    /// weights for the device. `weights` are returned as they are if nothing was collected.
    ///
    /// `gradient` is what came through Burn's containers: a placeholder, or a real gradient that
    /// reached the optimizer past the taps, which then counts as one more contribution.
    ///
    /// # Panics
    ///
    /// If a gradient of the round could not be read, with no weight changed. If one came past the taps
    /// that cannot be used: Burn shows those only one by one, so parameters before it are updated.
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
        self.add_if_real(slot, gradient);
        or_panic(self.finish_downloads());
        self.start_fresh_where_a_record_had_nothing();
        let Some(gradient) = self.gradients.take(slot) else {
            return weights;
        };

        let mut held = held.lock();
        let Held { state, on_device } = &mut *held;
        if let Some(values) = or_panic(foreign(layout, state, on_device, &weights)) {
            state.arena.master.copy_from_slice(&values);
        }
        let device = weights.device();
        // Frees the old weights before the new ones are allocated, if nobody else holds them.
        drop(weights);

        state.time += 1;
        let mut image = DeviceImage::zeroed(layout.precision, layout.len());
        gradient.with_view(|view| {
            self.pool.install(|| {
                let norm = if layout.rule.needs_norm() {
                    l2_norm(&view)
                } else {
                    0.0
                };
                let scalars = layout.rule.scalars(state.time, lr, norm);
                self.step
                    .update(state.moments(), view, &scalars, &mut image);
            })
        });
        let updated = upload::to_device(image, shape, &device);
        *on_device = StorageId::of(&updated);
        updated
    }

    /// Stores a gradient that reached the optimizer past the taps; placeholders are none.
    fn add_if_real<const D: usize>(&self, slot: usize, gradient: Tensor<D>) {
        let layout = &self.slots[slot].layout;
        let came = gradient.shape();
        if came == placeholder_shape(&layout.shape) {
            return;
        }
        assert_eq!(
            came, layout.shape,
            "the gradient of parameter `{}` has another shape than the parameter",
            layout.path
        );
        let stored = upload::read(gradient).and_then(|data| {
            // A placeholder added to a gradient makes all of it NaN.
            if data.num_elements() > 0 && data.iter::<f32>().all(f32::is_nan) {
                return Err(
                    "it is NaN throughout. If the model's own arithmetic is not the cause, \
                     the weight was used through both `val()` and `base()` in one backward pass: \
                     use `val()` alone"
                        .into(),
                );
            }
            store(&self.gradients, layout, slot, data)
        });
        or_panic(stored.map_err(|reason| {
            // Waits for those still on their way: they must not turn up in the next round.
            self.discard_gradients();
            OffloadError::Gradient {
                path: layout.path.clone(),
                reason,
            }
        }));
    }

    /// The value of a parameter for a record, in `f32`, on the host.
    ///
    /// That is the master where `weights` hold its image. Otherwise (an older clone of the model,
    /// weights edited since) it is `weights` themselves.
    pub(crate) fn save<const D: usize>(&self, slot: usize, weights: Tensor<D>) -> Tensor<D> {
        let Slot { layout, held } = &self.slots[slot];
        let held = held.lock();
        let values = or_panic(foreign(layout, &held.state, &held.on_device, &weights))
            .unwrap_or_else(|| held.state.arena.master.to_vec());
        upload::on_flex(values, weights.shape())
    }

    /// Takes a parameter's value from a record and returns the weights for the device.
    ///
    /// On an autodiff device the value becomes the master. A validation copy of the model has no
    /// autodiff: loading into it leaves the training run alone.
    pub(crate) fn load<const D: usize>(&self, slot: usize, value: Tensor<D>) -> Tensor<D> {
        let Slot { layout, held } = &self.slots[slot];
        let (context, shape, device) = (AutodiffContext::of(&value), value.shape(), value.device());
        assert_eq!(
            shape, layout.shape,
            "the record holds parameter `{}` in another shape than the model has",
            layout.path
        );
        let trains = value.is_autodiff();
        let values = upload::read(value).and_then(upload::as_f32);
        let values = or_panic(values.map_err(|reason| read_error(layout, reason)));
        let image = DeviceImage::of(layout.precision, &values);
        let weights = upload::to_device(image, shape, &device);
        if trains {
            let mut held = held.lock();
            held.state.arena.master.copy_from_slice(&values);
            held.on_device = StorageId::of(&weights);
        }
        context.restore(weights)
    }

    /// Optimizer state of a slot, copied for a record.
    pub(crate) fn save_state(&self, slot: usize) -> SavedState {
        self.slots[slot].held.lock().state.save()
    }

    /// Optimizer state of a slot from a record. `false`, with nothing changed, if it does not fit.
    pub(crate) fn restore_state(&self, slot: usize, saved: SavedState) -> bool {
        if !self.slots[slot].held.lock().state.restore(saved) {
            return false;
        }
        let mut restored = self.restored.lock();
        if !restored.insert(slot) {
            // Seen before in this load: another record is being loaded over it.
            restored.clear();
            restored.insert(slot);
        }
        true
    }

    /// An optimizer record is the whole state: a parameter it has nothing for starts without any,
    /// as in Burn. Burn does not say when a load is over, so this waits for the next update.
    fn start_fresh_where_a_record_had_nothing(&self) {
        let restored = std::mem::take(&mut *self.restored.lock());
        if restored.is_empty() {
            return;
        }
        for (index, slot) in self.slots.iter().enumerate() {
            if !restored.contains(&index) {
                slot.held.lock().state.reset();
            }
        }
    }

    pub(crate) fn memory(&self) -> MemoryReport {
        let mut report = MemoryReport {
            host_gradients: self.gradients.bytes(),
            ..Default::default()
        };
        for Slot { layout, held } in &self.slots {
            let arena = &held.lock().state.arena;
            report.parameters += layout.len();
            report.device_weights += layout.len() * layout.precision.size();
            report.host_master += size_of_val(&arena.master[..]);
            report.host_moments += arena.moment_bytes();
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

    fn arrived(&self, slot: usize, gradient: DeviceGradient) {
        let layout = self.slots[slot].layout.clone();
        let gradients = self.gradients.clone();
        let job = move || {
            let data = gradient();
            data.and_then(|data| store(&gradients, &layout, slot, data))
        };
        self.reader.hand_over(slot, Box::new(job));
    }
}

/// Puts a gradient that is on the host into the store.
fn store(
    gradients: &GradientStore,
    layout: &SlotLayout,
    slot: usize,
    data: TensorData,
) -> Result<(), String> {
    let dtype = data.dtype();
    let (precision, bytes) = match upload::to_precision(dtype) {
        Some(precision) => (precision, data.into_parts().0),
        None => (
            Precision::F32,
            burn::tensor::Bytes::from_elems(upload::as_f32(data)?),
        ),
    };
    let gradient = HostGradient { precision, bytes };
    if gradient.len() != layout.len() {
        let (got, expected) = (gradient.len(), layout.len());
        return Err(format!(
            "it has {got} elements of {dtype:?}, the parameter has {expected}"
        ));
    }
    gradients.add(slot, gradient);
    Ok(())
}

/// The values of `weights` in `f32`, if they are not the image of the master weights: the model
/// then holds something else than this engine gave it, and what the model holds counts.
fn foreign<const D: usize>(
    layout: &SlotLayout,
    state: &SlotState,
    on_device: &Option<StorageId>,
    weights: &Tensor<D>,
) -> Result<Option<Vec<f32>>, OffloadError> {
    if on_device.is_some() && StorageId::of(weights) == *on_device {
        return Ok(None);
    }
    let error = |reason| read_error(layout, reason);
    let data = upload::read(weights.clone()).map_err(error)?;
    let master = &state.arena.master;
    let same = upload::to_precision(data.dtype()) == Some(layout.precision)
        && data.as_bytes() == DeviceImage::of(layout.precision, master).as_bytes();
    if same {
        Ok(None)
    } else {
        upload::as_f32(data).map(Some).map_err(error)
    }
}

fn read_error(layout: &SlotLayout, reason: String) -> OffloadError {
    OffloadError::ReadWeights {
        path: layout.path.clone(),
        reason,
    }
}

/// Burn's optimizer and record interfaces return no errors: they end here, with their sentence.
#[track_caller]
fn or_panic<T>(result: Result<T, OffloadError>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}
