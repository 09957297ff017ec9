//! Station 4: the CPU step. Gradient in, updated master weights, moments and half weights out.
//!
//! Knows no Burn type: slices of `f32`, a gradient as it came from the device, a rule. Everything
//! that changes a number lives here, and each fast path has its slow twin in [`oracle`].

mod gradient;
mod image;
mod loss_scale;
mod norm;
pub mod oracle;
mod rule;
pub mod rules;
mod scaling;
mod simd;
mod step;
mod tiles;
mod verdict;

pub use gradient::GradientView;
pub use image::{DeviceImage, ImageMut, Precision};
pub(crate) use loss_scale::{LossScale, LossScaler, ScalerState, is_power_of_two};
pub(crate) use norm::sum_of_squares;
pub use rule::{HostRule, Rule, Update};
pub(crate) use scaling::clip_coefficient;
pub use scaling::{GradientClip, GradientScaling};
pub use simd::{SimdLevel, UnsupportedSimd};
pub use step::{StateMut, TileStep};
pub use tiles::{TILE, TilePlan};
pub(crate) use verdict::{Judgement, Verdict};
