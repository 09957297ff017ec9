//! Counting what is not finite in a gradient that travels as it is.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use cubecl::std::tensor::layout::linear::LinearView;

use super::launch::{Launch, elem_type};

/// One per lane that is NaN or infinite, else zero.
///
/// A value is not finite if all bits of its exponent are set. They are looked at as an integer:
/// compilers with fast math may assume that comparisons meet no NaN and no infinity, but not what
/// an integer holds. Adding one to the exponent carries into the sign's place, cleared before, only
/// from there. f16 and bf16 are widened first, which keeps the kind of every value and needs no
/// 16-bit integers, which WGSL lacks.
#[cube]
pub(super) fn non_finite<F: Float, N: Size>(values: Vector<F, N>) -> Vector<u32, N> {
    let bits = Vector::<u32, N>::reinterpret(Vector::<f32, N>::cast_from(values));
    let magnitude = bits & Vector::new(0x7fff_ffffu32);
    (magnitude + Vector::new(0x0080_0000u32)) >> Vector::new(31u32)
}

/// Adds what one unit found. Without overflow there is nothing to add, and no atomic runs.
#[cube]
pub(super) fn report<N: Size>(
    found: Vector<u32, N>,
    counts: &mut Tensor<Atomic<u32>>,
    index: usize,
) {
    let found = found.vector_sum();
    if found > 0 {
        counts[index].fetch_add(found);
    }
}

#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
pub(super) fn count_kernel<F: Float, N: Size>(
    gradient: LinearView<'_, Vector<F, N>>,
    counts: &mut Tensor<Atomic<u32>>,
    index: usize,
    #[define(F)] _dtype: ElemType,
) {
    let units = CUBE_COUNT * CUBE_DIM as usize;
    let mut found = Vector::<u32, N>::zero();
    for position in range_stepped(ABSOLUTE_POS, gradient.shape(), units) {
        found += non_finite(gradient.read(position));
    }
    report(found, counts, index);
}

/// Adds the number of elements of `gradient` that are NaN or infinite to `counts[index]`.
///
/// # Arguments
///
/// * `gradient` - f32, f16 or bf16, of any shape and strides.
/// * `counts` - u32, one dimension.
pub(crate) fn count_non_finite(gradient: &CubeTensor, counts: &CubeTensor, index: usize) {
    let Some(launch) = Launch::over(gradient, gradient, super::WIRE_ALIGNMENT) else {
        return;
    };
    let dtype = elem_type(gradient.dtype);
    count_kernel::launch(
        &gradient.client,
        launch.cube_count,
        launch.cube_dim,
        launch.address_type,
        launch.vector_size,
        launch.gradient.into_linear_view(),
        counts.clone().into_tensor_arg(),
        index,
        dtype,
    );
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::super::fixtures::*;
    use super::super::twin::count_non_finite_bytes;
    use super::*;
    use crate::optimize::Precision;

    #[test]
    fn counts_are_those_of_the_host_for_every_length() {
        for precision in PRECISIONS {
            let counts = counts(LENGTHS.len() + 1);
            let mut expected = vec![];
            for (index, len) in LENGTHS.into_iter().enumerate() {
                let bytes = elements(precision, len, index);
                count_non_finite(&upload(&bytes, precision, [len]), &counts, index);
                expected.push(count_non_finite_bytes(&bytes, precision));
            }
            expected.push(0);
            assert_eq!(counted(&counts), expected, "{precision:?}");
        }
    }

    #[test]
    fn counts_are_those_of_the_host_for_every_layout() {
        for precision in PRECISIONS {
            let strided = strided(precision);
            let counts = counts(strided.len());
            let mut expected = vec![];
            for (index, (_, gradient, bytes)) in strided.iter().enumerate() {
                count_non_finite(gradient, &counts, index);
                expected.push(count_non_finite_bytes(bytes, precision));
            }
            assert_eq!(counted(&counts), expected, "{precision:?}");
        }
    }

    #[test]
    fn counts_of_small_and_large_gradients_add_up_under_one_index() {
        let counts = counts(2);
        for len in [1, 5, STEPS] {
            let bytes = vec![0xff; len * 4];
            count_non_finite(&upload(&bytes, Precision::F32, [len]), &counts, 1);
        }
        assert_eq!(counted(&counts), [0, STEPS + 6]);
    }
}
