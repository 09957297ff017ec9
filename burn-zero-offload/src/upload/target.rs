//! Where weights go: the device of a tensor, and how it takes them.

use burn::tensor::{Bytes, Device, Shape, StreamId, Tensor, TensorData};

use super::promise::Promise;
use super::to_dtype;
use crate::optimize::Precision;

/// The device weights are sent to.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    /// Takes whole tensors; on Flex without a copy.
    Whole(Device),
    /// Gives out buffers that can be written piece by piece.
    #[cfg(feature = "cubecl-backend")]
    Cube(Device, burn_cubecl::CubeDevice),
}

impl Target {
    /// The device of `tensor`.
    pub(crate) fn of<const D: usize>(tensor: &Tensor<D>) -> Self {
        let device = tensor.device().inner();
        #[cfg(feature = "cubecl-backend")]
        if let Ok(primitive) = tensor
            .clone()
            .inner()
            .try_into_primitive::<burn_cubecl::Cube>()
        {
            use burn::backend::TensorMetadata;
            return Self::Cube(device, primitive.device());
        }
        Self::Whole(device)
    }

    /// The device, as Burn calls it.
    pub(crate) fn device(&self) -> &Device {
        match self {
            Self::Whole(device) => device,
            #[cfg(feature = "cubecl-backend")]
            Self::Cube(device, _) => device,
        }
    }

    /// Whether weights may be written piece by piece.
    pub(crate) fn takes_tiles(&self) -> bool {
        match self {
            Self::Whole(_) => false,
            #[cfg(feature = "cubecl-backend")]
            Self::Cube(..) => true,
        }
    }

    /// Waits until the device has taken over what was enqueued for it.
    pub(super) fn flush(&self) {
        match self {
            Self::Whole(_) => {}
            #[cfg(feature = "cubecl-backend")]
            Self::Cube(_, device) => {
                // Failures live on the buffers and show where those are read.
                let _ = device.client().flush();
            }
        }
    }

    /// Sends a whole tensor.
    pub(crate) fn send<const D: usize>(
        &self,
        bytes: Bytes,
        shape: Shape,
        precision: Precision,
    ) -> Tensor<D> {
        let dtype = to_dtype(precision).into();
        let data = TensorData::from_bytes(bytes, shape, dtype);
        Tensor::from_data(data, (self.device(), dtype))
    }

    /// Host memory of the device's making, `count` buffers of `size` bytes: pinned, if it can.
    pub(crate) fn staging(&self, count: usize, size: usize) -> Vec<Bytes> {
        let buffers = (0..count).map(|_| Bytes::from_elems(vec![0u8; size]));
        match self {
            Self::Whole(_) => buffers.collect(),
            #[cfg(feature = "cubecl-backend")]
            Self::Cube(_, device) => {
                let mut buffers: Vec<_> = buffers.collect();
                device.client().staging(buffers.iter_mut(), false);
                buffers
            }
        }
    }
}

/// Memory of a tensor whose contents are still to be written.
#[derive(Clone, Debug)]
pub(super) enum Unwritten {
    /// On Flex, in one piece.
    Promise(Promise),
    #[cfg(feature = "cubecl-backend")]
    Cube(Box<cube::CubeUnwritten>),
}

impl Unwritten {
    /// Allocates a tensor that nobody has yet, to be written by commands on the stream of the calling thread.
    /// `None` if the device takes weights whole only, or pads their rows: pieces could not be written there by
    /// their position.
    #[cfg_attr(not(feature = "cubecl-backend"), allow(unused_variables))]
    pub(super) fn new(target: &Target, shape: Shape, precision: Precision) -> Option<Self> {
        match target {
            Target::Whole(_) => None,
            #[cfg(feature = "cubecl-backend")]
            Target::Cube(_, device) => {
                let memory = cube::CubeUnwritten::new(device, shape, precision)?;
                Some(Self::Cube(Box::new(memory)))
            }
        }
    }

    /// A tensor that a model can have now, and its memory, to be written later by commands on `stream`.
    ///
    /// On Flex whoever looks at the tensor waits until it is written. On other devices it holds NaN until
    /// then.
    #[cfg_attr(not(feature = "cubecl-backend"), allow(unused_variables))]
    pub(super) fn reserve<const D: usize>(
        target: &Target,
        shape: Shape,
        precision: Precision,
        stream: StreamId,
    ) -> (Tensor<D>, Self) {
        match target {
            Target::Whole(device) => {
                let (promise, bytes) = Promise::of(shape.num_elements() * precision.size());
                let dtype = to_dtype(precision).into();
                let data = TensorData::from_bytes(bytes, shape, dtype);
                let tensor = Tensor::from_data(data, (device, dtype));
                (tensor, Self::Promise(promise))
            }
            #[cfg(feature = "cubecl-backend")]
            Target::Cube(_, device) => {
                let memory = cube::CubeUnwritten::reserve(device, shape, precision, stream);
                (memory.clone().into_tensor(), Self::Cube(Box::new(memory)))
            }
        }
    }

    /// Writes `bytes` at `offset` and makes sure that the copy starts now: CubeCL collects commands
    /// and hands them to the device in groups.
    #[cfg_attr(not(feature = "cubecl-backend"), allow(unused_variables))]
    pub(super) fn write(&self, offset: usize, bytes: Bytes) -> Result<(), String> {
        match self {
            Self::Promise(promise) => {
                promise.keep(Ok(bytes));
                Ok(())
            }
            #[cfg(feature = "cubecl-backend")]
            Self::Cube(memory) => memory.write(offset, bytes),
        }
    }

