//! Gathering gradients in one buffer, so that many small ones travel in one copy.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use cubecl::std::tensor::layout::linear::{LinearView, LinearViewMut};

use super::count::{non_finite, report};
use super::launch::{Launch, elem_type};

/// Gradients begin at multiples of this many elements in the wire, so that they can be written in
/// vectors: the widest ones of the runtimes divide it, or are not used.
pub(crate) const WIRE_ALIGNMENT: usize = 16;

#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
pub(super) fn pack_kernel<I: Float, O: Float, N: Size>(
    gradient: LinearView<'_, Vector<I, N>>,
    mut wire: LinearViewMut<'_, Vector<O, N>>,
    counts: &mut Tensor<Atomic<u32>>,
    start: usize,
    index: usize,
    #[define(I, O)] _dtypes: [ElemType; 2],
) {
    let units = CUBE_COUNT * CUBE_DIM as usize;
    let mut found = Vector::<u32, N>::zero();
    for position in range_stepped(ABSOLUTE_POS, gradient.shape(), units) {
        let sent = Vector::<O, N>::cast_from(gradient.read(position));
        wire.write(start + position, sent);
        found += non_finite(sent);
    }
    report(found, counts, index);
}

/// Writes the elements of `gradient`, in row-major order, to `wire` from element `offset` on, and
/// adds the number of those that are NaN or infinite *in the wire* to `counts[index]`: what became
/// infinite in the wire's narrower type counts as well.
///
/// Elements are rounded to nearest, ties to even. Other elements of the wire stay as they are.
///
/// # Arguments
///
/// * `gradient` - f32, f16 or bf16, of any shape and strides.
/// * `wire` - f32, f16 or bf16, one dimension, contiguous; written although it is borrowed, like
///   `counts`: the caller holds the only other handles.
/// * `offset` - a multiple of [`WIRE_ALIGNMENT`].
/// * `counts` - u32, one dimension.
pub(crate) fn pack(
    gradient: &CubeTensor,
    wire: &CubeTensor,
    offset: usize,
    counts: &CubeTensor,
    index: usize,
) {
    debug_assert!(offset.is_multiple_of(WIRE_ALIGNMENT));
    debug_assert!(offset + gradient.meta.num_elements() <= wire.meta.num_elements());
    let Some(launch) = Launch::over(gradient, wire, WIRE_ALIGNMENT) else {
        return;
    };
    let dtypes = [elem_type(gradient.dtype), elem_type(wire.dtype)];
    pack_kernel::launch(
        &gradient.client,
        launch.cube_count,
        launch.cube_dim,
        launch.address_type,
        launch.vector_size,
        launch.gradient.into_linear_view(),
        wire.clone().into_linear_view(),
        counts.clone().into_tensor_arg(),
        offset / launch.vector_size,
        index,
        dtypes,
    );
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::super::fixtures::*;
    use super::super::twin::{self, count_non_finite_bytes};
    use super::*;
    use crate::optimize::Precision;

    /// Packs the gradients with gaps between them and compares the whole wire.
    #[track_caller]
    fn assert_packs(gradients: &[(CubeTensor, Vec<u8>)], from: Precision, to: Precision) {
        let mut end = WIRE_ALIGNMENT;
        let offsets: Vec<usize> = gradients
            .iter()
            .map(|(gradient, _)| {
                let offset = end;
                // At least one element between two gradients, and after the last one.
                end = (end + gradient.meta.num_elements() + 1).next_multiple_of(WIRE_ALIGNMENT);
                offset
            })
            .collect();
        // Not a multiple of any vector, if there is room for it.
        let end = end - 1;
        let mut expected = elements(to, end, 1);
        let wire = upload(&expected, to, [end]);
        let counts = counts(gradients.len() + 1);
        let mut expected_counts = vec![];
        for (index, (gradient, bytes)) in gradients.iter().enumerate() {
            pack(gradient, &wire, offsets[index], &counts, index);
            let packed = twin::pack(bytes, from, to);
            let start = offsets[index] * to.size();
            expected[start..start + packed.len()].copy_from_slice(&packed);
            expected_counts.push(count_non_finite_bytes(&packed, to));
        }
        expected_counts.push(0);
        assert_same(&download(&wire), &expected, from, to);
        assert_eq!(counted(&counts), expected_counts, "{from:?} to {to:?}");
    }

    fn pairs() -> impl Iterator<Item = (Precision, Precision)> {
        let pairs = |from| PRECISIONS.into_iter().map(move |to| (from, to));
        PRECISIONS.into_iter().flat_map(pairs)
    }

    #[test]
    fn the_wire_is_that_of_the_host_for_every_length() {
        for (from, to) in pairs() {
            let gradients: Vec<_> = LENGTHS
                .into_iter()
                .enumerate()
                .map(|(seed, len)| {
                    let bytes = elements(from, len, seed);
                    (upload(&bytes, from, [len]), bytes)
                })
                .collect();
            assert_packs(&gradients, from, to);
        }
    }

    #[test]
    fn the_wire_is_that_of_the_host_for_every_layout() {
        for (from, to) in pairs() {
            let gradients: Vec<_> = strided(from)
                .into_iter()
                .map(|(_, gradient, bytes)| (gradient, bytes))
                .collect();
            assert_packs(&gradients, from, to);
        }
    }

    #[test]
    fn gradients_larger_than_a_launch_are_walked_over_in_steps() {
        let bytes = elements(Precision::F32, STEPS, 3);
        let gradient = upload(&bytes, Precision::F32, [STEPS]);
        assert_packs(&[(gradient, bytes)], Precision::F32, Precision::Bf16);
    }

    #[test]
    fn what_overflows_in_the_wire_is_counted() {
        let values = [65519.0f32, 65520.0, -1e6, 1e-30];
        let gradient = upload(bytemuck::cast_slice(&values), Precision::F32, [4]);
        let wire = upload(&[0; 8], Precision::F16, [4]);
        let counts = counts(1);
        pack(&gradient, &wire, 0, &counts, 0);
        assert_eq!(counted(&counts), [2]);
        let expected: Vec<u8> = [0x7bffu16, 0x7c00, 0xfc00, 0]
            .into_iter()
            .flat_map(u16::to_ne_bytes)
            .collect();
        assert_eq!(download(&wire), expected);
    }

    #[test]
    fn flex32_is_packed_as_the_f32_it_is_stored_as() {
        let bytes = elements(Precision::F32, 40, 9);
        let mut gradient = upload(&bytes, Precision::F32, [5, 8]);
        gradient.dtype = burn::tensor::DType::Flex32;
        assert_packs(&[(gradient, bytes)], Precision::F32, Precision::F16);
    }
}
