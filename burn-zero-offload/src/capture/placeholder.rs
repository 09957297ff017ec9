//! What stands on a leaf where its gradient would be.
//!
//! Burn's containers and optimizers visit a parameter only if its leaf has a gradient, so there must
//! be one. Ours is a tensor of NaN with one element in each dimension (two in the first where that
//! is the parameter's own shape): it costs nothing to hold, sums of placeholders are placeholders,
//! its shape tells it from a gradient, and whatever takes it for one gets NaN instead of silently
//! not training. A tensor without elements would cost even less, but Burn's fusion was seen running
//! it in one kernel with tensors of a single element, over no elements at all.

use std::any::Any;
use std::sync::Arc;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, Shape, TensorData};
use parking_lot::Mutex;

/// The placeholder of one parameter, made at its first use and shared by all later ones.
#[derive(Clone, Default)]
pub(super) struct Placeholder(Arc<Mutex<Option<Box<dyn Any + Send>>>>);

impl Placeholder {
    /// The placeholder for a gradient of `shape` and `dtype` on `device`.
    pub(super) fn get<B: Backend>(
        &self,
        shape: &Shape,
        dtype: DType,
        device: &B::Device,
    ) -> FloatTensor<B> {
        let mut made = self.0.lock();
        let known = made
            .as_ref()
            .and_then(|made| made.downcast_ref::<FloatTensor<B>>());
        if let Some(known) = known
            && known.dtype() == dtype
            && known.device() == *device
        {
            return known.clone();
        }
        let shape = placeholder_shape(shape);
        let data = TensorData::full_dtype(shape, f32::NAN, dtype);
        let placeholder = B::float_from_data(data, device);
        *made = Some(Box::new(placeholder.clone()));
        placeholder
    }
}

/// The shape of the placeholder of a parameter of `shape`; never equal to it.
pub(crate) fn placeholder_shape(shape: &Shape) -> Shape {
    let mut dims = vec![1; shape.num_dims()];
    if shape.num_elements() == 1 {
        dims[0] = 2;
    }
    Shape::from(dims)
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn::backend::ops::FloatTensorOps;
    use burn::tensor::read_sync;

    use super::*;

    #[test]
    fn a_placeholder_is_never_of_the_parameters_shape() {
        for dims in [vec![1], vec![1, 1], vec![2], vec![0], vec![3, 1, 2]] {
            let shape = Shape::from(dims);
            let placeholder = placeholder_shape(&shape);
            assert_ne!(placeholder, shape);
            assert_eq!(placeholder.num_dims(), shape.num_dims());
            assert!(placeholder.num_elements() <= 2);
        }
    }

    #[test]
    fn a_placeholder_is_nan_in_the_gradients_type() {
        let placeholder = Placeholder::default();
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let tensor = placeholder.get::<Flex>(&Shape::from([4, 4]), dtype, &Default::default());
            assert_eq!(tensor.dtype(), dtype);
            let data = read_sync(Flex::float_into_data(tensor)).unwrap();
            assert!(data.iter::<f32>().all(f32::is_nan) && data.num_elements() == 1);
        }
    }
}
