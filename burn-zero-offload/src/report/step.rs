use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What one round moved, and what it waited for.
///
/// A round is everything between two updates: the backward passes that hand gradients over, and the
/// walk of the optimizer over the parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepReport {
    /// Number of the round, counted from 1.
    pub round: u64,
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
    /// Gradient values that were NaN or infinite.
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
}

impl fmt::Display for StepReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mb = |bytes: u64| bytes as f64 / 1e6;
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        writeln!(f, "round {}", self.round)?;
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
        write!(f, "non-finite gradient values {}", self.non_finite)
    }
}
