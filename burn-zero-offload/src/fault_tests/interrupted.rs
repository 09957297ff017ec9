//! Updates behind the training loop that fail, and engines that end in the middle of them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::module::Module;

use super::events::Events;
use super::fixture::*;
use crate::boundary::{Boundary, Hook};
use crate::{OffloadConfig, OffloadError, Schedule, panics};

fn with(schedule: Schedule) -> OffloadConfig {
    config().with_schedule(schedule)
}

const BEHIND: [Schedule; 2] = [Schedule::ForwardOverlapped, Schedule::Delayed { warmup: 1 }];

type Place = fn(Boundary) -> bool;

/// Fails once armed, at the places that `at` names.
fn faulty(panic: bool, at: Place) -> (Arc<Hook>, Arc<AtomicBool>) {
    let armed = Arc::new(AtomicBool::new(false));
    let hook: Arc<Hook> = Arc::new({
        let armed = armed.clone();
        move |boundary| match armed.load(Ordering::SeqCst) && at(boundary) {
            false => Ok(()),
            true if panic => panic!("the machine is on fire"),
            true => Err("the machine is on fire".into()),
        }
    });
    (hook, armed)
}

/// Waits for the updates so far. Unlike a flush, a record leaves a delayed update to the next step.
fn settled(net: &Net) {
    drop(net.clone().into_record());
}

#[track_caller]
fn assert_refused<R>(what: impl FnOnce() -> R) {
    let refused = catch_unwind(AssertUnwindSafe(what));
    let message = panics::message(refused.err().expect("it is refused"));
    assert!(message.contains("on fire"), "{message}");
}

/// acceptance.md, concurrency 80, for the threads behind the training loop: one clear error wherever somebody
/// meets the parameter, nothing hangs, and older clones and records go on.
#[test]
fn a_failed_update_is_told_to_whoever_meets_it() {
    let places: [(bool, Place); 3] = [
        (true, |b| matches!(b, Boundary::Stepped { slot: 0, .. })),
        (true, |b| matches!(b, Boundary::Sent { slot: 0, .. })),
        (false, |b| matches!(b, Boundary::Sent { slot: 0, .. })),
    ];
    for device in devices() {
        let cases = BEHIND
            .into_iter()
            .flat_map(|schedule| places.map(|place| (schedule, place)));
        for (schedule, (panic, place)) in cases {
            let (hook, armed) = faulty(panic, place);
            let (mut net, offload, mut optimizer) = offloaded(&device, with(schedule), Some(hook));
            let start = net.clone();
            for round in 0..2 {
                let grads = backward(&net, round);
                net = optimizer.step(1e-2, net, grads);
            }
            settled(&net);
            let (older, before) = (net.clone(), net.bits());
            armed.store(true, Ordering::SeqCst);
            let grads = backward(&net, 2);
            net = optimizer.step(1e-2, net, grads);
            let error = offload.flush().expect_err("an update fails");
            armed.store(false, Ordering::SeqCst);
            let told = matches!(
                &error,
                OffloadError::Update { path, .. } | OffloadError::Upload { path, .. }
                    if path == "large"
            );
            assert!(told && error.to_string().contains("on fire"), "{error}");

            assert_refused(|| net.large.val());
            assert_refused(|| net.valid().large.val());
            assert_refused(|| net.clone().into_record());
            assert!(offload.settle(net.clone()).is_err());
            // Other parameters are not touched by it.
            assert!(!net.single.val().to_data().as_bytes().is_empty());

            // An older clone has its values, and the optimizer goes on from them.
            assert_eq!(older.bits(), before);
            if schedule == Schedule::ForwardOverlapped {
                let grads = backward(&older, 2);
                let after = optimizer.step(1e-2, older.clone(), grads);
                offload.flush().unwrap();
                assert_ne!(after.bits(), before);
                assert_eq!(older.bits(), before);
            } else {
                // A record makes up for it as well.
                net = net.load_record(start.into_record());
                let grads = backward(&net, 0);
                net = optimizer.step(1e-2, net, grads);
                offload.flush().unwrap();
                assert!(!net.large.val().to_data().as_bytes().is_empty());
            }
        }
    }
}

/// The engine is dropped while a step, or an upload, is under way: it ends when that does.
#[test]
fn dropping_in_the_middle_of_an_update_ends_cleanly() {
    let places: [Place; 3] = [
        |b| matches!(b, Boundary::Stepped { slot: 0, .. }),
        |b| matches!(b, Boundary::Sent { slot: 1, .. }),
        |b| matches!(b, Boundary::HandedBack { slot: 3 }),
    ];
    for device in devices() {
        for schedule in BEHIND {
            for place in places {
                let events = Events::new();
                let (mut net, offload, mut optimizer) =
                    offloaded(&device, with(schedule), Some(events.hook()));
                // A delayed schedule sends nothing before its second step.
                let grads = backward(&net, 0);
                net = optimizer.step(1e-2, net, grads);
                settled(&net);
                events.forget();
                events.hold(place);
                let grads = backward(&net, 1);
                net = optimizer.step(1e-2, net, grads);
                events.wait_for(place);
                let ending = std::thread::spawn(move || drop((net, optimizer, offload)));
                events.release();
                ending.join().expect("it ends");
            }
        }
    }
}

/// In the middle of a download and of a backward pass, too.
#[test]
fn dropping_in_the_middle_of_a_download_ends_cleanly() {
    for device in devices() {
        for schedule in BEHIND {
            let events = Events::new();
            let (net, offload, optimizer) = offloaded(&device, with(schedule), Some(events.hook()));
            let place = |b| matches!(b, Boundary::Read { .. });
            events.hold(place);
            let grads = backward(&net, 0);
            // Flex hands over in groups; asking for a flush sends the last.
            let flushing = std::thread::spawn({
                let offload = offload.clone();
                move || offload.flush()
            });
            events.wait_for(place);
            let ending = std::thread::spawn(move || drop((grads, net, optimizer, offload)));
            events.release();
            flushing.join().expect("it ends").expect("nothing failed");
            ending.join().expect("it ends");
        }
    }
}
