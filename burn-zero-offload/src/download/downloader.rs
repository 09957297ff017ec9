//! The station's front: where taps hand gradients over, and where a step waits for them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::backend::Flex;
use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use parking_lot::{Mutex, MutexGuard};

use super::budget::{Room, Ticket};
use super::parcel::{Member, Parcel};
use super::reader::{Delivery, DownloadFailure, Progress};
use super::{Budget, Reader};
use crate::boundary::{Boundaries, Boundary};
use crate::capture::DeviceGradient;
use crate::optimize::Precision;
use crate::report::Meter;
use crate::report::trace::{Recorder, Work};

#[cfg(feature = "cubecl-backend")]
use super::outbox::{Outbox, PACK, Ready, SMALL};

/// Bytes of host gradients that are handed to the reader at once.
const FLEX_GROUP: usize = 512 << 10;

/// A gradient as a tap hands it over.
pub(crate) struct Handover {
    /// The parameter's slot.
    pub(crate) slot: usize,
    /// Element type to travel in: that of the parameter.
    pub(crate) precision: Precision,
    #[cfg_attr(not(feature = "cubecl-backend"), allow(dead_code))]
    /// Further uses of the parameter in graphs that are recorded and have not run backward.
    pub(crate) remaining: usize,
    /// The loss scale it carries.
    pub(crate) scale: f32,
    /// The gradient of this use.
    pub(crate) gradient: DeviceGradient,
}

/// Brings gradients to the host. Shared by all threads that run backward.
pub(crate) struct Downloader {
    budget: Arc<Budget>,
    progress: Arc<Progress>,
    desk: Mutex<Desk>,
}

/// What is being collected, and the threads it goes to.
struct Desk {
    readers: Vec<(Source, Reader)>,
    /// Started early, so that a machine without threads to spare says so at `init`.
    spare: Option<Reader>,
    flex: Vec<(Member, FloatTensor<Flex>)>,
    flex_room: Option<Room>,
    #[cfg(feature = "cubecl-backend")]
    outbox: Outbox,
}

/// A device with a reader of its own.
#[derive(Clone, Debug, PartialEq)]
enum Source {
    Flex,
    #[cfg(feature = "cubecl-backend")]
    Cube(burn_cubecl::CubeDevice),
}

impl Downloader {
    /// A downloader that keeps at most `limit` bytes in flight, at least `largest`, and gives what
    /// arrives to `delivery`.
    pub(crate) fn start(
        limit: usize,
        largest: usize,
        delivery: Delivery,
        (meter, trace, boundaries): (Arc<Meter>, Arc<Recorder>, Boundaries),
    ) -> std::io::Result<Self> {
        let progress = Arc::new(Progress::new(delivery, meter, trace, boundaries));
        let spare = Some(Reader::start(progress.clone())?);
        Ok(Self {
            budget: Budget::new(limit, largest),
            progress,
            desk: Mutex::new(Desk {
                readers: Vec::new(),
                spare,
                flex: Vec::new(),
                flex_room: None,
                #[cfg(feature = "cubecl-backend")]
                outbox: Outbox::default(),
            }),
        })
    }

    /// Bytes that may be in flight.
    pub(crate) fn limit(&self) -> usize {
        self.budget.limit()
    }

    /// Takes a gradient over. Blocks the calling thread, which enqueues the rest of backward, while
    /// there is no room for it.
    pub(crate) fn hand_over(&self, handover: Handover) {
        let slot = handover.slot;
        let boundary = Boundary::HandedOver { slot };
        if let Err(reason) = self.progress.boundaries.pass(boundary) {
            return self.progress.fail(slot, reason);
        }
        let mut desk = self.desk.lock();
        let member = |len| Member {
            slot,
            precision: handover.precision,
            len,
            offset: 0,
            scale: handover.scale,
        };
        match handover.gradient {
            DeviceGradient::Flex(gradient) => {
                // The host computes: the gradient is complete now.
                let progress = &self.progress;
                progress.trace.device_until(progress.meter.round(), slot);
                let member = member(gradient.shape().num_elements());
                self.take_flex(&mut desk, member, gradient);
            }
            #[cfg(feature = "cubecl-backend")]
            DeviceGradient::Cube(gradient) => {
                let member = member(gradient.meta.num_elements());
                self.take_cube(&mut desk, member, handover.remaining, *gradient);
            }
        }
    }

    /// Waits until everything handed over is stored, and reports the first failure once.
    pub(crate) fn finish(&self) -> Result<(), DownloadFailure> {
        let mut desk = self.desk.lock();
        self.send_open(&mut desk);
        #[cfg(feature = "cubecl-backend")]
        {
            let sums = desk.outbox.end_sums();
            self.send_cube(&mut desk, sums);
        }
        drop(desk);
        self.progress.finish()
    }

