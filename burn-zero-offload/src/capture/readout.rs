//! How a gradient is read, per backend.
//!
//! The read is *started* by the tap, on the thread that runs backward. With fusion, whatever the
//! gradient depends on is executed then: operations are cut at the same places in every step, so
//! that fused kernels are found again instead of compiled anew. The copy is enqueued on the stream
//! that computed the gradient, behind its last kernel. Only the wait for it happens elsewhere.

use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex};
use burn::tensor::read_sync;

use super::sink::DeviceGradient;

/// Backends whose gradients can be brought to the host.
pub(super) trait Readout: Backend {
    /// Starts the read of `gradient`. The result waits for it; the data it gives is host memory that
    /// holds nothing on the device.
    fn read_out(gradient: FloatTensor<Self>) -> DeviceGradient;
}

impl Readout for Flex {
    fn read_out(gradient: FloatTensor<Self>) -> DeviceGradient {
        Box::new(|| read_sync(Flex::float_into_data(gradient)).map_err(|error| error.to_string()))
    }
}

#[cfg(feature = "cubecl-backend")]
mod cube {
    use std::task::{Context, Waker};

    use burn::backend::TensorMetadata;
    use burn::backend::tensor::FloatTensor;
    use burn::tensor::{Bytes, TensorData, read_sync};
    use burn_cubecl::CubeBackend;
    use burn_cubecl::kernel::into_contiguous_aligned;
    use burn_fusion::{Fusion, FusionBackend};
    use cubecl::server::CopyDescriptor;

    use super::{DeviceGradient, Readout};

    impl Readout for CubeBackend {
        fn read_out(gradient: FloatTensor<Self>) -> DeviceGradient {
            let gradient = into_contiguous_aligned(gradient);
            let (shape, dtype) = (gradient.shape(), gradient.dtype);
            let held = gradient.clone();
            // `float_into_data` would be lazy: it copies when the bytes are first looked at, which
            // keeps the gradient on the device and reads whatever is in its buffer by then.
            let mut copy = Box::pin(async move {
                let descriptor = CopyDescriptor::new(
                    gradient.handle.clone().binding(),
                    gradient.meta.shape().clone(),
                    gradient.meta.strides().clone(),
                    gradient.dtype.size(),
                );
                gradient.client.read_one_tensor_async(descriptor).await
            });
            // The first poll enqueues the copy.
            let started = copy.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            Box::new(move || {
                let bytes = match started {
                    std::task::Poll::Ready(bytes) => bytes,
                    std::task::Poll::Pending => read_sync(copy),
                };
                let bytes = bytes.map_err(|error| error.to_string())?;
                // What a read returns may be the device's own buffer, or pinned memory of a pool
                // that never shrinks. Gradients wait for the step in plain memory.
                let bytes = Bytes::from_bytes_vec(bytes.to_vec());
                // The CPU runtime's bytes *are* the buffer, and only a handle keeps the pool from
                // giving it to the next allocation.
                drop(held);
                Ok(TensorData::from_bytes(bytes, shape, dtype))
            })
        }
    }

    impl<B: FusionBackend + Readout> Readout for Fusion<B> {
        fn read_out(gradient: FloatTensor<Self>) -> DeviceGradient {
            let client = gradient.client.clone();
            B::read_out(client.resolve_tensor_float::<B>(gradient))
        }
    }
}
