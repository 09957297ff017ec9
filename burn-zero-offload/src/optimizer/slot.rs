//! Burn's `ModuleOptimizer` asks one optimizer per parameter; each of ours knows its slot.

use std::sync::Arc;

use burn::optim::{
    DynOptimizer, DynState, LearningRate, Optimizer, StateSink, StateSource, join_path,
};
use burn::tensor::kind::BridgeTensor;
use burn::tensor::{Device, Tensor, TensorData};

use crate::engine::Engine;
use crate::host::SavedState;
use crate::optimize::ScalerState;
use crate::rank::with_rank;

/// The optimizer of one parameter: hands its update to the engine.
///
/// [`DynOptimizer`] is implemented directly because [`Optimizer`] restores state without a `self`,
/// and the state of this one lives in its engine.
pub(super) struct SlotOptimizer {
    pub(super) engine: Arc<Engine>,
    pub(super) slot: usize,
}

/// Stands for state that lives in the engine.
#[derive(Clone)]
struct InEngine;

/// Names in records of what Burn's own optimizers do not have. The state of the rules has Burn's names,
/// so that optimizer records can be loaded with and without offload.
mod names {
    pub(super) const PREFIX: &str = "offload";
    pub(super) const TIME: &str = "time";
    /// Of 8-bit state; its values are with those of Burn's names.
    pub(super) const SCALES: &str = "offload.scales";
    pub(super) const ROUNDS: &str = "rounds";
    pub(super) const SCALE: &str = "loss_scale";
    pub(super) const GOOD_STEPS: &str = "good_steps";
    pub(super) const TOLERATED: &str = "tolerated";
    pub(super) const CONSECUTIVE_SKIPS: &str = "consecutive_skips";
    pub(super) const SKIPS: &str = "skips";
    pub(super) const LAST_OVERFLOW: &str = "last_overflow";
}

impl DynOptimizer for SlotOptimizer {
    fn step_dyn(
        &self,
        rank: usize,
        lr: LearningRate,
        tensor: BridgeTensor,
        grad: BridgeTensor,
        _state: Option<DynState>,
    ) -> (BridgeTensor, Option<DynState>) {
        let updated = with_rank!(rank, D => {
            let (weights, gradient) = (Tensor::<D>::from_bridge(tensor), Tensor::from_bridge(grad));
            self.engine.update(self.slot, lr, weights, gradient).into_bridge()
        });
        (updated, Some(DynState::create(InEngine, rank)))
    }

    fn to_device_dyn(&self, state: DynState, _device: &Device) -> DynState {
        state
    }

    fn state_flatten(&self, prefix: &str, state: &DynState, out: &mut StateSink) {
        let layout = self.engine.layout(self.slot);
        debug_assert_eq!(layout.shape.num_dims(), state.rank());
        let SavedState {
            time,
            state,
            scales,
        } = self.engine.save_state(self.slot);
        let time = time.unwrap_or_default();
        let values: Vec<Vec<f32>> = state.into_iter().flatten().collect();
        // Before the first update there is no state, as in Burn; every round so far was skipped.
        if time > 0 {
            let rule = &layout.rule;
            out.push_scalar(prefix, rule.time(), (time as usize).into());
            let derived = rule.derived(&values);
            let ours = join_path(prefix, names::SCALES);
            for (name, scales) in rule.state().iter().zip(scales) {
                if let Some(scales) = scales {
                    let len = scales.len();
                    out.push_tensor(&ours, name, TensorData::new(scales, [len]));
                }
            }
            let named = rule.state().iter().copied().zip(values).chain(derived);
            for (name, values) in named {
                let data = TensorData::new(values, layout.shape.clone());
                out.push_tensor(prefix, name, data);
            }
        }
        // Burn's records are lists of parameters: what belongs to all is with each of them.
        let prefix = join_path(prefix, names::PREFIX);
        out.push_scalar(&prefix, names::TIME, time.into());
        let (scaler, rounds) = self.engine.save_scaler();
        for (name, count) in [
            (names::ROUNDS, rounds),
            (names::GOOD_STEPS, scaler.good_steps),
            (names::TOLERATED, scaler.tolerated),
            (names::CONSECUTIVE_SKIPS, scaler.consecutive_skips),
            (names::SKIPS, scaler.skips),
            (names::LAST_OVERFLOW, scaler.last_overflow),
        ] {
            out.push_scalar(&prefix, name, count.into());
        }
        out.push_scalar(&prefix, names::SCALE, scaler.scale.into());
    }

    fn state_unflatten(
        &self,
        rank: usize,
        prefix: &str,
        src: &mut StateSource,
        _device: &Device,
    ) -> Option<DynState> {
        let rule = &self.engine.layout(self.slot).rule;
        let ours = join_path(prefix, names::PREFIX);
        let mut count = |prefix: &str, name| -> Option<u64> {
            let count = usize::try_from(src.take_scalar(prefix, name)?).ok()?;
            Some(count as u64)
        };
        let time = count(&ours, names::TIME).or_else(|| count(prefix, rule.time()));
        let rounds = count(&ours, names::ROUNDS);
        let counts = [
            names::GOOD_STEPS,
            names::TOLERATED,
            names::CONSECUTIVE_SKIPS,
            names::SKIPS,
            names::LAST_OVERFLOW,
        ]
        .map(|name| count(&ours, name));
        let scale = src.take_scalar(&ours, names::SCALE);
        let scale = scale.and_then(|scale| f64::try_from(scale).ok());

        let mut take = |prefix: &str, name| {
            let data = src.take_tensor(prefix, name)?.try_cast_as::<f32>().ok()?;
            data.try_to_vec::<f32>().ok()
        };
        let state = rule.state().iter().map(|name| take(prefix, name)).collect();
        let ours = join_path(prefix, names::SCALES);
        let scales = rule.state().iter().map(|name| take(&ours, name)).collect();
        let saved = SavedState {
            time,
            state,
            scales,
        };
        let restored = self.engine.restore_state(self.slot, saved);
        if !restored {
            return None;
        }
        if let (
            Some(scale),
            Some(rounds),
            [
                Some(good),
                Some(tolerated),
                Some(row),
                Some(skips),
                Some(last),
            ],
        ) = (scale, rounds, counts)
        {
            let scaler = ScalerState {
                scale: scale as f32,
                good_steps: good,
                tolerated,
                consecutive_skips: row,
                skips,
                last_overflow: last,
            };
            self.engine.restore_scaler(scaler, rounds);
        }
        Some(DynState::create(InEngine, rank))
    }
}

/// What is left for parameters without a slot.
#[derive(Clone)]
pub(super) struct NotOffloaded;

impl Optimizer for NotOffloaded {
    type State<const D: usize> = ();

    fn step<const D: usize>(
        &self,
        _lr: LearningRate,
        tensor: Tensor<D>,
        _grad: Tensor<D>,
        _state: Option<()>,
    ) -> (Tensor<D>, Option<()>) {
        panic!(
            "a parameter of shape {:?} got a gradient but has no master weights: it was frozen, or \
             not part of the model, when `init` was called. Unfreeze and add parameters before \
             `init`, and give `step` the model that `init` returned",
            tensor.shape().as_slice()
        )
    }

    fn to_device<const D: usize>(_state: (), _device: &Device) {}
}
