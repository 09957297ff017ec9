//! Training as it would be without offload: a plain loop over vectors on the host.
//!
//! Rules are the scalar oracle; sums, norm, clipping and the loss scale are a few lines of their own.

use burn::tensor::{Bytes, DType, Device, FloatDType, Tensor, TensorData, bf16};
use burn_zero_offload::optimize::{DeviceImage, GradientScaling, Precision, Rule, oracle};

/// A parameter: master weights, state and update count.
struct Plain<const N: usize, R: Rule<N>> {
    rule: R,
    own_norm: Option<f64>,
    master: Vec<f32>,
    state: [Vec<f32>; N],
    time: u64,
}

/// What the loop does with a parameter of any rule.
pub trait Parameter {
    /// Master weights.
    fn master(&self) -> &[f32];
    /// State of the rule with its names in records.
    fn state(&self) -> Vec<(&'static str, &[f32])>;
    /// Updates so far.
    fn time(&self) -> u64;
    /// One update by `gradient * factor`, clipped to the parameter's own norm.
    fn step(&mut self, lr: f64, factor: f64, gradient: &[f32]);
}

/// A parameter that starts at `master`, whose gradient is clipped to `own_norm`.
pub fn parameter<const N: usize, R: Rule<N>>(
    rule: R,
    own_norm: Option<f64>,
    master: Vec<f32>,
) -> Box<dyn Parameter> {
    Box::new(Plain {
        rule,
        own_norm,
        state: std::array::from_fn(|_| vec![0.0; master.len()]),
        master,
        time: 0,
    })
}

fn squares(gradient: &[f32]) -> f64 {
    gradient.iter().map(|&g| g as f64 * g as f64).sum()
}

impl<const N: usize, R: Rule<N>> Parameter for Plain<N, R> {
    fn master(&self) -> &[f32] {
        &self.master
    }

    fn state(&self) -> Vec<(&'static str, &[f32])> {
        let values = self.state.iter().map(|values| &values[..]);
        R::STATE.into_iter().zip(values).collect()
    }

    fn time(&self) -> u64 {
        self.time
    }

    fn step(&mut self, lr: f64, factor: f64, gradient: &[f32]) {
        self.time += 1;
        let norm = squares(gradient).sqrt() * factor;
        let own = match self.own_norm {
            Some(limit) if norm > limit => limit / norm,
            _ => 1.0,
        };
        let scaling = GradientScaling {
            factor: (factor * own) as f32,
            bound: f32::INFINITY,
        };
        let (master, state) = (&mut self.master, &mut self.state);
        oracle::update(&self.rule, self.time, lr, scaling, master, state, gradient);
    }
}

/// The loop between two rounds.
pub struct PlainLoop {
    pub parameters: Vec<Box<dyn Parameter>>,
    pub max_norm: Option<f64>,
    pub mean: bool,
    pub scale: f32,
    pub growth_interval: usize,
    pub largest_scale: f32,
    good: usize,
}

/// What became of a round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ended {
    /// There was no gradient.
    Empty,
    /// The norm was this.
    Applied(f64),
    Skipped,
}

impl PlainLoop {
    pub fn new(parameters: Vec<Box<dyn Parameter>>, scale: f32) -> Self {
        Self {
            parameters,
            max_norm: None,
            mean: false,
            scale,
            growth_interval: 2000,
            largest_scale: 16_777_216.0,
            good: 0,
        }
    }

    /// Ends a round of `passes` with the sum of each parameter's gradients.
    pub fn end(&mut self, lr: f64, passes: usize, sums: &[Option<Vec<f32>>]) -> Ended {
        if sums.iter().all(Option::is_none) {
            return Ended::Empty;
        }
        let total: f64 = sums.iter().flatten().map(|sum| squares(sum)).sum();
        let divisor = if self.mean { passes as f64 } else { 1.0 };
        let unit = self.scale as f64 * divisor;
        let norm = total.sqrt() / unit;
        if !norm.is_finite() {
            (self.scale, self.good) = ((self.scale / 2.0).max(1.0), 0);
            return Ended::Skipped;
        }
        let clip = match self.max_norm {
            Some(limit) if norm > limit => limit / norm,
            _ => 1.0,
        };
        for (parameter, sum) in self.parameters.iter_mut().zip(sums) {
            if let Some(sum) = sum {
                parameter.step(lr, clip / unit, sum);
            }
        }
        self.good += 1;
        if self.good == self.growth_interval {
            (self.scale, self.good) = ((self.scale * 2.0).min(self.largest_scale), 0);
        }
        Ended::Applied(norm)
    }
}

/// Adds the gradient of `leaf` to a sum, in `f32`.
pub fn add(sum: &mut Option<Vec<f32>>, gradient: Tensor<1>) {
    let gradient: Vec<f32> = gradient.try_into_vec_as().unwrap();
    match sum {
        None => *sum = Some(gradient),
        Some(sum) => sum.iter_mut().zip(gradient).for_each(|(s, g)| *s += g),
    }
}

/// The weights that a device holds for `master`: of a split master, which it is by default in bf16, the upper
/// half rounded to nearest, ties away from zero.
pub fn image(master: &[f32], dtype: FloatDType, device: &Device) -> Tensor<1> {
    let precision = match dtype {
        FloatDType::F16 => Precision::F16,
        FloatDType::BF16 => Precision::Bf16,
        _ => Precision::F32,
    };
    let image = match precision {
        Precision::Bf16 => {
            let upper = |m: &f32| bf16::from_bits((m.to_bits().wrapping_add(0x8000) >> 16) as u16);
            DeviceImage::Bf16(master.iter().map(upper).collect())
        }
        _ => DeviceImage::of(precision, master),
    };
    let bytes = image.as_bytes().to_vec();
    let bytes = Bytes::from_bytes_vec(bytes);
    let data = TensorData::from_bytes(bytes, [master.len()], DType::from(dtype));
    Tensor::from_data(data, (device, DType::from(dtype)))
}
