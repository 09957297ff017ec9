//! The delayed parameter update: every gradient misses exactly one update, and nothing is lost.

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_zero_offload::{OffloadConfig, OffloadError, Schedule, WithOffload};

use crate::common::layer::{layer, loss};
use crate::common::scalar::{Scalar, assert_values, offloaded, round};
use crate::common::{config, devices, panic_of, param, read, step, weights};

fn delayed(warmup: u64) -> OffloadConfig {
    OffloadConfig::new().with_schedule(Schedule::Delayed { warmup })
}

/// acceptance.md, learning rate and delay 84.
#[test]
fn seven_steps_of_a_quadratic_with_a_warm_up_of_three() {
    for device in devices() {
        let (mut model, offload, mut optimizer) = offloaded(delayed(3), &device);
        let mut seen = vec![];
        for _ in 0..7 {
            seen.push(model.value());
            model = round(&mut optimizer, model, 1.0);
        }
        assert_values(&seen, &[1.0, 0.9, 0.81, 0.81, 0.729, 0.648, 0.5751]);
        assert_values(&[model.value()], &[0.51030]);
        offload.flush().unwrap();
        assert_values(&[model.value()], &[0.45279]);
        assert_values(&[model.valid().value(), model.saved()], &[0.45279; 2]);
        let model = offload.settle(model).unwrap();
        assert_values(&read(&model.w.base()), &[0.45279]);
    }
}

/// acceptance.md, learning rate and delay 84: a warm-up without end.
#[test]
fn a_warm_up_without_end_is_the_synchronous_schedule_bit_for_bit() {
    for device in devices() {
        let run = |config| {
            let (mut model, _, mut optimizer) = offloaded(config, &device);
            let mut seen = vec![];
            for _ in 0..7 {
                seen.push(model.value().to_bits());
                model = round(&mut optimizer, model, 1.0);
            }
            (seen, read(&model.w.base())[0].to_bits())
        };
        let synchronous = run(OffloadConfig::new());
        assert_eq!(run(delayed(u64::MAX)), synchronous);
        let values: Vec<f32> = synchronous.0.into_iter().map(f32::from_bits).collect();
        let expected = [1.0, 0.9, 0.81, 0.729, 0.6561, 0.59049, 0.531441];
        assert_values(&values, &expected);
    }
}

/// acceptance.md, learning rate and delay 85, for parameters that are used at different times: whether the
/// walk meets a parameter or not, the update of round `n` is seen from round `n + 2` on.
#[test]
fn staleness_is_exactly_one() {
    #[derive(Module, Debug)]
    struct Two {
        always: Scalar,
        rare: Scalar,
    }
    for device in devices() {
        let model = Two {
            always: Scalar::new(&device),
            rare: Scalar::new(&device),
        };
        let config = delayed(1).with_dtype(Some(FloatDType::F32));
        let sgd = burn::optim::SgdConfig::new().with_offload(config);
        let (mut model, offload) = sgd.init(model).unwrap();
        let mut optimizer = offload.optimizer();
        let mut seen = vec![];
        for round in 1..=6 {
            seen.push(model.rare.value());
            let mut loss = model.always.loss();
            if [1, 4].contains(&round) {
                loss = loss + model.rare.loss();
            }
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.1, model, grads);
        }
        // Updates of rounds 1 and 4.
        assert_values(&seen, &[1.0, 1.0, 0.9, 0.9, 0.9, 0.81]);
        // Of the other, one in every round: 1, 1, .9, .8, .71, .63, and the next use sees round 5's.
        assert_values(&[model.always.value()], &[0.559]);
        assert_values(&[model.always.saved()], &[0.496]);
    }
}

/// acceptance.md, learning rate and delay 87: rounds 1 to 6, the third overflows.
#[test]
fn an_overflow_drops_its_own_gradients_and_not_the_pending_update() {
    for device in devices() {
        let (mut model, offload, mut optimizer) = offloaded(delayed(1), &device);
        let mut seen = vec![];
        for number in 1..=6 {
            seen.push(model.value());
            let factor = if number == 3 { f32::INFINITY } else { 1.0 };
            model = round(&mut optimizer, model, factor);
            assert_eq!(offload.report().applied(), number != 3);
        }
        let known: Vec<_> = offload.reports().iter().map(|r| r.round).collect();
        assert_eq!(known, [2, 3, 4, 5, 6]);
        // 1 - .1 = .9 (round 1), - .1 = .8 (round 2), nothing (3), - .08 = .72 (4), - .08 = .64 (5).
        assert_values(&seen, &[1.0, 1.0, 0.9, 0.8, 0.8, 0.72]);
        assert_values(&[model.value(), model.saved()], &[0.64, 0.568]);
        assert_eq!(offload.report().skips, 1);
    }
}

