//! How a kernel is spread over a gradient: vectors, units and the type of positions.

use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::untile;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::{calculate_cube_count_elemwise, tensor_vector_size_parallel};

/// Units of a launch; each walks over the gradient in steps of their number. Enough to fill the
/// largest GPUs, few enough that starting them is not the work itself.
const MAX_UNITS: usize = 1 << 18;

/// What a launch needs to know about the gradient it walks over.
pub(super) struct Launch {
    /// The gradient; flat where its strides allow it.
    pub(super) gradient: CubeTensor,
    /// Elements read and written at once.
    pub(super) vector_size: VectorSize,
    pub(super) cube_dim: CubeDim,
    pub(super) cube_count: CubeCount,
    /// Wide enough for every position, and for the step past the last one.
    pub(super) address_type: AddressType,
}

impl Launch {
    /// `None` if there is nothing to do. `partner` is the tensor written along with the gradient,
    /// contiguous, or the gradient itself; vectors begin at multiples of `alignment` in it.
    pub(super) fn over(
        gradient: &CubeTensor,
        partner: &CubeTensor,
        alignment: usize,
    ) -> Option<Self> {
        let gradient = flat(untile(gradient.clone()));
        let elements = gradient.meta.num_elements();
        if elements == 0 {
            return None;
        }
        let client = gradient.client.clone();
        // The wider of the two element types, so that neither side exceeds the device's widest
        // load.
        let widest = gradient.dtype.size().max(partner.dtype.size());
        let vector_size = tensor_vector_size_parallel(
            client
                .io_optimized_vector_sizes(widest)
                .filter(|&size| alignment.is_multiple_of(size)),
            gradient.meta.shape(),
            gradient.meta.strides(),
            gradient.meta.num_dims() - 1,
        );
        let units = (elements / vector_size).min(MAX_UNITS);
        let cube_dim = CubeDim::new(&client, units);
        let cube_count = calculate_cube_count_elemwise(&client, units, cube_dim);
        // The last step leads past the end by up to the units launched; rounding to whole cubes
        // and to the device's limits of a grid at most doubles them.
        let address_type = AddressType::from_len(elements + 2 * MAX_UNITS)
            .max(gradient.required_address_type())
            .max(partner.required_address_type());
        Some(Self {
            gradient,
            vector_size,
            cube_dim,
            cube_count,
            address_type,
        })
    }
}

/// One dimension if the elements lie in order: vectors then need not divide the last dimension.
fn flat(tensor: CubeTensor) -> CubeTensor {
    if !tensor.is_contiguous() {
        return tensor;
    }
    let elements = tensor.meta.num_elements();
    CubeTensor::new_contiguous(
        tensor.client,
        tensor.device,
        Shape::from([elements]),
        tensor.handle,
        tensor.dtype,
    )
}

/// The element type a kernel is compiled for. Flex32 is stored as f32.
pub(crate) fn elem_type(dtype: DType) -> ElemType {
    ElemType::Float(match dtype {
        DType::F32 | DType::Flex32 => FloatKind::F32,
        DType::F16 => FloatKind::F16,
        DType::BF16 => FloatKind::BF16,
        other => unreachable!("gradients are f32, f16 or bf16, not {other:?}"),
    })
}
