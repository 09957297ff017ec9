//! Gradients of several backward passes add up on the host, as Burn's accumulator adds them.

use burn::module::{Module, Param};
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_zero_offload::{Accumulation, Offload, OffloadConfig, WithOffload};

use crate::common::vectors::{Vectors, with_gradient};
use crate::common::{
    assert_close, assert_models_close, config, devices, optimizer_state, panic_of, param, read,
    step, tensor,
};

const LR: f64 = 1e-2;

#[derive(Module, Debug)]
struct Net {
    a: Param<Tensor<2>>,
    b: Param<Tensor<2>>,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            a: param([6, 8], 1, device),
            b: param([8, 3], 2, device),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        x.matmul(self.a.val())
            .tanh()
            .matmul(self.b.val())
            .powf_scalar(2.0)
            .mean()
    }
}

fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_epsilon(1e-8)
}

fn offloaded(device: &Device) -> (Net, Offload) {
    adamw()
        .with_offload(config(FloatDType::F32))
        .init(Net::new(device))
        .unwrap()
}

fn batch(seed: u64, device: &Device) -> Tensor<2> {
    tensor([8, 6], seed, device)
}

/// acceptance.md, gradient accumulation 16.
#[test]
fn two_passes_a_step_train() {
    for device in devices() {
        let (mut model, offload) = offloaded(&device);
        let mut optimizer = offload.optimizer();
        let x = batch(1, &device);
        let value = |m: &Net| m.loss(x.clone()).into_scalar::<f32>();
        let start = value(&model);
        for _ in 0..8 {
            let first = (model.loss(x.clone()) / 2.0).backward();
            drop(GradientsParams::from_grads(first, &model));
            let second = model.loss(x.clone()) / 2.0;
            model = step(&mut optimizer, LR, model, second);
        }
        assert!(value(&model) < 0.8 * start, "{start} to {}", value(&model));
    }
}

/// acceptance.md, gradient accumulation 17: two windows of four micro-batches.
#[test]
fn two_windows_of_four_equal_training_without_offload() {
    for device in devices() {
        let (mut model, offload) = offloaded(&device);
        let mut reference = Net::new(&device);
        let (mut optimizer, mut plain) = (offload.optimizer(), adamw().init());
        let (mut sums, mut plain_sums) = (GradientsAccumulator::new(), GradientsAccumulator::new());
        for window in 0..2 {
            for i in 0..4 {
                let x = batch(4 * window + i, &device);
                let grads = model.loss(x.clone()).backward();
                sums.accumulate(&model, GradientsParams::from_grads(grads, &model));
                let grads = reference.loss(x).backward();
                plain_sums.accumulate(&reference, GradientsParams::from_grads(grads, &reference));
            }
            model = optimizer.step(LR, model, sums.grads());
            reference = plain.step(LR, reference, plain_sums.grads());
            assert_models_close(&model, &reference, 1e-6, 1e-6);
        }
    }
}

/// acceptance.md, gradient accumulation 19: four backwards and a step, against one backward on the
/// summed loss; the largest difference stays under 1e-7.
#[test]
fn four_backwards_equal_one_on_the_summed_loss() {
    for device in devices() {
        let loss = |m: &Net, i| m.loss(batch(i, &device)) * 0.25;
        let (mut many, offload) = offloaded(&device);
        let mut optimizer = offload.optimizer();
        for i in 0..3 {
            loss(&many, i).backward();
        }
        let last = loss(&many, 3);
        many = step(&mut optimizer, LR, many, last);

        let (mut one, offload) = offloaded(&device);
        let mut optimizer = offload.optimizer();
        let sum = loss(&one, 0) + loss(&one, 1) + loss(&one, 2) + loss(&one, 3);
        one = step(&mut optimizer, LR, one, sum);
        assert_models_close(&many, &one, 1e-7, 0.0);
    }
}

