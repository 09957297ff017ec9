//! Gradients are scaled and unscaled by the same power of two, whatever happens to the scale.

use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::module::Module;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, FloatDType};
use burn_zero_offload::{
    DynamicLossScaleConfig, LossScaleConfig, Offload, OffloadConfig, WithOffload,
};

use crate::common::vectors::{Vectors, with_gradient};
use crate::common::{config, devices, optimizer_time, panic_of, read, step};

const TYPES: [FloatDType; 3] = [FloatDType::F32, FloatDType::BF16, FloatDType::F16];

fn sgd(config: OffloadConfig, device: &Device) -> (Vectors, Offload, ModuleOptimizer) {
    let (model, offload) = SgdConfig::new()
        .with_offload(config)
        .init(Vectors::new(0.0, [1, 1], device))
        .unwrap();
    let optimizer = offload.optimizer();
    (model, offload, optimizer)
}

fn dynamic(initial: f32) -> DynamicLossScaleConfig {
    DynamicLossScaleConfig::new().with_initial(initial)
}

fn scaled(dtype: FloatDType, dynamic: DynamicLossScaleConfig) -> OffloadConfig {
    config(dtype).with_loss_scale(Some(LossScaleConfig::Dynamic(dynamic)))
}

/// A step on gradients `a` and 1, scaled.
fn scaled_step(
    optimizer: &mut ModuleOptimizer,
    offload: &Offload,
    model: Vectors,
    a: f32,
) -> Vectors {
    let loss = offload.scale(model.loss(&[a], &[1.0]));
    step(optimizer, 1.0, model, loss)
}

/// acceptance.md, loss scaling 35: SGD, lr 1, scale 4 that grows every step, true gradient 1.
#[test]
fn a_scale_that_grows_does_not_change_what_is_applied() {
    for device in devices() {
        for dtype in TYPES {
            let config = scaled(dtype, dynamic(4.0).with_growth_interval(1));
            let (mut model, offload, mut optimizer) = sgd(config, &device);
            for (round, scale) in [4.0, 8.0, 16.0].into_iter().enumerate() {
                model = scaled_step(&mut optimizer, &offload, model, 1.0);
                let expected = -(round as f32 + 1.0);
                assert_eq!(read(&model.a.val()), [expected], "{dtype:?}");
                assert_eq!(read(&model.b.val()), [expected], "{dtype:?}");
                let report = offload.report();
                assert_eq!(report.loss_scale, scale);
                assert_eq!(report.next_loss_scale, 2.0 * scale);
                assert_eq!(report.grad_norm, 2f64.sqrt());
            }
        }
    }
}

/// acceptance.md, loss scaling 36: the scale is stuck at its minimum; the error comes after the
/// configured number of skips and names the first parameter that is not finite.
#[test]
fn skips_without_end_are_an_error() {
    for device in devices() {
        for dtype in TYPES {
            let config = scaled(dtype, dynamic(4.0)).with_max_consecutive_skips(5);
            let (mut model, offload, mut optimizer) = sgd(config, &device);
            for scale in [2.0, 1.0, 1.0, 1.0, 1.0] {
                model = scaled_step(&mut optimizer, &offload, model, f32::INFINITY);
                assert_eq!(offload.loss_scale(), scale);
            }
            let kept = model.clone();
            let text = panic_of(|| {
                scaled_step(&mut optimizer, &offload, model, f32::INFINITY);
            });
            assert!(
                text.contains("6 rounds in a row were skipped")
                    && text.contains("at loss scale 1: 1 values of the gradient of `a`"),
                "{text}"
            );
            assert_eq!(
                (read(&kept.a.val()), read(&kept.b.val())),
                (vec![0.0], vec![0.0])
            );
            // A good round ends it.
            let model = scaled_step(&mut optimizer, &offload, kept, 0.5);
            assert_eq!(read(&model.a.val()), [-0.5]);
            let report = offload.report();
            assert_eq!((report.consecutive_skips, report.skips), (0, 6));
        }
    }
}

