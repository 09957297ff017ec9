//! What master weights and state are kept in.

use burn::module::{Module, Param, ParamGroup};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdaGradConfig, AdamWConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_zero_offload::{
    Offload, OffloadConfig, OffloadError, SimdLevel, StatePrecision, WithOffload,
};

use crate::common::vectors::{Vectors, with_gradient};
use crate::common::{config, devices, optimizer_state, read, step, tensor, values, weights};

/// Predicts a token from the one before it; no matrix product in half precision.
#[derive(Module, Debug)]
struct Bigrams {
    embedding: Embedding,
    head: Linear,
    bias: Param<Tensor<1>>,
}

const TOKENS: usize = 24;

impl Bigrams {
    fn new(device: &Device) -> Self {
        let weight =
            |shape: [usize; 2], seed| Param::from_tensor(tensor(shape, seed, device) * 0.1);
        let mut embedding = EmbeddingConfig::new(TOKENS, 32).init(device);
        embedding.weight = weight([TOKENS, 32], 1);
        let mut head = LinearConfig::new(32, TOKENS).with_bias(false).init(device);
        head.weight = weight([32, TOKENS], 2);
        Self {
            embedding,
            head,
            bias: Param::from_tensor(tensor([TOKENS], 3, device) * 0.1),
        }
    }

    fn loss(&self, round: u64) -> Tensor<1> {
        let device = self.bias.device();
        let tokens: Vec<i64> = values(33, 1000 + round)
            .iter()
            .scan(round as i64 % TOKENS as i64, |token, noise| {
                // Most of the time the next one is known.
                let jump = i64::from(*noise > 0.7) * 5;
                *token = (*token * 7 + 3 + jump) % TOKENS as i64;
                Some(*token)
            })
            .collect();
        let inputs = Tensor::<1, Int>::from_ints(&tokens[..32], &device).unsqueeze::<2>();
        let targets = Tensor::<1, Int>::from_ints(&tokens[1..], &device);
        let hidden = self.embedding.forward(inputs).squeeze_dim::<2>(0);
        let hidden = hidden.cast(FloatDType::F32);
        let logits = hidden.matmul(self.head.weight.val().cast(FloatDType::F32));
        let logits = logits + self.bias.val().cast(FloatDType::F32).unsqueeze();
        let chosen = log_softmax(logits, 1).gather(1, targets.unsqueeze_dim(1));
        -chosen.mean()
    }
}

fn kept(precision: StatePrecision) -> OffloadConfig {
    config(FloatDType::BF16).with_state_precision(Some(precision))
}

fn offloaded(config: OffloadConfig, device: &Device) -> (Bigrams, Offload, ModuleOptimizer) {
    let (model, offload) = AdamWConfig::new()
        .with_weight_decay(0.01)
        .with_offload(config)
        .init(Bigrams::new(device))
        .unwrap();
    let optimizer = offload.optimizer();
    (model, offload, optimizer)
}

fn train(
    mut model: Bigrams,
    optimizer: &mut ModuleOptimizer,
    rounds: std::ops::Range<u64>,
) -> (Bigrams, f32) {
    let mut last = 0.0;
    for round in rounds {
        let loss = model.loss(round);
        last = 0.9 * last + 0.1 * read(&loss)[0];
        model = step(optimizer, 1e-2, model, loss);
    }
    (model, last)
}

fn masters(model: &Bigrams) -> Vec<(String, Vec<f32>)> {
    weights(&Bigrams::new(&Device::flex()).load_record(model.clone().into_record()))
}

