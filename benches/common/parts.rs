//! An offloaded training step and what it is made of, each with a time.
//!
//! Part of `benches/step.rs` and of the example `gpu-check`.

use std::time::{Duration, Instant};

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, FloatDType, Tensor, bf16};
use burn_zero_offload::optimize::rules::{Adam, WeightDecay};
use burn_zero_offload::optimize::{
    DeviceImage, GradientScaling, GradientView, HostRule, Precision, TileStep,
};
use burn_zero_offload::{HostState, Offload, StepReport};

/// One step of offloaded training, in seconds of the thread that trains.
#[derive(Clone, Debug, Default)]
pub struct Parts {
    /// Forward. On a GPU that is the time to hand it to the device.
    pub forward: f64,
    /// Backward, waits for room in the budget included.
    pub backward: f64,
    /// Until the last gradient was on the host.
    pub downloads: f64,
    /// The walk of the optimizer: CPU step and upload.
    pub step: f64,
    /// Until the device had done all it was given.
    pub rest: f64,
    /// What the engine counted.
    pub report: StepReport,
}

impl Parts {
    /// All of it.
    pub fn whole(&self) -> f64 {
        self.forward + self.backward + self.downloads + self.step + self.rest
    }

    /// Part by part the median of several steps; the counts are those of the last.
    pub fn median(steps: &[Self]) -> Self {
        let of = |part: fn(&Self) -> f64| median(steps.iter().map(part).collect());
        let time = |part: fn(&StepReport) -> Duration| {
            let times = steps.iter().map(|step| part(&step.report).as_secs_f64());
            Duration::from_secs_f64(median(times.collect()))
        };
        let last = steps.last().cloned().unwrap_or_default();
        Self {
            forward: of(|s| s.forward),
            backward: of(|s| s.backward),
            downloads: of(|s| s.downloads),
            step: of(|s| s.step),
            rest: of(|s| s.rest),
            report: StepReport {
                blocked_on_budget: time(|r| r.blocked_on_budget),
                blocked_on_download: time(|r| r.blocked_on_download),
                blocked_on_upload: time(|r| r.blocked_on_upload),
                ..last.report
            },
        }
    }
}

/// The middle one, or 0 if there is none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Waits until the device has done all it was given.
pub fn finish(device: &Device) {
    device
        .sync()
        .expect("the device does what it was given to do");
}

/// An offloaded model that trains.
pub struct Offloaded<M> {
    /// The model.
    pub model: M,
    /// Its host side.
    pub offload: Offload,
    optimizer: ModuleOptimizer,
    device: Device,
}

impl<M: Module> Offloaded<M> {
    /// What `init` returned, on `device`.
    pub fn new((model, offload): (M, Offload), device: &Device) -> Self {
        Self {
            optimizer: offload.optimizer(),
            device: device.clone(),
            model,
            offload,
        }
    }

    /// One step. With `apart`, forward is waited for before backward begins, so that the time of
    /// backward is that of backward alone.
    pub fn step(mut self, apart: bool, loss: impl Fn(&M) -> Tensor<1>) -> (Self, Parts) {
        let mut last = Instant::now();
        let mut lap = || {
            let now = Instant::now();
            now.duration_since(std::mem::replace(&mut last, now))
                .as_secs_f64()
        };
        let loss = loss(&self.model);
        if apart {
            finish(&self.device);
        }
        let forward = lap();
        let grads = GradientsParams::from_grads(loss.backward(), &self.model);
        let backward = lap();
        self.offload.flush().expect("gradients arrive");
        let downloads = lap();
        self.model = self.optimizer.step(1e-4, self.model, grads);
        let step = lap();
        finish(&self.device);
        let parts = Parts {
            forward,
            backward,
            downloads,
            step,
            rest: lap(),
            report: self.offload.report(),
        };
        (self, parts)
    }

    /// The medians of `count` steps, after `warm` that do not count.
    pub fn steps(
        mut self,
        warm: usize,
        count: usize,
        apart: bool,
        loss: impl Fn(&M) -> Tensor<1>,
    ) -> (Self, Parts) {
        let mut all = Vec::new();
        for number in 0..warm + count {
            let parts;
            (self, parts) = self.step(apart, &loss);
            if number >= warm {
                all.push(parts);
            }
        }
        (self, Parts::median(&all))
    }
}

/// Seconds of a forward and backward whose gradients are dropped, without any optimizer.
pub fn forward_and_backward(
    device: &Device,
    warm: usize,
    count: usize,
    loss: impl Fn() -> Tensor<1>,
) -> f64 {
    let mut seconds = Vec::new();
    for number in 0..warm + count {
        let started = Instant::now();
        drop(loss().backward());
        finish(device);
        if number >= warm {
            seconds.push(started.elapsed().as_secs_f64());
        }
    }
    median(seconds)
}

/// Casts all weights of a model, which then trains in that type.
pub fn cast<M: Module>(model: M, dtype: FloatDType) -> M {
    model.map(&mut Cast(dtype))
}

struct Cast(FloatDType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            let trains = tensor.is_require_grad();
            // Of the cast itself no gradient is wanted: the value is a leaf again.
            let cast = Tensor::from_inner(tensor.inner().cast(self.0));
            if trains { cast.require_grad() } else { cast }
        })
    }
}

/// Parameters per second of the CPU step alone, with gradients in place, measured on `len` of them.
pub fn cpu_step_rate(offload: &Offload, len: usize) -> f64 {
    let rule = Adam {
        beta_1: 0.9,
        beta_2: 0.999,
        epsilon: 1e-5,
        weight_decay: WeightDecay::Decoupled(0.1),
    };
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(offload.threads())
        .build();
    let pool = pool.expect("threads can be started");
    let rule = HostRule::new(rule);
    let kept = offload.memory().state_precision;
    let mut state = HostState::new(&rule, Precision::Bf16, kept, &vec![0.01; len]);
    let gradient = vec![bf16::from_f32(1e-3); len];
    let mut image = DeviceImage::zeroed(Precision::Bf16, len);
    let step = TileStep::new(offload.simd());
    let mut seconds = Vec::new();
    for number in 0..7 {
        let update = rule.begin(number + 1, 1e-4, GradientScaling::NONE);
        let view = GradientView::Bf16(&gradient);
        let work = state.work(&update, view, image.as_mut());
        let started = Instant::now();
        pool.install(|| step.update_all(vec![work]));
        if number >= 2 {
            seconds.push(started.elapsed().as_secs_f64());
        }
    }
    len as f64 / median(seconds)
}
