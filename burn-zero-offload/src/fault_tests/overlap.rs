//! What runs beside what, shown by events that wait for each other: a schedule that did not overlap them
//! would hang here.

use burn::module::{Module, Param};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor, TensorData};

use super::events::Events;
use super::fixture::{config, devices};
use crate::boundary::{Boundaries, Boundary, Hook};
use crate::{Lane, Offload, OffloadConfig, Schedule, WithOffload, Work};

const LAYERS: usize = 8;

/// Layers that are used in the opposite of their order in the model.
#[derive(Module, Debug)]
struct Layers {
    layers: Vec<Param<Tensor<1>>>,
}

impl Layers {
    fn new(device: &Device) -> Self {
        let layer = |i: usize| {
            let values: Vec<f32> = (0..500).map(|j| (i * 7 + j) as f32 / 512.0).collect();
            Param::from_data(TensorData::new(values, [500]), device)
        };
        Self {
            layers: (0..LAYERS).map(layer).collect(),
        }
    }

    /// Calls `computed` after the use of each layer.
    fn loss(&self, mut computed: impl FnMut(usize)) -> Tensor<1> {
        let mut loss = Tensor::zeros([1], &self.layers[0].device());
        for (index, layer) in self.layers.iter().enumerate().rev() {
            let w = layer.val().cast(FloatDType::F32);
            loss = loss + (w.clone() * w).mean();
            computed(index);
        }
        loss
    }
}

fn train(
    schedule: Schedule,
    device: &Device,
    hook: std::sync::Arc<Hook>,
) -> (Layers, Offload, ModuleOptimizer) {
    let config: OffloadConfig = config().with_schedule(schedule);
    let made = SgdConfig::new().with_offload(config);
    let (model, offload) = Boundaries::with(hook, || made.init(Layers::new(device)).unwrap());
    let optimizer = offload.optimizer();
    (model, offload, optimizer)
}

fn step(optimizer: &mut ModuleOptimizer, model: Layers, loss: Tensor<1>) -> Layers {
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    optimizer.step(1e-2, model, grads)
}

fn stepped(slot: usize) -> impl Fn(Boundary) -> bool + Copy {
    move |b| matches!(b, Boundary::Stepped { slot: other, .. } if other == slot)
}

fn handed_back(slot: usize) -> impl Fn(Boundary) -> bool + Copy {
    move |b| matches!(b, Boundary::HandedBack { slot: other } if other == slot)
}

/// `step` returns while no update is done, and the updates then come in the order of the forward pass.
#[test]
fn a_step_returns_before_its_updates_and_they_follow_the_forward_pass() {
    for device in devices() {
        let events = Events::new();
        let (mut model, offload, mut optimizer) =
            train(Schedule::ForwardOverlapped, &device, events.hook());
        events.hold(|b| matches!(b, Boundary::Stepped { .. }));
        let loss = model.loss(|_| ());
        // Nothing is updated, and this returns.
        model = step(&mut optimizer, model, loss);
        events.wait_for(|b| matches!(b, Boundary::Stepped { .. }));
        let first = events.stepped()[0];
        assert_eq!(offload.report().pending, LAYERS);
        events.release();
        offload.flush().unwrap();
        let order = events.stepped();
        let rest: Vec<usize> = (0..LAYERS).rev().filter(|&slot| slot != first).collect();
        assert_eq!(&order[1..], &rest);
        assert_eq!(offload.report().pending, 0);
        drop(model);
    }
}

/// Each layer's computation goes on only when the layer after the next has been updated: so updates run beside
/// it, and no use but the first two ever waits.
#[test]
fn updates_run_beside_the_forward_pass_and_only_the_first_uses_wait() {
    for device in devices() {
        let events = Events::new();
        let (mut model, offload, mut optimizer) =
            train(Schedule::ForwardOverlapped, &device, events.hook());
        for _ in 0..3 {
            let loss = model.loss(|_| ());
            events.forget();
            model = step(&mut optimizer, model, loss);
            let loss = model.loss(|index| {
                if let Some(ahead) = index.checked_sub(2) {
                    events.wait_for(handed_back(ahead));
                }
            });
            model = step(&mut optimizer, model, loss);
            offload.flush().unwrap();
        }
        let trace = offload.trace();
        let waits = trace.spans().iter().filter(|s| s.work == Work::WaitForward);
        let first_two = [LAYERS - 1, LAYERS - 2].map(|index| format!("layers.{index}"));
        for wait in waits {
            assert!(
                first_two.contains(wait.parameter.as_ref().unwrap()),
                "{wait:?}"
            );
        }
    }
}