/// acceptance.md, loss scaling 37: 100 steps on gradients of 1. In f16 a scale of 2^16 is too much by
/// one power of two, and the scale never goes lower.
#[test]
fn a_healthy_model_backs_off_only_as_far_as_it_must() {
    let device = Device::flex().autodiff();
    for (dtype, lowest) in [(FloatDType::F16, 32768.0), (FloatDType::BF16, 65536.0)] {
        let (mut model, offload, mut optimizer) = sgd(scaled(dtype, dynamic(65536.0)), &device);
        let mut scales = vec![];
        for _ in 0..100 {
            model = scaled_step(&mut optimizer, &offload, model, 1.0);
            scales.push(offload.loss_scale());
        }
        assert_eq!(scales, vec![lowest; 100]);
        let skips = u64::from(lowest < 65536.0);
        assert_eq!(offload.report().skips, skips);
        assert_eq!(optimizer_time(&optimizer, "a"), 100 - skips);
    }
}

/// acceptance.md, loss scaling 41: scale, counters and last overflow come back with the optimizer's
/// record; the next ten scales are identical.
#[test]
fn a_record_restores_the_scale_and_its_history() {
    let infinite = [1, 4, 6, 9, 10, 14];
    let gradient = |round: u64| match infinite.contains(&round) {
        true => f32::INFINITY,
        false => 1.0,
    };
    for device in devices() {
        let policy = dynamic(64.0).with_growth_interval(2).with_hysteresis(2);
        let config = scaled(FloatDType::F16, policy);
        let (mut model, offload, mut optimizer) = sgd(config.clone(), &device);
        for round in 0..5 {
            model = scaled_step(&mut optimizer, &offload, model, gradient(round));
        }
        let record = optimizer.into_bytes().unwrap();
        let (other_model, other, fresh) = sgd(config, &device);
        let mut resumed = fresh.from_bytes(record).unwrap();
        let mut other_model = other_model.load_record(model.clone().into_record());
        let (left, right) = (offload.report(), other.report());
        assert_eq!((left.round, left.skips, left.last_overflow), (5, 2, 5));
        assert_eq!((right.round, right.skips, right.last_overflow), (5, 2, 5));
        assert_eq!(right.consecutive_skips, left.consecutive_skips);
        for round in 5..15 {
            assert_eq!(other.loss_scale(), offload.loss_scale(), "round {round}");
            model = scaled_step(&mut optimizer, &offload, model, gradient(round));
            other_model = scaled_step(&mut resumed, &other, other_model, gradient(round));
            let (left, right) = (offload.report(), other.report());
            assert_eq!(right.next_loss_scale, left.next_loss_scale, "round {round}");
            assert_eq!((right.round, right.skips), (left.round, left.skips));
            assert_eq!(right.last_overflow, left.last_overflow);
        }
        assert_eq!(read(&other_model.a.val()), read(&model.a.val()));
    }
}

/// A record of a run that has only skipped so far: no state, but the scale; Burn can load it, too.
#[test]
fn a_record_from_before_the_first_update_carries_the_scale() {
    let device = Device::flex().autodiff();
    let momentum =
        || SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_dampening(0.5)));
    let offloaded = || {
        let config = scaled(FloatDType::F32, dynamic(4.0));
        let model = Vectors::new(0.0, [1, 1], &device);
        let (model, offload) = momentum().with_offload(config).init(model).unwrap();
        let optimizer = offload.optimizer();
        (model, offload, optimizer)
    };
    let (model, offload, mut optimizer) = offloaded();
    scaled_step(&mut optimizer, &offload, model, f32::NAN);
    let record = || optimizer.into_bytes().unwrap();

    let (model, other, fresh) = offloaded();
    let mut resumed = fresh.from_bytes(record()).unwrap();
    assert_eq!((other.loss_scale(), other.report().skips), (2.0, 1));
    let model = scaled_step(&mut resumed, &other, model, 1.0);
    assert_eq!(
        read(&model.a.val()),
        [-1.0],
        "the first gradient is not dampened"
    );

    let plain = Vectors::new(0.0, [1, 1], &device);
    let mut burns = momentum().init().from_bytes(record()).unwrap();
    let loss = plain.loss(&[1.0], &[1.0]);
    let plain = step(&mut burns, 1.0, plain, loss);
    assert_eq!(read(&plain.a.val()), [-1.0]);
}

