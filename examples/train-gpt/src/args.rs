//! The command line, and how settings come together: defaults, a JSON file and flags, in rising order
//! of precedence.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use serde::Serialize;
use serde_json::Value;

use crate::config::{Precision, Schedule, State, TrainConfig};
use crate::device::Backend;

/// Train a small GPT on text, with ZeRO-Offload for Burn.
///
/// Without any flag: a byte-level model on the Markdown files of the local cargo registry, with
/// bf16 weights on the device and fp32 master weights and Adam moments on the host.
#[derive(Parser, Debug)]
#[command(name = "train-gpt", after_help = format!("Defaults: {}", TrainConfig::new()))]
pub struct Args {
    #[command(flatten)]
    pub overrides: Overrides,
    /// JSON file with any of the settings, named as the flags are (`_` for `-`); flags win
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Train with plain Burn AdamW in f32, for comparison
    #[arg(long)]
    pub no_offload: bool,
    /// Directory for the checkpoint, the loss curve and the losses
    #[arg(long, value_name = "DIR", default_value = "train-gpt-out")]
    pub out: PathBuf,
    /// Continue from the checkpoint in the output directory
    #[arg(long, conflicts_with = "config")]
    pub resume: bool,
    /// Train three times, with f32, bf16 and f16 device weights, and plot the loss curves together
    #[arg(long, conflicts_with_all = ["dtype", "no_offload"])]
    pub compare: bool,
    /// Train five times in bf16, with every way to keep the state on the host, and plot the loss curves
    /// together
    #[arg(long, conflicts_with_all = ["dtype", "no_offload", "state", "compare"])]
    pub compare_states: bool,
    /// Train four times, with every schedule of the updates and with corrected gradients, and plot the loss
    /// curves together
    #[arg(long, conflicts_with_all = [
        "no_offload", "schedule", "delay_warmup", "delay_compensation", "compare", "compare_states"
    ])]
    pub compare_schedules: bool,
    /// Write PREFIX.json, a timeline for Perfetto, and PREFIX.svg, a picture of three steps of it
    #[arg(long, value_name = "PREFIX", conflicts_with_all = [
        "no_offload", "compare", "compare_states", "compare_schedules"
    ])]
    pub timeline: Option<PathBuf>,
}

/// The settings as flags. Serialized, it holds those that were given, by their name in
/// [`TrainConfig`].
#[derive(clap::Args, Debug, Default, Serialize)]
pub struct Overrides {
    /// Transformer blocks
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    layers: Option<usize>,
    /// Width of the residual stream; a multiple of the heads
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    width: Option<usize>,
    /// Attention heads
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    heads: Option<usize>,
    /// Tokens the model sees at once
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    context: Option<usize>,
    /// Sequences in a micro-batch
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    batch: Option<usize>,
    /// Micro-batches accumulated for one step
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    accumulation: Option<usize>,
    /// Optimizer steps
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<usize>,
    /// Steps over which the learning rate rises; a tenth of all if left out
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    warmup: Option<usize>,
    /// Highest learning rate
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    lr: Option<f64>,
    /// Weight decay of the matrices
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    weight_decay: Option<f32>,
    /// Largest norm of the gradients of all parameters together; 0 for no limit
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_grad_norm: Option<f32>,
    /// Seed of the weights, of the data order and of the sample
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    /// Dtype of the weights on the device
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    dtype: Option<Precision>,
    /// What master weights and Adam's moments are kept in on the host; exact if left out
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<State>,
    /// When updates run
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    schedule: Option<Schedule>,
    /// With the delayed schedule: number of the first step whose update is delayed; 40 if left out
    #[arg(long, value_name = "STEP")]
    #[serde(skip_serializing_if = "Option::is_none")]
    delay_warmup: Option<u64>,
    /// With the delayed schedule: how much gradients are corrected for the update they miss; not at all if
    /// left out
    #[arg(long, value_name = "LAMBDA")]
    #[serde(skip_serializing_if = "Option::is_none")]
    delay_compensation: Option<f32>,
    /// Where to train; others than flex need the Cargo feature of the same name
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<Backend>,
    /// File or directory of text to train on
    #[arg(long, value_name = "PATH")]
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<PathBuf>,
}

impl Args {
    /// The settings of a new run.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read, names an unknown setting, or if a value is out of range.
    pub fn train_config(&self) -> Result<TrainConfig> {
        let mut settings = serde_json::to_value(TrainConfig::new())?;
        if let Some(path) = &self.config {
            let in_file = || format!("in the settings file {}", path.display());
            merge(&mut settings, read_json(path)?).with_context(in_file)?;
            serde_json::from_value::<TrainConfig>(settings.clone()).with_context(in_file)?;
        }
        self.apply_flags(settings)
    }

    /// The settings of a run that continues one with settings `saved`.
    ///
    /// # Errors
    ///
    /// Fails if a flag contradicts `saved`; only the device may change.
    pub fn resumed_config(&self, saved: &TrainConfig) -> Result<TrainConfig> {
        let config = self.apply_flags(serde_json::to_value(saved)?)?;
        ensure!(
            config == saved.clone().with_device(config.device),
            "--resume continues a run with the settings it was started with, of which only \
             --device can change; these are {saved}"
        );
        Ok(config)
    }

