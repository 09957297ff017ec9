//! The three schedules on a small GPT, and over many small parameters: what a step takes, what of the updates
//! is exposed, and how much of it the timeline is.
//!
//! ```sh
//! cargo bench -p burn-zero-offload --bench schedules -- [STEPS] [WIDTH] [LAYERS] [TENSORS]
//! ```
//!
//! 100 steps of width 256 and 4 layers, and 10000 tensors of 6400 elements, unless the arguments say
//! otherwise. Medians; schedules take turns, so that what changes on the machine changes for all. On Flex
//! the device is the host: forward, backward and updates share its cores. The device is that of the first
//! CubeCL backend compiled in, else Flex.

#![allow(missing_docs)]

#[path = "common/device.rs"]
mod device;
#[path = "../examples/train-gpt/src/model.rs"]
#[allow(dead_code, unused_imports)]
mod model;
#[path = "../examples/train-gpt/src/turns.rs"]
#[allow(dead_code)]
mod turns;

use std::time::Instant;

use burn::module::{Module, Param};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_zero_offload::{Offload, OffloadConfig, Schedule, WithOffload};

use model::{Gpt, GptConfig};

const SCHEDULES: [(&str, Schedule); 3] = [
    ("synchronous", Schedule::Synchronous),
    ("forward-overlapped", Schedule::ForwardOverlapped),
    ("delayed", Schedule::Delayed { warmup: 1 }),
];

/// Rounds of a schedule's turn, of which the first two do not count: nothing is left to be done before them.
const TURN: usize = 7;
const COLD: usize = 2;
/// Nanoseconds that a span of the timeline costs at most, both looks at the clock included (measured apart).
const SPAN: f64 = 100.0;

/// A model in training, and what its rounds took in seconds.
struct Trained<M> {
    model: Option<M>,
    offload: Offload,
    optimizer: ModuleOptimizer,
    step: Vec<f64>,
    walk: Vec<f64>,
    updating: Vec<f64>,
    exposed: Vec<f64>,
}

impl<M: Module> Trained<M> {
    fn new(model: M, schedule: Schedule, dtype: Option<FloatDType>) -> Self {
        let config = OffloadConfig::new()
            .with_dtype(dtype)
            .with_schedule(schedule);
        let adamw = AdamWConfig::new().with_weight_decay(0.01);
        let (model, offload) = adamw
            .with_offload(config)
            .init(model)
            .expect("the models of this benchmark can be offloaded");
        Self {
            model: Some(model),
            optimizer: offload.optimizer(),
            offload,
            step: vec![],
            walk: vec![],
            updating: vec![],
            exposed: vec![],
        }
    }

    fn round(&mut self, counts: bool, device: &Device, loss: impl Fn(&M) -> Tensor<1>) {
        let Some(model) = self.model.take() else {
            return;
        };
        let started = Instant::now();
        let loss = loss(&model);
        // The updates of the round before are done where its weights have been used.
        let before = self.offload.report();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let walk = Instant::now();
        let model = self.optimizer.step(1e-4, model, grads);
        let walk = walk.elapsed();
        device.sync().expect("the device can be waited for");
        if counts {
            self.step.push(started.elapsed().as_secs_f64());
            self.walk.push(walk.as_secs_f64());
            self.updating.push(before.updating.as_secs_f64());
            self.exposed.push(before.exposed().as_secs_f64());
        }
        self.model = Some(model);
    }
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

fn compare<M: Module>(
    title: &str,
    rounds: usize,
    device: &Device,
    dtype: Option<FloatDType>,
    model: impl Fn() -> M,
    loss: impl Fn(&M) -> Tensor<1>,
) {
    println!(
        "\n{title}, medians of {} rounds\n",
        rounds.next_multiple_of(TURN - COLD)
    );
    println!(
        "| schedule | round, ms | in `step`, ms | updates, ms | exposed, ms | spans a round | timeline |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|");
    let mut all = SCHEDULES.map(|(_, schedule)| Trained::new(model(), schedule, dtype));
    let turns = rounds.div_ceil(TURN - COLD);
    for _ in 0..turns {
        for trained in &mut all {
            for number in 0..TURN {
                trained.round(number >= COLD, device, &loss);
            }
            // What one schedule leaves to be done is not to slow the next one's turn.
            let flushed = trained.offload.flush();
            flushed.expect("updates can be done");
        }
    }
    for ((name, _), trained) in SCHEDULES.into_iter().zip(&all) {
        let last = (turns * TURN) as u64 - 1;
        let spans = trained.offload.trace().of_rounds(last..=last).spans().len();
        let [step, walk, updating, exposed] = [
            &trained.step,
            &trained.walk,
            &trained.updating,
            &trained.exposed,
        ]
        .map(|seconds| median(seconds) * 1e3);
        println!(
            "| {name} | {step:.2} | {walk:.2} | {updating:.2} | {exposed:.2} | {spans} | {:.2} % |",
            spans as f64 * SPAN * 1e-6 / step * 100.0
        );
    }
}

#[derive(Module, Debug)]
struct Many {
    tensors: Vec<Param<Tensor<1>>>,
}

fn main() {
    let rounds = device::argument(0, "STEPS").unwrap_or(100).max(5);
    let config = GptConfig {
        vocab: 256,
        layers: device::argument(2, "LAYERS").unwrap_or(4),
        width: device::argument(1, "WIDTH").unwrap_or(256),
        heads: 4,
        context: 64,
    };
    let tensors = device::argument(3, "TENSORS").unwrap_or(10_000).max(1);
    let device = device::device().autodiff();
    let tokens = Tensor::<1, Int>::arange(0..4 * 64, &device);
    let tokens = tokens.remainder_scalar(256).reshape([4, 64]);
    compare(
        &format!(
            "GPT of width {} and {} layers on {device:?}",
            config.width, config.layers
        ),
        rounds,
        &device,
        device::dtype(),
        || config.init(&device),
        |model: &Gpt| model.loss(tokens.clone(), tokens.clone()),
    );
    let many = || Many {
        tensors: (0..tensors)
            .map(|_| Param::from_tensor(Tensor::full([6400], 0.01, &device)))
            .collect(),
    };
    compare(
        &format!("{tensors} tensors of 6400 elements"),
        rounds.min(9),
        &device,
        Some(FloatDType::BF16),
        many,
        |model: &Many| {
            let sums = model.tensors.iter().map(|tensor| tensor.val().sum());
            sums.map(|sum| sum.cast(FloatDType::F32))
                .reduce(|all, sum| all + sum)
                .expect("a model has parameters")
        },
    );
}
