//! What records see of an engine: values of parameters and optimizer state.

use std::sync::atomic::Ordering;

use burn::tensor::{Device, Shape, Tensor};

use super::queue::Until;
use super::{Engine, Slot, or_panic};
use crate::error::OffloadError;
use crate::host::{HostState, SavedState};
use crate::layout::SlotLayout;
use crate::optimize::{DeviceImage, Precision};
use crate::report::Work;
use crate::upload::{self, AutodiffContext, StorageId};

impl Engine {
    /// The value of a parameter for a record, in `f32`, on the host.
    ///
    /// That is the master where `weights` hold its image. Otherwise (an older clone of the model,
    /// weights edited since) it is `weights` themselves.
    pub(crate) fn save<const D: usize>(&self, slot: usize, weights: Tensor<D>) -> Tensor<D> {
        if let Err(failed) = self.settled(slot)
            && self.is_newest(slot, &weights)
        {
            or_panic(Err(failed))
        }
        let Slot { layout, held, .. } = &self.core.slots[slot];
        let held = held.lock();
        let values = or_panic(foreign(layout, &held.state, &held.on_device, &weights))
            .unwrap_or_else(|| held.state.master());
        upload::on_flex(values, weights.shape())
    }

    /// Takes a parameter's value from a record and returns the weights for the device.
    ///
    /// On an autodiff device the value becomes the master. A validation copy of the model has no
    /// autodiff: loading into it leaves the training run alone.
    pub(crate) fn load<const D: usize>(&self, slot: usize, value: Tensor<D>) -> Tensor<D> {
        // An update that failed is made up for by the values that come.
        let _ = self.settled(slot);
        let Slot {
            layout,
            held,
            shows,
            ..
        } = &self.core.slots[slot];
        let (context, shape, device) = (AutodiffContext::of(&value), value.shape(), value.device());
        assert_eq!(
            shape, layout.shape,
            "the record holds parameter `{}` in another shape than the model has",
            layout.path
        );
        let trains = value.is_autodiff();
        let values = upload::read(value).and_then(upload::as_f32);
        let values = or_panic(values.map_err(|reason| read_error(layout, reason)));
        let mut held = held.lock();
        if !trains {
            let image = held.state.image_of(&values);
            return context.restore(upload::to_device(image, shape, &device));
        }
        let state = &mut held.state;
        self.core.pool.install(|| state.set_master(&values));
        let weights = send(&held.state, shape, &device);
        self.core.updates.forgive(slot);
        shows.store(false, Ordering::Release);
        held.ahead = None;
        held.delta = None;
        held.on_device = StorageId::of(&weights);
        context.restore(weights)
    }

    /// Optimizer state of a slot, copied for a record.
    pub(crate) fn save_state(&self, slot: usize) -> SavedState {
        or_panic(self.settled(slot));
        let state = &self.core.slots[slot].held.lock().state;
        SavedState {
            time: Some(state.time),
            state: state.state().into_iter().map(Some).collect(),
            scales: state.scales(),
        }
    }

    /// Optimizer state of a slot from a record. `false`, with nothing changed, if it does not fit.
    pub(crate) fn restore_state(&self, slot: usize, saved: SavedState) -> bool {
        let _ = self.settled(slot);
        let Slot { layout, held, .. } = &self.core.slots[slot];
        if !held.lock().state.restore(&layout.rule, saved) {
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
    pub(super) fn start_fresh_where_a_record_had_nothing(&self) {
        let restored = std::mem::take(&mut *self.restored.lock());
        if restored.is_empty() {
            return;
        }
        for (index, slot) in self.core.slots.iter().enumerate() {
            if !restored.contains(&index) {
                let _ = self.wait(index, Until::Settled, Work::WaitStep);
                slot.held.lock().state.reset();
            }
        }
    }
}

/// The values of `weights` in `f32`, if they are not the image of the master weights: the model
/// then holds something else than this engine gave it, and what the model holds counts.
pub(super) fn foreign<const D: usize>(
    layout: &SlotLayout,
    state: &HostState,
    on_device: &Option<StorageId>,
    weights: &Tensor<D>,
) -> Result<Option<Vec<f32>>, OffloadError> {
    if on_device.is_some() && StorageId::of(weights) == *on_device {
        return Ok(None);
    }
    let error = |reason| read_error(layout, reason);
    let data = upload::read(weights.clone()).map_err(error)?;
    let same = upload::to_precision(data.dtype()) == Some(layout.precision)
        && state.has_image(data.as_bytes());
    if same {
        Ok(None)
    } else {
        upload::as_f32(data).map(Some).map_err(error)
    }
}

/// The device's image of the master weights as a tensor on `device`, without autodiff. Upper halves in one
/// piece are lent.
pub(crate) fn send<const D: usize>(state: &HostState, shape: Shape, device: &Device) -> Tensor<D> {
    send_image(state, None, shape, device)
}

/// The same with an image that is there already, if one is.
pub(super) fn send_image<const D: usize>(
    state: &HostState,
    image: Option<DeviceImage>,
    shape: Shape,
    device: &Device,
) -> Tensor<D> {
    match state.halves() {
        Some(halves) if halves.ranges().len() == 1 => {
            upload::lend(halves.lend(0), Precision::Bf16, shape, device)
        }
        _ => upload::to_device(image.unwrap_or_else(|| state.image()), shape, device),
    }
}

fn read_error(layout: &SlotLayout, reason: String) -> OffloadError {
    OffloadError::ReadWeights {
        path: layout.path.clone(),
        reason,
    }
}
