//! Borrowed state of a parameter, whatever it is kept in, and the slow twin of every column.

use std::ops::Range;

use half::bf16;

use super::int8::{self, NEAREST};
use super::master::{canonical, split8, split16};
use super::moments::round_stochastic;
use super::{GROUP, Noise, Use, scales_for};
use crate::optimize::rule::StateKind;

/// Master weights.
#[derive(Debug)]
pub enum MasterMut<'a> {
    /// `f32`.
    F32(&'a mut [f32]),
    /// The lower 16 bits; the upper half is the bf16 image.
    Lower16(&'a mut [u16]),
    /// The next lower 8 bits of masters of 24; the upper half is the bf16 image.
    Lower8(&'a mut [u8]),
}

impl<'a> MasterMut<'a> {
    /// Number of weights.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Lower16(values) => values.len(),
            Self::Lower8(values) => values.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements of `range`.
    ///
    /// # Panics
    ///
    /// If `range` is out of bounds.
    pub fn slice(&mut self, range: Range<usize>) -> MasterMut<'_> {
        match self {
            Self::F32(values) => MasterMut::F32(&mut values[range]),
            Self::Lower16(values) => MasterMut::Lower16(&mut values[range]),
            Self::Lower8(values) => MasterMut::Lower8(&mut values[range]),
        }
    }

    pub(crate) fn split_at(self, at: usize) -> (MasterMut<'a>, MasterMut<'a>) {
        macro_rules! halves {
            ($variant:ident, $values:ident) => {{
                let (left, right) = $values.split_at_mut(at);
                (MasterMut::$variant(left), MasterMut::$variant(right))
            }};
        }
        match self {
            Self::F32(values) => halves!(F32, values),
            Self::Lower16(values) => halves!(Lower16, values),
            Self::Lower8(values) => halves!(Lower8, values),
        }
    }

    /// Replaces the master weights, to nearest where they are rounded. Writes the image into `upper` if they
    /// are split, and does not look at it otherwise.
    pub(crate) fn write(&mut self, values: &[f32], upper: &mut [bf16], noise: Option<Noise>) {
        match self {
            Self::F32(own) => own.copy_from_slice(values),
            Self::Lower16(lower) => {
                for ((value, upper), lower) in values.iter().zip(upper).zip(&mut **lower) {
                    (*upper, *lower) = split16(canonical(*value));
                }
            }
            Self::Lower8(lower) => {
                let parts = values.iter().zip(upper).zip(&mut **lower);
                for (i, ((value, upper), lower)) in parts.enumerate() {
                    let noise = noise.map_or(NEAREST, |noise| noise.from(i).bits() >> 24);
                    (*upper, *lower) = split8(canonical(*value), noise);
                }
            }
        }
    }
}

/// One value for each weight that a rule keeps.
#[derive(Debug)]
pub enum MomentMut<'a> {
    /// `f32`.
    F32(&'a mut [f32]),
    /// bf16, rounded stochastically.
    Bf16(&'a mut [bf16]),
    /// 8 bits in blocks of 32.
    Int8 {
        /// One for each weight.
        codes: &'a mut [u8],
        /// 16 for every 512 weights, or what is left of them.
        scales: &'a mut [bf16],
    },
}

impl<'a> MomentMut<'a> {
    /// Number of weights.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::Int8 { codes, .. } => codes.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements that ranges of it have to begin at a multiple of.
    pub(crate) fn granularity(&self) -> usize {
        match self {
            Self::F32(_) | Self::Bf16(_) => 1,
            Self::Int8 { .. } => GROUP,
        }
    }

    /// The elements of `range`.
    ///
    /// # Panics
    ///
    /// If `range` is out of bounds, or of 8-bit state does not begin at a multiple of 512 elements or end
    /// at one or at the last.
    pub fn slice(&mut self, range: Range<usize>) -> MomentMut<'_> {
        match self {
            Self::F32(values) => MomentMut::F32(&mut values[range]),
            Self::Bf16(values) => MomentMut::Bf16(&mut values[range]),
            Self::Int8 { codes, scales } => {
                let whole = range.end.is_multiple_of(GROUP) || range.end == codes.len();
                assert!(
                    range.start.is_multiple_of(GROUP) && whole,
                    "8-bit state can be cut at multiples of {GROUP} elements only, not into {range:?}"
                );
                let blocks = scales_for(range.start)..scales_for(range.end);
                MomentMut::Int8 {
                    codes: &mut codes[range],
                    scales: &mut scales[blocks],
                }
            }
        }
    }

    pub(in crate::optimize) fn split_at(self, at: usize) -> (MomentMut<'a>, MomentMut<'a>) {
        match self {
            Self::F32(values) => {
                let (left, right) = values.split_at_mut(at);
                (MomentMut::F32(left), MomentMut::F32(right))
            }
            Self::Bf16(values) => {
                let (left, right) = values.split_at_mut(at);
                (MomentMut::Bf16(left), MomentMut::Bf16(right))
            }
            Self::Int8 { codes, scales } => {
                assert!(at.is_multiple_of(GROUP), "8-bit state is cut at {at}");
                let (left, right) = codes.split_at_mut(at);
                let (left_scales, right_scales) = scales.split_at_mut(scales_for(at));
                let half = |codes, scales| MomentMut::Int8 { codes, scales };
                (half(left, left_scales), half(right, right_scales))
            }
        }
    }

    /// Replaces the values; rounds by `noise`, whose first element is theirs, or to nearest.
    pub(crate) fn write(&mut self, values: &[f32], of: Use, noise: Option<Noise>) {
        let bits =
            |i: usize, nearest: u32| noise.map_or(nearest, |noise| of.bits(noise.from(i).bits()));
        match self {
            Self::F32(own) => own.copy_from_slice(values),
            Self::Bf16(own) => {
                for (i, (own, &value)) in own.iter_mut().zip(values).enumerate() {
                    *own = match noise {
                        Some(_) => round_stochastic(value, bits(i, 0)),
                        None => bf16::from_f32(value),
                    };
                }
            }
            Self::Int8 { codes, scales } => {
                let bits = |i| bits(i, NEAREST) & 0xff;
                int8::encode_slice(values, codes, scales, false, of.kind, bits);
            }
        }
    }

    /// Replaces 8-bit values by those that had `scales` when they were read: every code comes back.
    /// `false`, with nothing changed, if the scales are not as many as there have to be.
    pub(crate) fn write_scaled(&mut self, values: &[f32], kind: StateKind, saved: &[f32]) -> bool {
        match self {
            Self::Int8 { codes, scales } if saved.len() == scales.len() => {
                for (scale, &saved) in scales.iter_mut().zip(saved) {
                    *scale = bf16::from_f32(saved);
                }
                int8::encode_slice(values, codes, scales, true, kind, |_| NEAREST);
                true
            }
            _ => false,
        }
    }
}