/// acceptance.md, loss scaling 42: a skipped step does not count as an update; a schedule goes on as its
/// loop asks it, and the report says that nothing was applied.
#[test]
fn a_skipped_step_is_no_update_and_the_schedule_goes_on() {
    for device in devices() {
        let (mut model, offload, mut optimizer) =
            sgd(scaled(FloatDType::F16, dynamic(4.0)), &device);
        let mut schedule = LinearLrSchedulerConfig::new(0.5, 0.125, 3).init().unwrap();
        let mut rates = vec![];
        for gradient in [1.0, f32::NAN, 1.0] {
            let loss = offload.scale(model.loss(&[gradient], &[1.0]));
            let lr = schedule.step().base();
            rates.push(lr);
            model = step(&mut optimizer, lr, model, loss);
            let report = offload.report();
            let groups = &report.groups[0].learning_rates;
            if gradient.is_nan() {
                assert!(!report.applied());
                let overflow = report.overflow().expect("the step was skipped");
                assert_eq!((overflow.path.as_str(), overflow.values), ("a", 1));
                assert!(groups.is_empty());
            } else {
                assert!(report.applied());
                assert_eq!(groups, &[lr]);
            }
        }
        assert_eq!(optimizer_time(&optimizer, "a"), 2);
        let expected = -(rates[0] + rates[2]) as f32;
        assert!((read(&model.a.val())[0] - expected).abs() < 1e-3);
    }
}

/// In f16 a gradient of 2^-26 is nothing; scaled it is exact.
#[test]
fn gradients_too_small_for_f16_arrive_when_scaled() {
    let tiny = 2f32.powi(-26);
    for device in devices() {
        for (is_scaled, expected) in [(false, 0.0), (true, -1.0)] {
            let (model, offload, mut optimizer) = sgd(config(FloatDType::F16), &device);
            let loss = with_gradient(&model.a, &[tiny]);
            let loss = if is_scaled { offload.scale(loss) } else { loss };
            let model = step(&mut optimizer, 1.0 / tiny as f64, model, loss);
            assert_eq!(read(&model.a.val()), [expected]);
            let scale = if is_scaled { 65536.0 } else { 1.0 };
            assert_eq!(offload.report().loss_scale, scale);
        }
    }
}

#[test]
fn scaling_leaves_the_value_of_the_loss_alone() {
    for device in devices() {
        let (model, offload) = SgdConfig::new()
            .with_offload(config(FloatDType::F16))
            .init(Vectors::new(3.0, [1, 1], &device))
            .unwrap();
        let loss = model.loss(&[2.0], &[0.5]);
        assert_eq!(offload.loss_scale(), 65536.0);
        assert_eq!(read(&offload.scale(loss.clone())), read(&loss));
        let plain = loss.inner();
        assert_eq!(read(&offload.scale(plain.clone())), read(&plain));
    }
}

/// The scale changes between the forward pass of a loss and its backward pass; a round has passes that
/// were scaled and passes that were not; a gradient is stepped rounds after it came.
#[test]
fn gradients_are_unscaled_by_what_scaled_them() {
    for device in devices() {
        for dtype in TYPES {
            let config = || scaled(dtype, dynamic(4.0).with_growth_interval(1));
            let (mut model, offload, mut optimizer) = sgd(config(), &device);
            let old = model.clone();
            let before = offload.scale(old.loss(&[1.0], &[1.0]));
            model = scaled_step(&mut optimizer, &offload, model, 1.0);
            assert_eq!(offload.loss_scale(), 8.0);
            let grads = GradientsParams::from_grads(before.backward(), &old);
            model = optimizer.step(1.0, model, grads);
            assert_eq!(read(&model.a.val()), [-2.0]);

            let (mut model, offload, mut optimizer) = sgd(config(), &device);
            offload.scale(model.loss(&[1.0], &[1.0])).backward();
            model.loss(&[0.5], &[2.0]).backward();
            model = scaled_step(&mut optimizer, &offload, model, 0.25);
            assert_eq!(offload.report().passes, 3);
            assert_eq!(
                (read(&model.a.val()), read(&model.b.val())),
                (vec![-1.75], vec![-4.0])
            );

            // All recorded before the first runs backward: a device that sums the uses of a weight must not
            // sum those of different scales.
            let (mut model, offload, mut optimizer) = sgd(config(), &device);
            let [first, second, third, last] = [1.0, 2.0, 4.0, 8.0].map(|a| model.loss(&[a], &[a]));
            offload.scale(first).backward();
            second.backward();
            third.backward();
            model = step(&mut optimizer, 1.0, model, offload.scale(last));
            assert_eq!(
                (read(&model.a.val()), read(&model.b.val())),
                (vec![-15.0], vec![-15.0])
            );

            // `b` is left out of the first two steps.
            let (mut model, offload, mut optimizer) = sgd(config(), &device);
            for _ in 0..2 {
                let loss = offload.scale(model.loss(&[1.0], &[1.0]));
                let mut grads = loss.backward();
                let grads = GradientsParams::from_params(&mut grads, &model, &[model.a.id]);
                model = optimizer.step(1.0, model, grads);
            }
            model = scaled_step(&mut optimizer, &offload, model, 1.0);
            assert_eq!(offload.report().carried, 1);
            assert_eq!(
                (read(&model.a.val()), read(&model.b.val())),
                (vec![-3.0], vec![-3.0])
            );
        }
    }
}

