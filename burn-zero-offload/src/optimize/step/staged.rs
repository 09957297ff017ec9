//! The same in three passes over pieces that stay in the first-level cache: widen to `f32`, update,
//! and back. One loop per rule instead of one per rule and combination.

use half::{bf16, f16};
use pulp::{Simd, WithSimd};

use super::Piece;
use super::kernel::usage;
use super::lanes::{Loop, MASTER};
use crate::optimize::codec::{
    Codes, Column, GROUP, GROUP_ROWS, Half, LANES, MasterMut, MomentMut, Noise, Rows, Scratch,
    Split8, Split16, Use, Values, lane_noise,
};
use crate::optimize::{ImageMut, Rule, SimdLevel, Update};

/// Carries an update out.
pub(super) fn run<R: Rule<N>, const N: usize>(
    simd: SimdLevel,
    scalars: &R::Scalars,
    update: &Update,
    piece: Piece<'_>,
) {
    let mut rest = Some(piece);
    while let Some(piece) = rest.take() {
        let start = piece.start;
        let (piece, after) = match piece.len() > GROUP {
            true => {
                let (piece, after) = piece.split_at(GROUP);
                (piece, Some(after))
            }
            false => (piece, None),
        };
        rest = after;
        let noise = update.noise.from(start);
        group::<R, N>(simd, scalars, update, piece, noise);
    }
}

/// At most [`GROUP`] elements.
fn group<R: Rule<N>, const N: usize>(
    simd: SimdLevel,
    scalars: &R::Scalars,
    update: &Update,
    mut piece: Piece<'_>,
    noise: Noise,
) {
    let len = piece.len();
    let mut gradient = [0.0f32; GROUP];
    let gradient = &mut gradient[..len];
    piece.gradient.widen_into(0..len, gradient);
    gradient
        .iter_mut()
        .for_each(|g| *g = update.scaling.apply(*g));

    let mut master = Stage([0.0; GROUP]);
    let mut state = [const { Stage([0.0; GROUP]) }; N];
    master.fill_master(simd, &mut piece.master, &mut piece.image);
    for (k, (stage, values)) in state.iter_mut().zip(&mut piece.state).enumerate() {
        if R::LOSSY.is_none() && !matches!(values, MomentMut::F32(_)) {
            panic!("the state of this rule does not bear rounding, keep it in f32");
        }
        stage.fill(simd, values, usage::<R, N>(k));
    }

    let mut values = state.iter_mut().zip(&mut piece.state);
    simd.run(Loop::<R, N, _, _, &[f32]> {
        scalars,
        factor: 1.0,
        len,
        noise,
        master: Values(Rows::new(match &mut piece.master {
            MasterMut::F32(own) => own,
            MasterMut::Lower16(_) | MasterMut::Lower8(_) => &mut master.0[..len],
        })),
        state: std::array::from_fn(|_| {
            Values(Rows::new(match values.next() {
                Some((_, MomentMut::F32(own))) => own,
                Some((stage, _)) => &mut stage.0[..len],
                None => &mut [],
            }))
        }),
        gradient,
    });

    master.drain_master(simd, &mut piece.master, &mut piece.image, noise);
    for (k, (stage, values)) in state.iter_mut().zip(&mut piece.state).enumerate() {
        stage.drain(simd, values, noise, usage::<R, N>(k));
    }
}

/// Values of a group in `f32`, if they are not so already.
#[repr(align(64))]
struct Stage([f32; GROUP]);

impl Stage {
    fn fill_master(
        &mut self,
        simd: SimdLevel,
        master: &mut MasterMut<'_>,
        image: &mut ImageMut<'_>,
    ) {
        let len = master.len();
        let out = &mut self.0[..len];
        match (master, image) {
            (MasterMut::F32(_), _) => {}
            (MasterMut::Lower16(lower), ImageMut::Bf16(upper)) => {
                let (upper, lower) = (Rows::new(upper), Rows::new(lower));
                simd.run(Read(Split16 { upper, lower }, out, MASTER));
            }
            (MasterMut::Lower8(lower), ImageMut::Bf16(upper)) => {
                let (upper, lower) = (Rows::new(upper), Rows::new(lower));
                simd.run(Read(Split8 { upper, lower }, out, MASTER));
            }
            _ => panic!("the image of a split master is its upper half, in bf16"),
        }
    }

