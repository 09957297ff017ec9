use super::*;

/// Rules are compared by what they print, which is all of their fields.
#[track_caller]
fn assert_rule(rule: Result<HostRule, OffloadError>, expected: HostRule) {
    assert_eq!(format!("{:?}", rule.unwrap()), format!("{expected:?}"));
}

const NORM: Option<GradientClippingConfig> = Some(GradientClippingConfig::Norm(2.0));

#[test]
fn every_option_of_adamw_arrives() {
    let config = AdamWConfig::new()
        .with_beta_1(0.8)
        .with_beta_2(0.95)
        .with_epsilon(1e-7)
        .with_weight_decay(0.25)
        .with_cautious_weight_decay(true)
        .with_amsgrad(true)
        .with_grad_clipping(NORM);
    let expected = AmsGrad(Adam {
        beta_1: 0.8,
        beta_2: 0.95,
        epsilon: 1e-7,
        weight_decay: WeightDecay::Cautious(0.25),
    });
    let expected = HostRule::new(expected).with_clipping(Some(GradientClip::Norm(2.0)));
    assert_rule(adamw(&config), expected);
}

#[test]
fn every_option_of_adam_arrives() {
    let config = AdamConfig::new()
        .with_beta_1(0.8)
        .with_beta_2(0.95)
        .with_epsilon(1e-7)
        .with_weight_decay(Some(WeightDecayConfig::new(0.25)))
        .with_grad_clipping(Some(GradientClippingConfig::Value(2.0)));
    let expected = HostRule::new(Adam {
        beta_1: 0.8,
        beta_2: 0.95,
        epsilon: 1e-7,
        weight_decay: WeightDecay::L2(0.25),
    });
    let expected = expected.with_clipping(Some(GradientClip::Value(2.0)));
    assert_rule(adam(&config), expected);
}

#[test]
fn every_option_of_the_other_optimizers_arrives() {
    let penalty = Some(WeightDecayConfig::new(0.25));
    let clip = Some(GradientClip::Norm(2.0));
    let config = SgdConfig::new().with_weight_decay(penalty.clone());
    let expected = HostRule::new(Sgd { penalty: 0.25 }).with_clipping(clip);
    assert_rule(sgd(&config.with_gradient_clipping(NORM)), expected);

    let momentum = MomentumConfig::new()
        .with_momentum(0.75)
        .with_dampening(0.5)
        .with_nesterov(true);
    let expected = HostRule::new(Momentum {
        penalty: 0.0,
        momentum: 0.75,
        dampening: 0.5,
        nesterov: true,
    });
    assert_rule(
        sgd(&SgdConfig::new().with_momentum(Some(momentum))),
        expected,
    );

    let config = LionConfig::new()
        .with_beta_1(0.8)
        .with_beta_2(0.95)
        .with_weight_decay(0.25)
        .with_grad_clipping(NORM);
    let expected = HostRule::new(Lion {
        beta_1: 0.8,
        beta_2: 0.95,
        weight_decay: 0.25,
    });
    assert_rule(lion(&config), expected.with_clipping(clip));

    let config = AdaGradConfig::new()
        .with_lr_decay(0.5)
        .with_epsilon(1e-7)
        .with_weight_decay(penalty.clone())
        .with_grad_clipping(NORM);
    let expected = HostRule::new(AdaGrad {
        lr_decay: 0.5,
        epsilon: 1e-7,
        penalty: 0.25,
    });
    assert_rule(adagrad(&config), expected.with_clipping(clip));

    let config = RmsPropConfig::new()
        .with_alpha(0.75)
        .with_epsilon(1e-7)
        .with_weight_decay(penalty)
        .with_grad_clipping(NORM);
    macro_rules! expected {
        ($centered:literal, $momentum:literal, $value:literal) => {
            HostRule::new(RmsProp::<$centered, $momentum> {
                alpha: 0.75,
                momentum: $value,
                epsilon: 1e-7,
                penalty: 0.25,
            })
            .with_clipping(clip)
        };
    }
    assert_rule(rms_prop(&config), expected!(false, true, 0.9));
    let without = config.clone().with_momentum(0.0);
    assert_rule(rms_prop(&without), expected!(false, false, 0.0));
    let centered = without.with_centered(true);
    assert_rule(rms_prop(&centered), expected!(true, false, 0.0));
    let both = centered.with_momentum(0.5);
    assert_rule(rms_prop(&both), expected!(true, true, 0.5));
}

/// acceptance.md, CPU step 14: what a config leaves out has Burn's defaults.
#[test]
fn options_left_out_have_burns_defaults() {
    let expected = Adam {
        beta_1: 0.9,
        beta_2: 0.999,
        epsilon: 1e-5,
        weight_decay: WeightDecay::Decoupled(0.0),
    };
    let config = AdamWConfig::new().with_weight_decay(0.0);
    assert_rule(adamw(&config), HostRule::new(expected));
    let expected = Adam {
        weight_decay: WeightDecay::None,
        ..expected
    };
    assert_rule(adam(&AdamConfig::new()), HostRule::new(expected));
}

#[test]
fn values_that_cannot_work_are_named() {
    let error = adamw(&AdamWConfig::new().with_beta_2(1.0)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`beta_2` is 1, expected at least 0 and below 1"
    );
    let zero = Some(GradientClippingConfig::Norm(0.0));
    let momentum = MomentumConfig::new().with_momentum(-0.5);
    for refused in [
        adamw(&AdamWConfig::new().with_beta_1(-0.1)),
        adamw(&AdamWConfig::new().with_epsilon(-1e-8)),
        adamw(&AdamWConfig::new().with_grad_clipping(zero.clone())),
        sgd(&SgdConfig::new().with_gradient_clipping(zero)),
        sgd(&SgdConfig::new().with_momentum(Some(momentum))),
        lion(&LionConfig::new().with_beta_1(1.5)),
        adagrad(&AdaGradConfig::new().with_lr_decay(-1.0)),
        rms_prop(&RmsPropConfig::new().with_alpha(1.0)),
    ] {
        assert!(matches!(refused, Err(OffloadError::OutOfRange { .. })));
    }
    let nan = WeightDecayConfig::new(f32::NAN);
    let error = sgd(&SgdConfig::new().with_weight_decay(Some(nan))).unwrap_err();
    assert!(error.to_string().contains("NaN or infinite"), "{error}");
}
