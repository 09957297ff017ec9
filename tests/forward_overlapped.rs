//! Updates behind the next forward pass: the same bits as within the step, whoever looks, whenever.

use burn::module::Module;
use burn::nn::Linear;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_zero_offload::{Offload, OffloadConfig, Schedule, StatePrecision, WithOffload};

use crate::common::layer::{layer, loss};
use crate::common::scalar::{self, assert_values};
use crate::common::{config, devices, optimizer_state, read, step, tensor, weights};

const LR: f64 = 1e-2;

/// Split masters, whole ones that go through buffers, and f32, whose image is the master.
fn configs() -> [OffloadConfig; 3] {
    let full = Some(StatePrecision::Full);
    [
        config(FloatDType::BF16),
        config(FloatDType::F16).with_state_precision(full),
        config(FloatDType::F32),
    ]
}

fn offloaded(config: &OffloadConfig, device: &Device) -> (Linear, Offload, ModuleOptimizer) {
    let made = AdamWConfig::new().with_offload(config.clone());
    let (model, offload) = made.init(layer(1, device)).unwrap();
    let optimizer = offload.optimizer();
    (model, offload, optimizer)
}

fn overlapped(config: &OffloadConfig, device: &Device) -> (Linear, Offload, ModuleOptimizer) {
    let config = config.clone().with_schedule(Schedule::ForwardOverlapped);
    offloaded(&config, device)
}

/// One round; the loss spelled out in products, as CubeCL's CPU runtime has no half matrix products of this
/// size.
fn round(optimizer: &mut ModuleOptimizer, model: Linear) -> Linear {
    let parts = [
        model
            .weight
            .val()
            .cast(FloatDType::F32)
            .powf_scalar(2.0)
            .mean(),
        model
            .bias
            .as_ref()
            .unwrap()
            .val()
            .cast(FloatDType::F32)
            .sum(),
    ];
    let [a, b] = parts;
    step(optimizer, LR, model, a + b)
}

/// Every way to look at a model right after a step that has returned.
#[test]
fn whoever_looks_after_a_step_sees_the_updated_weights() {
    type Look = fn(Linear, &Offload) -> Vec<f32>;
    let looks: [(&str, Look); 6] = [
        ("val", |model, _| read(&model.weight.val())),
        ("valid", |model, _| read(&model.valid().weight.val())),
        ("base of valid", |model, _| {
            read(&model.valid().weight.base())
        }),
        ("materialize", |model, _| {
            read(&model.materialize().weight.base())
        }),
        ("flush", |model, offload| {
            offload.flush().unwrap();
            read(&model.weight.base())
        }),
        ("settle", |model, offload| {
            read(&offload.settle(model).unwrap().weight.base())
        }),
    ];
    for device in devices() {
        for config in configs() {
            let (mut model, _, mut optimizer) = offloaded(&config, &device);
            model = round(&mut optimizer, model);
            let expected = read(&round(&mut optimizer, model).weight.base());
            for (name, look) in looks {
                let (mut model, offload, mut optimizer) = overlapped(&config, &device);
                model = round(&mut optimizer, model);
                model = round(&mut optimizer, model);
                assert_eq!(look(model, &offload), expected, "{name}");
            }
        }
    }
}

/// On Flex a tensor's memory waits for its update; other devices have NaN in it until then, never something
/// that looks like weights and is none.
#[test]
fn weights_seen_past_the_taps_are_right_or_nan() {
    for device in devices() {
        for config in configs() {
            let (mut model, _, mut optimizer) = offloaded(&config, &device);
            model = round(&mut optimizer, model);
            let expected = weights(&model);
            let (mut model, offload, mut optimizer) = overlapped(&config, &device);
            model = round(&mut optimizer, model);
            let early = weights(&model);
            offload.flush().unwrap();
            assert_eq!(weights(&model), expected);
            let on_flex = device == Device::flex().autodiff();
            for ((path, early), (_, expected)) in early.iter().zip(&expected) {
                for (early, expected) in early.iter().zip(expected) {
                    let holds = early == expected || (!on_flex && early.is_nan());
                    assert!(holds, "{path}: {early} instead of {expected}");
                }
            }
        }
    }
}

