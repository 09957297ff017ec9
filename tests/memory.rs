//! What the device does not hold: gradients on leaves, two copies of the model.

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Embedding, Linear};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, FloatDType, Gradients, Int, Tensor};
use burn_zero_offload::WithOffload;

use crate::common::{config, devices, param};

#[derive(Module, Debug)]
struct Net {
    embedding: Embedding,
    layers: Vec<Linear>,
    scale: Param<Tensor<1>>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let layer = |i| Linear {
            weight: param([8, 8], i, device),
            bias: Some(param([8], 10 + i, device)),
        };
        Self {
            embedding: Embedding {
                weight: param([5, 8], 1, device),
            },
            layers: (2..5).map(layer).collect(),
            scale: param([1], 9, device),
        }
    }

    fn loss(&self) -> Tensor<1> {
        let device = self.scale.device();
        let tokens = Tensor::<2, Int>::from_ints([[0, 1, 2], [3, 4, 0]], &device);
        let h = self.embedding.forward(tokens);
        let h = self
            .layers
            .iter()
            .fold(h, |h, layer| layer.forward(h).tanh());
        let h = h * self.scale.val().reshape([1, 1, 1]);
        h.cast(FloatDType::F32).powf_scalar(2.0).mean()
    }
}

/// Elements held as gradients of a module's leaves.
struct LeafGradients<'a> {
    grads: &'a Gradients,
    leaves: usize,
    elements: usize,
}

impl ModuleVisitor for LeafGradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = param
            .base()
            .grad(self.grads)
            .expect("every leaf has a placeholder");
        assert_eq!(gradient.shape().num_dims(), D);
        assert_ne!(gradient.shape(), param.base().shape());
        self.leaves += 1;
        self.elements += gradient.shape().num_elements();
    }
}

/// After backward a leaf holds a placeholder of one element (two for a parameter of one), whatever the
/// size of its gradient, with and without checkpointing.
#[test]
fn leaves_never_hold_a_gradient() {
    for device in devices() {
        for device in [device.clone(), device.gradient_checkpointing()] {
            for dtype in [FloatDType::F32, FloatDType::BF16] {
                let (model, offload) = AdamWConfig::new()
                    .with_offload(config(dtype))
                    .init(Net::new(&device))
                    .unwrap();
                let grads = model.loss().backward();
                let mut seen = LeafGradients {
                    grads: &grads,
                    leaves: 0,
                    elements: 0,
                };
                model.visit(&mut seen);
                // The scale is the parameter of one element.
                assert_eq!((seen.leaves, seen.elements), (8, 7 + 2));
                offload.flush().unwrap();
                let memory = offload.memory();
                let size = if dtype == FloatDType::F32 { 4 } else { 2 };
                assert_eq!(memory.host_gradients, size * memory.parameters);
                let params = GradientsParams::from_grads(grads, &model);
                assert_eq!(params.len(), 8);
            }
        }
    }
}

#[test]
fn the_host_holds_fourteen_bytes_a_parameter() {
    for device in devices() {
        let model = Linear {
            weight: param([64, 32], 1, &device),
            bias: None,
        };
        let adamw = AdamWConfig::new();
        let (model, offload) = adamw
            .with_offload(config(FloatDType::BF16))
            .init(model)
            .unwrap();
        let weight = model.weight.val();
        (weight.clone() * weight).sum().backward();
        offload.flush().unwrap();
        let memory = offload.memory();
        assert_eq!(memory.parameters, 64 * 32);
        assert_eq!(memory.device_weights, 2 * memory.parameters);
        assert_eq!(memory.host(), 14 * memory.parameters);
    }
}

/// `init` walks one parameter at a time: at no moment does the device hold more than the weights in
/// half precision, one parameter in full, and what is still to be moved.
#[cfg(feature = "cpu")]
#[test]
fn init_never_holds_two_copies_of_the_model() {
    use std::sync::{Arc, Mutex};

    use burn::module::ParamId;
    use burn::tensor::{Distribution, Shape};

    const SIDE: usize = 256;
    const LAYERS: usize = 16;

    let device = Device::cpu().autodiff();
    let plain = device.clone().inner();
    let in_use = {
        let plain = plain.clone();
        move || {
            plain.sync().unwrap();
            plain.memory_pool_usage().unwrap().bytes_in_use as usize
        }
    };
    let peak = Arc::new(Mutex::new(0));
    // Each parameter looks at the device when it is initialised, which `init` does one by one.
    let layer = || {
        let (peak, in_use) = (peak.clone(), in_use.clone());
        let init = move |device: &Device, require_grad: bool| {
            let value = Tensor::random([SIDE, SIDE], Distribution::Default, device);
            let value = if require_grad {
                value.require_grad()
            } else {
                value
            };
            let now = in_use();
            let mut peak = peak.lock().unwrap();
            *peak = now.max(*peak);
            value
        };
        let shape = Shape::from([SIDE, SIDE]);
        Linear {
            weight: Param::uninitialized(ParamId::new(), init, device.clone(), true, shape),
            bias: None,
        }
    };
    #[derive(Module, Debug)]
    struct Stack {
        layers: Vec<Linear>,
    }
    let model = Stack {
        layers: (0..LAYERS).map(|_| layer()).collect(),
    };
    // Other tests share the device; what they hold at the start is not this model's.
    let before = in_use();
    let (model, offload) = AdamWConfig::new()
        .with_offload(config(FloatDType::BF16))
        .init(model)
        .unwrap();
    let half = 2 * SIDE * SIDE;
    let peak = peak.lock().unwrap().saturating_sub(before);
    let after = in_use().saturating_sub(before);
    assert_eq!(offload.memory().device_weights, LAYERS * half);
    assert!(after >= LAYERS * half, "{after}");
    // At the last parameter: fifteen in half precision and one in full. A little room for what the
    // tests beside this one allocate.
    let bound = (LAYERS - 1) * half + 2 * half + half;
    assert!(
        peak <= bound,
        "{peak} bytes on the device during init, at most {bound} expected"
    );
    drop(model);
}