    fn apply_flags(&self, mut settings: Value) -> Result<TrainConfig> {
        merge(&mut settings, serde_json::to_value(&self.overrides)?)?;
        let mut config: TrainConfig = serde_json::from_value(settings)?;
        config.offload &= !self.no_offload;
        config.validate()?;
        ensure!(
            config.offload || self.timeline.is_none(),
            "without offload there is no timeline: leave out --timeline"
        );
        Ok(config)
    }
}

fn read_json(path: &Path) -> Result<Value> {
    let text = fs::read_to_string(path)
        .with_context(|| format!("cannot read the settings file {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is not valid JSON", path.display()))
}

/// Replace the entries of the object `base` that `changes` has.
fn merge(base: &mut Value, changes: Value) -> Result<()> {
    let (Some(base), Value::Object(changes)) = (base.as_object_mut(), changes) else {
        bail!("settings must be a JSON object");
    };
    for (key, value) in changes {
        match base.get_mut(&key) {
            Some(slot) => *slot = value,
            None => bail!("there is no setting named {key:?}"),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(args: &[&str]) -> Result<TrainConfig> {
        Args::try_parse_from([&["train-gpt"], args].concat())?.train_config()
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("settings.json");
        fs::write(&file, r#"{"layers": 2, "steps": 50, "dtype": "f16"}"#).unwrap();

        let config = config(&["--config", file.to_str().unwrap(), "--steps", "60"]).unwrap();
        let expected = TrainConfig::new()
            .with_layers(2)
            .with_steps(60)
            .with_dtype(Precision::F16);
        assert_eq!(config, expected);
    }

    #[test]
    fn unknown_settings_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("settings.json");
        fs::write(&file, r#"{"depth": 2}"#).unwrap();
        let error = config(&["--config", file.to_str().unwrap()]).unwrap_err();
        assert!(format!("{error:#}").contains("depth"), "{error:#}");
    }

    #[test]
    fn bad_values_are_refused() {
        for (args, message) in [
            (["--width", "130"], "heads must divide width"),
            (["--layers", "0"], "layers must be at least 1"),
            (["--warmup", "500"], "warmup must be shorter"),
            (["--lr", "0"], "lr must be greater than 0"),
            (
                ["--max-grad-norm=-1", "--steps=9"],
                "max_grad_norm must be a number",
            ),
            (["--weight-decay", "1e30"], "weight_decay"),
        ] {
            let error = config(&args).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
        let error = config(&["--no-offload", "--dtype", "bf16"])
            .unwrap_err()
            .to_string();
        assert!(error.contains("trains in f32"), "{error}");
        let error = config(&["--no-offload", "--state", "int8"]).unwrap_err();
        assert!(
            error.to_string().contains("no state on the host"),
            "{error}"
        );
    }

    #[test]
    fn a_schedule_has_its_own_settings() {
        let delayed = |args: &[&str]| config(&[&["--schedule", "delayed"], args].concat());
        let schedule = |config: Result<TrainConfig>| config.unwrap().update_schedule();
        use burn_zero_offload::Schedule::{Delayed, ForwardOverlapped, Synchronous};
        assert_eq!(schedule(config(&[])), Synchronous);
        assert_eq!(
            schedule(config(&["--schedule", "overlapped"])),
            ForwardOverlapped
        );
        assert_eq!(schedule(delayed(&[])), Delayed { warmup: 40 });
        let given = ["--delay-warmup", "7", "--delay-compensation", "0.5"];
        let config = delayed(&given).unwrap();
        assert_eq!(config.update_schedule(), Delayed { warmup: 7 });
        assert_eq!(config.delay_compensation, Some(0.5));
    }

    #[test]
    fn settings_of_another_schedule_are_refused() {
        for (args, message) in [
            (
                "--delay-warmup 7",
                "delay_warmup is for --schedule delayed alone",
            ),
            (
                "--schedule overlapped --delay-compensation 1",
                "delay_compensation is for --schedule delayed alone",
            ),
            (
                "--schedule delayed --delay-warmup 0",
                "0 is not one of 500 steps",
            ),
            ("--schedule delayed --steps 30", "40 is not one of 30 steps"),
            (
                "--schedule delayed --delay-compensation=-1",
                "delay_compensation must be a number of at least 0",
            ),
            (
                "--schedule delayed --no-offload",
                "without offload updates are synchronous",
            ),
            ("--timeline t --no-offload", "cannot be used with"),
            ("--timeline t --compare", "cannot be used with"),
            (
                "--compare-schedules --delay-warmup 7",
                "cannot be used with",
            ),
            (
                "--compare-schedules --compare-states",
                "cannot be used with",
            ),
        ] {
            let args: Vec<&str> = args.split(' ').collect();
            let error = config(&args).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn a_timeline_needs_offload_also_if_a_file_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("settings.json");
        fs::write(&file, r#"{"offload": false}"#).unwrap();
        let error = config(&["--config", file.to_str().unwrap(), "--timeline", "t"]).unwrap_err();
        assert!(error.to_string().contains("no timeline"), "{error}");
    }

    #[test]
    fn only_the_device_may_change_on_resume() {
        let saved = TrainConfig::new().with_steps(60);
        let resumed = |args: &[&str]| {
            let args = [&["train-gpt", "--resume"], args].concat();
            Args::try_parse_from(args).unwrap().resumed_config(&saved)
        };
        assert_eq!(resumed(&[]).unwrap(), saved);
        assert_eq!(
            resumed(&["--device", "cuda"]).unwrap().device,
            Backend::Cuda
        );
        assert!(resumed(&["--layers", "2"]).is_err());
    }
}