#[test]
fn records_have_the_update_of_the_step_before() {
    for device in devices() {
        for config in configs() {
            let run = |(mut model, _, mut optimizer): (Linear, Offload, ModuleOptimizer)| {
                for _ in 0..3 {
                    model = round(&mut optimizer, model);
                }
                let state = optimizer_state(&optimizer);
                let plain = layer(2, &Device::flex()).load_record(model.into_record());
                (weights(&plain), state)
            };
            let expected = run(offloaded(&config, &device));
            assert_eq!(run(overlapped(&config, &device)), expected);
        }
    }
}

/// Nothing is consumed between two steps: the second waits for the first.
#[test]
fn two_steps_without_a_forward_between() {
    for device in devices() {
        for config in configs() {
            let run = |(model, offload, mut optimizer): (Linear, Offload, ModuleOptimizer)| {
                let term = |model: &Linear| model.weight.val().cast(FloatDType::F32).sum();
                // Both forward passes before both steps.
                let losses = [term(&model), term(&model) * 3.0];
                let mut model = model;
                for loss in losses {
                    let grads = GradientsParams::from_grads(loss.backward(), &model);
                    model = optimizer.step(LR, model, grads);
                }
                let model = offload.settle(model).unwrap();
                weights(&model)
            };
            let expected = run(offloaded(&config, &device));
            assert_eq!(run(overlapped(&config, &device)), expected);
        }
    }
}

#[test]
fn clones_keep_their_values_while_updates_run() {
    for device in devices() {
        for config in configs() {
            let (mut model, offload, mut optimizer) = overlapped(&config, &device);
            let first = model.clone();
            let before = weights(&first);
            model = round(&mut optimizer, model);
            // Of a step whose updates may still run.
            let second = model.clone();
            let seen = read(&second.weight.val());
            model = round(&mut optimizer, model);
            model = round(&mut optimizer, model);
            offload.flush().unwrap();
            assert_eq!(weights(&first), before);
            assert_eq!(read(&second.weight.val()), seen);
            assert_ne!(read(&model.weight.base()), seen);
        }
    }
}

/// Everything is dropped in the middle of updates, in every order; tensors that live on have their values.
#[test]
fn dropping_everything_right_after_a_step_ends_cleanly() {
    for device in devices() {
        for (turn, config) in (0..12).zip(configs().iter().cycle()) {
            let (mut model, offload, mut optimizer) = overlapped(config, &device);
            for _ in 0..1 + turn % 2 {
                model = round(&mut optimizer, model);
            }
            match turn % 4 {
                0 => drop((model, optimizer, offload)),
                1 => drop((offload, optimizer, model)),
                2 => {
                    let weight = model.weight.val();
                    drop((optimizer, offload, model));
                    assert!(read(&weight).iter().all(|value| value.is_finite()));
                }
                _ => {
                    let other = std::thread::spawn(move || drop(model));
                    drop((optimizer, offload));
                    other.join().unwrap();
                }
            }
        }
    }
}

#[test]
fn a_parameter_without_a_gradient_stays_and_one_without_a_use_is_updated() {
    for device in devices() {
        let config = config(FloatDType::F32);
        let (model, offload, mut optimizer) = overlapped(&config, &device);
        let (weight, bias) = (
            read(&model.weight.val()),
            model.bias.as_ref().unwrap().val(),
        );
        let bias = read(&bias);
        let loss = model.weight.val().sum();
        let mut model = step(&mut optimizer, LR, model, loss);
        // The next pass does not use the weight: its update is done all the same.
        let loss = model.bias.as_ref().unwrap().val().sum();
        assert_eq!(read(&model.bias.as_ref().unwrap().val()), bias);
        model = step(&mut optimizer, LR, model, loss);
        offload.flush().unwrap();
        assert_ne!(read(&model.weight.base()), weight);
        assert_ne!(read(&model.bias.as_ref().unwrap().base()), bias);
        assert_eq!(offload.report().groups[0].updated, 1);
    }
}

