//! The upper halves of split master weights: the weights on the device, and what they are uploaded from.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{AllocationProperty, Bytes};
use half::bf16;

use super::memory::Buffer;

/// The upper halves of one parameter, in the pieces that are uploaded.
///
/// A piece is lent to the device without a copy. As long as that has not given it back, the next step writes
/// into new memory instead: whoever holds the old weights keeps their values. On Flex the device is the
/// host, and model and host share one copy.
#[derive(Debug)]
pub(crate) struct Halves {
    pieces: Vec<Piece>,
    /// Bytes that had to be copied because somebody held them.
    copied: usize,
}

#[derive(Debug)]
struct Piece {
    range: Range<usize>,
    memory: Arc<Memory>,
}

#[derive(Debug)]
enum Memory {
    Own(Buffer<bf16>),
    /// Memory of the device's making, pinned; the length in elements.
    Staged(Bytes, usize),
}

/// A piece that the device holds.
struct Lent(Arc<Memory>);

impl Memory {
    fn as_slice(&self) -> &[bf16] {
        match self {
            Self::Own(buffer) => buffer,
            Self::Staged(bytes, len) => &bytemuck::cast_slice(bytes)[..*len],
        }
    }

    fn as_mut_slice(&mut self) -> &mut [bf16] {
        match self {
            Self::Own(buffer) => buffer,
            Self::Staged(bytes, len) => &mut bytemuck::cast_slice_mut(bytes)[..*len],
        }
    }

    fn property(&self) -> AllocationProperty {
        match self {
            Self::Own(_) => AllocationProperty::Native,
            Self::Staged(bytes, _) => bytes.property(),
        }
    }
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(self.0.as_slice())
    }
}

impl Halves {
    /// Zeros in pieces of `ranges`, each in memory that `stage` gives for so many bytes, or in our own.
    pub(crate) fn new(
        ranges: Vec<Range<usize>>,
        mut stage: impl FnMut(usize) -> Option<Bytes>,
    ) -> Self {
        let piece = |range: Range<usize>| {
            let len = range.len();
            let memory = match stage(len * size_of::<bf16>()) {
                Some(bytes) => Memory::Staged(bytes, len),
                None => Memory::Own(Buffer::zeroed(len)),
            };
            Piece {
                range,
                memory: Arc::new(memory),
            }
        };
        Self {
            pieces: ranges.into_iter().map(piece).collect(),
            copied: 0,
        }
    }

    /// The pieces, in order; they cover the parameter once.
    pub(crate) fn ranges(&self) -> Vec<Range<usize>> {
        self.pieces
            .iter()
            .map(|piece| piece.range.clone())
            .collect()
    }

    /// A piece, to be written. Copies it first if somebody still holds it.
    pub(crate) fn piece_mut(&mut self, index: usize) -> &mut [bf16] {
        let memory = &mut self.pieces[index].memory;
        if Arc::get_mut(memory).is_none() {
            let old = memory.as_slice();
            self.copied += size_of_val(old);
            let mut new = Buffer::zeroed(old.len());
            new.copy_from_slice(old);
            *memory = Arc::new(Memory::Own(new));
        }
        Arc::get_mut(memory)
            .expect("memory that was just made has one owner")
            .as_mut_slice()
    }

    /// Bytes copied since the last call.
    pub(crate) fn take_copied(&mut self) -> usize {
        std::mem::take(&mut self.copied)
    }

    /// A piece for the device.
    pub(crate) fn lend(&self, index: usize) -> Bytes {
        let memory = &self.pieces[index].memory;
        let lent = bytes::Bytes::from_owner(Lent(memory.clone()));
        Bytes::from_shared(lent, memory.property())
    }

    /// The pieces one after the other.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = &[bf16]> {
        self.pieces.iter().map(|piece| piece.memory.as_slice())
    }

    /// A copy of `range`.
    pub(crate) fn copy(&self, range: Range<usize>) -> Vec<bf16> {
        let mut out = Vec::with_capacity(range.len());
        for piece in &self.pieces {
            let from = range.start.clamp(piece.range.start, piece.range.end);
            let to = range.end.clamp(piece.range.start, piece.range.end);
            let start = piece.range.start;
            out.extend_from_slice(&piece.memory.as_slice()[from - start..to - start]);
        }
        out
    }

    /// Bytes in all.
    pub(crate) fn bytes(&self) -> usize {
        self.pieces().map(size_of_val).sum()
    }

    /// Bytes of pinned memory.
    pub(crate) fn pinned(&self) -> usize {
        let pinned = |piece: &&Piece| piece.memory.property() == AllocationProperty::Pinned;
        let pinned = self.pieces.iter().filter(pinned);
        pinned
            .map(|piece| size_of_val(piece.memory.as_slice()))
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn halves() -> Halves {
        Halves::new(vec![0..3, 3..5], |bytes| {
            (bytes == 4).then(|| Bytes::from_elems(vec![bf16::ZERO; 2]))
        })
    }

    #[test]
    fn a_piece_is_written_in_place_unless_somebody_holds_it() {
        let mut halves = halves();
        assert_eq!(halves.ranges(), [0..3, 3..5]);
        for index in 0..2 {
            halves.piece_mut(index).fill(bf16::ONE);
            let place = halves.piece_mut(index).as_ptr();
            let lent = halves.lend(index);
            halves.piece_mut(index)[0] = bf16::ZERO;
            assert_ne!(halves.piece_mut(index).as_ptr(), place);
            let seen: &[bf16] = bytemuck::cast_slice(&lent);
            assert_eq!(halves.take_copied(), halves.ranges()[index].len() * 2);
            assert!(seen.iter().all(|&x| x == bf16::ONE));
            assert_eq!(seen.as_ptr(), place, "lent without a copy");
            drop(lent);
            let place = halves.piece_mut(index).as_ptr();
            drop(halves.lend(index));
            assert_eq!(halves.piece_mut(index).as_ptr(), place);
            assert_eq!(halves.take_copied(), 0);
        }
    }

    #[test]
    fn copies_cross_the_borders_of_pieces() {
        let mut halves = halves();
        let mut next = 0;
        for index in 0..2 {
            for value in halves.piece_mut(index) {
                *value = bf16::from_f32(next as f32);
                next += 1;
            }
        }
        let numbers = |range| -> Vec<f32> {
            let copy = halves.copy(range);
            copy.iter().map(|value| value.to_f32()).collect()
        };
        assert_eq!(numbers(0..5), [0.0, 1.0, 2.0, 3.0, 4.0]);
        assert_eq!(numbers(2..4), [2.0, 3.0]);
        assert!(numbers(4..4).is_empty());
        assert_eq!((halves.bytes(), halves.pinned()), (10, 0));
    }
}
