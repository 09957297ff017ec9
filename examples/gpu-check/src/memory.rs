//! Does the device hold what it is promised to hold, and no more?

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, FloatDType};
use burn_zero_offload::{OffloadConfig, WithOffload};

use crate::args::Setting;
use crate::parts::finish;
use crate::stack::StackConfig;
use crate::table::{Row, megabytes, number};

/// Bytes in use now, when all that was enqueued is done; `None` where the device does not say.
fn in_use(device: &Device) -> Option<u64> {
    finish(device);
    Some(device.memory_pool_usage()?.bytes_in_use)
}

/// Looks at the device all the time and remembers the most bytes in use.
///
/// CubeCL allocates when work is handed to it, and answers this question in the same queue: what is
/// seen is what the allocator held between two commands. A peak between two looks can be missed, so
/// several rounds are looked at.
struct Sampler {
    stop: Arc<AtomicBool>,
    peak: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    fn start(device: &Device) -> Self {
        let (stop, peak) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let (stopped, highest, device) = (stop.clone(), peak.clone(), device.clone());
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if let Some(usage) = device.memory_pool_usage() {
                    highest.fetch_max(usage.bytes_in_use, Ordering::Relaxed);
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        Self {
            stop,
            peak,
            thread: Some(thread),
        }
    }

    fn stop(mut self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It has nothing to panic about; if it did, the peak so far stands.
            let _ = thread.join();
        }
        self.peak.load(Ordering::Relaxed)
    }
}

/// What a run needed, beyond what was in use before it.
struct Need {
    weights: u64,
    activations: u64,
    peak: u64,
    after: u64,
    budget: u64,
}

/// The check.
pub fn check(setting: &Setting) -> Vec<Row> {
    let config = StackConfig::of(setting);
    let parameters = config.parameters();
    if setting.device.memory_pool_usage().is_none() {
        let reason = format!("{} does not report its memory", setting.backend.name());
        return vec![Row::skip("peak of the device", reason)];
    }
    let half = setting.products();
    let size = if half == FloatDType::F32 { 4 } else { 2 };
    let largest = (config.width * config.width * size) as u64;
    let Some(need) = offloaded(setting, config, half) else {
        return vec![Row::skip(
            "peak of the device",
            "the device does not report its memory",
        )];
    };
    // A few tensors as wide as the batch live besides: the gradient that comes down the layers, the
    // product it was, the mask of the activation, the input. Counters and markers are a few KiB.
    let working = (4 * config.batch * config.width * size) as u64 + (64 << 10);
    let bound = need.weights + need.activations + need.budget + largest + working;
    let each = |bytes: u64| number(bytes as f64 / parameters as f64);
    let mut rows = vec![
        Row::check(
            format!(
                "{half:?} offloaded, {} layers of {}x{}: weights on the device",
                config.layers, config.width, config.width
            ),
            each(need.weights),
            "B/param",
            need.weights <= (size * parameters) as u64 + working,
        ),
        Row::info(
            "activations kept by forward",
            megabytes(need.activations),
            "MB",
        ),
        Row::info("in-flight budget", megabytes(need.budget), "MB"),
        Row::info("peak per parameter", each(need.peak), "B/param"),
        Row::check(
            format!(
                "peak in backward and step, at most {} (weights, activations, budget, one parameter)",
                megabytes(bound)
            ),
            megabytes(need.peak),
            "MB",
            need.peak <= bound,
        ),
        Row::check(
            "in use after the step: the weights alone",
            megabytes(need.after),
            "MB",
            need.after <= need.weights + working,
        ),
    ];
    if let Some(peak) = plain(setting, config) {
        rows.push(Row::info(
            "f32 AdamW without offload: peak",
            megabytes(peak),
            "MB",
        ));
        rows.push(Row::info(
            "f32 AdamW without offload: peak per parameter",
            each(peak),
            "B/param",
        ));
    }
    rows
}

fn offloaded(setting: &Setting, config: StackConfig, dtype: FloatDType) -> Option<Need> {
    let device = &setting.device;
    let tracked = device.clone().autodiff();
    device.memory_cleanup();
    let before = in_use(device)?;
    let input = config.input(&tracked, dtype);
    let input_bytes = in_use(device)?.saturating_sub(before);
    let offload = OffloadConfig::new().with_dtype(Some(dtype));
    let made = AdamWConfig::new()
        .with_offload(offload)
        .init(config.init(&tracked));
    let (mut model, offload) = made.expect("a stack can be offloaded");
    let mut optimizer = offload.optimizer();
    let held = |now: u64| now.saturating_sub(before + input_bytes);
    let weights = held(in_use(device)?);
    let (mut activations, mut peak) = (0, 0);
    // In the first, which does not count, kernels are compiled and tuned.
    for round in 0..=setting.size(1, 3) {
        let sampler = Sampler::start(device);
        let loss = model.loss(input.clone());
        // All that backward will need is there now, and nothing that it makes.
        activations = held(in_use(device)?).saturating_sub(weights);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-4, model, grads);
        finish(device);
        let highest = held(sampler.stop());
        if round > 0 {
            peak = peak.max(highest);
        }
    }
    let after = held(in_use(device)?);
    drop(model);
    Some(Need {
        weights,
        activations,
        peak,
        after,
        budget: offload.report().in_flight_budget as u64,
    })
}

fn plain(setting: &Setting, config: StackConfig) -> Option<u64> {
    let device = &setting.device;
    let tracked = device.clone().autodiff();
    device.memory_cleanup();
    let before = in_use(device)?;
    let input = config.input(&tracked, FloatDType::F32);
    let mut model = config.init(&tracked);
    let mut optimizer: burn::optim::ModuleOptimizer = AdamWConfig::new().init();
    let sampler = Sampler::start(device);
    for _ in 0..2 {
        let grads = model.loss(input.clone()).backward();
        let grads = GradientsParams::from_grads(grads, &model);
        model = optimizer.step(1e-4, model, grads);
        finish(device);
    }
    let peak = sampler.stop().saturating_sub(before);
    drop((model, optimizer));
    device.memory_cleanup();
    Some(peak)
}