/// Bytes of each: 2, 4 and 8 times what the device has, less with fewer bits.
#[test]
fn the_report_shows_what_each_precision_takes() {
    for device in devices() {
        for (precision, master, state) in [
            (StatePrecision::Full, 4.0, 8.0),
            (StatePrecision::SplitMaster, 4.0, 8.0),
            (StatePrecision::Bf16Moments, 4.0, 4.0),
            (StatePrecision::Int8Moments, 4.0, 2.125),
            (StatePrecision::Int8Master24, 3.0, 2.125),
        ] {
            let model = LinearConfig::new(64, 64).with_bias(false).init(&device);
            let (_, offload) = AdamWConfig::new()
                .with_offload(kept(precision))
                .init(model)
                .unwrap();
            let memory = offload.memory();
            let each = |bytes: usize| bytes as f64 / memory.parameters as f64;
            assert_eq!(each(memory.device_weights), 2.0);
            assert_eq!(each(memory.host_master), master, "{precision}");
            assert_eq!(each(memory.host_moments), state, "{precision}");
            assert_eq!(memory.state_precision, precision);
            assert_eq!(offload.report().state_precision, precision);
            assert_eq!(offload.report().groups[0].state_precision, [precision]);
        }
    }
}

#[test]
fn masters_are_split_by_default_where_the_device_holds_their_upper_half() {
    for device in devices() {
        for (dtype, expected) in [
            (FloatDType::BF16, StatePrecision::SplitMaster),
            (FloatDType::F16, StatePrecision::Full),
            (FloatDType::F32, StatePrecision::Full),
        ] {
            let (_, offload) = AdamWConfig::new()
                .with_offload(config(dtype))
                .init(LinearConfig::new(4, 4).init(&device))
                .unwrap();
            assert_eq!(offload.memory().state_precision, expected);
        }
        // A parameter kept in f32 has nothing to split; those beside it have.
        let config =
            config(FloatDType::BF16).with_full_precision(Some(ParamGroup::from_predicate("bias")));
        let (model, offload) = AdamWConfig::new()
            .with_offload(config)
            .init(LinearConfig::new(4, 4).init(&device))
            .unwrap();
        let both = [StatePrecision::SplitMaster, StatePrecision::Full];
        assert_eq!(offload.report().groups[0].state_precision, both);
        assert_eq!(offload.memory().host_master, 4 * 20);
        drop(model);
        // Nor has a whole model in f32.
        for (asked, expected) in [
            (StatePrecision::SplitMaster, StatePrecision::Full),
            (StatePrecision::Int8Master24, StatePrecision::Int8Moments),
        ] {
            let (_, offload) = AdamWConfig::new()
                .with_offload(kept(asked).with_dtype(Some(FloatDType::F32)))
                .init(LinearConfig::new(4, 4).init(&device))
                .unwrap();
            assert_eq!(offload.memory().state_precision, expected);
        }
    }
}

/// Verify mode computes tiles with the slow twins and reads all weights back: all of it is what it should
/// be, in every precision. Training goes where it goes with `Full`.
#[test]
fn every_precision_trains_and_verifies() {
    let device = Device::flex().autodiff();
    let run = |precision| {
        let config = kept(precision).with_verify(true);
        let (model, offload, mut optimizer) = offloaded(config, &device);
        let (_, loss) = train(model, &mut optimizer, 0..150);
        assert!(offload.report().verified > 0);
        loss
    };
    let full = run(StatePrecision::Full);
    assert!(full < 1.6, "{full}: it has learnt something");
    for precision in &StatePrecision::ALL[1..] {
        let loss = run(*precision);
        assert!(
            (loss / full - 1.0).abs() < 0.02,
            "{precision}: {loss} against {full}"
        );
    }
}

