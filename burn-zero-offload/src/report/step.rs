use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::json_float;
use crate::optimize::{SimdLevel, StatePrecision};

/// What became of a round.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The optimizer has not been called yet, or found no gradient.
    #[default]
    Pending,
    /// The gradients are in the weights.
    Applied,
    /// Some gradient was not finite: nothing has changed.
    Skipped(Overflow),
}

/// Why a round was skipped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overflow {
    /// The first parameter, in the order of the model, whose gradient is not finite.
    pub path: String,
    /// Values of its gradient that are NaN or infinite.
    pub values: usize,
    /// Parameters with such values.
    pub parameters: usize,
}

impl fmt::Display for Overflow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            path,
            values,
            parameters,
        } = self;
        write!(
            f,
            "{values} values of the gradient of `{path}` are not finite"
        )?;
        match parameters - 1 {
            0 => Ok(()),
            others => write!(f, ", and some of {others} more parameters"),
        }
    }
}

/// A parameter group in one round.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GroupReport {
    /// Parameters that were updated.
    pub updated: usize,
    /// Learning rates they were updated with, each once, in the order of the model.
    pub learning_rates: Vec<f64>,
    /// What its master weights and state are kept in, each kind once.
    pub state_precision: Vec<StatePrecision>,
}

impl GroupReport {
    /// The report of the next round.
    pub(super) fn next(&self) -> Self {
        Self {
            state_precision: self.state_precision.clone(),
            ..Self::default()
        }
    }
}

/// What kept an updated weight from being there when it was needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WaitedFor {
    /// Other parameters were being updated; it had not been its turn.
    Turn,
    /// It was being updated.
    Step,
    /// It was on its way to the device.
    Upload,
}

impl fmt::Display for WaitedFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Turn => "updates before it",
            Self::Step => "its update",
            Self::Upload => "its upload",
        })
    }
}

/// The longest time that the training loop waited for an update.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LongestWait {
    /// Path of the parameter.
    pub path: String,
    /// What it was waiting for when that began.
    pub waited_for: WaitedFor,
    /// How long.
    pub took: Duration,
}

/// What one round did, what it moved, and what it waited for.
///
/// A round is everything between two updates: the backward passes that hand gradients over, and the
/// walk of the optimizer over the parameters. A skipped round is one, too.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// Number of the round, counted from 1. Optimizer records carry it on.
    pub round: u64,
    /// Whether it was applied, and if not why.
    pub outcome: Outcome,
    /// Backward passes whose gradients it summed.
    pub passes: usize,
    /// Parameters with gradients that an earlier round left: they were not part of its `step`.
    pub carried: usize,
    /// The loss scale of its last pass; 1 if the loss was not scaled.
    pub loss_scale: f32,
    /// The loss scale for the next pass that is scaled.
    pub next_loss_scale: f32,
    /// Rounds skipped since the last applied one, this one included.
    pub consecutive_skips: u64,
    /// Rounds skipped in all.
    pub skips: u64,
    /// Number of the last round that was skipped, 0 if none was.
    pub last_overflow: u64,
    /// L2 norm of the gradient of all parameters together, each counted once: after the loss scale
    /// is taken off and means are taken, before clipping. Infinite or NaN if the round was skipped.
    #[serde(with = "json_float")]
    pub grad_norm: f64,
    /// The same after clipping of every kind.
    #[serde(with = "json_float")]
    pub clipped_grad_norm: f64,
    /// The optimizer's own parameters first, then those of each `with_group`.
    pub groups: Vec<GroupReport>,
    /// What master weights and state of the optimizer's own parameters are kept in; `groups` has that of
    /// each.
    pub state_precision: StatePrecision,
    /// Instruction set of the CPU step.
    pub simd: SimdLevel,
    /// Threads of the CPU step.
    pub threads: usize,
    /// Where they run.
    pub placement: String,
    /// Bytes of gradients brought to the host: 2 per half parameter and use. A weight used so often
    /// in one backward that its sum is smaller than its terms is summed on the device and costs 4
    /// (see [`OffloadConfig::in_flight`](crate::OffloadConfig#structfield.in_flight)).
    pub bytes_down: u64,
    /// Transfers that took. Small gradients share them; counters of a few bytes travel with each.
    pub transfers_down: u64,
    /// Bytes of weights sent to the device: 2 per half parameter.
    pub bytes_up: u64,
    /// Transfers that took: one per tile.
    pub transfers_up: u64,
    /// Bytes of split masters that had to be copied before they were changed, because an older clone of the
    /// model or the device still held them.
    pub bytes_copied: u64,
    /// Gradient values that were NaN or infinite when they arrived, in all contributions.
    pub non_finite: u64,
    /// Most bytes of gradients that were on their way at once, sums held on the device included.
    pub peak_in_flight: usize,
    /// The budget for them, in bytes.
    pub in_flight_budget: usize,
    /// Most bytes of pinned memory that one download used; 0 where the device has none.
    pub pinned_down: usize,
    /// Bytes of pinned memory that uploads go through; 0 if not pinned (see `pinning`).
    pub pinned_up: usize,
    /// Whether and why uploads are pinned or not.
    pub pinning: String,
    /// Time threads of backward waited for room in the budget.
    pub blocked_on_budget: Duration,
    /// Time the step waited for gradients still on their way.
    pub blocked_on_download: Duration,
    /// Time the step waited for tiles to be handed to the device.
    pub blocked_on_upload: Duration,
    /// Time the verdict took once all gradients were there.
    pub judging: Duration,
    /// Time the updates took, from the first tile of a parameter to its weights on the device,
    /// `blocked_on_upload` included.
    pub updating: Duration,
    /// Parameters whose update is queued and not done, as of this report: with a schedule that runs updates
    /// behind the training loop, numbers of updates, times and bytes above are not final before this is 0.
    pub pending: usize,
    /// Part of `updating` that was not hidden: time forward passes waited for updated weights.
    pub exposed_in_forward: Duration,
    /// The same in `step`: all of `updating` in the synchronous schedule; otherwise the time that a later
    /// step waited for updates of this round.
    pub exposed_in_step: Duration,
    /// The same where records, `valid`, `flush` and the like looked at parameters.
    pub exposed_elsewhere: Duration,
    /// The longest of these waits.
    pub longest_wait: Option<LongestWait>,
    /// Values checked by the verify mode: elements of the step, and weights read back.
    pub verified: u64,
}

