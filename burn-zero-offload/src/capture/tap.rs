//! The autodiff node that lets the gradient out.

use std::fmt;
use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, TensorMetadata};
use burn::tensor::{Shape, read_sync};

use super::ladder;
use super::ops::TapOps;
use super::sink::TapTarget;

#[derive(Debug)]
struct Tap;

/// What a tap keeps until backward.
#[derive(Clone)]
struct TapState {
    target: TapTarget,
    _alive: Arc<()>,
}

impl fmt::Debug for TapState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.target.fmt(f)
    }
}

impl<B: Backend> Backward<B, 2> for Tap {
    type State = TapState;

    fn backward(self, ops: Ops<TapState, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let TapTarget { sink, slot } = &ops.state.target;
        ladder::fired(sink.id());
        let gradient = grads.consume::<B>(&ops.node);
        let (device, dtype) = (gradient.device(), gradient.dtype());
        if let [Some(leaf), _] = &ops.parents {
            // No elements: it costs nothing to hold, sums of placeholders are placeholders, and
            // whoever takes it for a gradient meets a shape error instead of a silent zero.
            let nothing = Shape::from(vec![0; gradient.shape().num_dims()]);
            grads.register::<B>(leaf.id, B::float_zeros(nothing, &device, dtype.into()));
        }
        let read =
            move || read_sync(B::float_into_data(gradient)).map_err(|error| error.to_string());
        sink.arrived(*slot, Box::new(read));
    }
}

impl<B: TapOps, C: CheckpointStrategy> TapOps for Autodiff<B, C> {
    fn tap(tensor: FloatTensor<Self>, target: TapTarget) -> FloatTensor<Self> {
        let step = ladder::next_step(target.sink.id());
        let (primitive, leaf) = tensor.into_parts();
        let tap = Backward::<B, 2>::prepare::<C>(Tap, [leaf, step.rung]);
        match tap.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(
                TapState {
                    target,
                    _alive: step.alive,
                },
                primitive,
            ),
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }
}