/// The same with tiles on their way to the device while others are computed, on every device.
#[test]
fn every_precision_verifies_on_every_device() {
    for device in devices() {
        for precision in StatePrecision::ALL {
            let model = Vectors::new(0.5, [1700, 40], &device);
            let config = kept(precision)
                .with_verify(true)
                .with_upload_tile(Some(512));
            let (mut model, offload) = AdamWConfig::new().with_offload(config).init(model).unwrap();
            let mut optimizer = offload.optimizer();
            for round in 0..4 {
                let loss = with_gradient(&model.a, &values(1700, round)).sum()
                    + with_gradient(&model.b, &values(40, 50 + round)).sum();
                model = step(&mut optimizer, 1e-2, model, loss);
            }
            // Nobody holds the weights but the model: upper halves are changed in place.
            assert_eq!(offload.report().bytes_copied, 0, "{precision}");
            // What is stepped can still be verified where a clone holds the old weights.
            let old = model.clone();
            let loss = with_gradient(&model.a, &values(1700, 9)).sum();
            model = step(&mut optimizer, 1e-2, model, loss);
            let held = read(&old.a.val());
            let loss = with_gradient(&model.a, &values(1700, 10)).sum();
            model = step(&mut optimizer, 1e-2, model, loss);
            assert_eq!(read(&old.a.val()), held, "a clone keeps its values");
            assert_ne!(read(&model.a.val()), held);
        }
    }
}

/// acceptance.md, CPU step 11, in every precision: a parameter without elements beside one that has some, in
/// tiles that are no multiple of the blocks of 8-bit state.
#[test]
fn empty_parameters_and_odd_tiles_are_no_matter() {
    let device = Device::flex().autodiff();
    for precision in StatePrecision::ALL {
        let config = kept(precision).with_verify(true).with_upload_tile(Some(37));
        let (mut model, offload) = AdamWConfig::new()
            .with_offload(config)
            .init(Vectors::new(0.5, [4, 0], &device))
            .unwrap();
        let mut optimizer = offload.optimizer();
        for _ in 0..3 {
            let loss = model.loss(&[1.0, -1.0, 1e-20, 3e4], &[]);
            model = step(&mut optimizer, 1e-2, model, loss);
        }
        let after = read(&model.a.val());
        assert!(
            after[0] < 0.5 && after[1] > 0.5 && after[3] < 0.5,
            "{after:?}"
        );
        assert!(after.iter().all(|weight| weight.is_finite()));
        assert!(read(&model.b.val()).is_empty());
    }
}

/// acceptance.md, checkpoint 57 and 63: five steps, a record, five more in another engine are ten steps,
/// bit for bit, rounded state included.
#[test]
fn a_resumed_run_is_the_run_in_every_precision() {
    let device = Device::flex().autodiff();
    for precision in StatePrecision::ALL {
        let (model, _, mut optimizer) = offloaded(kept(precision), &device);
        let (model, _) = train(model, &mut optimizer, 0..10);
        let expected = (masters(&model), optimizer_state(&optimizer));

        let (model, _, mut optimizer) = offloaded(kept(precision), &device);
        let (model, _) = train(model, &mut optimizer, 0..5);
        let (saved, state) = (model.into_record(), optimizer.into_bytes().unwrap());
        let (model, _, optimizer) = offloaded(kept(precision), &device);
        let model = model.load_record(saved);
        let mut optimizer = optimizer.from_bytes(state).unwrap();
        let (model, _) = train(model, &mut optimizer, 5..10);
        assert_eq!(
            (masters(&model), optimizer_state(&optimizer)),
            expected,
            "{precision}"
        );
    }
}

#[test]
fn threads_and_instruction_sets_change_no_bit_and_the_seed_does() {
    let device = Device::flex().autodiff();
    for precision in &StatePrecision::ALL[1..] {
        let run = |config: OffloadConfig| {
            let (model, _, mut optimizer) = offloaded(config, &device);
            masters(&train(model, &mut optimizer, 0..4).0)
        };
        let expected = run(kept(*precision).with_threads(Some(1)));
        for simd in SimdLevel::ALL
            .into_iter()
            .filter(|simd| simd.is_available())
        {
            let config = kept(*precision).with_threads(Some(3)).with_simd(Some(simd));
            assert_eq!(run(config), expected, "{precision} {simd:?}");
        }
        let other = run(kept(*precision).with_seed(1));
        let rounded = *precision != StatePrecision::SplitMaster;
        assert_eq!(other != expected, rounded, "{precision}");
    }
}

