use std::fmt;

use serde::{Deserialize, Serialize};

use super::StatePrecision;

/// Where the model state of the offloaded parameters lives, in bytes.
///
/// Frozen parameters are not in it: they cost no host memory and keep their place on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReport {
    /// Offloaded parameters, in elements.
    pub parameters: usize,
    /// Weights on the device.
    pub device_weights: usize,
    /// Master weights on the host. Of split ones the upper half, 2 bytes, is the buffer that uploads are
    /// sent from; on Flex the model's own weights are that buffer.
    pub host_master: usize,
    /// Optimizer state on the host (Adam's moments, for example), padding to cache lines included.
    pub host_moments: usize,
    /// What master weights and state of the optimizer's own parameters are kept in.
    pub state_precision: StatePrecision,
    /// Gradients of the current round on the host, now.
    pub host_gradients: usize,
    /// Memory kept for gradients on the host, whether a round has filled it or not: 2 bytes per half
    /// parameter, 4 where a round adds several passes.
    pub host_gradient_buffers: usize,
    /// Most bytes of gradients that the device holds on their way to the host, one more gradient
    /// not counted.
    pub in_flight_budget: usize,
    /// Pinned host memory that uploads go through, split masters not counted.
    pub pinned: usize,
    /// Part of `host_master` that is pinned.
    pub pinned_masters: usize,
    /// What only a delayed schedule needs, now: updated weights that wait for the next step, and what their
    /// update added, where gradients are corrected for it.
    pub host_waiting: usize,
}

impl MemoryReport {
    /// Everything on the host.
    pub fn host(&self) -> usize {
        let gradients = self.host_gradient_buffers;
        self.host_master + self.host_moments + gradients + self.pinned + self.host_waiting
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |name: &str, bytes: usize| {
            let each = bytes as f64 / self.parameters.max(1) as f64;
            writeln!(
                f,
                "{name:<24} {:>12.3} MB {each:>8.2} B/param",
                bytes as f64 / 1e6
            )
        };
        row("device: weights", self.device_weights)?;
        row("device: in flight, most", self.in_flight_budget)?;
        row("host: master weights", self.host_master)?;
        row("host: optimizer state", self.host_moments)?;
        row("host: gradient buffers", self.host_gradient_buffers)?;
        row("host: pinned besides", self.pinned)?;
        row("host: pinned masters", self.pinned_masters)?;
        if self.host_waiting > 0 {
            row("host: delayed updates", self.host_waiting)?;
        }
        write!(
            f,
            "offloaded parameters     {:>12}, {} state",
            self.parameters, self.state_precision
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_prints_bytes_per_parameter() {
        let report = MemoryReport {
            parameters: 1_000_000,
            device_weights: 2_000_000,
            host_master: 4_000_000,
            host_moments: 8_000_000,
            state_precision: StatePrecision::Full,
            host_gradients: 0,
            host_gradient_buffers: 2_000_000,
            in_flight_budget: 4_000_000,
            pinned: 500_000,
            pinned_masters: 0,
            host_waiting: 1_000_000,
        };
        assert_eq!(report.host(), 15_500_000);
        let text = report.to_string();
        assert!(
            text.contains("2.00 B/param") && text.contains("8.000 MB"),
            "{text}"
        );
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<MemoryReport>(&json).unwrap(), report);
    }
}
