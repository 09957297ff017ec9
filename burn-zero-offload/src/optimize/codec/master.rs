//! Master weights: whole with an image for the device, or split so that the image is half of them.
//!
//! # Split
//!
//! Of the 32 bits `b` of a master weight the device's bf16 weight is the upper half rounded to
//! nearest, ties away from zero, and the lower half is kept as it is:
//!
//! ```text
//! upper = (b + 2^15) >> 16        lower = b mod 2^16
//! b     = (upper << 16) + sext(lower)   (modulo 2^32)
//! ```
//!
//! `sext` reads `lower` as a signed number: where its top bit is set, rounding has gone up and the sum
//! comes back down. All 2^32 bit patterns come back. With 8 bits the same holds for the upper 24 bits of
//! `b`, which are rounded stochastically first. A NaN whose payload is all ones below the sign would
//! make the device's weight zero; [`canonical`] takes such payloads away before a master is split.

use half::bf16;

use super::half::Half;
use super::{Column, LANES, Rows, Use};

/// The two parts of a master weight.
#[inline(always)]
pub(in crate::optimize) fn split16(master: f32) -> (bf16, u16) {
    let bits = master.to_bits();
    let upper = bits.wrapping_add(0x8000) >> 16;
    (bf16::from_bits(upper as u16), bits as u16)
}

/// The master weight of two parts.
#[inline(always)]
pub(in crate::optimize) fn join16(upper: bf16, lower: u16) -> f32 {
    let upper = (upper.to_bits() as u32) << 16;
    f32::from_bits(upper.wrapping_add(lower as i16 as u32))
}

/// The parts of a master weight of which 24 bits are kept. `noise` is added below them: 0 to 255, or 128
/// to round to nearest.
#[inline(always)]
pub(in crate::optimize) fn split8(master: f32, noise: u32) -> (bf16, u8) {
    let bits = master.to_bits().wrapping_add(noise);
    let upper = (bits & !0xff).wrapping_add(0x8000) >> 16;
    (bf16::from_bits(upper as u16), (bits >> 8) as u8)
}

/// The master weight of two parts.
#[inline(always)]
pub(in crate::optimize) fn join8(upper: bf16, lower: u8) -> f32 {
    let upper = (upper.to_bits() as u32) << 16;
    f32::from_bits(upper.wrapping_add((lower as i8 as u32) << 8))
}

/// The master weights of `upper` and `lower` halves.
pub(crate) fn join16_slice(upper: &[bf16], lower: &[u16], out: &mut [f32]) {
    for ((out, &upper), &lower) in out.iter_mut().zip(upper).zip(lower) {
        *out = join16(upper, lower);
    }
}

/// The master weights of 24 bits of `upper` halves and what is `lower`.
pub(crate) fn join8_slice(upper: &[bf16], lower: &[u8], out: &mut [f32]) {
    for ((out, &upper), &lower) in out.iter_mut().zip(upper).zip(lower) {
        *out = join8(upper, lower);
    }
}

/// The same number, as a NaN without payload if it is one.
pub(in crate::optimize) fn canonical(master: f32) -> f32 {
    if master.is_nan() { f32::NAN } else { master }
}

/// A whole master weight and its image in `H`, which is written only.
pub(in crate::optimize) struct Mirrored<'a, H> {
    pub(in crate::optimize) master: Rows<'a, f32>,
    pub(in crate::optimize) image: Rows<'a, H>,
}

/// What the device holds of a master weight.
pub(in crate::optimize) trait Image: Copy + Default {
    /// Rounds a master weight.
    fn of(master: f32) -> Self;
}

impl Image for f32 {
    #[inline(always)]
    fn of(master: f32) -> Self {
        master
    }
}

impl<H: Half> Image for H {
    #[inline(always)]
    fn of(master: f32) -> Self {
        H::round(master)
    }
}

impl<H: Image> Column for Mirrored<'_, H> {
    type Row = ([f32; LANES], [H; LANES]);

    #[inline(always)]
    fn read(&self, row: usize) -> Self::Row {
        (self.master.read(row), [H::default(); LANES])
    }

    #[inline(always)]
    fn read_rest(&mut self) -> Self::Row {
        (self.master.read_rest(), [H::default(); LANES])
    }

    #[inline(always)]
    fn write(&mut self, row: usize, values: Self::Row) {
        self.master.write(row, values.0);
        self.image.write(row, values.1);
    }

    #[inline(always)]
    fn write_rest(&mut self, _row: usize, values: Self::Row) {
        self.master.write_rest(values.0);
        self.image.write_rest(values.1);
    }

    #[inline(always)]
    fn get(&self, row: &Self::Row, lane: usize, _: Use) -> f32 {
        row.0[lane]
    }

    #[inline(always)]
    fn put(&mut self, row: &mut Self::Row, lane: usize, value: f32, _noise: u32, _: Use) {
        row.0[lane] = value;
        row.1[lane] = H::of(value);
    }
}

