//! Adam, AdamW and AMSGrad.

use std::fmt;

use crate::optimize::{HostRule, Rule, StateKind};

/// How a weight is pulled towards zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WeightDecay {
    /// Not at all.
    None,
    /// Classical L2 penalty, added to the gradient: `g <- g + penalty * p` (Adam).
    L2(f32),
    /// Decoupled, `p <- p * (1 - lr * rate)` (AdamW, Loshchilov and Hutter, arXiv 1711.05101).
    Decoupled(f32),
    /// Decoupled, only where the weight and its first moment have the same sign
    /// (cautious weight decay, arXiv 2510.12402).
    Cautious(f32),
}

/// Adam and AdamW with the hyper-parameters of Burn's `AdamConfig` and `AdamWConfig`
/// (Kingma and Ba, arXiv 1412.6980, algorithm 1):
///
/// ```text
/// m <- b1 m + (1 - b1) g
/// v <- b2 v + (1 - b2) g^2
/// p <- decayed(p) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Decay rate of the first moment.
    pub beta_1: f32,
    /// Decay rate of the second moment.
    pub beta_2: f32,
    /// Added to the denominator.
    pub epsilon: f32,
    /// Weight decay.
    pub weight_decay: WeightDecay,
}

/// [`Adam`] that divides by the largest second moment so far (Reddi et al., ICLR 2018).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AmsGrad(pub Adam);

/// What the elements of an Adam update share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamScalars {
    /// `b1`.
    pub beta_1: f32,
    /// `1 - b1`.
    pub one_minus_beta_1: f32,
    /// `b2`.
    pub beta_2: f32,
    /// `1 - b2`.
    pub one_minus_beta_2: f32,
    /// `1 / sqrt(1 - b2^t)`.
    pub inverse_sqrt_correction_2: f32,
    /// `eps`.
    pub epsilon: f32,
    /// `lr / (1 - b1^t)`.
    pub step_size: f32,
    /// Factor on the weight, `1 - lr * rate` with decoupled decay, else 1.
    pub keep: f32,
    /// Share of the weight taken off where it and its first moment have the same sign:
    /// `lr * rate` with cautious decay, else 0.
    pub cautious_rate: f32,
    /// L2 penalty, 0 when unused.
    pub l2: f32,
}

impl AdamScalars {
    /// The moments after gradient `g` at weight `p`.
    #[inline(always)]
    fn moments(&self, p: f32, m: f32, v: f32, g: f32) -> (f32, f32) {
        let g = self.l2.mul_add(p, g);
        let m = self.beta_1.mul_add(m, self.one_minus_beta_1 * g);
        let v = self.beta_2.mul_add(v, (self.one_minus_beta_2 * g) * g);
        (m, v)
    }

    /// The weight after an update with first moment `m`, divided by the root of `w`.
    #[inline(always)]
    fn weight(&self, p: f32, m: f32, w: f32) -> f32 {
        let denominator = w
            .sqrt()
            .mul_add(self.inverse_sqrt_correction_2, self.epsilon);
        let cautious = if (p >= 0.0) == (m >= 0.0) {
            self.cautious_rate
        } else {
            0.0
        };
        let decayed = p * self.keep - p * cautious;
        // The decayed weight is rounded before the update is taken off it, as in Burn and PyTorch:
        // with a decay of a few units in the last place, rounding once drifts away from them step by
        // step.
        self.step_size.mul_add(-(m / denominator), decayed)
    }
}

impl Rule<2> for Adam {
    type Scalars = AdamScalars;

    const STATE: [&'static str; 2] = ["momentum.moment_1", "momentum.moment_2"];

    const TIME: &'static str = "momentum.time";

    const LOSSY: Option<[StateKind; 2]> = Some([StateKind::Signed, StateKind::NonNegative]);

    const FUSED: bool = true;

    fn shorter(&self) -> Option<HostRule> {
        match self.weight_decay {
            WeightDecay::None | WeightDecay::Decoupled(_) => Some(HostRule::new(PlainAdam(*self))),
            WeightDecay::L2(_) | WeightDecay::Cautious(_) => None,
        }
    }

    fn scalars(&self, time: u64, lr: f64) -> AdamScalars {
        let (beta_1, beta_2) = (self.beta_1 as f64, self.beta_2 as f64);
        let correction_1 = 1.0 - beta_1.powf(time as f64);
        let correction_2 = 1.0 - beta_2.powf(time as f64);
        let (mut keep, mut cautious_rate, mut l2) = (1.0, 0.0, 0.0);
        match self.weight_decay {
            WeightDecay::None => {}
            WeightDecay::L2(penalty) => l2 = penalty,
            WeightDecay::Decoupled(rate) => keep = 1.0 - lr * rate as f64,
            WeightDecay::Cautious(rate) => cautious_rate = lr * rate as f64,
        }
        AdamScalars {
            beta_1: self.beta_1,
            one_minus_beta_1: (1.0 - beta_1) as f32,
            beta_2: self.beta_2,
            one_minus_beta_2: (1.0 - beta_2) as f32,
            inverse_sqrt_correction_2: (1.0 / correction_2.sqrt()) as f32,
            epsilon: self.epsilon,
            step_size: (lr / correction_1) as f32,
            keep: keep as f32,
            cautious_rate: cautious_rate as f32,
            l2,
        }
    }

    #[inline(always)]
    fn update(s: &AdamScalars, p: f32, [m, v]: [f32; 2], g: f32) -> (f32, [f32; 2]) {
        let (m, v) = s.moments(p, m, v, g);
        (s.weight(p, m, v), [m, v])
    }
}

/// [`Adam`] with decoupled decay or none: no penalty, no comparison of signs.
#[derive(Clone, Copy, PartialEq)]
struct PlainAdam(Adam);

impl fmt::Debug for PlainAdam {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Rule<2> for PlainAdam {
    type Scalars = AdamScalars;

