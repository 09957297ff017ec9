//! What happens to a gradient before its rule sees it.

/// How gradients are clipped, besides what the norm over all of them asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GradientClip {
    /// Clamp every element to `[-value, value]`.
    Value(f32),
    /// Scale the parameter's gradient so that its L2 norm is at most this.
    Norm(f32),
}

/// What one step does to every element of a parameter's gradient: `clamp(g * factor, bound)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradientScaling {
    /// Takes off the loss scale, divides by the number of passes, and clips by norm, in one product.
    pub factor: f32,
    /// Bound on the absolute value after that; infinite if unused.
    pub bound: f32,
}

impl GradientScaling {
    /// Leaves gradients as they are.
    pub const NONE: Self = Self {
        factor: 1.0,
        bound: f32::INFINITY,
    };

    /// The scaling of a parameter whose gradient is to be multiplied by `factor`, and has L2 norm
    /// `norm` after that, under the clipping of its own optimizer config.
    pub fn new(factor: f64, norm: f64, clip: Option<GradientClip>) -> Self {
        let coefficient = match clip {
            Some(GradientClip::Norm(limit)) => clip_coefficient(norm, limit as f64),
            _ => 1.0,
        };
        Self {
            factor: (factor * coefficient) as f32,
            bound: match clip {
                Some(GradientClip::Value(value)) => value,
                _ => f32::INFINITY,
            },
        }
    }

    /// The element that the rule sees.
    #[inline(always)]
    pub fn apply(&self, g: f32) -> f32 {
        let g = g * self.factor;
        // Comparisons rather than min and max: those hide a NaN, and a NaN has to show.
        let g = if g > self.bound { self.bound } else { g };
        if g < -self.bound { -self.bound } else { g }
    }
}

/// What a gradient of L2 norm `norm` is multiplied with so that its norm is at most `limit`.
///
/// Burn and PyTorch add a tiny number to the norm first. It matters only for norm 0, where the
/// coefficient is 1 either way.
pub(crate) fn clip_coefficient(norm: f64, limit: f64) -> f64 {
    if norm > limit { limit / norm } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// acceptance.md, norm and clipping 26: `[3, 4]` clipped to norm 1 has coefficient .2.
    #[test]
    fn a_norm_within_the_limit_is_left_alone() {
        let clip = Some(GradientClip::Norm(1.0));
        assert_eq!(GradientScaling::new(1.0, 0.5, clip), GradientScaling::NONE);
        assert_eq!(GradientScaling::new(1.0, 0.0, clip), GradientScaling::NONE);
        assert_eq!(GradientScaling::new(1.0, 5.0, clip).factor, 0.2);
    }

    #[test]
    fn the_factor_comes_before_the_clipping() {
        let clipped = GradientScaling::new(0.25, 2.0, Some(GradientClip::Norm(1.0)));
        assert_eq!(clipped.factor, 0.125);
        let bounded = GradientScaling::new(0.25, 2.0, Some(GradientClip::Value(1.0)));
        assert_eq!([8.0, 2.0, -8.0].map(|g| bounded.apply(g)), [1.0, 0.5, -1.0]);
    }

    #[test]
    fn a_bound_does_not_hide_what_is_not_finite() {
        let bounded = GradientScaling::new(1.0, 0.0, Some(GradientClip::Value(1.0)));
        assert!(bounded.apply(f32::NAN).is_nan());
    }
}
