//! What the training loop and the thread behind it share.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use parking_lot::Mutex;

use super::phases::Phases;
use super::updates::Updates;
use crate::boundary::{Boundaries, Boundary};
use crate::error::OffloadError;
use crate::host::{GradientStore, HostState};
use crate::layout::SlotLayout;
use crate::optimize::{DeviceImage, TileStep};
use crate::report::Meter;
use crate::report::trace::Recorder;
use crate::upload::{StorageId, Uploader};

/// The state of an engine that updates need.
pub(super) struct Core {
    pub(super) slots: Vec<Slot>,
    pub(super) gradients: Arc<GradientStore>,
    pub(super) uploader: Uploader,
    pub(super) pool: Arc<rayon::ThreadPool>,
    pub(super) step: TileStep,
    pub(super) seed: u64,
    pub(super) verify: bool,
    /// How much gradients are corrected for an update they miss.
    pub(super) compensation: Option<f32>,
    pub(super) updates: Arc<Updates>,
    pub(super) meter: Arc<Meter>,
    pub(super) trace: Arc<Recorder>,
    pub(super) phases: Phases,
    pub(super) boundaries: Boundaries,
}

/// A parameter and its state.
pub(crate) struct Slot {
    pub(super) layout: SlotLayout,
    pub(super) held: Mutex<Held>,
    /// Whether uses of the parameter are to see an update that its model does not hold yet.
    pub(super) shows: AtomicBool,
    /// The round whose update was queued last.
    pub(super) round: AtomicU64,
}

/// What is known of a parameter. Whoever changes it, or reads it for a user, waits for the updates of the
/// parameter first.
pub(super) struct Held {
    pub(super) state: HostState,
    /// The buffer handed to the model last: it holds the image of `state`'s master weights, or will when
    /// the updates of the parameter are done; with an update `ahead`, it holds what was before that.
    pub(super) on_device: Option<StorageId>,
    /// An update that the masters have and the model's weights do not.
    pub(super) ahead: Option<Ahead>,
    /// What the last delayed update added to the masters, where gradients are corrected for it.
    pub(super) delta: Option<Vec<f32>>,
}

/// Updated weights that wait for a step to hand them to the model.
#[derive(Default)]
pub(super) struct Ahead {
    /// The weights; none where the upper halves of the master are them.
    pub(super) image: Option<DeviceImage>,
    /// The same on the device, a `Tensor<D>`, where somebody wanted to see them earlier.
    pub(super) shown: Option<Box<dyn std::any::Any + Send>>,
    /// Whether a forward pass that runs backward has used that: its gradients do not miss the update.
    pub(super) used: bool,
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
            held: Mutex::new(Held {
                state,
                on_device,
                ahead: None,
                delta: None,
            }),
            shows: AtomicBool::new(false),
            round: AtomicU64::new(0),
        }
    }
}

impl Core {
    pub(super) fn path(&self, slot: usize) -> String {
        self.slots[slot].layout.path.clone()
    }

    /// The error of an update that ended in a panic.
    pub(super) fn failed(&self, slot: usize, reason: String) -> OffloadError {
        let path = self.path(slot);
        OffloadError::Update { path, reason }
    }

    /// Has a test damage the master weights of `range`.
    pub(super) fn damage(&self, boundary: Boundary, state: &mut HostState, range: Range<usize>) {
        if self.boundaries.damages() {
            let mut master = state.master_of(range.clone());
            self.boundaries.damage(boundary, &mut master);
            state.write_master(range.start, &master, None);
        }
    }
}
