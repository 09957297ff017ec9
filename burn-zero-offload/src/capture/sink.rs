//! What a tap knows about the world behind it.

use std::fmt;
use std::sync::Arc;

use burn::tensor::TensorData;

use super::placeholder::Placeholder;

/// A gradient that still lives on the device: the way to read it.
///
/// Blocks until the gradient is on the host. May run on any thread, once; dropping it unread frees
/// the gradient. An error is what the backend said.
pub(crate) type DeviceGradient = Box<dyn FnOnce() -> Result<TensorData, String> + Send>;

/// Where taps hand their gradients.
pub(crate) trait GradientSink: Send + Sync {
    /// Distinguishes sinks; taps of one model share one sink.
    fn id(&self) -> u64;

    /// Takes over the gradient of one use of the parameter in `slot`. May block until there is
    /// room; that is what holds backward back.
    fn arrived(&self, slot: usize, gradient: DeviceGradient);
}

/// The place a tap feeds: a slot of a sink.
#[derive(Clone)]
pub(crate) struct TapTarget {
    /// Where the gradient goes.
    pub(super) sink: Arc<dyn GradientSink>,
    /// Which parameter it belongs to.
    pub(super) slot: usize,
    /// What the parameter's leaf holds instead of a gradient, made once.
    pub(super) placeholder: Placeholder,
}

impl TapTarget {
    pub(crate) fn new(sink: Arc<dyn GradientSink>, slot: usize) -> Self {
        Self {
            sink,
            slot,
            placeholder: Placeholder::default(),
        }
    }
}

impl fmt::Debug for TapTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "TapTarget {{ sink: {}, slot: {} }}",
            self.sink.id(),
            self.slot
        )
    }
}
