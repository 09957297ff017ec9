//! What the trained model is worth: its validation loss, and text it writes.

use anyhow::Result;
use burn::tensor::{Device, Int, Tensor};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};

use crate::config::TrainConfig;
use crate::data::Corpus;
use crate::interrupt;
use crate::model::Gpt;

/// What the sample starts with.
const PROMPT: &str = "## ";
/// Bytes to write.
const SAMPLE_LENGTH: usize = 320;
/// Below one, the sample keeps closer to what the model is sure of.
const TEMPERATURE: f32 = 0.8;
/// The sample is drawn from this many most likely bytes.
const TOP_K: usize = 40;

/// Mean loss of `model` over the validation text, in nats per token; `None` if Ctrl-C cut it short.
///
/// # Errors
///
/// Fails if the loss cannot be read from the device.
pub fn validation_loss(
    model: &Gpt,
    corpus: &Corpus,
    config: &TrainConfig,
    device: &Device,
) -> Result<Option<f64>> {
    let (mut sum, mut tokens) = (0.0, 0);
    for batch in corpus.validation(config.batch, config.context) {
        if interrupt::requested() {
            return Ok(None);
        }
        let count = batch.tokens();
        let (inputs, targets) = batch.into_tensors(device);
        sum += model.loss(inputs, targets).try_into_scalar::<f64>()? * count as f64;
        tokens += count;
    }
    Ok(Some(sum / tokens as f64))
}

/// Text that `model` writes on from a prompt; shorter if Ctrl-C is pressed.
///
/// # Errors
///
/// Fails if the logits cannot be read from the device.
pub fn sample(model: &Gpt, config: &TrainConfig, device: &Device) -> Result<String> {
    let mut rng = ChaCha8Rng::seed_from_u64(config.seed);
    let mut text = PROMPT.as_bytes().to_vec();
    while text.len() < SAMPLE_LENGTH && !interrupt::requested() {
        let seen: Vec<i32> = text[text.len().saturating_sub(config.context)..]
            .iter()
            .map(|&b| b.into())
            .collect();
        let length = seen.len();
        let tokens = Tensor::<1, Int>::from_data(seen.as_slice(), device).unsqueeze::<2>();
        let logits = model.forward(tokens).narrow(1, length - 1, 1);
        let logits: Vec<f32> = logits.try_into_vec_as()?;
        text.push(draw(&logits, &mut rng) as u8);
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Draw an index by softmax over the highest logits.
fn draw(logits: &[f32], rng: &mut ChaCha8Rng) -> usize {
    let mut ranked: Vec<usize> = (0..logits.len()).collect();
    ranked.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    ranked.truncate(TOP_K);

    let highest = logits[ranked[0]];
    let weights: Vec<f32> = ranked
        .iter()
        .map(|&index| ((logits[index] - highest) / TEMPERATURE).exp())
        .collect();
    let mut left = rng.random_range(0.0..weights.iter().sum());
    for (&index, weight) in ranked.iter().zip(&weights) {
        left -= weight;
        if left < 0.0 {
            return index;
        }
    }
    // Rounding can leave a last crumb of probability.
    ranked[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_logits() {
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        let mut logits = vec![0.0; 256];
        logits[7] = 100.0;
        assert!((0..100).all(|_| draw(&logits, &mut rng) == 7));

        // More likely than the rest together, and yet outside of nothing but the top.
        let logits: Vec<f32> = (0..256).map(|i| i as f32 * 1e-3).collect();
        assert!((0..1000).all(|_| draw(&logits, &mut rng) >= 256 - TOP_K));
    }
}
