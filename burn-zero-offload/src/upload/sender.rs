//! The thread that hands tiles to the device, so that the CPU step need not wait while CubeCL takes
//! them over, and so that weights of one parameter are on their way while the next one is computed.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use burn::tensor::{Bytes, Shape, StreamId, Tensor};
use parking_lot::{Condvar, Mutex};

use super::Target;
use super::target::Unwritten;
use crate::boundary::{Boundaries, Boundary};
use crate::optimize::Precision;
use crate::panics;
use crate::report::trace::{Recorder, Work};

/// Tiles with memory of their own that may wait for the thread or be on their way: bounds the memory of tiles
/// that found the ring empty.
const TILES: usize = 2;
/// Small parameters whose last tile has left and whose landing is waited for together: so many, or so many bytes.
const LANDINGS: usize = 32;
const LANDING_BYTES: usize = 64 << 10;
/// Bytes up to which weights on the host are handed over by the thread that computed them.
const HERE: usize = 64 << 10;

/// Dropping it lets the thread finish what it was given, then joins it.
pub(super) struct Sender {
    jobs: Option<mpsc::Sender<Job>>,
    tiles: Arc<Room>,
    thread: Option<JoinHandle<()>>,
    /// The CubeCL stream of the thread.
    stream: StreamId,
    boundaries: Boundaries,
    trace: Arc<Recorder>,
}

enum Job {
    Tile(Box<TileJob>),
    /// Reports when all tiles of a parameter have landed.
    Land(Box<Landing>),
    /// Makes sure that what was enqueued for a device reaches it now.
    Flush(Target),
}

/// A parameter that has been sent by somebody who does not wait for it.
struct Landing {
    to: Unwritten,
    sent: u64,
    bytes: usize,
    progress: Arc<Progress>,
    then: Box<Then>,
}

/// What happens when a parameter has landed, in so many transfers, or could not.
pub(crate) type Then = dyn FnOnce(Result<u64, String>) + Send;

struct TileJob {
    slot: usize,
    round: u64,
    index: usize,
    to: Unwritten,
    offset: usize,
    tile: Bytes,
    progress: Arc<Progress>,
    /// Given back when the tile has been sent.
    room: Option<Taken>,
}

/// Counts tiles with memory of their own.
#[derive(Default)]
struct Room {
    taken: Mutex<usize>,
    freed: Condvar,
}

struct Taken(Arc<Room>);

impl Room {
    fn take(room: &Arc<Self>) -> Taken {
        let mut taken = room.taken.lock();
        while *taken >= TILES {
            room.freed.wait(&mut taken);
        }
        *taken += 1;
        Taken(room.clone())
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        *self.0.taken.lock() -= 1;
        self.0.freed.notify_all();
    }
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
    pub(super) fn start(boundaries: Boundaries, trace: Arc<Recorder>) -> io::Result<Self> {
        let (jobs, queue) = channel();
        let (tell, told) = channel();
        let thread = std::thread::Builder::new()
            .name("offload-upload".into())
            .spawn({
                let (boundaries, trace) = (boundaries.clone(), trace.clone());
                move || {
                    let _ = tell.send(StreamId::current());
                    run(queue, &boundaries, &trace);
                }
            })?;
        Ok(Self {
            jobs: Some(jobs),
            tiles: Arc::default(),
            thread: Some(thread),
            stream: told.recv().map_err(io::Error::other)?,
            boundaries,
            trace,
        })
    }

    /// The CubeCL stream that what is sent from here need not share with anything else.
    pub(super) fn stream(&self) -> StreamId {
        self.stream
    }

