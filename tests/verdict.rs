//! A round is applied as a whole or not at all.

use burn::module::{Module, ParamGroup};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_zero_offload::{Offload, OffloadConfig, Outcome, WithOffload};

use crate::common::vectors::{Vectors, with_gradient};
use crate::common::{config, devices, optimizer_state, panic_of, read, step, weights};

const BAD: [f32; 3] = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN];

fn adamw(config: OffloadConfig, device: &Device) -> (Vectors, Offload, ModuleOptimizer) {
    let (model, offload) = AdamWConfig::new()
        .with_weight_decay(0.1)
        .with_offload(config)
        .init(Vectors::new(1.0, [4, 2], device))
        .unwrap();
    let optimizer = offload.optimizer();
    (model, offload, optimizer)
}

/// Masters as a record has them.
fn masters(model: &Vectors) -> Vec<(String, Vec<f32>)> {
    let plain = Vectors::new(0.0, [4, 2], &Device::flex());
    weights(&plain.load_record(model.clone().into_record()))
}

/// acceptance.md, norm and clipping 28: one element is not finite. Master weights, moments, update
/// count and the weights on the device are what they were, bit for bit, and training goes on as if
/// the round had not been.
#[test]
fn a_round_that_is_not_finite_changes_nothing() {
    for device in devices() {
        for dtype in [FloatDType::BF16, FloatDType::F16, FloatDType::F32] {
            let good = |model: &Vectors| model.loss(&[0.5, -1.0, 2.0, 0.25], &[1.0, -0.5]);
            let (mut model, offload, mut optimizer) = adamw(config(dtype), &device);
            let (mut expected, _, mut reference) = adamw(config(dtype), &device);
            for _ in 0..2 {
                let loss = good(&model);
                model = step(&mut optimizer, 1e-2, model, loss);
                let loss = good(&expected);
                expected = step(&mut reference, 1e-2, expected, loss);
            }
            let state = optimizer_state(&optimizer);
            for (round, bad) in BAD.into_iter().enumerate() {
                let (held, before) = (weights(&model), masters(&model));
                let loss = model.loss(&[0.5, bad, 2.0, bad], &[1.0, 0.5]);
                model = step(&mut optimizer, 1e-2, model, loss);
                assert_eq!(weights(&model), held);
                assert_eq!(masters(&model), before);
                assert_eq!(optimizer_state(&optimizer), state);
                let report = offload.report();
                assert!(!report.grad_norm.is_finite(), "{report}");
                let overflow = report.overflow().expect("it is skipped");
                assert_eq!((overflow.path.as_str(), overflow.values), ("a", 2));
                assert_eq!(overflow.parameters, 1);
                assert_eq!(
                    (report.bytes_up, report.consecutive_skips),
                    (0, round as u64 + 1)
                );
                assert_eq!(offload.memory().host_gradients, 0);
            }
            let loss = good(&model);
            model = step(&mut optimizer, 1e-2, model, loss);
            let loss = good(&expected);
            expected = step(&mut reference, 1e-2, expected, loss);
            assert_eq!(masters(&model), masters(&expected));
            assert_eq!(offload.report().outcome, Outcome::Applied);
        }
    }
}

/// The bad parameter comes last in the walk: those before it are not touched either, whatever their
/// group's rule.
#[test]
fn parameters_before_the_bad_one_stay_as_they_are() {
    for device in devices() {
        let (model, offload) = AdamWConfig::new()
            .with_offload(config(FloatDType::BF16))
            .with_group(ParamGroup::from_predicate("a"), SgdConfig::new())
            .init(Vectors::new(1.0, [4, 2], &device))
            .unwrap();
        let mut optimizer = offload.optimizer();
        let held = weights(&model);
        let loss = model.loss(&[1.0; 4], &[f32::NAN, f32::INFINITY]);
        let model = step(&mut optimizer, 1e-2, model, loss);
        assert_eq!(weights(&model), held);
        let report = offload.report();
        let overflow = report.overflow().expect("it is skipped");
        assert_eq!((overflow.path.as_str(), overflow.values), ("b", 2));
    }
}

