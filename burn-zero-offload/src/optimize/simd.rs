//! Which instruction set runs the loops.

use pulp::{Scalar, Simd, WithSimd};
use serde::{Deserialize, Serialize};

/// An instruction set for the CPU step. All of them give the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SimdLevel {
    /// No vector instructions beyond the target's baseline; fused multiply-adds may be calls.
    #[default]
    Scalar,
    /// AVX2 with FMA (x86-64-v3).
    Avx2,
    /// AVX-512 (x86-64-v4).
    Avx512,
    /// NEON (AArch64).
    Neon,
}

/// An instruction set was asked for that this machine does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnsupportedSimd(pub SimdLevel);

impl SimdLevel {
    /// Every level, slowest first.
    pub const ALL: [Self; 4] = [Self::Scalar, Self::Avx2, Self::Avx512, Self::Neon];

    /// The fastest level this machine has.
    pub fn best() -> Self {
        [Self::Avx512, Self::Avx2, Self::Neon]
            .into_iter()
            .find(|level| level.is_available())
            .unwrap_or(Self::Scalar)
    }

    /// Whether this machine has the instructions.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => pulp::x86::V3::try_new().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => pulp::x86::V4::try_new().is_some(),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => pulp::aarch64::Neon::try_new().is_some(),
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// This level, if the machine has it.
    pub fn require(self) -> Result<Self, UnsupportedSimd> {
        if self.is_available() {
            Ok(self)
        } else {
            Err(UnsupportedSimd(self))
        }
    }

    /// Runs `op` compiled for this level, or for the baseline where the level is missing.
    #[inline]
    pub(super) fn run<Op: WithSimd>(self, op: Op) -> Op::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                if let Some(simd) = pulp::x86::V3::try_new() {
                    return Simd::vectorize(simd, op);
                }
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                if let Some(simd) = pulp::x86::V4::try_new() {
                    return Simd::vectorize(simd, op);
                }
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon => {
                if let Some(simd) = pulp::aarch64::Neon::try_new() {
                    return Simd::vectorize(simd, op);
                }
            }
            _ => {}
        }
        Simd::vectorize(Scalar::new(), op)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_level_is_available_and_scalar_always_is() {
        assert!(SimdLevel::best().is_available());
        assert_eq!(SimdLevel::Scalar.require(), Ok(SimdLevel::Scalar));
        let foreign = if cfg!(target_arch = "x86_64") {
            SimdLevel::Neon
        } else {
            SimdLevel::Avx2
        };
        assert_eq!(foreign.require(), Err(UnsupportedSimd(foreign)));
    }
}
