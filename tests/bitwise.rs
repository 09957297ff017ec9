//! The run with everything on is the run it would be without offload, bit for bit.
//!
//! The reference is a plain loop: masters and optimizer state in vectors, the scalar oracle of each
//! rule, gradients read from leaves one by one, norm and loss scale in a few lines of their own. On Flex:
//! a device that fuses operations fuses those around a tap otherwise than those around a leaf, and its
//! arithmetic is its own. `random_models` makes the comparison there, with losses it cannot round
//! in two ways.

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Module, Param, ParamGroup};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, LionConfig, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use burn_zero_offload::optimize::Rule;
use burn_zero_offload::optimize::rules::{Adam, AmsGrad, Lion, Momentum, WeightDecay};
use burn_zero_offload::{
    Accumulation, DynamicLossScaleConfig, LossScaleConfig, OffloadConfig, Schedule, WithOffload,
};

use crate::common::reference::{self, Ended, Parameter, PlainLoop, add, image};
use crate::common::{optimizer_time, optimizer_values, values, weights};

const ROUNDS: usize = 100;
const PASSES: usize = 4;
const MAX_NORM: f64 = 0.75;
const OWN_NORM: f64 = 0.03125;
/// Two tiles and a bit.
const LARGE: usize = 2 * 4096 + 5;

#[derive(Module, Debug)]
struct Net {
    /// Used twice in each pass.
    tied: Param<Tensor<2>>,
    bias: Param<Tensor<1>>,
    /// AMSGrad with clipping of its own.
    gain: Param<Tensor<1>>,
    frozen: Param<Tensor<1>>,
    /// Several tiles; Lion.
    large: Param<Tensor<1>>,
    /// In f32 on the device; momentum.
    head: Param<Tensor<1>>,
    /// Used in every third round only.
    rare: Param<Tensor<1>>,
}

fn initial(name: &str) -> Vec<f32> {
    let (len, seed) = match name {
        "tied" => (48, 1),
        "bias" => (8, 2),
        "gain" => (8, 3),
        "frozen" => (8, 4),
        "large" => (LARGE, 5),
        "head" => (8, 6),
        "rare" => (3, 7),
        other => panic!("there is no {other}"),
    };
    values(len, seed)
}

impl Net {
    fn new(device: &Device) -> Self {
        let vector = |name| Param::from_data(TensorData::from(initial(name).as_slice()), device);
        Self {
            tied: Param::from_data(TensorData::new(initial("tied"), [6, 8]), device),
            bias: vector("bias"),
            gain: vector("gain"),
            frozen: vector("frozen").no_grad(),
            large: vector("large"),
            head: vector("head"),
            rare: vector("rare"),
        }
    }

    fn uses(&self, round: usize) -> Uses {
        Uses {
            tied: [self.tied.val(), self.tied.val()],
            bias: self.bias.val(),
            gain: self.gain.val(),
            frozen: self.frozen.val(),
            large: self.large.val(),
            head: self.head.val(),
            rare: round.is_multiple_of(3).then(|| self.rare.val()),
        }
    }
}

/// The weights of a pass, one tensor for each use.
struct Uses {
    tied: [Tensor<2>; 2],
    bias: Tensor<1>,
    gain: Tensor<1>,
    frozen: Tensor<1>,
    large: Tensor<1>,
    head: Tensor<1>,
    rare: Option<Tensor<1>>,
}

/// Rounds with a pass that is not finite, besides those where the scale is too large.
fn overflows(round: usize, pass: usize) -> bool {
    [(17, 2), (40, 0), (41, 3), (77, 1)].contains(&(round, pass))
}

fn loss(uses: &Uses, round: usize, pass: usize) -> Tensor<1> {
    let device = uses.bias.device();
    let dtype = uses.bias.dtype();
    let seed = (round * PASSES + pass) as u64;
    let input = |len, seed| TensorData::new(values(len, seed), [len]);
    let x = Tensor::<1>::from_data(input(48, 1000 + seed), (&device, dtype)).reshape([6, 8]);
    let far = Tensor::<1>::from_data(input(LARGE, 5000 + seed), (&device, dtype));
    let h = x * uses.tied[0].clone() + uses.bias.clone().unsqueeze();
    let h = h * uses.gain.clone().unsqueeze() * uses.frozen.clone().unsqueeze();
    let h = (h * uses.tied[1].clone()).cast(FloatDType::F32) * uses.head.clone().unsqueeze();
    let mut loss = (h.clone() * h).mean() + (far * uses.large.clone()).cast(FloatDType::F32).mean();
    if let Some(rare) = &uses.rare {
        loss = loss + rare.clone().cast(FloatDType::F32).powf_scalar(2.0).sum();
    }
    if overflows(round, pass) {
        loss * f32::INFINITY
    } else {
        loss
    }
}

