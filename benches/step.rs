//! One step of offloaded training of a small GPT and its parts, against Burn's AdamW; then many steps,
//! to see that memory stays where it is.
//!
//! ```sh
//! cargo bench -p burn-zero-offload --bench step --features cuda,fusion -- [STEPS] [WIDTH] [LAYERS]
//! ```
//!
//! 1000 steps of width 256 and 4 layers unless the arguments say otherwise. Times are those of the
//! thread that trains: on a GPU, forward is the time to hand the work to the device. The device is
//! that of the first CubeCL backend compiled in, else Flex.

#![allow(missing_docs)]

#[path = "common/device.rs"]
mod device;
#[path = "../examples/train-gpt/src/model.rs"]
#[allow(dead_code, unused_imports)]
mod model;
#[path = "common/parts.rs"]
mod parts;
#[path = "../examples/train-gpt/src/turns.rs"]
#[allow(dead_code)]
mod turns;

use std::time::Instant;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor};
use burn_zero_offload::{OffloadConfig, WithOffload};

use model::{Gpt, GptConfig};
use parts::{Offloaded, cast, cpu_step_rate, finish, forward_and_backward, median};

const BATCH: usize = 4;
const CONTEXT: usize = 64;

fn main() {
    let steps = device::argument(0, "STEPS").unwrap_or(1000).max(10);
    let config = GptConfig {
        vocab: 256,
        layers: device::argument(2, "LAYERS").unwrap_or(4),
        width: device::argument(1, "WIDTH").unwrap_or(256),
        heads: 4,
        context: CONTEXT,
    };
    let plain = device::device();
    let device = plain.clone().autodiff();
    let tokens = Tensor::<1, Int>::arange(0..(BATCH * CONTEXT) as i64, &device);
    let tokens = tokens
        .remainder_scalar(config.vocab as i64)
        .reshape([BATCH, CONTEXT]);
    let loss = |model: &Gpt| model.loss(tokens.clone(), tokens.clone());
    let (warm, count) = (2, (steps / 20).clamp(3, 20));

    let adamw = || AdamWConfig::new().with_weight_decay(0.1);
    let made = adamw()
        .with_offload(OffloadConfig::new().with_dtype(device::dtype()))
        .init(config.init(&device));
    let trained = Offloaded::new(made.expect("a GPT can be offloaded"), &plain);
    let dtype = trained.offload.dtype();
    println!(
        "{device:?}, {dtype:?}, {} parameters, {BATCH} x {CONTEXT} tokens a step, medians of {count}",
        trained.model.num_params()
    );
    let (mut trained, parts) = trained.steps(warm, count, false, loss);
    let parameters = trained.model.num_params();
    let cpu_step = parameters as f64 / cpu_step_rate(&trained.offload, parameters.min(32_000_000));
    // Half weights without taps: no gradient goes anywhere.
    let untapped = cast(config.init(&device), dtype);
    let alone = forward_and_backward(&plain, warm, count, || loss(&untapped));
    drop(untapped);
    // Verified: what the check of every step adds to it.
    let made = adamw()
        .with_offload(
            OffloadConfig::new()
                .with_dtype(device::dtype())
                .with_verify(true),
        )
        .init(config.init(&device));
    let verified = Offloaded::new(made.expect("a GPT can be offloaded"), &plain);
    let (verified, checked) = verified.steps(warm, count, false, loss);
    drop(verified);
    let report = &parts.report;
    for (name, seconds) in [
        ("offloaded step", parts.whole()),
        ("  forward", parts.forward),
        ("  backward", parts.backward),
        ("  waiting for the last gradients", parts.downloads),
        ("  CPU step and upload", parts.step),
        ("    of it the verdict", report.judging.as_secs_f64()),
        ("    with every step verified", checked.step),
        ("  waiting for the device", parts.rest),
        ("forward and backward, gradients dropped", alone),
        ("CPU step alone", cpu_step),
        (
            "plain f32 AdamW step",
            plain_step(&plain, config, warm, count, loss),
        ),
        (
            "blocked on the budget",
            report.blocked_on_budget.as_secs_f64(),
        ),
        ("blocked on uploads", report.blocked_on_upload.as_secs_f64()),
    ] {
        println!("{name:<42} {:>10.3} ms", 1e3 * seconds);
    }
    println!("\n{report}\n");

    println!("{steps} steps:");
    let started = Instant::now();
    for step in 1..=steps {
        (trained, _) = trained.step(false, loss);
        if [steps / 10, steps / 2, steps].contains(&step) {
            println!(
                "{:>4} %   host {:>9.3} MB resident   device {} in use   {:.1} s",
                100 * step / steps,
                resident() as f64 / 1e6,
                in_use(&plain),
                started.elapsed().as_secs_f64()
            );
        }
    }
}

/// Seconds of a step of Burn's own AdamW.
fn plain_step(
    plain: &Device,
    config: GptConfig,
    warm: usize,
    count: usize,
    loss: impl Fn(&Gpt) -> Tensor<1>,
) -> f64 {
    let mut model = config.init(&plain.clone().autodiff());
    let mut optimizer: ModuleOptimizer = AdamWConfig::new().with_weight_decay(0.1).init();
    let mut seconds = Vec::new();
    for number in 0..warm + count {
        let started = Instant::now();
        let grads = GradientsParams::from_grads(loss(&model).backward(), &model);
        model = optimizer.step(1e-4, model, grads);
        finish(plain);
        if number >= warm {
            seconds.push(started.elapsed().as_secs_f64());
        }
    }
    median(seconds)
}

/// Bytes of this process in memory, 0 where `/proc` does not say.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|rest| {
        rest.trim()
            .trim_end_matches("kB")
            .trim()
            .parse::<u64>()
            .ok()
    });
    kib.unwrap_or(0) * 1024
}

fn in_use(device: &Device) -> String {
    let usage = device.memory_pool_usage();
    usage.map_or("does not say what is".into(), |usage| {
        format!("{:.3} MB", usage.bytes_in_use as f64 / 1e6)
    })
}