    /// Begins a parameter; `None` if it has to go whole.
    pub(super) fn begin(
        &self,
        target: &Target,
        (slot, round): (usize, u64),
        shape: Shape,
        precision: Precision,
    ) -> Option<Tiles<'_>> {
        let to = Unwritten::new(target, shape, precision)?;
        self.fill(to, usize::MAX, (slot, round))
    }

    /// Begins a parameter of `bytes` whose memory is there.
    pub(super) fn fill(
        &self,
        to: Unwritten,
        bytes: usize,
        (slot, round): (usize, u64),
    ) -> Option<Tiles<'_>> {
        // Nothing is sent then, and what is small is not worth another thread.
        let here = to.is_on_the_host() && bytes <= HERE;
        Some(Tiles {
            sender: self,
            jobs: self.jobs.as_ref()?,
            here,
            slot,
            round,
            to,
            sent: 0,
            bytes: 0,
            progress: Arc::default(),
        })
    }

    /// Has what was enqueued for `target` handed to the device. CubeCL collects commands and hands them
    /// over in groups; without this, whole tensors would wait until the step is over.
    pub(super) fn flush(&self, target: &Target) {
        if let Some(jobs) = &self.jobs {
            let _ = jobs.send(Job::Flush(target.clone()));
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
    sender: &'a Sender,
    jobs: &'a mpsc::Sender<Job>,
    /// The calling thread does it.
    here: bool,
    slot: usize,
    round: u64,
    to: Unwritten,
    sent: usize,
    bytes: usize,
    progress: Arc<Progress>,
}

impl Tiles<'_> {
    /// Sends a tile to the byte `offset` of the parameter. Unless its memory is only `lent`, blocks while the
    /// thread is behind.
    pub(super) fn send(&mut self, offset: usize, tile: Bytes, lent: bool) {
        self.progress.state.lock().pending += 1;
        self.bytes += tile.len();
        let room = (!lent && !self.here).then(|| Room::take(&self.sender.tiles));
        let job = TileJob {
            room,
            slot: self.slot,
            round: self.round,
            index: self.sent,
            to: self.to.clone(),
            offset,
            tile,
            progress: self.progress.clone(),
        };
        self.sent += 1;
        if self.here {
            return send(job, &self.sender.boundaries, &self.sender.trace);
        }
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
        let tensor = self.to.into_tensor();
        let tensor = tensor.ok_or("weights that were promised have no tensor of their own")?;
        Ok((tensor, self.sent as u64))
    }

    /// Calls `then` on the thread when all tiles have landed.
    pub(super) fn land(self, then: Box<Then>) {
        let landing = Landing {
            to: self.to,
            sent: self.sent as u64,
            bytes: self.bytes,
            progress: self.progress,
            then,
        };
        if self.here {
            let result = landing.failure().map_or(Ok(()), Err);
            return landing.end(result);
        }
        if let Err(lost) = self.jobs.send(Job::Land(Box::new(landing)))
            && let Job::Land(landing) = lost.0
        {
            landing.end(Err("the thread that sends weights has ended".into()));
        }
    }
}

impl Landing {
    /// Whether a tile could not be sent.
    fn failure(&self) -> Option<String> {
        self.progress.state.lock().failure.clone()
    }

    fn end(self, result: Result<(), String>) {
        let Self { to, sent, then, .. } = self;
        if let Err(reason) = &result {
            to.fail(reason);
        }
        // Whoever goes on from here may want the memory for itself.
        drop(to);
        then(result.map(|()| sent));
    }
}

fn run(queue: Receiver<Job>, boundaries: &Boundaries, trace: &Recorder) {
    let mut landings = Vec::new();
    loop {
        let bytes: usize = landings.iter().map(|landing: &Landing| landing.bytes).sum();
        let next = match landings.len() {
            0 => queue.recv().map_err(|_| TryRecvError::Disconnected),
            LANDINGS.. => Err(TryRecvError::Empty),
            _ if bytes >= LANDING_BYTES => Err(TryRecvError::Empty),
            _ => queue.try_recv(),
        };
        match next {
            Ok(Job::Tile(job)) => send(*job, boundaries, trace),
            Ok(Job::Land(landing)) => landings.push(*landing),
            // What could go wrong here is noticed by whoever reads the weights.
            Ok(Job::Flush(target)) => {
                drop(catch_unwind(AssertUnwindSafe(|| target.flush())));
            }
            Err(TryRecvError::Empty) => land(&mut landings),
            Err(TryRecvError::Disconnected) => {
                land(&mut landings);
                return;
            }
        }
    }
}

/// Waits until what was sent is there: once for all, as a stream is done in its order.
fn land(landings: &mut Vec<Landing>) {
    let Some(last) = landings.last() else {
        return;
    };
    let landed = catch_unwind(AssertUnwindSafe(|| last.to.landed()));
    let landed = landed.unwrap_or_else(|panic| Err(panics::message(panic)));
    for landing in landings.drain(..) {
        let result = landing.failure().map_or(landed.clone(), Err);
        // Others still have to be told, whatever happens to this one.
        drop(catch_unwind(AssertUnwindSafe(|| landing.end(result))));
    }
}

fn send(job: TileJob, boundaries: &Boundaries, trace: &Recorder) {
    let begun = Instant::now();
    let TileJob {
        slot,
        round,
        index,
        to,
        offset,
        tile,
        progress,
        room,
    } = job;
    let sent = catch_unwind(AssertUnwindSafe(move || {
        boundaries.pass(Boundary::Sent { slot, tile: index })?;
        to.write(offset, tile)
    }));
    trace.span(Work::Upload, round, Some(slot), begun);
    drop(room);
    progress.complete(sent.unwrap_or_else(|panic| Err(panics::message(panic))));
}