impl StepReport {
    /// Whether the round's gradients are in the weights.
    pub fn applied(&self) -> bool {
        self.outcome == Outcome::Applied
    }

    /// Time that the training loop waited for the updates of the round, or did them itself.
    pub fn exposed(&self) -> Duration {
        self.exposed_in_forward + self.exposed_in_step + self.exposed_elsewhere
    }

    /// Why the round was skipped, if it was.
    pub fn overflow(&self) -> Option<&Overflow> {
        match &self.outcome {
            Outcome::Skipped(overflow) => Some(overflow),
            _ => None,
        }
    }
}

impl fmt::Display for StepReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mb = |bytes: u64| bytes as f64 / 1e6;
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        write!(f, "round {}: ", self.round)?;
        match &self.outcome {
            Outcome::Pending => writeln!(f, "no update yet")?,
            Outcome::Applied => writeln!(f, "applied")?,
            Outcome::Skipped(overflow) => writeln!(f, "skipped, {overflow}")?,
        }
        writeln!(
            f,
            "gradient  norm {:.6}, {:.6} after clipping; {} passes, {} parameters carried over",
            self.grad_norm, self.clipped_grad_norm, self.passes, self.carried
        )?;
        writeln!(
            f,
            "loss scale {}, next {}; skipped {} in a row, {} in all",
            self.loss_scale, self.next_loss_scale, self.consecutive_skips, self.skips
        )?;
        for (index, group) in self.groups.iter().enumerate() {
            let rates = group.learning_rates.iter();
            let rates: Vec<String> = rates.map(|rate| format!("{rate:e}")).collect();
            let rates = match &rates[..] {
                [] => "-".to_string(),
                all => all.join(", "),
            };
            writeln!(
                f,
                "group {index}   {} parameters updated, lr {rates}",
                group.updated
            )?;
        }
        writeln!(
            f,
            "step      verdict {:.2} ms, updates {:.2} ms; {}, {:?}, {}",
            ms(self.judging),
            ms(self.updating),
            self.state_precision,
            self.simd,
            self.placement
        )?;
        let share = self.exposed().as_secs_f64() / self.updating.as_secs_f64().max(1e-9);
        write!(
            f,
            "exposed   {:.2} ms ({:.0} %) of the updates: forward {:.2}, step {:.2}, elsewhere {:.2}",
            ms(self.exposed()),
            100.0 * share,
            ms(self.exposed_in_forward),
            ms(self.exposed_in_step),
            ms(self.exposed_elsewhere)
        )?;
        if let Some(longest) = &self.longest_wait {
            let LongestWait {
                path,
                waited_for,
                took,
            } = longest;
            write!(f, "; longest {:.2} for `{path}`, {waited_for}", ms(*took))?;
        }
        match self.pending {
            0 => writeln!(f)?,
            pending => writeln!(f, "; {pending} parameters still to be updated")?,
        }
        writeln!(
            f,
            "down     {:>10.3} MB in {} transfers, waited {:.2} ms",
            mb(self.bytes_down),
            self.transfers_down,
            ms(self.blocked_on_download)
        )?;
        writeln!(
            f,
            "up       {:>10.3} MB in {} transfers, waited {:.2} ms",
            mb(self.bytes_up),
            self.transfers_up,
            ms(self.blocked_on_upload)
        )?;
        writeln!(
            f,
            "in flight {:>9.3} MB at most, budget {:.3} MB, waited {:.2} ms",
            mb(self.peak_in_flight as u64),
            mb(self.in_flight_budget as u64),
            ms(self.blocked_on_budget)
        )?;
        writeln!(
            f,
            "pinned   {:>10.3} MB down, {:.3} MB up ({})",
            mb(self.pinned_down as u64),
            mb(self.pinned_up as u64),
            self.pinning
        )?;
        if self.verified > 0 {
            writeln!(f, "verified  {} values", self.verified)?;
        }
        write!(f, "non-finite gradient values {}", self.non_finite)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skipped() -> StepReport {
        StepReport {
            round: 7,
            outcome: Outcome::Skipped(Overflow {
                path: "head.weight".into(),
                values: 3,
                parameters: 2,
            }),
            loss_scale: 65536.0,
            next_loss_scale: 32768.0,
            placement: "2 threads".into(),
            updating: Duration::from_millis(4),
            exposed_in_forward: Duration::from_millis(1),
            exposed_in_step: Duration::from_millis(2),
            longest_wait: Some(LongestWait {
                path: "head.bias".into(),
                waited_for: WaitedFor::Upload,
                took: Duration::from_millis(2),
            }),
            pending: 5,
            grad_norm: f64::INFINITY,
            clipped_grad_norm: f64::NAN,
            groups: vec![
                GroupReport {
                    updated: 4,
                    learning_rates: vec![1e-3, 2e-4],
                    state_precision: vec![StatePrecision::SplitMaster],
                },
                GroupReport::default(),
            ],
            ..Default::default()
        }
    }

    #[test]
    fn the_block_says_what_happened_and_why() {
        let text = skipped().to_string();
        for expected in [
            "round 7: skipped, 3 values of the gradient of `head.weight` are not finite, and some of \
             1 more parameters\n",
            "norm inf, NaN after clipping",
            "loss scale 65536, next 32768",
            "group 0   4 parameters updated, lr 1e-3, 2e-4\n",
            "group 1   0 parameters updated, lr -\n",
            "fp32, Scalar, 2 threads",
            "exposed   3.00 ms (75 %) of the updates: forward 1.00, step 2.00, elsewhere 0.00; longest \
             2.00 for `head.bias`, its upload; 5 parameters still to be updated\n",
        ] {
            assert!(text.contains(expected), "{expected:?} is not in\n{text}");
        }
    }

    /// JSON has no numbers that are not finite.
    #[test]
    fn norms_that_are_not_finite_survive_json() {
        let report = skipped();
        let json = serde_json::to_string(&report).unwrap();
        let back: StepReport = serde_json::from_str(&json).unwrap();
        assert_eq!(back.grad_norm, f64::INFINITY);
        assert!(back.clipped_grad_norm.is_nan());
        assert_eq!(back.outcome, report.outcome);
        let finite = StepReport {
            grad_norm: 5.25,
            ..Default::default()
        };
        let json = serde_json::to_string(&finite).unwrap();
        assert_eq!(serde_json::from_str::<StepReport>(&json).unwrap(), finite);
    }
}