/// acceptance.md, learning rate and delay 87: a record has the pending update, and the run that saves goes on
/// as if it had not.
#[test]
fn saving_drains_the_pending_update_and_changes_nothing() {
    for device in devices() {
        let run = |save: bool| {
            let (mut model, offload, mut optimizer) = offloaded(delayed(2), &device);
            let mut saved = vec![];
            for _ in 0..5 {
                model = round(&mut optimizer, model, 1.0);
                if save {
                    saved.push(model.saved());
                    drop(optimizer.to_record());
                }
            }
            offload.flush().unwrap();
            (saved, model.value().to_bits())
        };
        let (saved, with) = run(true);
        assert_eq!(with, run(false).1);
        // Updates of 1, .9, .9, .81, .72.
        assert_values(&saved, &[0.9, 0.81, 0.72, 0.639, 0.567]);
    }
}

/// Evaluation has the weights of the next forward pass; after a flush, the newest.
#[test]
fn a_validation_copy_has_defined_weights_and_keeps_them() {
    for device in devices() {
        let (mut model, offload, mut optimizer) = offloaded(delayed(1), &device);
        for _ in 0..3 {
            model = round(&mut optimizer, model, 1.0);
        }
        let valid = model.valid();
        assert_values(&[valid.value(), read(&valid.w.base())[0]], &[0.8, 0.8]);
        assert_values(&[model.value()], &[0.8]);
        for _ in 0..2 {
            model = round(&mut optimizer, model, 1.0);
        }
        assert_values(&[valid.value()], &[0.8]);
        offload.flush().unwrap();
        assert_values(&[valid.value(), model.valid().value()], &[0.8, 0.559]);
    }
}

#[test]
fn the_schedule_can_be_changed_on_the_way() {
    for device in devices() {
        let (mut model, offload, mut optimizer) = offloaded(OffloadConfig::new(), &device);
        let mut seen = vec![];
        for number in 1..=8 {
            match number {
                2 => offload
                    .set_schedule(Schedule::Delayed { warmup: 0 })
                    .unwrap(),
                5 => offload.set_schedule(Schedule::ForwardOverlapped).unwrap(),
                7 => offload.set_schedule(Schedule::Synchronous).unwrap(),
                _ => {}
            }
            seen.push(model.value());
            model = round(&mut optimizer, model, 1.0);
        }
        // Round 1 ends with .9; from 2 to 4 updates are delayed: .9, .9, .81; the change brings all of
        // them: .9 - .09 - .09 - .081 = .639.
        let after = |n| 0.639 * 0.9f64.powi(n);
        let expected = [1.0, 0.9, 0.9, 0.81, 0.639, after(1), after(2), after(3)];
        assert_values(&seen, &expected);
        assert_values(&read(&model.w.base()), &[after(4)]);
    }
}

struct Double;

impl ModuleMapper for Double {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| {
            let trains = value.is_require_grad();
            Tensor::from_inner((value * 2.0).inner()).set_require_grad(trains)
        })
    }
}

/// What is changed while an update is pending would lose it: said, not done.
#[test]
fn weights_are_changed_after_settling_and_not_before() {
    for device in devices() {
        let run = |settle: bool| {
            let (mut model, offload, mut optimizer) = offloaded(delayed(1), &device);
            for _ in 0..2 {
                model = round(&mut optimizer, model, 1.0);
            }
            if settle {
                model = offload.settle(model).unwrap();
                assert_values(&read(&model.w.base()), &[0.8]);
            } else {
                offload.flush().unwrap();
            }
            model = round(&mut optimizer, model.map(&mut Double), 1.0);
            offload.flush().unwrap();
            (model.value(), model)
        };
        assert_values(&[run(true).0], &[1.44]);
        let message = panic_of(|| run(false));
        assert!(message.contains("`Offload::settle`"), "{message}");
    }
}

/// Going back to an older clone is settled first, too; the pending update is the newer model's.
#[test]
fn an_older_clone_goes_on_from_its_values_after_settling() {
    for device in devices() {
        let (model, offload, mut optimizer) = offloaded(delayed(1), &device);
        let older = model.clone();
        let mut model = round(&mut optimizer, model, 1.0);
        model = round(&mut optimizer, model, 1.0);
        assert_values(&[older.value(), model.value()], &[1.0, 0.9]);
        drop(model);
        let mut model = offload.settle(older).unwrap();
        model = round(&mut optimizer, model, 1.0);
        assert_values(&[model.value(), model.saved()], &[1.0, 0.9]);
    }
}

