//! The update rules and the scalars that one step shares among all elements.

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

/// What is done to a parameter's gradient before the rule sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GradientClip {
    /// Clamp every element to `[-value, value]`.
    Value(f32),
    /// Scale the parameter's gradient so that its L2 norm is at most this.
    Norm(f32),
}

/// Adam and AdamW with the hyper-parameters of Burn's `AdamConfig` and `AdamWConfig`.
///
/// With `g` the gradient, `t` the number of updates of this parameter, this one included
/// (Kingma and Ba, arXiv 1412.6980, algorithm 1):
///
/// ```text
/// m <- b1 m + (1 - b1) g
/// v <- b2 v + (1 - b2) g^2
/// p <- decayed(p) - lr (m / (1 - b1^t)) / (sqrt(w / (1 - b2^t)) + eps)
/// ```
///
/// where `w` is `v`, or with AMSGrad the largest `v` so far (Reddi et al., 2018).
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
    /// Divide by the largest second moment so far.
    pub amsgrad: bool,
    /// Per-parameter gradient clipping.
    pub clip: Option<GradientClip>,
}

/// Everything an element's update needs besides the element: computed once a step, in `f64`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepScalars {
    /// Factor on the gradient (1, or the clipping coefficient).
    pub gradient_factor: f32,
    /// Bound on the gradient's absolute value after the factor; infinite when unused.
    pub gradient_bound: f32,
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

impl Adam {
    /// The scalars of update number `time` (counted from 1) at learning rate `lr`.
    ///
    /// `gradient_norm` is the L2 norm of the parameter's gradient; it matters only for
    /// [`GradientClip::Norm`].
    pub fn scalars(&self, time: u64, lr: f64, gradient_norm: f64) -> StepScalars {
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
        let (mut factor, mut bound) = (1.0, f32::INFINITY);
        match self.clip {
            None => {}
            Some(GradientClip::Value(value)) => bound = value,
            // Burn adds the smallest positive number to the norm; it only matters for norm 0,
            // where the factor is 1 either way.
            Some(GradientClip::Norm(limit)) if gradient_norm > limit as f64 => {
                factor = limit as f64 / gradient_norm;
            }
            Some(GradientClip::Norm(_)) => {}
        }
        StepScalars {
            gradient_factor: factor as f32,
            gradient_bound: bound,
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

    /// Whether [`scalars`](Self::scalars) needs the gradient's norm.
    pub fn needs_norm(&self) -> bool {
        matches!(self.clip, Some(GradientClip::Norm(_)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn adam() -> Adam {
        Adam {
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-8,
            weight_decay: WeightDecay::None,
            amsgrad: false,
            clip: None,
        }
    }

    #[test]
    fn corrections_of_the_first_update_cancel_the_decay_rates() {
        let s = adam().scalars(1, 0.1, 0.0);
        assert!((s.step_size - 1.0).abs() < 1e-6);
        assert!((s.inverse_sqrt_correction_2 - 31.622_776).abs() < 1e-3);
        assert_eq!((s.keep, s.cautious_rate, s.l2), (1.0, 0.0, 0.0));
    }

    #[test]
    fn a_norm_within_the_limit_is_left_alone() {
        let rule = Adam {
            clip: Some(GradientClip::Norm(1.0)),
            ..adam()
        };
        assert_eq!(rule.scalars(1, 0.1, 0.5).gradient_factor, 1.0);
        assert_eq!(rule.scalars(1, 0.1, 5.0).gradient_factor, 0.2);
        assert_eq!(rule.scalars(1, 0.1, 0.0).gradient_factor, 1.0);
    }
}
