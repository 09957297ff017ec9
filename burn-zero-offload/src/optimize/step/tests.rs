mod precision;

use half::{bf16, f16};

use super::super::rules::{Adam, AmsGrad, Lion, Momentum, RmsProp, Sgd, WeightDecay};
use super::super::{DeviceImage, GradientClip, GradientScaling, HostRule, Precision, Rule, oracle};
use super::*;

fn adam(weight_decay: WeightDecay) -> Adam {
    Adam {
        beta_1: 0.9,
        beta_2: 0.999,
        epsilon: 1e-8,
        weight_decay,
    }
}

/// Everything at once: the gradient times three quarters, then clamped.
fn scaling() -> GradientScaling {
    GradientScaling::new(0.75, 0.0, Some(GradientClip::Value(0.75)))
}

/// Deterministic values over several magnitudes and both signs.
fn values(n: usize, seed: u32) -> Vec<f32> {
    let mut x = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    (0..n)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 17;
            x ^= x << 5;
            let unit = (x >> 8) as f32 / (1 << 24) as f32 - 0.5;
            unit * 10f32.powi((x % 5) as i32 - 3)
        })
        .collect()
}

#[derive(Clone, PartialEq, Debug)]
struct State<const N: usize> {
    p: Vec<f32>,
    state: [Vec<f32>; N],
}

impl<const N: usize> State<N> {
    fn new(n: usize) -> Self {
        Self {
            p: values(n, 7),
            state: std::array::from_fn(|_| vec![0.0; n]),
        }
    }

    fn as_mut(&mut self) -> StateMut<'_> {
        let state = self.state.iter_mut().map(|v| &mut v[..]);
        StateMut::full(&mut self.p, state.collect())
    }

    fn bits(&self) -> Vec<u32> {
        let all = self.p.iter().chain(self.state.iter().flatten());
        all.map(|x| x.to_bits()).collect()
    }
}

fn oracle_run<const N: usize>(rule: &impl Rule<N>, n: usize, steps: u64) -> State<N> {
    let mut s = State::new(n);
    for t in 1..=steps {
        let g = values(n, t as u32);
        oracle::update(rule, t, 0.01, scaling(), &mut s.p, &mut s.state, &g);
    }
    s
}

fn fast_run<const N: usize>(rule: &impl Rule<N>, n: usize, steps: u64, step: TileStep) -> State<N> {
    let rule = HostRule::new(rule.clone());
    let mut s = State::new(n);
    let mut image = DeviceImage::zeroed(Precision::Bf16, n);
    for t in 1..=steps {
        let g = values(n, t as u32);
        let update = rule.begin(t, 0.01, scaling());
        step.update(&update, s.as_mut(), GradientView::F32(&g), image.as_mut());
    }
    let expected = s.p.iter().map(|&p| bf16::from_f32(p)).collect();
    assert_eq!(image, DeviceImage::Bf16(expected));
    s
}

fn levels() -> impl Iterator<Item = SimdLevel> {
    SimdLevel::ALL
        .into_iter()
        .filter(|level| level.is_available())
}

#[track_caller]
fn assert_equals_the_oracle<const N: usize>(rule: impl Rule<N>, n: usize) {
    let expected = oracle_run(&rule, n, 3).bits();
    for simd in levels() {
        let got = fast_run(&rule, n, 3, TileStep::new(simd)).bits();
        assert_eq!(got, expected, "{rule:?}, {n} elements, {simd:?}");
    }
}

/// acceptance.md, CPU step 2 and 8: every length from 1 to 140 and around multiples of eight, every
/// instruction set.
#[test]
fn every_length_equals_the_oracle_bit_for_bit() {
    let lengths = (0..=140)
        .chain([255, 256, 257, 1023, 1024, 1025])
        .chain([TILE - 1, TILE + 1]);
    for n in lengths {
        assert_equals_the_oracle(adam(WeightDecay::Decoupled(0.1)), n);
        assert_equals_the_oracle(AmsGrad(adam(WeightDecay::Cautious(0.1))), n);
    }
}

