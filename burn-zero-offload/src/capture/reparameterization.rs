//! How a tap is attached to a parameter.

use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Reparameterization};
use burn::tensor::{Device, Tensor};

use super::ops;
use super::sink::TapTarget;
use crate::upload::AutodiffContext;

/// Path component of the tap, as module visitors see it.
pub(crate) const TAP_NAME: &str = "offload";

/// The reparameterization that sends gradients to the host, and has whoever uses a weight wait for its
/// update. It has no parameters and changes no value.
#[derive(Clone, Debug)]
pub(crate) struct GradientTap {
    target: TapTarget,
}

impl GradientTap {
    pub(crate) fn new(target: TapTarget) -> Self {
        Self { target }
    }

    fn wait(&self, tracked: bool) {
        self.target.passes.sink.ready(self.target.slot, tracked);
    }
}

/// By hand, since copies of the model read what the parameter holds: where they are for use elsewhere it
/// has to be there.
impl Module for GradientTap {
    fn collect_devices(&self, devices: Devices) -> Devices {
        devices
    }

    fn fork(self, _: &Device) -> Self {
        self.wait(false);
        self
    }

    fn to_device(self, _: &Device) -> Self {
        self.wait(false);
        self
    }

    fn train(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.wait(false);
        self.clone()
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<Visitor: ModuleVisitor>(&self, _: &mut Visitor) {}

    fn map<Mapper: ModuleMapper>(self, _: &mut Mapper) -> Self {
        self
    }
}

impl Reparameterization for GradientTap {
    const NAME: &'static str = TAP_NAME;

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let TapTarget { passes, slot, .. } = &self.target;
        let tracked = base.is_autodiff() && base.is_require_grad();
        self.wait(tracked);
        let value = match passes.sink.is_ahead(*slot) {
            false => base.clone(),
            true => {
                let held = base.clone().without_autodiff().into_bridge();
                let newest = passes.sink.newest(*slot, D, held);
                AutodiffContext::of(&base).restore(Tensor::from_bridge(newest))
            }
        };
        if !tracked {
            return value;
        }
        assert!(
            !base.is_distributed(),
            "burn-train's distributed data parallel strategy all-reduces gradients on the devices, \
             but those of an offloaded model live on the host: train offloaded models with a \
             single device, or take the model and a plain optimizer to DDP",
        );
        ops::tap(base, value, self.target.clone())
    }
}
