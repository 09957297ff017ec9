//! Weights that are still being computed, as memory of a tensor on the host.
//!
//! Burn's tensors on Flex look at their memory when they compute. Memory of this kind waits then, so every
//! reader sees the finished weights, whichever way it came to the tensor.

use std::fmt;
use std::sync::{Arc, OnceLock};

use burn::tensor::{AllocationProperty, Bytes};
use burn_std::{
    AccessError, AccessPolicy, AllocationController, SharedBytesAllocationController, SplitError,
};

/// Where the weights will be. Dropping all of its clones without keeping the promise is a failure that
/// readers are told.
#[derive(Clone)]
pub(super) struct Promise(Arc<Promisor>);

struct Promisor(Arc<Kept>);

/// The weights, or why there are none.
type Kept = OnceLock<Result<bytes::Bytes, String>>;

impl Promise {
    /// A promise, and `len` bytes that hold what it will be kept with.
    pub(super) fn of(len: usize) -> (Self, Bytes) {
        let kept: Arc<Kept> = Arc::default();
        let controller = Promised {
            kept: kept.clone(),
            len,
            controller: OnceLock::new(),
        };
        // SAFETY: the first `len` bytes are initialised: `Promised::memory` and `memory_mut` return bytes of a
        // `bytes::Bytes` of that length, which `wait` checks, or an error. `Bytes` go from thread to thread:
        // so do the cells and `bytes::Bytes` in it.
        #[allow(unsafe_code)]
        let bytes = unsafe { Bytes::from_controller(Box::new(controller), len) };
        (Self(Arc::new(Promisor(kept))), bytes)
    }

    /// Keeps it. The first word counts.
    pub(super) fn keep(&self, result: Result<Bytes, String>) {
        self.0
            .keep(result.map(|bytes| bytes::Bytes::from_owner(Owner(bytes))));
    }
}

impl Promisor {
    fn keep(&self, result: Result<bytes::Bytes, String>) {
        let _ = self.0.set(result);
    }
}

impl Drop for Promisor {
    fn drop(&mut self) {
        self.keep(Err(
            "the weights were given up before they were computed".into()
        ));
    }
}

impl fmt::Debug for Promise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Promise {{ kept: {} }}", self.0.0.get().is_some())
    }
}

struct Owner(Bytes);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// The memory of a tensor.
struct Promised {
    kept: Arc<Kept>,
    len: usize,
    /// What manages the weights once they are there; copies them when a holder wants to change them.
    controller: OnceLock<SharedBytesAllocationController>,
}

impl Promised {
    /// Waits for the weights.
    fn wait(&self) -> Result<&SharedBytesAllocationController, AccessError> {
        if let Some(controller) = self.controller.get() {
            return Ok(controller);
        }
        match self.kept.wait() {
            Ok(weights) if weights.len() == self.len => {
                let controller = || {
                    SharedBytesAllocationController::new(
                        weights.clone(),
                        AllocationProperty::Native,
                    )
                };
                Ok(self.controller.get_or_init(controller))
            }
            Ok(weights) => Err(AccessError::Read(format!(
                "{} bytes of weights came where {} were expected",
                weights.len(),
                self.len
            ))),
            Err(reason) => Err(AccessError::Read(reason.clone())),
        }
    }
}

impl AllocationController for Promised {
    fn alloc_align(&self) -> usize {
        align_of::<u128>()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Native
    }

    fn capacity(&self) -> usize {
        self.len
    }

    fn memory(&self, policy: AccessPolicy) -> Result<&[std::mem::MaybeUninit<u8>], AccessError> {
        self.wait()?.memory(policy)
    }

    #[allow(unsafe_code)]
    unsafe fn memory_mut(
        &mut self,
        policy: AccessPolicy,
    ) -> Result<&mut [std::mem::MaybeUninit<u8>], AccessError> {
        self.wait()?;
        let controller = self.controller.get_mut();
        let controller = controller.ok_or(AccessError::WouldCopy)?;
        // SAFETY: the caller promises what this function's own contract asks for, which is the same.
        unsafe { controller.memory_mut(policy) }
    }

    fn split(
        &mut self,
        offset: usize,
    ) -> Result<(Box<dyn AllocationController>, Box<dyn AllocationController>), SplitError> {
        if self.wait().is_err() {
            return Err(SplitError::Unsupported);
        }
        let controller = self.controller.get_mut();
        controller.ok_or(SplitError::Unsupported)?.split(offset)
    }

    fn duplicate(&self) -> Option<Box<dyn AllocationController>> {
        if let Some(controller) = self.controller.get() {
            return controller.duplicate();
        }
        Some(Box::new(Self {
            kept: self.kept.clone(),
            len: self.len,
            controller: OnceLock::new(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::time::Duration;

    use burn::tensor::{DType, Device, Tensor, TensorData};

    use super::*;

    fn tensor() -> (Promise, Tensor<1>) {
        let (promise, bytes) = Promise::of(8);
        let data = TensorData::from_bytes(bytes, [2], DType::F32);
        (
            promise,
            Tensor::from_data(data, (&Device::flex(), DType::F32)),
        )
    }

    fn weights() -> Bytes {
        Bytes::from_elems(vec![1.5f32, -2.0])
    }

    #[test]
    fn readers_wait_for_the_weights() {
        let (promise, tensor) = tensor();
        let keeper = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            promise.keep(Ok(weights()));
        });
        // Neither of these looks at the memory.
        let (clone, shape) = (tensor.clone(), tensor.shape());
        assert_eq!(shape.as_slice(), [2]);
        let doubled = clone * 2.0;
        assert_eq!(doubled.try_into_vec_as::<f32>().unwrap(), [3.0, -4.0]);
        assert_eq!(tensor.try_into_vec_as::<f32>().unwrap(), [1.5, -2.0]);
        keeper.join().unwrap();
    }

    #[test]
    fn weights_are_taken_over_without_a_copy_and_copied_by_who_changes_them() {
        let (promise, bytes) = Promise::of(8);
        let kept = weights();
        let place = kept.as_ptr();
        promise.keep(Ok(kept));
        assert_eq!(bytes.as_ptr(), place);
        let mut own = bytes.clone();
        own[0] = 9;
        assert_ne!(own.as_ptr(), place);
        assert_eq!(&bytes[..], &weights()[..]);
        promise.keep(Err("too late".into()));
        assert_eq!(&bytes[1..], &own[1..]);
    }

    #[test]
    fn a_broken_promise_is_told_and_hangs_nobody() {
        for broken in [0, 1, 2] {
            let (promise, bytes) = Promise::of(8);
            match broken {
                0 => promise.keep(Err("the link is down".into())),
                1 => promise.keep(Ok(Bytes::from_elems(vec![0u8; 4]))),
                _ => drop(promise),
            }
            let read = catch_unwind(AssertUnwindSafe(|| bytes[0]));
            let message = crate::panics::message(read.unwrap_err());
            let expected = ["the link is down", "4 bytes of weights", "given up"][broken];
            assert!(message.contains(expected), "{message}");
        }
    }
}
