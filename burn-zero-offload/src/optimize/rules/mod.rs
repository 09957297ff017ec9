//! The rules of Burn's optimizers, as Burn defines them.
//!
//! In all of them `g` is the gradient after unscaling and clipping, `p` the master weight, `lr` the
//! learning rate and `t` the number of updates of the parameter, this one included. Weight decay of
//! the classical kind, an L2 penalty, is `g <- g + penalty * p`.

mod adagrad;
mod adam;
mod lion;
mod rms_prop;
mod sgd;

pub use adagrad::{AdaGrad, AdaGradScalars};
pub use adam::{Adam, AdamScalars, AmsGrad, WeightDecay};
pub use lion::{Lion, LionScalars};
pub use rms_prop::{RmsProp, RmsPropScalars};
pub use sgd::{Momentum, MomentumScalars, Sgd};

#[cfg(test)]
mod tests {
    use super::super::Rule;

    /// Runs a rule on one weight and returns the weight after each gradient.
    pub(super) fn run<const N: usize, R: Rule<N>>(
        rule: &R,
        weight: f32,
        lr: f64,
        gradients: &[f32],
    ) -> Vec<f32> {
        let (mut p, mut state) = (weight, [0.0; N]);
        let step = |(i, &g): (usize, &f32)| {
            (p, state) = R::update(&rule.scalars(i as u64 + 1, lr), p, state, g);
            p
        };
        gradients.iter().enumerate().map(step).collect()
    }

    #[track_caller]
    pub(super) fn assert_close(actual: &[f32], expected: &[f64], tolerance: f64) {
        assert_eq!(actual.len(), expected.len());
        for (a, e) in actual.iter().zip(expected) {
            let close = (*a as f64 - e).abs() <= tolerance;
            assert!(close, "{actual:?} against {expected:?}");
        }
    }
}