/// Burn recomputes parts of the forward pass in backward: that is still one pass, of one scale.
#[test]
fn a_scaled_loss_goes_through_gradient_checkpointing() {
    let device = Device::flex().autodiff().gradient_checkpointing();
    let config = scaled(FloatDType::F16, dynamic(1024.0)).with_micro_batches(Some(2));
    let (mut model, offload, mut optimizer) = sgd(config, &device);
    for round in 1..3 {
        let loss = |model: &Vectors| (model.loss(&[0.5], &[0.25]) * 4.0).exp().log() / 2.0;
        offload.scale(loss(&model)).backward();
        let last = offload.scale(loss(&model));
        model = step(&mut optimizer, 1.0, model, last);
        let report = offload.report();
        assert_eq!((report.passes, report.loss_scale), (2, 1024.0));
        let moved = -2.0 * round as f32;
        assert_eq!(
            (read(&model.a.val()), read(&model.b.val())),
            (vec![moved], vec![moved / 2.0])
        );
    }
}

/// One backward through two offloaded models: the scale of the first loss holds for all gradients.
#[test]
fn models_that_share_a_backward_share_its_scale() {
    for device in devices() {
        let config = |initial| scaled(FloatDType::F32, dynamic(initial));
        let (left, first, mut left_optimizer) = sgd(config(4.0), &device);
        let (right, second, mut right_optimizer) = sgd(config(64.0), &device);
        let both = first.scale(left.loss(&[1.0], &[1.0]));
        let both = both + second.scale(right.loss(&[1.0], &[1.0]) + left.loss(&[1.0], &[0.0]));
        let mut grads = both.backward();
        let left_grads = GradientsParams::from_module(&mut grads, &left);
        let right_grads = GradientsParams::from_module(&mut grads, &right);
        let left = left_optimizer.step(1.0, left, left_grads);
        let right = right_optimizer.step(1.0, right, right_grads);
        assert_eq!(
            (read(&left.a.val()), read(&left.b.val())),
            (vec![-2.0], vec![-1.0])
        );
        assert_eq!(read(&right.a.val()), [-1.0]);
        assert_eq!(first.report().loss_scale, second.report().loss_scale);
    }
}

#[test]
fn only_f16_is_scaled_by_default() {
    let device = Device::flex().autodiff();
    for (dtype, scale) in TYPES.into_iter().zip([1.0, 1.0, 65536.0]) {
        let (_, offload, _) = sgd(config(dtype), &device);
        assert_eq!(offload.loss_scale(), scale);
    }
    let fixed = config(FloatDType::BF16).with_loss_scale(Some(LossScaleConfig::Static(8.0)));
    let (mut model, offload, mut optimizer) = sgd(fixed, &device);
    for gradient in [1.0, f32::INFINITY, 1.0] {
        model = scaled_step(&mut optimizer, &offload, model, gradient);
        let report = offload.report();
        assert_eq!((report.loss_scale, report.next_loss_scale), (8.0, 8.0));
    }
    assert_eq!(read(&model.a.val()), [-2.0]);
}
