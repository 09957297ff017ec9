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

#[cfg(feature = "cubecl-backend")]
mod cube {
    use burn_cubecl::tensor::CubeTensor;
    use burn_fusion::{FusionRuntime, FusionTensor};

    use super::StorageId;

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
}
