//! The thread that updates parameters behind the training loop, and the waiting for it.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

use super::core::Core;
use super::queue::{Kind, Queue, Until};
use super::work::Job;
use crate::error::OffloadError;
use crate::panics;
use crate::report::WaitedFor;

/// What is to be done, and who waits for it.
pub(super) struct Updates {
    queue: Mutex<Queue<Job>>,
    changed: Condvar,
    /// Whether there is anything in `queue` to look at: most calls of `val` find nothing.
    busy: AtomicUsize,
}

impl Updates {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            queue: Mutex::new(Queue::new(slots)),
            changed: Condvar::new(),
            busy: AtomicUsize::new(0),
        }
    }

    /// Notes what became of the queue and wakes whoever waits.
    fn notify(&self, queue: &Queue<Job>) {
        self.busy
            .store(usize::from(!queue.is_quiet()), Ordering::Release);
        self.changed.notify_all();
    }

    /// Whether there may be something to wait for.
    pub(super) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Acquire) != 0
    }

    /// Queues a piece of work on `slot`.
    pub(super) fn push(&self, slot: usize, rank: u32, kind: Kind, job: Job) {
        let mut queue = self.queue.lock();
        let refused = queue.push(slot, rank, kind, job);
        self.notify(&queue);
        drop(queue);
        // After a failure: whoever waits for its weights is told as it is dropped.
        drop(refused);
    }

    /// What was begun at `slot` is done.
    pub(super) fn done(&self, slot: usize, result: Result<(), OffloadError>) {
        let mut queue = self.queue.lock();
        let dropped = queue.done(slot, result);
        self.notify(&queue);
        drop(queue);
        // Their weights will not come: whoever waits for them is told as they are dropped.
        drop(dropped);
    }

    /// Whether nobody has to wait for `slot`; `Err` if waiting is of no use.
    pub(super) fn reached(&self, slot: usize, until: Until) -> Result<bool, OffloadError> {
        if !self.is_busy() {
            return Ok(true);
        }
        self.queue.lock().reached(slot, until)
    }

    /// Waits until `slot` is as far as `until` says. Work on it comes before other work from here on.
    ///
    /// Returns what kept it at first.
    pub(super) fn wait(&self, slot: usize, until: Until) -> Result<WaitedFor, OffloadError> {
        let mut queue = self.queue.lock();
        let stage = queue.stage(slot);
        while !queue.reached(slot, until)? {
            queue.urge(slot, until);
            self.changed.wait(&mut queue);
        }
        Ok(stage)
    }

    /// All that is left to be done to `slot` is on its way to the device.
    pub(super) fn sending(&self, slot: usize) {
        self.queue.lock().sending(slot);
    }

    /// Waits until nothing is left to be done.
    pub(super) fn wait_for_all(&self) -> Result<(), OffloadError> {
        if !self.is_busy() {
            return Ok(());
        }
        let mut queue = self.queue.lock();
        while queue.outstanding() > 0 {
            self.changed.wait(&mut queue);
        }
        queue.failure().map_or(Ok(()), Err)
    }

    /// Forgets that work on `slot` failed.
    pub(super) fn forgive(&self, slot: usize) {
        let mut queue = self.queue.lock();
        queue.forgive(slot);
        self.notify(&queue);
    }
}

/// Dropping it lets the thread finish what was queued, then joins it.
pub(super) struct Updater {
    updates: Arc<Updates>,
    thread: Option<JoinHandle<()>>,
}

impl Updater {
    /// Starts the thread.
    pub(super) fn start(core: Arc<Core>) -> io::Result<Self> {
        let updates = core.updates.clone();
        let thread = std::thread::Builder::new()
            .name("offload-update".into())
            .spawn(move || run(&core))?;
        Ok(Self {
            updates,
            thread: Some(thread),
        })
    }
}

impl Drop for Updater {
    fn drop(&mut self) {
        {
            let mut queue = self.updates.queue.lock();
            queue.close();
            self.updates.notify(&queue);
        }
        if let Some(thread) = self.thread.take() {
            // Work is done under `catch_unwind`: there is no panic to pass on. It holds nothing that owns an
            // engine, so this is never the thread itself.
            let _ = thread.join();
        }
    }
}

fn run(core: &Core) {
    let updates = &core.updates;
    loop {
        let mut queue = updates.queue.lock();
        let (slot, kind, job) = loop {
            match queue.begin() {
                Some(begun) => break begun,
                None if queue.is_over() => return,
                None => updates.changed.wait(&mut queue),
            }
        };
        drop(queue);
        let worked = catch_unwind(AssertUnwindSafe(|| core.work(slot, kind, job)));
        let failed = match worked {
            // It reports itself.
            Ok(Ok(())) => continue,
            Ok(Err(error)) => error,
            Err(panic) => core.failed(slot, panics::message(panic)),
        };
        updates.done(slot, Err(failed));
    }
}
