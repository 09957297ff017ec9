//! Lion.

use crate::optimize::{Rule, StateKind};

/// Lion with the hyper-parameters of Burn's `LionConfig` (Chen et al., arXiv 2302.06675):
///
/// ```text
/// p <- p (1 - lr weight_decay) - lr sign(b1 m + (1 - b1) g)
/// m <- b2 m + (1 - b2) g
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    /// Weight of the mean in the direction.
    pub beta_1: f32,
    /// Decay rate of the mean.
    pub beta_2: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
}

/// What the elements of a Lion update share.
#[derive(Clone, Copy, Debug)]
pub struct LionScalars {
    beta_1: f32,
    one_minus_beta_1: f32,
    beta_2: f32,
    one_minus_beta_2: f32,
    keep: f32,
    lr: f32,
}

impl Rule<1> for Lion {
    type Scalars = LionScalars;

    const STATE: [&'static str; 1] = ["momentum"];

    const LOSSY: Option<[StateKind; 1]> = Some([StateKind::Signed]);

    const FUSED: bool = true;

    fn scalars(&self, _time: u64, lr: f64) -> LionScalars {
        LionScalars {
            beta_1: self.beta_1,
            one_minus_beta_1: (1.0 - self.beta_1 as f64) as f32,
            beta_2: self.beta_2,
            one_minus_beta_2: (1.0 - self.beta_2 as f64) as f32,
            keep: (1.0 - lr * self.weight_decay as f64) as f32,
            lr: lr as f32,
        }
    }

    #[inline(always)]
    fn update(s: &LionScalars, p: f32, [m]: [f32; 1], g: f32) -> (f32, [f32; 1]) {
        let direction = s.beta_1.mul_add(m, s.one_minus_beta_1 * g);
        // `f32::signum` gives zero a sign.
        let moves = direction.abs() > 0.0;
        let step = if moves { s.lr.copysign(direction) } else { 0.0 };
        let m = s.beta_2.mul_add(m, s.one_minus_beta_2 * g);
        (p * s.keep - step, [m])
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{assert_close, run};
    use super::*;

    const LION: Lion = Lion {
        beta_1: 0.9,
        beta_2: 0.99,
        weight_decay: 0.0,
    };

    #[test]
    fn only_the_sign_counts_and_zero_has_none() {
        assert_close(&run(&LION, 1.0, 0.1, &[1e-6]), &[0.9], 1e-7);
        assert_close(&run(&LION, 1.0, 0.1, &[-4.0]), &[1.1], 1e-7);
        assert_eq!(run(&LION, 1.0, 0.1, &[0.0]), [1.0]);
    }

    /// The mean after 1 is .01: .9 * .01 outweighs .1 * .08, not .1 * .1.
    #[test]
    fn the_mean_holds_the_direction_against_small_gradients() {
        let up = run(&LION, 0.0, 0.1, &[1.0, -0.08]);
        assert_close(&up, &[-0.1, -0.2], 1e-7);
        let turned = run(&LION, 0.0, 0.1, &[1.0, -0.1]);
        assert_close(&turned, &[-0.1, 0.0], 1e-7);
    }

    #[test]
    fn decay_is_decoupled() {
        let rule = Lion {
            weight_decay: 0.5,
            ..LION
        };
        assert_close(&run(&rule, 2.0, 0.1, &[0.0]), &[1.9], 1e-7);
    }
}
