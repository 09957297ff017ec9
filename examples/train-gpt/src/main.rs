//! Trains a small GPT with ZeRO-Offload for Burn.
//!
//! `optim.rs` is where offloading is switched on and `train.rs` is the loop, which does not differ
//! from that of a program without it. `cargo run --release -p train-gpt -- --help` lists the flags.

mod args;
mod checkpoint;
mod compare;
mod config;
mod data;
mod device;
mod evaluate;
mod history;
mod interrupt;
mod model;
mod optim;
mod plot;
mod progress;
mod table;
mod timeline;
mod train;
#[cfg(test)]
mod turns;

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use burn::module::Module;
use clap::Parser;

use crate::args::Args;
use crate::checkpoint::{Checkpoint, write_file};
use crate::config::TrainConfig;
use crate::data::Corpus;
use crate::train::Run;

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    interrupt::install()?;
    if args.compare {
        return compare::dtypes(args);
    }
    if args.compare_states {
        return compare::states(args);
    }
    if args.compare_schedules {
        return compare::schedules(args);
    }
    let config = settings(args, &args.out)?;
    let corpus = load_text(&config)?;
    if let Some(run) = train(args, config, &corpus, &args.out)? {
        report(&run, &corpus, &args.out)?;
    }
    Ok(())
}

/// The settings of the run in the output directory `out`: those it was started with if it is
/// continued, else those of the command line.
fn settings(args: &Args, out: &Path) -> Result<TrainConfig> {
    if args.resume {
        args.resumed_config(&Checkpoint::open(out)?.state.config)
    } else {
        args.train_config()
    }
}

fn load_text(config: &TrainConfig) -> Result<Corpus> {
    let corpus = Corpus::load(config.data.as_deref(), config.context)?;
    let (train, validation) = corpus.sizes();
    println!("Text: {train} bytes to train on, {validation} to validate with");
    Ok(corpus)
}

/// Start or continue the run in `out`; `None` if Ctrl-C stopped it.
fn train(args: &Args, config: TrainConfig, corpus: &Corpus, out: &Path) -> Result<Option<Run>> {
    let mut run = if args.resume && Checkpoint::exists(out) {
        let run = Run::resume(config, corpus, &Checkpoint::open(out)?)?;
        println!("Continuing after step {}", run.state.history.points.len());
        run
    } else {
        Run::start(config, corpus)?
    };
    println!(
        "Model: {} parameters, {} on {}",
        run.model.num_params(),
        run.description(),
        run.state.config.device.name(),
    );

    // Now rather than after the training, when it would be lost.
    let beside = args.timeline.as_deref().and_then(Path::parent);
    for directory in [Some(out), beside].into_iter().flatten() {
        fs::create_dir_all(directory)
            .with_context(|| format!("cannot make the directory {}", directory.display()))?;
    }
    run.train(corpus, out)?;
    write_file(&out.join("loss.csv"), &run.state.history.to_csv())?;
    if let (Some(prefix), Some(trace)) = (&args.timeline, run.trace()) {
        timeline::write(&trace, run.state.config.update_schedule(), prefix)?;
    }
    if !run.finished() {
        println!(
            "Stopped after step {} of {}: the same command with --resume goes on from there",
            run.state.history.points.len(),
            run.state.config.steps
        );
        return Ok(None);
    }
    if run.steps > 0 {
        let seconds = run.elapsed.as_secs_f64();
        let tokens = (run.steps * run.state.config.tokens_per_step()) as f64;
        println!(
            "Trained {} steps in {seconds:.1} s: {:.0} ms and {:.0} tokens/s",
            run.steps,
            1e3 * seconds / run.steps as f64,
            tokens / seconds
        );
    }
    if let Some(scale) = run.loss_scale() {
        println!("{scale}");
    }
    Ok(Some(run))
}

/// Evaluate a finished run, and say where its state lived.
fn report(run: &Run, corpus: &Corpus, out: &Path) -> Result<()> {
    let config = &run.state.config;
    let picture = out.join("loss.svg");
    write_file(
        &picture,
        &plot::loss_curves(&[(&run.description(), &run.state.history)]),
    )?;

    let device = config.device.device()?;
    let model = run.model.valid();
    if let Some(loss) = evaluate::validation_loss(&model, corpus, config, &device)? {
        println!(
            "Validation loss: {loss:.4} nats per byte, perplexity {:.3}",
            loss.exp()
        );
    }
    println!(
        "\nSample:\n{}\n",
        evaluate::sample(&model, config, &device)?
    );

    let description = run.description();
    let memory = run
        .memory
        .as_ref()
        .map(|memory| (memory, description.as_str()));
    println!("{}", table::memory_table(run.model.num_params(), memory));
    println!("Wrote {} and the checkpoint beside it", picture.display());
    Ok(())
}
