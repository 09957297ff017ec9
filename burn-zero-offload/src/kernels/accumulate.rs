//! Summing the gradients of several passes where they are.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use cubecl::std::tensor::layout::linear::{LinearView, LinearViewMut};

use super::launch::{Launch, elem_type};

#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
pub(super) fn accumulate_kernel<F: Float, N: Size>(
    gradient: LinearView<'_, Vector<F, N>>,
    mut sum: LinearViewMut<'_, Vector<f32, N>>,
    #[define(F)] _dtype: ElemType,
) {
    let units = CUBE_COUNT * CUBE_DIM as usize;
    for position in range_stepped(ABSOLUTE_POS, gradient.shape(), units) {
        let widened = Vector::<f32, N>::cast_from(gradient.read(position));
        sum.write(position, sum.read(position) + widened);
    }
}

/// Adds the elements of `gradient`, in row-major order, to `sum`, in f32: one rounding for each
/// addition, as the host's sum has.
///
/// # Arguments
///
/// * `sum` - f32, contiguous; written although it is borrowed: the caller holds the only other
///   handle.
/// * `gradient` - f32, f16 or bf16, of any strides and as many elements.
pub(crate) fn accumulate(sum: &CubeTensor, gradient: &CubeTensor) {
    debug_assert_eq!(sum.meta.num_elements(), gradient.meta.num_elements());
    debug_assert!(sum.is_contiguous());
    let Some(launch) = Launch::over(gradient, sum, super::WIRE_ALIGNMENT) else {
        return;
    };
    let dtype = elem_type(gradient.dtype);
    accumulate_kernel::launch(
        &gradient.client,
        launch.cube_count,
        launch.cube_dim,
        launch.address_type,
        launch.vector_size,
        launch.gradient.into_linear_view(),
        sum.clone().into_linear_view(),
        dtype,
    );
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::super::fixtures::*;
    use super::super::twin;
    use super::*;
    use crate::optimize::Precision;

    #[track_caller]
    fn assert_accumulates(gradient: &CubeTensor, bytes: &[u8], precision: Precision) {
        let len = gradient.meta.num_elements();
        let start = elements(Precision::F32, len, len + 1);
        let mut expected = twin::widen(&start, Precision::F32);
        let sum = upload(&start, Precision::F32, [len]);
        for _ in 0..2 {
            accumulate(&sum, gradient);
            twin::accumulate(&mut expected, bytes, precision);
        }
        let expected = bytemuck::cast_slice(&expected);
        assert_same(&download(&sum), expected, precision, Precision::F32);
    }

    #[test]
    fn sums_are_those_of_the_host_for_every_length() {
        for precision in PRECISIONS {
            for (seed, len) in LENGTHS.into_iter().enumerate() {
                let bytes = elements(precision, len, seed);
                let gradient = upload(&bytes, precision, [len]);
                assert_accumulates(&gradient, &bytes, precision);
            }
        }
    }

    #[test]
    fn sums_are_those_of_the_host_for_every_layout() {
        for precision in PRECISIONS {
            for (_, gradient, bytes) in strided(precision) {
                assert_accumulates(&gradient, &bytes, precision);
            }
        }
    }

    #[test]
    fn gradients_larger_than_a_launch_are_walked_over_in_steps() {
        let bytes = elements(Precision::Bf16, STEPS, 3);
        let gradient = upload(&bytes, Precision::Bf16, [STEPS]);
        assert_accumulates(&gradient, &bytes, Precision::Bf16);
    }

    /// acceptance.md, gradient accumulation 25: in bf16 itself the sum would stay at 2048.
    #[test]
    fn small_bf16_contributions_are_not_lost_next_to_a_large_one() {
        let gradient = |value: f32| {
            let bytes = half::bf16::from_f32(value).to_ne_bytes();
            upload(&bytes, Precision::Bf16, [1])
        };
        let sum = upload(&[0; 4], Precision::F32, [1]);
        accumulate(&sum, &gradient(2048.0));
        for _ in 0..8 {
            accumulate(&sum, &gradient(0.5));
        }
        assert_eq!(download(&sum), 2052f32.to_ne_bytes());
    }
}