#[test]
fn every_rule_equals_the_oracle_bit_for_bit() {
    let (alpha, momentum, epsilon, penalty) = (0.9, 0.5, 1e-6, 0.01);
    macro_rules! rms_prop {
        ($centered:literal, $momentum:literal) => {
            RmsProp::<$centered, $momentum> {
                alpha,
                momentum,
                epsilon,
                penalty,
            }
        };
    }
    for n in [1, 7, 64, 1000, 5 * TILE + 3] {
        assert_equals_the_oracle(Sgd { penalty }, n);
        for nesterov in [false, true] {
            let dampening = 0.25;
            assert_equals_the_oracle(
                Momentum {
                    penalty,
                    momentum,
                    dampening,
                    nesterov,
                },
                n,
            );
        }
        let (beta_1, beta_2, weight_decay) = (0.9, 0.99, 0.1);
        assert_equals_the_oracle(
            Lion {
                beta_1,
                beta_2,
                weight_decay,
            },
            n,
        );
        let lr_decay = 0.5;
        assert_equals_the_oracle(
            super::super::rules::AdaGrad {
                lr_decay,
                epsilon,
                penalty,
            },
            n,
        );
        assert_equals_the_oracle(rms_prop!(false, false), n);
        assert_equals_the_oracle(rms_prop!(false, true), n);
        assert_equals_the_oracle(rms_prop!(true, false), n);
        assert_equals_the_oracle(rms_prop!(true, true), n);
    }
}

/// acceptance.md, CPU step 2: per element against an f64 reference, relative 1e-6, never by norm.
#[test]
fn every_element_is_close_to_an_f64_reference() {
    for n in (1..=140).chain([511, 513]) {
        let rule = adam(WeightDecay::Decoupled(0.1));
        let mut fast = State::<2>::new(n);
        let g = values(n, 1);
        let update = HostRule::new(rule).begin(1, 0.01, GradientScaling::NONE);
        let mut image = DeviceImage::zeroed(Precision::F32, n);
        let step = TileStep::new(SimdLevel::best());
        step.update(
            &update,
            fast.as_mut(),
            GradientView::F32(&g),
            image.as_mut(),
        );
        let (b1, b2) = (rule.beta_1 as f64, rule.beta_2 as f64);
        for (i, (&p, &g)) in values(n, 7).iter().zip(&values(n, 1)).enumerate() {
            let (p, g) = (p as f64, g as f64);
            let (m, v) = ((1.0 - b1) * g, (1.0 - b2) * g * g);
            let denominator = (v / (1.0 - b2)).sqrt() + rule.epsilon as f64;
            let decayed = p * (1.0 - 0.01 * 0.1f32 as f64);
            let update = 0.01 * (m / (1.0 - b1)) / denominator;
            // Relative to the larger operand: their difference may cancel.
            let scale = decayed.abs().max(update.abs());
            let expected = decayed - update;
            assert!(
                (fast.p[i] as f64 - expected).abs() <= 1e-6 * scale,
                "{n} {i}"
            );
        }
    }
}

#[test]
fn tiles_and_threads_change_no_bit() {
    let n = 9 * TILE + 17;
    let rule = AmsGrad(adam(WeightDecay::Cautious(0.1)));
    let expected = oracle_run(&rule, n, 2).bits();
    for tile in [1, 7, 1000, TILE] {
        for threads in [1, 2, 8] {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            let step = TileStep {
                simd: SimdLevel::best(),
                tile,
            };
            let got = pool.install(|| fast_run(&rule, n, 2, step).bits());
            assert_eq!(got, expected, "tile {tile}, {threads} threads");
        }
    }
}

