//! The tap as a backend operation.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, Flex, backend_extension};
use burn::tensor::Tensor;

use super::sink::TapTarget;

/// Operations that offloading adds to a backend.
#[backend_extension(Flex, Cube: cfg(feature = "cubecl-backend"), Autodiff)]
pub(super) trait TapOps: Backend {
    /// `value`, the newest weights, in place of `base`, what the parameter holds; they are the same unless
    /// an update is ahead of the model. With autodiff it hands the gradient of this use to `target` in
    /// backward; without, there is nothing to tap.
    fn tap(
        base: FloatTensor<Self>,
        value: FloatTensor<Self>,
        target: TapTarget,
    ) -> FloatTensor<Self> {
        let _ = (base, target);
        value
    }
}

impl TapOps for Flex {}

#[cfg(feature = "cubecl-backend")]
impl TapOps for burn_cubecl::Cube {}

/// Taps one use of a parameter that holds `base` and whose weights are `value`.
pub(super) fn tap<const D: usize>(
    base: Tensor<D>,
    value: Tensor<D>,
    target: TapTarget,
) -> Tensor<D> {
    let (base, value) = (base.into_dispatch(), value.into_dispatch());
    Tensor::from_dispatch(<Dispatch as TapOps>::tap(base, value, target))
}
