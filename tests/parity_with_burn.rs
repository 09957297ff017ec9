//! Offloaded training in f32 gives the weights that Burn's own optimizers give.

use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::module::{Module, ParamGroup};
use burn::nn::{Embedding, LayerNorm, LayerNormConfig, Linear};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::{
    AdamConfig, AdamWConfig, GradientsAccumulator, GradientsParams, ModuleOptimizer,
};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_zero_offload::{OffloadConfig, SimdLevel, WithOffload};

use crate::common::{assert_models_close, config, devices, param, step};

/// A layer called twice, an embedding used at both ends, a norm, biases.
#[derive(Module, Debug)]
struct Net {
    embedding: Embedding,
    norm: LayerNorm,
    twice: Linear,
    last: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let layer = |seed| Linear {
            weight: param([8, 8], seed, device),
            bias: Some(param([8], seed + 1, device)),
        };
        Self {
            embedding: Embedding {
                weight: param([11, 8], 1, device),
            },
            norm: LayerNormConfig::new(8).init(device),
            twice: layer(2),
            last: layer(4),
        }
    }

    fn loss(&self, tokens: Tensor<2, Int>) -> Tensor<1> {
        let h = self.norm.forward(self.embedding.forward(tokens));
        let h = self.twice.forward(h).tanh();
        let h = self.last.forward(self.twice.forward(h).tanh());
        let [batch, length, width] = h.dims();
        let logits = h
            .reshape([batch * length, width])
            .matmul(self.embedding.weight.val().transpose());
        (logits - 1.0).powf_scalar(2.0).mean()
    }
}

fn tokens(shift: usize, device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i64> = (0..12).map(|i| ((i * 5 + shift * 3) % 11) as i64).collect();
    Tensor::<1, Int>::from_data(ids.as_slice(), device).reshape([3, 4])
}

/// Training next to Burn's optimizer, every weight within 1e-6 absolute plus 1e-6 relative.
#[track_caller]
fn assert_follows_burn(
    device: &Device,
    steps: usize,
    offloaded: impl WithOffload,
    mut plain: ModuleOptimizer,
) {
    let mut reference = Net::new(device);
    let offloaded = offloaded.with_offload(config(FloatDType::F32));
    let (mut model, offload) = offloaded.init(reference.clone()).unwrap();
    let mut optimizer = offload.optimizer();
    for i in 0..steps {
        let (a, b) = (
            reference.loss(tokens(i, device)),
            model.loss(tokens(i, device)),
        );
        reference = step(&mut plain, 1e-3, reference, a);
        model = step(&mut optimizer, 1e-3, model, b);
    }
    assert_models_close(&model, &reference, 1e-6, 1e-6);
}

/// 50 steps on Flex. The rules run on the host whatever the device is; `on_every_device` is the test
/// that devices make no difference.
#[track_caller]
fn assert_follows_burn_on_flex(offloaded: impl WithOffload, plain: ModuleOptimizer) {
    assert_follows_burn(&Device::flex().autodiff(), 50, offloaded, plain);
}

/// A matrix product takes CubeCL's CPU runtime a tenth of a second on two cores: a few steps there.
#[test]
fn on_every_device() {
    let c = AdamWConfig::new().with_weight_decay(0.1).with_amsgrad(true);
    for device in devices() {
        assert_follows_burn(&device, 6, c.clone(), c.init());
    }
}

#[test]
fn adamw() {
    let c = AdamWConfig::new().with_weight_decay(0.1);
    assert_follows_burn_on_flex(c.clone(), c.init());
}

#[test]
fn adamw_with_its_defaults() {
    assert_follows_burn_on_flex(AdamWConfig::new(), AdamWConfig::new().init());
}

#[test]
fn adamw_with_other_decay_rates_and_epsilon() {
    let c = AdamWConfig::new()
        .with_beta_1(0.8)
        .with_beta_2(0.95)
        .with_epsilon(1e-3);
    assert_follows_burn_on_flex(c.clone(), c.init());
}

#[test]
fn adamw_with_cautious_weight_decay() {
    let c = AdamWConfig::new()
        .with_weight_decay(0.5)
        .with_cautious_weight_decay(true);
    assert_follows_burn_on_flex(c.clone(), c.init());
}

#[test]
fn adamw_with_amsgrad() {
    let c = AdamWConfig::new().with_amsgrad(true);
    assert_follows_burn_on_flex(c.clone(), c.init());
}

