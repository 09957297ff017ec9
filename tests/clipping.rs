//! Norms are taken over everything the optimizer updates, in `f64`, and gradients are clipped on the
//! host: over all parameters, per parameter, by value.

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Module, Param, ParamGroup};
use burn::optim::{AdamWConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_zero_offload::{
    Accumulation, LossScaleConfig, Offload, OffloadConfig, StepReport, WithOffload,
};

use crate::common::vectors::{Vectors, with_gradient};
use crate::common::{assert_close, assert_models_close, config, devices, read, step};

const TYPES: [FloatDType; 3] = [FloatDType::F32, FloatDType::BF16, FloatDType::F16];

fn sgd(
    clip: Option<GradientClippingConfig>,
    config: OffloadConfig,
    device: &Device,
) -> (Vectors, Offload, ModuleOptimizer) {
    let (model, offload) = SgdConfig::new()
        .with_gradient_clipping(clip)
        .with_offload(config)
        .init(Vectors::new(0.0, [1, 1], device))
        .unwrap();
    let optimizer = offload.optimizer();
    (model, offload, optimizer)
}

/// What SGD at lr 1 took from `a` and `b`, and the report.
fn applied(
    clip: Option<GradientClippingConfig>,
    config: OffloadConfig,
    gradient: [f32; 2],
    device: &Device,
) -> ([f32; 2], StepReport) {
    let (model, offload, mut optimizer) = sgd(clip, config, device);
    let loss = offload.scale(model.loss(&gradient[..1], &gradient[1..]));
    let model = step(&mut optimizer, 1.0, model, loss);
    let moved = [&model.a, &model.b].map(|param| -read(&param.val())[0]);
    (moved, offload.report())
}

/// acceptance.md, norm and clipping 26 and 32: norm 5 before, 1 after, coefficient .2, both reported;
/// the gradients are on the host and no device takes part.
#[test]
fn three_and_four_are_clipped_to_norm_one() {
    for device in devices() {
        for dtype in TYPES {
            let config = config(dtype)
                .with_loss_scale(Some(LossScaleConfig::Static(256.0)))
                .with_max_grad_norm(Some(1.0));
            let (moved, report) = applied(None, config, [3.0, 4.0], &device);
            assert_close(&moved, &[0.6, 0.8], 2e-3, 0.0);
            assert_eq!((report.grad_norm, report.clipped_grad_norm), (5.0, 1.0));
        }
        let config = config(FloatDType::F32).with_max_grad_norm(Some(1.0));
        let (moved, _) = applied(None, config, [3.0, 4.0], &device);
        assert_close(&moved, &[0.6, 0.8], 1e-7, 0.0);
    }
}

#[test]
fn a_norm_within_the_limit_is_left_alone() {
    for device in devices() {
        let config = config(FloatDType::F32).with_max_grad_norm(Some(5.0));
        let (moved, report) = applied(None, config, [3.0, 4.0], &device);
        assert_eq!(moved, [3.0, 4.0]);
        assert_eq!((report.grad_norm, report.clipped_grad_norm), (5.0, 5.0));
    }
}

/// acceptance.md, norm and clipping 34, and Burn's own `[300.0]`: squares would overflow in f16.
#[test]
fn norms_beyond_the_square_root_of_f16_are_right() {
    for device in devices() {
        let off = || config(FloatDType::F16).with_loss_scale(Some(LossScaleConfig::Off));
        let (_, report) = applied(None, off(), [3072.0, 4096.0], &device);
        assert_eq!(report.grad_norm, 5120.0);
        let (_, report) = applied(None, off(), [300.0, 0.0], &device);
        assert_eq!(report.grad_norm, 300.0);
    }
}

/// Norms are those of the true gradient, whatever the loss scale was.
#[test]
fn the_loss_scale_is_no_part_of_the_norm() {
    for device in devices() {
        for scale in [0.5, 64.0] {
            let config = config(FloatDType::F16)
                .with_loss_scale(Some(LossScaleConfig::Static(scale)))
                .with_max_grad_norm(Some(2.5));
            let (moved, report) = applied(None, config, [3.0, 4.0], &device);
            assert_eq!((report.grad_norm, report.clipped_grad_norm), (5.0, 2.5));
            assert_eq!(moved, [1.5, 2.0]);
        }
    }
}

/// Burn's clipping of each parameter comes after the norm over all of them.
#[test]
fn clipping_of_each_parameter_follows_clipping_of_all() {
    let device = Device::flex().autodiff();
    let config = || config(FloatDType::F32).with_max_grad_norm(Some(2.5));
    let norm = |limit| Some(GradientClippingConfig::Norm(limit));
    let (moved, report) = applied(norm(1.75), config(), [3.0, 4.0], &device);
    assert_eq!(moved, [1.5, 1.75]);
    let expected = (1.5f64.powi(2) + 1.75f64.powi(2)).sqrt();
    assert_eq!(
        (report.grad_norm, report.clipped_grad_norm),
        (5.0, expected)
    );

    let value = Some(GradientClippingConfig::Value(1.75));
    let (moved, report) = applied(value.clone(), config(), [-3.0, -4.0], &device);
    assert_eq!(moved, [-1.5, -1.75]);
    assert_eq!(report.clipped_grad_norm, expected);
    let (moved, report) = applied(value, self::config(FloatDType::F32), [1.0, 9.0], &device);
    assert_eq!(moved, [1.0, 1.75]);
    assert_eq!(report.clipped_grad_norm, (1.0f64 + 1.75f64.powi(2)).sqrt());
}

/// acceptance.md, norm and clipping 30, for a weight that is used twice: its gradient counts once, as
/// the sum it is.
#[test]
fn a_tied_weight_counts_once() {
    for device in devices() {
        for dtype in [FloatDType::F32, FloatDType::BF16] {
            let config = config(dtype).with_max_grad_norm(Some(1.0));
            let (model, offload, mut optimizer) = sgd(None, config, &device);
            let twice = with_gradient(&model.a, &[1.0]) + with_gradient(&model.a, &[2.0]);
            let loss = twice + with_gradient(&model.b, &[4.0]);
            let model = step(&mut optimizer, 1.0, model, loss);
            assert_eq!(offload.report().grad_norm, 5.0);
            assert_close(&read(&model.a.val()), &[-0.6], 2e-3, 0.0);
        }
    }
}

/// The norm goes over all groups and leaves out what is frozen.
#[test]
fn the_norm_is_over_everything_the_optimizer_updates() {
    #[derive(Module, Debug)]
    struct Three {
        a: Param<Tensor<1>>,
        b: Param<Tensor<1>>,
        frozen: Param<Tensor<1>>,
    }
    for device in devices() {
        let param = || Param::from_tensor(Tensor::<1>::zeros([1], &device));
        let model = Three {
            a: param(),
            b: param(),
            frozen: param().no_grad(),
        };
        let (model, offload) = SgdConfig::new()
            .with_offload(config(FloatDType::F32).with_max_grad_norm(Some(1.0)))
            .with_group(ParamGroup::from_predicate("b"), AdamWConfig::new())
            .init(model)
            .unwrap();
        let mut optimizer = offload.optimizer();
        let loss = with_gradient(&model.a, &[3.0])
            + with_gradient(&model.b, &[4.0])
            + with_gradient(&model.frozen, &[100.0]);
        let model = step(&mut optimizer, 1.0, model, loss);
        let report = offload.report();
        assert_eq!((report.grad_norm, report.clipped_grad_norm), (5.0, 1.0));
        assert_close(&read(&model.a.val()), &[-0.6], 1e-7, 0.0);
        assert_eq!(read(&model.frozen.val()), [0.0]);
    }
}

/// The mean over passes is taken before the norm.
#[test]
fn the_norm_is_that_of_the_mean() {
    for device in devices() {
        let config = config(FloatDType::F32)
            .with_accumulation(Accumulation::Mean)
            .with_max_grad_norm(Some(2.5));
        let (model, offload, mut optimizer) = sgd(None, config, &device);
        model.loss(&[6.0], &[0.0]).backward();
        let last = model.loss(&[0.0], &[8.0]);
        let model = step(&mut optimizer, 1.0, model, last);
        let report = offload.report();
        assert_eq!((report.grad_norm, report.clipped_grad_norm), (5.0, 2.5));
        assert_eq!(
            (read(&model.a.val()), read(&model.b.val())),
            (vec![-1.5], vec![-2.0])
        );
    }
}

/// Burn's clipping in an optimizer config does what it does without offload.
#[test]
fn clipping_in_burns_configs_equals_burns() {
    for device in devices() {
        for clip in [
            GradientClippingConfig::Norm(0.5),
            GradientClippingConfig::Value(0.25),
        ] {
            let adamw = || AdamWConfig::new().with_grad_clipping(Some(clip.clone()));
            let mut expected = Vectors::new(1.0, [3, 2], &device);
            let mut plain = adamw().init();
            let (mut model, offload) = adamw()
                .with_offload(config(FloatDType::F32))
                .init(Vectors::new(1.0, [3, 2], &device))
                .unwrap();
            let mut optimizer = offload.optimizer();
            for round in 1..4 {
                let a = [0.5, -1.0, 0.1].map(|g| g * round as f32);
                let loss = model.loss(&a, &[0.1, -0.2]);
                model = step(&mut optimizer, 1e-2, model, loss);
                let loss = expected.loss(&a, &[0.1, -0.2]);
                expected = step(&mut plain, 1e-2, expected, loss);
                assert_models_close(&model, &expected, 1e-6, 1e-6);
            }
        }
    }
}
