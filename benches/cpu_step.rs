//! The CPU step: parameters per second of every way to keep the state, next to the memory ceiling measured
//! in the same process with the same streams, and to a plain scalar loop.
//!
//! ```sh
//! cargo bench -p burn-zero-offload --bench cpu_step -- [--all | --sizes | --memory | --tsv] [PARAMETERS] [THREADS]
//! ```
//!
//! `--all` adds rules, gradient types, instruction sets and thread counts, `--sizes` runs from 1 M
//! parameters up to `PARAMETERS` and ten thousand small tensors, `--memory` looks at the memory of the
//! process and nothing else. `--tsv` prints rows for
//! `benches/peers/run.sh` alone.
//!
//! Medians of nine runs after two that do not count. Each run comes right after a pass over the ceiling's streams,
//! and the share of the ceiling is the median ratio of such pairs: where others use the machine's memory, it changes
//! speed within seconds.

#![allow(missing_docs)]

#[path = "common/updates.rs"]
mod updates;

use std::hint::black_box;
use std::ops::Range;

use burn::tensor::bf16;
use burn_zero_offload::HostState;
use burn_zero_offload::optimize::rules::{Adam, AmsGrad, Lion, Momentum, Sgd, WeightDecay};
use burn_zero_offload::optimize::{
    DeviceImage, GradientScaling, GradientView, HostRule, ImageMut, Precision, Rule, SimdLevel,
    StatePrecision, TileStep,
};
use rayon::{ThreadPool, ThreadPoolBuilder};

use updates::{Bench, Ceiling, Gradients, Kind, Time, paired, traffic};

const RULE: Adam = Adam {
    beta_1: 0.9,
    beta_2: 0.999,
    epsilon: 1e-8,
    weight_decay: WeightDecay::Decoupled(0.01),
};

/// One thread, one element at a time, never inlined into something a compiler could vectorise.
fn scalar_loop(gradient: &[bf16]) -> Time {
    let n = gradient.len();
    let mut state = [vec![0.01f32; n], vec![1e-3; n], vec![1e-6; n]];
    let mut image = vec![bf16::ZERO; n];
    let scalars = RULE.scalars(100, 1e-4);
    paired(
        || 0.0,
        || {
            let [p, m, v] = &mut state;
            for i in 0..n {
                let g = gradient[i].to_f32();
                let (weight, after) = black_box(Adam::update(&scalars, p[i], [m[i], v[i]], g));
                (p[i], [m[i], v[i]]) = (weight, after);
                image[i] = bf16::from_f32(weight);
            }
        },
    )
}

/// Prints rows.
struct Table {
    tsv: bool,
}

impl Table {
    /// A row about `parameters`.
    fn row(&self, name: &str, bytes: f64, time: Time, parameters: usize) {
        let Time { seconds, share } = time;
        if self.tsv {
            println!("row\t{name}\t{bytes}\t{seconds}\t{share}");
            return;
        }
        let n = parameters as f64;
        println!(
            "{name:<44} {bytes:>6} B {:>9.2} ms {:>7.3} Gparam/s {:>6.1} GB/s {share:>5.2} of the ceiling",
            seconds * 1e3,
            n / seconds / 1e9,
            n * bytes / seconds / 1e9,
        );
    }
}

fn pool_of(threads: usize) -> ThreadPool {
    let pool = ThreadPoolBuilder::new().num_threads(threads).build();
    pool.expect("threads can be started")
}

