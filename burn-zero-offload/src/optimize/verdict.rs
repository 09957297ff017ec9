//! Whether a round is applied, and by what its gradients are multiplied.

use super::clip_coefficient;

/// What is known of one parameter's gradient before the step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Judgement {
    /// Sum of squares of the gradient as it was collected.
    pub(crate) squares: f64,
    /// The loss scale it carries.
    pub(crate) scale: f32,
}

/// What is decided about all gradients of a round together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Verdict {
    /// There is no gradient.
    Nothing,
    /// Every gradient is finite.
    Apply {
        /// L2 norm over all parameters, unscaled and divided.
        norm: f64,
        /// Factor on every gradient, besides taking off the loss scale: clipping and division.
        factor: f64,
    },
    /// Some gradient is not finite: nothing may change.
    Skip {
        /// The norm, infinite or NaN.
        norm: f64,
    },
}

impl Verdict {
    /// Judges the gradients of a round, one [`Judgement`] per parameter in a fixed order.
    ///
    /// Gradients are divided by `divisor` after the loss scale is taken off; the norm of the result
    /// is clipped to `max_norm`.
    pub(crate) fn of(
        gradients: impl IntoIterator<Item = Judgement>,
        divisor: f64,
        max_norm: Option<f64>,
    ) -> Self {
        let mut sum = None;
        for Judgement { squares, scale } in gradients {
            let unit = scale as f64 * divisor;
            *sum.get_or_insert(0.0) += squares / (unit * unit);
        }
        let Some(sum) = sum else {
            return Self::Nothing;
        };
        let norm = f64::sqrt(sum);
        if !norm.is_finite() {
            return Self::Skip { norm };
        }
        let coefficient = max_norm.map_or(1.0, |limit| clip_coefficient(norm, limit));
        Self::Apply {
            norm,
            factor: coefficient / divisor,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(squares: &[(f64, f32)], divisor: f64, max_norm: Option<f64>) -> Verdict {
        let gradients = squares
            .iter()
            .map(|&(squares, scale)| Judgement { squares, scale });
        Verdict::of(gradients, divisor, max_norm)
    }

    /// acceptance.md, norm and clipping 26.
    #[test]
    fn three_and_four_clipped_to_one() {
        let (norm, factor) = (5.0, 0.2);
        let expected = Verdict::Apply { norm, factor };
        assert_eq!(judge(&[(9.0, 1.0), (16.0, 1.0)], 1.0, Some(1.0)), expected);
        assert_eq!(judge(&[(25.0, 1.0)], 1.0, Some(1.0)), expected);
    }

    #[test]
    fn every_gradient_is_taken_in_its_own_scale() {
        let verdict = judge(&[(9.0 * 64.0, 8.0), (16.0, 1.0)], 1.0, None);
        assert_eq!(
            verdict,
            Verdict::Apply {
                norm: 5.0,
                factor: 1.0
            }
        );
        let verdict = judge(&[(4.0 * 36.0, 2.0), (4.0 * 64.0, 2.0)], 2.0, Some(2.5));
        assert_eq!(
            verdict,
            Verdict::Apply {
                norm: 5.0,
                factor: 0.25
            }
        );
    }

    #[test]
    fn one_value_that_is_not_finite_skips_all() {
        for bad in [f64::NAN, f64::INFINITY] {
            let verdict = judge(&[(1.0, 1.0), (bad, 1.0), (1.0, 1.0)], 1.0, Some(1.0));
            assert!(matches!(verdict, Verdict::Skip { norm } if !norm.is_finite()));
        }
    }

    #[test]
    fn no_gradient_is_no_reason_to_skip() {
        assert_eq!(judge(&[], 1.0, Some(1.0)), Verdict::Nothing);
        let zero = Verdict::Apply {
            norm: 0.0,
            factor: 1.0,
        };
        assert_eq!(judge(&[(0.0, 1.0)], 1.0, Some(1.0)), zero);
    }
}
