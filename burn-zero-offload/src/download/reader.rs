//! The thread that reads a device.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::budget::Room;
use super::parcel::{Arrived, Parcel};
use crate::boundary::{Boundaries, Boundary};
use crate::panics;
use crate::report::Meter;
use crate::report::trace::{Recorder, Work};

/// Copies a gradient. An error says what is wrong with it.
type Store = dyn Fn(Arrived<'_>) -> Result<(), String> + Send + Sync;

/// What to do with a gradient that has arrived.
pub(crate) struct Delivery {
    /// Copies it.
    pub(crate) store: Box<Store>,
    /// Works on the copy in this slot, when the memory of the gradient has been given back.
    pub(crate) settle: Box<dyn Fn(usize) + Send + Sync>,
}

/// Why a gradient did not arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DownloadFailure {
    /// The parameter's slot.
    pub(crate) slot: usize,
    /// What the backend, or a panic, said.
    pub(crate) reason: String,
}

/// What the readers of all devices have in common.
pub(super) struct Progress {
    state: Mutex<State>,
    done: Condvar,
    pub(super) delivery: Delivery,
    pub(super) meter: Arc<Meter>,
    pub(super) trace: Arc<Recorder>,
    pub(super) boundaries: Boundaries,
}

#[derive(Debug, Default)]
struct State {
    /// Handed to a reader, not stored yet.
    pending: usize,
    /// The first failure since the last [`Progress::finish`].
    failure: Option<DownloadFailure>,
}

impl Progress {
    pub(super) fn new(
        delivery: Delivery,
        meter: Arc<Meter>,
        trace: Arc<Recorder>,
        boundaries: Boundaries,
    ) -> Self {
        Self {
            state: Mutex::default(),
            done: Condvar::new(),
            delivery,
            meter,
            trace,
            boundaries,
        }
    }

    /// Remembers a failure, unless there is an earlier one.
    pub(super) fn fail(&self, slot: usize, reason: String) {
        let mut state = self.state.lock();
        state
            .failure
            .get_or_insert(DownloadFailure { slot, reason });
    }

    /// Waits until everything sent is stored, and reports the first failure once.
    pub(super) fn finish(&self) -> Result<(), DownloadFailure> {
        let mut state = self.state.lock();
        while state.pending > 0 {
            self.done.wait(&mut state);
        }
        state.failure.take().map_or(Ok(()), Err)
    }

    fn complete(&self) {
        self.state.lock().pending -= 1;
        self.done.notify_all();
    }
}

/// A thread that opens parcels in the order they were sent. It has a CubeCL stream of its own, as every
/// thread has, so its copies run beside the kernels of backward.
///
/// Dropping the reader lets it finish what was sent, then joins the thread.
pub(super) struct Reader {
    parcels: Option<Sender<(Parcel, Room)>>,
    progress: Arc<Progress>,
    thread: Option<JoinHandle<()>>,
}

impl Reader {
    /// Starts the thread.
    pub(super) fn start(progress: Arc<Progress>) -> std::io::Result<Self> {
        let (parcels, queue) = channel();
        let thread = std::thread::Builder::new()
            .name("offload-download".into())
            .spawn({
                let progress = progress.clone();
                move || run(queue, &progress)
            })?;
        Ok(Self {
            parcels: Some(parcels),
            progress,
            thread: Some(thread),
        })
    }

    /// Queues a parcel. The queue is bounded by the budget that `room` was taken from.
    pub(super) fn send(&self, parcel: Parcel, room: Room) {
        self.progress.state.lock().pending += 1;
        let parcels = self.parcels.as_ref();
        let sent = parcels.map(|parcels| parcels.send((parcel, room)));
        if let Some(Err(lost)) = sent {
            let slot = lost.0.0.members().first().map_or(0, |member| member.slot);
            self.progress
                .fail(slot, "the thread that reads gradients has ended".into());
            self.progress.complete();
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        drop(self.parcels.take());
        if let Some(thread) = self.thread.take() {
            // Parcels are opened under `catch_unwind`: there is no panic to pass on. They hold nothing
            // that owns a reader, so this is never the reader's own thread.
            let _ = thread.join();
        }
    }
}

fn run(queue: Receiver<(Parcel, Room)>, progress: &Progress) {
    while let Ok((parcel, room)) = queue.recv() {
        let members = parcel.members();
        let slot = members.first().map_or(0, |member| member.slot);
        let (begun, round) = (Instant::now(), progress.meter.round());
        let on_device = parcel.is_on_a_device();
        let opened = catch_unwind(AssertUnwindSafe(|| {
            progress.boundaries.pass(Boundary::Read { slot })?;
            parcel.open(
                || {
                    if on_device {
                        progress.trace.device_until(round, slot);
                    }
                    progress.boundaries.pass(Boundary::Landed { slot })
                },
                |arrived| (progress.delivery.store)(arrived),
            )
        }));
        // The parcel and its device memory are gone by now; only then may others take its room.
        drop(room);
        progress
            .trace
            .span(Work::Download, round, Some(slot), begun);
        let opened = opened.unwrap_or_else(|panic| Err(panics::message(panic)));
        let settle = || {
            let slots = members.iter().map(|member| member.slot);
            slots.for_each(|slot| (progress.delivery.settle)(slot));
        };
        let settled = opened.and_then(|pinned| {
            let settled = catch_unwind(AssertUnwindSafe(settle));
            settled.map(|()| pinned).map_err(panics::message)
        });
        match settled {
            Ok(pinned) => {
                let bytes = members.iter().map(|member| member.bytes()).sum();
                progress.meter.downloaded(bytes, pinned);
            }
            Err(reason) => progress.fail(slot, reason),
        }
        progress.complete();
    }
}
