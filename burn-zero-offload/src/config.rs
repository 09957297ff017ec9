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

    /// Bytes of gradients that may be on their way from the device to the host at once. Left out,
    /// twice the largest parameter's gradient and at least 4 MiB; [`StepReport`](crate::StepReport)
    /// shows it.
    ///
    /// A backward pass that is ahead of the downloads waits when it is used up, so the device never
    /// holds more than this and one gradient besides. It must hold the largest parameter's gradient.
    ///
    /// The budget also bounds sums on the device. A parameter in half precision that is used three
    /// times or more in a backward (a recurrent cell, a shared block), or twice in single precision,
    /// is summed there in f32 and comes down once, if the sum fits into the budget beside the largest
    /// gradient; otherwise, and always on Flex, every use comes down. A tied embedding (two uses)
    /// comes down twice: 4 bytes either way.
    pub in_flight: Option<usize>,

    /// Elements per tile of an upload, rounded up to an even number. Left out, 4 Mi elements.
    ///
    /// While one tile is on its way to the device the CPU step computes the next. Smaller parameters,
    /// and all on Flex, go in one piece. Changes speed, never a bit of the result.
    pub upload_tile: Option<usize>,

    /// Bytes of pinned host memory that uploads may use. Left out, as many as four tiles take; 0
    /// switches pinning off. With less than two tiles there is none. Changes speed, never a bit of
    /// the result.
    pub pinned: Option<usize>,
}