/// acceptance.md, CPU step 4: half gradients equal the upcast reference at n = 1023.
#[test]
fn half_gradients_equal_their_upcast() {
    let n = 1023;
    let update = HostRule::new(adam(WeightDecay::L2(0.1))).begin(1, 0.01, scaling());
    let g16: Vec<f16> = values(n, 3).iter().map(|&g| f16::from_f32(g)).collect();
    let gb: Vec<bf16> = values(n, 3).iter().map(|&g| bf16::from_f32(g)).collect();
    let up16: Vec<f32> = g16.iter().map(|g| g.to_f32()).collect();
    let upb: Vec<f32> = gb.iter().map(|g| g.to_f32()).collect();
    let run = |gradient: GradientView<'_>, simd| {
        let mut s = State::<2>::new(n);
        let mut image = DeviceImage::zeroed(Precision::F16, n);
        TileStep::new(simd).update(&update, s.as_mut(), gradient, image.as_mut());
        (s.bits(), image)
    };
    for simd in levels() {
        assert_eq!(
            run(GradientView::F16(&g16), simd),
            run(GradientView::F32(&up16), simd)
        );
        assert_eq!(
            run(GradientView::Bf16(&gb), simd),
            run(GradientView::F32(&upb), simd)
        );
    }
}

/// acceptance.md, CPU step 7: a slice that starts at an odd element, every instruction set.
#[test]
fn slices_that_start_at_an_odd_element_give_the_same_bits() {
    let n = 1001;
    let update = HostRule::new(adam(WeightDecay::Decoupled(0.1))).begin(1, 0.01, scaling());
    let shifted = |x: &[f32]| [&[0.0], x].concat();
    for simd in levels() {
        let start = State::<2>::new(n);
        let mut odd = State::<2> {
            p: shifted(&start.p),
            state: start.state.each_ref().map(|v| shifted(v)),
        };
        let g = shifted(&values(n, 1));
        let g: Vec<bf16> = g.iter().map(|&g| bf16::from_f32(g)).collect();
        let exact: Vec<f32> = g[1..].iter().map(|g| g.to_f32()).collect();
        let mut image = DeviceImage::zeroed(Precision::F32, n);
        let view = GradientView::Bf16(&g[1..]);
        let slice = odd.p[1..].as_ptr() as usize;
        assert_eq!(slice % 8, 4, "it starts at an odd element");
        let step = TileStep::new(simd);
        step.update(&update, odd.as_mut().slice(1..n + 1), view, image.as_mut());

        let mut aligned = State::<2>::new(n);
        let mut expected = DeviceImage::zeroed(Precision::F32, n);
        let view = GradientView::F32(&exact);
        let step = TileStep::new(SimdLevel::Scalar);
        step.update(&update, aligned.as_mut(), view, expected.as_mut());
        assert_eq!(image, expected);
        assert_eq!(odd.p[1..], aligned.p);
        for (odd, aligned) in odd.state.iter().zip(&aligned.state) {
            assert_eq!(odd[1..], aligned[..]);
            assert_eq!(odd[0], 0.0);
        }
        assert_eq!(odd.p[0], 0.0);
    }
}

/// acceptance.md, CPU step 1: two parameters of 1 Mi ones, g = 1, lr .01, two steps.
#[test]
fn two_steps_of_ones_reach_ninety_eight_hundredths() {
    let n = 1 << 20;
    let rule = HostRule::new(adam(WeightDecay::None));
    let ones = vec![1.0f32; n];
    let run = || {
        let mut s = State::<2> {
            p: ones.clone(),
            ..State::new(n)
        };
        let mut image = DeviceImage::zeroed(Precision::F16, n);
        for t in 1..=2 {
            let update = rule.begin(t, 0.01, GradientScaling::NONE);
            let g = GradientView::F32(&ones);
            TileStep::new(SimdLevel::best()).update(&update, s.as_mut(), g, image.as_mut());
        }
        (s.p, image)
    };
    for (p, image) in [run(), run()] {
        assert!(p.iter().all(|p| (p - 0.98).abs() < 1e-6));
        assert_eq!(image, DeviceImage::F16(vec![f16::from_f32(0.98); n]));
    }
}
