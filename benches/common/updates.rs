//! Updates of parameters that are only memory, and what memory itself allows.
//!
//! Part of `benches/cpu_step.rs`.

use std::hint::black_box;
use std::sync::Mutex;
use std::time::Instant;

use burn::tensor::{bf16, f16};
use burn_zero_offload::HostState;
use burn_zero_offload::optimize::{
    DeviceImage, GradientScaling, GradientView, HostRule, ImageMut, Precision, StatePrecision,
    TileStep, Work,
};
use memmap2::{Advice, MmapMut};
use rayon::ThreadPool;

/// What was measured of an update.
#[derive(Clone, Copy)]
pub struct Time {
    /// Median seconds of nine runs after two that do not count.
    pub seconds: f64,
    /// Median ratio of the time of a pass over the same streams right before each run to the time of the run: memory
    /// changes speed within seconds where others use it too.
    pub share: f64,
}

/// Runs `run` and the ceiling in turns.
pub fn paired(mut ceiling: impl FnMut() -> f64, mut run: impl FnMut()) -> Time {
    let (mut seconds, mut shares) = (Vec::new(), Vec::new());
    for number in 0..11 {
        let before = ceiling();
        let start = Instant::now();
        run();
        let took = start.elapsed().as_secs_f64();
        if number >= 2 {
            seconds.push(took);
            shares.push(before / took);
        }
    }
    Time {
        seconds: middle(seconds),
        share: middle(shares),
    }
}

fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Memory like that of the engine: large, in huge pages where the system gives them.
pub fn pages(bytes: usize) -> MmapMut {
    let pages = MmapMut::map_anon(bytes.max(1)).expect("memory for what is measured");
    #[cfg(target_os = "linux")]
    let _ = pages.advise(Advice::HugePage);
    pages
}

/// Gradients of every type, a little different from element to element.
pub struct Gradients {
    len: usize,
    single: MmapMut,
    half: MmapMut,
    brain: MmapMut,
}

/// Types of gradients.
#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    F32,
    F16,
    Bf16,
}

impl Gradients {
    pub fn new(len: usize, kinds: &[Kind]) -> Self {
        let value = |i: usize| 1e-3 * ((i % 97) as f32 / 97.0 - 0.5);
        let of = |kind, size| pages(if kinds.contains(&kind) { len * size } else { 0 });
        let mut new = Self {
            len,
            single: of(Kind::F32, 4),
            half: of(Kind::F16, 2),
            brain: of(Kind::Bf16, 2),
        };
        for (i, bytes) in new.single.chunks_exact_mut(4).enumerate() {
            bytes.copy_from_slice(&value(i).to_ne_bytes());
        }
        for (i, bytes) in new.half.chunks_exact_mut(2).enumerate() {
            bytes.copy_from_slice(&f16::from_f32(value(i)).to_ne_bytes());
        }
        for (i, bytes) in new.brain.chunks_exact_mut(2).enumerate() {
            bytes.copy_from_slice(&bf16::from_f32(value(i)).to_ne_bytes());
        }
        new
    }

    /// The first `len` of them.
    pub fn view(&self, kind: Kind, len: usize) -> GradientView<'_> {
        match kind {
            Kind::F32 => GradientView::F32(bytemuck::cast_slice(&self.single[..len * 4])),
            Kind::F16 => GradientView::F16(bytemuck::cast_slice(&self.half[..len * 2])),
            Kind::Bf16 => GradientView::Bf16(self.brain(len)),
        }
    }

    /// The first `len` of them in bf16.
    pub fn brain(&self, len: usize) -> &[bf16] {
        assert!(len <= self.len);
        bytemuck::cast_slice(&self.brain[..len * 2])
    }
}

/// Bytes a step reads and writes for each parameter.
pub fn traffic(kept: StatePrecision, device: Precision, gradient: Kind, values: usize) -> f64 {
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
pub struct Bench<'a> {
    pub pool: &'a ThreadPool,
    pub step: TileStep,
    pub gradients: &'a Gradients,
    pub ceiling: &'a Ceiling,
}

impl Bench<'_> {
    /// An update of `len` parameters.
    pub fn time(
        &self,
        rule: &HostRule,
        kept: StatePrecision,
        device: Precision,
        kind: Kind,
        len: usize,
    ) -> Time {
        let mut state = HostState::zeroed(rule, device, kept, len);
        let split = kept != StatePrecision::Full && device == Precision::Bf16;
        let mut image = pages(if split { 0 } else { len * device.size() });
        let mut time = 0;
        let gradient = self.gradients.view(kind, len);
        let ceiling = || self.ceiling.pass(self.pool, len);
        paired(ceiling, || {
            time += 1;
            let update = rule.begin(time, 1e-4, GradientScaling::NONE);
            let used = if split { 0 } else { len * device.size() };
            let image = ImageMut::of_bytes(device, &mut image[..used]);
            let work = state.work(&update, gradient, image);
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
    pub fn many(
        &self,
        rule: &HostRule,
        kept: StatePrecision,
        len: usize,
        count: usize,
    ) -> [Time; 2] {
        let new = |_| HostState::zeroed(rule, Precision::Bf16, kept, len);
        let mut states: Vec<HostState> = (0..count).map(new).collect();
        let own = if kept == StatePrecision::Full { len } else { 0 };
        let mut images = vec![DeviceImage::zeroed(Precision::Bf16, own); count];
        let mut time = 0;
        let gradient = self.gradients.brain(len);
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
        let ceiling = || self.ceiling.pass(self.pool, len * count);
        [true, false].map(|together| paired(ceiling, || run(together)))
    }
}

/// The streams of Adam with an addition each instead of its arithmetic: what memory allows.
pub struct Ceiling {
    pages: Mutex<[MmapMut; 5]>,
}

impl Ceiling {
    /// For up to `len` parameters.
    pub fn new(len: usize) -> Self {
        let pages = [4, 4, 4, 2, 2].map(|size| pages(len * size));
        Self {
            pages: Mutex::new(pages),
        }
    }

    /// Seconds of one pass over `len` parameters.
    pub fn pass(&self, pool: &ThreadPool, len: usize) -> f64 {
        let mut pages = self.pages.lock().expect("no pass has panicked");
        let [p, m, v, g, h] = &mut *pages;
        let floats =
            |pages| -> &mut [f32] { &mut bytemuck::cast_slice_mut::<u8, f32>(pages)[..len] };
        let (p, m, v) = (floats(p), floats(m), floats(v));
        let g: &[bf16] = &bytemuck::cast_slice::<u8, bf16>(g)[..len];
        let h: &mut [u16] = &mut bytemuck::cast_slice_mut::<u8, u16>(h)[..len];
        let start = Instant::now();
        pool.install(|| streams(p, m, v, g, h));
        black_box(h);
        start.elapsed().as_secs_f64()
    }
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
