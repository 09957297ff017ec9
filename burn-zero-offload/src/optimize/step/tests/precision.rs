//! Every way to keep master weights and state against its slow twin: decode, plain loop, encode.

use half::{bf16, f16};

use super::{adam, levels, scaling, values};
use crate::host::HostState;
use crate::optimize::rules::{Lion, Momentum, RmsProp, Sgd, WeightDecay};
use crate::optimize::{
    DeviceImage, GradientScaling, GradientView, HostRule, Noise, Precision, SimdLevel,
    StatePrecision, TILE, TileStep, Update, Work,
};

/// Gradients of one type.
enum Gradients {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Gradients {
    fn of(precision: Precision, values: &[f32]) -> Self {
        match precision {
            Precision::F32 => Self::F32(values.to_vec()),
            Precision::F16 => Self::F16(values.iter().map(|&g| f16::from_f32(g)).collect()),
            Precision::Bf16 => Self::Bf16(values.iter().map(|&g| bf16::from_f32(g)).collect()),
        }
    }

    fn view(&self) -> GradientView<'_> {
        match self {
            Self::F32(g) => GradientView::F32(g),
            Self::F16(g) => GradientView::F16(g),
            Self::Bf16(g) => GradientView::Bf16(g),
        }
    }
}

fn precisions() -> [Precision; 3] {
    [Precision::F32, Precision::F16, Precision::Bf16]
}

/// The update as the slow twins do it.
fn slow(state: &mut HostState, update: &Update, gradient: GradientView<'_>) {
    let (mut master, mut values) = (state.master(), state.state());
    let mut widened = vec![0.0; master.len()];
    gradient.widen_into(0..master.len(), &mut widened);
    update.oracle(&mut master, &mut values, &widened);
    state.write_master(0, &master, Some(update.noise()));
    state.set_state(&values, Some(update.noise()));
}

fn fast(
    state: &mut HostState,
    step: &TileStep,
    update: &Update,
    gradient: GradientView<'_>,
    image: &mut DeviceImage,
) {
    let work = state.work(update, gradient, image.as_mut());
    step.update_all(vec![work]);
}

type Bits = (Vec<u32>, Vec<Vec<u32>>, Vec<Option<Vec<f32>>>);

fn bits(state: &HostState) -> Bits {
    let of = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let values = state.state().iter().map(|v| of(v)).collect();
    (of(&state.master()), values, state.scales())
}

#[track_caller]
fn assert_equals_its_slow_twin(
    rule: &HostRule,
    kept: StatePrecision,
    device: Precision,
    from: Precision,
    n: usize,
    scaling: GradientScaling,
) {
    let start = values(n, 7);
    let new = || HostState::new(rule, device, kept, &start);
    let run = |update: &dyn Fn(&mut HostState, &Update, GradientView<'_>)| {
        let mut state = new();
        for t in 1..=3 {
            let gradient = Gradients::of(from, &values(n, t as u32));
            let begun = rule.begin(t, 0.01, scaling);
            let begun = begun.with_noise(Noise::new(11, 5, t));
            update(&mut state, &begun, gradient.view());
        }
        state
    };
    let expected = run(&slow);
    for simd in levels() {
        let mut image = DeviceImage::zeroed(device, n);
        let step = TileStep::new(simd);
        let image_of = std::cell::RefCell::new(&mut image);
        let got = run(&|state, update, gradient| {
            fast(state, &step, update, gradient, &mut image_of.borrow_mut());
        });
        let what = format!("{rule:?}, {kept:?}, {from:?} to {device:?}, {n} elements, {simd:?}");
        assert_eq!(bits(&got), bits(&expected), "{what}");
        if got.halves().is_none() {
            assert_eq!(image, got.image(), "{what}");
        }
    }
}

/// acceptance.md, CPU step 2, 4 and 8, for every precision, length and type of weights and gradients.
#[test]
fn every_precision_equals_its_slow_twin_bit_for_bit() {
    let rule = HostRule::new(adam(WeightDecay::Decoupled(0.1)));
    let none = GradientScaling {
        factor: 0.75,
        ..GradientScaling::NONE
    };
    for kept in StatePrecision::ALL {
        for n in [1, 15, 16, 17, 33, 140, 511, 512, 513, 1023, 4 * TILE + 531] {
            assert_equals_its_slow_twin(&rule, kept, Precision::Bf16, Precision::Bf16, n, none);
        }
        for device in precisions() {
            for from in precisions() {
                for scaling in [none, scaling()] {
                    assert_equals_its_slow_twin(&rule, kept, device, from, 1200, scaling);
                }
            }
        }
    }
}