fn main() {
    // cargo adds flags of its own.
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| arguments.iter().any(|word| word == flag);
    let mut numbers = arguments.iter().filter(|word| !word.starts_with('-'));
    let mut number = || {
        let word = numbers.next()?;
        let number = word.parse::<usize>();
        Some(number.expect("PARAMETERS and THREADS are whole numbers"))
    };
    let n = number().unwrap_or(64_000_000);
    let pool = pool_of(number().unwrap_or(0));
    let threads = pool.current_num_threads();
    if !has("--tsv") {
        println!("{n} parameters, {threads} threads, {:?}", SimdLevel::best());
    }
    let kinds: &[Kind] = match has("--all") {
        true => &[Kind::Bf16, Kind::F16, Kind::F32],
        false => &[Kind::Bf16],
    };
    let gradients = Gradients::new(n, kinds);
    let adam = HostRule::new(RULE);
    if has("--memory") {
        drop(gradients);
        return memory(&pool, &adam, n);
    }
    let ceiling = Ceiling::new(n);
    let bench = Bench {
        pool: &pool,
        step: TileStep::new(SimdLevel::best()),
        gradients: &gradients,
        ceiling: &ceiling,
    };
    let table = Table { tsv: has("--tsv") };
    let pass = || ceiling.pass(&pool, n);
    let itself = paired(pass, || {
        pass();
    });
    table.row("ceiling", 28.0, itself, n);
    for kept in StatePrecision::ALL {
        let time = bench.time(&adam, kept, Precision::Bf16, Kind::Bf16, n);
        let bytes = traffic(kept, Precision::Bf16, Kind::Bf16, 2);
        table.row(&format!("{kept:?} bf16"), bytes, time, n);
    }
    if has("--all") {
        let few = n.min(8_000_000);
        let scalar = scalar_loop(gradients.brain(few));
        let share = ceiling.pass(&pool, few) / scalar.seconds;
        let time = Time { share, ..scalar };
        table.row("scalar loop, one thread", 28.0, time, few);
        all(&bench, &table, n, threads);
    }
    if has("--sizes") {
        sizes(&bench, n, &adam);
    }
}

/// Resident memory of the process, in bytes, where the system tells.
fn resident() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kilobytes = line
        .trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<usize>()
        .ok()?;
    Some(kilobytes << 10)
}

/// Host memory per parameter: what the state says of itself, and by how much the process grew with it, a
/// gradient in bf16 and two steps.
fn memory(pool: &ThreadPool, rule: &HostRule, n: usize) {
    for kept in StatePrecision::ALL {
        let before = resident();
        let gradient = vec![bf16::from_f32(1e-3); n];
        let mut state = HostState::zeroed(rule, Precision::Bf16, kept, n);
        // The image of whole masters goes through the upload ring: one tile after the other.
        let tile = if kept == StatePrecision::Full {
            n.min(4 << 20)
        } else {
            0
        };
        let mut ring = DeviceImage::zeroed(Precision::Bf16, tile);
        let step = TileStep::new(SimdLevel::best());
        for time in 1..=2 {
            let update = rule.begin(time, 1e-4, GradientScaling::NONE);
            let pieces: Vec<Range<usize>> = if tile == 0 {
                std::iter::once(0..n).collect()
            } else {
                (0..n)
                    .step_by(tile)
                    .map(|at| at..(at + tile).min(n))
                    .collect()
            };
            for range in pieces {
                let view = GradientView::Bf16(&gradient);
                let mut work = state.work(&update, view, ring.as_mut());
                let (view, len) = (view.slice(range.clone()), range.len());
                let state = work.state.slice(range);
                let image = match work.image {
                    ImageMut::Bf16(image) => ImageMut::Bf16(&mut image[..len]),
                    other => other,
                };
                pool.install(|| step.update(&update, state, view, image));
            }
        }
        let own = state.master_bytes() + state.state_bytes() + 2 * n;
        let grown = resident()
            .zip(before)
            .map(|(after, before)| after as f64 - before as f64);
        println!(
            "{kept:<30} {:>6.2} B/param by its own account, the process grew by {:>6.2} B/param",
            own as f64 / n as f64,
            grown.map_or(f64::NAN, |grown| grown / n as f64)
        );
        black_box(&gradient);
    }
}

