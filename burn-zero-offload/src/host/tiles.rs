//! Buffers for tiles of weights on their way to the device, pinned where the device can pin.
//!
//! They are allocated once and go round: the CPU step writes one, the uploader lends it to the device,
//! and when the device has read it and drops it, it is back. A driver copies from pinned memory
//! without a detour; other memory CubeCL first copies into a pinned buffer of its own.

use std::sync::{Arc, Weak};

use burn::tensor::{AllocationProperty, Bytes};
use parking_lot::Mutex;

/// Buffers of one size.
#[derive(Debug, Default)]
pub(crate) struct TileRing {
    shelf: Arc<Shelf>,
    /// Bytes of one buffer.
    size: usize,
    count: usize,
    pinned: bool,
}

/// Buffers that nobody uses.
type Shelf = Mutex<Vec<Bytes>>;

/// A buffer that is being written.
pub(crate) struct Tile {
    buffer: Bytes,
    len: usize,
    /// Where it goes when it is done with; nowhere if it belongs to no ring.
    home: Weak<Shelf>,
}

impl TileRing {
    /// A ring of buffers that have equal sizes.
    pub(crate) fn new(buffers: Vec<Bytes>) -> Self {
        Self {
            size: buffers.first().map_or(0, |buffer| buffer.len()),
            count: buffers.len(),
            pinned: !buffers.is_empty() && buffers.iter().all(is_pinned),
            shelf: Arc::new(Mutex::new(buffers)),
        }
    }

    /// Bytes of all buffers, if they are pinned.
    pub(crate) fn pinned_bytes(&self) -> usize {
        if self.pinned {
            self.size * self.count
        } else {
            0
        }
    }

    /// A buffer for `len` bytes: one of the ring if one is free and large enough, other memory if not.
    ///
    /// Never waits. CubeCL gives buffers back late and in batches; a ring that waited for them could
    /// wait for ever.
    pub(crate) fn take(&self, len: usize) -> Tile {
        let free = (len <= self.size).then(|| self.shelf.lock().pop());
        match free.flatten() {
            Some(buffer) => Tile {
                buffer,
                len,
                home: Arc::downgrade(&self.shelf),
            },
            None => Tile {
                // Of this element type for its alignment.
                buffer: Bytes::from_elems(vec![0u128; len.div_ceil(size_of::<u128>())]),
                len,
                home: Weak::new(),
            },
        }
    }
}

impl Tile {
    /// The memory to write; aligned for every element type.
    pub(crate) fn as_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[..self.len]
    }

    /// The tile as CubeCL takes it; the buffer goes home when that drops it.
    pub(crate) fn into_bytes(self) -> Bytes {
        let property = self.buffer.property();
        Bytes::from_shared(bytes::Bytes::from_owner(self), property)
    }
}

impl AsRef<[u8]> for Tile {
    fn as_ref(&self) -> &[u8] {
        &self.buffer[..self.len]
    }
}

impl Drop for Tile {
    fn drop(&mut self) {
        if let Some(shelf) = self.home.upgrade() {
            let nothing = Bytes::from_elems(Vec::<u8>::new());
            shelf
                .lock()
                .push(std::mem::replace(&mut self.buffer, nothing));
        }
    }
}

fn is_pinned(buffer: &Bytes) -> bool {
    buffer.property() == AllocationProperty::Pinned
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(count: usize, size: usize) -> TileRing {
        TileRing::new(
            (0..count)
                .map(|_| Bytes::from_elems(vec![0u8; size]))
                .collect(),
        )
    }

    fn addresses(ring: &TileRing) -> Vec<usize> {
        let shelf = ring.shelf.lock();
        let mut all: Vec<_> = shelf
            .iter()
            .map(|buffer| buffer.as_ptr() as usize)
            .collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn buffers_come_back_when_the_device_drops_them() {
        let ring = ring(2, 64);
        let before = addresses(&ring);
        let mut tile = ring.take(40);
        tile.as_mut().fill(7);
        let sent = tile.into_bytes();
        assert_eq!(&sent[..], [7; 40]);
        assert_eq!(addresses(&ring).len(), 1);
        drop(sent);
        drop(ring.take(64));
        assert_eq!(addresses(&ring), before);
    }

    #[test]
    fn an_empty_ring_hands_out_other_memory_at_once() {
        let ring = ring(2, 64);
        let lent: Vec<_> = (0..5).map(|_| ring.take(64).into_bytes()).collect();
        assert!(lent.iter().all(|tile| tile.len() == 64));
        drop(lent);
        assert_eq!(addresses(&ring).len(), 2);
        assert_eq!(ring.take(65).as_mut().len(), 65);
        assert_eq!(TileRing::default().take(3).as_mut().len(), 3);
    }

    #[test]
    fn a_tile_may_outlive_its_ring() {
        let ring = ring(1, 16);
        let sent = ring.take(16).into_bytes();
        drop(ring);
        assert_eq!(sent.len(), 16);
    }

    /// acceptance.md, memory 65 and 66: the ring is buffers of exactly the size asked for, each an
    /// allocation of its own.
    #[test]
    fn the_ring_reports_what_is_pinned_and_nothing_else() {
        assert_eq!(ring(2, 64).pinned_bytes(), 0);
        let pinned = |_| {
            let memory = bytes::Bytes::from(vec![0u8; 32]);
            Bytes::from_shared(memory, AllocationProperty::Pinned)
        };
        assert_eq!(
            TileRing::new((0..3).map(pinned).collect()).pinned_bytes(),
            96
        );
    }
}