/// A use waits for its own parameter only: the last one's update cannot even begin while the others are used.
#[test]
fn a_use_waits_for_no_other_parameter() {
    for device in devices() {
        let events = Events::new();
        let (mut model, offload, mut optimizer) =
            train(Schedule::ForwardOverlapped, &device, events.hook());
        events.hold(|b| matches!(b, Boundary::Stepped { .. }));
        let loss = model.loss(|_| ());
        model = step(&mut optimizer, model, loss);
        // The walk has queued all; what was queued first, the first of the model, is the one that has begun.
        // Of the others the forward pass uses layer 1 last.
        events.wait_for(stepped(0));
        events.hold(stepped(1));
        let loss = model.loss(|index| {
            if index == 2 {
                events.release();
            }
        });
        model = step(&mut optimizer, model, loss);
        offload.flush().unwrap();
        drop(model);
    }
}

/// Under the delayed schedule the whole of the next forward and backward pass can go by before the first update
/// begins, and gradients of that pass do not meet those of the update.
#[test]
fn delayed_updates_run_beside_the_next_backward_pass() {
    for device in devices() {
        let delayed = Schedule::Delayed { warmup: 1 };
        let run = |hold: bool| {
            let events = Events::new();
            let (mut model, offload, mut optimizer) = train(delayed, &device, events.hook());
            let mut losses = vec![];
            for _ in 0..3 {
                if hold {
                    events.hold(|b| matches!(b, Boundary::Stepped { .. }));
                }
                let loss = model.loss(|_| ());
                losses.push(loss.clone().try_into_vec_as::<f32>().unwrap());
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                events.release();
                model = optimizer.step(1e-2, model, grads);
            }
            let model = offload.settle(model).unwrap();
            let weights = model.layers.iter();
            let weights = weights.map(|w| w.base().try_into_vec_as::<f32>().unwrap());
            (losses, weights.collect::<Vec<_>>())
        };
        assert_eq!(run(true), run(false));
    }
}

/// Every lane of the timeline has what happened, once for each parameter and round.
#[test]
fn the_timeline_has_every_round() {
    let device = Device::flex().autodiff();
    for schedule in [
        Schedule::Synchronous,
        Schedule::ForwardOverlapped,
        Schedule::Delayed { warmup: 1 },
    ] {
        let events = Events::new();
        let (mut model, offload, mut optimizer) = train(schedule, &device, events.hook());
        for _ in 0..3 {
            let loss = model.loss(|_| ());
            model = step(&mut optimizer, model, loss);
        }
        offload.flush().unwrap();
        let trace = offload.trace();
        let count = |work: Work, round: u64| {
            let spans = trace.spans().iter();
            spans.filter(|s| (s.work, s.round) == (work, round)).count()
        };
        for round in 1..=3 {
            for (work, expected) in [
                (Work::Forward, 1),
                (Work::Backward, 1),
                (Work::Walk, 1),
                (Work::Verdict, 1),
                (Work::Gradient, LAYERS),
                (Work::Step, LAYERS),
            ] {
                assert_eq!(count(work, round), expected, "{work:?}, {schedule:?}");
            }
            let uploads = match schedule {
                // On Flex the step writes what the model holds.
                Schedule::Synchronous => 0,
                Schedule::ForwardOverlapped => LAYERS,
                // Of the update before.
                Schedule::Delayed { .. } if round == 1 => 0,
                Schedule::Delayed { .. } => LAYERS,
            };
            assert_eq!(count(Work::Upload, round), uploads, "{schedule:?}");
        }
        assert_eq!((trace.rounds(), trace.dropped()), (Some(1..=3), 0));
        let step = trace.spans().iter().find(|span| span.work == Work::Step);
        assert_eq!(step.unwrap().work.lane(), Lane::Step);
    }
}
