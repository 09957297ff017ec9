//! A small decoder-only transformer in the style of GPT-2.
//!
//! Nothing in here knows about offloading. Burn does not promote dtypes, so the one thing a model
//! that trains in half precision has to mind is that no `f32` constant meets an activation: masks
//! are booleans, scale factors are scalars, and the logits alone are cast to `f32`, for the loss.

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Embedding, EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig,
};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::{Bool, Device, FloatDType, Int, Tensor};

/// Standard deviation of the initial weights, as in GPT-2.
const INIT_STD: f64 = 0.02;

/// The shape of a [`Gpt`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GptConfig {
    /// Number of distinct tokens.
    pub vocab: usize,
    /// Number of transformer blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Number of attention heads; divides `width`.
    pub heads: usize,
    /// Longest sequence the model can look at.
    pub context: usize,
}

/// A decoder-only transformer whose output head shares the weights of the token embedding.
#[derive(Module, Debug)]
pub struct Gpt {
    token_embedding: Embedding,
    position_embedding: Param<Tensor<2>>,
    blocks: Vec<Block>,
    final_norm: LayerNorm,
}

/// A pre-norm transformer block.
#[derive(Module, Debug)]
struct Block {
    attention_norm: LayerNorm,
    attention: CausalAttention,
    mlp_norm: LayerNorm,
    mlp: Mlp,
}

/// Multi-head self-attention in which a position sees itself and the positions before it.
#[derive(Module, Debug)]
struct CausalAttention {
    /// Query, key and value projections in one matrix.
    qkv: Linear,
    output: Linear,
    heads: usize,
}

/// Two linear layers around a GELU.
#[derive(Module, Debug)]
struct Mlp {
    up: Linear,
    down: Linear,
}

/// Uses every parameter once.
struct DrawWeights;

impl ModuleVisitor for DrawWeights {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        param.val();
    }
}

impl GptConfig {
    /// Initialize a model on `device`.
    ///
    /// Burn draws a parameter when it is first used. Drawing all of them here, in one order, makes
    /// a seed stand for the same weights with offload and without.
    pub fn init(&self, device: &Device) -> Gpt {
        let model = self.init_lazily(device);
        model.visit(&mut DrawWeights);
        model
    }

    fn init_lazily(&self, device: &Device) -> Gpt {
        let normal = Initializer::Normal {
            mean: 0.0,
            std: INIT_STD,
        };
        Gpt {
            token_embedding: EmbeddingConfig::new(self.vocab, self.width)
                .with_initializer(normal.clone())
                .init(device),
            position_embedding: normal.init([self.context, self.width], device),
            blocks: (0..self.layers).map(|_| self.init_block(device)).collect(),
            final_norm: LayerNormConfig::new(self.width).init(device),
        }
    }

    fn init_block(&self, device: &Device) -> Block {
        // Each block adds to the residual stream twice; scaling these two projections keeps the
        // variance of the stream independent of the depth (GPT-2).
        let residual_std = INIT_STD / ((2 * self.layers) as f64).sqrt();
        let linear = |inputs, outputs, std| {
            LinearConfig::new(inputs, outputs)
                .with_bias(false)
                .with_initializer(Initializer::Normal { mean: 0.0, std })
                .init(device)
        };
        Block {
            attention_norm: LayerNormConfig::new(self.width).init(device),
            attention: CausalAttention {
                qkv: linear(self.width, 3 * self.width, INIT_STD),
                output: linear(self.width, self.width, residual_std),
                heads: self.heads,
            },
            mlp_norm: LayerNormConfig::new(self.width).init(device),
            mlp: Mlp {
                up: linear(self.width, 4 * self.width, INIT_STD),
                down: linear(4 * self.width, self.width, residual_std),
            },
        }
    }
}

impl Gpt {
    /// Logits in `f32`, of shape `[batch, length, vocab]`, for `tokens` of shape `[batch, length]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [_, length] = tokens.dims();
        // True where attention is forbidden: above the diagonal.
        let mask = Tensor::<2, Bool>::tril_mask([length, length], 0, &tokens.device());
        let positions = self.position_embedding.val().narrow(0, 0, length);

