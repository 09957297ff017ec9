use half::{bf16, f16};

use super::super::{Adam, GradientClip, Precision, WeightDecay};
use super::*;
use crate::optimize::DeviceImage;

fn rule(amsgrad: bool, weight_decay: WeightDecay) -> Adam {
    Adam {
        beta_1: 0.9,
        beta_2: 0.999,
        epsilon: 1e-8,
        weight_decay,
        amsgrad,
        clip: Some(GradientClip::Value(0.75)),
    }
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
struct State {
    p: Vec<f32>,
    m: Vec<f32>,
    v: Vec<f32>,
    w: Vec<f32>,
}

impl State {
    fn new(n: usize) -> Self {
        Self {
            p: values(n, 7),
            m: vec![0.0; n],
            v: vec![0.0; n],
            w: vec![0.0; n],
        }
    }

    fn moments(&mut self, amsgrad: bool) -> Moments<'_> {
        Moments {
            master: &mut self.p,
            first: &mut self.m,
            second: &mut self.v,
            largest: amsgrad.then_some(&mut self.w[..]),
        }
    }

    fn bits(&self) -> Vec<u32> {
        [&self.p, &self.m, &self.v, &self.w]
            .into_iter()
            .flatten()
            .map(|x| x.to_bits())
            .collect()
    }
}

fn oracle_run(rule: &Adam, n: usize, steps: u64) -> State {
    let mut s = State::new(n);
    for t in 1..=steps {
        let scalars = rule.scalars(t, 0.01, 0.0);
        for (i, &g) in values(n, t as u32).iter().enumerate() {
            let e = Element {
                master: s.p[i],
                first: s.m[i],
                second: s.v[i],
                largest: s.w[i],
            };
            let e = match rule.amsgrad {
                true => oracle::adam::<true>(e, g, &scalars),
                false => oracle::adam::<false>(e, g, &scalars),
            };
            (s.p[i], s.m[i], s.v[i], s.w[i]) = (e.master, e.first, e.second, e.largest);
        }
    }
    s
}

fn fast_run(rule: &Adam, n: usize, steps: u64, step: TileStep) -> State {
    let mut s = State::new(n);
    let mut image = DeviceImage::zeroed(Precision::Bf16, n);
    for t in 1..=steps {
        let g = values(n, t as u32);
        let scalars = rule.scalars(t, 0.01, 0.0);
        step.update(
            s.moments(rule.amsgrad),
            GradientView::F32(&g),
            &scalars,
            image.as_mut(),
        );
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

/// acceptance.md, CPU step 2: every length from 1 to 140 and around multiples of eight.
#[test]
fn every_length_equals_the_oracle_bit_for_bit() {
    let lengths = (0..=140)
        .chain([255, 256, 257, 1023, 1024, 1025])
        .chain([TILE - 1, TILE + 1]);
    for n in lengths {
        let rule = rule(n % 2 == 0, WeightDecay::Decoupled(0.1));
        let expected = oracle_run(&rule, n, 3).bits();
        for simd in levels() {
            assert_eq!(
                fast_run(&rule, n, 3, TileStep::new(simd)).bits(),
                expected,
                "{n} {simd:?}"
            );
        }
    }
}

/// acceptance.md, CPU step 2: per element against an f64 reference, relative 1e-6, never by norm.
#[test]
fn every_element_is_close_to_an_f64_reference() {
    for n in (1..=140).chain([511, 513]) {
        let rule = Adam {
            clip: None,
            ..rule(false, WeightDecay::Decoupled(0.1))
        };
        let fast = fast_run(&rule, n, 1, TileStep::new(SimdLevel::best()));
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
    let n = 3 * TILE + 17;
    let rule = rule(true, WeightDecay::Cautious(0.1));
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
    let rule = rule(false, WeightDecay::L2(0.1));
    let scalars = rule.scalars(1, 0.01, 0.0);
    let g16: Vec<f16> = values(n, 3).iter().map(|&g| f16::from_f32(g)).collect();
    let gb: Vec<bf16> = values(n, 3).iter().map(|&g| bf16::from_f32(g)).collect();
    let up16: Vec<f32> = g16.iter().map(|g| g.to_f32()).collect();
    let upb: Vec<f32> = gb.iter().map(|g| g.to_f32()).collect();
    let run = |gradient: GradientView<'_>, simd| {
        let mut s = State::new(n);
        let mut image = DeviceImage::zeroed(Precision::F16, n);
        TileStep::new(simd).update(s.moments(false), gradient, &scalars, image.as_mut());
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
    let rule = rule(false, WeightDecay::Decoupled(0.1));
    let scalars = rule.scalars(1, 0.01, 0.0);
    let shifted = |x: &[f32]| [&[0.0], x].concat();
    for simd in levels() {
        let start = State::new(n);
        let (mut p, mut m, mut v) = (shifted(&start.p), shifted(&start.m), shifted(&start.v));
        let g: Vec<bf16> = shifted(&values(n, 1))
            .iter()
            .map(|&g| bf16::from_f32(g))
            .collect();
        let exact: Vec<f32> = g[1..].iter().map(|g| g.to_f32()).collect();
        let mut image = DeviceImage::zeroed(Precision::F32, n);
        let state = Moments {
            master: &mut p[1..],
            first: &mut m[1..],
            second: &mut v[1..],
            largest: None,
        };
        TileStep::new(simd).update(state, GradientView::Bf16(&g[1..]), &scalars, image.as_mut());

        let mut aligned = State::new(n);
        let mut expected = DeviceImage::zeroed(Precision::F32, n);
        TileStep::new(SimdLevel::Scalar).update(
            aligned.moments(false),
            GradientView::F32(&exact),
            &scalars,
            expected.as_mut(),
        );
        assert_eq!(image, expected);
        assert_eq!(
            (&p[1..], &m[1..], &v[1..]),
            (&aligned.p[..], &aligned.m[..], &aligned.v[..])
        );
        assert_eq!((p[0], m[0], v[0]), (0.0, 0.0, 0.0));
    }
}

/// acceptance.md, CPU step 1: two parameters of 1 Mi ones, g = 1, lr .01, two steps.
#[test]
fn two_steps_of_ones_reach_ninety_eight_hundredths() {
    let n = 1 << 20;
    let rule = Adam {
        clip: None,
        ..rule(false, WeightDecay::None)
    };
    let ones = vec![1.0f32; n];
    let run = || {
        let mut s = State {
            p: ones.clone(),
            ..State::new(n)
        };
        let mut image = DeviceImage::zeroed(Precision::F16, n);
        for t in 1..=2 {
            let scalars = rule.scalars(t, 0.01, 0.0);
            let g = GradientView::F32(&ones);
            TileStep::new(SimdLevel::best()).update(s.moments(false), g, &scalars, image.as_mut());
        }
        (s.p, image)
    };
    for (p, image) in [run(), run()] {
        assert!(p.iter().all(|p| (p - 0.98).abs() < 1e-6));
        assert_eq!(image, DeviceImage::F16(vec![f16::from_f32(0.98); n]));
    }
}
