//! Random models and what happens to them.

use burn::tensor::FloatDType;
use burn_zero_offload::Schedule;
use proptest::collection::vec;
use proptest::prelude::*;

/// A parameter of a random model.
#[derive(Clone, Debug)]
pub struct Spec {
    pub len: usize,
    /// Uses in each pass.
    pub uses: usize,
    pub group: Group,
    pub frozen: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Group {
    AdamW,
    Momentum,
    Lion,
}

/// A random run.
#[derive(Clone, Debug)]
pub struct Run {
    pub parameters: Vec<Spec>,
    pub dtype: FloatDType,
    /// Passes of each round. In a pass a parameter is used if its bit is set; the first always is.
    pub rounds: Vec<Vec<u8>>,
    /// Round, pass and parameter of gradients that are not finite.
    pub overflows: Vec<(usize, usize, usize)>,
    pub mean: bool,
    pub max_norm: Option<f32>,
    pub first_scale: f32,
    pub growth_interval: usize,
    pub threads: usize,
    pub schedule: Schedule,
    /// What is done after each round.
    pub looks: Vec<Look>,
}

/// What a user may do between steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Look {
    Away,
    Flush,
    Settle,
    Save,
    /// A validation copy of the model.
    Validate,
    Memory,
}

pub fn looks() -> impl Strategy<Value = Vec<Look>> {
    let look = prop_oneof![
        6 => Just(Look::Away),
        1 => Just(Look::Flush),
        1 => Just(Look::Settle),
        1 => Just(Look::Save),
        1 => Just(Look::Validate),
        1 => Just(Look::Memory),
    ];
    vec(look, 6)
}

pub fn schedule() -> impl Strategy<Value = Schedule> {
    prop_oneof![
        1 => Just(Schedule::Synchronous),
        2 => Just(Schedule::ForwardOverlapped),
        2 => (0u64..4).prop_map(|warmup| Schedule::Delayed { warmup }),
    ]
}

/// A parameter of `shortest` elements or more.
pub fn spec(shortest: usize) -> impl Strategy<Value = Spec> {
    let len = prop_oneof![8 => shortest..40, 1 => 4090usize..4100, 1 => Just(9000usize)];
    let group = prop_oneof![Just(Group::AdamW), Just(Group::Momentum), Just(Group::Lion)];
    (len, 0usize..4, group, prop::bool::weighted(0.2)).prop_map(|(len, uses, group, frozen)| Spec {
        len,
        uses,
        group,
        frozen,
    })
}

pub fn run(shortest: usize) -> impl Strategy<Value = Run> {
    let dtype = prop_oneof![
        Just(FloatDType::F32),
        Just(FloatDType::F16),
        Just(FloatDType::BF16)
    ];
    let rounds = vec(vec(any::<u8>(), 1..4), 1..6);
    let overflows = vec((0usize..6, 0usize..4, 0usize..6), 0..3);
    let scale = (0i32..24).prop_map(|power| 2f32.powi(power));
    let policy = (
        any::<bool>(),
        prop::option::of(0.01f32..2.0),
        scale,
        1usize..4,
    );
    let model = (vec(spec(shortest), 1..6), dtype);
    let timing = (schedule(), looks(), 1usize..4);
    (model, rounds, overflows, policy, timing).prop_map(
        |(model, rounds, overflows, policy, timing)| {
            let (schedule, looks, threads) = timing;
            let (mut parameters, dtype) = model;
            let (mean, max_norm, first_scale, growth_interval) = policy;
            // Something has to train, and every pass has to have a gradient.
            let first = &mut parameters[0];
            (first.frozen, first.uses) = (false, first.uses.max(1));
            Run {
                parameters,
                dtype,
                rounds,
                overflows,
                mean,
                max_norm,
                first_scale,
                growth_interval,
                threads,
                schedule,
                looks,
            }
        },
    )
}
