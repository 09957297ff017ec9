//! Two vectors whose gradients a test chooses.

use burn::module::{Module, Param};
use burn::tensor::{Device, FloatDType, Tensor};

/// Weights `a` and `b`. Their type can be anything; the loss is computed in `f32`.
#[derive(Module, Debug)]
pub struct Vectors {
    pub a: Param<Tensor<1>>,
    pub b: Param<Tensor<1>>,
}

impl Vectors {
    /// All weights are `value`.
    pub fn new(value: f32, len: [usize; 2], device: &Device) -> Self {
        let param = |len| Param::from_tensor(Tensor::full([len], value, device));
        Self {
            a: param(len[0]),
            b: param(len[1]),
        }
    }

    /// A loss whose gradients are `a` and `b`, element by element.
    pub fn loss(&self, a: &[f32], b: &[f32]) -> Tensor<1> {
        with_gradient(&self.a, a) + with_gradient(&self.b, b)
    }
}

/// A loss whose gradient at `param` is `gradient`.
pub fn with_gradient(param: &Param<Tensor<1>>, gradient: &[f32]) -> Tensor<1> {
    let weights = param.val().cast(FloatDType::F32);
    let gradient = Tensor::from_floats(gradient, &weights.device());
    (weights * gradient).sum()
}
