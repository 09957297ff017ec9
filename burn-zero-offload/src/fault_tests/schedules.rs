//! Updates behind the training loop, with everything on, whatever is late.

use std::sync::Arc;

use burn::optim::GradientsParams;
use burn::tensor::{Device, FloatDType};

use super::delays::delays;
use super::fixture::*;
use crate::boundary::{Boundary, Hook};
use crate::{Accumulation, DynamicLossScaleConfig, LossScaleConfig, OffloadConfig, Schedule};

/// Clipping, a loss scale that grows until it overflows, means of two passes, and four rules.
fn everything(dtype: FloatDType, schedule: Schedule) -> OffloadConfig {
    let scale = DynamicLossScaleConfig::new()
        .with_initial(1024.0)
        .with_growth_interval(4);
    config()
        .with_dtype(Some(dtype))
        .with_loss_scale(Some(LossScaleConfig::Dynamic(scale)))
        .with_max_grad_norm(Some(30.0))
        .with_accumulation(Accumulation::Mean)
        .with_micro_batches(Some(PASSES))
        .with_schedule(schedule)
}

/// What a run of so many rounds shows: scales, norms, and the weights at the end and twice before.
#[derive(Debug, PartialEq)]
struct Shown {
    scales: Vec<f32>,
    norms: Vec<u64>,
    weights: Vec<Vec<Vec<u8>>>,
}

fn run(device: &Device, config: OffloadConfig, rounds: usize, hook: Option<Arc<Hook>>) -> Shown {
    let (mut net, offload, mut optimizer) = offloaded(device, config, hook);
    let mut shown = Shown {
        scales: vec![],
        norms: vec![],
        weights: vec![],
    };
    let (mut skipped, mut clipped) = (0, 0);
    for round in 0..rounds {
        let pass = |pass| offload.scale(net.loss(round * PASSES + pass)).backward();
        let last = (1..PASSES).fold(pass(0), |_earlier, next| pass(next));
        let grads = GradientsParams::from_grads(last, &net);
        net = optimizer.step(1e-3, net, grads);
        let report = offload.report();
        shown.scales.push(report.next_loss_scale);
        shown.norms.push(report.grad_norm.to_bits());
        skipped += usize::from(!report.applied());
        clipped += usize::from(report.clipped_grad_norm < report.grad_norm);
        if round == rounds / 3 || round == rounds / 2 {
            offload.flush().unwrap();
            shown.weights.push(net.bits());
        }
    }
    let net = offload.settle(net).unwrap();
    shown.weights.push(net.bits());
    assert!(clipped > rounds / 20, "{clipped} rounds were clipped");
    if offload.dtype() == FloatDType::F16 {
        assert!(skipped > 1, "the scale never became too large");
    }
    shown
}

fn small_delays(seed: u64) -> Arc<Hook> {
    delays(seed, 150, |_| true)
}

/// acceptance.md, concurrency 75, for 200 rounds.
fn two_hundred_rounds(device: &Device, dtypes: &[FloatDType]) {
    for &dtype in dtypes {
        let expected = run(device, everything(dtype, Schedule::Synchronous), 200, None);
        let overlapped = everything(dtype, Schedule::ForwardOverlapped);
        let got = run(device, overlapped, 200, Some(small_delays(7)));
        assert!(got == expected, "{dtype:?} on {device:?}");
    }
}

#[test]
fn two_hundred_rounds_with_everything_on_and_random_delays_on_flex() {
    let device = Device::flex().autodiff();
    two_hundred_rounds(
        &device,
        &[FloatDType::F16, FloatDType::BF16, FloatDType::F32],
    );
}

#[cfg(feature = "cpu")]
#[test]
fn two_hundred_rounds_with_everything_on_and_random_delays_on_the_cpu_runtime() {
    two_hundred_rounds(&Device::cpu().autodiff(), &[FloatDType::F16]);
}

/// The delayed schedule is another optimizer, but one whose bits do not depend on timing either.
#[test]
fn delayed_updates_do_not_depend_on_timing() {
    for device in devices() {
        // CubeCL's CPU runtime takes its time.
        let on_flex = device == Device::flex().autodiff();
        let seeds = if on_flex { 0..3 } else { 0..1 };
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let config = everything(dtype, Schedule::Delayed { warmup: 3 });
            let config = config.with_delay_compensation(Some(0.5));
            let expected = run(&device, config.clone(), 24, None);
            for seed in seeds.clone() {
                let hook = delays(seed, 1000, |_| true);
                assert!(run(&device, config.clone(), 24, Some(hook)) == expected);
            }
            let synchronous = run(&device, everything(dtype, Schedule::Synchronous), 24, None);
            assert!(synchronous != expected, "nothing was delayed");
        }
    }
}

/// Every step is checked by the oracle, and all weights are read back.
#[test]
fn updates_behind_the_loop_are_verified() {
    for device in devices() {
        for schedule in [Schedule::ForwardOverlapped, Schedule::Delayed { warmup: 2 }] {
            let config = everything(FloatDType::BF16, schedule).with_verify(true);
            let (mut net, offload, mut optimizer) = offloaded(&device, config, None);
            let weights: usize = net.bits().iter().map(|bytes| bytes.len() / 2).sum();
            for round in 0..4 {
                let grads = backward(&net, round);
                net = optimizer.step(1e-3, net, grads);
            }
            offload.flush().unwrap();
            let report = offload.report();
            // All weights, and elements of the step besides.
            assert!(report.verified > weights as u64, "{report}");
        }
    }
}

/// With the upload as the slowest station, and each of the others.
#[test]
fn whichever_station_is_slow_the_schedules_give_the_same_bits() {
    let device = Device::flex().autodiff();
    let all: [fn(Boundary) -> bool; 5] = [
        |b| matches!(b, Boundary::HandedOver { .. }),
        |b| matches!(b, Boundary::Stored { .. }),
        |b| matches!(b, Boundary::Stepped { .. }),
        |b| matches!(b, Boundary::Sent { .. }),
        |b| matches!(b, Boundary::HandedBack { .. }),
    ];
    for schedule in [Schedule::ForwardOverlapped, Schedule::Delayed { warmup: 1 }] {
        let config = everything(FloatDType::BF16, schedule);
        let expected = run(&device, config.clone(), 6, None);
        for slow in all {
            let got = run(&device, config.clone(), 6, Some(delays(3, 3000, slow)));
            assert!(got == expected);
        }
    }
}
