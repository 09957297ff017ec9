//! The loop over rows that all ways of running a rule share.

use pulp::{Simd, WithSimd};

use super::kernel::usage;
use crate::optimize::Rule;
use crate::optimize::codec::{Column, GROUP_ROWS, LANES, Noise, Source, Use, lane_noise};
use crate::optimize::rule::StateKind;

/// An update of all elements of some columns.
pub(super) struct Loop<'a, R: Rule<N>, const N: usize, M, C, G> {
    pub(super) scalars: &'a R::Scalars,
    pub(super) factor: f32,
    pub(super) len: usize,
    pub(super) noise: Noise,
    pub(super) master: M,
    pub(super) state: [C; N],
    pub(super) gradient: G,
}

/// Masters use the noise as it is, and have no kind.
pub(super) const MASTER: Use = Use::of(0, StateKind::Signed);

/// The elements of a row, in registers. The lanes that pad the last row are computed with the rest.
#[inline(always)]
fn row<R, const N: usize, M, C, G>(
    (scalars, factor): (&R::Scalars, f32),
    first: u32,
    (master, p): (&mut M, &mut M::Row),
    (state, s): (&mut [C; N], &mut [C::Row; N]),
    g: &G::Row,
) where
    R: Rule<N>,
    M: Column,
    C: Column,
    G: Source,
{
    for lane in 0..LANES {
        let noise = lane_noise(first, lane);
        // Loops rather than `array::from_fn`: those are unrolled early, and the columns stay in registers.
        let mut before = [0.0; N];
        for k in 0..N {
            before[k] = state[k].get(&s[k], lane, usage::<R, N>(k));
        }
        let weight = master.get(p, lane, MASTER);
        let (weight, after) = R::update(scalars, weight, before, G::get(g, lane) * factor);
        master.put(p, lane, weight, noise, MASTER);
        for k in 0..N {
            state[k].put(&mut s[k], lane, after[k], noise, usage::<R, N>(k));
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
    fn with_simd<S: Simd>(self, _simd: S) {
        let Self {
            scalars,
            factor,
            len,
            noise,
            mut master,
            mut state,
            gradient,
        } = self;
        let (full, rows) = (len / LANES, len.div_ceil(LANES));
        for group in 0..rows.div_ceil(GROUP_ROWS) {
            let first = group * GROUP_ROWS;
            let last = rows.min(first + GROUP_ROWS);
            master.begin(group);
            for column in &mut state {
                column.begin(group);
            }
            for at in first..last.min(full) {
                let bits = noise.from(at * LANES).bits();
                let mut p = master.read(at);
                let mut s = [C::Row::default(); N];
                for k in 0..N {
                    s[k] = state[k].read(at);
                }
                let g = gradient.read(at);
                row::<R, N, M, C, G>(
                    (scalars, factor),
                    bits,
                    (&mut master, &mut p),
                    (&mut state, &mut s),
                    &g,
                );
                master.write(at, p);
                for k in 0..N {
                    state[k].write(at, s[k]);
                }
            }
            if last > full {
                let bits = noise.from(full * LANES).bits();
                let mut p = master.read_rest();
                let mut s = [C::Row::default(); N];
                for k in 0..N {
                    s[k] = state[k].read_rest();
                }
                let g = gradient.read_rest();
                row::<R, N, M, C, G>(
                    (scalars, factor),
                    bits,
                    (&mut master, &mut p),
                    (&mut state, &mut s),
                    &g,
                );
                master.write_rest(full, p);
                for k in 0..N {
                    state[k].write_rest(full, s[k]);
                }
            }
            let noise = noise.from(first * LANES);
            for (k, column) in state.iter_mut().enumerate() {
                column.finish(group, last - first, noise, usage::<R, N>(k));
            }
        }
    }
}