        let mut hidden = self.token_embedding.forward(tokens) + positions.unsqueeze::<3>();
        for block in &self.blocks {
            hidden = block.forward(hidden, mask.clone());
        }
        let hidden = self.final_norm.forward(hidden);

        let head = self.token_embedding.weight.val().transpose();
        hidden.matmul(head.unsqueeze::<3>()).cast(FloatDType::F32)
    }

    /// Mean cross-entropy, in nats per token, of predicting `targets` from `inputs`.
    pub fn loss(&self, inputs: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        let logits = self.forward(inputs).flatten::<2>(0, 1);
        CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits, targets.flatten(0, 1))
    }
}

impl Block {
    fn forward(&self, hidden: Tensor<3>, mask: Tensor<2, Bool>) -> Tensor<3> {
        let attended = self
            .attention
            .forward(self.attention_norm.forward(hidden.clone()), mask);
        let hidden = hidden + attended;
        hidden.clone() + self.mlp.forward(self.mlp_norm.forward(hidden))
    }
}

impl CausalAttention {
    fn forward(&self, input: Tensor<3>, mask: Tensor<2, Bool>) -> Tensor<3> {
        let [batch, length, width] = input.dims();
        let head_width = width / self.heads;

        let [query, key, value]: [Tensor<4>; 3] = {
            let qkv = self.qkv.forward(input);
            [0, 1, 2].map(|part| {
                qkv.clone()
                    .narrow(2, part * width, width)
                    .reshape([batch, length, self.heads, head_width])
                    .swap_dims(1, 2)
            })
        };

        // Scaling the queries rather than the scores keeps the scores in the range of f16.
        let query = query.mul_scalar((head_width as f64).powf(-0.5));
        let scores = query
            .matmul(key.transpose())
            .mask_fill(mask.unsqueeze::<4>(), f32::NEG_INFINITY);

        let context = softmax(scores, 3).matmul(value);
        self.output
            .forward(context.swap_dims(1, 2).reshape([batch, length, width]))
    }
}

impl Mlp {
    fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        self.down.forward(gelu(self.up.forward(input)))
    }
}

#[cfg(test)]
mod tests {
    use burn::module::ModuleMapper;

    use super::*;
    use crate::turns::turn;

    const CONFIG: GptConfig = GptConfig {
        vocab: 11,
        layers: 2,
        width: 16,
        heads: 4,
        context: 8,
    };

    struct Cast(FloatDType);

    impl ModuleMapper for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| tensor.cast(self.0))
        }
    }

    fn logits(model: &Gpt, tokens: [i32; 6], device: &Device) -> Vec<f32> {
        let tokens = Tensor::<2, Int>::from_data([tokens], device);
        model.forward(tokens).into_data().try_into_vec().unwrap()
    }

    #[test]
    fn later_tokens_do_not_change_earlier_logits() {
        let _turn = turn();
        let device = Device::default();
        for dtype in [FloatDType::F32, FloatDType::BF16, FloatDType::F16] {
            let model = CONFIG.init(&device).map(&mut Cast(dtype));
            let first = logits(&model, [1, 2, 3, 4, 5, 6], &device);
            let second = logits(&model, [1, 2, 3, 4, 9, 0], &device);

            let same = 4 * CONFIG.vocab;
            assert_eq!(first[..same], second[..same], "{dtype:?}");
            assert_ne!(first[same..], second[same..], "{dtype:?}");
        }
    }

    #[test]
    fn an_untrained_model_is_uniform() {
        let _turn = turn();
        let device = Device::default();
        let model = CONFIG.init(&device);
        let inputs = Tensor::<2, Int>::from_data([[1, 2, 3, 4], [5, 6, 7, 8]], &device);
        let targets = Tensor::<2, Int>::from_data([[2, 3, 4, 5], [6, 7, 8, 9]], &device);
        let loss: f32 = model.loss(inputs, targets).into_scalar();
        assert!((loss - (CONFIG.vocab as f32).ln()).abs() < 0.1, "{loss}");
    }
}
