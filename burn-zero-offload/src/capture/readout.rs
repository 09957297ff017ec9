//! A gradient leaves the types of the backend that computed it.
//!
//! With fusion, whatever the gradient depends on is executed here, on the thread that runs backward:
//! operations are cut at the same places in every step, so that fused kernels are found again instead
//! of compiled anew.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex};

/// A gradient that lives where it was computed. All backends come down to these.
#[derive(Debug)]
pub(crate) enum DeviceGradient {
    /// On the host.
    Flex(FloatTensor<Flex>),
    /// On a CubeCL device.
    #[cfg(feature = "cubecl-backend")]
    Cube(Box<burn_cubecl::tensor::CubeTensor>),
}

/// Backends whose gradients can be brought to the host.
pub(super) trait Readout: Backend {
    /// Takes the gradient out of the backend.
    fn read_out(gradient: FloatTensor<Self>) -> DeviceGradient;
}

impl Readout for Flex {
    fn read_out(gradient: FloatTensor<Self>) -> DeviceGradient {
        DeviceGradient::Flex(gradient)
    }
}

#[cfg(feature = "cubecl-backend")]
mod cube {
    use burn::backend::tensor::FloatTensor;
    use burn_cubecl::CubeBackend;
    use burn_fusion::{Fusion, FusionBackend};

    use super::{DeviceGradient, Readout};

    impl Readout for CubeBackend {
        fn read_out(gradient: FloatTensor<Self>) -> DeviceGradient {
            DeviceGradient::Cube(Box::new(gradient))
        }
    }

    impl<B: FusionBackend + Readout> Readout for Fusion<B> {
        fn read_out(gradient: FloatTensor<Self>) -> DeviceGradient {
            let client = gradient.client.clone();
            B::read_out(client.resolve_tensor_float::<B>(gradient))
        }
    }
}
