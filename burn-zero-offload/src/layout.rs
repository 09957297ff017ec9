//! From parameters to slots: the engine's view of a model.

use burn::module::ParamId;
use burn::tensor::Shape;

use crate::optimize::{HostRule, Precision, StatePrecision};

/// One offloaded parameter.
///
/// A slot is found by the parameter's path, which every process that builds the model agrees on,
/// and by its id, which says more where part of the model is stepped on its own.
#[derive(Clone, Debug)]
pub(crate) struct SlotLayout {
    /// Dotted path within the model given to `init`, such as `blocks.0.attention.query.weight`.
    pub(crate) path: String,
    /// Id at `init`. Loading a record gives parameters the ids of the record.
    pub(crate) id: ParamId,
    /// Shape of the parameter.
    pub(crate) shape: Shape,
    /// Element type of the weights on the device.
    pub(crate) precision: Precision,
    /// How it is updated.
    pub(crate) rule: HostRule,
    /// What its master weights and state are kept in.
    pub(crate) kept: StatePrecision,
    /// The group it belongs to: 0 for the optimizer's own config, then those of `with_group` in order.
    pub(crate) group: usize,
}

impl SlotLayout {
    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.shape.num_elements()
    }

    /// Bytes of its weights, and of one gradient, on the device.
    pub(crate) fn device_bytes(&self) -> usize {
        self.len() * self.precision.size()
    }
}