    /// Writes the master weights back, and their image.
    fn drain_master(
        &mut self,
        simd: SimdLevel,
        master: &mut MasterMut<'_>,
        image: &mut ImageMut<'_>,
        noise: Noise,
    ) {
        let len = master.len();
        let values = &self.0[..len];
        match (master, image) {
            (MasterMut::F32(master), ImageMut::F32(image)) => image.copy_from_slice(master),
            (MasterMut::F32(master), ImageMut::F16(image)) => {
                simd.run(Round::<f16>(master, image));
            }
            (MasterMut::F32(master), ImageMut::Bf16(image)) => {
                simd.run(Round::<bf16>(master, image));
            }
            (MasterMut::Lower16(lower), ImageMut::Bf16(upper)) => {
                let (upper, lower) = (Rows::new(upper), Rows::new(lower));
                simd.run(Write(Split16 { upper, lower }, values, noise, MASTER));
            }
            (MasterMut::Lower8(lower), ImageMut::Bf16(upper)) => {
                let (upper, lower) = (Rows::new(upper), Rows::new(lower));
                simd.run(Write(Split8 { upper, lower }, values, noise, MASTER));
            }
            _ => unreachable!("refused when it was read"),
        }
    }

    fn fill(&mut self, simd: SimdLevel, values: &mut MomentMut<'_>, of: Use) {
        let out = &mut self.0[..values.len()];
        match values {
            MomentMut::F32(_) => {}
            MomentMut::Bf16(values) => simd.run(Read(Values(Rows::new(values)), out, of)),
            MomentMut::Int8 { codes, scales } => {
                let mut scratch = Scratch::new();
                let codes = Codes::new(codes, scales, &mut scratch, of.kind);
                simd.run(Read(codes, out, of));
            }
        }
    }

    fn drain(&mut self, simd: SimdLevel, values: &mut MomentMut<'_>, noise: Noise, of: Use) {
        let from = &self.0[..values.len()];
        match values {
            MomentMut::F32(_) => {}
            MomentMut::Bf16(values) => {
                simd.run(Write(Values(Rows::new(values)), from, noise, of));
            }
            MomentMut::Int8 { codes, scales } => {
                let mut scratch = Scratch::new();
                let codes = Codes::new(codes, scales, &mut scratch, of.kind);
                simd.run(Write(codes, from, noise, of));
            }
        }
    }
}

/// Reads a column of one group.
struct Read<'a, C>(C, &'a mut [f32], Use);

impl<C: Column> WithSimd for Read<'_, C> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Self(mut column, out, of) = self;
        let mut rows = Rows::new(out);
        let (full, rest) = (rows.full_rows(), rows.rest_len());
        column.begin(0);
        for row in 0..full {
            let raw = column.read(row);
            let mut values = [0.0; LANES];
            for (lane, value) in values.iter_mut().enumerate() {
                *value = column.get(&raw, lane, of);
            }
            rows.write(row, values);
        }
        if rest > 0 {
            let raw = column.read_rest();
            let mut values = [0.0; LANES];
            for (lane, value) in values.iter_mut().enumerate() {
                *value = column.get(&raw, lane, of);
            }
            rows.write_rest(values);
        }
    }
}

/// Writes a column of one group.
struct Write<'a, C>(C, &'a [f32], Noise, Use);

impl<C: Column> WithSimd for Write<'_, C> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Self(mut column, values, noise, of) = self;
        let (full, rest) = values.as_chunks::<LANES>();
        column.begin(0);
        for (row, values) in full.iter().enumerate() {
            let first = noise.from(row * LANES).bits();
            let mut raw = column.read(row);
            for (lane, &value) in values.iter().enumerate() {
                column.put(&mut raw, lane, value, lane_noise(first, lane), of);
            }
            column.write(row, raw);
        }
        if !rest.is_empty() {
            let first = noise.from(full.len() * LANES).bits();
            let mut raw = column.read_rest();
            for (lane, &value) in rest.iter().enumerate() {
                column.put(&mut raw, lane, value, lane_noise(first, lane), of);
            }
            column.write_rest(full.len(), raw);
        }
        let rows = values.len().div_ceil(LANES);
        debug_assert!(rows <= GROUP_ROWS);
        column.finish(0, rows, noise, of);
    }
}

/// Rounds master weights for the device.
struct Round<'a, H>(&'a [f32], &'a mut [H]);

impl<H: Half> WithSimd for Round<'_, H> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        for (image, &master) in self.1.iter_mut().zip(self.0) {
            *image = H::round(master);
        }
    }
}
