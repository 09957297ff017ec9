//! What an offloaded model does, on burn-train's dashboard.

use std::sync::Arc;

use burn::tensor::TensorReadError;
use burn::train::metric::state::{FormatOptions, NumericMetricState};
use burn::train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};

use crate::optimizer::Offload;
use crate::report::StepReport;

/// A number of the [`StepReport`] as a metric of burn-train.
///
/// Metrics are read as the dashboard works through its events, so a value may be one of a round or two
/// later than the batch it is shown with.
///
/// ```text
/// let training = SupervisedTraining::new(folder, train, valid)
///     .metric_train_numeric(OffloadMetric::loss_scale(&offload))
///     .metric_train_numeric(OffloadMetric::grad_norm(&offload))
///     .metric_train_numeric(OffloadMetric::skipped_steps(&offload));
/// ```
#[derive(Clone)]
pub struct OffloadMetric {
    name: MetricName,
    offload: Offload,
    value: fn(&StepReport) -> f64,
    precision: usize,
    state: NumericMetricState,
}

impl OffloadMetric {
    fn new(offload: &Offload, name: &str, value: fn(&StepReport) -> f64, precision: usize) -> Self {
        Self {
            name: Arc::new(name.to_string()),
            offload: offload.clone(),
            value,
            precision,
            state: NumericMetricState::new(),
        }
    }

    /// The loss scale of the next backward pass.
    pub fn loss_scale(offload: &Offload) -> Self {
        let value = |report: &StepReport| report.next_loss_scale.into();
        Self::new(offload, "Loss Scale", value, 0)
    }

    /// The norm of the gradients of all parameters, before clipping.
    pub fn grad_norm(offload: &Offload) -> Self {
        Self::new(offload, "Gradient Norm", |report| report.grad_norm, 4)
    }

    /// Rounds that were skipped so far because gradients were not finite.
    pub fn skipped_steps(offload: &Offload) -> Self {
        let value = |report: &StepReport| report.skips as f64;
        Self::new(offload, "Skipped Steps", value, 0)
    }

    fn format(&self) -> FormatOptions {
        FormatOptions::new(self.name()).precision(self.precision)
    }
}

impl Metric for OffloadMetric {
    type Input = ();

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes {
            unit: None,
            higher_is_better: false,
        }
        .into()
    }

    fn update(
        &mut self,
        _item: &(),
        _metadata: &MetricMetadata,
    ) -> Result<SerializedEntry, TensorReadError> {
        let value = (self.value)(&self.offload.report());
        // The norm of a skipped round is not finite: one would spoil the mean of the epoch.
        if value.is_finite() {
            self.state.update(value, 1);
        }
        Ok(self.state.compute_update(self.format()))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(self.state.compute_final(self.format()))
    }

    fn clear(&mut self) {
        self.state.reset();
    }
}

impl Numeric for OffloadMetric {
    fn value(&self) -> Option<NumericEntry> {
        Some(self.state.current_value())
    }

    fn running_value(&self) -> Option<NumericEntry> {
        Some(self.state.running_value())
    }

    fn final_value(&self) -> NumericEntry {
        self.state.final_value()
    }
}