/// Zheng et al., arXiv 1609.08326, by hand: `g + lambda g^2 (w - w')`.
#[test]
fn compensation_corrects_for_the_missed_update() {
    for device in devices() {
        let config = delayed(1).with_delay_compensation(Some(0.5));
        let (mut model, offload, mut optimizer) = offloaded(config, &device);
        let mut seen = vec![];
        for _ in 0..4 {
            model = round(&mut optimizer, model, 1.0);
            // A record has every update, and leaves the run alone.
            seen.push(model.saved());
        }
        // Round 1 misses nothing: 1 - .1. Round 2 has g = 1 and misses -.1: g' = 1 - .05 = .95.
        // Round 3 has g = .9 and misses -.095: g' = .9 - .5 * .81 * .095 = .861525.
        // Round 4 has g = .805 and misses -.0861525: g' = .805 - .5 * .648025 * .0861525.
        let third = 0.805 - 0.0861525;
        let last = 0.805 - 0.5 * 0.648025 * 0.0861525;
        assert_values(&seen, &[0.9, 0.805, third, third - 0.1 * last]);
        let memory = offload.memory();
        assert!(memory.host_waiting > 0, "{memory}");
    }
    let refused = AdamWConfig::new().with_offload(delayed(1).with_delay_compensation(Some(-1.0)));
    let refused = refused.init(layer(1, &devices()[0]));
    assert!(matches!(
        refused.err(),
        Some(OffloadError::OutOfRange {
            name: "delay_compensation",
            ..
        })
    ));
}

/// With a zero weight, nothing is corrected.
#[test]
fn no_compensation_and_one_of_zero_are_the_same() {
    for device in devices() {
        let run = |lambda| {
            let config = config(FloatDType::F32)
                .with_schedule(Schedule::Delayed { warmup: 1 })
                .with_delay_compensation(lambda);
            let made = AdamWConfig::new().with_offload(config);
            let (mut model, offload) = made.init(layer(1, &device)).unwrap();
            let mut optimizer = offload.optimizer();
            for _ in 0..4 {
                let loss = loss(&model);
                model = step(&mut optimizer, 1e-2, model, loss);
            }
            weights(&offload.settle(model).unwrap())
        };
        assert_eq!(run(None), run(Some(0.0)));
    }
}

/// Two sets of gradients, however many rounds there are: one that is applied and one that arrives.
#[test]
fn gradients_have_two_sets_of_buffers() {
    for device in devices() {
        let most = |schedule| {
            let config = config(FloatDType::BF16).with_schedule(schedule);
            let made = AdamWConfig::new().with_offload(config);
            let (mut model, offload) = made.init(Wide::new(&device)).unwrap();
            let mut optimizer = offload.optimizer();
            let mut most = 0;
            for _ in 0..20 {
                let loss = model.w.val().cast(FloatDType::F32).sum();
                model = step(&mut optimizer, 1e-2, model, loss);
                most = most.max(offload.memory().host_gradient_buffers);
            }
            offload.flush().unwrap();
            let memory = offload.memory();
            assert_eq!((memory.host_gradients, memory.host_waiting), (0, 0));
            most
        };
        let one = most(Schedule::Synchronous);
        let delayed = most(Schedule::Delayed { warmup: 1 });
        assert!(
            (one..=2 * one).contains(&delayed),
            "{delayed}, synchronous {one}"
        );
    }
}

#[derive(Module, Debug)]
struct Wide {
    w: Param<Tensor<2>>,
}

impl Wide {
    fn new(device: &Device) -> Self {
        Self {
            w: param([3, 5], 1, device),
        }
    }
}

/// Half weights, which wait on the host between their update and the next step; split masters wait in
/// themselves.
#[test]
fn memory_that_only_the_delay_needs_is_reported() {
    for device in devices() {
        for (dtype, expected) in [(FloatDType::F16, 2 * 15), (FloatDType::BF16, 0)] {
            let config = config(dtype).with_schedule(Schedule::Delayed { warmup: 1 });
            let made = AdamWConfig::new().with_offload(config);
            let (model, offload) = made.init(Wide::new(&device)).unwrap();
            let mut optimizer = offload.optimizer();
            assert_eq!(offload.memory().host_waiting, 0);
            let loss = model.w.val().cast(FloatDType::F32).sum();
            let model = step(&mut optimizer, 1e-2, model, loss);
            offload.flush().unwrap();
            assert_eq!(offload.memory().host_waiting, expected);
            drop(model);
        }
    }
}
