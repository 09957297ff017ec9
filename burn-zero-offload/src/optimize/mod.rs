//! Station 4: the CPU step. Gradient in, updated master weights, moments and half weights out.
//!
//! Knows no Burn type: slices of memory, a gradient as it came from the device, a rule. Everything
//! that changes a number lives here, and each fast path has its slow twin in [`oracle`].

mod codec;
mod gradient;
mod image;
mod loss_scale;
mod norm;
pub mod oracle;
mod rule;
pub mod rules;
mod scaling;
mod simd;
mod state_precision;
mod step;
mod tiles;
mod verdict;

pub(crate) use codec::{GROUP, Use, decode_slice, join8_slice, join16_slice, scales_for};
pub use codec::{MasterMut, MomentMut, Noise};
pub use gradient::GradientView;
pub use image::{DeviceImage, ImageMut, Precision};
pub(crate) use loss_scale::{LossScale, LossScaler, ScalerState, is_power_of_two};
pub(crate) use norm::sum_of_squares;
pub use rule::{HostRule, Rule, StateKind, Update};
pub(crate) use scaling::clip_coefficient;
pub use scaling::{GradientClip, GradientScaling};
pub use simd::{SimdLevel, UnsupportedSimd};
pub use state_precision::StatePrecision;
pub(crate) use state_precision::{MasterCodec, StateCodec};
pub use step::{StateMut, TileStep, Work};
pub use tiles::{TILE, TilePlan};
pub(crate) use verdict::{Judgement, Verdict};
