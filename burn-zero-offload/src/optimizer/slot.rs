//! Burn's `ModuleOptimizer` asks one optimizer per parameter; each of ours knows its slot.

use std::sync::Arc;

use burn::optim::{
    DynOptimizer, DynState, LearningRate, Optimizer, StateSink, StateSource, join_path,
};
use burn::tensor::kind::BridgeTensor;
use burn::tensor::{Device, Tensor, TensorData};

use crate::engine::Engine;
use crate::host::SavedState;

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

/// Names of the state in records: those of Burn's Adam and AdamW, so that optimizer records can be
/// loaded with and without offload.
mod names {
    pub(super) const PREFIX: &str = "momentum";
    pub(super) const TIME: &str = "time";
    pub(super) const FIRST: &str = "moment_1";
    pub(super) const SECOND: &str = "moment_2";
    pub(super) const LARGEST: &str = "max_moment_2";
}

macro_rules! with_rank {
    ($rank:expr, $d:ident => $body:expr, [$($n:literal)*]) => {
        match $rank {
            $($n => { const $d: usize = $n; $body })*
            other => panic!("Burn has no tensors of rank {other}"),
        }
    };
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
        }, [1 2 3 4 5 6 7 8]);
        (updated, Some(DynState::create(InEngine, rank)))
    }

    fn to_device_dyn(&self, state: DynState, _device: &Device) -> DynState {
        state
    }

    fn state_flatten(&self, prefix: &str, state: &DynState, out: &mut StateSink) {
        let SavedState {
            time,
            first,
            second,
            largest,
        } = self.engine.save_state(self.slot);
        let prefix = join_path(prefix, names::PREFIX);
        let shape = self.engine.layout(self.slot).shape.clone();
        debug_assert_eq!(shape.num_dims(), state.rank());
        out.push_scalar(&prefix, names::TIME, (time as usize).into());
        let mut push = |name, values: Vec<f32>| {
            out.push_tensor(&prefix, name, TensorData::new(values, shape.clone()));
        };
        push(names::FIRST, first);
        push(names::SECOND, second);
        if let Some(largest) = largest {
            push(names::LARGEST, largest);
        }
    }

    fn state_unflatten(
        &self,
        rank: usize,
        prefix: &str,
        src: &mut StateSource,
        _device: &Device,
    ) -> Option<DynState> {
        let prefix = join_path(prefix, names::PREFIX);
        let time = usize::try_from(src.take_scalar(&prefix, names::TIME)?).ok()?;
        let mut take = |name| {
            let data = src.take_tensor(&prefix, name)?.try_cast_as::<f32>().ok()?;
            data.try_to_vec::<f32>().ok()
        };
        let saved = SavedState {
            time: time as u64,
            first: take(names::FIRST)?,
            second: take(names::SECOND)?,
            largest: take(names::LARGEST),
        };
        self.engine
            .restore_state(self.slot, saved)
            .then(|| DynState::create(InEngine, rank))
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