    const STATE: [&'static str; 2] = Adam::STATE;

    const TIME: &'static str = Adam::TIME;

    const LOSSY: Option<[StateKind; 2]> = Adam::LOSSY;

    const FUSED: bool = Adam::FUSED;

    fn scalars(&self, time: u64, lr: f64) -> AdamScalars {
        self.0.scalars(time, lr)
    }

    #[inline(always)]
    fn update(s: &AdamScalars, p: f32, [m, v]: [f32; 2], g: f32) -> (f32, [f32; 2]) {
        let m = s.beta_1.mul_add(m, s.one_minus_beta_1 * g);
        let v = s.beta_2.mul_add(v, (s.one_minus_beta_2 * g) * g);
        let denominator = v.sqrt();
        let denominator = denominator.mul_add(s.inverse_sqrt_correction_2, s.epsilon);
        (s.step_size.mul_add(-(m / denominator), p * s.keep), [m, v])
    }
}

impl Rule<3> for AmsGrad {
    type Scalars = AdamScalars;

    const STATE: [&'static str; 3] = [
        "momentum.moment_1",
        "momentum.moment_2",
        "momentum.max_moment_2",
    ];

    const TIME: &'static str = "momentum.time";

    fn scalars(&self, time: u64, lr: f64) -> AdamScalars {
        self.0.scalars(time, lr)
    }

    #[inline(always)]
    fn update(s: &AdamScalars, p: f32, [m, v, w]: [f32; 3], g: f32) -> (f32, [f32; 3]) {
        let (m, v) = s.moments(p, m, v, g);
        let w = if w > v { w } else { v };
        (s.weight(p, m, w), [m, v, w])
    }

    /// A run that was plain Adam before goes on from its second moments, as in Burn.
    fn complete([m, v, w]: [Option<Vec<f32>>; 3]) -> Option<[Vec<f32>; 3]> {
        let (m, v) = (m?, v?);
        let w = w.unwrap_or_else(|| v.clone());
        Some([m, v, w])
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{assert_close, run};
    use super::*;

    fn rule(weight_decay: WeightDecay) -> Adam {
        Adam {
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-8,
            weight_decay,
        }
    }

    #[test]
    fn corrections_of_the_first_update_cancel_the_decay_rates() {
        let s = rule(WeightDecay::None).scalars(1, 0.1);
        assert!((s.step_size - 1.0).abs() < 1e-6);
        assert!((s.inverse_sqrt_correction_2 - 31.622_776).abs() < 1e-3);
        assert_eq!((s.keep, s.cautious_rate, s.l2), (1.0, 0.0, 0.0));
    }

    /// acceptance.md, CPU step, reference row AdamW (PyTorch).
    #[test]
    fn adamw_reference() {
        let rule = rule(WeightDecay::Decoupled(0.1));
        let out = run(&rule, 1.0, 0.1, &[0.5, -0.25, 0.125]);
        assert_close(&out, &[0.890_000_002, 0.854_466_299, 0.811_878_722], 2e-7);
    }

    /// acceptance.md, CPU step, reference row Adam with L2 (PyTorch).
    #[test]
    fn adam_l2_reference() {
        let out = run(&rule(WeightDecay::L2(0.1)), 1.0, 0.1, &[0.5, -0.25, 0.125]);
        assert_close(&out, &[0.900_000_002, 0.854_441_368, 0.800_569_472], 2e-7);
    }

    /// acceptance.md, CPU step, reference row epsilon placement: outside the square root.
    #[test]
    fn epsilon_is_added_after_the_square_root() {
        let out = run(&rule(WeightDecay::None), 0.0, 1.0, &[1e-8]);
        assert_close(&out, &[-0.5], 1e-6);
    }

    #[test]
    fn cautious_decay_spares_weights_that_move_against_it() {
        // No update to speak of (lr acts through the decay alone): m has the gradient's sign.
        let s = AdamScalars {
            step_size: 0.0,
            ..rule(WeightDecay::Cautious(0.5)).scalars(1, 0.1)
        };
        let after = |p, g| Adam::update(&s, p, [0.0; 2], g).0;
        assert_eq!(after(1.0, 1.0), 0.95);
        assert_eq!(after(1.0, -1.0), 1.0);
        assert_eq!(after(-1.0, -1.0), -0.95);
        assert_eq!(after(-1.0, 1.0), -1.0);
    }

    #[test]
    fn amsgrad_never_forgets_the_largest_second_moment() {
        let rule = AmsGrad(rule(WeightDecay::None));
        let (p, state) = AmsGrad::update(&rule.scalars(1, 0.1), 0.0, [0.0; 3], 10.0);
        let (_, [_, second, largest]) = AmsGrad::update(&rule.scalars(2, 0.1), p, state, 0.0);
        assert!(second < state[1]);
        assert_eq!(largest, state[2]);
    }

    #[test]
    fn a_gradient_that_is_not_finite_shows_in_the_weight() {
        let rule = rule(WeightDecay::None);
        assert!(run(&rule, 1.0, 0.1, &[f32::NAN])[0].is_nan());
    }
}
