//! Conversions between `f32` and half precision without branches, so that they vectorise on every
//! instruction set with the same bits.

use half::{bf16, f16};

/// A half-precision type.
pub(in crate::optimize) trait Half: Copy + Default {
    /// Exact.
    fn widen(self) -> f32;

    /// To nearest, ties to even.
    fn round(value: f32) -> Self;
}

impl Half for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }

    #[inline(always)]
    fn round(value: f32) -> Self {
        let bits = value.to_bits();
        let nearest = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        // Rounding could carry a NaN into the infinities, or past them.
        let quiet = (bits >> 16) | 0x40;
        let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
        Self::from_bits(if is_nan { quiet } else { nearest } as u16)
    }
}

impl Half for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = self.to_bits() as u32;
        let (sign, magnitude) = ((bits & 0x8000) << 16, (bits & 0x7fff) << 13);
        let exponent = magnitude & 0x0f80_0000;
        // 15 is the bias there, 127 here; infinities and NaN go to the top once more.
        let normal = magnitude + (112 << 23);
        let special = normal + (112 << 23);
        // A subnormal is the fraction of a number with the smallest exponent, less that number.
        let subnormal = f32::from_bits(magnitude + (113 << 23)) - f32::from_bits(113 << 23);
        let value = match exponent {
            0 => subnormal.to_bits(),
            0x0f80_0000 => special,
            _ => normal,
        };
        f32::from_bits(sign | value)
    }

    #[inline(always)]
    fn round(value: f32) -> Self {
        let bits = value.to_bits();
        let (sign, magnitude) = ((bits >> 16) & 0x8000, bits & 0x7fff_ffff);
        // Below the normal range adding one half leaves the result in the lowest bits, rounded.
        let shifted = f32::from_bits(magnitude) + 0.5;
        let subnormal = shifted.to_bits().wrapping_sub(0.5f32.to_bits());
        let odd = (magnitude >> 13) & 1;
        let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
        let nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
        let rounded = if magnitude > 0x7f80_0000 {
            nan
        } else if magnitude >= 143 << 23 {
            0x7c00
        } else if magnitude < 113 << 23 {
            subnormal
        } else {
            normal
        };
        Self::from_bits((sign | rounded) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_widens_as_the_half_crate_widens_it() {
        for bits in 0..=u16::MAX {
            let (a, b) = (f16::from_bits(bits), bf16::from_bits(bits));
            if a.is_nan() {
                assert!(a.widen().is_nan());
            } else {
                assert_eq!(a.widen().to_bits(), a.to_f32().to_bits(), "{bits:x}");
            }
            if b.is_nan() {
                assert!(b.widen().is_nan());
            } else {
                assert_eq!(b.widen().to_bits(), b.to_f32().to_bits(), "{bits:x}");
            }
        }
    }

    /// All exponents and signs, with fractions at, beside and between all ties.
    #[test]
    fn singles_round_as_the_half_crate_rounds_them() {
        let fractions = (0..1u32 << 10).flat_map(|high| {
            [0u32, 1, 0xfff, 0x1000, 0x1001, 0x1fff].map(move |low| (high << 13) | low)
        });
        for fraction in fractions {
            for top in 0..512u32 {
                let value = f32::from_bits((top << 23) | fraction);
                let bf = <bf16 as Half>::round(value).to_bits();
                assert_eq!(bf, bf16::from_f32(value).to_bits(), "{:x}", value.to_bits());
                let f = <f16 as Half>::round(value).to_bits();
                assert_eq!(f, f16::from_f32(value).to_bits(), "{:x}", value.to_bits());
            }
        }
    }
}
