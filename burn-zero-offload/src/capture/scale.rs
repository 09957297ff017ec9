//! The operation that scales a loss.

use std::fmt;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::tensor::Tensor;

use super::pass::Passes;

/// The operation for every backend.
#[backend_extension(Flex, Cube: cfg(feature = "cubecl-backend"), Autodiff)]
pub(super) trait ScaleOps: Backend {
    /// The identity, whose gradient is multiplied by the loss scale.
    fn scale_gradient(tensor: FloatTensor<Self>, passes: Passes) -> FloatTensor<Self> {
        let _ = passes;
        tensor
    }
}

impl ScaleOps for Flex {}

#[cfg(feature = "cubecl-backend")]
impl ScaleOps for burn_cubecl::Cube {}

/// Scales the gradients of `loss` without changing its value.
pub(crate) fn scale<const D: usize>(loss: Tensor<D>, passes: Passes) -> Tensor<D> {
    let scaled = <Dispatch as ScaleOps>::scale_gradient(loss.into_dispatch(), passes);
    Tensor::from_dispatch(scaled)
}

#[derive(Debug)]
struct Scale;

#[derive(Clone)]
struct ScaleState(Passes);

impl fmt::Debug for ScaleState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ScaleState {{ sink: {} }}", self.0.sink.id())
    }
}

impl<B: Backend> Backward<B, 1> for Scale {
    type State = ScaleState;

    fn backward(self, ops: Ops<ScaleState, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let scale = ops.state.0.enter_scaled(grads);
        let gradient = grads.consume::<B>(&ops.node);
        if let [Some(parent)] = &ops.parents {
            grads.register::<B>(parent.id, times::<B>(gradient, scale));
        }
    }
}

/// Multiplies by a power of two that may be beyond the largest f16, in factors that are not.
fn times<B: Backend>(mut gradient: FloatTensor<B>, mut scale: f32) -> FloatTensor<B> {
    const LARGEST: f32 = 32768.0;
    while scale > LARGEST {
        gradient = B::float_mul_scalar(gradient, LARGEST.into());
        scale /= LARGEST;
    }
    if scale == 1.0 {
        return gradient;
    }
    B::float_mul_scalar(gradient, scale.into())
}

impl<B: ScaleOps, C: CheckpointStrategy> ScaleOps for Autodiff<B, C> {
    fn scale_gradient(tensor: FloatTensor<Self>, passes: Passes) -> FloatTensor<Self> {
        let (primitive, loss) = tensor.into_parts();
        let scale = Backward::<B, 1>::prepare::<C>(Scale, [loss]);
        match scale.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(ScaleState(passes), primitive),
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::f16;

    use super::*;

    #[test]
    fn scales_beyond_the_largest_f16_multiply_f16_exactly() {
        let scaled = |value: f32, scale: f32| {
            let data = burn::tensor::TensorData::from([f16::from_f32(value)]);
            use burn::backend::ops::FloatTensorOps;
            let tensor = Flex::float_from_data(data, &Default::default());
            let data = burn::tensor::read_sync(Flex::float_into_data(times::<Flex>(tensor, scale)));
            data.unwrap().iter::<f32>().next().unwrap()
        };
        assert_eq!(scaled(2f32.powi(-20), 65536.0), 2f32.powi(-4));
        assert_eq!(scaled(2f32.powi(-24), 2f32.powi(33)), 512.0);
        assert_eq!(scaled(3.0, 0.5), 1.5);
        assert_eq!(scaled(1.0, 65536.0), f32::INFINITY);
    }
}