/// Rules, types, instruction sets and threads.
fn all(bench: &Bench<'_>, table: &Table, n: usize, threads: usize) {
    let l2 = Adam {
        weight_decay: WeightDecay::L2(0.01),
        ..RULE
    };
    let lion = Lion {
        beta_1: 0.9,
        beta_2: 0.99,
        weight_decay: 0.1,
    };
    let momentum = Momentum {
        penalty: 0.0,
        momentum: 0.9,
        dampening: 0.0,
        nesterov: false,
    };
    let adam = HostRule::new(RULE);
    for (name, rule) in [
        ("Adam with L2", HostRule::new(l2)),
        ("AMSGrad", HostRule::new(AmsGrad(RULE))),
        ("Lion", HostRule::new(lion)),
        ("SGD with momentum", HostRule::new(momentum)),
        ("SGD", HostRule::new(Sgd { penalty: 0.0 })),
    ] {
        for kept in StatePrecision::ALL {
            let lossy = kept != StatePrecision::Full && kept != StatePrecision::SplitMaster;
            if lossy && rule.lossy().is_none() {
                continue;
            }
            let time = bench.time(&rule, kept, Precision::Bf16, Kind::Bf16, n);
            let bytes = traffic(kept, Precision::Bf16, Kind::Bf16, rule.state().len());
            table.row(&format!("{name}, {kept:?} bf16"), bytes, time, n);
        }
    }
    for (device, kind, name) in [
        (Precision::F32, Kind::F32, "f32 to f32"),
        (Precision::F16, Kind::F16, "f16 to f16"),
        (Precision::F16, Kind::F32, "f32 to f16"),
        (Precision::Bf16, Kind::F32, "f32 to bf16"),
    ] {
        let kept = StatePrecision::default_for(device);
        let time = bench.time(&adam, kept, device, kind, n);
        let bytes = traffic(kept, device, kind, 2);
        table.row(&format!("{kept:?}, {name}"), bytes, time, n);
    }
    for simd in SimdLevel::ALL
        .into_iter()
        .filter(|simd| simd.is_available())
    {
        let n = n.min(8_000_000);
        let step = TileStep::new(simd);
        let bench = Bench { step, ..*bench };
        for kept in StatePrecision::ALL {
            let time = bench.time(&adam, kept, Precision::Bf16, Kind::Bf16, n);
            let bytes = traffic(kept, Precision::Bf16, Kind::Bf16, 2);
            table.row(&format!("{kept:?} bf16, {simd:?}"), bytes, time, n);
        }
    }
    for threads in 1..threads {
        let pool = pool_of(threads);
        let bench = Bench {
            pool: &pool,
            ..*bench
        };
        for kept in StatePrecision::ALL {
            let time = bench.time(&adam, kept, Precision::Bf16, Kind::Bf16, n);
            let bytes = traffic(kept, Precision::Bf16, Kind::Bf16, 2);
            table.row(&format!("{kept:?} bf16, {threads} threads"), bytes, time, n);
        }
    }
}

/// From small to large, and the same total in many pieces.
fn sizes(bench: &Bench<'_>, n: usize, adam: &HostRule) {
    let steps = (0..).map(|k| 1_000_000 << k).take_while(|len| *len < n);
    for len in steps.chain([n]) {
        for kept in StatePrecision::ALL {
            let time = bench.time(adam, kept, Precision::Bf16, Kind::Bf16, len);
            println!(
                "{len:>11} parameters {:<14} {:>7.3} ns each, {:>5.2} of the ceiling of as many",
                format!("{kept:?}"),
                time.seconds * 1e9 / len as f64,
                time.share
            );
        }
    }
    let (count, len) = (10_000, (n / 10_000).max(1));
    for kept in StatePrecision::ALL {
        let whole = bench.time(adam, kept, Precision::Bf16, Kind::Bf16, count * len);
        let [together, apart] = bench.many(adam, kept, len, count);
        println!(
            "{count} tensors of {len}, {:<14} {:.2} x one tensor of the same total; {:.2} x one by one",
            format!("{kept:?}"),
            whole.share / together.share,
            whole.share / apart.share
        );
    }
}
