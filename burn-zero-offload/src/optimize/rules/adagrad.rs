//! AdaGrad.

use crate::optimize::Rule;

/// AdaGrad with the hyper-parameters of Burn's `AdaGradConfig` (Duchi et al., JMLR 2011):
///
/// ```text
/// sum <- sum + g^2
/// p <- p - lr / (1 + (t - 1) lr_decay) g / (sqrt(sum) + eps)
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaGrad {
    /// How fast the learning rate falls with the number of updates.
    pub lr_decay: f64,
    /// Added to the denominator.
    pub epsilon: f32,
    /// L2 penalty; 0 for none.
    pub penalty: f32,
}

/// What the elements of an AdaGrad update share.
#[derive(Clone, Copy, Debug)]
pub struct AdaGradScalars {
    penalty: f32,
    epsilon: f32,
    lr: f32,
}

impl Rule<1> for AdaGrad {
    type Scalars = AdaGradScalars;

    const STATE: [&'static str; 1] = ["lr_decay.sum"];

    const TIME: &'static str = "lr_decay.time";

    fn scalars(&self, time: u64, lr: f64) -> AdaGradScalars {
        AdaGradScalars {
            penalty: self.penalty,
            epsilon: self.epsilon,
            lr: (lr / (1.0 + (time as f64 - 1.0) * self.lr_decay)) as f32,
        }
    }

    #[inline(always)]
    fn update(s: &AdaGradScalars, p: f32, [sum]: [f32; 1], g: f32) -> (f32, [f32; 1]) {
        let g = s.penalty.mul_add(p, g);
        let sum = g.mul_add(g, sum);
        (s.lr.mul_add(-(g / (sum.sqrt() + s.epsilon)), p), [sum])
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{assert_close, run};
    use super::*;

    /// 3 / 3, then 4 / 5 at half the learning rate.
    #[test]
    fn steps_shrink_with_the_sum_of_squares_and_with_time() {
        let rule = AdaGrad {
            lr_decay: 1.0,
            epsilon: 0.0,
            penalty: 0.0,
        };
        assert_close(&run(&rule, 1.0, 0.1, &[3.0, 4.0]), &[0.9, 0.86], 1e-7);
    }

    #[test]
    fn the_penalty_is_part_of_the_gradient() {
        let rule = AdaGrad {
            lr_decay: 0.0,
            epsilon: 1.0,
            penalty: 0.5,
        };
        assert_eq!(run(&rule, 2.0, 0.5, &[0.0]), [1.75]);
    }
}
