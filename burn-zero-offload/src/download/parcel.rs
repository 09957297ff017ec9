//! What travels in one transfer, and how it is taken apart on the host.

use burn::backend::Flex;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::tensor::read_sync;

use crate::kernels::twin::count_non_finite_bytes;
use crate::optimize::Precision;

/// A gradient that has arrived: what this station hands on.
#[derive(Debug)]
pub(crate) struct Arrived<'a> {
    /// The parameter's slot.
    pub(crate) slot: usize,
    /// Element type of `bytes`.
    pub(crate) precision: Precision,
    /// The elements in row-major order, native endian; any alignment. Valid during the call only.
    pub(crate) bytes: &'a [u8],
    /// How many elements are NaN or infinite.
    pub(crate) non_finite: u64,
    /// The loss scale they carry.
    pub(crate) scale: f32,
}

/// One gradient of a parcel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    pub(super) slot: usize,
    /// Element type on the wire.
    pub(super) precision: Precision,
    /// Number of elements.
    pub(super) len: usize,
    /// Where it starts in the parcel's tensor, in elements.
    #[cfg_attr(not(feature = "cubecl-backend"), expect(dead_code))]
    pub(super) offset: usize,
    /// The loss scale it carries.
    pub(super) scale: f32,
}

impl Member {
    /// Bytes on the wire.
    pub(super) fn bytes(&self) -> usize {
        self.len * self.precision.size()
    }
}

/// Gradients that travel together.
pub(super) enum Parcel {
    /// Already host memory.
    Flex(Vec<(Member, FloatTensor<Flex>)>),
    #[cfg(feature = "cubecl-backend")]
    Cube(Box<cube::CubeParcel>),
}

impl Parcel {
    /// Whether it is still on a device of its own.
    pub(super) fn is_on_a_device(&self) -> bool {
        !matches!(self, Self::Flex(_))
    }

    /// The gradients in it.
    pub(super) fn members(&self) -> Vec<Member> {
        match self {
            Self::Flex(gradients) => gradients.iter().map(|(member, _)| *member).collect(),
            #[cfg(feature = "cubecl-backend")]
            Self::Cube(parcel) => parcel.members.clone(),
        }
    }

    /// Brings the gradients to the host and hands each to `deliver`. Blocks until they are there.
    /// Returns the bytes of pinned memory that took.
    pub(super) fn open(
        self,
        landed: impl FnOnce() -> Result<(), String>,
        mut deliver: impl FnMut(Arrived<'_>) -> Result<(), String>,
    ) -> Result<usize, String> {
        match self {
            Self::Flex(gradients) => {
                landed()?;
                for (member, gradient) in gradients {
                    let data = read_sync(Flex::float_into_data(gradient))
                        .map_err(|error| error.to_string())?;
                    let precision = member.precision;
                    let bytes = data.as_bytes();
                    deliver(Arrived {
                        slot: member.slot,
                        precision,
                        bytes,
                        non_finite: count_non_finite_bytes(bytes, precision) as u64,
                        scale: member.scale,
                    })?;
                }
                Ok(0)
            }
            #[cfg(feature = "cubecl-backend")]
            Self::Cube(parcel) => parcel.open(landed, deliver),
        }
    }
}

#[cfg(feature = "cubecl-backend")]
pub(super) mod cube {
    use burn::tensor::read_sync;
    use burn_cubecl::cubecl::bytes::AllocationProperty;
    use burn_cubecl::tensor::CubeTensor;
    use cubecl::server::{CopyDescriptor, Handle};

    use super::{Arrived, Member};

    /// A tensor with the gradients, and what was counted in them.
    ///
    /// # Order
    ///
    /// The parcel is read on the stream of the thread that opens it, while the kernels that filled it
    /// ran on the stream of the thread that runs backward. CubeCL orders two streams by allocations
    /// alone (`cubecl-server`, `stream/event.rs`): a command with a buffer of another stream waits for
    /// all that was enqueued there, but only if the two have not met since that buffer was
    /// *allocated*. Kernels enqueued later into an older buffer are not waited for. `marker` closes
    /// that gap: it is allocated after the last kernel that writes `gradients` or `counts`, so a
    /// stream that has met the other one after the marker's allocation has also waited for those
    /// kernels, and one that has not is made to. Commands are handed to the device in the order in
    /// which threads make them, so the marker is there before the read that uses it.
    pub(in crate::download) struct CubeParcel {
        pub(in crate::download) gradients: CubeTensor,
        /// Non-finite elements of each member.
        pub(in crate::download) counts: CubeTensor,
        pub(in crate::download) marker: Handle,
        pub(in crate::download) members: Vec<Member>,
        /// Elements of `gradients` that are filled, in its memory order; all of a large gradient.
        pub(in crate::download) filled: Option<usize>,
    }

    impl CubeParcel {
        pub(super) fn open(
            self,
            landed: impl FnOnce() -> Result<(), String>,
            mut deliver: impl FnMut(Arrived<'_>) -> Result<(), String>,
        ) -> Result<usize, String> {
            let client = self.gradients.client.clone();
            let counts = self.members.len();
            let copies = vec![
                match self.filled {
                    Some(len) => prefix(&self.gradients, len),
                    None => whole(&self.gradients),
                },
                prefix(&self.counts, counts),
                CopyDescriptor::new(self.marker.clone().binding(), [4].into(), [1].into(), 1),
            ];
            let read = read_sync(client.read_tensor_async(copies));
            let [bytes, counts, _marker] = <[_; 3]>::try_from(read.map_err(|e| e.to_string())?)
                .map_err(|all| format!("{} of 3 copies came back", all.len()))?;
            landed()?;
            let pinned = match bytes.property() {
                AllocationProperty::Pinned => bytes.len(),
                _ => 0,
            };
            // On the CPU runtime the bytes *are* the device's buffers, which `self` keeps alive.
            let counts: &[u8] = &counts;
            for (index, member) in self.members.iter().enumerate() {
                let start = member.offset * member.precision.size();
                let count = counts.get(index * 4..index * 4 + 4);
                let count = count.and_then(|count| count.try_into().ok());
                deliver(Arrived {
                    slot: member.slot,
                    precision: member.precision,
                    bytes: bytes
                        .get(start..start + member.bytes())
                        .ok_or("the copy is shorter than the gradient")?,
                    non_finite: u32::from_ne_bytes(count.ok_or("the counters are missing")?).into(),
                    scale: member.scale,
                })?;
            }
            Ok(pinned)
        }
    }

    /// Reads a tensor row by row; rows may be padded.
    fn whole(tensor: &CubeTensor) -> CopyDescriptor {
        CopyDescriptor::new(
            tensor.handle.clone().binding(),
            tensor.meta.shape().clone(),
            tensor.meta.strides().clone(),
            tensor.dtype.size(),
        )
    }

    /// Reads the first `len` elements of a contiguous tensor.
    fn prefix(tensor: &CubeTensor, len: usize) -> CopyDescriptor {
        CopyDescriptor::new(
            tensor.handle.clone().binding(),
            [len].into(),
            [1].into(),
            tensor.dtype.size(),
        )
    }
}
