//! Random bits for stochastic rounding that depend on what is rounded and on nothing else.

/// Uniform bits for the elements of one update of one parameter.
///
/// A counter-based generator: element `i` gets `key + i * 0x9E3779B9` modulo 2^32, an additive
/// recurrence with the golden ratio (Weyl), and `key` comes from SplitMix64's finaliser (Steele, Lea and
/// Flood, OOPSLA 2014) over seed, parameter and number of the update. For any one element the bits of
/// different updates are independent and uniform; within an update they are spread evenly over the
/// elements, which only makes sums more exact. No state: threads, tiles, instruction sets and a resumed
/// run get the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noise {
    key: u32,
}

/// 2^32 divided by the golden ratio, made odd.
const GOLDEN: u32 = 0x9E37_79B9;

impl Noise {
    /// The noise of update number `time` of parameter number `slot`.
    pub fn new(seed: u64, slot: u64, time: u64) -> Self {
        let mixed = mix(mix(mix(seed).wrapping_add(slot)).wrapping_add(time));
        Self {
            key: (mixed >> 32) as u32,
        }
    }

    /// The noise of the elements from `offset` on.
    #[inline(always)]
    pub fn from(self, offset: usize) -> Self {
        // Truncation is right: the recurrence has period 2^32.
        let offset = (offset as u32).wrapping_mul(GOLDEN);
        Self {
            key: self.key.wrapping_add(offset),
        }
    }

    /// The bits of one element.
    #[inline(always)]
    pub(in crate::optimize) fn bits(self) -> u32 {
        self.key
    }
}

/// The bits of element `lane` of a row whose first element has `first`.
#[inline(always)]
pub(in crate::optimize) fn lane_noise(first: u32, lane: usize) -> u32 {
    first.wrapping_add((lane as u32).wrapping_mul(GOLDEN))
}

/// SplitMix64: one step from `state`.
fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First output of SplitMix64 from state 0, as published with the algorithm.
    #[test]
    fn the_finaliser_is_splitmix() {
        assert_eq!(mix(0), 0xE220_A839_7B1D_CDAF);
    }

    #[test]
    fn bits_depend_on_position_alone_and_differ_in_everything_else() {
        let noise = Noise::new(1, 2, 3);
        assert_eq!(noise.from(5).from(7), noise.from(12));
        assert_eq!(noise.from(1 << 32), noise);
        assert_eq!(lane_noise(noise.bits(), 9), noise.from(9).bits());
        for other in [
            Noise::new(0, 2, 3),
            Noise::new(1, 1, 3),
            Noise::new(1, 2, 4),
        ] {
            assert_ne!(noise, other);
        }
    }

    /// Each field of bits that some column takes, for one element over many updates.
    #[test]
    fn every_field_of_bits_is_uniform_over_updates() {
        let updates = 1 << 16;
        for shift in [0, 8, 16, 24] {
            let mut counts = [0u32; 256];
            for time in 0..updates {
                let bits = Noise::new(7, 3, time).from(1234).bits();
                counts[(bits >> shift) as usize & 255] += 1;
            }
            // Mean 256, standard deviation 16: six of them are never met by chance.
            assert!(counts.iter().all(|n| (160..=352).contains(n)), "{shift}");
        }
    }
}
