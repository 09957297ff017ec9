//! How updated weights reach the device while the rest of them is computed.
//!
//! # Order
//!
//! New weights go into a buffer of their own. No kernel reads it yet and nobody else holds it, so
//! nothing has to be waited for before writing, and older clones of the model keep their values.
//!
//! Where the step runs behind the model's back ([`Uploader::reserve`]), the model has that buffer at once,
//! full of NaN, and waits for it where it uses the weight.
//!
//! Whoever reads the weights must find all tiles written. A whole tensor is allocated and written in
//! one command, so a reader on any stream waits for both. Tiles are other commands than the allocation,
//! and CubeCL orders streams by allocations alone (`cubecl-server`, `stream/event.rs`): a stream that has
//! met this one after the allocation, because it used another buffer of it meanwhile, would not wait
//! for the tiles. So [`Upload::finish`] returns when the last tile has landed, not merely left, and the
//! last tile is a small one. The commands are enqueued on the stream of the thread that called `step`,
//! whichever thread enqueues them, so its own later work stands behind them in any case. Reserved buffers
//! are written on the stream of the thread that sends, beside what the device computes meanwhile.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::{Bytes, Shape, Tensor};

use super::sender::{Sender, Then};
use super::target::Unwritten;
use super::{Target, UploadOptions};
use crate::boundary::Boundaries;
use crate::host::TileRing;
use crate::optimize::{DeviceImage, ImageMut, Precision};
use crate::report::trace::Recorder;

/// Bytes from which on a whole tensor is worth handing to the device at once.
const FLUSHED: usize = 64 << 10;
/// Buffers of the ring: one is written, one is on its way, two wait to be given back.
const RING: usize = 4;

/// Sends weights to a device. Shared by all parameters.
pub(crate) struct Uploader {
    options: UploadOptions,
    ring: TileRing,
    pinning: String,
    sender: Sender,
}

/// Memory that the model has already, for weights that are still to come.
#[derive(Debug)]
pub(crate) struct Place {
    target: Target,
    shape: Shape,
    precision: Precision,
    memory: Unwritten,
}

impl Uploader {
    /// An uploader for weights that go to `target`: `parameters` are their lengths and types.
    pub(crate) fn start(
        target: &Target,
        options: UploadOptions,
        parameters: impl Iterator<Item = (usize, Precision)>,
        boundaries: &Boundaries,
        trace: Arc<Recorder>,
    ) -> io::Result<Self> {
        let tile = options.tile();
        let tiled = parameters.filter(|(len, _)| *len > tile);
        let widest = tiled.map(|(_, precision)| precision.size()).max();
        let (ring, pinning) = match (target.takes_tiles(), widest) {
            (false, _) => off("the device takes weights whole"),
            (true, None) => {
                off("every parameter fits into one tile, or is sent from its split master")
            }
            (true, Some(size)) => ring(target, tile * size, options.pinned),
        };
        Ok(Self {
            options,
            ring,
            pinning,
            sender: Sender::start(boundaries.clone(), trace)?,
        })
    }

    /// Bytes pinned, and what became of pinning in words.
    pub(crate) fn pinning(&self) -> (usize, &str) {
        (self.ring.pinned_bytes(), &self.pinning)
    }

    /// Begins to send a parameter of `shape` in `precision`, in pieces that begin at multiples of
    /// `granularity`.
    pub(crate) fn begin(
        &self,
        target: Target,
        (slot, round): (usize, u64),
        shape: Shape,
        precision: Precision,
        granularity: usize,
    ) -> Upload<'_> {
        let len = shape.num_elements();
        let pieces = self.options.pieces(&target, len, granularity);
        let begin = || {
            let sender = &self.sender;
            sender.begin(&target, (slot, round), shape.clone(), precision)
        };
        let (way, pieces) = match (pieces.len() > 1).then(begin).flatten() {
            Some(tiles) => (Way::Tiles(Box::new(tiles)), pieces),
            None => {
                let whole = std::iter::once(0..len);
                (Way::Whole(Vec::new()), whole.collect())
            }
        };
        Upload {
            uploader: self,
            pieces,
            target,
            shape,
            precision,
            way,
            waited: Duration::ZERO,
        }
    }

    /// Weights of `shape` in `precision` that the model can have now, and their memory, for
    /// [`fill`](Self::fill).
    pub(crate) fn reserve<const D: usize>(
        &self,
        target: Target,
        shape: Shape,
        precision: Precision,
    ) -> (Tensor<D>, Place) {
        let stream = self.sender.stream();
        let (tensor, memory) = Unwritten::reserve(&target, shape.clone(), precision, stream);
        let place = Place {
            target,
            shape,
            precision,
            memory,
        };
        (tensor, place)
    }

    /// Begins to fill a place, as [`begin`](Self::begin) does with weights of its own. `None` if the thread
    /// that sends has ended.
    pub(crate) fn fill(
        &self,
        place: Place,
        (slot, round): (usize, u64),
        granularity: usize,
    ) -> Option<Upload<'_>> {
        let Place {
            target,
            shape,
            precision,
            memory,
        } = place;
        let len = shape.num_elements();
        let pieces = self.options.pieces(&target, len, granularity);
        let bytes = len * precision.size();
        let tiles = self.sender.fill(memory, bytes, (slot, round))?;
        Some(Upload {
            uploader: self,
            pieces,
            target,
            shape,
            precision,
            way: Way::Tiles(Box::new(tiles)),
            waited: Duration::ZERO,
        })
    }
}

