//! The kernels on the host, as plain loops.
//!
//! The count is also what backends without kernels use, and what finds the parameter an overflow
//! came from; the others are the oracles of the tests.

use crate::optimize::Precision;

/// Elements whose count is kept in an element's own width.
const BLOCK: usize = 4096;

/// The number of elements that are NaN or infinite. `bytes` may begin at any address; an incomplete
/// element at the end is not looked at.
///
/// A value is not finite if all bits of its exponent are set: adding one to the exponent then
/// carries into the place of the sign, which is cleared before.
pub(crate) fn count_non_finite_bytes(bytes: &[u8], precision: Precision) -> usize {
    match precision {
        Precision::F32 => count_f32(bytes),
        Precision::F16 => count_half::<0x0400>(bytes),
        Precision::Bf16 => count_half::<0x0080>(bytes),
    }
}

fn count_f32(bytes: &[u8]) -> usize {
    let one = |value: &[u8; 4]| {
        let magnitude = u32::from_ne_bytes(*value) & 0x7fff_ffff;
        (magnitude + 0x0080_0000) >> 31
    };
    let blocks = bytes.as_chunks().0.chunks(BLOCK);
    blocks
        .map(|block| block.iter().map(one).sum::<u32>() as usize)
        .sum()
}

/// `EXPONENT_ONE` is the lowest bit of the exponent. Sums stay in 16 bits within a block, so that
/// as many elements go through a vector register as fit.
fn count_half<const EXPONENT_ONE: u16>(bytes: &[u8]) -> usize {
    let one = |value: &[u8; 2]| {
        let magnitude = u16::from_ne_bytes(*value) & 0x7fff;
        (magnitude + EXPONENT_ONE) >> 15
    };
    let blocks = bytes.as_chunks().0.chunks(BLOCK);
    blocks
        .map(|block| block.iter().map(one).sum::<u16>() as usize)
        .sum()
}

/// What [`pack`](super::pack) writes for the elements `bytes`.
#[cfg(all(test, feature = "cpu"))]
pub(super) fn pack(bytes: &[u8], from: Precision, to: Precision) -> Vec<u8> {
    crate::optimize::DeviceImage::of(to, &widen(bytes, from))
        .as_bytes()
        .to_vec()
}

/// What [`accumulate`](super::accumulate) makes of `sum`.
#[cfg(all(test, feature = "cpu"))]
pub(super) fn accumulate(sum: &mut [f32], bytes: &[u8], precision: Precision) {
    let gradient = widen(bytes, precision);
    assert_eq!(sum.len(), gradient.len());
    sum.iter_mut().zip(gradient).for_each(|(s, g)| *s += g);
}

#[cfg(all(test, feature = "cpu"))]
pub(super) fn widen(bytes: &[u8], precision: Precision) -> Vec<f32> {
    use half::{bf16, f16};

    let (halves, _) = bytes.as_chunks();
    match precision {
        Precision::F32 => bytemuck::pod_collect_to_vec(bytes),
        Precision::F16 => halves
            .iter()
            .map(|&b| f16::from_ne_bytes(b).into())
            .collect(),
        Precision::Bf16 => halves
            .iter()
            .map(|&b| bf16::from_ne_bytes(b).into())
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    #[test]
    fn every_half_is_counted_if_it_is_not_finite() {
        for bits in 0..=u16::MAX {
            let bytes = bits.to_ne_bytes();
            assert_eq!(
                count_non_finite_bytes(&bytes, Precision::F16),
                usize::from(!f16::from_bits(bits).is_finite())
            );
            assert_eq!(
                count_non_finite_bytes(&bytes, Precision::Bf16),
                usize::from(!bf16::from_bits(bits).is_finite())
            );
            // The neighbours of every exponent, with the ends of the mantissa.
            for low in [0, 1, 0xffff] {
                let single = u32::from(bits) << 16 | low;
                assert_eq!(
                    count_non_finite_bytes(&single.to_ne_bytes(), Precision::F32),
                    usize::from(!f32::from_bits(single).is_finite())
                );
            }
        }
    }

    #[test]
    fn counts_hold_over_blocks_and_at_any_address() {
        for len in [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 20 * BLOCK + 7] {
            for precision in [Precision::F32, Precision::F16, Precision::Bf16] {
                // Every byte is set: all elements are NaN.
                let mut bytes = vec![0xff; len * precision.size() + 1];
                assert_eq!(count_non_finite_bytes(&bytes[1..], precision), len);
                bytes.fill(0);
                assert_eq!(count_non_finite_bytes(&bytes[1..], precision), 0);
            }
        }
    }

    #[test]
    fn an_element_off_the_end_is_not_counted() {
        assert_eq!(count_non_finite_bytes(&[0xff; 7], Precision::F32), 1);
        assert_eq!(count_non_finite_bytes(&[0xff; 7], Precision::Bf16), 3);
    }
}