/// acceptance.md, gradient accumulation 20 and 24: 1, 2 or 8 micro-batches of the same batch give
/// the same parameters, and the loss a loop reports does not depend on their number.
#[test]
fn the_number_of_micro_batches_does_not_matter() {
    for device in devices() {
        let run = |count: usize| {
            let (mut model, offload) = offloaded(&device);
            let mut optimizer = offload.optimizer();
            let mut reported = vec![];
            for seed in 0..2 {
                let mut sums = GradientsAccumulator::new();
                let mut total = 0.0;
                for x in batch(seed, &device).chunk(count, 0) {
                    let loss = model.loss(x) / count as f32;
                    total += loss.clone().into_scalar::<f32>();
                    let grads = GradientsParams::from_grads(loss.backward(), &model);
                    sums.accumulate(&model, grads);
                }
                model = optimizer.step(LR, model, sums.grads());
                reported.push(total);
            }
            (model, reported)
        };
        let (expected, losses) = run(1);
        for count in [2, 8] {
            let (model, reported) = run(count);
            assert_models_close(&model, &expected, 1e-6, 1e-6);
            assert_close(&reported, &losses, 1e-6, 1e-6);
        }
    }
}

/// acceptance.md, gradient accumulation 25: contributions to a bf16 parameter are summed in f32.
#[test]
fn small_contributions_in_bf16_are_not_lost() {
    for device in devices() {
        let weights = Param::from_tensor(Tensor::<1>::zeros([1], &device));
        #[derive(Module, Debug)]
        struct One {
            w: Param<Tensor<1>>,
        }
        // The first moment of the first update is a tenth of the gradient.
        let (model, offload) = adamw()
            .with_offload(config(FloatDType::BF16))
            .init(One { w: weights })
            .unwrap();
        let mut optimizer = offload.optimizer();
        (model.w.val() * 2048.0).sum().backward();
        for _ in 0..7 {
            (model.w.val() * 0.5).sum().backward();
        }
        let last = (model.w.val() * 0.5).sum();
        let _ = step(&mut optimizer, LR, model, last);
        let state = optimizer_state(&optimizer);
        assert_close(&state[0].first, &[205.2], 1e-4, 0.0);
    }
}

#[test]
fn gradients_wait_on_the_host_until_the_step_that_uses_them() {
    for device in devices() {
        let (model, offload) = offloaded(&device);
        let mut optimizer = offload.optimizer();
        assert_eq!(offload.memory().host_gradients, 0);
        model.loss(batch(1, &device)).backward();
        offload.flush().unwrap();
        assert_eq!(offload.memory().host_gradients, 4 * (6 * 8 + 8 * 3));
        let before = read(&model.a.val());
        let loss = model.loss(batch(1, &device));
        let model = step(&mut optimizer, LR, model, loss);
        assert_eq!(offload.memory().host_gradients, 0);
        assert_ne!(read(&model.a.val()), before);
    }
}

fn with(config: OffloadConfig, device: &Device) -> (Vectors, Offload, ModuleOptimizer) {
    let (model, offload) = SgdConfig::new()
        .with_offload(config)
        .init(Vectors::new(0.0, [2, 1], device))
        .unwrap();
    let optimizer = offload.optimizer();
    (model, offload, optimizer)
}

/// The mean divides by the passes of the round, however many there were, also for a weight that only
/// some of them used.
#[test]
fn the_mean_is_over_the_passes_received() {
    for device in devices() {
        for dtype in [FloatDType::F32, FloatDType::BF16] {
            let config = config(dtype).with_accumulation(Accumulation::Mean);
            let (mut model, offload, mut optimizer) = with(config, &device);
            let mut expected = 0.0;
            for passes in [1, 4, 2] {
                for _ in 1..passes {
                    with_gradient(&model.a, &[1.0, 2.0]).backward();
                }
                let last = model.loss(&[1.0, 2.0], &[4.0]);
                model = step(&mut optimizer, 1.0, model, last);
                assert_eq!(offload.report().passes, passes);
                expected -= 4.0 / passes as f32;
                let round = [1, 4, 2].iter().position(|p| *p == passes).unwrap();
                let steps = round as f32 + 1.0;
                assert_eq!(read(&model.a.val()), [-steps, -2.0 * steps]);
                assert_eq!(read(&model.b.val()), [expected]);
            }
        }
    }
}

