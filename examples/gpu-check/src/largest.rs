//! The largest GPT that trains in a given amount of device memory, with offload and without.
//!
//! A device that is out of memory leaves a process that cannot be trusted any more, so each try is a
//! process of its own: one training step of a model of so many layers. All of the device's memory but
//! `--card-gib` is taken first. A large card would otherwise hold more than the host can keep masters
//! of, and the tries would take long.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use burn::module::Module;
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_zero_offload::{OffloadConfig, WithOffload};

use crate::args::{Args, Setting};
use crate::child;
use crate::gpt::adamw;
use crate::header::host_bytes;
use crate::table::{Row, number};

/// Part of the child that trains without offload.
pub const PLAIN: &str = "largest-plain";
/// Part of the child that trains with offload.
pub const OFFLOADED: &str = "largest-offloaded";

const VOCAB: usize = 1024;
const WIDTH: usize = 1024;
const CONTEXT: usize = 128;
/// A try that takes longer has not fitted in any useful sense.
const TRY: Duration = Duration::from_secs(90);

/// Burn's own transformer. Its weights are drawn when they are first used, so that an offloaded one is
/// never on the device in f32 as a whole.
#[derive(Module, Debug)]
struct Transformer {
    embedding: Embedding,
    encoder: TransformerEncoder,
    head: Linear,
}

impl Transformer {
    fn new(layers: usize, device: &Device) -> Self {
        let encoder = TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 16, layers);
        Self {
            embedding: EmbeddingConfig::new(VOCAB, WIDTH).init(device),
            encoder: encoder.with_dropout(0.0).with_norm_first(true).init(device),
            head: LinearConfig::new(WIDTH, VOCAB)
                .with_bias(false)
                .init(device),
        }
    }

    fn loss(&self, tokens: Tensor<2, Int>) -> Tensor<1> {
        let device = tokens.device();
        let mask = generate_autoregressive_mask(1, CONTEXT, &device);
        let input = TransformerEncoderInput::new(self.embedding.forward(tokens.clone()));
        let hidden = self.encoder.forward(input.mask_attn(mask));
        let logits = self.head.forward(hidden).cast(FloatDType::F32);
        let loss = CrossEntropyLossConfig::new().init(&device);
        loss.forward(logits.flatten::<2>(0, 1), tokens.flatten(0, 1))
    }
}

/// Parameters of a model of so many layers, near enough to plan with.
fn parameters(layers: usize) -> u64 {
    ((12 * WIDTH * layers + 2 * VOCAB) * WIDTH) as u64
}

/// The part of the child: one training step, or an error.
pub fn try_one(args: &Args, offloaded: bool) -> Result<()> {
    let backend = args.device.context("a child is told its device")?;
    let setting = Setting::new(backend, args)?;
    let ballast = ballast(&setting)?;
    let device = setting.device.clone().autodiff();
    let model = Transformer::new(args.layers, &device);
    let (model, mut optimizer): (_, ModuleOptimizer) = if offloaded {
        let (model, offload) = adamw().with_offload(OffloadConfig::new()).init(model)?;
        (model, offload.optimizer())
    } else {
        (model, adamw().init())
    };
    let tokens = Tensor::<1, Int>::arange(0..CONTEXT as i64, &device).unsqueeze::<2>();
    let loss = model.loss(tokens);
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    let model = optimizer.step(1e-4, model, grads);
    let loss = loss.inner().into_scalar::<f32>();
    setting
        .device
        .sync()
        .context("the device did not do what it was given to do")?;
    ensure!(loss.is_finite(), "the loss is {loss}");
    println!("{}", model.num_params());
    drop(ballast);
    Ok(())
}

/// Takes the device's memory but for `--card-gib`.
#[cfg(feature = "cubecl-backend")]
fn ballast(setting: &Setting) -> Result<Vec<Tensor<1>>> {
    const BLOCK: u64 = 512 << 20;
    let client = crate::rates::client(&setting.device).context("not a CubeCL device")?;
    let total = client.properties().memory.max_memory();
    let total = total.context("the device does not say how much memory it has")?;
    // What the driver keeps for itself stays free as well.
    let free = (setting.card_gib << 30) + BLOCK;
    let blocks = total.saturating_sub(free) / BLOCK;
    let block = || Tensor::zeros([(BLOCK / 4) as usize], &setting.device);
    let ballast = (0..blocks).map(|_| block()).collect();
    setting
        .device
        .sync()
        .context("the ballast could not be allocated")?;
    Ok(ballast)
}

/// Takes the device's memory but for `--card-gib`.
#[cfg(not(feature = "cubecl-backend"))]
fn ballast(_: &Setting) -> Result<Vec<Tensor<1>>> {
    anyhow::bail!("this build has no device with memory of its own")
}

/// The measurement.
pub fn measure(setting: &Setting) -> Vec<Row> {
    if !setting.is_gpu() {
        let reason = format!(
            "{} has no memory of its own to fill",
            setting.backend.name()
        );
        return vec![Row::skip("parameters that fit", reason)];
    }
    let mut rows = Vec::new();
    for (role, name, host) in [
        (PLAIN, "f32 AdamW on the device", 0),
        // Masters, moments, gradients, and some for the rest of the process.
        (OFFLOADED, "offloaded in half precision", 16),
    ] {
        let what = format!("{name}: parameters that fit into {} GiB", setting.card_gib);
        rows.push(match search(setting, role, host) {
            Found { fits: 0, end } => Row::skip(what, end),
            Found { fits, end } => {
                let value = format!("{} million ({end})", number(fits as f64 / 1e6));
                Row::info(what, value, "")
            }
        });
    }
    rows
}

struct Found {
    /// Parameters of the largest model that trained.
    fits: u64,
    /// Why no larger one was found.
    end: String,
}

/// Doubles the layers until they do not fit, then halves the gap, down to a sixteenth.
fn search(setting: &Setting, role: &str, host_bytes_each: u64) -> Found {
    let host = host_bytes("MemAvailable:").unwrap_or(0) / 10 * 8;
    let (mut fits, mut layers, mut below, mut above) = (0, 2, 0, None);
    let end = loop {
        if setting.left() < Duration::from_secs(20) {
            break "the time was used up".to_string();
        }
        let mut refused = None;
        if parameters(layers) * host_bytes_each > host {
            refused = Some("host memory".to_string());
        } else {
            match child::run(setting, role, layers, TRY.min(setting.left())) {
                Ok(count) => {
                    fits = count.trim().parse().unwrap_or_else(|_| parameters(layers));
                    below = layers;
                }
                Err(reason) => refused = Some(format!("{reason:#}")),
            }
        }
        if let Some(reason) = refused {
            above = Some((layers, reason));
        }
        layers = match &above {
            None => layers * 2,
            Some((above, reason)) if above - below <= (below / 16).max(1) => {
                break format!("{} layers: {}", above, short(reason));
            }
            Some((above, _)) => (below + above) / 2,
        };
        if layers == 0 {
            break "not even one layer".into();
        }
    };
    Found { fits, end }
}

/// The beginning of a sentence that may be long.
fn short(text: &str) -> String {
    let short: String = text.chars().take(120).collect();
    if short.len() < text.len() {
        format!("{short}...")
    } else {
        short
    }
}
