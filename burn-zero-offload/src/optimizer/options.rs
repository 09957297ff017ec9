//! What an `OffloadConfig` means to the engine.

use burn::tensor::Device;

use crate::config::{Accumulation, DynamicLossScaleConfig, LossScaleConfig, OffloadConfig};
use crate::engine::{EngineOptions, RoundPolicy};
use crate::error::OffloadError;
use crate::optimize::{
    LossScale, Precision, SimdLevel, StatePrecision, UnsupportedSimd, is_power_of_two,
};
use crate::upload::UploadOptions;

/// Refuses values that cannot work, before anything is moved.
pub(super) fn check(config: &OffloadConfig) -> Result<(), OffloadError> {
    for (name, value) in [
        ("threads", config.threads),
        ("upload_tile", config.upload_tile),
        ("micro_batches", config.micro_batches),
    ] {
        OffloadError::unless(value != Some(0), name, 0, "at least 1, or left out")?;
    }
    if let Some(limit) = config.max_grad_norm {
        let holds = limit > 0.0 && limit.is_finite();
        OffloadError::unless(
            holds,
            "max_grad_norm",
            limit,
            "a finite number above 0, or left out",
        )?;
    }
    if let Some(lambda) = config.delay_compensation {
        let holds = lambda >= 0.0 && lambda.is_finite();
        let expected = "finite and at least 0, or left out";
        OffloadError::unless(holds, "delay_compensation", lambda, expected)?;
    }
    config
        .loss_scale
        .as_ref()
        .map_or(Ok(()), |scale| loss_scale(scale).map(|_| ()))
}

/// How weights are sent.
pub(super) fn upload(config: &OffloadConfig) -> UploadOptions {
    UploadOptions {
        tile: config.upload_tile,
        pinned: config.pinned,
    }
}

/// Whether `device` may be a GPU, which the threads of the step should be near.
pub(super) fn on_a_gpu(device: &Device) -> bool {
    cfg!(feature = "cuda") && *device != Device::flex()
}

/// Forces an instruction set where the config does not.
const SIMD_VARIABLE: &str = "BURN_OFFLOAD_SIMD";

/// The instruction set asked for by config or environment, or the best there is.
pub(super) fn simd(config: &OffloadConfig) -> Result<SimdLevel, OffloadError> {
    choose_simd(config.simd, std::env::var(SIMD_VARIABLE).ok())
}

fn choose_simd(
    asked: Option<SimdLevel>,
    variable: Option<String>,
) -> Result<SimdLevel, OffloadError> {
    let named = |name: String| {
        let level = SimdLevel::ALL
            .into_iter()
            .find(|level| format!("{level:?}").eq_ignore_ascii_case(name.trim()));
        level.ok_or(OffloadError::OutOfRange {
            name: SIMD_VARIABLE,
            value: name,
            expected: "`scalar`, `avx2`, `avx512` or `neon`, or not to be set",
        })
    };
    let level = match (asked, variable.filter(|name| !name.trim().is_empty())) {
        (Some(level), _) => level,
        (None, Some(name)) => named(name)?,
        (None, None) => return Ok(SimdLevel::best()),
    };
    let missing = |UnsupportedSimd(level)| OffloadError::UnsupportedSimd(level);
    level.require().map_err(missing)
}

/// The options of an engine whose weights are in `precision`, with `groups` groups; `config` has been
/// checked.
pub(super) fn of_engine(
    config: &OffloadConfig,
    simd: SimdLevel,
    precision: Precision,
    groups: usize,
) -> Result<EngineOptions, OffloadError> {
    let scale = match (&config.loss_scale, precision) {
        (Some(scale), _) => loss_scale(scale)?,
        (None, Precision::F16) => loss_scale(&LossScaleConfig::dynamic())?,
        (None, _) => LossScale::Static(1.0),
    };
    Ok(EngineOptions {
        simd,
        seed: config.seed,
        kept: config
            .state_precision
            .unwrap_or(StatePrecision::default_for(precision))
            .of_weights(precision),
        in_flight: config.in_flight,
        upload: upload(config),
        policy: RoundPolicy {
            max_grad_norm: config.max_grad_norm.map(f64::from),
            mean: config.accumulation == Accumulation::Mean,
            micro_batches: config.micro_batches,
            max_consecutive_skips: config.max_consecutive_skips,
        },
        schedule: config.schedule,
        compensation: config.delay_compensation,
        loss_scale: scale,
        verify: config.verify,
        groups,
    })
}

fn loss_scale(config: &LossScaleConfig) -> Result<LossScale, OffloadError> {
    let config = match config {
        LossScaleConfig::Off => return Ok(LossScale::Static(1.0)),
        LossScaleConfig::Static(scale) => {
            return power_of_two("loss_scale", *scale).map(LossScale::Static);
        }
        LossScaleConfig::Dynamic(config) => config,
    };
    let DynamicLossScaleConfig {
        initial,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis,
        minimum,
        maximum,
    } = *config;
    for (name, value) in [
        ("loss_scale.initial", initial),
        ("loss_scale.growth_factor", growth_factor),
        ("loss_scale.backoff_factor", backoff_factor),
        ("loss_scale.minimum", minimum),
        ("loss_scale.maximum", maximum),
    ] {
        power_of_two(name, value)?;
    }
    let at_least_one = "at least 1";
    OffloadError::unless(
        growth_factor >= 1.0,
        "loss_scale.growth_factor",
        growth_factor,
        at_least_one,
    )?;
    OffloadError::unless(
        backoff_factor < 1.0,
        "loss_scale.backoff_factor",
        backoff_factor,
        "below 1",
    )?;
    OffloadError::unless(
        growth_interval > 0,
        "loss_scale.growth_interval",
        growth_interval,
        at_least_one,
    )?;
    OffloadError::unless(
        hysteresis > 0,
        "loss_scale.hysteresis",
        hysteresis,
        at_least_one,
    )?;
    let holds = (minimum..=maximum).contains(&initial);
    OffloadError::unless(
        holds,
        "loss_scale.initial",
        initial,
        "between `minimum` and `maximum`",
    )?;
    Ok(LossScale::Dynamic {
        initial,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis,
        minimum,
        maximum,
    })
}

