//! A stack of equal linear layers: many parameters, few activations.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Distribution, FloatDType, Tensor};

use crate::args::Setting;

/// Sizes of a [`Stack`] and of its input.
#[derive(Clone, Copy, Debug)]
pub struct StackConfig {
    /// Number of layers.
    pub layers: usize,
    /// Inputs and outputs of each.
    pub width: usize,
    /// Rows of the input.
    pub batch: usize,
}

/// The layers.
#[derive(Module, Debug)]
pub struct Stack {
    layers: Vec<Linear>,
}

impl StackConfig {
    /// A stack that shows what it is to show on a GPU, or a small one.
    pub fn of(setting: &Setting) -> Self {
        setting.size(
            Self {
                layers: 3,
                width: 256,
                batch: 32,
            },
            Self {
                layers: 24,
                width: 4096,
                batch: 64,
            },
        )
    }

    /// The model; weights are drawn when they are first used.
    pub fn init(&self, device: &Device) -> Stack {
        let layer = || {
            LinearConfig::new(self.width, self.width)
                .with_bias(false)
                .init(device)
        };
        Stack {
            layers: (0..self.layers).map(|_| layer()).collect(),
        }
    }

    /// An input.
    pub fn input(&self, device: &Device, dtype: FloatDType) -> Tensor<2> {
        let shape = [self.batch, self.width];
        Tensor::<2>::random(shape, Distribution::Default, device).cast(dtype)
    }

    /// Elements of all weights.
    pub fn parameters(&self) -> usize {
        self.layers * self.width * self.width
    }
}

impl Stack {
    /// A number that depends on all weights.
    pub fn loss(&self, input: Tensor<2>) -> Tensor<1> {
        let output = self
            .layers
            .iter()
            .fold(input, |x, layer| relu(layer.forward(x)));
        output.cast(FloatDType::F32).mean()
    }
}