    /// Flex gradients are host memory already: only their number is reduced.
    fn take_flex(
        &self,
        desk: &mut MutexGuard<'_, Desk>,
        member: Member,
        gradient: FloatTensor<Flex>,
    ) {
        let room = self.room(desk, member.bytes());
        match &mut desk.flex_room {
            Some(taken) => taken.absorb(room),
            empty => *empty = Some(room),
        }
        desk.flex.push((member, gradient));
        if desk
            .flex_room
            .as_ref()
            .is_some_and(|room| room.bytes() >= FLEX_GROUP)
        {
            self.send_open(desk);
        }
    }

    #[cfg(feature = "cubecl-backend")]
    fn take_cube(
        &self,
        desk: &mut MutexGuard<'_, Desk>,
        member: Member,
        remaining: usize,
        gradient: burn_cubecl::tensor::CubeTensor,
    ) {
        let bytes = member.bytes();
        if desk.outbox.sums(&member, &gradient) {
            let sum = desk.outbox.add(&member, gradient, remaining == 0);
            return self.send_cube(desk, sum.into_iter().collect());
        }
        // A sum of an earlier pass whose gradients carry another loss scale takes no more terms.
        let other_scale = desk.outbox.end_sum(member.slot);
        self.send_cube(desk, other_scale.into_iter().collect());
        // A sum travels in f32: it pays where that is less than its terms, and only then is the
        // memory it holds until the last of them worth it.
        let sum_bytes = 4 * member.len;
        let pays = sum_bytes < (1 + remaining) * bytes;
        if let Some(room) = pays.then(|| self.budget.hold(sum_bytes)).flatten() {
            self.wait_until(desk, || self.budget.settle().map(|taken| ((), taken)));
            return desk.outbox.begin_sum(member, gradient, room);
        }
        if bytes > SMALL {
            let room = self.room(desk, bytes);
            let parcel = Outbox::alone(member, gradient, room);
            return self.send_cube(desk, vec![parcel]);
        }
        if !desk.outbox.fits(&member, &gradient) {
            let pack = PACK.min(self.budget.limit()).max(bytes);
            let room = self.room(desk, pack);
            let poison = self.progress.boundaries.poisons();
            let outbox = &mut desk.outbox;
            let full = outbox.open_pack(&gradient, member.precision, pack, room, poison);
            self.send_cube(desk, full.into_iter().collect());
        }
        desk.outbox.put(member, gradient);
    }

    /// Takes room for `bytes`, waiting for it if need be.
    ///
    /// What is open, of any thread, is sent before each wait: it would hold its room for ever, as it
    /// waits for more gradients. So whatever stands in the way comes back by itself.
    fn room(&self, desk: &mut MutexGuard<'_, Desk>, bytes: usize) -> Room {
        self.wait_until(desk, || self.budget.try_take(bytes))
    }

    /// Attempts something until the budget allows it; it returns the bytes taken then.
    fn wait_until<T>(
        &self,
        desk: &mut MutexGuard<'_, Desk>,
        attempt: impl Fn() -> Result<(T, usize), Ticket>,
    ) -> T {
        let mut waited = Duration::ZERO;
        loop {
            match attempt() {
                Ok((granted, in_flight)) => {
                    self.progress.meter.in_flight(in_flight, waited);
                    return granted;
                }
                Err(ticket) => {
                    self.send_open(desk);
                    let started = Instant::now();
                    MutexGuard::unlocked(desk, || ticket.wait());
                    waited += started.elapsed();
                    let round = self.progress.meter.round();
                    self.progress
                        .trace
                        .span(Work::WaitBudget, round, None, started);
                }
            }
        }
    }

    /// Sends groups and packs that still have places free.
    fn send_open(&self, desk: &mut Desk) {
        if let Some(room) = desk.flex_room.take() {
            let group = Parcel::Flex(std::mem::take(&mut desk.flex));
            self.send(desk, Source::Flex, group, room);
        }
        #[cfg(feature = "cubecl-backend")]
        {
            let packs = desk.outbox.close_packs();
            self.send_cube(desk, packs);
        }
    }

    #[cfg(feature = "cubecl-backend")]
    fn send_cube(&self, desk: &mut Desk, ready: Vec<Ready>) {
        for (device, parcel, room) in ready {
            self.send(
                desk,
                Source::Cube(device),
                Parcel::Cube(Box::new(parcel)),
                room,
            );
        }
    }

    fn send(&self, desk: &mut Desk, source: Source, parcel: Parcel, room: Room) {
        if !desk.readers.iter().any(|(known, _)| *known == source) {
            let reader = match desk.spare.take() {
                Some(reader) => Ok(reader),
                None => Reader::start(self.progress.clone()),
            };
            match reader {
                Ok(reader) => desk.readers.push((source.clone(), reader)),
                Err(error) => {
                    let slot = parcel.members().first().map_or(0, |member| member.slot);
                    let reason = format!("a thread to read it could not be started: {error}");
                    return self.progress.fail(slot, reason);
                }
            }
        }
        let mut readers = desk.readers.iter();
        if let Some((_, reader)) = readers.find(|(known, _)| *known == source) {
            reader.send(parcel, room);
        }
    }
}

#[cfg(test)]
mod tests;
