use super::StepScalars;

/// One element of a parameter: master weight, first and second moment, largest second moment.
///
/// `largest` is only read and written with AMSGrad.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Element {
    /// Master weight `p`.
    pub master: f32,
    /// First moment `m`.
    pub first: f32,
    /// Second moment `v`.
    pub second: f32,
    /// Largest second moment so far.
    pub largest: f32,
}

/// Updates one element of [`Adam`](super::Adam) with gradient `g`.
///
/// Multiply-adds are fused explicitly (one rounding), so that results do not depend on which
/// instruction set ran the loop around this function.
#[inline(always)]
pub fn adam<const AMSGRAD: bool>(e: Element, g: f32, s: &StepScalars) -> Element {
    let Element {
        master: p,
        first: m,
        second: v,
        largest,
    } = e;
    let g = g * s.gradient_factor;
    // Comparisons rather than min and max: those hide a NaN, and a NaN has to show.
    let g = if g > s.gradient_bound {
        s.gradient_bound
    } else {
        g
    };
    let g = if g < -s.gradient_bound {
        -s.gradient_bound
    } else {
        g
    };
    let g = s.l2.mul_add(p, g);

    let m = s.beta_1.mul_add(m, s.one_minus_beta_1 * g);
    let v = s.beta_2.mul_add(v, (s.one_minus_beta_2 * g) * g);
    let largest = if AMSGRAD {
        if largest > v { largest } else { v }
    } else {
        largest
    };
    let w = if AMSGRAD { largest } else { v };

    let denominator = w.sqrt().mul_add(s.inverse_sqrt_correction_2, s.epsilon);
    let cautious = if (p >= 0.0) == (m >= 0.0) {
        s.cautious_rate
    } else {
        0.0
    };
    let decayed = p * s.keep - p * cautious;
    // The decayed weight is rounded before the update is taken off it, as in Burn and PyTorch: with
    // a decay of a few units in the last place, rounding once drifts away from them step by step.
    let p = s.step_size.mul_add(-(m / denominator), decayed);
    Element {
        master: p,
        first: m,
        second: v,
        largest,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Adam, GradientClip, WeightDecay};
    use super::*;

    fn run(rule: &Adam, p: f32, lr: f64, gradients: &[f32]) -> Vec<f32> {
        let mut e = Element {
            master: p,
            first: 0.0,
            second: 0.0,
            largest: 0.0,
        };
        let mut out = vec![];
        for (i, &g) in gradients.iter().enumerate() {
            let s = rule.scalars(i as u64 + 1, lr, g.abs() as f64);
            e = if rule.amsgrad {
                adam::<true>(e, g, &s)
            } else {
                adam::<false>(e, g, &s)
            };
            out.push(e.master);
        }
        out
    }

    fn rule(weight_decay: WeightDecay) -> Adam {
        Adam {
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-8,
            weight_decay,
            amsgrad: false,
            clip: None,
        }
    }

    #[track_caller]
    fn assert_close(actual: &[f32], expected: &[f64], tolerance: f64) {
        assert_eq!(actual.len(), expected.len());
        for (a, e) in actual.iter().zip(expected) {
            assert!(
                (*a as f64 - e).abs() <= tolerance,
                "{actual:?} against {expected:?}"
            );
        }
    }

    /// acceptance.md, CPU step, reference row AdamW (PyTorch).
    #[test]
    fn adamw_reference() {
        let out = run(
            &rule(WeightDecay::Decoupled(0.1)),
            1.0,
            0.1,
            &[0.5, -0.25, 0.125],
        );
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
        assert_close(
            &run(&rule(WeightDecay::None), 0.0, 1.0, &[1e-8]),
            &[-0.5],
            1e-6,
        );
    }

    #[test]
    fn cautious_decay_spares_weights_that_move_against_it() {
        // No update to speak of (lr acts through the decay alone): m has the gradient's sign.
        let rule = rule(WeightDecay::Cautious(0.5));
        let s = StepScalars {
            step_size: 0.0,
            ..rule.scalars(1, 0.1, 0.0)
        };
        let e = |p| Element {
            master: p,
            first: 0.0,
            second: 0.0,
            largest: 0.0,
        };
        assert_eq!(adam::<false>(e(1.0), 1.0, &s).master, 0.95);
        assert_eq!(adam::<false>(e(1.0), -1.0, &s).master, 1.0);
        assert_eq!(adam::<false>(e(-1.0), -1.0, &s).master, -0.95);
        assert_eq!(adam::<false>(e(-1.0), 1.0, &s).master, -1.0);
    }

    #[test]
    fn amsgrad_never_forgets_the_largest_second_moment() {
        let rule = Adam {
            amsgrad: true,
            ..rule(WeightDecay::None)
        };
        let mut e = Element {
            master: 0.0,
            first: 0.0,
            second: 0.0,
            largest: 0.0,
        };
        e = adam::<true>(e, 10.0, &rule.scalars(1, 0.1, 0.0));
        let peak = e.largest;
        e = adam::<true>(e, 0.0, &rule.scalars(2, 0.1, 0.0));
        assert!(e.second < peak);
        assert_eq!(e.largest, peak);
    }

    #[test]
    fn a_non_finite_gradient_shows_in_the_weight_despite_clipping() {
        let rule = Adam {
            clip: Some(GradientClip::Value(1.0)),
            ..rule(WeightDecay::None)
        };
        assert!(run(&rule, 1.0, 0.1, &[f32::NAN])[0].is_nan());
    }

    #[test]
    fn clipping_by_value_bounds_both_signs() {
        let rule = Adam {
            clip: Some(GradientClip::Value(0.5)),
            ..rule(WeightDecay::None)
        };
        for sign in [1.0, -1.0] {
            let e = Element {
                master: 0.0,
                first: 0.0,
                second: 0.0,
                largest: 0.0,
            };
            let s = rule.scalars(1, 0.1, 0.0);
            assert_eq!(
                adam::<false>(e, sign * 3.0, &s),
                adam::<false>(e, sign * 0.5, &s)
            );
        }
    }
}
