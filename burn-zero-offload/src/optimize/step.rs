//! One parameter's update: tiles over threads, a vectorised loop within each tile.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::image::Image;
use super::{GradientScaling, GradientView, ImageMut, Rule, SimdLevel, TILE, Update, oracle};

/// The state of one parameter, borrowed for a step. All slices have the same length.
#[derive(Debug)]
pub struct StateMut<'a> {
    /// fp32 master weights.
    pub master: &'a mut [f32],
    /// What the rule keeps for each weight, in the order of [`Rule::STATE`].
    pub state: Vec<&'a mut [f32]>,
}

impl StateMut<'_> {
    /// The same state, borrowed for less long.
    pub fn reborrow(&mut self) -> StateMut<'_> {
        self.slice(0..self.master.len())
    }

    /// The state of the elements in `range`.
    ///
    /// # Panics
    ///
    /// If `range` is out of bounds.
    pub fn slice(&mut self, range: Range<usize>) -> StateMut<'_> {
        let state = self.state.iter_mut();
        StateMut {
            master: &mut self.master[range.clone()],
            state: state.map(|values| &mut values[range.clone()]).collect(),
        }
    }
}

/// How the update of a parameter is carried out; changes speed, never a bit of the result.
#[derive(Clone, Copy, Debug)]
pub struct TileStep {
    /// Instruction set of the inner loop.
    pub simd: SimdLevel,
    /// Elements per tile, [`TILE`] unless a test asks for less. At most [`TILE`].
    pub tile: usize,
}

/// Tiles that one task does one after the other: handing over a task costs as much as part of a tile.
const TILES_PER_TASK: usize = 4;

impl TileStep {
    /// Tiles of the default size on instruction set `simd`.
    pub fn new(simd: SimdLevel) -> Self {
        Self { simd, tile: TILE }
    }

    /// Applies `update` to `state` and writes the device's image of the new master weights.
    /// Runs on the current rayon pool; a single tile runs on the calling thread.
    ///
    /// # Panics
    ///
    /// If the lengths of `gradient`, `state` and `image` differ, or `state` has another number of values
    /// per weight than the rule.
    pub fn update(
        &self,
        update: &Update,
        state: StateMut<'_>,
        gradient: GradientView<'_>,
        image: ImageMut<'_>,
    ) {
        assert!(
            self.tile > 0 && self.tile <= TILE,
            "a tile has 1 to {TILE} elements"
        );
        let Update { begun, scaling } = update;
        begun.apply(*self, *scaling, state, gradient, image);
    }
}

/// An update whose scalars are known, of whatever rule.
pub(super) trait BegunUpdate: Send + Sync {
    fn apply(
        &self,
        step: TileStep,
        scaling: GradientScaling,
        state: StateMut<'_>,
        gradient: GradientView<'_>,
        image: ImageMut<'_>,
    );

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
pub(super) struct Begun<R: Rule<N>, const N: usize>(pub(super) R::Scalars);

impl<R: Rule<N>, const N: usize> BegunUpdate for Begun<R, N> {
    fn apply(
        &self,
        step: TileStep,
        scaling: GradientScaling,
        state: StateMut<'_>,
        gradient: GradientView<'_>,
        image: ImageMut<'_>,
    ) {
        let StateMut { master, state } = state;
        let count = state.len();
        let Ok(state) = <[&mut [f32]; N]>::try_from(state) else {
            panic!("the rule keeps {N} values for each weight, {count} were given")
        };
        let run = Run::<R, N> {
            step,
            scaling,
            scalars: &self.0,
            gradient,
        };
        match image {
            ImageMut::F32(image) => run.all(master, state, image),
            ImageMut::F16(image) => run.all(master, state, image),
            ImageMut::Bf16(image) => run.all(master, state, image),
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
            panic!("the rule keeps {N} values for each weight, {count} were given")
        };
        oracle::elements::<N, R>(&self.0, scaling, master, state, gradient);
    }
}

/// What the tiles of an update share.
struct Run<'a, R: Rule<N>, const N: usize> {
    step: TileStep,
    scaling: GradientScaling,
    scalars: &'a R::Scalars,
    gradient: GradientView<'a>,
}

impl<R: Rule<N>, const N: usize> Run<'_, R, N> {
    fn all<H: Image>(&self, master: &mut [f32], state: [&mut [f32]; N], image: &mut [H]) {
        let len = master.len();
        assert_eq!(
            self.gradient.len(),
            len,
            "gradient and master weights differ in length"
        );
        assert_eq!(
            image.len(),
            len,
            "device image and master weights differ in length"
        );
        for values in &state {
            assert_eq!(
                values.len(),
                len,
                "state and master weights differ in length"
            );
        }
        self.tiles(0, master, state, image);
    }

    /// The elements from `start` on: halves them, at the border of a tile, until they are few.
    fn tiles<H: Image>(
        &self,
        start: usize,
        master: &mut [f32],
        mut state: [&mut [f32]; N],
        image: &mut [H],
    ) {
        let tile = self.step.tile;
        let count = master.len().div_ceil(tile);
        if count > TILES_PER_TASK {
            let middle = count / 2 * tile;
            let (left, right) = master.split_at_mut(middle);
            let (left_image, right_image) = image.split_at_mut(middle);
            let mut halves = state.map(|values| values.split_at_mut(middle));
            let left_state = halves.each_mut().map(|half| std::mem::take(&mut half.0));
            let right_state = halves.map(|half| half.1);
            rayon::join(
                || self.tiles(start, left, left_state, left_image),
                || self.tiles(start + middle, right, right_state, right_image),
            );
            return;
        }
        let tiles = master.chunks_mut(tile).zip(image.chunks_mut(tile));
        for (index, (p, h)) in tiles.enumerate() {
            let from = index * tile;
            let mut buffer = [0.0f32; TILE];
            let g = &mut buffer[..p.len()];
            let at = start + from;
            self.gradient.widen_into(at..at + p.len(), g);
            let (scaling, s) = (self.scaling, self.scalars);
            let state = state
                .each_mut()
                .map(|values| &mut values[from..from + p.len()]);
            self.step.simd.run(Loop::<R, N> {
                p,
                state,
                g,
                scaling,
                s,
            });
            H::round_into(p, h);
        }
    }
}

struct Loop<'a, R: Rule<N>, const N: usize> {
    p: &'a mut [f32],
    state: [&'a mut [f32]; N],
    g: &'a [f32],
    scaling: GradientScaling,
    s: &'a R::Scalars,
}

impl<R: Rule<N>, const N: usize> WithSimd for Loop<'_, R, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Self {
            p,
            state,
            g,
            scaling,
            s,
        } = self;
        let n = p.len();
        let (state, g) = (state.map(|values| &mut values[..n]), &g[..n]);
        for i in 0..n {
            let before = std::array::from_fn(|k| state[k][i]);
            let (weight, after) = R::update(s, p[i], before, scaling.apply(g[i]));
            p[i] = weight;
            for k in 0..N {
                state[k][i] = after[k];
            }
        }
    }
}

#[cfg(test)]
mod tests;
