use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::fixture::*;
use crate::boundary::{Boundary, Hook};
use crate::panics;

/// How a station fails.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Error,
    Panic,
}

type Place = fn(Boundary) -> bool;

/// A fault at the boundaries that `at` names while `armed` is set.
fn faulty(fault: Fault, at: Place) -> (Arc<Hook>, Arc<AtomicBool>) {
    let armed = Arc::new(AtomicBool::new(false));
    let hook: Arc<Hook> = Arc::new({
        let armed = armed.clone();
        move |boundary| match fault {
            _ if !armed.load(Ordering::SeqCst) || !at(boundary) => Ok(()),
            Fault::Error => Err("the link is down".into()),
            Fault::Panic => panic!("the link is down"),
        }
    });
    (hook, armed)
}

fn said(panic: Box<dyn std::any::Any + Send>) -> String {
    panics::message(panic)
}

/// acceptance.md, concurrency 80, for everything between a tap and the store: one error at the next
/// step, no weight changed, and training goes on as if the round had not been.
#[test]
fn a_lost_gradient_stops_the_step_before_any_weight_changes() {
    let places: [(Fault, Place); 6] = [
        (Fault::Error, |b| matches!(b, Boundary::HandedOver { .. })),
        (Fault::Error, |b| matches!(b, Boundary::Read { .. })),
        (Fault::Panic, |b| matches!(b, Boundary::Read { .. })),
        (Fault::Error, |b| matches!(b, Boundary::Landed { .. })),
        (Fault::Panic, |b| matches!(b, Boundary::Stored { slot: 3 })),
        (Fault::Error, |b| matches!(b, Boundary::Stored { slot: 0 })),
    ];
    for device in devices() {
        let expected = train(&device, config(), None);
        for (index, (fault, place)) in places.into_iter().enumerate() {
            let (hook, armed) = faulty(fault, place);
            let (mut net, offload, mut optimizer) = offloaded(&device, config(), Some(hook));
            let grads = backward(&net, 0);
            net = optimizer.step(1e-2, net, grads);
            assert_eq!(net.bits(), expected[0]);

            armed.store(true, Ordering::SeqCst);
            let grads = backward(&net, 1);
            let before = net.clone();
            let step = catch_unwind(AssertUnwindSafe(|| optimizer.step(1e-2, net, grads)));
            let text = said(step.expect_err("the step fails"));
            assert!(
                text.contains("could not be read from the device: the link is down")
                    && text.contains("No weight has changed"),
                "place {index}: {text}"
            );
            assert_eq!(before.bits(), expected[0], "place {index}");
            assert_eq!(offload.memory().host_gradients, 0);

            armed.store(false, Ordering::SeqCst);
            net = before;
            for (round, expected) in expected.iter().enumerate().skip(1) {
                let grads = backward(&net, round);
                net = optimizer.step(1e-2, net, grads);
                assert_eq!(&net.bits(), expected, "place {index}, round {round}");
            }
        }
    }
}

/// `flush` is the way to meet a failed download without a panic.
#[test]
fn a_lost_gradient_is_an_error_of_flush() {
    for device in devices() {
        let (hook, armed) = faulty(Fault::Error, |b| matches!(b, Boundary::Read { .. }));
        let (net, offload, _) = offloaded(&device, config(), Some(hook));
        armed.store(true, Ordering::SeqCst);
        let _grads = backward(&net, 0);
        let error = offload.flush().expect_err("the read failed").to_string();
        assert!(error.contains("the link is down"), "{error}");
        armed.store(false, Ordering::SeqCst);
        offload.flush().expect("a failure is reported once");
    }
}

/// acceptance.md, concurrency 80, for the thread that sends weights. The clone made before the step
/// still holds its values, and training it goes on from them.
#[cfg(feature = "cpu")]
#[test]
fn a_lost_tile_is_an_error_of_the_step_and_older_clones_are_intact() {
    let device = burn::tensor::Device::cpu().autodiff();
    let expected = train(&device, config(), None);
    for fault in [Fault::Error, Fault::Panic] {
        let (hook, armed) = faulty(fault, |b| matches!(b, Boundary::Sent { tile: 5, .. }));
        let (mut net, offload, mut optimizer) = offloaded(&device, config(), Some(hook));
        let grads = backward(&net, 0);
        net = optimizer.step(1e-2, net, grads);
        let before = net.clone();

        armed.store(true, Ordering::SeqCst);
        let grads = backward(&net, 1);
        let step = catch_unwind(AssertUnwindSafe(|| optimizer.step(1e-2, net, grads)));
        let text = said(step.expect_err("the step fails"));
        assert!(
            text.contains("`large` could not be sent to the device: the link is down"),
            "{text}"
        );
        assert_eq!(before.bits(), expected[0]);
        assert_eq!(
            offload.memory().host_gradients,
            0,
            "nothing is left for the next round"
        );

        armed.store(false, Ordering::SeqCst);
        let grads = backward(&before, 1);
        let after = optimizer.step(1e-2, before.clone(), grads);
        assert_ne!(after.bits(), before.bits());
        assert_eq!(before.bits(), expected[0]);
    }
}
