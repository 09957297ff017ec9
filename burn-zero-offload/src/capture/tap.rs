//! The autodiff node that lets the gradient out.

use std::fmt;
use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, TensorMetadata};

use super::ladder;
use super::ops::TapOps;
use super::readout::Readout;
use super::sink::{TapTarget, Use};

#[derive(Debug)]
struct Tap;

/// What a tap keeps until backward.
#[derive(Clone)]
struct TapState {
    target: TapTarget,
    this_use: Arc<Use>,
    _alive: Arc<()>,
}

impl fmt::Debug for TapState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.target.fmt(f)
    }
}

impl<B: Readout> Backward<B, 2> for Tap {
    type State = TapState;

    fn backward(self, ops: Ops<TapState, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let TapState {
            target, this_use, ..
        } = ops.state;
        ladder::fired(target.passes.sink.id());
        let scale = target.passes.enter(grads);
        drop(this_use);
        let gradient = grads.consume::<B>(&ops.node);
        if let [Some(leaf), _] = &ops.parents {
            let (shape, dtype, device) = (gradient.shape(), gradient.dtype(), gradient.device());
            let placeholder = target.placeholder.get::<B>(&shape, dtype, &device);
            grads.register::<B>(leaf.id, placeholder);
        }
        let gradient = B::read_out(gradient);
        let remaining = target.uses();
        let sink = &target.passes.sink;
        sink.arrived(target.slot, gradient, remaining, scale);
    }
}

impl<B: TapOps + Readout, C: CheckpointStrategy> TapOps for Autodiff<B, C> {
    fn tap(
        base: FloatTensor<Self>,
        value: FloatTensor<Self>,
        target: TapTarget,
    ) -> FloatTensor<Self> {
        let step = ladder::next_step(target.passes.sink.id());
        let (_, leaf) = base.into_parts();
        let (primitive, _) = value.into_parts();
        let tap = Backward::<B, 2>::prepare::<C>(Tap, [leaf, step.rung]);
        match tap.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(
                TapState {
                    this_use: target.record_use(),
                    target,
                    _alive: step.alive,
                },
                primitive,
            ),
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }
}
