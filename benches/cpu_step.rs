//! The CPU step: parameters per second of every way to keep the state, next to the memory ceiling measured
//! in the same process with the same streams, and to a plain scalar loop.
//!
//! ```sh
//! cargo bench -p burn-zero-offload --bench cpu_step -- [--tsv | --all | --sizes] [PARAMETERS] [THREADS]
//! ```
//!
//! `--all` adds rules, gradient types, instruction sets and thread counts, `--sizes` runs from 1 M
//! parameters up to `PARAMETERS` and ten thousand small tensors. `--tsv` prints rows for
//! `benches/peers/run.sh` alone.
//!
//! Medians of nine runs after two that do not count. Timings say something only as ratios of one run on
//! an otherwise idle machine.

#![allow(missing_docs)]

use std::hint::black_box;
use std::time::Instant;

use burn::tensor::{bf16, f16};
use burn_zero_offload::HostState;
use burn_zero_offload::optimize::rules::{Adam, AmsGrad, Lion, Momentum, Sgd, WeightDecay};
use burn_zero_offload::optimize::{
    DeviceImage, GradientScaling, GradientView, HostRule, Precision, Rule, SimdLevel,
    StatePrecision, TileStep, Work,
};
use memmap2::{Advice, MmapMut};
use rayon::{ThreadPool, ThreadPoolBuilder};

const RULE: Adam = Adam {
    beta_1: 0.9,
    beta_2: 0.999,
    epsilon: 1e-8,
    weight_decay: WeightDecay::Decoupled(0.01),
};

fn median(mut run: impl FnMut()) -> f64 {
    let mut seconds: Vec<f64> = (0..11)
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

/// Gradients of every type, a little different from element to element.
struct Gradients {
    single: Vec<f32>,
    half: Vec<f16>,
    brain: Vec<bf16>,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    F32,
    F16,
    Bf16,
}

impl Gradients {
    fn new(len: usize, kinds: &[Kind]) -> Self {
        let value = |i: usize| 1e-3 * ((i % 97) as f32 / 97.0 - 0.5);
        let of = |kind| if kinds.contains(&kind) { len } else { 0 };
        Self {
            single: (0..of(Kind::F32)).map(value).collect(),
            half: (0..of(Kind::F16))
                .map(|i| f16::from_f32(value(i)))
                .collect(),
            brain: (0..of(Kind::Bf16))
                .map(|i| bf16::from_f32(value(i)))
                .collect(),
        }
    }

    fn view(&self, kind: Kind) -> GradientView<'_> {
        match kind {
            Kind::F32 => GradientView::F32(&self.single),
            Kind::F16 => GradientView::F16(&self.half),
            Kind::Bf16 => GradientView::Bf16(&self.brain),
        }
    }
}

/// Bytes a step reads and writes for each parameter.
fn traffic(kept: StatePrecision, device: Precision, gradient: Kind, values: usize) -> f64 {
    let gradient = if gradient == Kind::F32 { 4.0 } else { 2.0 };
    let values = values as f64;
    let image = device.size() as f64;
    let (master, state) = match kept {
        StatePrecision::Full => (8.0 + image, 8.0),
        StatePrecision::SplitMaster => (8.0, 8.0),
        StatePrecision::Bf16Moments => (8.0, 4.0),
        StatePrecision::Int8Moments => (8.0, 2.125),
        StatePrecision::Int8Master24 => (6.0, 2.125),
        _ => unreachable!("the bench knows every kind"),
    };
    gradient + master + state * values
}

/// Seconds of one update of `len` parameters.
struct Bench<'a> {
    pool: &'a ThreadPool,
    step: TileStep,
    gradients: &'a Gradients,
}

