//! Which buffer a tensor holds.
//!
//! The engine has to know whether the weights it is given in a step are the ones it handed out
//! last, without reading them: a user may go back to an older clone of the model, edit weights with
//! a mapper or load them past Burn's records.

use std::sync::{Arc, Weak};

use burn::backend::Flex;
use burn::tensor::{Bytes, Tensor};

/// Identifies a buffer for as long as the id exists; never equal for two different buffers.
#[derive(Clone, Debug)]
pub(crate) enum StorageId {
    /// A weak reference keeps the address from being given to another buffer, not the buffer alive.
    Flex(Weak<Bytes>),
    /// CubeCL memory, whose ids are never reused, and what a tensor shows of it: where it begins and
    /// its strides.
    #[cfg(feature = "cubecl-backend")]
    Memory(usize, u64, Vec<usize>),
    /// A tensor of the fusion runtime; ids are never reused. Another id may still be the same
    /// memory (seen from another thread), the same id never another one.
    #[cfg(feature = "cubecl-backend")]
    Fusion(burn_ir::TensorId),
}

impl PartialEq for StorageId {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Flex(a), Self::Flex(b)) => a.ptr_eq(b),
            #[cfg(feature = "cubecl-backend")]
            (Self::Memory(a, from, strides), Self::Memory(b, other, others)) => {
                a == b && from == other && strides == others
            }
            #[cfg(feature = "cubecl-backend")]
            (Self::Fusion(a), Self::Fusion(b)) => a == b,
            #[cfg(feature = "cubecl-backend")]
            _ => false,
        }
    }
}

impl StorageId {
    /// The buffer of `tensor`, if the tensor is all of it, in order. `None` where that cannot be
    /// told; the weights have to be compared then.
    pub(crate) fn of<const D: usize>(tensor: &Tensor<D>) -> Option<Self> {
        let tensor = tensor.clone().inner();
        #[cfg(feature = "cubecl-backend")]
        if let Ok(primitive) = tensor.clone().try_into_primitive::<burn_cubecl::Cube>() {
            return cube::HasStorage::storage(&primitive);
        }
        let primitive = tensor.try_into_primitive::<Flex>().ok()?;
        let layout = primitive.layout();
        let whole = layout.is_contiguous() && layout.start_offset() == 0;
        whole.then(|| Self::Flex(Arc::downgrade(&primitive.data_arc())))
    }
}

/// Gives a tensor up. If nobody else holds it, its memory is free when this returns.
///
/// Dropping it would be enough without fusion. With fusion a drop is one more operation in the queue of
/// another thread: what is allocated next may come first.
pub(crate) fn release<const D: usize>(tensor: Tensor<D>) {
    let tensor = tensor.inner();
    #[cfg(feature = "cubecl-backend")]
    if let Ok(primitive) = tensor.try_into_primitive::<burn_cubecl::Cube>() {
        <burn_cubecl::Cube as cube::Release>::release(primitive);
    }
    #[cfg(not(feature = "cubecl-backend"))]
    drop(tensor);
}

#[cfg(feature = "cubecl-backend")]
mod cube {
    use burn::backend::Backend;
    use burn::backend::tensor::FloatTensor;
    use burn_cubecl::CubeBackend;
    use burn_cubecl::tensor::CubeTensor;
    use burn_fusion::{Fusion, FusionBackend, FusionRuntime, FusionTensor};

    use super::StorageId;

    /// See [`release`](super::release).
    pub(super) trait Release: Backend {
        fn release(tensor: FloatTensor<Self>);
    }

    impl Release for CubeBackend {
        fn release(tensor: FloatTensor<Self>) {
            drop(tensor);
        }
    }

    impl<B: FusionBackend + Release> Release for Fusion<B> {
        fn release(tensor: FloatTensor<Self>) {
            let client = tensor.client.clone();
            B::release(client.resolve_tensor_float::<B>(tensor));
        }
    }

    /// `burn_cubecl::Cube` has one of two tensor types, depending on whether anything in the build
    /// asked for fusion; both are covered so that this crate need not know.
    pub(super) trait HasStorage {
        fn storage(&self) -> Option<StorageId>;
    }

    impl HasStorage for CubeTensor {
        fn storage(&self) -> Option<StorageId> {
            let handle = &self.handle;
            Some(StorageId::Memory(
                handle.memory.clone().binding().id().value,
                handle.offset_start.unwrap_or(0),
                self.meta.strides().to_vec(),
            ))
        }
    }

    impl<R: FusionRuntime> HasStorage for FusionTensor<R> {
        fn storage(&self) -> Option<StorageId> {
            Some(StorageId::Fusion(self.id))
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn clones_share_a_buffer_and_copies_do_not() {
        let device = Device::flex();
        let a = Tensor::<2>::from_floats([[1.0, 2.0], [3.0, 4.0]], &device);
        let id = StorageId::of(&a);
        assert!(id.is_some());
        assert_eq!(id, StorageId::of(&a.clone()));
        assert_eq!(
            id,
            StorageId::of(&Tensor::from_inner(a.clone()).require_grad())
        );
        assert_ne!(id, StorageId::of(&(a.clone() * 1.0)));
        assert_eq!(StorageId::of(&a.transpose()), None);
    }

    #[test]
    fn an_id_keeps_its_address_from_being_reused() {
        let device = Device::flex();
        let make = || Tensor::<1>::from_floats([1.0, 2.0, 3.0], &device);
        let old = StorageId::of(&make());
        for _ in 0..100 {
            assert_ne!(old, StorageId::of(&make()));
        }
    }

    /// With fusion too, where a drop alone is carried out some time later.
    #[cfg(feature = "cpu")]
    #[test]
    fn released_memory_is_free_at_once() {
        let device = Device::cpu();
        // The device's memory is shared with other tests: a size that none of them has.
        let bytes = 123 << 20;
        let in_use = || device.memory_pool_usage().unwrap().bytes_in_use;
        let data = burn::tensor::TensorData::new(vec![1.0f32; bytes / 4], [bytes / 4]);
        for _ in 0..5 {
            let tensor = Tensor::<1>::from_data(data.clone(), &device);
            device.sync().unwrap();
            let (held, clone) = (in_use(), tensor.clone());
            release(tensor);
            assert!(in_use() > held - bytes as u64 / 2, "the clone holds it");
            release(clone);
            assert!(in_use() < held - bytes as u64 / 2);
        }
    }
}