#[test]
fn every_rule_that_bears_rounding_equals_its_slow_twin() {
    let (alpha, momentum, epsilon, penalty) = (0.9, 0.5, 1e-6, 0.01);
    let rules = [
        HostRule::new(adam(WeightDecay::L2(0.1))),
        HostRule::new(adam(WeightDecay::Cautious(0.1))),
        HostRule::new(Lion {
            beta_1: 0.9,
            beta_2: 0.99,
            weight_decay: 0.1,
        }),
        HostRule::new(Momentum {
            penalty,
            momentum,
            dampening: 0.25,
            nesterov: true,
        }),
        HostRule::new(Sgd { penalty }),
        HostRule::new(RmsProp::<false, false> {
            alpha,
            momentum,
            epsilon,
            penalty,
        }),
        HostRule::new(RmsProp::<false, true> {
            alpha,
            momentum,
            epsilon,
            penalty,
        }),
    ];
    for rule in rules {
        for kept in StatePrecision::ALL {
            let (device, none) = (Precision::Bf16, GradientScaling::NONE);
            assert_equals_its_slow_twin(&rule, kept, device, device, TILE + 77, none);
        }
    }
}

/// acceptance.md, concurrency 76: tiles and threads change no bit, of rounded state either.
#[test]
fn tiles_and_threads_change_no_bit_of_any_precision() {
    let rule = HostRule::new(adam(WeightDecay::Decoupled(0.1)));
    let n = 9 * TILE + 17;
    for kept in StatePrecision::ALL {
        let mut expected = None;
        for (tile, threads) in [(TILE, 1), (TILE, 8), (1000, 2), (7, 2), (512, 3)] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            let mut state = HostState::new(&rule, Precision::Bf16, kept, &values(n, 7));
            let mut image = DeviceImage::zeroed(Precision::Bf16, n);
            let step = TileStep {
                simd: SimdLevel::best(),
                tile,
            };
            pool.build().unwrap().install(|| {
                for t in 1..=2 {
                    let gradient = Gradients::of(Precision::Bf16, &values(n, t as u32));
                    let update = rule.begin(t, 0.01, GradientScaling::NONE);
                    fast(&mut state, &step, &update, gradient.view(), &mut image);
                }
            });
            let got = bits(&state);
            let expected = expected.get_or_insert_with(|| got.clone());
            assert_eq!(got, *expected, "{kept:?}, tile {tile}, {threads} threads");
        }
    }
}

#[test]
fn parameters_together_get_what_they_get_alone() {
    let rule = HostRule::new(adam(WeightDecay::Decoupled(0.1)));
    let lens = [3, 0, 5 * TILE, 1, 700, 2 * TILE, 64, 64, 64];
    for kept in StatePrecision::ALL {
        let new = |len: &usize| HostState::new(&rule, Precision::Bf16, kept, &values(*len, 3));
        let mut together: Vec<_> = lens.iter().map(new).collect();
        let mut alone: Vec<_> = lens.iter().map(new).collect();
        let gradients = lens.map(|len| Gradients::of(Precision::Bf16, &values(len, 9)));
        let update = rule.begin(1, 0.01, GradientScaling::NONE);
        let step = TileStep::new(SimdLevel::best());
        let mut images = lens.map(|len| DeviceImage::zeroed(Precision::Bf16, len));
        for ((state, gradient), image) in alone.iter_mut().zip(&gradients).zip(&mut images) {
            fast(state, &step, &update, gradient.view(), image);
        }
        let mut others = lens.map(|len| DeviceImage::zeroed(Precision::Bf16, len));
        let all = together.iter_mut().zip(&gradients).zip(&mut others);
        let works: Vec<Work<'_>> = all
            .map(|((state, gradient), image)| state.work(&update, gradient.view(), image.as_mut()))
            .collect();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build();
        pool.unwrap().install(|| step.update_all(works));
        for (a, b) in together.iter().zip(&alone) {
            assert_eq!(bits(a), bits(b), "{kept:?}");
        }
        assert_eq!(images, others);
    }
}

/// The masters and gradients that are hard: subnormals, extremes, both zeros, ties of rounding.
fn hard(n: usize, seed: u32) -> Vec<f32> {
    let special = [
        1e-45f32,
        -3e-42,
        f32::MIN_POSITIVE,
        1.0 + 1.0 / 256.0,
        -(1.0 + 3.0 / 256.0),
        2f32.powi(60),
        -2f32.powi(-60),
        0.0,
        -0.0,
        1.5e30,
        f32::from_bits(0x3f7f_8000),
        f32::from_bits(0x3f80_7fff),
    ];
    let mut values = values(n, seed);
    for (i, value) in values.iter_mut().enumerate() {
        if (i + seed as usize).is_multiple_of(3) {
            *value = special[(i / 3 + seed as usize) % special.len()];
        }
    }
    values
}

