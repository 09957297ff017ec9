//! Where the CPU step runs.

use std::collections::HashSet;
use std::sync::Mutex;

use burn::tensor::{Device, FloatDType};
use burn_zero_offload::optimize::{HostRule, Rule};
use burn_zero_offload::{OffloadError, WithOffload};

use crate::common::vectors::{Vectors, with_gradient};
use crate::common::{config, step, values};

/// The threads of the step are its own: none of Burn's, and as many as the config says.
#[test]
fn the_step_runs_on_its_own_threads_only() {
    static SEEN: Mutex<Option<HashSet<String>>> = Mutex::new(None);

    #[derive(Clone, Debug)]
    struct Witness;

    impl Rule<0> for Witness {
        type Scalars = ();
        const STATE: [&'static str; 0] = [];

        fn scalars(&self, _time: u64, _lr: f64) {}

        fn update(_: &(), p: f32, _: [f32; 0], g: f32) -> (f32, [f32; 0]) {
            let thread = std::thread::current();
            let name = thread.name().unwrap_or("unnamed").to_string();
            SEEN.lock().unwrap().get_or_insert_default().insert(name);
            (p - g, [])
        }
    }

    impl WithOffload for Witness {
        fn host_rule(&self) -> Result<HostRule, OffloadError> {
            Ok(HostRule::new(self.clone()))
        }
    }

    let device = Device::flex().autodiff();
    let config = config(FloatDType::BF16).with_threads(Some(3));
    let len = 70_000;
    let model = Vectors::new(0.5, [len, 2], &device);
    let (model, offload) = Witness.with_offload(config).init(model).unwrap();
    let loss = with_gradient(&model.a, &values(len, 1)).sum();
    step(&mut offload.optimizer(), 1.0, model, loss);
    let seen = SEEN.lock().unwrap().take().unwrap();
    let ours = ["offload-step-0", "offload-step-1", "offload-step-2"];
    assert!(
        seen.iter().all(|name| ours.contains(&name.as_str())),
        "{seen:?}"
    );
    let report = offload.report();
    assert_eq!((offload.threads(), report.threads), (3, 3));
    assert!(
        report.placement.starts_with("3 threads"),
        "{}",
        report.placement
    );
}
