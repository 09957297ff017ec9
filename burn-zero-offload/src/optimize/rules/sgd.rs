//! Stochastic gradient descent, with and without momentum.

use crate::optimize::{Rule, StateKind};

/// `p <- p - lr g`, the rule of Burn's `SgdConfig` without momentum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// L2 penalty; 0 for none.
    pub penalty: f32,
}

impl Rule<0> for Sgd {
    /// L2 penalty, learning rate.
    type Scalars = (f32, f32);

    const STATE: [&'static str; 0] = [];

    const LOSSY: Option<[StateKind; 0]> = Some([]);

    fn scalars(&self, _time: u64, lr: f64) -> (f32, f32) {
        (self.penalty, lr as f32)
    }

    #[inline(always)]
    fn update(s: &(f32, f32), p: f32, _: [f32; 0], g: f32) -> (f32, [f32; 0]) {
        let g = s.0.mul_add(p, g);
        (s.1.mul_add(-g, p), [])
    }
}

/// Gradient descent with momentum, the rule of Burn's `SgdConfig` with it:
///
/// ```text
/// v <- g                                      for the first gradient
/// v <- momentum v + (1 - dampening) g         for all others
/// p <- p - lr v                               or, with Nesterov, p - lr (g + momentum v)
/// ```
///
/// (Sutskever et al., ICML 2013.)
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Momentum {
    /// L2 penalty; 0 for none.
    pub penalty: f32,
    /// Share of the velocity that is kept.
    pub momentum: f32,
    /// Share of the gradient that is left out, from the second one on.
    pub dampening: f64,
    /// Look ahead along the velocity.
    pub nesterov: bool,
}

/// What the elements of a momentum update share.
#[derive(Clone, Copy, Debug)]
pub struct MomentumScalars {
    penalty: f32,
    momentum: f32,
    share: f32,
    nesterov: bool,
    lr: f32,
}

impl Rule<1> for Momentum {
    type Scalars = MomentumScalars;

    const STATE: [&'static str; 1] = ["momentum.velocity"];

    const LOSSY: Option<[StateKind; 1]> = Some([StateKind::Signed]);

    const FUSED: bool = true;

    fn scalars(&self, time: u64, lr: f64) -> MomentumScalars {
        MomentumScalars {
            penalty: self.penalty,
            momentum: self.momentum,
            share: if time == 1 {
                1.0
            } else {
                (1.0 - self.dampening) as f32
            },
            nesterov: self.nesterov,
            lr: lr as f32,
        }
    }

    #[inline(always)]
    fn update(s: &MomentumScalars, p: f32, [v]: [f32; 1], g: f32) -> (f32, [f32; 1]) {
        let g = s.penalty.mul_add(p, g);
        let v = s.momentum.mul_add(v, s.share * g);
        let direction = if s.nesterov {
            s.momentum.mul_add(v, g)
        } else {
            v
        };
        (s.lr.mul_add(-direction, p), [v])
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{assert_close, run};
    use super::*;

    const MOMENTUM: Momentum = Momentum {
        penalty: 0.0,
        momentum: 0.5,
        dampening: 0.5,
        nesterov: false,
    };

    #[test]
    fn plain_descent_follows_the_gradient_and_the_penalty() {
        assert_eq!(
            run(&Sgd { penalty: 0.0 }, 1.0, 0.5, &[1.0, -0.5]),
            [0.5, 0.75]
        );
        assert_eq!(run(&Sgd { penalty: 0.5 }, 1.0, 0.5, &[1.0]), [0.25]);
    }

    /// Velocities 1, then .5 + .5 * 1 = 1: the first gradient is not dampened.
    #[test]
    fn the_first_gradient_is_not_dampened() {
        assert_eq!(
            run(&MOMENTUM, 1.0, 0.25, &[1.0, 1.0, 3.0]),
            [0.75, 0.5, 0.0]
        );
    }

    /// Directions 1 + .5 * 1, then 1 + .5 * 1.
    #[test]
    fn nesterov_looks_ahead() {
        let rule = Momentum {
            nesterov: true,
            ..MOMENTUM
        };
        assert_close(&run(&rule, 1.0, 0.25, &[1.0, 1.0]), &[0.625, 0.25], 0.0);
    }
}
