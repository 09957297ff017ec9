//! Where gradients are read from.

use half::{bf16, f16};

use super::LANES;
use super::half::Half;
use super::rows::padded;

/// A stream of gradients.
pub(in crate::optimize) trait Source: Copy {
    /// A row as it is in memory.
    type Row: Copy;

    /// A whole row.
    fn read(&self, row: usize) -> Self::Row;

    /// The last row, which is not whole, padded with zeros.
    fn read_rest(&self) -> Self::Row;

    /// One element.
    fn get(row: &Self::Row, lane: usize) -> f32;
}

macro_rules! source {
    ($element:ty, $widen:expr) => {
        impl Source for &[$element] {
            type Row = [$element; LANES];

            #[inline(always)]
            fn read(&self, row: usize) -> Self::Row {
                self.as_chunks().0[row]
            }

            #[inline(always)]
            fn read_rest(&self) -> Self::Row {
                padded(self.as_chunks::<LANES>().1)
            }

            #[inline(always)]
            fn get(row: &Self::Row, lane: usize) -> f32 {
                $widen(row[lane])
            }
        }
    };
}

source!(f32, |g| g);
source!(f16, Half::widen);
source!(bf16, Half::widen);