/// A model that is loaded while its updates run has the record's values and goes on from them.
#[test]
fn loading_a_record_while_updates_run() {
    for device in devices() {
        let (mut model, offload, mut optimizer) = scalar::offloaded(
            OffloadConfig::new().with_schedule(Schedule::ForwardOverlapped),
            &device,
        );
        let start = model.clone().into_record();
        for _ in 0..2 {
            model = scalar::round(&mut optimizer, model, 1.0);
        }
        model = model.load_record(start);
        assert_values(&[model.value()], &[1.0]);
        model = scalar::round(&mut optimizer, model, 1.0);
        assert_values(&[model.value()], &[0.9]);
        assert_eq!(offload.report().round, 3);
    }
}

/// Two models in one backward pass, and gradient checkpointing.
#[test]
fn two_models_train_together_on_a_device_that_checkpoints() {
    for device in devices() {
        let device = device.gradient_checkpointing();
        let run = |schedule| {
            let config = config(FloatDType::F32).with_schedule(schedule);
            let make = |seed| {
                let made = AdamWConfig::new().with_offload(config.clone());
                let (model, offload) = made.init(layer(seed, &device)).unwrap();
                (model, offload.optimizer(), offload)
            };
            let ((mut a, mut of_a, first), (mut b, mut of_b, second)) = (make(1), make(3));
            for seed in 0..3 {
                let x: Tensor<2> = tensor([3, 4], seed, &device);
                let loss = b.forward(a.forward(x).tanh()).powf_scalar(2.0).mean();
                let mut grads = loss.backward();
                let of_b_alone = GradientsParams::from_module(&mut grads, &b);
                a = of_a.step(LR, a.clone(), GradientsParams::from_module(&mut grads, &a));
                b = of_b.step(LR, b, of_b_alone);
            }
            let settled = (first.settle(a).unwrap(), second.settle(b).unwrap());
            (weights(&settled.0), weights(&settled.1))
        };
        let expected = run(Schedule::Synchronous);
        assert_eq!(run(Schedule::ForwardOverlapped), expected);
    }
}

/// The report of a round is complete once nothing is pending.
#[test]
fn reports_count_updates_to_their_round() {
    for device in devices() {
        let (mut model, offload, mut optimizer) = overlapped(&config(FloatDType::BF16), &device);
        for number in 1..=3 {
            model = round(&mut optimizer, model);
            offload.flush().unwrap();
            let report = offload.report();
            assert_eq!((report.round, report.pending), (number, 0), "{report}");
            assert_eq!(report.groups[0].updated, 2);
            assert_eq!(report.groups[0].learning_rates, [LR]);
            let elements: usize = weights(&model).iter().map(|(_, w)| w.len()).sum();
            assert_eq!(report.bytes_up, 2 * elements as u64, "{report}");
            assert!(report.exposed_in_step.is_zero(), "{report}");
        }
    }
}

/// Split masters are the buffers that weights are sent from; a plain loop holds none of them too long.
#[test]
fn a_plain_loop_copies_nothing() {
    for device in devices() {
        let (mut model, offload, mut optimizer) = overlapped(&config(FloatDType::BF16), &device);
        for _ in 0..5 {
            model = round(&mut optimizer, model);
        }
        offload.flush().unwrap();
        let copied: u64 = offload.reports().iter().map(|r| r.bytes_copied).sum();
        assert_eq!(copied, 0);
    }
}

#[test]
fn a_model_can_be_moved_after_a_flush() {
    for device in devices() {
        let (mut model, offload, mut optimizer) = overlapped(&config(FloatDType::F32), &device);
        model = round(&mut optimizer, model);
        offload.flush().unwrap();
        let moved = model.clone().to_device(&Device::flex().autodiff());
        assert_eq!(weights(&moved), weights(&model));
    }
}

/// With the wrong bits the loss of a model says nothing; with the right ones it is the same to the last.
#[test]
fn a_linear_model_has_the_same_losses() {
    for device in devices() {
        let run = |(mut model, _, mut optimizer): (Linear, Offload, ModuleOptimizer)| {
            let mut losses = vec![];
            for _ in 0..5 {
                let value = loss(&model);
                losses.push(read(&value));
                model = step(&mut optimizer, LR, model, value);
            }
            losses
        };
        let config = config(FloatDType::F32);
        let expected = run(offloaded(&config, &device));
        assert_eq!(run(overlapped(&config, &device)), expected);
    }
}
