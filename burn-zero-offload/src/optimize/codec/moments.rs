//! State in single and in half precision.

use half::bf16;

use super::half::Half;
use super::{Column, LANES, Rows, Use};

/// Rounds to one of the two neighbours in bf16: up in magnitude with probability equal to the share
/// of the distance, so that the mean of many roundings is `value`. Takes the low 16 bits of `noise`.
///
/// Values stay between their neighbours; beyond the largest finite bf16 that is infinity.
#[inline(always)]
pub(super) fn round_stochastic(value: f32, noise: u32) -> bf16 {
    bf16::from_bits((value.to_bits().wrapping_add(noise & 0xffff) >> 16) as u16)
}

/// A type that state is kept in, one value by itself.
pub(in crate::optimize) trait Stored: Copy + Default {
    fn load(self) -> f32;

    /// `bits` are uniform.
    fn store(value: f32, bits: u32) -> Self;
}

impl Stored for f32 {
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }

    #[inline(always)]
    fn store(value: f32, _bits: u32) -> Self {
        value
    }
}

impl Stored for bf16 {
    #[inline(always)]
    fn load(self) -> f32 {
        self.widen()
    }

    #[inline(always)]
    fn store(value: f32, bits: u32) -> Self {
        round_stochastic(value, bits)
    }
}

/// State kept as it is in `f32`, or rounded stochastically in bf16.
pub(in crate::optimize) struct Values<'a, T>(pub(in crate::optimize) Rows<'a, T>);

impl<T: Stored> Column for Values<'_, T> {
    type Row = [T; LANES];

    #[inline(always)]
    fn read(&self, row: usize) -> Self::Row {
        self.0.read(row)
    }

    #[inline(always)]
    fn read_rest(&mut self) -> Self::Row {
        self.0.read_rest()
    }

    #[inline(always)]
    fn write(&mut self, row: usize, values: Self::Row) {
        self.0.write(row, values);
    }

    #[inline(always)]
    fn write_rest(&mut self, _row: usize, values: Self::Row) {
        self.0.write_rest(values);
    }

    #[inline(always)]
    fn get(&self, row: &Self::Row, lane: usize, _: Use) -> f32 {
        row[lane].load()
    }

    #[inline(always)]
    fn put(&mut self, row: &mut Self::Row, lane: usize, value: f32, noise: u32, of: Use) {
        row[lane] = T::store(value, of.bits(noise));
    }
}

#[cfg(test)]
mod tests {
    use super::super::Noise;
    use super::*;

    #[test]
    fn stochastic_rounding_takes_a_neighbour_and_keeps_what_is_exact() {
        let low = bf16::from_bits(0x3f80);
        let high = bf16::from_bits(0x3f81);
        let quarter = 1.0 + 2f32.powi(-9);
        assert_eq!(round_stochastic(quarter, 0xbfff), low);
        assert_eq!(round_stochastic(quarter, 0xc000), high);
        assert_eq!(round_stochastic(-quarter, 0xc000), -high);
        for noise in [0, 0x8000, 0xffff] {
            assert_eq!(round_stochastic(1.0, noise), low);
            assert_eq!(round_stochastic(0.0, noise), bf16::ZERO);
        }
        // Between zero and the smallest subnormal, too.
        assert_eq!(round_stochastic(1e-45, 0xfffe), bf16::ZERO);
        assert_eq!(round_stochastic(1e-45, 0xffff), bf16::from_bits(1));
    }

    /// Round to nearest would leave a second moment where it is: 1 - 0.001 is nearer to 1 than to
    /// the bf16 below.
    #[test]
    fn a_decay_below_one_half_ulp_happens_in_the_mean() {
        let (mut value, mut exact) = (bf16::ONE, 1.0f64);
        for time in 0..1000 {
            let decayed = value.to_f32() * 0.999;
            assert_eq!(bf16::from_f32(value.to_f32() * 0.9999), value);
            value = round_stochastic(decayed, Noise::new(3, 0, time).bits());
            exact *= 0.999;
        }
        // exact is 0.37; one rounding is off by up to 2^-8, a thousand of them by about 0.06 of it.
        let ratio = value.to_f64() / exact;
        assert!((0.75..1.33).contains(&ratio), "{ratio}");
    }
}
