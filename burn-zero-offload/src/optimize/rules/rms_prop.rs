//! RMSProp.

use crate::optimize::{Rule, StateKind};

/// RMSProp with the hyper-parameters of Burn's `RmsPropConfig` (Hinton, 2012; Graves, arXiv 1308.0850,
/// where centered):
///
/// ```text
/// v <- alpha v + (1 - alpha) g^2
/// a <- alpha a + (1 - alpha) g        where CENTERED; else a = 0
/// b <- momentum b + g / (sqrt(v - a^2) + eps)
/// p <- p - lr b
/// ```
///
/// It keeps `v`, `a` where `CENTERED` and `b` where `MOMENTUM`, in this order. A variance below zero,
/// which rounding can leave, counts as zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsProp<const CENTERED: bool, const MOMENTUM: bool> {
    /// Decay rate of the means.
    pub alpha: f32,
    /// Share of the buffer that is kept; of no effect without `MOMENTUM`.
    pub momentum: f32,
    /// Added to the denominator.
    pub epsilon: f32,
    /// L2 penalty; 0 for none.
    pub penalty: f32,
}

/// What the elements of an RMSProp update share.
#[derive(Clone, Copy, Debug)]
pub struct RmsPropScalars {
    penalty: f32,
    alpha: f32,
    one_minus_alpha: f32,
    momentum: f32,
    epsilon: f32,
    lr: f32,
}

impl<const CENTERED: bool, const MOMENTUM: bool> RmsProp<CENTERED, MOMENTUM> {
    fn shared(&self, lr: f64) -> RmsPropScalars {
        RmsPropScalars {
            penalty: self.penalty,
            alpha: self.alpha,
            one_minus_alpha: (1.0 - self.alpha as f64) as f32,
            momentum: self.momentum,
            epsilon: self.epsilon,
            lr: lr as f32,
        }
    }
}

/// The update of weight, mean of squares, mean and buffer.
#[inline(always)]
fn update<const CENTERED: bool, const MOMENTUM: bool>(
    s: &RmsPropScalars,
    p: f32,
    [v, a, b]: [f32; 3],
    g: f32,
) -> (f32, [f32; 3]) {
    let g = s.penalty.mul_add(p, g);
    let v = s.alpha.mul_add(v, (s.one_minus_alpha * g) * g);
    let a = if CENTERED {
        s.alpha.mul_add(a, s.one_minus_alpha * g)
    } else {
        0.0
    };
    let step = g / (variance(v, a).sqrt() + s.epsilon);
    let b = if MOMENTUM {
        s.momentum.mul_add(b, step)
    } else {
        step
    };
    (s.lr.mul_add(-b, p), [v, a, b])
}

#[inline(always)]
fn variance(v: f32, a: f32) -> f32 {
    let variance = v - a * a;
    // A comparison that keeps NaN.
    if variance < 0.0 { 0.0 } else { variance }
}

const SQUARES: &str = "square_avg.square_avg";
const MEAN: &str = "centered.grad_avg";
const BUFFER: &str = "momentum.buf";

/// Burn's records hold what the root is taken of, although it follows from the rest.
fn recorded_variance(v: &[f32], a: impl Iterator<Item = f32>) -> Vec<(&'static str, Vec<f32>)> {
    let variance = v.iter().zip(a).map(|(v, a)| variance(*v, a));
    vec![("centered.avg", variance.collect())]
}

fn none() -> impl Iterator<Item = f32> {
    std::iter::repeat(0.0)
}