macro_rules! split_column {
    ($(#[$doc:meta])* $name:ident, $lower:ty, $join:ident, |$value:ident, $noise:ident| $split:expr) => {
        $(#[$doc])*
        pub(in crate::optimize) struct $name<'a> {
            pub(in crate::optimize) upper: Rows<'a, bf16>,
            pub(in crate::optimize) lower: Rows<'a, $lower>,
        }

        impl Column for $name<'_> {
            type Row = ([bf16; LANES], [$lower; LANES]);

            #[inline(always)]
            fn read(&self, row: usize) -> Self::Row {
                (self.upper.read(row), self.lower.read(row))
            }

            #[inline(always)]
            fn read_rest(&mut self) -> Self::Row {
                (self.upper.read_rest(), self.lower.read_rest())
            }

            #[inline(always)]
            fn write(&mut self, row: usize, values: Self::Row) {
                self.upper.write(row, values.0);
                self.lower.write(row, values.1);
            }

            #[inline(always)]
            fn write_rest(&mut self, _row: usize, values: Self::Row) {
                self.upper.write_rest(values.0);
                self.lower.write_rest(values.1);
            }

            #[inline(always)]
            fn get(&self, row: &Self::Row, lane: usize, _: Use) -> f32 {
                $join(row.0[lane], row.1[lane])
            }

            #[inline(always)]
            fn put(
                &mut self,
                row: &mut Self::Row,
                lane: usize,
                $value: f32,
                $noise: u32,
                _: Use,
            ) {
                (row.0[lane], row.1[lane]) = $split;
            }
        }
    };
}

split_column! {
    /// All 32 bits in two halves.
    Split16, u16, join16, |value, _noise| split16(value)
}

split_column! {
    /// The upper 24 bits in 16 and 8, rounded stochastically with the top bits of the noise.
    Split8, u8, join8, |value, noise| split8(value, noise >> 24)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every exponent, sign and upper fraction, with lower halves at and around the ties.
    #[test]
    fn every_bit_pattern_comes_back() {
        for upper in 0..=u16::MAX {
            for lower in [0u16, 1, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff] {
                let bits = ((upper as u32) << 16) | lower as u32;
                let (high, low) = split16(f32::from_bits(bits));
                assert_eq!(join16(high, low).to_bits(), bits);
                let kept = bits & !0xff;
                let (high, low) = split8(f32::from_bits(bits), 0);
                assert_eq!(join8(high, low).to_bits(), kept);
            }
        }
    }

    #[test]
    fn the_upper_half_is_the_nearest_and_ties_go_away_from_zero() {
        let tie = 1.0 + 2f32.powi(-8);
        for (master, expected) in [
            (1.0, 1.0),
            (tie, 1.0 + 2f32.powi(-7)),
            (-tie, -(1.0 + 2f32.powi(-7))),
            (1.0 + 3.0 * 2f32.powi(-8), 1.0 + 4.0 * 2f32.powi(-8)),
            (f32::from_bits(tie.to_bits() - 1), 1.0),
            (f32::MAX, f32::INFINITY),
            (f32::INFINITY, f32::INFINITY),
            (-0.0, -0.0),
        ] {
            let upper = split16(master).0.to_f32();
            assert_eq!(upper.to_bits(), f32::to_bits(expected), "{master}");
            assert_eq!(split8(master, 0).0.to_f32().to_bits(), upper.to_bits());
        }
        assert!(split16(canonical(f32::from_bits(0x7fff_ffff))).0.is_nan());
    }

    #[test]
    fn the_24_bit_master_is_within_one_unit_of_its_last_place() {
        for bits in (0x0080_0000u32..0x7f00_0000).step_by(99_991) {
            let master = f32::from_bits(bits);
            let nearest = {
                let (upper, lower) = split8(master, 128);
                join8(upper, lower)
            };
            assert!((nearest - master).abs() <= master * 2f32.powi(-16));
            for noise in [0, 100, 255] {
                let (upper, lower) = split8(master, noise);
                assert!((join8(upper, lower) - master).abs() < master * 2f32.powi(-15));
            }
        }
    }
}