/// Every pass is finite, their sum is not.
#[test]
fn a_sum_that_overflows_is_skipped() {
    for device in devices() {
        let (model, offload, mut optimizer) = adamw(config(FloatDType::F32), &device);
        let held = weights(&model);
        let loss = |model: &Vectors| model.loss(&[f32::MAX, 1.0, 1.0, 1.0], &[1.0; 2]);
        loss(&model).backward();
        let last = loss(&model);
        let model = step(&mut optimizer, 1e-2, model, last);
        assert_eq!(weights(&model), held);
        let report = offload.report();
        assert_eq!(report.non_finite, 0, "no pass had such a value");
        assert_eq!(report.overflow().map(|o| o.values), Some(1));
    }
}

/// One bad pass of an accumulated round spoils it; the next round does not remember it.
#[test]
fn a_bad_pass_spoils_its_round_only() {
    for device in devices() {
        let (model, offload, mut optimizer) = adamw(config(FloatDType::BF16), &device);
        let held = weights(&model);
        model.loss(&[f32::INFINITY; 4], &[1.0; 2]).backward();
        let last = model.loss(&[1.0; 4], &[1.0; 2]);
        let model = step(&mut optimizer, 1e-2, model, last);
        assert_eq!(weights(&model), held);
        assert_eq!(offload.report().passes, 2);
        let loss = model.loss(&[1.0; 4], &[1.0; 2]);
        let model = step(&mut optimizer, 1e-2, model, loss);
        assert_ne!(weights(&model), held);
        assert_eq!(
            (offload.report().passes, offload.report().applied()),
            (1, true)
        );
    }
}

/// A model stepped in parts: the verdict is one, and so is the round.
#[test]
fn parts_of_a_model_stepped_in_turn_share_the_verdict() {
    for device in devices() {
        let (mut model, offload, mut optimizer) = adamw(config(FloatDType::BF16), &device);
        for bad in [false, true] {
            let held = weights(&model);
            let b = if bad { f32::NAN } else { 1.0 };
            let mut grads = model.loss(&[1.0; 4], &[b; 2]).backward();
            for id in [model.a.id, model.b.id] {
                let part = GradientsParams::from_params(&mut grads, &model, &[id]);
                model = optimizer.step(1e-2, model, part);
            }
            let report = offload.report();
            assert_eq!(report.round, 1 + u64::from(bad));
            assert_eq!(report.applied(), !bad);
            assert_eq!(weights(&model) == held, bad);
        }
    }
}

fn registered(model: &Vectors, a: &[f32], b: &[f32]) -> GradientsParams {
    let device = model.a.base().device().inner();
    let mut grads = GradientsParams::new();
    grads.register::<1>(model.a.id, Tensor::from_floats(a, &device));
    grads.register::<1>(model.b.id, Tensor::from_floats(b, &device));
    grads
}

/// Gradients that reach `step` past the taps are added like arrivals; the first is judged with them.
#[test]
fn gradients_past_the_taps_are_added_and_judged() {
    for device in devices() {
        let sgd = || {
            let (model, offload) = SgdConfig::new()
                .with_offload(config(FloatDType::F32))
                .init(Vectors::new(1.0, [4, 2], &device))
                .unwrap();
            let optimizer = offload.optimizer();
            (model, offload, optimizer)
        };
        let (model, offload, mut optimizer) = sgd();
        model.loss(&[1.0; 4], &[2.0; 2]).backward();
        let grads = registered(&model, &[0.5; 4], &[0.25; 2]);
        let model = optimizer.step(1.0, model, grads);
        assert_eq!(read(&model.a.val()), [-0.5; 4]);
        assert_eq!(read(&model.b.val()), [-1.25; 2]);
        assert_eq!(offload.report().passes, 1);

        // Twice in a row without a backward: two rounds.
        let grads = registered(&model, &[1.0; 4], &[1.0; 2]);
        let model = optimizer.step(1.0, model, grads);
        let grads = registered(&model, &[1.0; 4], &[f32::NAN, 1.0]);
        let kept = model.clone();
        assert_eq!(read(&kept.a.val()), [-1.5; 4]);
        let text = panic_of(|| optimizer.step(1.0, model, grads));
        assert!(
            text.contains("1 of its values are not finite") && text.contains("`Offload::collect`"),
            "{text}"
        );
        assert_eq!(offload.memory().host_gradients, 0);

        let (model, offload, mut optimizer) = sgd();
        let held = weights(&model);
        let grads = registered(&model, &[1.0, f32::NAN, f32::NAN, 1.0], &[1.0; 2]);
        let model = optimizer.step(1.0, model, grads);
        assert_eq!(
            weights(&model),
            held,
            "the first is judged, the rest dropped"
        );
        assert_eq!(offload.report().overflow().map(|o| o.values), Some(2));
    }
}

