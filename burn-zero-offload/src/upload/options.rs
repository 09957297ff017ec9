//! In which pieces weights are sent.

use std::ops::Range;

use super::Target;
use crate::optimize::TilePlan;

/// Elements per tile unless the user says otherwise: 8 MiB of half weights, long enough for a copy at
/// the full rate of the link.
const TILE: usize = 4 << 20;
/// Most elements of the last tile, whose landing is waited for.
const LAST: usize = 256 << 10;
/// Elements that tiles begin at a multiple of: two halves make the word of 4 bytes in which some devices
/// copy.
const WORD: usize = 2;

/// The choices of the user.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UploadOptions {
    /// Elements per tile.
    pub(crate) tile: Option<usize>,
    /// Bytes that may be pinned.
    pub(crate) pinned: Option<usize>,
}

impl UploadOptions {
    /// Elements per tile. More than there can be means: everything whole.
    pub(super) fn tile(self) -> usize {
        let tile = self.tile.unwrap_or(TILE);
        tile.checked_next_multiple_of(WORD).unwrap_or(usize::MAX)
    }

    /// The same when so many bytes are pinned already.
    pub(crate) fn less_pinned(self, bytes: usize) -> Self {
        Self {
            pinned: self.pinned.map(|most| most.saturating_sub(bytes)),
            ..self
        }
    }

    /// Whether so many bytes may be pinned.
    pub(crate) fn pins(self, bytes: usize) -> bool {
        self.pinned.is_none_or(|most| bytes <= most)
    }

    /// The pieces in which `len` weights go to `target`, in order, each beginning at a multiple of
    /// `granularity`.
    pub(crate) fn pieces(
        self,
        target: &Target,
        len: usize,
        granularity: usize,
    ) -> Vec<Range<usize>> {
        let granularity = granularity.next_multiple_of(WORD);
        let tile = self.tile().checked_next_multiple_of(granularity);
        match tile.filter(|tile| target.takes_tiles() && len > *tile) {
            Some(tile) => tiles(len, tile, granularity),
            None => std::iter::once(0..len).collect(),
        }
    }
}

/// Tiles of `tile` elements; the last is small, as its landing is waited for.
fn tiles(len: usize, tile: usize, granularity: usize) -> Vec<Range<usize>> {
    let plan = TilePlan::new(len, tile);
    let mut tiles: Vec<_> = (0..plan.count()).map(|index| plan.range(index)).collect();
    if let Some(last) = tiles.last_mut()
        && last.len() > LAST
    {
        let end = last.end;
        let split = (end - LAST).next_multiple_of(granularity);
        if split > last.start && split < end {
            last.end = split;
            tiles.push(split..end);
        }
    }
    tiles
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_a_parameter_once_and_end_in_a_small_one() {
        let long = 5 * LAST;
        for (len, tile) in [
            (1, 2),
            (10, 4),
            (LAST + 1, LAST + 2),
            (long, long),
            (long + 1, 2 * LAST),
        ] {
            let tiles = tiles(len, tile, WORD);
            let mut next = 0;
            for tile in &tiles {
                assert_eq!(tile.start, next);
                assert!(tile.start.is_multiple_of(WORD));
                assert!(!tile.is_empty());
                next = tile.end;
            }
            assert_eq!(next, len);
            assert!(tiles.last().unwrap().len() <= LAST);
        }
        assert_eq!(tiles(10, 4, 2), [0..4, 4..8, 8..10]);
        let coarse = tiles(long + 7, long + 512, 512);
        assert!(coarse.iter().all(|tile| tile.start.is_multiple_of(512)));
        assert_eq!(coarse.len(), 2);
    }
}
