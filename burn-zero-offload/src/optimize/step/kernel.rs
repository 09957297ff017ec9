//! The fused loop: gradient, scaling, rule, master weights, state and image in one pass over memory.

use half::{bf16, f16};
use pulp::{Simd, WithSimd};

use super::Piece;
use crate::optimize::codec::{
    BFloat, Codes, Column, GROUP_ROWS, LANES, MasterMut, Mirrored, MomentMut, Noise, Rows, Scratch,
    Single, Source, Split8, Split16, Use, lane_noise,
};
use crate::optimize::rule::StateKind;
use crate::optimize::{
    GradientScaling, GradientView, ImageMut, Rule, SimdLevel, TILE, Update, oracle,
};

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
    fn run(&self, simd: SimdLevel, update: &Update, mut piece: Piece<'_>) {
        let scaling = update.scaling;
        let factor = scaling.factor;
        let call = |factor| Call::<R, N> {
            simd,
            scalars: &self.0,
            factor,
        };
        let noise = |start| update.noise.from(start);
        let fused = matches!(
            (&piece.image, &piece.gradient),
            (_, GradientView::F32(_))
                | (ImageMut::F16(_), GradientView::F16(_))
                | (ImageMut::Bf16(_), GradientView::Bf16(_))
        );
        if fused && scaling.bound == f32::INFINITY {
            let noise = noise(piece.start);
            return call(factor).masters(noise, piece);
        }
        // Rare enough for a detour: gradients clipped by value, or of another type than the weights.
        let mut buffer = [0.0f32; TILE];
        while piece.len() > 0 {
            let at = piece.len().min(TILE);
            let (tile, rest) = piece.split_at(at);
            piece = rest;
            let scaled = &mut buffer[..at];
            tile.gradient.widen_into(0..at, scaled);
            scaled.iter_mut().for_each(|g| *g = scaling.apply(*g));
            let noise = noise(tile.start);
            call(1.0).masters(noise, tile.with_gradient(GradientView::F32(scaled)));
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

/// Finds the loop for the types of a piece.
struct Call<'a, R: Rule<N>, const N: usize> {
    simd: SimdLevel,
    scalars: &'a R::Scalars,
    factor: f32,
}

impl<R: Rule<N>, const N: usize> Call<'_, R, N> {
    fn masters(&self, noise: Noise, piece: Piece<'_>) {
        let (gradient, state) = (piece.gradient, piece.state);
        let len = piece.master.len();
        let stream = Stream { len, noise, state };
        match (piece.master, piece.image) {
            (MasterMut::F32(master), ImageMut::F32(image)) => {
                let (master, image) = (Rows::new(master), Rows::new(image));
                match gradient {
                    GradientView::F32(g) => self.states(Mirrored { master, image }, g, stream),
                    _ => unreachable!("gradients of another type are widened before"),
                }
            }
            (MasterMut::F32(master), ImageMut::F16(image)) => {
                let (master, image) = (Rows::new(master), Rows::<f16>::new(image));
                let master = Mirrored { master, image };
                match gradient {
                    GradientView::F16(g) => self.states(master, g, stream),
                    GradientView::F32(g) => self.states(master, g, stream),
                    GradientView::Bf16(_) => unreachable!("widened before"),
                }
            }
            (MasterMut::F32(master), ImageMut::Bf16(image)) => {
                let (master, image) = (Rows::new(master), Rows::<bf16>::new(image));
                self.bf16(Mirrored { master, image }, gradient, stream);
            }
            (MasterMut::Lower16(lower), ImageMut::Bf16(upper)) => {
                let (upper, lower) = (Rows::new(upper), Rows::new(lower));
                self.bf16(Split16 { upper, lower }, gradient, stream);
            }
            (MasterMut::Lower8(lower), ImageMut::Bf16(upper)) => {
                let (upper, lower) = (Rows::new(upper), Rows::new(lower));
                self.bf16(Split8 { upper, lower }, gradient, stream);
            }
            _ => panic!("the image of a split master is its upper half, in bf16"),
        }
    }

    fn bf16(&self, master: impl Column, gradient: GradientView<'_>, stream: Stream<'_>) {
        match gradient {
            GradientView::Bf16(g) => self.states(master, g, stream),
            GradientView::F32(g) => self.states(master, g, stream),
            GradientView::F16(_) => unreachable!("gradients of another type are widened before"),
        }
    }

    fn states(&self, master: impl Column, gradient: impl Source, stream: Stream<'_>) {
        let Stream { len, noise, state } = stream;
        let kept = state.len();
        let Ok(state) = <[MomentMut<'_>; N]>::try_from(state.into_vec()) else {
            wrong_state(N, kept)
        };
        let all = |wanted: fn(&MomentMut<'_>) -> bool| state.iter().all(wanted);
        let line = Line {
            len,
            noise,
            gradient,
        };
        if all(|values| matches!(values, MomentMut::F32(_))) {
            let columns = state.map(|values| match values {
                MomentMut::F32(values) => Single(Rows::new(values)),
                _ => unreachable!(),
            });
            return self.run(master, columns, line);
        }
        // Known when the program is compiled: rules that do not bear rounding have no loops for it.
        if R::LOSSY.is_none() {
            panic!("the state of this rule does not bear rounding, keep it in f32");
        }
        if all(|values| matches!(values, MomentMut::Bf16(_))) {
            let columns = state.map(|values| match values {
                MomentMut::Bf16(values) => BFloat(Rows::new(values)),
                _ => unreachable!(),
            });
            return self.run(master, columns, line);
        }
        let mut scratch = [const { Scratch::new() }; N];
        let mut free = scratch.iter_mut();
        let mut index = 0;
        let columns = state.map(|values| match (values, free.next()) {
            (MomentMut::Int8 { codes, scales }, Some(scratch)) => {
                index += 1;
                Codes::new(codes, scales, scratch, usage::<R, N>(index - 1).kind)
            }
            _ => panic!("the values that a rule keeps for a weight are all kept alike"),
        });
        self.run(master, columns, line);
    }

    fn run<M: Column, C: Column, G: Source>(&self, master: M, state: [C; N], line: Line<G>) {
        self.simd.run(Loop::<R, N, M, C, G> {
            scalars: self.scalars,
            factor: self.factor,
            master,
            state,
            line,
        });
    }
}

/// What value number `index` of rule `R` is used for.
#[inline(always)]
fn usage<R: Rule<N>, const N: usize>(index: usize) -> Use {
    let kind = R::LOSSY.map_or(StateKind::Signed, |kinds| kinds[index]);
    Use::of(index, kind)
}

/// What does not depend on how master weights are kept.
struct Stream<'a> {
    len: usize,
    noise: Noise,
    state: smallvec::SmallVec<[MomentMut<'a>; 3]>,
}

/// What does not depend on how anything is kept.
struct Line<G> {
    len: usize,
    noise: Noise,
    gradient: G,
}

struct Loop<'a, R: Rule<N>, const N: usize, M, C, G> {
    scalars: &'a R::Scalars,
    factor: f32,
    master: M,
    state: [C; N],
    line: Line<G>,
}

