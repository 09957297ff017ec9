//! Burn's optimizer configs as rules of the CPU step.
//!
//! Their fields are private, but they serialize. Unknown fields are refused: a later Burn may add an
//! option, and training on without it would be wrong in silence.

use burn::grad_clipping::GradientClippingConfig;
use burn::optim::decay::WeightDecayConfig;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::error::OffloadError;
use crate::optimize::{Adam, GradientClip, WeightDecay};

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

fn fields<T: DeserializeOwned>(config: &impl serde::Serialize) -> Result<T, OffloadError> {
    serde_json::to_value(config)
        .and_then(serde_json::from_value)
        .map_err(|error| OffloadError::Config {
            reason: error.to_string(),
        })
}

/// The rule of an `AdamConfig`.
pub(super) fn adam(config: &burn::optim::AdamConfig) -> Result<Adam, OffloadError> {
    let f: AdamFields = fields(config)?;
    checked(Adam {
        beta_1: f.beta_1,
        beta_2: f.beta_2,
        epsilon: f.epsilon,
        weight_decay: match f.weight_decay {
            Some(decay) => WeightDecay::L2(decay.penalty),
            None => WeightDecay::None,
        },
        amsgrad: f.amsgrad,
        clip: f.grad_clipping.map(clip),
    })
}

/// The rule of an `AdamWConfig`.
pub(super) fn adamw(config: &burn::optim::AdamWConfig) -> Result<Adam, OffloadError> {
    let f: AdamWFields = fields(config)?;
    checked(Adam {
        beta_1: f.beta_1,
        beta_2: f.beta_2,
        epsilon: f.epsilon,
        weight_decay: match f.cautious_weight_decay {
            true => WeightDecay::Cautious(f.weight_decay),
            false => WeightDecay::Decoupled(f.weight_decay),
        },
        amsgrad: f.amsgrad,
        clip: f.grad_clipping.map(clip),
    })
}

fn clip(config: GradientClippingConfig) -> GradientClip {
    match config {
        GradientClippingConfig::Value(value) => GradientClip::Value(value),
        GradientClippingConfig::Norm(norm) => GradientClip::Norm(norm),
    }
}

fn checked(rule: Adam) -> Result<Adam, OffloadError> {
    let expect = |holds: bool, name, value: f32, expected| match holds {
        true => Ok(()),
        false => Err(OffloadError::OutOfRange {
            name,
            value: value.to_string(),
            expected,
        }),
    };
    let beta = |value: f32| (0.0..1.0).contains(&value);
    expect(
        beta(rule.beta_1),
        "beta_1",
        rule.beta_1,
        "at least 0 and below 1",
    )?;
    expect(
        beta(rule.beta_2),
        "beta_2",
        rule.beta_2,
        "at least 0 and below 1",
    )?;
    let epsilon = rule.epsilon;
    expect(
        epsilon >= 0.0 && epsilon.is_finite(),
        "epsilon",
        epsilon,
        "finite and at least 0",
    )?;
    let decay = match rule.weight_decay {
        WeightDecay::None => 0.0,
        WeightDecay::L2(decay) | WeightDecay::Decoupled(decay) | WeightDecay::Cautious(decay) => {
            decay
        }
    };
    expect(decay.is_finite(), "weight_decay", decay, "a finite number")?;
    if let Some(GradientClip::Value(limit) | GradientClip::Norm(limit)) = rule.clip {
        expect(limit > 0.0, "grad_clipping", limit, "above 0")?;
    }
    Ok(rule)
}

#[cfg(test)]
mod tests {
    use burn::optim::{AdamConfig, AdamWConfig};

    use super::*;

    #[test]
    fn every_option_of_adamw_arrives() {
        let config = AdamWConfig::new()
            .with_beta_1(0.8)
            .with_beta_2(0.95)
            .with_epsilon(1e-7)
            .with_weight_decay(0.25)
            .with_cautious_weight_decay(true)
            .with_amsgrad(true)
            .with_grad_clipping(Some(GradientClippingConfig::Norm(2.0)));
        let expected = Adam {
            beta_1: 0.8,
            beta_2: 0.95,
            epsilon: 1e-7,
            weight_decay: WeightDecay::Cautious(0.25),
            amsgrad: true,
            clip: Some(GradientClip::Norm(2.0)),
        };
        assert_eq!(adamw(&config).unwrap(), expected);
    }

    #[test]
    fn every_option_of_adam_arrives() {
        let config = AdamConfig::new()
            .with_beta_1(0.8)
            .with_beta_2(0.95)
            .with_epsilon(1e-7)
            .with_weight_decay(Some(WeightDecayConfig::new(0.25)))
            .with_amsgrad(true)
            .with_grad_clipping(Some(GradientClippingConfig::Value(2.0)));
        let expected = Adam {
            beta_1: 0.8,
            beta_2: 0.95,
            epsilon: 1e-7,
            weight_decay: WeightDecay::L2(0.25),
            amsgrad: true,
            clip: Some(GradientClip::Value(2.0)),
        };
        assert_eq!(adam(&config).unwrap(), expected);
    }

    /// acceptance.md, CPU step 14: what a config leaves out has Burn's defaults.
    #[test]
    fn options_left_out_have_burns_defaults() {
        let rule = adamw(&AdamWConfig::new().with_weight_decay(0.0)).unwrap();
        assert_eq!((rule.beta_1, rule.beta_2, rule.epsilon), (0.9, 0.999, 1e-5));
        assert_eq!((rule.amsgrad, rule.clip), (false, None));
        assert_eq!(
            adam(&AdamConfig::new()).unwrap().weight_decay,
            WeightDecay::None
        );
    }

    #[test]
    fn values_that_cannot_work_are_named() {
        let error = adamw(&AdamWConfig::new().with_beta_2(1.0)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "`beta_2` is 1, expected at least 0 and below 1"
        );
        for config in [
            AdamWConfig::new().with_beta_1(-0.1),
            AdamWConfig::new().with_epsilon(-1e-8),
            AdamWConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(0.0))),
        ] {
            assert!(matches!(
                adamw(&config),
                Err(OffloadError::OutOfRange { .. })
            ));
        }
    }
}