impl Rule<1> for RmsProp<false, false> {
    type Scalars = RmsPropScalars;
    const STATE: [&'static str; 1] = [SQUARES];

    const LOSSY: Option<[StateKind; 1]> = Some([StateKind::NonNegative]);

    fn scalars(&self, _time: u64, lr: f64) -> RmsPropScalars {
        self.shared(lr)
    }

    #[inline(always)]
    fn update(s: &RmsPropScalars, p: f32, [v]: [f32; 1], g: f32) -> (f32, [f32; 1]) {
        let (p, [v, ..]) = update::<false, false>(s, p, [v, 0.0, 0.0], g);
        (p, [v])
    }

    fn derived([v]: [&[f32]; 1]) -> Vec<(&'static str, Vec<f32>)> {
        recorded_variance(v, none())
    }
}

impl Rule<2> for RmsProp<false, true> {
    type Scalars = RmsPropScalars;
    const STATE: [&'static str; 2] = [SQUARES, BUFFER];

    const LOSSY: Option<[StateKind; 2]> = Some([StateKind::NonNegative, StateKind::Signed]);

    fn scalars(&self, _time: u64, lr: f64) -> RmsPropScalars {
        self.shared(lr)
    }

    #[inline(always)]
    fn update(s: &RmsPropScalars, p: f32, [v, b]: [f32; 2], g: f32) -> (f32, [f32; 2]) {
        let (p, [v, _, b]) = update::<false, true>(s, p, [v, 0.0, b], g);
        (p, [v, b])
    }

    /// A run that had no momentum before begins with an empty buffer, as in Burn.
    fn complete([v, b]: [Option<Vec<f32>>; 2]) -> Option<[Vec<f32>; 2]> {
        let v = v?;
        let b = b.unwrap_or_else(|| vec![0.0; v.len()]);
        Some([v, b])
    }

    fn derived([v, _]: [&[f32]; 2]) -> Vec<(&'static str, Vec<f32>)> {
        recorded_variance(v, none())
    }
}

impl Rule<2> for RmsProp<true, false> {
    type Scalars = RmsPropScalars;
    const STATE: [&'static str; 2] = [SQUARES, MEAN];

    fn scalars(&self, _time: u64, lr: f64) -> RmsPropScalars {
        self.shared(lr)
    }

    #[inline(always)]
    fn update(s: &RmsPropScalars, p: f32, [v, a]: [f32; 2], g: f32) -> (f32, [f32; 2]) {
        let (p, [v, a, _]) = update::<true, false>(s, p, [v, a, 0.0], g);
        (p, [v, a])
    }

    /// A run that was not centered before begins with an empty mean, as in Burn.
    fn complete([v, a]: [Option<Vec<f32>>; 2]) -> Option<[Vec<f32>; 2]> {
        let v = v?;
        let a = a.unwrap_or_else(|| vec![0.0; v.len()]);
        Some([v, a])
    }

    fn derived([v, a]: [&[f32]; 2]) -> Vec<(&'static str, Vec<f32>)> {
        recorded_variance(v, a.iter().copied())
    }
}

impl Rule<3> for RmsProp<true, true> {
    type Scalars = RmsPropScalars;
    const STATE: [&'static str; 3] = [SQUARES, MEAN, BUFFER];

    fn scalars(&self, _time: u64, lr: f64) -> RmsPropScalars {
        self.shared(lr)
    }

    #[inline(always)]
    fn update(s: &RmsPropScalars, p: f32, state: [f32; 3], g: f32) -> (f32, [f32; 3]) {
        update::<true, true>(s, p, state, g)
    }

    /// See the other variants.
    fn complete([v, a, b]: [Option<Vec<f32>>; 3]) -> Option<[Vec<f32>; 3]> {
        let v = v?;
        let [a, b] = [a, b].map(|missing| missing.unwrap_or_else(|| vec![0.0; v.len()]));
        Some([v, a, b])
    }

    fn derived([v, a, _]: [&[f32]; 3]) -> Vec<(&'static str, Vec<f32>)> {
        recorded_variance(v, a.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{assert_close, run};
    use super::*;

    /// v = .25 * 4: steps of 2 / 1, and .5 times that more with momentum.
    #[test]
    fn steps_are_divided_by_the_root_of_the_mean_square() {
        let plain = RmsProp::<false, false> {
            alpha: 0.75,
            momentum: 0.0,
            epsilon: 0.0,
            penalty: 0.0,
        };
        assert_close(&run(&plain, 1.0, 0.1, &[2.0]), &[0.8], 1e-7);
        let with = RmsProp::<false, true> {
            alpha: 0.75,
            momentum: 0.5,
            epsilon: 0.0,
            penalty: 0.0,
        };
        let second = 0.8 - 0.1 * (1.0 + 2.0 / 1.75f64.sqrt());
        assert_close(&run(&with, 1.0, 0.1, &[2.0, 2.0]), &[0.8, second], 1e-6);
    }

    /// v = 1, a = .5: the variance is .75.
    #[test]
    fn centered_divides_by_the_deviation() {
        let rule = RmsProp::<true, false> {
            alpha: 0.75,
            momentum: 0.0,
            epsilon: 0.0,
            penalty: 0.0,
        };
        let expected = 1.0 - 0.1 * 2.0 / 0.75f64.sqrt();
        assert_close(&run(&rule, 1.0, 0.1, &[2.0]), &[expected], 1e-6);
        let rule = RmsProp::<true, true> {
            alpha: 0.75,
            momentum: 0.5,
            epsilon: 0.0,
            penalty: 0.0,
        };
        assert_close(&run(&rule, 1.0, 0.1, &[2.0]), &[expected], 1e-6);
    }

    #[test]
    fn a_variance_that_rounds_below_zero_is_zero() {
        assert_eq!(variance(1.0, 1.000_001), 0.0);
        assert!(variance(f32::NAN, 0.0).is_nan());
    }
}