/// A pass is one call of `backward`, however many weights, uses and losses it has.
#[test]
fn passes_are_counted_as_calls_of_backward() {
    for device in devices() {
        let (model, offload, mut optimizer) = with(config(FloatDType::F32), &device);
        let (first, second) = (model.loss(&[1.0; 2], &[1.0]), model.loss(&[2.0; 2], &[2.0]));
        first.backward();
        second.backward();
        (model.loss(&[1.0; 2], &[1.0]) + with_gradient(&model.a, &[1.0; 2])).backward();
        offload.scale(with_gradient(&model.b, &[1.0])).backward();
        let last = with_gradient(&model.a, &[1.0; 2]);
        let model = step(&mut optimizer, 1.0, model, last);
        assert_eq!(offload.report().passes, 5);
        assert_eq!(read(&model.a.val()), [-6.0; 2]);
        let loss = model.loss(&[1.0; 2], &[1.0]);
        step(&mut optimizer, 1.0, model, loss);
        assert_eq!(offload.report().passes, 1);
    }
}

/// `with_micro_batches(n)` turns any other number of passes into an error: no weight changes, and the
/// gradients of that round are gone.
#[test]
fn another_number_of_micro_batches_is_an_error() {
    for device in devices() {
        let config = config(FloatDType::BF16).with_micro_batches(Some(2));
        let (model, offload, mut optimizer) = with(config, &device);
        let loss = |model: &Vectors| model.loss(&[1.0; 2], &[1.0]);
        for passes in [1, 3] {
            let kept = model.clone();
            for _ in 1..passes {
                loss(&model).backward();
            }
            let last = loss(&model);
            let text = panic_of(|| step(&mut optimizer, 1.0, kept, last));
            let expected =
                format!("`with_micro_batches(2)` was given, but {passes} backward passes");
            assert!(text.contains(&expected), "{text}");
            assert_eq!(read(&model.a.val()), [0.0; 2]);
            assert_eq!(offload.memory().host_gradients, 0);
        }
        loss(&model).backward();
        offload.discard_gradients();
        loss(&model).backward();
        let last = loss(&model);
        let model = step(&mut optimizer, 1.0, model, last);
        assert_eq!(read(&model.a.val()), [-2.0; 2]);
    }
}

/// A loop that drops gradients says so; what was dropped is not stepped later, and not counted.
#[test]
fn discarded_gradients_are_not_stepped_again() {
    for device in devices() {
        let (model, offload, mut optimizer) = with(config(FloatDType::F16), &device);
        model.loss(&[f32::INFINITY; 2], &[5.0]).backward();
        offload.discard_gradients();
        let loss = model.loss(&[1.0; 2], &[1.0]);
        let model = step(&mut optimizer, 1.0, model, loss);
        offload.discard_gradients();
        assert_eq!(read(&model.a.val()), [-1.0; 2]);
        let report = offload.report();
        assert_eq!(
            (report.passes, report.carried, report.applied()),
            (1, 0, true)
        );
    }
}

/// A parameter whose gradient `step` was not given keeps it for the next, as in PyTorch; the report tells.
#[test]
fn gradients_left_out_of_a_step_wait_for_the_next() {
    for device in devices() {
        let (model, offload, mut optimizer) = with(config(FloatDType::F32), &device);
        let mut grads = model.loss(&[1.0; 2], &[1.0]).backward();
        let part = GradientsParams::from_params(&mut grads, &model, &[model.a.id]);
        let model = optimizer.step(1.0, model, part);
        assert_eq!(
            (read(&model.b.val()), offload.report().carried),
            (vec![0.0], 0)
        );
        let loss = model.loss(&[1.0; 2], &[1.0]);
        let model = step(&mut optimizer, 1.0, model, loss);
        assert_eq!(
            (read(&model.b.val()), offload.report().carried),
            (vec![-2.0], 1)
        );
        assert_eq!(read(&model.a.val()), [-2.0; 2]);
    }
}
