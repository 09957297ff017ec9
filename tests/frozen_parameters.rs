//! Frozen parameters train nobody, take no host memory and get in nobody's way.

use burn::module::{Module, ParamGroup};
use burn::nn::Linear;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_zero_offload::WithOffload;

use crate::common::{config, devices, param, step, tensor, weights};

const LR: f64 = 1e-2;

fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_weight_decay(0.1)
}

#[derive(Module, Debug)]
struct Stack {
    layers: Vec<Linear>,
}

impl Stack {
    fn new(device: &Device) -> Self {
        let layer = |i| Linear {
            weight: param([6, 6], i, device),
            bias: Some(param([6], 10 + i, device)),
        };
        Self {
            layers: (0..4).map(layer).collect(),
        }
    }

    fn loss(&self, dtype: FloatDType) -> Tensor<1> {
        let device = self.layers[0].weight.device();
        let x = tensor([3, 6], 77, &device).cast(dtype);
        let h = self
            .layers
            .iter()
            .fold(x, |h, layer| layer.forward(h).tanh());
        h.cast(FloatDType::F32).powf_scalar(2.0).mean()
    }
}

fn lower_half() -> ParamGroup {
    ParamGroup::from_any_predicates(vec!["layers.0", "layers.1"])
}

/// acceptance.md, parameters 47: a frozen parameter takes no byte of host memory.
#[test]
fn frozen_parameters_cost_no_host_memory() {
    for device in devices() {
        let model = Stack::new(&device).freeze_group(lower_half());
        let (_, offload) = adamw()
            .with_offload(config(FloatDType::BF16))
            .init(model)
            .unwrap();
        let trained = 2 * (6 * 6 + 6);
        let memory = offload.memory();
        assert_eq!(
            (memory.parameters, memory.host_master),
            (trained, 4 * trained)
        );
        // Both moments of two weights of 36 and two biases of 6, each padded to 16 values.
        assert_eq!(memory.host_moments, 2 * 2 * 4 * (48 + 16));
        assert_eq!(memory.host_gradients, 0);
    }
}

/// acceptance.md, parameters 48: half the layers frozen, train, save, load, resume.
#[test]
fn half_the_layers_frozen_train_save_load_and_resume() {
    for device in devices() {
        for dtype in [FloatDType::F32, FloatDType::BF16] {
            let build = || Stack::new(&device).freeze_group(lower_half());
            let offload = |model| adamw().with_offload(config(dtype)).init(model).unwrap();
            let (mut model, handle) = offload(build());
            let mut optimizer = handle.optimizer();
            let frozen = weights(&model)[..4].to_vec();
            for _ in 0..3 {
                let loss = model.loss(dtype);
                model = step(&mut optimizer, LR, model, loss);
            }
            assert_eq!(weights(&model)[..4], frozen);

            let record = model.clone().into_record().into_bytes().unwrap();
            let state = optimizer.into_bytes().unwrap();
            let (fresh, other) = offload(build());
            let mut resumed =
                fresh.load_record(burn::store::ModuleRecord::from_bytes(record).unwrap());
            let mut resumed_optimizer = other.optimizer().from_bytes(state).unwrap();
            for _ in 0..3 {
                let loss = model.loss(dtype);
                model = step(&mut optimizer, LR, model, loss);
                let loss = resumed.loss(dtype);
                resumed = step(&mut resumed_optimizer, LR, resumed, loss);
            }
            assert_eq!(weights(&resumed), weights(&model));
        }
    }
}