/// A record of a rounded run is one of Burn's, and goes into a run that is kept otherwise.
#[test]
fn records_go_from_one_precision_to_another() {
    let device = Device::flex().autodiff();
    for from in StatePrecision::ALL {
        let (model, _, mut optimizer) = offloaded(kept(from), &device);
        let (model, _) = train(model, &mut optimizer, 0..5);
        let (saved, state) = (masters(&model), optimizer_state(&optimizer));
        let (full, _, full_optimizer) = offloaded(kept(StatePrecision::Full), &device);
        let full = full.load_record(model.into_record());
        let full_optimizer = full_optimizer
            .from_bytes(optimizer.into_bytes().unwrap())
            .unwrap();
        assert_eq!(
            (masters(&full), optimizer_state(&full_optimizer)),
            (saved, state)
        );

        let (back, _, back_optimizer) = offloaded(kept(from), &device);
        let full_model = full.clone();
        let back = back.load_record(full.into_record());
        let back_optimizer = back_optimizer
            .from_bytes(full_optimizer.into_bytes().unwrap())
            .unwrap();
        assert_eq!(masters(&back), masters(&full_model), "{from}");
        let states = optimizer_state(&back_optimizer);
        for (a, b) in states.iter().zip(&optimizer_state(&full_optimizer)) {
            let peak = b.first.iter().fold(0.0f32, |peak, m| peak.max(m.abs()));
            for (a, b) in a.first.iter().zip(&b.first) {
                assert!((a - b).abs() <= 0.01 * peak, "{from}: {a} {b}");
            }
        }
    }
}

#[test]
fn groups_keep_what_they_are_told() {
    for device in devices() {
        let (model, offload) = AdamWConfig::new()
            .with_offload(kept(StatePrecision::Int8Moments))
            .with_state_precision(
                ParamGroup::from_predicate("embedding"),
                StatePrecision::Bf16Moments,
            )
            .with_group(ParamGroup::from_predicate("bias"), SgdConfig::new())
            .init(Bigrams::new(&device))
            .unwrap();
        let groups = offload.report().groups;
        let kinds = [StatePrecision::Bf16Moments, StatePrecision::Int8Moments];
        assert_eq!(groups[0].state_precision, kinds);
        assert_eq!(groups[1].state_precision, [StatePrecision::Int8Moments]);
        let weights = TOKENS * 32;
        let scales = |len: usize| len.div_ceil(512) * 32;
        let moments = 2 * (2 * weights) + 2 * (weights + scales(weights));
        assert_eq!(offload.memory().host_moments, moments, "SGD keeps nothing");
        drop(model);
    }
}

#[test]
fn what_cannot_be_kept_so_is_refused_with_the_reason() {
    let device = Device::flex().autodiff();
    let model = || LinearConfig::new(4, 4).init(&device);
    let refused = |result: Result<(Linear, Offload), OffloadError>| {
        let error = result.expect_err("it is refused");
        assert!(
            matches!(error, OffloadError::StatePrecision { .. }),
            "{error}"
        );
        error.to_string()
    };
    for precision in [StatePrecision::SplitMaster, StatePrecision::Int8Master24] {
        let config = config(FloatDType::F16).with_state_precision(Some(precision));
        let error = refused(AdamWConfig::new().with_offload(config).init(model()));
        assert!(
            error.contains("`weight`") && error.contains("f16, not bf16"),
            "{error}"
        );
    }
    for rule in [
        AdaGradConfig::new().with_offload(kept(StatePrecision::Bf16Moments)),
        AdamWConfig::new()
            .with_amsgrad(true)
            .with_offload(kept(StatePrecision::Int8Moments)),
    ] {
        let error = refused(rule.init(model()));
        assert!(error.contains("does not bear rounding"), "{error}");
    }
    let nothing = AdamWConfig::new()
        .with_offload(config(FloatDType::BF16))
        .with_state_precision(ParamGroup::from_predicate("none"), StatePrecision::Full)
        .init(model());
    let error = nothing.expect_err("the group is empty").to_string();
    assert!(error.contains("with_state_precision"), "{error}");
}
