//! What master weights and state are kept in.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{GROUP, Precision};

/// What master weights and optimizer state are kept in on the host, per parameter.
///
/// The update itself is computed in `f32` whatever they are kept in. Bytes are those of Adam: host memory
/// with one gradient in half precision, and what a step reads and writes.
///
/// | | memory | traffic | loses |
/// |---|---|---|---|
/// | `Full` | 14 B + upload buffers | 28 B | nothing |
/// | `SplitMaster` | 14 B | 26 B | nothing |
/// | `Bf16Moments` | 10 B | 18 B | moments: 8 of 24 bits of precision are kept |
/// | `Int8Moments` | 8.1 B | 14.25 B | moments: a code of 255 in a block of 32 |
/// | `Int8Master24` | 7.1 B | 12.25 B | the same, and 8 of 32 bits of the master |
///
/// What is rounded is rounded stochastically, up or down with the probability that makes the mean
/// right: a second moment that decays by 0.1 % a step would stay where it is if it were rounded to nearest.
/// The random bits come from a generator keyed by [`OffloadConfig::seed`](crate::OffloadConfig#structfield.seed),
/// parameter, number of the update and element, so results do not depend on threads or on stopping and
/// resuming.
///
/// Only rules that bear it can be rounded (see [`Rule::LOSSY`](super::Rule::LOSSY)): Adam, AdamW, Lion, SGD and
/// RMSProp without centering. AMSGrad, AdaGrad and centered RMSProp, whose state only grows or has to fit
/// each other, are refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StatePrecision {
    /// `f32` for master weights and state. The image for the device is made in the step.
    ///
    /// The default where the device's weights are f16 or f32.
    #[default]
    Full,
    /// `f32` for all, where the device's bf16 weight is the upper half of the master and the host adds the
    /// lower 16 bits:
    ///
    /// ```text
    /// upper = (b + 2^15) >> 16,  lower = b mod 2^16,  b = (upper << 16) + sext(lower)
    /// ```
    ///
    /// Every `f32` comes back exactly. The upper half is the buffer that uploads are sent from. The device's
    /// weight is the nearest bf16 as with `Full`, but ties go away from zero rather than to even. The
    /// default where the device's weights are bf16; others have no such half. Source: Split-SGD-BF16 of
    /// Intel's Extension for PyTorch, here with the upper half rounded instead of cut off.
    SplitMaster,
    /// State in bf16, stochastically rounded (Gupta et al., arXiv 1502.02551); masters as in
    /// `SplitMaster`, or in `f32` where the device's weights are not bf16.
    ///
    /// Each rounding is off by less than 2^-7 of the value, and by nothing in the mean. Not for runs that
    /// have to repeat an `f32` run closely.
    Bf16Moments,
    /// State in 8 bits with a bf16 scale for 32 values (block-wise quantization: Dettmers et al., arXiv
    /// 2110.02861; companding: FlashOptim, arXiv 2602.23349), masters as in `Bf16Moments`:
    ///
    /// ```text
    /// signed        x = m / s    code = 127 * 2 x / (1 + |x|)
    /// not negative               code = 255 * sqrt(v) / s
    /// ```
    ///
    /// `s` is the largest value of the block, or root. A rounding of `m` is off by at most
    /// `(s + |m|)^2 / (254 s)` and a few 10^-4 of `m`, one of `sqrt(v)` by `s / 255`; a root that is not
    /// zero is at least `s / 255`. Not where gradients of neighbouring weights differ by more than a
    /// factor of some hundreds and the small ones matter, as in embeddings of rare tokens: give those
    /// parameters `Bf16Moments`.
    Int8Moments,
    /// State as in `Int8Moments`, masters of 24 bits: the device's bf16 weight and 8 bits more,
    /// stochastically rounded.
    ///
    /// Each update of a weight is rounded by less than 2^-15 of the weight, by nothing in the mean. Not for
    /// learning rates so small that updates are far below that: they arrive only in the mean. Wants weights
    /// in bf16.
    Int8Master24,
}

/// How master weights are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MasterCodec {
    F32,
    /// 16 bits below the bf16 image.
    Split16,
    /// 8 bits below it.
    Split8,
}

/// How a value of a rule's state is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StateCodec {
    F32,
    Bf16,
    Int8,
}

impl StatePrecision {
    /// Every way.
    pub const ALL: [Self; 5] = [
        Self::Full,
        Self::SplitMaster,
        Self::Bf16Moments,
        Self::Int8Moments,
        Self::Int8Master24,
    ];

    /// What is taken for weights in `precision` on the device unless the user says otherwise.
    pub fn default_for(precision: Precision) -> Self {
        match precision {
            Precision::Bf16 => Self::SplitMaster,
            Precision::F16 | Precision::F32 => Self::Full,
        }
    }

    /// Whether it is of use for weights in f16, which have no part of the master in them. Single weights in
    /// f32 among others in bf16 have their masters whole.
    pub(crate) fn needs_bf16(self) -> bool {
        matches!(self, Self::SplitMaster | Self::Int8Master24)
    }

    /// What it comes to for weights in `precision` on the device: in f32 they are the masters, and there is
    /// nothing to split.
    pub(crate) fn of_weights(self, precision: Precision) -> Self {
        match (self, precision) {
            (Self::SplitMaster, Precision::F32) => Self::Full,
            (Self::Int8Master24, Precision::F32) => Self::Int8Moments,
            (kept, _) => kept,
        }
    }

    /// Whether state is rounded.
    pub(crate) fn is_lossy(self) -> bool {
        self.state() != StateCodec::F32
    }

    /// Elements that pieces of a parameter have to begin at a multiple of.
    pub(crate) fn granularity(self) -> usize {
        match self.state() {
            StateCodec::F32 | StateCodec::Bf16 => 1,
            StateCodec::Int8 => GROUP,
        }
    }

    /// How masters of weights in `precision` are kept.
    pub(crate) fn master(self, precision: Precision) -> MasterCodec {
        match (self, precision) {
            (Self::Full, _) | (_, Precision::F16 | Precision::F32) => MasterCodec::F32,
            (Self::Int8Master24, Precision::Bf16) => MasterCodec::Split8,
            (_, Precision::Bf16) => MasterCodec::Split16,
        }
    }

    /// How state is kept.
    pub(crate) fn state(self) -> StateCodec {
        match self {
            Self::Full | Self::SplitMaster => StateCodec::F32,
            Self::Bf16Moments => StateCodec::Bf16,
            Self::Int8Moments | Self::Int8Master24 => StateCodec::Int8,
        }
    }
}

impl fmt::Display for StatePrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "fp32",
            Self::SplitMaster => "fp32, split master",
            Self::Bf16Moments => "bf16 moments",
            Self::Int8Moments => "8-bit moments",
            Self::Int8Master24 => "8-bit moments, 24-bit master",
        })
    }
}