impl Bench<'_> {
    fn seconds(
        &self,
        rule: &HostRule,
        kept: StatePrecision,
        device: Precision,
        kind: Kind,
        len: usize,
    ) -> f64 {
        let mut state = HostState::zeroed(rule, device, kept, len);
        let split = kept != StatePrecision::Full && device == Precision::Bf16;
        let mut image = DeviceImage::zeroed(device, if split { 0 } else { len });
        let mut time = 0;
        let gradient = match self.gradients.view(kind) {
            GradientView::F32(g) => GradientView::F32(&g[..len]),
            GradientView::F16(g) => GradientView::F16(&g[..len]),
            GradientView::Bf16(g) => GradientView::Bf16(&g[..len]),
        };
        median(|| {
            time += 1;
            let update = rule.begin(time, 1e-4, GradientScaling::NONE);
            let work = state.work(&update, gradient, image.as_mut());
            let Work {
                state,
                gradient,
                image,
                ..
            } = work;
            self.pool
                .install(|| self.step.update(&update, state, gradient, image));
        })
    }

    /// The same for `count` parameters of `len` each, handed over together and one by one.
    fn many(&self, rule: &HostRule, kept: StatePrecision, len: usize, count: usize) -> [f64; 2] {
        let new = |_| HostState::zeroed(rule, Precision::Bf16, kept, len);
        let mut states: Vec<HostState> = (0..count).map(new).collect();
        let own = if kept == StatePrecision::Full { len } else { 0 };
        let mut images = vec![DeviceImage::zeroed(Precision::Bf16, own); count];
        let mut time = 0;
        let gradient = &self.gradients.brain[..len];
        let mut run = |together: bool| {
            time += 1;
            let update = rule.begin(time, 1e-4, GradientScaling::NONE);
            let works = states.iter_mut().zip(&mut images).map(|(state, image)| {
                state.work(&update, GradientView::Bf16(gradient), image.as_mut())
            });
            if together {
                let works = works.collect();
                self.pool.install(|| self.step.update_all(works));
            } else {
                self.pool.install(|| {
                    works.for_each(|work| {
                        self.step
                            .update(work.update, work.state, work.gradient, work.image);
                    });
                });
            }
        };
        [true, false].map(|together| median(|| run(together)))
    }
}

/// Memory like that of the state: large, in huge pages where the system gives them.
fn pages(bytes: usize) -> MmapMut {
    let pages = MmapMut::map_anon(bytes.max(1)).expect("memory for the ceiling");
    #[cfg(target_os = "linux")]
    let _ = pages.advise(Advice::HugePage);
    pages
}

/// The streams of Adam with an addition each instead of its arithmetic: what memory allows.
fn ceiling(pool: &ThreadPool, gradient: &[bf16]) -> f64 {
    let n = gradient.len();
    let mut memory = [4, 4, 4, 2].map(|size| pages(n * size));
    let [p, m, v, h] = &mut memory;
    let floats = |pages| -> &mut [f32] { &mut bytemuck::cast_slice_mut::<u8, f32>(pages)[..n] };
    let (p, m, v) = (floats(p), floats(m), floats(v));
    let h: &mut [u16] = &mut bytemuck::cast_slice_mut::<u8, u16>(h)[..n];
    let seconds = median(|| pool.install(|| streams(p, m, v, gradient, h)));
    black_box(h);
    seconds
}

fn streams(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[bf16], h: &mut [u16]) {
    const PIECE: usize = 16384;
    let n = p.len();
    if n > PIECE {
        let at = (n / 2).next_multiple_of(64);
        let (p, q) = p.split_at_mut(at);
        let (m, o) = m.split_at_mut(at);
        let (v, w) = v.split_at_mut(at);
        let (g, k) = g.split_at(at);
        let (h, j) = h.split_at_mut(at);
        rayon::join(|| streams(p, m, v, g, h), || streams(q, o, w, k, j));
        return;
    }
    for i in 0..n {
        let g = f32::from_bits((g[i].to_bits() as u32) << 16) * 1e-20;
        (m[i], v[i], p[i]) = (m[i] + g, v[i] + g, p[i] + g);
        h[i] = (p[i].to_bits() >> 16) as u16;
    }
}

/// One thread, one element at a time, never inlined into something a compiler could vectorise.
fn scalar_loop(gradient: &[bf16]) -> f64 {
    let n = gradient.len();
    let mut state = [vec![0.01f32; n], vec![1e-3; n], vec![1e-6; n]];
    let mut image = vec![bf16::ZERO; n];
    let scalars = RULE.scalars(100, 1e-4);
    median(|| {
        let [p, m, v] = &mut state;
        for i in 0..n {
            let g = gradient[i].to_f32();
            let (weight, after) = black_box(Adam::update(&scalars, p[i], [m[i], v[i]], g));
            (p[i], [m[i], v[i]]) = (weight, after);
            image[i] = bf16::from_f32(weight);
        }
    })
}

/// Prints rows.
struct Table {
    tsv: bool,
    parameters: usize,
    ceiling: f64,
}

