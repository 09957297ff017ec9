//! Sums of squares of gradients, the same bits for every thread count and instruction set.

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::{GradientScaling, GradientView, SimdLevel, TILE, TilePlan};

/// The sum of the squares of a gradient's elements after `scaling`: on the threads of `pool` if that is
/// given and there is enough to do, else on the calling thread.
///
/// Squares are taken and summed in `f64`: exact squares, and no overflow for any `f32`. Each tile is
/// summed in fixed lanes, and the tiles in order, so the result does not depend on who did what. It is
/// finite if and only if every element is.
pub(crate) fn sum_of_squares(
    gradient: &GradientView<'_>,
    scaling: GradientScaling,
    simd: SimdLevel,
    pool: Option<&rayon::ThreadPool>,
) -> f64 {
    let plan = TilePlan::new(gradient.len(), TILE);
    let tile = |index: usize| {
        let range = plan.range(index);
        let mut buffer = [0.0f32; TILE];
        let g = &mut buffer[..range.len()];
        gradient.widen_into(range, g);
        simd.run(Squares { g, scaling })
    };
    let tiles: Vec<f64> = match pool {
        Some(pool) if plan.count() >= WORTH_THREADS => {
            pool.install(|| (0..plan.count()).into_par_iter().map(tile).collect())
        }
        _ => (0..plan.count()).map(tile).collect(),
    };
    tiles.iter().sum()
}

/// Tiles from which on it pays to call other threads.
const WORTH_THREADS: usize = 32;

/// Partial sums per tile: as many as the widest vectors of `f64` need to be busy.
const LANES: usize = 32;

struct Squares<'a> {
    g: &'a [f32],
    scaling: GradientScaling,
}

impl WithSimd for Squares<'_> {
    type Output = f64;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) -> f64 {
        let Self { g, scaling } = self;
        let mut lanes = [0.0f64; LANES];
        let square = |g: f32| {
            let g = scaling.apply(g) as f64;
            g * g
        };
        let (chunks, rest) = g.as_chunks::<LANES>();
        for chunk in chunks {
            for (lane, &g) in lanes.iter_mut().zip(chunk) {
                *lane += square(g);
            }
        }
        for (lane, &g) in lanes.iter_mut().zip(rest) {
            *lane += square(g);
        }
        lanes.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    fn norm(gradient: GradientView<'_>) -> f64 {
        sum_of_squares(&gradient, GradientScaling::NONE, SimdLevel::best(), None).sqrt()
    }

    /// acceptance.md, norm and clipping: f16 `[3072, 4096]` and `[300.0]` overflow when squared in f16.
    #[test]
    fn squares_beyond_the_gradients_own_range_do_not_overflow() {
        let g = [f16::from_f32(3072.0), f16::from_f32(4096.0)];
        assert_eq!(norm(GradientView::F16(&g)), 5120.0);
        assert_eq!(norm(GradientView::F16(&[f16::from_f32(300.0)])), 300.0);
        assert_eq!(norm(GradientView::F32(&[3e38, 0.0])), 3e38f32 as f64);
    }

    #[test]
    fn the_sum_does_not_depend_on_threads_or_instructions() {
        let g: Vec<f32> = (0..WORTH_THREADS * TILE + 3)
            .map(|i| (i as f32 * 0.37).sin())
            .collect();
        let sum = |pool: Option<&rayon::ThreadPool>, simd| {
            let view = GradientView::F32(&g);
            sum_of_squares(&view, GradientScaling::NONE, simd, pool).to_bits()
        };
        let expected = sum(None, SimdLevel::Scalar);
        for simd in SimdLevel::ALL.into_iter().filter(|s| s.is_available()) {
            assert_eq!(sum(None, simd), expected, "{simd:?}");
            for threads in [1, 2, 8] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                let pool = pool.build().unwrap();
                assert_eq!(sum(Some(&pool), simd), expected, "{threads}, {simd:?}");
            }
        }
    }

    #[test]
    fn the_sum_is_finite_if_and_only_if_all_elements_are() {
        for len in [1, 31, 32, 33, TILE + 5] {
            for at in [0, len / 2, len - 1] {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut g = vec![f32::MAX; len];
                    assert!(norm(GradientView::F32(&g)).is_finite());
                    g[at] = bad;
                    assert!(!norm(GradientView::F32(&g)).is_finite(), "{bad} at {at}");
                }
            }
        }
    }

    #[test]
    fn scaling_comes_first() {
        let scaling = GradientScaling {
            factor: 0.5,
            bound: 2.0,
        };
        let g = GradientView::F32(&[2.0, -8.0]);
        assert_eq!(sum_of_squares(&g, scaling, SimdLevel::best(), None), 5.0);
    }

    #[test]
    fn an_empty_gradient_has_norm_zero() {
        assert_eq!(norm(GradientView::F32(&[])), 0.0);
    }
}
