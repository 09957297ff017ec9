use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A lane of the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Lane {
    /// The thread that enqueues forward and backward, and the walk of the optimizer.
    Compute,
    /// What was seen of the device: it finished a gradient.
    Device,
    /// Gradients on their way to the host.
    Download,
    /// The CPU step and the verdict before it.
    Step,
    /// Weights on their way to the device.
    Upload,
    /// A thread of training waited.
    Wait,
}

impl Lane {
    /// All lanes, in the order in which they are drawn.
    pub const ALL: [Self; 6] = [
        Self::Compute,
        Self::Device,
        Self::Download,
        Self::Step,
        Self::Upload,
        Self::Wait,
    ];

    /// The lane in words.
    pub fn label(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Device => "device",
            Self::Download => "download",
            Self::Step => "CPU step",
            Self::Upload => "upload",
            Self::Wait => "waits",
        }
    }
}

/// What a span is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[repr(u8)]
pub enum Work {
    /// Forward was enqueued.
    Forward,
    /// Backward was enqueued.
    Backward,
    /// `optimizer.step` walked over the parameters.
    Walk,
    /// The device finished the gradients up to this one.
    Gradient,
    /// A gradient was brought to the host.
    Download,
    /// The gradients of the round were judged: norms, overflow, loss scale.
    Verdict,
    /// The CPU updated a parameter.
    Step,
    /// Weights were sent to the device.
    Upload,
    /// Forward waited for the weights of a parameter.
    WaitForward,
    /// `optimizer.step` waited for the update of an earlier round.
    WaitStep,
    /// The verdict waited for gradients still on their way.
    WaitVerdict,
    /// Backward waited for room in the budget for gradients on their way.
    WaitBudget,
    /// A flush, a record or another look at the model waited for updates.
    WaitFlush,
}

impl Work {
    /// The work in words.
    pub fn label(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Walk => "optimizer.step",
            Self::Gradient => "device finished gradient",
            Self::Download => "download",
            Self::Verdict => "verdict",
            Self::Step => "CPU step",
            Self::Upload => "upload",
            Self::WaitForward => "forward waits for weights",
            Self::WaitStep => "optimizer.step waits for the CPU step",
            Self::WaitVerdict => "verdict waits for downloads",
            Self::WaitBudget => "backward waits for room in the budget",
            Self::WaitFlush => "flush or record waits for updates",
        }
    }

    /// The lane it is in.
    pub fn lane(self) -> Lane {
        match self {
            Self::Forward | Self::Backward | Self::Walk => Lane::Compute,
            Self::Gradient => Lane::Device,
            Self::Download => Lane::Download,
            Self::Verdict | Self::Step => Lane::Step,
            Self::Upload => Lane::Upload,
            Self::WaitForward
            | Self::WaitStep
            | Self::WaitVerdict
            | Self::WaitBudget
            | Self::WaitFlush => Lane::Wait,
        }
    }
}

/// One span of the timeline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// What it is.
    pub work: Work,
    /// The round it belongs to, counted from 1.
    pub round: u64,
    /// Path of the parameter, if it is about one.
    pub parameter: Option<String>,
    /// When it began, since the engine was built.
    pub start: Duration,
    /// How long it took.
    pub took: Duration,
}

impl Span {
    /// When it ended, since the engine was built.
    pub fn end(&self) -> Duration {
        self.start + self.took
    }

    /// The parameter, or what it is if it is about none.
    pub(super) fn name(&self) -> &str {
        self.parameter.as_deref().unwrap_or(self.work.label())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_named_in_words_and_has_a_lane() {
        assert_eq!(Work::WaitForward.label(), "forward waits for weights");
        assert_eq!(Work::WaitForward.lane(), Lane::Wait);
        assert_eq!(Work::Walk.lane(), Lane::Compute);
        assert_eq!(Work::Verdict.lane(), Lane::Step);
        assert_eq!(Lane::Wait as usize, 5);
        assert!(Lane::ALL.is_sorted());
    }
}