    /// Whether the host uses the weights itself.
    pub(super) fn is_on_the_host(&self) -> bool {
        matches!(self, Self::Promise(_))
    }

    /// Waits until all that was written is there.
    pub(super) fn landed(&self) -> Result<(), String> {
        match self {
            Self::Promise(_) => Ok(()),
            #[cfg(feature = "cubecl-backend")]
            Self::Cube(memory) => memory.landed(),
        }
    }

    /// Tells whoever waits for it that nothing will be written.
    pub(super) fn fail(&self, reason: &str) {
        match self {
            Self::Promise(promise) => promise.keep(Err(reason.to_owned())),
            // Nobody waits for the memory itself, which stays NaN.
            #[cfg(feature = "cubecl-backend")]
            Self::Cube(_) => {}
        }
    }

    /// The tensor, all of it written.
    pub(super) fn into_tensor<const D: usize>(self) -> Option<Tensor<D>> {
        match self {
            Self::Promise(_) => None,
            #[cfg(feature = "cubecl-backend")]
            Self::Cube(memory) => Some(memory.into_tensor()),
        }
    }
}

#[cfg(feature = "cubecl-backend")]
mod cube {
    use burn::backend::tensor::FloatTensor;
    use burn::backend::{Backend, TensorMetadata};
    use burn::tensor::{Bytes, Shape, StreamId, Tensor, read_sync};
    use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
    use burn_cubecl::tensor::CubeTensor;
    use burn_cubecl::{Cube, CubeBackend, CubeDevice};
    use burn_fusion::{Fusion, FusionBackend, NoOp, get_client};
    use burn_ir::{InitOperationIr, OperationIr, OperationOutput};
    use cubecl::server::MemoryLayout;

    use crate::kernels;
    use crate::optimize::Precision;
    use crate::upload::to_dtype;

    /// See [`Unwritten`](super::Unwritten).
    #[derive(Clone, Debug)]
    pub(in crate::upload) struct CubeUnwritten {
        tensor: CubeTensor,
        /// The stream that it is written on.
        stream: StreamId,
    }

    impl CubeUnwritten {
        pub(super) fn new(device: &CubeDevice, shape: Shape, precision: Precision) -> Option<Self> {
            let client = device.client();
            let dtype: burn::tensor::DType = to_dtype(precision).into();
            let MemoryLayout { memory, strides } = client.empty_tensor(shape.clone(), dtype.size());
            let (device, stream) = (device.clone(), StreamId::current());
            let tensor = CubeTensor::new_contiguous(client, device, shape, memory, dtype);
            (tensor.meta.strides() == &strides).then_some(Self { tensor, stream })
        }

        /// Allocates on the stream of the calling thread, whose pool the old weights went back to, and fills
        /// with NaN there. Touching it on `stream` makes that wait here for whatever still uses the memory, and
        /// at no later command for this buffer: what is written need not wait for what is computed meanwhile.
        pub(super) fn reserve(
            device: &CubeDevice,
            shape: Shape,
            precision: Precision,
            stream: StreamId,
        ) -> Self {
            let client = device.client();
            let dtype: burn::tensor::DType = to_dtype(precision).into();
            let tensor = empty_device_contiguous_dtype(client, device.clone(), shape, dtype);
            kernels::fill(&tensor, f32::NAN);
            let CubeTensor {
                client,
                device,
                handle,
                ..
            } = tensor.clone();
            let one = Shape::from([tensor.meta.num_elements().min(1)]);
            let first = CubeTensor::new_contiguous(client, device, one, handle, dtype);
            stream.executes(|| kernels::fill(&first, f32::NAN));
            Self { tensor, stream }
        }

        pub(super) fn write(&self, offset: usize, bytes: Bytes) -> Result<(), String> {
            let CubeTensor { client, handle, .. } = &self.tensor;
            let end = handle.size_in_used() - (offset + bytes.len()) as u64;
            let place = handle.clone().offset_start(offset as u64).offset_end(end);
            self.stream.executes(|| {
                client.write(&place, bytes);
                client.flush().map_err(|error| error.to_string())
            })
        }

        pub(super) fn landed(&self) -> Result<(), String> {
            let synced = self.stream.executes(|| self.tensor.client.sync());
            read_sync(synced).map_err(|error| error.to_string())
        }

        pub(super) fn into_tensor<const D: usize>(self) -> Tensor<D> {
            Tensor::from_primitive::<Cube>(<Cube as FromCube>::from_cube(self.tensor))
        }
    }

    /// `Cube` is one of two backends, depending on whether anything in the build asked for fusion;
    /// both are covered so that this crate need not know.
    trait FromCube: Backend {
        fn from_cube(tensor: CubeTensor) -> FloatTensor<Self>;
    }

    impl FromCube for CubeBackend {
        fn from_cube(tensor: CubeTensor) -> CubeTensor {
            tensor
        }
    }

    impl<B: FusionBackend + FromCube> FromCube for Fusion<B> {
        /// As Burn's fusion registers a tensor that comes from the host.
        fn from_cube(tensor: CubeTensor) -> FloatTensor<Self> {
            let tensor = B::from_cube(tensor);
            let client = get_client::<B>(&tensor.device());
            let (shape, dtype) = (tensor.shape(), tensor.dtype());
            let handle = B::float_tensor_handle(tensor);
            let init =
                InitOperationIr::create(shape, dtype, || client.register_tensor_handle(handle));
            let (init, nothing) = (OperationIr::Init(init), NoOp::<B>::new());
            client.register(StreamId::current(), init, nothing).output()
        }
    }
}
