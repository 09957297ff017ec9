//! Training steps of the GPT of `train-gpt`, on tokens that are always the same.

use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::args::Setting;
use crate::model::{Gpt, GptConfig};
use crate::numbers::Numbers;

/// The GPT whose speed is measured, and the sequences of a batch.
pub fn config(setting: &Setting) -> (GptConfig, usize) {
    let small = GptConfig {
        vocab: 16,
        layers: 1,
        width: 32,
        heads: 2,
        context: 8,
    };
    let full = GptConfig {
        vocab: 8192,
        layers: 12,
        width: 1024,
        heads: 16,
        context: 512,
    };
    setting.size((small, 2), (full, 8))
}

/// A batch: tokens, and those that follow them.
#[derive(Clone)]
pub struct Tokens {
    inputs: Tensor<2, Int>,
    targets: Tensor<2, Int>,
}

impl Tokens {
    /// `batch` sequences as long as the model's context.
    pub fn new(config: &GptConfig, batch: usize, device: &Device) -> Self {
        let mut numbers = Numbers::new(7);
        let (vocab, context) = (config.vocab as u64, config.context);
        let all: Vec<i32> = (0..batch * context + 1)
            .map(|_| numbers.below(vocab) as i32)
            .collect();
        let tensor = |values: &[i32]| {
            let data = TensorData::new(values.to_vec(), [batch, context]);
            Tensor::<2, Int>::from_data(data, device)
        };
        Self {
            inputs: tensor(&all[..batch * context]),
            targets: tensor(&all[1..]),
        }
    }

    /// The loss of `model` on them.
    pub fn loss(&self, model: &Gpt) -> Tensor<1> {
        model.loss(self.inputs.clone(), self.targets.clone())
    }
}

/// The optimizer of all runs that are compared.
pub fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_weight_decay(0.1)
}

/// One step of Burn's plain training loop; returns the loss from before it.
pub fn step(
    optimizer: &mut ModuleOptimizer,
    lr: f64,
    model: Gpt,
    tokens: &Tokens,
) -> (Gpt, Tensor<1>) {
    let loss = tokens.loss(&model);
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    (optimizer.step(lr, model, grads), loss.inner())
}