#[test]
fn adamw_with_clipping_by_norm() {
    let c = AdamWConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(0.02)));
    assert_follows_burn_on_flex(c.clone(), c.init());
}

#[test]
fn adamw_with_clipping_by_value() {
    let c = AdamWConfig::new().with_grad_clipping(Some(GradientClippingConfig::Value(0.003)));
    assert_follows_burn_on_flex(c.clone(), c.init());
}

#[test]
fn adam() {
    assert_follows_burn_on_flex(AdamConfig::new(), AdamConfig::new().init());
}

#[test]
fn adam_with_an_l2_penalty_and_amsgrad() {
    let c = AdamConfig::new()
        .with_weight_decay(Some(WeightDecayConfig::new(0.05)))
        .with_amsgrad(true);
    assert_follows_burn_on_flex(c.clone(), c.init());
}

/// acceptance.md, parameters 53 and learning rate 82: each group follows its own decay and rate,
/// and a schedule is applied exactly.
#[test]
fn groups_and_schedules() {
    let biases = || ParamGroup::from_any_predicates(vec!["bias", "norm"]);
    let decayed = AdamWConfig::new().with_weight_decay(0.1);
    let plain = AdamWConfig::new().with_weight_decay(0.0);
    for device in devices() {
        let mut reference = Net::new(&device);
        let (mut model, offload) = decayed
            .clone()
            .with_offload(config(FloatDType::F32))
            .with_group(biases(), plain.clone())
            .init(reference.clone())
            .unwrap();
        let mut optimizer = offload.optimizer();
        let mut burns = decayed.init().with_group(biases(), plain.build(), None);
        let mut schedule = LinearLrSchedulerConfig::new(1e-2, 1e-3, 5).init().unwrap();
        for i in 0..6 {
            let rate = schedule.step();
            let (a, b) = (
                reference.loss(tokens(i, &device)),
                model.loss(tokens(i, &device)),
            );
            reference = step(&mut burns, rate.clone(), reference, a);
            model = step(&mut optimizer, rate, model, b);
        }
        assert_models_close(&model, &reference, 1e-6, 1e-6);
    }
}

#[test]
fn burns_gradient_accumulator() {
    for device in devices() {
        let mut reference = Net::new(&device);
        let c = AdamWConfig::new();
        let (mut model, offload) = c
            .clone()
            .with_offload(config(FloatDType::F32))
            .init(reference.clone())
            .unwrap();
        let (mut optimizer, mut plain) = (offload.optimizer(), c.init());
        let (mut sums, mut plain_sums) = (GradientsAccumulator::new(), GradientsAccumulator::new());
        for i in 0..8 {
            let grads = model.loss(tokens(i, &device)).backward();
            sums.accumulate(&model, GradientsParams::from_grads(grads, &model));
            let grads = reference.loss(tokens(i, &device)).backward();
            plain_sums.accumulate(&reference, GradientsParams::from_grads(grads, &reference));
            if i % 4 == 3 {
                model = optimizer.step(1e-3, model, sums.grads());
                reference = plain.step(1e-3, reference, plain_sums.grads());
            }
        }
        assert_models_close(&model, &reference, 1e-6, 1e-6);
    }
}

/// acceptance.md, CPU step 8: forced instruction sets and thread counts change no bit.
#[test]
fn threads_and_instruction_sets_give_the_same_bits() {
    let device = Device::flex().autodiff();
    let start = Net::new(&device);
    let run = |threads, simd| {
        let config = OffloadConfig::new()
            .with_threads(Some(threads))
            .with_simd(Some(simd));
        let (mut model, offload) = AdamWConfig::new()
            .with_offload(config)
            .init(start.clone())
            .unwrap();
        assert_eq!((offload.threads(), offload.simd()), (threads, simd));
        let mut optimizer = offload.optimizer();
        for i in 0..5 {
            let loss = model.loss(tokens(i, &device));
            model = step(&mut optimizer, 1e-2, model, loss);
        }
        model.into_record().into_bytes().unwrap().to_vec()
    };
    let expected = run(1, SimdLevel::Scalar);
    for simd in SimdLevel::ALL
        .into_iter()
        .filter(|simd| simd.is_available())
    {
        for threads in [1, 2, 8] {
            assert_eq!(run(threads, simd), expected, "{threads} threads, {simd:?}");
        }
    }
}
