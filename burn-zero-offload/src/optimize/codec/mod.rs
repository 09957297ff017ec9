//! How master weights and state are kept in memory, and how the step reads and writes them.
//!
//! Each way of keeping them is a [`Column`]: a stream of memory that the step walks in *rows* of 16
//! elements. A row is copied to registers, decoded, updated, encoded and copied back, in one straight
//! piece of code per rule, so nothing is read or written twice and the compiler needs no proof that
//! streams do not overlap. Formulas are functions of one element; everything else is bookkeeping.
//!
//! The slow twins, one element after the other, are in [`planes`].

mod half;
mod int8;
mod master;
mod moments;
mod noise;
mod planes;
mod rows;
mod source;

use super::rule::StateKind;

pub(super) use half::Half;
pub(super) use int8::{Codes, GROUP_ROWS, Scratch};
pub(crate) use int8::{GROUP, decode_slice, scales_for};
pub(super) use master::{Mirrored, Split8, Split16};
pub(crate) use master::{join8_slice, join16_slice};
pub(super) use moments::Values;
pub use noise::Noise;
pub(super) use noise::lane_noise;
pub use planes::{MasterMut, MomentMut};
pub(super) use rows::{LANES, Rows};
pub(super) use source::Source;

/// What a column is used for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Use {
    /// What its values may be.
    pub(crate) kind: StateKind,
    /// How far the bits of the noise are turned, so that columns use different ones.
    pub(super) turn: u32,
}

impl Use {
    /// The use of value number `index` of those a rule keeps. Columns take up to 16 of the low bits; masters
    /// of 24 bits, which are kept with 8-bit state only, take the upper 8.
    #[inline(always)]
    pub(crate) const fn of(index: usize, kind: StateKind) -> Self {
        const TURNS: [u32; 3] = [0, 16, 8];
        Self {
            kind,
            turn: TURNS[index % 3],
        }
    }

    /// The bits for this column.
    #[inline(always)]
    pub(super) fn bits(self, noise: u32) -> u32 {
        noise.rotate_right(self.turn)
    }
}

/// A stream of memory that holds one value for each weight.
pub(super) trait Column: Sized {
    /// A row as it is in memory.
    type Row: Copy + Default;

    /// Begins group number `group`: [`GROUP`](int8::GROUP) elements whose values may share something.
    #[inline(always)]
    fn begin(&mut self, _group: usize) {}

    /// A whole row.
    fn read(&self, row: usize) -> Self::Row;

    /// The last row, which is not whole, padded with zeros.
    fn read_rest(&mut self) -> Self::Row;

    /// Writes a whole row.
    fn write(&mut self, row: usize, values: Self::Row);

    /// Writes the last row as far as it goes; what became of the padding counts for nothing.
    fn write_rest(&mut self, row: usize, values: Self::Row);

    /// The value of one element.
    fn get(&self, row: &Self::Row, lane: usize, of: Use) -> f32;

    /// Replaces the value of one element. `noise` is uniform.
    fn put(&mut self, row: &mut Self::Row, lane: usize, value: f32, noise: u32, of: Use);

    /// Ends the group, of which `rows` rows were written; the last may be the rest. `noise` is that of its
    /// first element.
    #[inline(always)]
    fn finish(&mut self, _group: usize, _rows: usize, _noise: Noise, _use: Use) {}
}
