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

/// A decay rate of a running mean.
fn rate(name: &'static str, value: f32) -> Result<f32, OffloadError> {
    let holds = (0.0..1.0).contains(&value);
    OffloadError::unless(holds, name, value, "at least 0 and below 1").map(|()| value)
}

fn not_negative(name: &'static str, value: f32) -> Result<f32, OffloadError> {
    let holds = value >= 0.0 && value.is_finite();
    OffloadError::unless(holds, name, value, "finite and at least 0").map(|()| value)
}

fn decay(value: f32) -> Result<f32, OffloadError> {
    let holds = value.is_finite();
    OffloadError::unless(holds, "weight_decay", value, "a finite number").map(|()| value)
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
    OffloadError::unless(limit > 0.0, "grad_clipping", limit, "above 0").map(|()| Some(clip))
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
            OffloadError::unless(
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
    OffloadError::unless(holds, "lr_decay", f.lr_decay, "finite and at least 0")?;
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
mod tests;
