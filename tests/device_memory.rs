//! What the device holds while an offloaded model trains, on CubeCL's CPU runtime: a binary of its own,
//! because the runtime's memory is the process's.
//!
//! Run with `--test-threads 1`, with and without the feature `fusion`. The first test prints the table
//! of the README.

#![allow(missing_docs)]

#[allow(dead_code, reason = "shared with the other tests")]
mod common;
#[path = "device_memory/usage.rs"]
mod usage;

use burn::module::{Module, Param};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_zero_offload::{InPlace, Offload, OffloadConfig, Schedule, WithOffload};

use common::{config, param, tensor};
use usage::{Peak, in_use, resident, threads};

/// One test at a time, whatever the number of test threads: they all look at the same memory.
static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Layers of square weights. Each is a matrix times a vector, spelled out: CubeCL's CPU runtime refuses
/// half-precision matrix products of these sizes on machines with small caches.
#[derive(Module, Debug)]
struct Stack {
    layers: Vec<Param<Tensor<2>>>,
}

impl Stack {
    fn new(layers: usize, width: usize, device: &Device) -> Self {
        let layer = |i| param([width, width], i as u64, device);
        Self {
            layers: (0..layers).map(layer).collect(),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let width = x.dims()[1];
        let apply = |h: Tensor<2>, layer: &Param<Tensor<2>>| {
            (layer.val() * h).sum_dim(1).reshape([1, width]) * 0.05
        };
        let h = self.layers.iter().fold(x, apply);
        h.cast(FloatDType::F32).powf_scalar(2.0).mean()
    }
}

/// Bytes at the stages of training steps.
#[derive(Debug)]
struct Stages {
    /// Before the forward pass.
    weights: u64,
    /// Between forward and backward: weights and activations.
    forward: u64,
    /// The most in backward.
    backward: u64,
    /// The most in the optimizer's walk.
    step: u64,
}

/// Two rounds, of which the second is measured: the first allocates what stays.
fn stages<M: Module>(
    device: &Device,
    mut model: M,
    mut optimizer: ModuleOptimizer,
    loss: impl Fn(&M) -> Tensor<1>,
    offload: Option<&Offload>,
    keep_old: bool,
) -> Stages {
    let base = in_use(device);
    let mut stages = None;
    for _ in 0..2 {
        let weights = in_use(device);
        let loss = loss(&model);
        let forward = in_use(device);
        let peak = Peak::watch(device);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        // Gradients in flight are part of backward, also the last ones, which `step` would wait for.
        if let Some(offload) = offload {
            offload.flush().unwrap();
        }
        let backward = peak.end(device);
        let peak = Peak::watch(device);
        // What burn-train's `Learner` does.
        let old = keep_old.then(|| model.clone());
        model = optimizer.step(1e-3, model, grads);
        let step = peak.end(device);
        drop(old);
        stages = Some(Stages {
            weights,
            forward,
            backward,
            step,
        });
    }
    assert!(base > 0);
    stages.unwrap()
}

fn offloaded(model: Stack, config: OffloadConfig) -> (Stack, Offload) {
    AdamWConfig::new().with_offload(config).init(model).unwrap()
}

const LAYERS: usize = 20;
const WIDTH: usize = 1024;
const PARAMETERS: u64 = (LAYERS * WIDTH * WIDTH) as u64;
/// Bytes of the largest gradient.
const LARGEST: u64 = 2 * (WIDTH * WIDTH) as u64;
const BUDGET: u64 = 2 * LARGEST;
/// Counters, inputs, and what CubeCL rounds allocations to.
const SLACK: u64 = 64 << 10;

fn large(device: &Device) -> (Stack, Offload) {
    let config = config(FloatDType::F16).with_in_flight(Some(BUDGET as usize));
    offloaded(Stack::new(LAYERS, WIDTH, device), config)
}

/// acceptance.md, memory 71: 20.97 M parameters. In backward the device holds half weights, the
/// activations, the gradients in flight and one gradient more; in the step one parameter's new weights
/// beside the old ones. `Learner` holds old and new weights; with `InPlace` it does not.
#[test]
fn backward_holds_half_weights_activations_the_budget_and_one_gradient() {
    let _alone = alone();
    let device = Device::cpu().autodiff();
    let input = tensor::<2>([1, WIDTH], 99, &device).cast(FloatDType::F16);
    let loss = |model: &Stack| model.loss(input.clone());
    let before = in_use(&device);

    let (model, offload) = large(&device);
    let lean = stages(
        &device,
        model,
        offload.optimizer(),
        loss,
        Some(&offload),
        false,
    );
    let report = offload.report();
    let moved = (report.bytes_down, report.bytes_up);
    assert_eq!(moved, (2 * PARAMETERS, 2 * PARAMETERS));
    assert!(report.peak_in_flight as u64 <= BUDGET, "{report}");
    drop(offload);

    let (model, offload) = large(&device);
    let learner = stages(
        &device,
        model,
        offload.optimizer(),
        loss,
        Some(&offload),
        true,
    );
    drop(offload);

    let (model, offload) = large(&device);
    let shared_loss = |model: &InPlace<Stack>| model.with(loss);
    let model = InPlace::new(model);
    let in_place = stages(
        &device,
        model,
        offload.optimizer(),
        shared_loss,
        Some(&offload),
        true,
    );
    drop(offload);

    let adamw = AdamWConfig::new().init();
    let f32_loss = |model: &Stack| model.loss(input.clone().cast(FloatDType::F32));
    let model = Stack::new(LAYERS, WIDTH, &device);
    let plain = stages(&device, model, adamw, f32_loss, None, false);

    let each = |bytes: u64| (bytes - before) as f64 / PARAMETERS as f64;
    println!("| bytes per parameter | between steps | backward | step |");
    for (name, s) in [
        ("AdamW in f32", &plain),
        ("offloaded", &lean),
        ("offloaded, as `Learner` steps", &learner),
        ("the same with `InPlace`", &in_place),
    ] {
        let (weights, backward, step) = (each(s.weights), each(s.backward), each(s.step));
        println!("| {name} | {weights:.2} | {backward:.2} | {step:.2} |");
    }

    // The model's own intermediates: the product of weights and input before it is summed has a
    // gradient of the same size in backward. CubeCL's CPU runtime frees it when its kernels have run,
    // not when they are queued, and the host runs ahead by as many layers as there are gradients in
    // flight, and one at the tap.
    let products = BUDGET + LARGEST;
    for s in [&lean, &learner, &in_place] {
        assert!(s.weights - before <= 2 * PARAMETERS + SLACK, "{s:?}");
        let backward = s.forward + products + BUDGET + LARGEST + SLACK;
        assert!(s.backward <= backward, "{s:?}");
    }
    for s in [&lean, &in_place] {
        assert!(s.step <= s.weights + LARGEST + SLACK, "{s:?}");
    }
    assert!(
        learner.step <= learner.weights + 2 * PARAMETERS + SLACK,
        "{learner:?}"
    );
    assert!(
        learner.step >= learner.weights + 2 * PARAMETERS - LARGEST,
        "{learner:?}"
    );
    assert!(each(plain.step) >= 16.0, "{plain:?}");
}

/// How the training loop holds its model in a step.
#[derive(Clone, Copy, Debug)]
enum Keeping {
    /// Gives it away.
    Nothing,
    /// Keeps a clone, as `Learner` does.
    Old,
    /// The same, wrapped in `InPlace`.
    Shared,
}

/// The most the device holds in rounds two to four.
fn peak_of(schedule: Schedule, keeping: Keeping, device: &Device) -> u64 {
    fn rounds<M: Module>(
        mut model: M,
        mut optimizer: ModuleOptimizer,
        keep: bool,
        loss: impl Fn(&M) -> Tensor<1>,
        device: &Device,
    ) -> u64 {
        let mut peak = None;
        for round in 1..=4 {
            if round == 2 {
                peak = Some(Peak::watch(device));
            }
            let grads = GradientsParams::from_grads(loss(&model).backward(), &model);
            let old = keep.then(|| model.clone());
            model = optimizer.step(1e-3, model, grads);
            drop(old);
        }
        peak.map_or(0, |peak| peak.end(device))
    }
    let config = config(FloatDType::F16)
        .with_schedule(schedule)
        .with_in_flight(Some(SMALLER_BUDGET as usize));
    let (model, offload) = offloaded(Stack::new(10, SMALLER, device), config);
    let input = tensor::<2>([1, SMALLER], 99, device).cast(FloatDType::F16);
    let loss = |model: &Stack| model.loss(input.clone());
    let optimizer = offload.optimizer();
    match keeping {
        Keeping::Nothing => rounds(model, optimizer, false, loss, device),
        Keeping::Old => rounds(model, optimizer, true, loss, device),
        Keeping::Shared => {
            let model = InPlace::new(model);
            rounds(model, optimizer, true, |model| model.with(loss), device)
        }
    }
}

const SMALLER: usize = 512;
const SMALLER_BUDGET: u64 = 4 * (SMALLER * SMALLER) as u64;

/// No schedule has a second set of weights on the device, nor more than the budget besides.
#[test]
fn no_schedule_holds_more_than_the_synchronous_one_and_the_budget() {
    let _alone = alone();
    let device = Device::cpu().autodiff();
    for keeping in [Keeping::Nothing, Keeping::Old, Keeping::Shared] {
        let peak = |schedule| {
            let base = in_use(&device);
            peak_of(schedule, keeping, &device) - base
        };
        let synchronous = peak(Schedule::Synchronous);
        for schedule in [Schedule::ForwardOverlapped, Schedule::Delayed { warmup: 1 }] {
            let other = peak(schedule);
            println!("{keeping:?}, {schedule:?}: {other} bytes, synchronous {synchronous}");
            assert!(
                other <= synchronous + SMALLER_BUDGET + SLACK,
                "{keeping:?}, {schedule:?}: {other} bytes, synchronous {synchronous}"
            );
        }
    }
}

/// acceptance.md, memory 74: 1000 steps, device and host.
#[test]
fn memory_stays_flat_over_1000_steps() {
    let _alone = alone();
    let device = Device::cpu().autodiff();
    let config = config(FloatDType::BF16).with_upload_tile(Some(500));
    let (mut model, offload) = offloaded(Stack::new(3, 32, &device), config);
    let mut optimizer = offload.optimizer();
    let input = tensor::<2>([1, 32], 1, &device).cast(FloatDType::BF16);
    let mut steps = |count: usize| {
        for _ in 0..count {
            let grads = GradientsParams::from_grads(model.loss(input.clone()).backward(), &model);
            model = optimizer.step(1e-3, model.clone(), grads);
        }
        let usage = device.clone().inner().memory_pool_usage().unwrap();
        (in_use(&device), usage.bytes_reserved, resident())
    };
    steps(40);
    let early = steps(10);
    let late = steps(950);
    assert_eq!(early.0, late.0, "device bytes in use");
    assert_eq!(early.1, late.1, "device bytes reserved");
    // Every step that kept one gradient would add a megabyte.
    assert!(
        late.2 <= early.2 + (1 << 20),
        "{} to {} bytes",
        early.2,
        late.2
    );
    let memory = offload.memory();
    assert_eq!(memory.host_gradients, 0);
    assert_eq!(memory.host_gradient_buffers, 2 * memory.parameters);
}

/// acceptance.md, memory 69.
#[test]
fn fifty_engines_come_and_go() {
    let _alone = alone();
    let device = Device::cpu().autodiff();
    let input = tensor::<2>([1, 32], 1, &device).cast(FloatDType::BF16);
    let mut schedules = [
        Schedule::Synchronous,
        Schedule::ForwardOverlapped,
        Schedule::Delayed { warmup: 1 },
    ]
    .into_iter()
    .cycle();
    // Ends with its updates still to be done, where they run behind the loop.
    let mut once = || {
        let config = config(FloatDType::BF16)
            .with_upload_tile(Some(500))
            .with_schedule(schedules.next().unwrap());
        let (model, offload) = offloaded(Stack::new(4, 32, &device), config);
        let grads = GradientsParams::from_grads(model.loss(input.clone()).backward(), &model);
        offload.optimizer().step(1e-3, model, grads);
    };
    for _ in 0..6 {
        once();
    }
    let before = (in_use(&device), threads(), resident());
    for _ in 0..50 {
        once();
    }
    assert_eq!(in_use(&device), before.0);
    // Threads end a little after their pool: 50 engines that left one each would show anyway.
    assert!(
        threads() < before.1 + 25,
        "{} to {} threads",
        before.1,
        threads()
    );
    // Master weights and moments of 50 models would be 2.4 MB.
    let resident = resident();
    assert!(
        resident <= before.2 + (1 << 20),
        "{} to {resident} bytes",
        before.2
    );
}