const NAMES: [&str; 6] = ["tied", "bias", "gain", "large", "head", "rare"];

fn adam(weight_decay: f32) -> Adam {
    Adam {
        beta_1: 0.9,
        beta_2: 0.999,
        epsilon: 1e-5,
        weight_decay: WeightDecay::Decoupled(weight_decay),
    }
}

fn parameters() -> Vec<Box<dyn Parameter>> {
    fn plain<const N: usize>(
        name: &str,
        rule: impl Rule<N>,
        own_norm: Option<f64>,
    ) -> Box<dyn Parameter> {
        reference::parameter(rule, own_norm, initial(name))
    }
    let lion = Lion {
        beta_1: 0.9,
        beta_2: 0.99,
        weight_decay: 0.5,
    };
    let momentum = Momentum {
        penalty: 0.0,
        momentum: 0.9,
        dampening: 0.1,
        nesterov: true,
    };
    vec![
        plain("tied", adam(0.1), None),
        plain("bias", adam(0.1), None),
        plain("gain", AmsGrad(adam(0.0)), Some(OWN_NORM)),
        plain("large", lion, None),
        plain("head", momentum, None),
        plain("rare", adam(0.1), None),
    ]
}

fn learning_rate(round: usize) -> f64 {
    1e-2 / (1.0 + round as f64 / 20.0)
}

/// What a run ends with: masters, state and time of every parameter, and the scales on the way.
struct End {
    parameters: Vec<Ending>,
    scales: Vec<f32>,
    skipped: Vec<usize>,
    /// Rounds whose gradients were clipped.
    clipped: Vec<usize>,
}