impl Table {
    fn row(&self, name: &str, bytes: f64, seconds: f64) {
        let n = self.parameters as f64;
        if self.tsv {
            println!("row\t{name}\t{bytes}\t{seconds}");
            return;
        }
        println!(
            "{name:<44} {bytes:>6} B {:>9.2} ms {:>7.3} Gparam/s {:>6.1} GB/s {:>5.2} of the ceiling",
            seconds * 1e3,
            n / seconds / 1e9,
            n * bytes / seconds / 1e9,
            self.ceiling / seconds
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
    let bench = Bench {
        pool: &pool,
        step: TileStep::new(SimdLevel::best()),
        gradients: &gradients,
    };
    let adam = HostRule::new(RULE);
    let table = Table {
        tsv: has("--tsv"),
        parameters: n,
        ceiling: ceiling(&pool, &gradients.brain),
    };
    table.row("ceiling", 28.0, table.ceiling);
    for kept in StatePrecision::ALL {
        let seconds = bench.seconds(&adam, kept, Precision::Bf16, Kind::Bf16, n);
        let bytes = traffic(kept, Precision::Bf16, Kind::Bf16, 2);
        table.row(&format!("{kept:?} bf16"), bytes, seconds);
    }
    let again = ceiling(&pool, &gradients.brain);
    table.row("ceiling, again", 28.0, again);
    let scalar = scalar_loop(&gradients.brain[..n.min(8_000_000)]);
    let scalar = scalar * n as f64 / n.min(8_000_000) as f64;
    table.row("scalar loop, one thread", 28.0, scalar);
    if has("--all") {
        all(&bench, &table, threads);
    }
    if has("--sizes") {
        sizes(&bench, &table, &adam);
    }
}

/// Rules, types, instruction sets and threads.
fn all(bench: &Bench<'_>, table: &Table, threads: usize) {
    let n = table.parameters;
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
            let seconds = bench.seconds(&rule, kept, Precision::Bf16, Kind::Bf16, n);
            let bytes = traffic(kept, Precision::Bf16, Kind::Bf16, rule.state().len());
            table.row(&format!("{name}, {kept:?} bf16"), bytes, seconds);
        }
    }
    for (device, kind, name) in [
        (Precision::F32, Kind::F32, "f32 to f32"),
        (Precision::F16, Kind::F16, "f16 to f16"),
        (Precision::F16, Kind::F32, "f32 to f16"),
        (Precision::Bf16, Kind::F32, "f32 to bf16"),
    ] {
        let kept = StatePrecision::default_for(device);
        let seconds = bench.seconds(&adam, kept, device, kind, n);
        let bytes = traffic(kept, device, kind, 2);
        table.row(&format!("{kept:?}, {name}"), bytes, seconds);
    }
    for simd in SimdLevel::ALL
        .into_iter()
        .filter(|simd| simd.is_available())
    {
        let n = n.min(8_000_000);
        let step = TileStep::new(simd);
        let bench = Bench { step, ..*bench };
        for kept in StatePrecision::ALL {
            let seconds = bench.seconds(&adam, kept, Precision::Bf16, Kind::Bf16, n);
            let seconds = seconds * table.parameters as f64 / n as f64;
            let bytes = traffic(kept, Precision::Bf16, Kind::Bf16, 2);
            table.row(&format!("{kept:?} bf16, {simd:?}"), bytes, seconds);
        }
    }
    for threads in 1..threads {
        let pool = pool_of(threads);
        let bench = Bench {
            pool: &pool,
            ..*bench
        };
        let alone = ceiling(&pool, &bench.gradients.brain);
        table.row(&format!("ceiling, {threads} threads"), 28.0, alone);
        for kept in StatePrecision::ALL {
            let seconds = bench.seconds(&adam, kept, Precision::Bf16, Kind::Bf16, n);
            let bytes = traffic(kept, Precision::Bf16, Kind::Bf16, 2);
            table.row(&format!("{kept:?} bf16, {threads} threads"), bytes, seconds);
        }
    }
}

/// From small to large, and the same total in many pieces.
fn sizes(bench: &Bench<'_>, table: &Table, adam: &HostRule) {
    let n = table.parameters;
    let steps = (0..).map(|k| 1_000_000 << k).take_while(|len| *len < n);
    for len in steps.chain([n]) {
        for kept in StatePrecision::ALL {
            let seconds = bench.seconds(adam, kept, Precision::Bf16, Kind::Bf16, len);
            println!(
                "{len:>11} parameters {kept:<14?} {:>7.3} ns each",
                seconds * 1e9 / len as f64
            );
        }
    }
    let (count, len) = (10_000, (n / 10_000).max(1));
    for kept in StatePrecision::ALL {
        let whole = bench.seconds(adam, kept, Precision::Bf16, Kind::Bf16, count * len);
        let [together, apart] = bench.many(adam, kept, len, count);
        println!(
            "{count} tensors of {len}, {kept:<14?} {:.2} x one tensor of the same total; {:.2} x one \
             by one",
            together / whole,
            apart / whole
        );
    }
}