/// Other numbers would round the gradients; far beyond these bounds `f32` sums of them would overflow.
fn power_of_two(name: &'static str, value: f32) -> Result<f32, OffloadError> {
    let range = 2f32.powi(-60)..=2f32.powi(60);
    let holds = range.contains(&value) && is_power_of_two(value);
    OffloadError::unless(holds, name, value, "a power of two from 2^-60 to 2^60").map(|()| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(config: OffloadConfig) -> String {
        match check(&config) {
            Err(OffloadError::OutOfRange { name, .. }) => name.to_string(),
            other => panic!("{other:?}"),
        }
    }

    /// acceptance.md, CPU step 8: an instruction set can be forced, by config or environment.
    #[test]
    fn the_config_wins_over_the_environment_and_that_over_the_best() {
        let named = |name: &str| Some(name.to_string());
        let scalar = Some(SimdLevel::Scalar);
        assert_eq!(choose_simd(None, None).unwrap(), SimdLevel::best());
        assert_eq!(choose_simd(None, named(" ")).unwrap(), SimdLevel::best());
        assert_eq!(
            choose_simd(None, named("scalar")).unwrap(),
            SimdLevel::Scalar
        );
        assert_eq!(
            choose_simd(None, named(" SCALAR ")).unwrap(),
            SimdLevel::Scalar
        );
        assert_eq!(
            choose_simd(scalar, named("nonsense")).unwrap(),
            SimdLevel::Scalar
        );
        let error = choose_simd(None, named("sse9")).unwrap_err().to_string();
        assert!(
            error.contains("BURN_OFFLOAD_SIMD") && error.contains("sse9"),
            "{error}"
        );
        let foreign = if cfg!(target_arch = "x86_64") {
            "neon"
        } else {
            "avx2"
        };
        let error = choose_simd(None, named(foreign)).unwrap_err();
        assert!(matches!(error, OffloadError::UnsupportedSimd(_)), "{error}");
    }

    #[test]
    fn options_that_cannot_work_are_named() {
        let config = OffloadConfig::new;
        assert_eq!(
            refused(config().with_micro_batches(Some(0))),
            "micro_batches"
        );
        for limit in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert_eq!(
                refused(config().with_max_grad_norm(Some(limit))),
                "max_grad_norm"
            );
        }
        let scale = |scale| refused(config().with_loss_scale(Some(scale)));
        for value in [0.0, 3.0, -2.0, f32::NAN, f32::INFINITY, 1e-30] {
            assert_eq!(scale(LossScaleConfig::Static(value)), "loss_scale");
        }
        let dynamic = DynamicLossScaleConfig::new;
        for (config, name) in [
            (dynamic().with_initial(1000.0), "loss_scale.initial"),
            (dynamic().with_initial(0.5), "loss_scale.initial"),
            (
                dynamic().with_growth_factor(0.5),
                "loss_scale.growth_factor",
            ),
            (
                dynamic().with_backoff_factor(1.0),
                "loss_scale.backoff_factor",
            ),
            (
                dynamic().with_growth_interval(0),
                "loss_scale.growth_interval",
            ),
            (dynamic().with_hysteresis(0), "loss_scale.hysteresis"),
        ] {
            assert_eq!(scale(LossScaleConfig::Dynamic(config)), name);
        }
    }

    /// acceptance.md, loss scaling 38: any subset of options leaves the documented defaults to the rest.
    #[test]
    fn options_left_out_have_the_documented_defaults() {
        let dynamic = |config| loss_scale(&LossScaleConfig::Dynamic(config)).unwrap();
        let expected = LossScale::Dynamic {
            initial: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 100,
            hysteresis: 1,
            minimum: 1.0,
            maximum: 16_777_216.0,
        };
        assert_eq!(
            dynamic(DynamicLossScaleConfig::new().with_growth_interval(100)),
            expected
        );
        let options =
            of_engine(&OffloadConfig::new(), SimdLevel::Scalar, Precision::F16, 1).unwrap();
        assert!(matches!(
            options.loss_scale,
            LossScale::Dynamic {
                growth_interval: 2000,
                ..
            }
        ));
        assert_eq!(options.policy.max_consecutive_skips, 50);
        assert_eq!(
            (options.policy.mean, options.policy.max_grad_norm),
            (false, None)
        );
    }

    #[test]
    fn only_f16_scales_by_default() {
        let scale = |precision, config: OffloadConfig| {
            let options = of_engine(&config, SimdLevel::Scalar, precision, 1).unwrap();
            options.loss_scale
        };
        for precision in [Precision::F32, Precision::Bf16] {
            assert_eq!(
                scale(precision, OffloadConfig::new()),
                LossScale::Static(1.0)
            );
            let on = OffloadConfig::new().with_loss_scale(Some(LossScaleConfig::dynamic()));
            assert!(matches!(scale(precision, on), LossScale::Dynamic { .. }));
        }
        let off = OffloadConfig::new().with_loss_scale(Some(LossScaleConfig::Off));
        assert_eq!(scale(Precision::F16, off), LossScale::Static(1.0));
    }
}
