//! How a tap is attached to a parameter.

use burn::module::{Module, Reparameterization};
use burn::tensor::Tensor;

use super::ops;
use super::sink::TapTarget;

/// Path component of the tap, as module visitors see it.
pub(crate) const TAP_NAME: &str = "offload";

/// The reparameterization that sends gradients to the host. It has no parameters and changes no
/// value.
#[derive(Module, Debug)]
pub(crate) struct GradientTap {
    #[module(skip)]
    target: TapTarget,
}

impl GradientTap {
    pub(crate) fn new(target: TapTarget) -> Self {
        Self { target }
    }
}

impl Reparameterization for GradientTap {
    const NAME: &'static str = TAP_NAME;

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        if !base.is_autodiff() || !base.is_require_grad() {
            return base;
        }
        assert!(
            !base.is_distributed(),
            "burn-train's distributed data parallel strategy all-reduces gradients on the devices, \
             but those of an offloaded model live on the host: train offloaded models with a \
             single device, or take the model and a plain optimizer to DDP",
        );
        ops::tap(base, self.target.clone())
    }
}
