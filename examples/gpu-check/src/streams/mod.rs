//! Does every gradient and every weight arrive whole, whatever the streams do?
//!
//! CubeCL gives each thread a stream of its own and orders streams by allocations alone. A gradient
//! that is read too early, a buffer given away too early or a weight used before all its tiles are
//! there would show as wrong numbers, now and then. So several threads train at once, each a model of
//! its own, with parameters of very different sizes (packed and lone gradients, whole and tiled
//! uploads, sums on the device), chains of operations that may run in place, and pauses at random
//! places. All numbers are small integers, exact in every element type whatever kernel computes them
//! in whatever order, and the rule of the step is made exact too (see [`rule`]). So the right result is
//! known to the last bit: it is computed with integers on the host, and also by a child process that
//! runs the same models one after the other on a single stream. The second tells a mistake of order,
//! which it does not make, from one of arithmetic, which it does.

mod expected;
mod tangle;

use std::sync::Barrier;
use std::thread;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::FloatDType;
use burn_zero_offload::{Offload, OffloadConfig, Schedule, WithOffload};

use self::expected::Expected;
use self::tangle::{Plan, Tangle};
use crate::args::{Args, Setting};
use crate::child;
use crate::numbers::Numbers;
use crate::table::Row;

/// `2^40`: far above every gradient, so that adding one to it changes nothing.
const HUGE: f32 = 1_099_511_627_776.0;

/// AdamW that replaces the weight by minus its gradient, exactly.
///
/// Without memory (both rates 0) the first moment is the gradient `g` and the root of the second is
/// `|g|`; `|g| + 2^40` rounds to `2^40`, and at learning rate `2^40` the update is `g`. Weight decay
/// `2^-40` takes the old weight off. So whatever a gradient was is the next weight, bit for bit, and
/// shows in the partner's gradient one round later.
fn rule() -> AdamWConfig {
    AdamWConfig::new()
        .with_beta_1(0.0)
        .with_beta_2(0.0)
        .with_epsilon(HUGE)
        .with_weight_decay(1.0 / HUGE)
}

/// One training run: which model it is, and its weights at the end.
struct Run {
    dtype: FloatDType,
    weights: Vec<f32>,
    transfers: u64,
}

fn models(small: bool) -> u64 {
    if small { 2 } else { 4 }
}

fn rounds(small: bool) -> u64 {
    if small { 3 } else { 12 }
}

/// Whether the updates of model number `index` run behind its forward passes: of a half model, and of one in
/// single precision with a small budget.
fn overlaps(index: u64) -> bool {
    [0, 3].contains(&(index % 4))
}

/// Trains model number `index`, with pauses or without.
fn train(setting: &Setting, index: u64, pauses: bool) -> Run {
    let plan = Plan::new(index, setting.small, setting.is_gpu());
    // Every second model in half precision. Sums of repeated uses take another way in f32.
    let dtype = if index.is_multiple_of(2) {
        setting.half()
    } else {
        FloatDType::F32
    };
    let device = setting.device.clone().autodiff();
    let mut config = OffloadConfig::new()
        .with_dtype(Some(dtype))
        .with_upload_tile(Some(setting.size(1 << 10, 64 << 10)));
    if index >= 2 {
        // As little as is allowed: backward has to wait for the reader.
        let size = if dtype == FloatDType::F32 { 4 } else { 2 };
        config = config.with_in_flight(Some(plan.largest() * size));
    }
    if overlaps(index) {
        config = config.with_schedule(Schedule::ForwardOverlapped);
    }
    let model = rule()
        .with_offload(config)
        .init(Tangle::new(&plan, &device));
    let (mut model, offload) = model.expect("the models of this check can be offloaded");
    let mut optimizer = offload.optimizer();
    let mut sleeper = Numbers::new(1000 + index);
    let mut transfers = 0;
    let mut older = None;
    for round in 0..rounds(setting.small) {
        let pause = |sleeper: &mut Numbers| {
            if pauses {
                sleeper.sleep();
            }
        };
        let loss = model.loss(&plan, round, &device, dtype, || pause(&mut sleeper));
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        pause(&mut sleeper);
        // Every weight has been used since: the round before is complete.
        if round > 0 {
            transfers += transfers_of(&offload);
        }
        // Now and then somebody holds the old weights, so that nothing may be written into them.
        older = sleeper.below(2).eq(&0).then(|| model.clone()).or(older);
        model = optimizer.step(ModuleLearningRate::from(f64::from(HUGE)), model, grads);
        pause(&mut sleeper);
    }
    drop(older);
    // The check looks at the weights past the taps.
    let flushed = offload.flush();
    flushed.expect("every update of this check can be done");
    transfers += transfers_of(&offload);
    let weights = model.weights();
    Run {
        dtype,
        weights,
        transfers,
    }
}

fn transfers_of(offload: &Offload) -> u64 {
    let report = offload.report();
    report.transfers_down + report.transfers_up
}

/// FNV-1a over the weights. Zero has two signs and both are right.
fn hash(weights: &[f32]) -> u64 {
    let bytes = weights
        .iter()
        .flat_map(|w| (w + 0.0).to_bits().to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The check.
pub fn check(setting: &Setting) -> Vec<Row> {
    let count = models(setting.small);
    let start = Barrier::new(count as usize);
    let runs: Vec<Run> = thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|index| {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    train(setting, index, true)
                })
            })
            .collect();
        let results = threads.into_iter().map(|thread| thread.join());
        results
            .map(|run| run.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });

    let mut rows = Vec::new();
    let alone = child::single_stream(setting);
    for (index, run) in (0..count).zip(&runs) {
        let plan = Plan::new(index, setting.small, setting.is_gpu());
        let expected = Expected::after(&plan, rounds(setting.small));
        let wrong = expected.differences(&run.weights);
        let what = format!(
            "model {index}, {:?}, {} weights, {} rounds, {} transfers: not as integers say",
            run.dtype,
            run.weights.len(),
            rounds(setting.small),
            run.transfers
        );
        rows.push(Row::check(what, wrong, "weights", wrong == 0));
        let here = format!("{:016x}", hash(&run.weights));
        let what = format!("model {index}: equal to the run on a single stream");
        rows.push(match &alone {
            Ok(hashes) => {
                let there = hashes.get(index as usize).map_or("none", String::as_str);
                Row::check(what, format!("{here} / {there}"), "hash", here == there)
            }
            Err(reason) => Row::check(what, reason, "", false),
        });
    }
    rows
}

/// The part of the child: all models, one after the other, on one stream.
pub fn reference(args: &Args) -> anyhow::Result<()> {
    #[cfg(feature = "cubecl-backend")]
    {
        use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};

        // Before anything touches a device: the configuration is read once.
        let mut config = CubeClRuntimeConfig::default();
        config.streaming.max_streams = 1;
        CubeClRuntimeConfig::set(config);
    }
    let backend = args.device.unwrap_or(crate::device::Backend::Cuda);
    let setting = Setting::new(backend, args)?;
    for index in 0..models(setting.small) {
        println!("{:016x}", hash(&train(&setting, index, false).weights));
    }
    Ok(())
}
