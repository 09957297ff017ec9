//! Station 1: the gradient leaves the autodiff graph.
//!
//! A reparameterization ([`GradientTap`]) sits on every offloaded parameter. Each `param.val()`
//! passes through it and adds an identity node, the tap, to the graph. In backward the tap receives
//! that use's complete gradient, hands it to the [`GradientSink`] and leaves a placeholder of one
//! element as the parameter's gradient, so that Burn's own containers and optimizers work on and
//! hold no memory. A use also waits for the update of its weight, where that runs behind the training loop.

mod ladder;
mod ops;
mod pass;
mod placeholder;
mod readout;
mod reparameterization;
mod scale;
mod sink;
mod tap;

pub(crate) use pass::Passes;
pub(crate) use placeholder::placeholder_shape;
pub(crate) use readout::DeviceGradient;
pub(crate) use reparameterization::{GradientTap, TAP_NAME};
pub(crate) use scale::scale;
pub(crate) use sink::{GradientSink, TapTarget};

#[cfg(test)]
mod order_tests;
