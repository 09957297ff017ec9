//! The thread that reads gradients, and the bound on how many wait for it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

/// Work for the reader: bring one gradient to the host and store it.
///
/// An error says what went wrong in the backend's words.
pub(crate) type Job = Box<dyn FnOnce() -> Result<(), String> + Send>;

/// Why a gradient did not arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DownloadFailure {
    /// The parameter's slot.
    pub(crate) slot: usize,
    /// What the backend, or a panic, said.
    pub(crate) reason: String,
}

#[derive(Debug, Default)]
struct Progress {
    /// Handed over, not stored yet.
    pending: usize,
    /// The first failure since the last [`Reader::finish`].
    failure: Option<DownloadFailure>,
}

#[derive(Debug, Default)]
struct Shared {
    progress: Mutex<Progress>,
    done: Condvar,
}

/// A thread that runs download jobs in the order they were handed over.
///
/// One job runs, one waits; a third [`hand_over`](Self::hand_over) blocks. So at most three
/// gradients are alive on the device because of downloads: the one being read, the one waiting and
/// the one whose tap is blocked.
///
/// Dropping the reader lets it finish what was handed over, then joins the thread.
#[derive(Debug)]
pub(crate) struct Reader {
    jobs: Option<SyncSender<(usize, Job)>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Reader {
    /// Starts the thread.
    pub(crate) fn start() -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let (jobs, queue) = sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("offload-download".into())
            .spawn({
                let shared = shared.clone();
                move || run(queue, &shared)
            })?;
        Ok(Self {
            jobs: Some(jobs),
            shared,
            thread: Some(thread),
        })
    }

    /// Queues the download of a gradient of `slot`; blocks while another one waits.
    pub(crate) fn hand_over(&self, slot: usize, job: Job) {
        self.shared.progress.lock().pending += 1;
        let sent = self
            .jobs
            .as_ref()
            .is_some_and(|jobs| jobs.send((slot, job)).is_ok());
        if !sent {
            self.shared.complete(
                slot,
                Err("the thread that reads gradients has ended".into()),
            );
        }
    }

    /// Waits until everything handed over is stored, and reports the first failure once.
    pub(crate) fn finish(&self) -> Result<(), DownloadFailure> {
        let mut progress = self.shared.progress.lock();
        while progress.pending > 0 {
            self.shared.done.wait(&mut progress);
        }
        progress.failure.take().map_or(Ok(()), Err)
    }
}

impl Shared {
    fn complete(&self, slot: usize, result: Result<(), String>) {
        let mut progress = self.progress.lock();
        progress.pending -= 1;
        if let Err(reason) = result {
            progress
                .failure
                .get_or_insert(DownloadFailure { slot, reason });
        }
        drop(progress);
        self.done.notify_all();
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // Jobs run under `catch_unwind`: there is no panic to pass on. They hold nothing that
            // owns a reader, so this is never the reader's own thread.
            let _ = thread.join();
        }
    }
}

fn run(queue: Receiver<(usize, Job)>, shared: &Shared) {
    while let Ok((slot, job)) = queue.recv() {
        let result = catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(|panic| {
            let text = panic
                .downcast_ref::<&str>()
                .map(|text| text.to_string())
                .or_else(|| panic.downcast_ref::<String>().cloned());
            Err(text.unwrap_or_else(|| "a panic without a message".into()))
        });
        shared.complete(slot, result);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn jobs_run_in_order_and_finish_waits_for_all() {
        let reader = Reader::start().unwrap();
        let seen = Arc::new(Mutex::new(vec![]));
        for i in 0..20 {
            let seen = seen.clone();
            reader.hand_over(
                i,
                Box::new(move || {
                    seen.lock().push(i);
                    Ok(())
                }),
            );
        }
        assert_eq!(reader.finish(), Ok(()));
        assert_eq!(*seen.lock(), (0..20).collect::<Vec<_>>());
    }

    /// acceptance.md, concurrency 80.
    #[test]
    fn a_panic_is_reported_once_and_the_thread_lives_on() {
        let reader = Reader::start().unwrap();
        reader.hand_over(3, Box::new(|| panic!("bad cable")));
        reader.hand_over(4, Box::new(|| Ok(())));
        assert_eq!(
            reader.finish(),
            Err(DownloadFailure {
                slot: 3,
                reason: "bad cable".into()
            })
        );
        reader.hand_over(5, Box::new(|| Ok(())));
        assert_eq!(reader.finish(), Ok(()));
    }

    #[test]
    fn at_most_two_jobs_are_taken_before_one_is_done() {
        let reader = Arc::new(Reader::start().unwrap());
        let (release, gate) = std::sync::mpsc::channel::<()>();
        let handed = Arc::new(AtomicUsize::new(0));
        reader.hand_over(
            0,
            Box::new(move || {
                gate.recv().unwrap();
                Ok(())
            }),
        );
        let feeder = std::thread::spawn({
            let (reader, handed) = (reader.clone(), handed.clone());
            move || {
                for i in 1..=3 {
                    reader.hand_over(i, Box::new(|| Ok(())));
                    handed.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
        // One runs, one waits in the channel: the third cannot have been taken, however long we look.
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(handed.load(Ordering::SeqCst) <= 2);
        release.send(()).unwrap();
        feeder.join().unwrap();
        assert_eq!(reader.finish(), Ok(()));
        assert_eq!(handed.load(Ordering::SeqCst), 3);
    }

    #[test]
    fn dropping_the_reader_finishes_what_was_handed_over() {
        let reader = Reader::start().unwrap();
        let done = Arc::new(AtomicUsize::new(0));
        for i in 0..3 {
            let done = done.clone();
            reader.hand_over(
                i,
                Box::new(move || {
                    done.fetch_add(1, Ordering::SeqCst);
                    Ok(())
                }),
            );
        }
        drop(reader);
        assert_eq!(done.load(Ordering::SeqCst), 3);
    }
}