/// Masters use the noise as it is, and have no kind.
const MASTER: Use = Use::of(0, StateKind::Signed);

impl<R, const N: usize, M, C, G> Loop<'_, R, N, M, C, G>
where
    R: Rule<N>,
    M: Column,
    C: Column,
    G: Source,
{
    /// The elements of a row, in registers. The lanes that pad the last row are computed with the rest.
    #[inline(always)]
    fn row(&mut self, first: u32, p: &mut M::Row, s: &mut [C::Row; N], g: &G::Row) {
        for lane in 0..LANES {
            let noise = lane_noise(first, lane);
            let before =
                std::array::from_fn(|k| self.state[k].get(&s[k], lane, usage::<R, N>(k)));
            let weight = self.master.get(p, lane, MASTER);
            let gradient = G::get(g, lane) * self.factor;
            let (weight, after) = R::update(self.scalars, weight, before, gradient);
            self.master.put(p, lane, weight, noise, MASTER);
            for k in 0..N {
                self.state[k].put(&mut s[k], lane, after[k], noise, usage::<R, N>(k));
            }
        }
    }
}

impl<R, const N: usize, M, C, G> WithSimd for Loop<'_, R, N, M, C, G>
where
    R: Rule<N>,
    M: Column,
    C: Column,
    G: Source,
{
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, _simd: S) {
        let (full, rows) = (self.line.len / LANES, self.line.len.div_ceil(LANES));
        for group in 0..rows.div_ceil(GROUP_ROWS) {
            let first = group * GROUP_ROWS;
            let last = rows.min(first + GROUP_ROWS);
            self.master.begin(group);
            for k in 0..N {
                self.state[k].begin(group);
            }
            for row in first..last.min(full) {
                let noise = self.line.noise.from(row * LANES).bits();
                let mut p = self.master.read(row);
                let mut s = std::array::from_fn(|k| self.state[k].read(row));
                let g = self.line.gradient.read(row);
                self.row(noise, &mut p, &mut s, &g);
                self.master.write(row, p);
                for k in 0..N {
                    self.state[k].write(row, s[k]);
                }
            }
            if last > full {
                let noise = self.line.noise.from(full * LANES).bits();
                let mut p = self.master.read_rest();
                let mut s = std::array::from_fn(|k| self.state[k].read_rest());
                let g = self.line.gradient.read_rest();
                self.row(noise, &mut p, &mut s, &g);
                self.master.write_rest(full, p);
                for k in 0..N {
                    self.state[k].write_rest(full, s[k]);
                }
            }
            let noise = self.line.noise.from(first * LANES);
            for k in 0..N {
                self.state[k].finish(group, last - first, noise, usage::<R, N>(k));
            }
        }
    }
}
