//! The CPU step: parameters per second, next to the memory ceiling measured in the same process with
//! the same streams, and to a plain scalar loop.
//!
//! ```sh
//! cargo bench -p burn-zero-offload --bench cpu_step -- [PARAMETERS] [THREADS]
//! ```
//!
//! Medians of seven runs after two that do not count. Timings say something only as ratios of one
//! run on an otherwise idle machine.

#![allow(missing_docs)]

use std::hint::black_box;
use std::time::Instant;

use burn::tensor::bf16;
use burn_zero_offload::optimize::rules::{Adam, WeightDecay};
use burn_zero_offload::optimize::{
    DeviceImage, GradientScaling, GradientView, HostRule, Precision, Rule, SimdLevel, StateMut,
    TILE, TileStep,
};
use rayon::prelude::*;

const RULE: Adam = Adam {
    beta_1: 0.9,
    beta_2: 0.999,
    epsilon: 1e-8,
    weight_decay: WeightDecay::Decoupled(0.01),
};

struct State {
    master: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
}

impl State {
    fn new(n: usize) -> Self {
        Self {
            master: vec![0.01; n],
            first: vec![1e-3; n],
            second: vec![1e-6; n],
        }
    }

    fn as_mut(&mut self) -> StateMut<'_> {
        StateMut {
            master: &mut self.master,
            state: vec![&mut self.first, &mut self.second],
        }
    }
}

fn median(mut run: impl FnMut()) -> f64 {
    let mut seconds: Vec<f64> = (0..9)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64()
        })
        .skip(2)
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn number(position: usize) -> Option<usize> {
    // cargo adds flags of its own.
    let mut words = std::env::args()
        .skip(1)
        .filter(|word| !word.starts_with('-'));
    words.nth(position).map(|word| {
        word.parse()
            .expect("PARAMETERS and THREADS are whole numbers")
    })
}

fn main() {
    let n = number(0).unwrap_or(64_000_000);
    let threads = number(1).unwrap_or(0);
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .unwrap();
    let threads = pool.current_num_threads();
    println!(
        "{n} parameters, {threads} threads, bf16 gradient to bf16 weight, 28 bytes a parameter"
    );

    let mut state = State::new(n);
    let gradient = vec![bf16::from_f32(1e-3); n];
    let mut image = DeviceImage::zeroed(Precision::Bf16, n);
    let view = GradientView::Bf16(&gradient);
    let update = HostRule::new(RULE).begin(100, 1e-4, GradientScaling::NONE);

    // The streams of Adam with an addition each instead of its arithmetic.
    let mut half = vec![0u16; n];
    let ceiling = median(|| {
        pool.install(|| {
            let tiles = state
                .master
                .par_chunks_mut(TILE)
                .zip(state.first.par_chunks_mut(TILE));
            let tiles = tiles.zip(state.second.par_chunks_mut(TILE));
            let tiles = tiles
                .zip(gradient.par_chunks(TILE))
                .zip(half.par_chunks_mut(TILE));
            tiles.for_each(|((((p, m), v), g), h)| {
                for i in 0..p.len() {
                    let g = f32::from_bits((g[i].to_bits() as u32) << 16) * 1e-20;
                    (m[i], v[i], p[i]) = (m[i] + g, v[i] + g, p[i] + g);
                    h[i] = (p[i].to_bits() >> 16) as u16;
                }
            });
        })
    });
    black_box(&half);
    let mut rows = vec![("memory ceiling".to_string(), ceiling)];

    for simd in SimdLevel::ALL
        .into_iter()
        .filter(|simd| simd.is_available())
    {
        let step = TileStep::new(simd);
        let seconds =
            median(|| pool.install(|| step.update(&update, state.as_mut(), view, image.as_mut())));
        rows.push((format!("step, {simd:?}"), seconds));
    }

    // One thread, one element at a time, never inlined into something a compiler could vectorise.
    let scalars = RULE.scalars(100, 1e-4);
    let scalar = median(|| {
        let DeviceImage::Bf16(image) = &mut image else {
            unreachable!()
        };
        for i in 0..n {
            let moments = [state.first[i], state.second[i]];
            let g = gradient[i].to_f32();
            let (p, [m, v]) = black_box(Adam::update(&scalars, state.master[i], moments, g));
            (state.master[i], state.first[i], state.second[i]) = (p, m, v);
            image[i] = bf16::from_f32(p);
        }
    });
    rows.push(("scalar loop, one thread".into(), scalar));

    for (name, seconds) in rows {
        println!(
            "{name:<26} {:>9.1} ms  {:>7.3} Gparam/s  {:>5.2} of the ceiling  {:>6.1} x scalar",
            seconds * 1e3,
            n as f64 / seconds / 1e9,
            ceiling / seconds,
            scalar / seconds
        );
    }
}
