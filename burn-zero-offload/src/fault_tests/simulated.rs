//! A slow device, a slow link and a slow CPU step, made of sleep: what each schedule makes of them.
//!
//! Prints a table (`--nocapture`); with the environment variable `BURN_OFFLOAD_PICTURES` set to a folder,
//! writes the timeline of each schedule there. No assertion looks at a clock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::module::{Module, Param};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor};

use super::fixture::config;
use crate::boundary::{Boundaries, Boundary, Hook};
use crate::{Schedule, StepReport, Trace, WithOffload, Work};

const LAYERS: usize = 24;
/// Small, as what costs time is to be the sleep, but more than is handed over without another thread.
const WIDTH: usize = 40_000;
/// Gradients in flight.
const AHEAD: usize = 16;
const ROUNDS: usize = 5;

/// Milliseconds that each layer takes at each station.
#[derive(Clone, Copy, Debug, Default)]
struct Costs {
    forward: u64,
    backward: u64,
    down: u64,
    step: u64,
    up: u64,
}

impl Costs {
    fn sleep(ms: u64) {
        if ms > 0 {
            std::thread::sleep(Duration::from_millis(ms));
        }
    }

    fn hook(self) -> Arc<Hook> {
        Arc::new(move |boundary| {
            Self::sleep(match boundary {
                Boundary::HandedOver { .. } => self.backward,
                Boundary::Stored { .. } => self.down,
                Boundary::Stepped { .. } => self.step,
                Boundary::Sent { .. } => self.up,
                _ => 0,
            });
            Ok(())
        })
    }

    /// The slowest station's time for a round.
    fn bound(self) -> u64 {
        let compute = self.forward + self.backward;
        let all = [compute, self.down, self.step, self.up];
        LAYERS as u64 * all.into_iter().max().unwrap_or_default()
    }
}

#[derive(Module, Debug)]
struct Layers {
    layers: Vec<Param<Tensor<1>>>,
}

/// What a run shows.
struct Shown {
    losses: Vec<u32>,
    took: Duration,
    reports: Vec<StepReport>,
    trace: Trace,
}

fn train(schedule: Schedule, costs: Costs) -> Shown {
    let device = Device::flex().autodiff();
    let layer = |i: usize| {
        let values = Tensor::<1>::full([WIDTH], 1.0 + i as f32 / 64.0, &device);
        Param::from_tensor(values)
    };
    let model = Layers {
        layers: (0..LAYERS).map(layer).collect(),
    };
    let config = config()
        .with_schedule(schedule)
        .with_max_grad_norm(Some(1.0))
        .with_upload_tile(None)
        .with_in_flight(Some(AHEAD * 2 * WIDTH));
    let made = SgdConfig::new().with_offload(config);
    let (mut model, offload) = Boundaries::with(costs.hook(), || made.init(model).unwrap());
    let mut optimizer = offload.optimizer();
    let (mut losses, mut times) = (vec![], vec![]);
    for _ in 0..ROUNDS {
        let started = Instant::now();
        let mut loss = Tensor::<1>::zeros([1], &device);
        for layer in &model.layers {
            let w = layer.val();
            Costs::sleep(costs.forward);
            let w = w.narrow(0, 0, 64).cast(FloatDType::F32);
            loss = loss + (w.clone() * w).sum();
        }
        losses.push(loss.clone().try_into_vec_as::<f32>().unwrap()[0].to_bits());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.5, model, grads);
        times.push(started.elapsed());
    }
    offload.flush().unwrap();
    // Those of the first and the last round have nothing before or behind them.
    let reports = offload.reports().drain(1..ROUNDS - 1).collect();
    times.remove(0);
    times.sort();
    Shown {
        losses,
        took: times[times.len() / 2],
        reports,
        trace: offload.trace(),
    }
}

const SCHEDULES: [(&str, Schedule); 3] = [
    ("synchronous", Schedule::Synchronous),
    ("forward-overlapped", Schedule::ForwardOverlapped),
    ("delayed", Schedule::Delayed { warmup: 1 }),
];

fn show(name: &str, costs: Costs) {
    let none = Costs::default();
    println!(
        "{name}: {costs:?} for each of {LAYERS} layers, slowest station {} ms; without any of it a round takes \
         {:.1} ms",
        costs.bound(),
        train(Schedule::Synchronous, none).took.as_secs_f64() * 1e3
    );
    let mut synchronous = None;
    for (schedule_name, schedule) in SCHEDULES {
        let shown = train(schedule, costs);
        let share = |report: &StepReport| {
            report.exposed().as_secs_f64() / report.updating.as_secs_f64().max(1e-9)
        };
        let mut shares: Vec<f64> = shown.reports.iter().map(share).collect();
        shares.sort_by(f64::total_cmp);
        println!(
            "{schedule_name:<20} {:6.1} ms a round, {:5.1} % of the updates exposed",
            shown.took.as_secs_f64() * 1e3,
            100.0 * shares[shares.len() / 2]
        );
        let report = shown.reports[1].to_string();
        let line = report.lines().find(|line| line.starts_with("exposed"));
        println!("  {}", line.unwrap_or_default());
        if let Ok(folder) = std::env::var("BURN_OFFLOAD_PICTURES") {
            let path = std::path::Path::new(&folder).join(format!("{name}-{schedule_name}.svg"));
            shown.trace.clone().of_rounds(3..=4).save_svg(path).unwrap();
        }
        assert_overlaps(schedule, &shown.trace);
        match schedule {
            Schedule::Synchronous => synchronous = Some(shown.losses),
            Schedule::ForwardOverlapped => assert_eq!(Some(shown.losses), synchronous),
            Schedule::Delayed { .. } => assert_ne!(Some(shown.losses), synchronous),
        }
    }
}

/// What comes after what, whatever the clock says.
fn assert_overlaps(schedule: Schedule, trace: &Trace) {
    let of = |work: Work, round: u64| {
        let spans = trace.spans().iter();
        spans.filter(move |span| (span.work, span.round) == (work, round))
    };
    for round in 2..ROUNDS as u64 {
        let begin = |work, round| of(work, round).map(|span| span.start).min().unwrap();
        let next_forward = begin(Work::Forward, round + 1);
        // How much of the others is behind it depends on the machine; `overlap` shows that it can be all.
        if schedule == Schedule::Synchronous {
            assert!(of(Work::Step, round).all(|span| span.end() <= next_forward));
        }
        assert_eq!(of(Work::Step, round).count(), LAYERS);
        // Nothing is updated before the verdict on its round.
        let verdict = of(Work::Verdict, round).next().unwrap().end();
        assert!(of(Work::Step, round).all(|span| span.start >= verdict));
        if schedule == Schedule::ForwardOverlapped {
            // No weight is used before it is there.
            let backward = begin(Work::Backward, round + 1);
            assert!(of(Work::Upload, round).all(|span| span.end() <= backward));
        }
    }
}

#[test]
fn a_slow_device() {
    show(
        "slow-device",
        Costs {
            forward: 4,
            backward: 8,
            down: 3,
            step: 3,
            up: 2,
        },
    );
}

#[test]
fn a_slow_link() {
    show(
        "slow-link",
        Costs {
            forward: 2,
            backward: 3,
            down: 6,
            step: 1,
            up: 2,
        },
    );
}

#[test]
fn a_slow_cpu() {
    show(
        "slow-cpu",
        Costs {
            forward: 2,
            backward: 4,
            down: 2,
            step: 5,
            up: 2,
        },
    );
}
