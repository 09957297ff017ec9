//! Several runs that differ in one setting, and their losses together.

use anyhow::{Result, ensure};
use burn::module::Module;

use crate::args::Args;
use crate::checkpoint::{Checkpoint, write_file};
use crate::config::{Precision, Schedule, State, TrainConfig};
use crate::history::History;
use crate::timeline::{self, Updates};
use crate::{evaluate, load_text, plot, settings, table, train};

/// Strength of the correction of delayed gradients in the comparison. Gradients of single weights are
/// thousandths and less here, and updates under Adam as small as the learning rate: of this size the correction
/// can first be seen in the loss, while 1000 changes its fourth digit.
const COMPENSATION: f32 = 1e5;

/// Runs to compare: the name of each, and how its settings differ. The first is the reference.
type Variants = Vec<(&'static str, fn(TrainConfig) -> TrainConfig)>;

/// A finished run.
struct Compared {
    name: &'static str,
    history: History,
    /// `None` if Ctrl-C cut the evaluation short.
    validation_loss: Option<f64>,
    /// Median time of a step, in seconds.
    step: f64,
    /// `None` if this process did not train.
    updates: Option<Updates>,
}

/// Compare every dtype on the device.
///
/// # Errors
///
/// Fails if a run does, or if the picture cannot be written.
pub fn dtypes(args: &Args) -> Result<()> {
    let variants: Variants = vec![
        ("f32", |config| config.with_dtype(Precision::F32)),
        ("bf16", |config| config.with_dtype(Precision::Bf16)),
        ("f16", |config| config.with_dtype(Precision::F16)),
    ];
    compare(args, &variants, "compare.svg").map(|_| ())
}

/// Compare every way to keep the state on the host.
///
/// # Errors
///
/// Fails as [`dtypes`] does.
pub fn states(args: &Args) -> Result<()> {
    fn state(config: TrainConfig, state: State) -> TrainConfig {
        config.with_dtype(Precision::Bf16).with_state(Some(state))
    }
    let variants: Variants = vec![
        (State::Full.name(), |config| state(config, State::Full)),
        (State::Split.name(), |config| state(config, State::Split)),
        (State::Bf16.name(), |config| state(config, State::Bf16)),
        (State::Int8.name(), |config| state(config, State::Int8)),
        (State::Int8Master24.name(), |config| {
            state(config, State::Int8Master24)
        }),
    ];
    compare(args, &variants, "compare-states.svg").map(|_| ())
}

/// Compare every schedule of the updates, the delayed one with and without corrected gradients.
///
/// # Errors
///
/// Fails as [`dtypes`] does, and if overlapped updates are not those of the synchronous schedule bit by bit.
pub fn schedules(args: &Args) -> Result<()> {
    fn schedule(config: TrainConfig, schedule: Schedule, compensation: Option<f32>) -> TrainConfig {
        config
            .with_schedule(schedule)
            .with_delay_warmup(None)
            .with_delay_compensation(compensation)
    }
    let variants: Variants = vec![
        ("synchronous", |config| {
            schedule(config, Schedule::Synchronous, None)
        }),
        ("overlapped", |config| {
            schedule(config, Schedule::Overlapped, None)
        }),
        ("delayed", |config| {
            schedule(config, Schedule::Delayed, None)
        }),
        ("delayed-compensated", |config| {
            schedule(config, Schedule::Delayed, Some(COMPENSATION))
        }),
    ];
    let runs = compare(args, &variants, "compare-schedules.svg")?;
    let [synchronous, overlapped, ..] = &runs[..] else {
        return Ok(());
    };
    println!("\n{}", table::schedule_table(&rows(&runs)));
    let different = synchronous.history.first_difference(&overlapped.history);
    ensure!(
        different.is_none() && synchronous.validation_loss == overlapped.validation_loss,
        "overlapped updates must not change a bit, and the losses differ from step {} on",
        different.unwrap_or(synchronous.history.points.len())
    );
    println!("Every loss of the overlapped run is that of the synchronous one, bit by bit");
    Ok(())
}

/// The runs as the table has them.
fn rows(runs: &[Compared]) -> Vec<table::ScheduleRow> {
    let reference = runs.first().and_then(|run| run.validation_loss);
    let row = |run: &Compared| table::ScheduleRow {
        name: run.name,
        validation_loss: run.validation_loss,
        difference: run
            .validation_loss
            .zip(reference)
            .map(|(loss, reference)| percent_above(loss, reference)),
        step: run.step,
        updates: run.updates,
    };
    runs.iter().map(row).collect()
}

fn percent_above(loss: f64, reference: f64) -> f64 {
    100.0 * (loss / reference - 1.0)
}

/// Train every variant, and compare the losses. No runs are returned if Ctrl-C stopped one.
fn compare(args: &Args, variants: &Variants, picture: &str) -> Result<Vec<Compared>> {
    // Now rather than after the runs before it.
    for (_, variant) in variants {
        variant(args.train_config()?).validate()?;
    }
    let mut runs: Vec<Compared> = Vec::new();
    for &(name, variant) in variants {
        let out = args.out.join(name);
        // A comparison that was stopped has finished, unfinished and missing runs.
        let config = if args.resume && Checkpoint::exists(&out) {
            settings(args, &out)?
        } else {
            variant(args.train_config()?)
        };
        let corpus = load_text(&config)?;
        let Some(run) = train(args, config, &corpus, &out)? else {
            return Ok(Vec::new());
        };
        let config = &run.state.config;
        let model = run.model.valid();
        let device = config.device.device()?;
        let validation_loss = evaluate::validation_loss(&model, &corpus, config, &device)?;
        if let Some(loss) = validation_loss {
            let (first, reference) = match runs.first() {
                Some(first) => (first.name, first.validation_loss.unwrap_or(loss)),
                None => (name, loss),
            };
            let difference = percent_above(loss, reference);
            println!("Validation loss: {loss:.4} nats per byte, {difference:+.2} % of {first}'s\n");
        }
        runs.push(Compared {
            name,
            validation_loss,
            step: run.state.history.median_step(config.tokens_per_step()),
            updates: run
                .trace()
                .and_then(|trace| timeline::updates(trace, config.update_schedule())),
            history: run.state.history,
        });
    }

    if let Some((first, others)) = runs.split_first() {
        for other in others {
            let (largest, mean) = first.history.distance(&other.history);
            println!(
                "Smoothed loss of {} against {}: {largest:.4} apart at most, {mean:.4} on average",
                other.name, first.name
            );
        }
    }
    let curves: Vec<_> = runs.iter().map(|run| (run.name, &run.history)).collect();
    let picture = args.out.join(picture);
    write_file(&picture, &plot::loss_curves(&curves))?;
    println!("Wrote {}", picture.display());
    Ok(runs)
}
