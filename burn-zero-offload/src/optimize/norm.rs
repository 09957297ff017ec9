//! L2 norms of gradients, the same for every thread count.

use rayon::prelude::*;

use super::{GradientView, TILE, TilePlan};

/// The L2 norm of a gradient.
///
/// Squares are summed in `f64`, tile by tile and the tiles in order: no overflow for any `f32`
/// gradient, and the result does not depend on how many threads took part.
pub(crate) fn l2_norm(gradient: &GradientView<'_>) -> f64 {
    let plan = TilePlan::new(gradient.len(), TILE);
    let tile = |index: usize| {
        let range = plan.range(index);
        let mut buffer = [0.0f32; TILE];
        let buffer = &mut buffer[..range.len()];
        gradient.widen_into(range, buffer);
        buffer.iter().map(|&g| g as f64 * g as f64).sum::<f64>()
    };
    if plan.count() == 1 {
        return tile(0).sqrt();
    }
    let partial: Vec<f64> = (0..plan.count()).into_par_iter().map(tile).collect();
    partial.iter().sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    /// acceptance.md, norm and clipping: f16 `[3072, 4096]` and `[300.0]` overflow when squared in f16.
    #[test]
    fn squares_beyond_the_gradients_own_range_do_not_overflow() {
        let g = [f16::from_f32(3072.0), f16::from_f32(4096.0)];
        assert_eq!(l2_norm(&GradientView::F16(&g)), 5120.0);
        assert_eq!(l2_norm(&GradientView::F16(&[f16::from_f32(300.0)])), 300.0);
        assert_eq!(l2_norm(&GradientView::F32(&[3e38, 0.0])), 3e38f32 as f64);
    }

    #[test]
    fn the_norm_does_not_depend_on_the_number_of_threads() {
        let g: Vec<f32> = (0..100_003).map(|i| (i as f32 * 0.37).sin()).collect();
        let norm = |threads| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            pool.install(|| l2_norm(&GradientView::F32(&g))).to_bits()
        };
        assert_eq!(norm(1), norm(2));
        assert_eq!(norm(1), norm(8));
    }

    #[test]
    fn an_empty_gradient_has_norm_zero() {
        assert_eq!(l2_norm(&GradientView::F32(&[])), 0.0);
    }
}
