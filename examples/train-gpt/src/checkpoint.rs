//! Checkpoints: what a run needs to go on as if it had not stopped.
//!
//! The batches are a function of the seed and of the step, so the position in the data needs no
//! more than the number of steps taken, which is the number of losses recorded.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use burn::module::Module;
use burn::optim::lr_scheduler::LrSchedulerRecord;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::store::ModuleRecord;
use serde::{Deserialize, Serialize};

use crate::config::TrainConfig;
use crate::history::History;
use crate::model::Gpt;

const DIRECTORY: &str = "checkpoint";
const MODEL: &str = "model.bpk";
const OPTIMIZER: &str = "optimizer.bpk";
const SCHEDULER: &str = "scheduler.bpk";
const STATE: &str = "state.json";
const LOSSES: &str = "loss.csv";

/// The state of a run that is not in a record of Burn.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct State {
    /// The settings the run was started with.
    pub config: TrainConfig,
    /// Tells whether the text is still the one the run was started on.
    pub text: u64,
    /// What every step gave; kept as a table beside the other files.
    #[serde(skip)]
    pub history: History,
}

/// A checkpoint on disk.
pub struct Checkpoint {
    directory: PathBuf,
    /// What is not in a record.
    pub state: State,
}

impl Checkpoint {
    /// Save a run into the output directory `out`, in place of an earlier checkpoint.
    ///
    /// All files are written to a new directory that then takes the place of the old one, so that a
    /// run that is killed here leaves a whole checkpoint behind.
    ///
    /// # Errors
    ///
    /// Fails if a file cannot be written.
    pub fn save(
        out: &Path,
        model: &Gpt,
        optim: &ModuleOptimizer,
        scheduler: &ModuleLrScheduler,
        state: &State,
    ) -> Result<()> {
        let write = || -> Result<()> {
            let new = out.join(format!("{DIRECTORY}.tmp"));
            remove_directory(&new)?;
            fs::create_dir_all(&new)?;
            // The record of an offloaded model holds the fp32 master weights.
            model.clone().into_record().save(new.join(MODEL))?;
            optim.to_record().save(new.join(OPTIMIZER))?;
            scheduler.to_record().save(new.join(SCHEDULER))?;
            fs::write(new.join(STATE), serde_json::to_string_pretty(state)?)?;
            fs::write(new.join(LOSSES), state.history.to_csv())?;

            let (current, old) = directories(out);
            if current.exists() {
                remove_directory(&old)?;
                fs::rename(&current, &old)?;
            }
            fs::rename(&new, &current)?;
            remove_directory(&old)?;
            Ok(())
        };
        write().with_context(|| format!("cannot save the checkpoint in {}", out.display()))
    }

    /// Whether the output directory `out` holds a checkpoint.
    pub fn exists(out: &Path) -> bool {
        let (current, old) = directories(out);
        current.exists() || old.exists()
    }

    /// Open the checkpoint in the output directory `out`.
    ///
    /// # Errors
    ///
    /// Fails if there is none, or if it cannot be read.
    pub fn open(out: &Path) -> Result<Self> {
        ensure!(
            Self::exists(out),
            "there is no checkpoint to continue from in {}",
            out.display()
        );
        let (current, old) = directories(out);
        // Without the current one, a run was killed between the two renames of `save`.
        let directory = if current.exists() { current } else { old };

        let read = || -> Result<State> {
            let state = fs::read_to_string(directory.join(STATE))?;
            let mut state: State = serde_json::from_str(&state)?;
            state.history = History::from_csv(&fs::read_to_string(directory.join(LOSSES))?)?;
            Ok(state)
        };
        let state = read().with_context(|| unreadable(&directory))?;
        Ok(Self { directory, state })
    }

    /// Load the saved run into a freshly built one of the same settings.
    ///
    /// # Errors
    ///
    /// Fails if a record cannot be read or does not fit.
    pub fn load(
        &self,
        model: Gpt,
        optim: ModuleOptimizer,
        scheduler: ModuleLrScheduler,
    ) -> Result<(Gpt, ModuleOptimizer, ModuleLrScheduler)> {
        let load = || -> Result<_> {
            let file = |name| self.directory.join(name);
            let model = model.try_load_record(ModuleRecord::load(file(MODEL))?)?;
            let optim = optim.load_record(OptimizerRecord::load(file(OPTIMIZER))?);
            let scheduler = scheduler.load_record(LrSchedulerRecord::load(file(SCHEDULER))?);
            Ok((model, optim, scheduler))
        };
        load().with_context(|| unreadable(&self.directory))
    }
}

/// Write a file in one piece: whoever reads it sees the old content or the new.
///
/// # Errors
///
/// Fails if the file cannot be written.
pub fn write_file(path: &Path, content: &str) -> Result<()> {
    let write = || -> io::Result<()> {
        let temporary = path.with_added_extension("tmp");
        fs::write(&temporary, content)?;
        fs::rename(temporary, path)
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

fn directories(out: &Path) -> (PathBuf, PathBuf) {
    (out.join(DIRECTORY), out.join(format!("{DIRECTORY}.old")))
}

fn unreadable(directory: &Path) -> String {
    format!("cannot read the checkpoint {}", directory.display())
}

fn remove_directory(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