/// A parameter at the end, in bits.
struct Ending {
    name: &'static str,
    master: Vec<u32>,
    state: Vec<Vec<u32>>,
    time: u64,
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn plain_loop(dtype: FloatDType, device: &Device) -> End {
    let mut run = PlainLoop::new(parameters(), FIRST_SCALE);
    run.max_norm = Some(MAX_NORM);
    run.mean = true;
    run.growth_interval = GROWTH;
    let (mut scales, mut skipped, mut clipped) = (vec![], vec![], vec![]);
    for round in 0..ROUNDS {
        let leaf = |index: usize| {
            let dtype = match NAMES[index] {
                "head" => FloatDType::F32,
                _ => dtype,
            };
            image(run.parameters[index].master(), dtype, device).require_grad()
        };
        let mut sums: Vec<Option<Vec<f32>>> = vec![None; NAMES.len()];
        for pass in 0..PASSES {
            let tied = [leaf(0), leaf(0)];
            let uses = Uses {
                tied: tied.each_ref().map(|t| t.clone().reshape([6, 8])),
                bias: leaf(1),
                gain: leaf(2),
                // A frozen weight has no master: the device casts it.
                frozen: Tensor::<1>::from_floats(&initial("frozen")[..], device).cast(dtype),
                large: leaf(3),
                head: leaf(4),
                rare: round.is_multiple_of(3).then(|| leaf(5)),
            };
            let grads = (loss(&uses, round, pass) * run.scale).backward();
            // The use that came last in forward comes first in backward.
            let used = [
                &tied[1],
                &tied[0],
                &uses.bias,
                &uses.gain,
                &uses.large,
                &uses.head,
            ];
            let used = [0, 0, 1, 2, 3, 4].into_iter().zip(used);
            for (index, leaf) in used.chain(uses.rare.iter().map(|rare| (5, rare))) {
                add(
                    &mut sums[index],
                    leaf.grad(&grads).expect("a leaf that was used"),
                );
            }
        }
        match run.end(learning_rate(round), PASSES, &sums) {
            Ended::Applied(norm) if norm > MAX_NORM => clipped.push(round),
            Ended::Applied(_) => {}
            Ended::Skipped => skipped.push(round),
            Ended::Empty => panic!("every round has gradients"),
        }
        scales.push(run.scale);
    }
    let parameters = NAMES
        .into_iter()
        .zip(&run.parameters)
        .map(|(name, parameter)| {
            let state = parameter.state();
            let state = state.iter().map(|(_, values)| bits(values)).collect();
            Ending {
                name,
                master: bits(parameter.master()),
                state,
                time: parameter.time(),
            }
        });
    End {
        parameters: parameters.collect(),
        scales,
        skipped,
        clipped,
    }
}

const FIRST_SCALE: f32 = 4_194_304.0;
const GROWTH: usize = 7;

fn offloaded(dtype: FloatDType, threads: usize, schedule: Schedule, device: &Device) -> End {
    let group = |name: &str| ParamGroup::from_path(name);
    let dynamic = DynamicLossScaleConfig::new()
        .with_initial(FIRST_SCALE)
        .with_growth_interval(GROWTH as u64);
    let config = OffloadConfig::new()
        .with_dtype(Some(dtype))
        .with_full_precision(Some(group("head")))
        .with_threads(Some(threads))
        .with_schedule(schedule)
        .with_loss_scale(Some(LossScaleConfig::Dynamic(dynamic)))
        .with_max_grad_norm(Some(MAX_NORM as f32))
        .with_accumulation(Accumulation::Mean)
        .with_micro_batches(Some(PASSES))
        .with_verify(true);
    let own = GradientClippingConfig::Norm(OWN_NORM as f32);
    let adamw = |decay| AdamWConfig::new().with_weight_decay(decay);
    let momentum = MomentumConfig::new().with_nesterov(true);
    let (mut model, offload) = adamw(0.1)
        .with_offload(config)
        .with_group(
            group("gain"),
            adamw(0.0).with_amsgrad(true).with_grad_clipping(Some(own)),
        )
        .with_group(group("large"), LionConfig::new().with_weight_decay(0.5))
        .with_group(
            group("head"),
            SgdConfig::new().with_momentum(Some(momentum)),
        )
        .init(Net::new(device))
        .unwrap();
    let mut optimizer = offload.optimizer();
    let (mut scales, mut skipped, mut clipped) = (vec![], vec![], vec![]);
    for round in 0..ROUNDS {
        let pass = |pass| {
            let loss = offload.scale(loss(&model.uses(round), round, pass));
            GradientsParams::from_grads(loss.backward(), &model)
        };
        let last = (1..PASSES).fold(pass(0), |_, next| pass(next));
        model = optimizer.step(learning_rate(round), model, last);
        let report = offload.report();
        scales.push(report.next_loss_scale);
        if !report.applied() {
            skipped.push(round);
        } else if report.grad_norm > MAX_NORM {
            clipped.push(round);
        }
    }
    let plain = weights(&Net::new(&Device::flex()).load_record(model.into_record()));
    let parameters = NAMES
        .into_iter()
        .zip(parameters())
        .map(|(name, parameter)| {
            let (_, master) = plain.iter().find(|(path, _)| path == name).unwrap();
            let state = parameter.state();
            let state = state
                .iter()
                .map(|(leaf, _)| bits(&optimizer_values(&optimizer, name, leaf)));
            Ending {
                name,
                master: bits(master),
                state: state.collect(),
                time: optimizer_time(&optimizer, name),
            }
        });
    End {
        parameters: parameters.collect(),
        scales,
        skipped,
        clipped,
    }
}

#[track_caller]
fn assert_same(got: &End, expected: &End) {
    assert_eq!(got.skipped, expected.skipped);
    assert_eq!(got.scales, expected.scales);
    assert_eq!(got.clipped, expected.clipped);
    for (got, expected) in got.parameters.iter().zip(&expected.parameters) {
        assert_eq!(got.name, expected.name);
        assert_eq!(got.time, expected.time, "time of {}", got.name);
        assert!(
            got.master == expected.master,
            "master weights of {}",
            got.name
        );
        assert!(got.state == expected.state, "state of {}", got.name);
    }
}

fn assert_same_for_every_thread_count(dtype: FloatDType) {
    let device = &Device::flex().autodiff();
    let expected = plain_loop(dtype, device);
    let natural = expected
        .skipped
        .iter()
        .filter(|r| ![17, 40, 41, 77].contains(*r));
    if dtype == FloatDType::F16 {
        assert!(
            natural.count() > 0,
            "the first scales are too large for f16"
        );
    }
    for round in [17, 40, 41, 77] {
        assert!(expected.skipped.contains(&round), "{:?}", expected.skipped);
    }
    assert!(expected.skipped.len() < 40, "{:?}", expected.skipped);
    let clipped = expected.clipped.len();
    assert!((10..90).contains(&clipped), "{clipped} rounds were clipped");
    for threads in [1, 2, 8] {
        let delayed = Schedule::Delayed { warmup: u64::MAX };
        for schedule in [Schedule::Synchronous, Schedule::ForwardOverlapped, delayed] {
            let got = offloaded(dtype, threads, schedule, device);
            assert_same(&got, &expected);
        }
    }
}

/// Clipping of all and of one, dynamic scaling with forced overflows, means over 4 passes, groups of four
/// rules, a tied weight, a frozen one, one in f32, one that is not always used; 100 rounds, every schedule that is
/// exact.
#[test]
fn f16_with_everything_on_equals_the_plain_loop() {
    assert_same_for_every_thread_count(FloatDType::F16);
}

#[test]
fn bf16_with_everything_on_equals_the_plain_loop() {
    assert_same_for_every_thread_count(FloatDType::BF16);
}

#[test]
fn f32_with_everything_on_equals_the_plain_loop() {
    assert_same_for_every_thread_count(FloatDType::F32);
}
