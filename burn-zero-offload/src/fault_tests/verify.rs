use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use burn::optim::AdamWConfig;

use super::fixture::*;
use crate::boundary::{Boundaries, Boundary, Damage};
use crate::{OffloadConfig, WithOffload, panics};

fn verified() -> OffloadConfig {
    config().with_verify(true)
}

/// What the first step says when `damage` was done to values on their way.
fn first_step(device: &burn::tensor::Device, damage: Arc<Damage>) -> String {
    let build = || {
        let config = AdamWConfig::new().with_offload(verified());
        config.init(Net::new(device)).unwrap()
    };
    let (net, offload) = Boundaries::damaging(damage, build);
    let mut optimizer = offload.optimizer();
    let grads = backward(&net, 0);
    let step = catch_unwind(AssertUnwindSafe(|| optimizer.step(1e-2, net, grads)));
    panics::message(step.expect_err("the step fails"))
}

#[test]
fn verifying_changes_no_bit_and_says_what_it_checked() {
    for device in devices() {
        let expected = train(&device, config(), None);
        assert_eq!(train(&device, verified(), None), expected);
        let (net, offload, mut optimizer) = offloaded(&device, verified(), None);
        let grads = backward(&net, 0);
        optimizer.step(1e-2, net, grads);
        let report = offload.report();
        let parameters = offload.memory().parameters as u64;
        // All weights were read back; of the large parameter three of ten tiles were computed again.
        let large = 160 * 256;
        let tiles = parameters - large + 3 * 4096;
        assert_eq!(report.verified, parameters + tiles, "{report}");
        assert!(report.to_string().contains("verified"), "{report}");
    }
}

/// One bit of one master weight is wrong after the step.
#[test]
fn a_wrong_master_weight_is_found_and_named() {
    for device in devices() {
        for at in [
            Boundary::Stepped { slot: 0, tile: 0 },
            Boundary::Stepped { slot: 3, tile: 0 },
        ] {
            let text = first_step(
                &device,
                Arc::new(move |boundary, values: &mut [f32]| {
                    if boundary == at {
                        values[0] = f32::from_bits(values[0].to_bits() ^ 1);
                    }
                }),
            );
            let path = if at == (Boundary::Stepped { slot: 0, tile: 0 }) {
                "large"
            } else {
                "single"
            };
            let expected = format!("verification failed: master weight, element 0 of `{path}`");
            assert!(text.contains(&expected), "{text}");
        }
    }
}

/// What the device holds is not what the master should have become there.
#[test]
fn a_wrong_weight_on_the_device_is_found_and_named() {
    for device in devices() {
        let text = first_step(
            &device,
            Arc::new(|boundary, values: &mut [f32]| {
                if boundary == (Boundary::HandedBack { slot: 1 }) {
                    values[299] += 1.0;
                }
            }),
        );
        let expected = "verification failed: weight on the device, element 299 of `twice`, is";
        assert!(text.contains(expected), "{text}");
    }
}
