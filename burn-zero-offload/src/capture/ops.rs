//! The tap as a backend operation.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, Flex, backend_extension};
use burn::tensor::Tensor;

use super::sink::TapTarget;

/// Operations that offloading adds to a backend.
#[backend_extension(Flex, Cube: cfg(feature = "cubecl-backend"), Autodiff)]
pub(super) trait TapOps: Backend {
    /// The identity. With autodiff it hands the gradient of this use to `target` in backward;
    /// without, there is nothing to tap.
    fn tap(tensor: FloatTensor<Self>, target: TapTarget) -> FloatTensor<Self> {
        let _ = target;
        tensor
    }
}

impl TapOps for Flex {}

#[cfg(feature = "cubecl-backend")]
impl TapOps for burn_cubecl::Cube {}

/// Taps one use of a parameter.
pub(super) fn tap<const D: usize>(base: Tensor<D>, target: TapTarget) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as TapOps>::tap(base.into_dispatch(), target))
}
