//! Burn's optimizer configs as rules of the CPU step.
//!
//! Their fields are private, but they serialize. Unknown fields are refused: a later Burn may add an
//! option, and training on without it would be wrong in silence.

use burn::grad_clipping::GradientClippingConfig;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdaGradConfig, AdamConfig, AdamWConfig, LionConfig, RmsPropConfig, SgdConfig};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::error::OffloadError;
use crate::optimize::rules::{AdaGrad, Adam, AmsGrad, Lion, Momentum, RmsProp, Sgd, WeightDecay};
use crate::optimize::{GradientClip, HostRule};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AdamFields {
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    amsgrad: bool,
    weight_decay: Option<WeightDecayConfig>,
    grad_clipping: Option<GradientClippingConfig>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AdamWFields {
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    weight_decay: f32,
    cautious_weight_decay: bool,
    amsgrad: bool,
    grad_clipping: Option<GradientClippingConfig>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SgdFields {
    weight_decay: Option<WeightDecayConfig>,
    momentum: Option<MomentumConfig>,
    gradient_clipping: Option<GradientClippingConfig>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LionFields {
    beta_1: f32,
    beta_2: f32,
    weight_decay: f32,
    grad_clipping: Option<GradientClippingConfig>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AdaGradFields {
    lr_decay: f64,
    epsilon: f32,
    weight_decay: Option<WeightDecayConfig>,
    grad_clipping: Option<GradientClippingConfig>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RmsPropFields {
    alpha: f32,
    momentum: f32,
    epsilon: f32,
    centered: bool,
    weight_decay: Option<WeightDecayConfig>,
    grad_clipping: Option<GradientClippingConfig>,
}

fn fields<T: DeserializeOwned>(config: &impl serde::Serialize) -> Result<T, OffloadError> {
    serde_json::to_value(config)
        .and_then(serde_json::from_value)
        .map_err(|error| {
            let mut reason = error.to_string();
            // Numbers that are not finite serialize as nothing.
            if reason.contains("null") {
                reason.push_str("; is one of its numbers NaN or infinite?");
            }
            OffloadError::Config { reason }
        })
}

fn expect(
    holds: bool,
    name: &'static str,
    value: impl ToString,
    expected: &'static str,
) -> Result<(), OffloadError> {
    match holds {
        true => Ok(()),
        false => Err(OffloadError::OutOfRange {
            name,
            value: value.to_string(),
            expected,
        }),
    }
}

/// A decay rate of a running mean.
fn rate(name: &'static str, value: f32) -> Result<f32, OffloadError> {
    let holds = (0.0..1.0).contains(&value);
    expect(holds, name, value, "at least 0 and below 1").map(|()| value)
}

fn not_negative(name: &'static str, value: f32) -> Result<f32, OffloadError> {
    let holds = value >= 0.0 && value.is_finite();
    expect(holds, name, value, "finite and at least 0").map(|()| value)
}

fn decay(value: f32) -> Result<f32, OffloadError> {
    let holds = value.is_finite();
    expect(holds, "weight_decay", value, "a finite number").map(|()| value)
}

fn penalty(config: Option<WeightDecayConfig>) -> Result<f32, OffloadError> {
    config.map_or(Ok(0.0), |config| decay(config.penalty))
}

fn clip(config: Option<GradientClippingConfig>) -> Result<Option<GradientClip>, OffloadError> {
    let Some(config) = config else {
        return Ok(None);
    };
    let (limit, clip) = match config {
        GradientClippingConfig::Value(value) => (value, GradientClip::Value(value)),
        GradientClippingConfig::Norm(norm) => (norm, GradientClip::Norm(norm)),
    };
    expect(limit > 0.0, "grad_clipping", limit, "above 0").map(|()| Some(clip))
}

fn adam_or_amsgrad(adam: Adam, amsgrad: bool) -> HostRule {
    match amsgrad {
        true => HostRule::new(AmsGrad(adam)),
        false => HostRule::new(adam),
    }
}

pub(super) fn adam(config: &AdamConfig) -> Result<HostRule, OffloadError> {
    let f: AdamFields = fields(config)?;
    let adam = Adam {
        beta_1: rate("beta_1", f.beta_1)?,
        beta_2: rate("beta_2", f.beta_2)?,
        epsilon: not_negative("epsilon", f.epsilon)?,
        weight_decay: match f.weight_decay {
            Some(config) => WeightDecay::L2(decay(config.penalty)?),
            None => WeightDecay::None,
        },
    };
    Ok(adam_or_amsgrad(adam, f.amsgrad).with_clipping(clip(f.grad_clipping)?))
}

pub(super) fn adamw(config: &AdamWConfig) -> Result<HostRule, OffloadError> {
    let f: AdamWFields = fields(config)?;
    let weight_decay = decay(f.weight_decay)?;
    let adam = Adam {
        beta_1: rate("beta_1", f.beta_1)?,
        beta_2: rate("beta_2", f.beta_2)?,
        epsilon: not_negative("epsilon", f.epsilon)?,
        weight_decay: match f.cautious_weight_decay {
            true => WeightDecay::Cautious(weight_decay),
            false => WeightDecay::Decoupled(weight_decay),
        },
    };
    Ok(adam_or_amsgrad(adam, f.amsgrad).with_clipping(clip(f.grad_clipping)?))
}

pub(super) fn sgd(config: &SgdConfig) -> Result<HostRule, OffloadError> {
    let f: SgdFields = fields(config)?;
    let penalty = penalty(f.weight_decay)?;
    let rule = match f.momentum {
        None => HostRule::new(Sgd { penalty }),
        Some(config) => {
            let dampening = config.dampening;
            expect(
                dampening.is_finite(),
                "dampening",
                dampening,
                "a finite number",
            )?;
            HostRule::new(Momentum {
                penalty,
                momentum: not_negative("momentum", config.momentum as f32)?,
                dampening,
                nesterov: config.nesterov,
            })
        }
    };
    Ok(rule.with_clipping(clip(f.gradient_clipping)?))
}

pub(super) fn lion(config: &LionConfig) -> Result<HostRule, OffloadError> {
    let f: LionFields = fields(config)?;
    let rule = HostRule::new(Lion {
        beta_1: rate("beta_1", f.beta_1)?,
        beta_2: rate("beta_2", f.beta_2)?,
        weight_decay: decay(f.weight_decay)?,
    });
    Ok(rule.with_clipping(clip(f.grad_clipping)?))
}

pub(super) fn adagrad(config: &AdaGradConfig) -> Result<HostRule, OffloadError> {
    let f: AdaGradFields = fields(config)?;
    let holds = f.lr_decay >= 0.0 && f.lr_decay.is_finite();
    expect(holds, "lr_decay", f.lr_decay, "finite and at least 0")?;
    let rule = HostRule::new(AdaGrad {
        lr_decay: f.lr_decay,
        epsilon: not_negative("epsilon", f.epsilon)?,
        penalty: penalty(f.weight_decay)?,
    });
    Ok(rule.with_clipping(clip(f.grad_clipping)?))
}

pub(super) fn rms_prop(config: &RmsPropConfig) -> Result<HostRule, OffloadError> {
    let f: RmsPropFields = fields(config)?;
    let (alpha, epsilon) = (rate("alpha", f.alpha)?, not_negative("epsilon", f.epsilon)?);
    let (momentum, penalty) = (
        not_negative("momentum", f.momentum)?,
        penalty(f.weight_decay)?,
    );
    macro_rules! rule {
        ($centered:literal, $momentum:literal) => {
            HostRule::new(RmsProp::<$centered, $momentum> {
                alpha,
                momentum,
                epsilon,
                penalty,
            })
        };
    }
    let rule = match (f.centered, momentum > 0.0) {
        (false, false) => rule!(false, false),
        (false, true) => rule!(false, true),
        (true, false) => rule!(true, false),
        (true, true) => rule!(true, true),
    };
    Ok(rule.with_clipping(clip(f.grad_clipping)?))
}

#[cfg(test)]
mod tests {
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
}
