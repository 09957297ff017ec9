//! A value in every element.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use cubecl::std::tensor::layout::linear::LinearViewMut;

use super::launch::{Launch, elem_type};

#[cube(launch, address_type = "dynamic")]
fn fill_kernel<F: Float, N: Size>(
    mut out: LinearViewMut<'_, Vector<F, N>>,
    value: InputScalar,
    #[define(F)] _dtype: ElemType,
) {
    let units = CUBE_COUNT * CUBE_DIM as usize;
    for position in range_stepped(ABSOLUTE_POS, out.shape(), units) {
        out.write(position, Vector::new(value.get::<F>()));
    }
}

/// Writes `value` into every element of `tensor`.
///
/// # Arguments
///
/// * `tensor` - f32, f16 or bf16, contiguous; written although it is borrowed: the caller holds the only
///   handle.
pub(crate) fn fill(tensor: &CubeTensor, value: f32) {
    debug_assert!(tensor.is_contiguous());
    let Some(launch) = Launch::over(tensor, tensor, 1) else {
        return;
    };
    let dtype = elem_type(tensor.dtype);
    fill_kernel::launch(
        &tensor.client,
        launch.cube_count,
        launch.cube_dim,
        launch.address_type,
        launch.vector_size,
        launch.gradient.into_linear_view(),
        InputScalar::new(value, dtype),
        dtype,
    );
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::super::fixtures::*;
    use super::super::twin;
    use super::*;

    #[test]
    fn every_element_is_filled_and_nothing_else() {
        for precision in PRECISIONS {
            for len in LENGTHS {
                let tensor = upload(&elements(precision, len, 1), precision, [len]);
                fill(&tensor, f32::NAN);
                let filled = twin::widen(&download(&tensor), precision);
                assert_eq!(filled.len(), len);
                assert!(
                    filled.iter().all(|value| value.is_nan()),
                    "{precision:?} {len}"
                );
                fill(&tensor, 1.5);
                let filled = twin::widen(&download(&tensor), precision);
                assert!(
                    filled.iter().all(|&value| value == 1.5),
                    "{precision:?} {len}"
                );
            }
        }
    }
}