/// A parameter on its way.
pub(crate) struct Upload<'a> {
    uploader: &'a Uploader,
    pieces: Vec<Range<usize>>,
    target: Target,
    shape: Shape,
    precision: Precision,
    way: Way<'a>,
    waited: Duration,
}

enum Way<'a> {
    /// What goes in one piece, in the pieces it comes in.
    Whole(Vec<Bytes>),
    Tiles(Box<super::sender::Tiles<'a>>),
}

/// What an upload took.
pub(crate) struct Sent {
    pub(crate) transfers: u64,
    /// Time that was waited for the device to take tiles.
    pub(crate) waited: Duration,
}

impl Upload<'_> {
    /// The tiles to write, in order; they cover the parameter once.
    pub(crate) fn tiles(&self) -> Vec<Range<usize>> {
        self.pieces.clone()
    }

    /// Sends the elements from `start` on, which are somewhere already.
    pub(crate) fn send(&mut self, start: usize, bytes: Bytes) {
        match &mut self.way {
            Way::Whole(pieces) => pieces.push(bytes),
            Way::Tiles(tiles) => tiles.send(start * self.precision.size(), bytes, true),
        }
    }

    /// Has `write` write a tile, and sends it.
    pub(crate) fn tile(
        &mut self,
        range: Range<usize>,
        poison: impl FnOnce(&mut [u8]),
        write: impl FnOnce(ImageMut<'_>),
    ) {
        match &mut self.way {
            Way::Whole(pieces) => {
                let mut image = DeviceImage::zeroed(self.precision, range.len());
                poison(image.as_bytes_mut());
                write(image.as_mut());
                pieces.push(super::weights::into_bytes(image));
            }
            Way::Tiles(tiles) => {
                let size = self.precision.size();
                let mut tile = self.uploader.ring.take(range.len() * size);
                poison(tile.as_mut());
                write(ImageMut::of_bytes(self.precision, tile.as_mut()));
                let started = Instant::now();
                tiles.send(range.start * size, tile.into_bytes(), false);
                self.waited += started.elapsed();
            }
        }
    }

    /// The weights on the device.
    pub(crate) fn finish<const D: usize>(self) -> Result<(Tensor<D>, Sent), String> {
        let started = Instant::now();
        let (tensor, transfers) = match self.way {
            Way::Whole(pieces) => {
                let bytes = joined(pieces);
                let large = bytes.len() >= FLUSHED;
                let tensor = self.target.send(bytes, self.shape, self.precision);
                if large && self.target.takes_tiles() {
                    self.uploader.sender.flush(&self.target);
                }
                (tensor, 1)
            }
            Way::Tiles(tiles) => tiles.finish()?,
        };
        let waited = self.waited + started.elapsed();
        Ok((tensor, Sent { transfers, waited }))
    }

    /// Time that was waited for the device to take tiles.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }

    /// Has `then` called when the weights are in the place they were sent to.
    pub(crate) fn land(self, then: Box<Then>) {
        match self.way {
            Way::Tiles(tiles) => tiles.land(then),
            Way::Whole(_) => then(Err("weights without a place cannot land there".into())),
        }
    }
}

/// One piece as it is, several after one another.
fn joined(mut pieces: Vec<Bytes>) -> Bytes {
    match pieces.len() {
        1 => pieces.remove(0),
        _ => {
            // Of the element type with the widest alignment: what follows may want it.
            let len: usize = pieces.iter().map(Bytes::len).sum();
            let mut all = vec![0u128; len.div_ceil(size_of::<u128>())];
            let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut all);
            for piece in &pieces {
                let (here, after) = rest.split_at_mut(piece.len());
                here.copy_from_slice(piece);
                rest = after;
            }
            Bytes::from_shared(
                bytes::Bytes::from_owner(Joined(all, len)),
                burn::tensor::AllocationProperty::Native,
            )
        }
    }
}

struct Joined(Vec<u128>, usize);

impl AsRef<[u8]> for Joined {
    fn as_ref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.0)[..self.1]
    }
}

fn off(reason: &str) -> (TileRing, String) {
    (TileRing::default(), format!("not pinned: {reason}"))
}

/// Buffers for tiles of `size` bytes, pinned within the budget.
fn ring(target: &Target, size: usize, budget: Option<usize>) -> (TileRing, String) {
    let count = budget.map_or(RING, |budget| (budget / size).min(RING));
    if count < 2 {
        return off("two tiles do not fit into `OffloadConfig::pinned`");
    }
    let ring = TileRing::new(target.staging(count, size));
    if ring.pinned_bytes() == 0 {
        return off("the device refused, or has no such memory");
    }
    let pinned = format!("{count} pinned buffers of {size} bytes");
    (ring, pinned)
}
