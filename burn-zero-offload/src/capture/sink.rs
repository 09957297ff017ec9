//! What a tap knows about the world behind it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::Device;
use burn::tensor::kind::BridgeTensor;

use super::pass::Passes;
use super::placeholder::Placeholder;
use super::readout::DeviceGradient;

/// Where taps hand their gradients.
pub(crate) trait GradientSink: Send + Sync {
    /// Distinguishes sinks; taps of one model share one sink.
    fn id(&self) -> u64;

    /// Takes over the gradient of one use of the parameter in `slot`. May block until there is
    /// room; that is what holds backward back.
    ///
    /// `remaining` counts the uses of the parameter in graphs that are recorded and have not run
    /// backward: so many gradients may follow, or fewer if a graph is dropped. The gradient carries
    /// the loss scale `scale`.
    fn arrived(&self, slot: usize, gradient: DeviceGradient, remaining: usize, scale: f32);

    /// A backward pass has reached its first tap, or the operation that scales its loss; `scale` is its
    /// loss scale, if it was scaled.
    fn pass_began(&self, scale: Option<f32>);

    /// The loss scale for a pass that begins now, a power of two.
    fn loss_scale(&self) -> f32;

    /// Waits until the weights of the parameter in `slot` can be used. `tracked` if a forward pass uses them
    /// that will run backward. `false` if their update failed: only older clones can be used then.
    fn ready(&self, slot: usize, tracked: bool) -> bool;

    /// The tensor that the model holds for the parameter in `slot` has been copied to `device`, or is there.
    ///
    /// # Panics
    ///
    /// If it was copied before its update had arrived.
    fn moved(&self, slot: usize, device: &Device);

    /// Whether the model's own tensor for the parameter in `slot` may be behind its newest weights, or may
    /// have failed.
    fn is_ahead(&self, slot: usize) -> bool;

    /// The newest weights of the parameter in `slot`; `base`, of this rank, is what the model holds.
    ///
    /// # Panics
    ///
    /// If the update of these weights failed.
    fn newest(&self, slot: usize, rank: usize, base: BridgeTensor) -> BridgeTensor;
}

/// The place a tap feeds: a slot of a sink.
#[derive(Clone)]
pub(crate) struct TapTarget {
    /// Where the gradient goes.
    pub(super) passes: Passes,
    /// Which parameter it belongs to.
    pub(super) slot: usize,
    /// What the parameter's leaf holds instead of a gradient, made once.
    pub(super) placeholder: Placeholder,
    uses: Arc<AtomicUsize>,
}

/// One use of a parameter in a recorded graph, counted while this lives.
pub(super) struct Use(Arc<AtomicUsize>);

impl TapTarget {
    pub(crate) fn new(passes: Passes, slot: usize) -> Self {
        Self {
            passes,
            slot,
            placeholder: Placeholder::default(),
            uses: Arc::default(),
        }
    }

    /// Counts one more use.
    pub(super) fn record_use(&self) -> Arc<Use> {
        self.uses.fetch_add(1, Ordering::Relaxed);
        Arc::new(Use(self.uses.clone()))
    }

    /// Uses recorded whose graphs have not run backward.
    pub(super) fn uses(&self) -> usize {
        self.uses.load(Ordering::Relaxed)
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for TapTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "TapTarget {{ sink: {}, slot: {} }}",
            self.passes.sink.id(),
            self.slot
        )
    }
}
