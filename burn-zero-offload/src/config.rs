//! Policy: what a user may choose. Nothing here does anything.

use burn::config::Config;
use burn::module::ParamGroup;
use burn::tensor::FloatDType;

use crate::optimize::SimdLevel;

/// How a model is offloaded.
///
/// ```
/// use burn::tensor::FloatDType;
/// use burn_zero_offload::OffloadConfig;
///
/// let config = OffloadConfig::new().with_dtype(Some(FloatDType::BF16)).with_threads(Some(2));
/// assert_eq!(config.dtype, Some(FloatDType::BF16));
/// ```
#[derive(Config, Debug)]
pub struct OffloadConfig {
    /// Element type of the weights on the device: BF16, F16 or F32.
    ///
    /// Left out, the best the device computes in is taken: BF16, else F16, else F32. Half precision
    /// costs 2 bytes per parameter on the device, F32 costs 4; the host holds fp32 master weights
    /// either way. Burn does not promote: a model with weights in half precision wants inputs and
    /// constants in half precision too.
    pub dtype: Option<FloatDType>,

    /// Parameters to keep in F32 on the device, whatever `dtype` says: a head whose input the model
    /// casts, for example. 4 bytes per parameter there.
    pub full_precision: Option<ParamGroup>,

    /// Threads of the CPU step. Left out, one per available core.
    pub threads: Option<usize>,

    /// Instruction set of the CPU step. Left out, the fastest this machine has. All give the same
    /// bits; forcing one is for tests and measurements.
    pub simd: Option<SimdLevel>,
}
