//! Station 4: the CPU step. Gradient in, updated master weights, moments and half weights out.
//!
//! Knows no Burn type: slices of `f32`, a gradient as it came from the device, a rule. Everything
//! that changes a number lives here, and each fast path has its slow twin in [`oracle`].

mod gradient;
mod image;
mod norm;
/// The update written as the formula, one element at a time: the reference of every fast path.
pub mod oracle;
mod rule;
mod simd;
mod step;
mod tiles;

pub use gradient::GradientView;
pub use image::{DeviceImage, ImageMut, Precision};
pub(crate) use norm::l2_norm;
pub use rule::{Adam, GradientClip, StepScalars, WeightDecay};
pub use simd::{SimdLevel, UnsupportedSimd};
pub use step::{Moments, TileStep};
pub use tiles::{TILE, TilePlan};
