//! One parameter's update: tiles over threads, a vectorised loop within each tile.

use std::ops::Range;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::image::Image;
use super::oracle::{self, Element};
use super::{GradientView, ImageMut, SimdLevel, StepScalars, TILE};

/// The state of one parameter, borrowed for a step. All slices have the same length.
#[derive(Debug)]
pub struct Moments<'a> {
    /// fp32 master weights.
    pub master: &'a mut [f32],
    /// First moments.
    pub first: &'a mut [f32],
    /// Second moments.
    pub second: &'a mut [f32],
    /// Largest second moments so far, with AMSGrad.
    pub largest: Option<&'a mut [f32]>,
}

impl Moments<'_> {
    /// The state of the elements in `range`.
    ///
    /// # Panics
    ///
    /// If `range` is out of bounds.
    pub fn slice(&mut self, range: Range<usize>) -> Moments<'_> {
        Moments {
            master: &mut self.master[range.clone()],
            first: &mut self.first[range.clone()],
            second: &mut self.second[range.clone()],
            largest: self.largest.as_deref_mut().map(|w| &mut w[range]),
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

impl TileStep {
    /// Tiles of the default size on instruction set `simd`.
    pub fn new(simd: SimdLevel) -> Self {
        Self { simd, tile: TILE }
    }

    /// Applies one Adam update to `state` and writes the device's image of the new master weights.
    /// Runs on the current rayon pool; a single tile runs on the calling thread.
    ///
    /// # Panics
    ///
    /// If the lengths of `gradient`, `state` and `image` differ.
    pub fn update(
        &self,
        state: Moments<'_>,
        gradient: GradientView<'_>,
        scalars: &StepScalars,
        image: ImageMut<'_>,
    ) {
        match image {
            ImageMut::F32(image) => self.run(state, gradient, scalars, image),
            ImageMut::F16(image) => self.run(state, gradient, scalars, image),
            ImageMut::Bf16(image) => self.run(state, gradient, scalars, image),
        }
    }

    fn run<H: Image>(
        &self,
        state: Moments<'_>,
        gradient: GradientView<'_>,
        scalars: &StepScalars,
        image: &mut [H],
    ) {
        let len = state.master.len();
        assert_eq!(
            gradient.len(),
            len,
            "gradient and master weights differ in length"
        );
        assert_eq!(
            image.len(),
            len,
            "device image and master weights differ in length"
        );
        assert!(
            self.tile > 0 && self.tile <= TILE,
            "a tile has 1 to {TILE} elements"
        );
        let Moments {
            master,
            first,
            second,
            largest,
        } = state;
        let tile = self.tile;
        let work = |(index, ((((p, m), v), w), h)): (usize, Streams<'_, H>)| {
            let start = index * tile;
            let mut buffer = [0.0f32; TILE];
            let g = &mut buffer[..p.len()];
            gradient.widen_into(start..start + p.len(), g);
            match w {
                Some(w) => self.simd.run(Loop::<true> {
                    p,
                    m,
                    v,
                    w,
                    g,
                    s: scalars,
                }),
                None => self.simd.run(Loop::<false> {
                    p,
                    m,
                    v,
                    w: &mut [],
                    g,
                    s: scalars,
                }),
            }
            H::round_into(p, h);
        };
        if len <= tile {
            // One tile: handing it to another thread would take longer than it does.
            work((0, ((((master, first), second), largest), image)));
            return;
        }
        let largest: Vec<Option<&mut [f32]>> = match largest {
            Some(w) => w.chunks_mut(tile).map(Some).collect(),
            None => (0..len.div_ceil(tile)).map(|_| None).collect(),
        };
        let tiles = master
            .par_chunks_mut(tile)
            .zip(first.par_chunks_mut(tile))
            .zip(second.par_chunks_mut(tile))
            .zip(largest.into_par_iter())
            .zip(image.par_chunks_mut(tile))
            .enumerate();
        tiles.for_each(work);
    }
}

type Streams<'a, H> = (
    (
        ((&'a mut [f32], &'a mut [f32]), &'a mut [f32]),
        Option<&'a mut [f32]>,
    ),
    &'a mut [H],
);

struct Loop<'a, const AMSGRAD: bool> {
    p: &'a mut [f32],
    m: &'a mut [f32],
    v: &'a mut [f32],
    w: &'a mut [f32],
    g: &'a [f32],
    s: &'a StepScalars,
}

impl<const AMSGRAD: bool> WithSimd for Loop<'_, AMSGRAD> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Self { p, m, v, w, g, s } = self;
        let n = p.len();
        let (m, v, g) = (&mut m[..n], &mut v[..n], &g[..n]);
        let w = if AMSGRAD { &mut w[..n] } else { w };
        for i in 0..n {
            let largest = if AMSGRAD { w[i] } else { 0.0 };
            let e = Element {
                master: p[i],
                first: m[i],
                second: v[i],
                largest,
            };
            let e = oracle::adam::<AMSGRAD>(e, g[i], s);
            (p[i], m[i], v[i]) = (e.master, e.first, e.second);
            if AMSGRAD {
                w[i] = e.largest;
            }
        }
    }
}

#[cfg(test)]
mod tests;
