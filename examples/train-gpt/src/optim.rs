//! The optimizer, with and without offload: all that offloading changes in this program.

use anyhow::Result;
use burn::module::ParamGroup;
use burn::optim::lr_scheduler::LrSchedulerConfig;
use burn::optim::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::optim::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::lr_scheduler::sequential::SequentialLrSchedulerConfig;
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn_zero_offload::{Offload, OffloadConfig, WithOffload};

use crate::config::{State, TrainConfig};
use crate::model::Gpt;

/// The learning rate starts and ends at this part of its highest value.
const LOWEST_LR: f64 = 0.1;

/// The optimizer for `model`, and the model as it is to be trained: with offload, its weights are
/// in half precision from here on, and their fp32 masters on the host.
///
/// # Errors
///
/// Fails if the device cannot compute in the dtype that was asked for.
pub fn optimizer(
    config: &TrainConfig,
    model: Gpt,
) -> Result<(Gpt, ModuleOptimizer, Option<Offload>)> {
    // A byte that the text rarely has gets hardly any gradient. With the usual 1e-8, Adam would blow
    // that up to full steps, and move embeddings that nothing is known about.
    let adamw = AdamWConfig::new().with_beta_2(0.95).with_epsilon(1e-6);
    let decayed = adamw.clone().with_weight_decay(config.weight_decay);
    // Decay is for matrices: pulling embeddings and the gains of norms to zero does not regularize.
    let undecayed = adamw.with_weight_decay(0.0);
    let undecayed_group = ParamGroup::from_any_predicates(vec!["embedding", "norm"]);

    if !config.offload {
        let optim = decayed
            .init()
            .with_group(undecayed_group, undecayed.build(), None);
        return Ok((model, optim, None));
    }

    let limit = config.max_grad_norm;
    let offload = OffloadConfig::new()
        .with_dtype(config.dtype.float_dtype())
        .with_state_precision(config.state.map(State::precision))
        .with_seed(config.seed)
        .with_max_grad_norm((limit > 0.0).then_some(limit))
        .with_schedule(config.update_schedule())
        .with_delay_compensation(config.delay_compensation);
    let (model, offload) = decayed
        .with_offload(offload)
        .with_group(undecayed_group, undecayed)
        .init(model)?;
    Ok((model, offload.optimizer(), Some(offload)))
}

/// Linear warm-up, then a cosine down to the lowest rate at the last step.
///
/// # Errors
///
/// Fails if the settings are out of the range that Burn's schedulers take.
pub fn scheduler(config: &TrainConfig) -> Result<ModuleLrScheduler> {
    let lowest = LOWEST_LR * config.lr;
    let warmup_steps = config.warmup_steps();
    let cosine = CosineAnnealingLrSchedulerConfig::new(
        config.lr,
        // The first step of the cosine is at the top, so it has one interval less than steps.
        (config.steps - warmup_steps - 1).max(1),
    )
    .with_min_lr(lowest);

    let scheduler = if warmup_steps == 0 {
        cosine.init()
    } else {
        let warmup = LinearLrSchedulerConfig::new(lowest, config.lr, warmup_steps);
        let parts = vec![
            LrSchedulerConfig::Linear(warmup),
            LrSchedulerConfig::Cosine(cosine),
        ];
        SequentialLrSchedulerConfig::new(parts, vec![warmup_steps]).init()
    };
    scheduler.map_err(anyhow::Error::msg)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(warmup: usize, steps: usize) -> Vec<f64> {
        let config = TrainConfig::new()
            .with_warmup(Some(warmup))
            .with_steps(steps)
            .with_lr(1e-2);
        let mut scheduler = scheduler(&config).unwrap();
        (0..steps).map(|_| scheduler.step().base()).collect()
    }

    #[test]
    fn the_rate_rises_and_falls() {
        let rates = rates(10, 100);
        assert!((rates[0] - 1e-3).abs() < 1e-9);
        assert!(rates[..=10].is_sorted_by(|a, b| a < b));
        assert!(
            (rates[10] - 1e-2).abs() < 1e-9,
            "the top follows the warm-up"
        );
        assert!(rates[10..].is_sorted_by(|a, b| a > b));
        assert!(
            (rates[99] - 1e-3).abs() < 1e-9,
            "the lowest rate is that of the last step"
        );
    }

    #[test]
    fn short_runs_have_a_schedule() {
        assert!((rates(0, 1)[0] - 1e-2).abs() < 1e-9);
        assert_eq!(rates(1, 2).len(), 2);
    }
}
