//! A gradient as it came from the device.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// A borrowed gradient in the element type it had on the device.
#[derive(Clone, Copy, Debug)]
pub enum GradientView<'a> {
    /// Single precision, also the type of accumulated gradients.
    F32(&'a [f32]),
    /// IEEE half precision.
    F16(&'a [f16]),
    /// Brain floating point.
    Bf16(&'a [bf16]),
}

impl<'a> GradientView<'a> {
    /// The elements of `range`.
    ///
    /// # Panics
    ///
    /// If `range` is out of bounds.
    pub fn slice(&self, range: Range<usize>) -> GradientView<'a> {
        match self {
            Self::F32(g) => GradientView::F32(&g[range]),
            Self::F16(g) => GradientView::F16(&g[range]),
            Self::Bf16(g) => GradientView::Bf16(&g[range]),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(g) => g.len(),
            Self::F16(g) => g.len(),
            Self::Bf16(g) => g.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes the elements of `range`, widened to `f32`, into `out`. Widening is exact.
    ///
    /// # Panics
    ///
    /// If `out` is not as long as `range`, or `range` is out of bounds.
    pub fn widen_into(&self, range: Range<usize>, out: &mut [f32]) {
        match self {
            Self::F32(g) => out.copy_from_slice(&g[range]),
            Self::F16(g) => g[range].convert_to_f32_slice(out),
            Self::Bf16(g) => g[range].convert_to_f32_slice(out),
        }
    }

    /// Adds the elements of this gradient to `sum`, in `f32`.
    ///
    /// # Panics
    ///
    /// If the lengths differ.
    pub fn add_to(&self, sum: &mut [f32]) {
        assert_eq!(
            self.len(),
            sum.len(),
            "a gradient and its sum differ in length"
        );
        match self {
            Self::F32(g) => sum.iter_mut().zip(*g).for_each(|(s, g)| *s += g),
            Self::F16(g) => sum.iter_mut().zip(*g).for_each(|(s, g)| *s += g.to_f32()),
            Self::Bf16(g) => sum.iter_mut().zip(*g).for_each(|(s, g)| *s += g.to_f32()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// acceptance.md, gradient accumulation 25: in bf16 itself the sum would stay at 2048.
    #[test]
    fn small_bf16_contributions_are_not_lost_next_to_a_large_one() {
        let mut sum = vec![0.0f32];
        GradientView::Bf16(&[bf16::from_f32(2048.0)]).add_to(&mut sum);
        for _ in 0..8 {
            GradientView::Bf16(&[bf16::from_f32(0.5)]).add_to(&mut sum);
        }
        assert_eq!(sum, [2052.0]);
    }

    #[test]
    fn widening_covers_the_range_asked_for() {
        let g: Vec<f16> = (0..10).map(|i| f16::from_f32(i as f32)).collect();
        let mut out = [0.0; 3];
        GradientView::F16(&g).widen_into(4..7, &mut out);
        assert_eq!(out, [4.0, 5.0, 6.0]);
    }
}
