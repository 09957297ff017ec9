//! How a tap is attached to a parameter.

use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Reparameterization};
use burn::tensor::{Device, Tensor};

use super::ops;
use super::sink::TapTarget;

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

    fn wait(&self) {
        // If the update failed, whoever uses these weights is told.
        self.target.passes.sink.ready(self.target.slot, false);
    }
}

/// By hand: copies of the model take over what the parameter holds, which has to be there by then.
impl Module for GradientTap {
    fn collect_devices(&self, devices: Devices) -> Devices {
        devices
    }

    fn fork(self, device: &Device) -> Self {
        self.to_device(device)
    }

    fn to_device(self, device: &Device) -> Self {
        // Burn has moved the weights already.
        self.target.passes.sink.moved(self.target.slot, device);
        self
    }

    fn train(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.wait();
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
        let sink = &passes.sink;
        let value = match sink.ready(*slot, tracked) && !sink.is_ahead(*slot) {
            true => base.clone(),
            false => Tensor::from_bridge(sink.newest(*slot, D, base.clone().into_bridge())),
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
