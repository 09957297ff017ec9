//! How a parameter is cut into pieces of work.

use std::ops::Range;

/// Elements per tile, what updates are cut into for threads. A task gets four: long enough for each
/// stream to be fetched ahead, short enough that threads end together. Loops that make more than one pass
/// do so over 512 elements, which stay in the first-level cache.
pub const TILE: usize = 4096;

/// The tiles of a parameter: consecutive ranges of [`tile`](Self::tile) elements, the last shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TilePlan {
    /// Elements to cover.
    pub len: usize,
    /// Elements per tile.
    pub tile: usize,
}

impl TilePlan {
    /// Plans tiles of `tile` elements over `len` elements.
    ///
    /// # Panics
    ///
    /// If `tile` is zero.
    pub fn new(len: usize, tile: usize) -> Self {
        assert!(tile > 0, "a tile needs at least one element");
        Self { len, tile }
    }

    /// Number of tiles.
    pub fn count(&self) -> usize {
        self.len.div_ceil(self.tile)
    }

    /// The elements of tile `index`.
    pub fn range(&self, index: usize) -> Range<usize> {
        let start = index * self.tile;
        start..(start + self.tile).min(self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// acceptance.md, CPU step 10.
    #[test]
    fn more_elements_than_a_signed_32_bit_count_are_covered_once() {
        let plan = TilePlan::new((1usize << 31) + 5, TILE);
        let mut next = 0usize;
        for index in 0..plan.count() {
            let range = plan.range(index);
            assert_eq!(range.start, next);
            assert!(range.end > range.start);
            next = range.end;
        }
        assert_eq!(next, (1usize << 31) + 5);
        assert_eq!(plan.count(), (1usize << 31) / TILE + 1);
    }

    #[test]
    fn an_empty_parameter_has_no_tile() {
        assert_eq!(TilePlan::new(0, TILE).count(), 0);
    }
}