/// Handed over before the step, they are part of the verdict and of the norm.
#[test]
fn collected_gradients_are_part_of_the_verdict_and_of_the_norm() {
    for device in devices() {
        let config = config(FloatDType::F32).with_max_grad_norm(Some(1.0));
        let (model, offload) = SgdConfig::new()
            .with_offload(config)
            .init(Vectors::new(0.0, [1, 1], &device))
            .unwrap();
        let mut optimizer = offload.optimizer();
        let grads = registered(&model, &[3.0], &[4.0]);
        let kept = model.clone();
        let text = panic_of(|| optimizer.step(1.0, model, grads));
        assert!(
            text.contains("`b`") && text.contains("`Offload::collect`"),
            "{text}"
        );

        let model = kept.load_record(Vectors::new(0.0, [1, 1], &device).into_record());
        with_gradient(&model.a, &[1.0]).backward();
        let grads = offload
            .collect(&model, registered(&model, &[2.0], &[4.0]))
            .unwrap();
        let model = optimizer.step(1.0, model, grads);
        let report = offload.report();
        assert_eq!((report.grad_norm, report.clipped_grad_norm), (5.0, 1.0));
        assert!((read(&model.a.val())[0] + 0.6).abs() < 1e-6);
        assert!((read(&model.b.val())[0] + 0.8).abs() < 1e-6);

        let held = weights(&model);
        let grads = registered(&model, &[2.0], &[f32::INFINITY]);
        let grads = offload.collect(&model, grads).unwrap();
        let model = optimizer.step(1.0, model, grads);
        assert_eq!(weights(&model), held);
        assert_eq!(
            offload.report().overflow().map(|o| o.path.clone()),
            Some("b".into())
        );
    }
}

/// Steps without any gradient are none: nothing moves, no round is counted, and the report stays that of
/// the last round.
#[test]
fn a_step_without_gradients_does_nothing() {
    for device in devices() {
        let (mut model, offload, mut optimizer) = adamw(config(FloatDType::BF16), &device);
        for round in 1..3 {
            let loss = model.loss(&[1.0; 4], &[1.0; 2]);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            offload.discard_gradients();
            let held = weights(&model);
            model = optimizer.step(1e-2, model, grads);
            assert_eq!(weights(&model), held);
            let loss = model.loss(&[1.0; 4], &[1.0; 2]);
            model = step(&mut optimizer, 1e-2, model, loss);
            assert_ne!(weights(&model), held);
            let report = offload.report();
            assert_eq!((report.round, report.outcome), (round, Outcome::Applied));
        }
        assert!(
            optimizer_state(&optimizer)
                .iter()
                .all(|state| state.time == 2)
        );
        // Placeholders first, then a gradient past the taps: that begins a round of its own.
        let mut grads = model.loss(&[1.0; 4], &[1.0; 2]).backward();
        let mut grads = GradientsParams::from_params(&mut grads, &model, &[model.a.id]);
        offload.discard_gradients();
        let gradient = Tensor::<1>::ones([2], &device.clone().inner());
        grads.register(model.b.id, gradient);
        let (a, b) = (read(&model.a.val()), read(&model.b.val()));
        let model = optimizer.step(1e-2, model, grads);
        assert_eq!(read(&model.a.val()), a);
        assert_ne!(read(&model.b.val()), b);
        assert_eq!(offload.report().round, 3);
    }
}