/// Ten thousand steps on values that are hard: the exact ways to keep state are the plain loop, bit for
/// bit, and each other.
#[test]
fn exact_precisions_stay_exact_over_ten_thousand_steps() {
    let n = 75;
    let rule = HostRule::new(adam(WeightDecay::Decoupled(0.1)));
    let start = hard(n, 1);
    let mut states: Vec<(StatePrecision, SimdLevel, HostState)> = Vec::new();
    for kept in [StatePrecision::Full, StatePrecision::SplitMaster] {
        for simd in levels().filter(|level| *level != SimdLevel::Scalar) {
            let state = HostState::new(&rule, Precision::Bf16, kept, &start);
            states.push((kept, simd, state));
        }
    }
    let (mut master, mut values) = (start.clone(), vec![vec![0.0; n]; 2]);
    let mut image = DeviceImage::zeroed(Precision::Bf16, n);
    for t in 1..=10_000u64 {
        let gradient = Gradients::of(Precision::Bf16, &hard(n, t as u32 % 500));
        let update = rule.begin(t, 1e-3 / (t as f64).sqrt(), GradientScaling::NONE);
        let mut widened = vec![0.0; n];
        gradient.view().widen_into(0..n, &mut widened);
        update.oracle(&mut master, &mut values, &widened);
        for (kept, simd, state) in &mut states {
            let step = TileStep::new(*simd);
            fast(state, &step, &update, gradient.view(), &mut image);
            if t % 500 != 0 && t > 3 {
                continue;
            }
            let of = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(of(&state.master()), of(&master), "{kept:?} {simd:?} {t}");
            for (got, expected) in state.state().iter().zip(&values) {
                assert_eq!(of(got), of(expected), "{kept:?} {simd:?} {t}");
            }
        }
    }
}

/// Adam towards a minimum on noisy gradients: what is rounded arrives where what is not arrives.
#[test]
fn rounded_state_goes_where_exact_state_goes() {
    let n = 2048;
    let rule = HostRule::new(adam(WeightDecay::None));
    let target = |i: usize| (i as f32 * 0.01).sin();
    let run = |kept| {
        let mut state = HostState::new(&rule, Precision::Bf16, kept, &vec![0.0; n]);
        let mut image = DeviceImage::zeroed(Precision::Bf16, n);
        let step = TileStep::new(SimdLevel::best());
        for t in 1..=1500 {
            let noise = values(n, t as u32);
            let at = state.master();
            let gradient: Vec<f32> = (0..n).map(|i| at[i] - target(i) + noise[i] * 0.1).collect();
            let lr = 0.02 * (1.0 - t as f64 / 1501.0);
            let update = rule.begin(t, lr, GradientScaling::NONE);
            let update = update.with_noise(Noise::new(0, 0, t));
            fast(
                &mut state,
                &step,
                &update,
                GradientView::F32(&gradient),
                &mut image,
            );
        }
        let error = |(i, p): (usize, &f32)| ((p - target(i)) as f64).powi(2);
        state.master().iter().enumerate().map(error).sum::<f64>() / n as f64
    };
    let exact = run(StatePrecision::Full);
    assert!(exact < 1e-3, "{exact}");
    assert_eq!(run(StatePrecision::SplitMaster), exact);
    for kept in &StatePrecision::ALL[2..] {
        let error = run(*kept);
        assert!(
            error < 1.5 * exact + 1e-6,
            "{kept:?}: {error} against {exact}"
        );
    }
}

#[test]
#[should_panic(expected = "in bf16")]
fn a_split_master_without_its_upper_half_is_refused() {
    let rule = HostRule::new(adam(WeightDecay::None));
    let update = rule.begin(1, 0.1, GradientScaling::NONE);
    let (mut lower, mut m, mut v) = ([0u16; 4], [0.0f32; 4], [0.0f32; 4]);
    let mut full = super::super::StateMut::full(&mut [], vec![&mut m, &mut v]);
    full.master = crate::optimize::MasterMut::Lower16(&mut lower);
    let mut image = DeviceImage::zeroed(Precision::F16, 4);
    let gradient = GradientView::F32(&[0.0; 4]);
    TileStep::new(SimdLevel::best()).update(&update, full, gradient, image.as_mut());
}
