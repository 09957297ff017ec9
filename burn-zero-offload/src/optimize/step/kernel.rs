//! One piece of a parameter on one thread: which loop runs.

use super::Piece;
use super::{fused, staged};
use crate::optimize::codec::Use;
use crate::optimize::rule::StateKind;
use crate::optimize::{GradientScaling, Rule, SimdLevel, Update, oracle};

/// An update whose scalars are known, of whatever rule.
pub(in crate::optimize) trait BegunUpdate: Send + Sync {
    /// Carries it out on the calling thread.
    fn run(&self, simd: SimdLevel, update: &Update, piece: Piece<'_>);

    /// The same as the plain loop does it, without an image.
    fn oracle(
        &self,
        scaling: GradientScaling,
        master: &mut [f32],
        state: &mut [Vec<f32>],
        gradient: &[f32],
    );
}

/// The scalars of an update of rule `R`.
pub(in crate::optimize) struct Begun<R: Rule<N>, const N: usize>(
    pub(in crate::optimize) R::Scalars,
);

impl<R: Rule<N>, const N: usize> BegunUpdate for Begun<R, N> {
    fn run(&self, simd: SimdLevel, update: &Update, piece: Piece<'_>) {
        if piece.state.len() != N {
            wrong_state(N, piece.state.len());
        }
        if let Some(piece) = fused::run::<R, N>(simd, &self.0, update, piece) {
            staged::run::<R, N>(simd, &self.0, update, piece);
        }
    }

    fn oracle(
        &self,
        scaling: GradientScaling,
        master: &mut [f32],
        state: &mut [Vec<f32>],
        gradient: &[f32],
    ) {
        let count = state.len();
        let Ok(state) = <&mut [Vec<f32>; N]>::try_from(state) else {
            wrong_state(N, count)
        };
        oracle::elements::<N, R>(&self.0, scaling, master, state, gradient);
    }
}

fn wrong_state(expected: usize, got: usize) -> ! {
    panic!("the rule keeps {expected} values for each weight, {got} were given")
}

/// What value number `index` of rule `R` is used for.
#[inline(always)]
pub(super) fn usage<R: Rule<N>, const N: usize>(index: usize) -> Use {
    let kind = R::LOSSY.map_or(StateKind::Signed, |kinds| kinds[index]);
    Use::of(index, kind)
}
