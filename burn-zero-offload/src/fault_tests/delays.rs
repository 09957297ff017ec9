use std::collections::HashSet;
use std::mem::{Discriminant, discriminant};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::fixture::*;
use crate::boundary::{Boundary, Hook};

/// Sleeps pseudo-randomly, for less than `most` microseconds, at the boundaries that `applies` names.
pub(super) fn delays(
    seed: u64,
    most: u64,
    applies: impl Fn(Boundary) -> bool + Send + Sync + 'static,
) -> Arc<Hook> {
    let state = Mutex::new(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    Arc::new(move |boundary| {
        if applies(boundary) {
            let micros = {
                let mut x = state.lock();
                *x ^= *x << 13;
                *x ^= *x >> 7;
                *x ^= *x << 17;
                *x % most
            };
            std::thread::sleep(Duration::from_micros(micros));
        }
        Ok(())
    })
}

fn one_of_each() -> Vec<Boundary> {
    let (slot, tile) = (0, 0);
    vec![
        Boundary::HandedOver { slot },
        Boundary::Read { slot },
        Boundary::Landed { slot },
        Boundary::Stored { slot },
        Boundary::Stepped { slot, tile },
        Boundary::Sent { slot, tile },
        Boundary::HandedBack { slot },
    ]
}

/// acceptance.md, concurrency 75 and 78: delays at each boundary alone and at all of them at once, with
/// every buffer poisoned before it is filled.
#[test]
fn delays_and_poison_change_no_bit() {
    for (device, config) in on_every_device(both_kinds()) {
        let run = |hook| train(&device, config.clone(), hook);
        let expected = run(None);
        for (seed, at) in one_of_each().into_iter().enumerate() {
            let hook = delays(seed as u64, 1500, move |b| {
                discriminant(&b) == discriminant(&at)
            });
            assert_eq!(run(Some(hook)), expected, "{at:?}");
        }
        for seed in 100..103 {
            assert_eq!(
                run(Some(delays(seed, 1500, |_| true))),
                expected,
                "seed {seed}"
            );
        }
    }
}

/// Every set of stations is slower than the others once. On Flex, whose steps are short enough.
#[test]
fn whichever_stations_are_slow_no_bit_changes() {
    let device = burn::tensor::Device::flex().autodiff();
    let expected = train(&device, config(), None);
    let all = one_of_each();
    for set in 0..1u32 << all.len() {
        let slow: Vec<_> = all
            .iter()
            .enumerate()
            .filter(|(index, _)| set & (1 << index) != 0)
            .map(|(_, boundary)| discriminant(boundary))
            .collect();
        let hook: Arc<Hook> = Arc::new(move |boundary| {
            if slow.contains(&discriminant(&boundary)) {
                std::thread::sleep(Duration::from_micros(50));
            }
            Ok(())
        });
        assert_eq!(
            train(&device, config(), Some(hook)),
            expected,
            "set {set:b}"
        );
    }
}

/// The tests above would prove nothing if data did not pass the boundaries.
#[test]
fn data_passes_every_boundary() {
    let cubecl = cfg!(feature = "cpu");
    for (device, tiles) in devices().into_iter().zip([false, cubecl]) {
        let seen: Arc<Mutex<HashSet<Discriminant<Boundary>>>> = Arc::default();
        let hook: Arc<Hook> = Arc::new({
            let seen = seen.clone();
            move |boundary| {
                seen.lock().insert(discriminant(&boundary));
                Ok(())
            }
        });
        train(&device, config(), Some(hook));
        for boundary in one_of_each() {
            let expected = tiles || !matches!(boundary, Boundary::Sent { .. });
            let passed = seen.lock().contains(&discriminant(&boundary));
            assert_eq!(passed, expected, "{boundary:?} on {device:?}");
        }
    }
}

/// The smallest budget, one element more, and more than is ever in flight.
#[test]
fn any_budget_that_holds_the_largest_gradient_gives_the_same_bits() {
    for device in devices() {
        // Sums on the device need room beside the largest gradient; where there is none every use
        // travels. The order of a sum's terms is the same, but not their grouping over two passes.
        let largest = 160 * 256 * 2;
        let expected = train(&device, config().with_in_flight(Some(largest)), None);
        for budget in [largest + 2, largest * 3 / 2] {
            for seed in 0..2 {
                let config = config().with_in_flight(Some(budget));
                let hook = delays(seed, 1500, |b| {
                    matches!(b, Boundary::Read { .. } | Boundary::Landed { .. })
                });
                let trained = train(&device, config, Some(hook));
                if budget < largest + 4 * 257 {
                    assert_eq!(trained, expected, "budget {budget}");
                } else {
                    let ample = self::config().with_in_flight(Some(100 * largest));
                    assert_eq!(trained, train(&device, ample, None), "budget {budget}");
                }
            }
        }
    }
}

/// acceptance.md, concurrency 76.
#[test]
fn tiles_of_any_size_give_the_same_bits() {
    for (device, config) in on_every_device(both_kinds()) {
        let run = |config| train(&device, config, None);
        let whole = run(config.clone().with_upload_tile(Some(usize::MAX)));
        for tile in [1, 37, 1000, 160 * 256] {
            let config = config.clone().with_upload_tile(Some(tile));
            assert_eq!(run(config), whole, "tiles of {tile}");
        }
        // No limit at all, in every option that has one.
        let unlimited = config.with_in_flight(Some(usize::MAX));
        assert_eq!(run(unlimited.with_pinned(Some(usize::MAX))), whole);
    }
}

/// acceptance.md, memory 68.
#[test]
fn pinning_changes_no_bit() {
    for (device, config) in on_every_device(both_kinds()) {
        let pinned = train(&device, config.clone(), None);
        let config = config.with_pinned(Some(0));
        assert_eq!(train(&device, config.clone(), None), pinned);
        let (_, offload, _) = offloaded(&device, config, None);
        let report = offload.report();
        assert_eq!(report.pinned_up, 0);
        assert!(report.pinning.starts_with("not pinned:"), "{report}");
        let memory = offload.memory();
        assert_eq!((memory.pinned, memory.pinned_masters), (0, 0));
    }
}

/// acceptance.md, concurrency 79: what has not landed is not there. The store sees a gradient's bytes
/// only through `Arrived`, which exists after the copy.
#[test]
fn a_gradient_that_has_not_landed_cannot_be_read() {
    for device in devices() {
        let gate: Arc<(Mutex<bool>, Condvar)> = Arc::default();
        let hook: Arc<Hook> = Arc::new({
            let gate = gate.clone();
            move |boundary| {
                if matches!(boundary, Boundary::Read { .. }) {
                    let mut open = gate.0.lock();
                    while !*open {
                        gate.1.wait(&mut open);
                    }
                }
                Ok(())
            }
        });
        let (net, offload, _) = offloaded(&device, config(), Some(hook));
        let grads = backward(&net, 0);
        assert_eq!(offload.memory().host_gradients, 0);
        *gate.0.lock() = true;
        gate.1.notify_all();
        offload.flush().unwrap();
        assert!(offload.memory().host_gradients > 0);
        drop(grads);
    }
}

#[test]
fn two_models_in_two_threads_train_as_each_alone() {
    for device in devices() {
        let alone = train(&device, config(), None);
        std::thread::scope(|scope| {
            for seed in 0..2 {
                let (device, alone) = (&device, &alone);
                scope.spawn(move || {
                    let hook = delays(seed, 1500, |_| true);
                    assert_eq!(&train(device, config(), Some(hook)), alone);
                });
            }
        });
    }
}
