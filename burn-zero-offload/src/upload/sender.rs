//! The thread that hands tiles to the device, so that the CPU step need not wait while CubeCL takes
//! them over.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use burn::tensor::{Bytes, Shape, Tensor};
use parking_lot::{Condvar, Mutex};

use super::Target;
use super::target::Unwritten;
use crate::boundary::{Boundaries, Boundary};
use crate::optimize::Precision;
use crate::panics;

/// Tiles that may wait for the thread. Bounds the memory of tiles that found the ring empty.
const QUEUE: usize = 1;

/// Dropping it lets the thread finish what it was given, then joins it.
pub(super) struct Sender {
    jobs: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
}

enum Job {
    Tile(Box<TileJob>),
    /// Makes sure that what was enqueued for a device reaches it now.
    Flush(Target),
}

struct TileJob {
    slot: usize,
    index: usize,
    to: Unwritten,
    offset: usize,
    tile: Bytes,
    progress: Arc<Progress>,
}

/// How far a parameter is.
#[derive(Default)]
struct Progress {
    state: Mutex<State>,
    done: Condvar,
}

#[derive(Default)]
struct State {
    pending: usize,
    failure: Option<String>,
}

impl Progress {
    fn complete(&self, result: Result<(), String>) {
        let mut state = self.state.lock();
        state.pending -= 1;
        if let Err(reason) = result {
            state.failure.get_or_insert(reason);
        }
        drop(state);
        self.done.notify_all();
    }
}

impl Sender {
    /// Starts the thread.
    pub(super) fn start(boundaries: Boundaries) -> io::Result<Self> {
        let (jobs, queue) = sync_channel(QUEUE);
        let thread = std::thread::Builder::new()
            .name("offload-upload".into())
            .spawn(move || run(queue, &boundaries))?;
        Ok(Self {
            jobs: Some(jobs),
            thread: Some(thread),
        })
    }

    /// Begins a parameter; `None` if it has to go whole.
    pub(super) fn begin(
        &self,
        target: &Target,
        slot: usize,
        shape: Shape,
        precision: Precision,
    ) -> Option<Tiles<'_>> {
        Some(Tiles {
            jobs: self.jobs.as_ref()?,
            slot,
            to: Unwritten::new(target, shape, precision)?,
            sent: 0,
            progress: Arc::default(),
        })
    }

    /// Has what was enqueued for `target` handed to the device. CubeCL collects commands and hands them
    /// over in groups; without this, whole tensors would wait until the step is over.
    pub(super) fn flush(&self, target: &Target) {
        if let Some(jobs) = &self.jobs {
            // If the queue is full, a job that is still to run flushes as well.
            let _ = jobs.try_send(Job::Flush(target.clone()));
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // Jobs run under `catch_unwind`: there is no panic to pass on.
            let _ = thread.join();
        }
    }
}

/// A parameter that is being sent.
pub(super) struct Tiles<'a> {
    jobs: &'a SyncSender<Job>,
    slot: usize,
    to: Unwritten,
    sent: usize,
    progress: Arc<Progress>,
}

impl Tiles<'_> {
    /// Sends a tile to the byte `offset` of the parameter. Blocks while the thread is behind.
    pub(super) fn send(&mut self, offset: usize, tile: Bytes) {
        self.progress.state.lock().pending += 1;
        let job = TileJob {
            slot: self.slot,
            index: self.sent,
            to: self.to.clone(),
            offset,
            tile,
            progress: self.progress.clone(),
        };
        self.sent += 1;
        if self.jobs.send(Job::Tile(Box::new(job))).is_err() {
            let reason = "the thread that sends weights has ended".into();
            self.progress.complete(Err(reason));
        }
    }

    /// Waits until all tiles have landed.
    pub(super) fn finish<const D: usize>(self) -> Result<(Tensor<D>, u64), String> {
        let mut state = self.progress.state.lock();
        while state.pending > 0 {
            self.progress.done.wait(&mut state);
        }
        if let Some(reason) = state.failure.take() {
            return Err(reason);
        }
        drop(state);
        self.to.landed()?;
        Ok((self.to.into_tensor(), self.sent as u64))
    }
}

fn run(queue: Receiver<Job>, boundaries: &Boundaries) {
    while let Ok(job) = queue.recv() {
        match job {
            Job::Tile(job) => send(*job, boundaries),
            // What could go wrong here is noticed by whoever reads the weights.
            Job::Flush(target) => drop(catch_unwind(AssertUnwindSafe(|| target.flush()))),
        }
    }
}

fn send(job: TileJob, boundaries: &Boundaries) {
    let TileJob {
        slot,
        index,
        to,
        offset,
        tile,
        progress,
    } = job;
    let sent = catch_unwind(AssertUnwindSafe(move || {
        boundaries.pass(Boundary::Sent { slot, tile: index })?;
        to.write(offset, tile)
    }));
    progress.complete(sent.unwrap_or_else(|panic| Err(panics::message(panic))));
}
