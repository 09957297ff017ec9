//! Gradients the tests of the kernels run over, on CubeCL's CPU runtime.

use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::tensor::{Bytes, DType, Shape, TensorData};
use burn_cubecl::ops::into_data_sync;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};

use super::twin::widen;
use crate::optimize::Precision;

pub(super) const PRECISIONS: [Precision; 3] = [Precision::F32, Precision::F16, Precision::Bf16];

/// Around the widths of vectors, of cubes and of the blocks of the twin.
pub(super) const LENGTHS: [usize; 29] = [
    0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257,
    1023, 1024, 1025, 70_001, 70_016,
];

/// More elements than a launch has units. An odd number of them goes one by one, so that units walk
/// on to a second and a third.
pub(super) const STEPS: usize = (1 << 19) + 1;

pub(super) fn device() -> CubeDevice {
    CubeDevice::cpu().unwrap()
}

/// Elements of every kind, as bytes; special ones first, last and in the middle.
pub(super) fn elements(precision: Precision, len: usize, seed: usize) -> Vec<u8> {
    // Beside the obvious: ties of bf16 and f16, the largest value f16 rounds down to itself and the
    // smallest it rounds to infinity, values that are subnormal in f16, bf16 and f32.
    const SINGLE: [u32; 18] = [
        0x7fc0_0000,
        0x7f80_0000,
        0xff80_0000,
        0x8000_0000,
        0x0000_0001,
        0x807f_ffff,
        0x477f_efff,
        0x477f_f000,
        0xc77f_f000,
        0x7f7f_ffff,
        0x7f7f_7fff,
        0xffff_ffff,
        0x3380_0000,
        0x3300_0000,
        0x3300_0001,
        0x3f80_8000,
        0x3f81_8000,
        0x7f80_0001,
    ];
    const HALF: [u16; 12] = [
        0x7c00, 0xfc00, 0x7c01, 0x7e00, 0x7f80, 0xff80, 0x7f81, 0x7fc0, 0x8000, 0x0001, 0x7bff,
        0x7f7f,
    ];
    let special = |i: usize| match () {
        () if i == 0 => Some(seed),
        () if i + 1 == len => Some(seed + 1),
        () if i == len / 2 => Some(seed + 2),
        () => None,
    };
    let mut state = seed as u64 + 1;
    let mut random = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        state >> 32
    };
    let half = |(i, bits): (usize, u64)| special(i).map_or(bits as u16, |s| HALF[s % HALF.len()]);
    let single =
        |(i, bits): (usize, u64)| special(i).map_or(bits as u32, |s| SINGLE[s % SINGLE.len()]);
    let bits = (0..len).map(|i| (i, random()));
    match precision {
        Precision::F32 => bits.flat_map(|at| single(at).to_ne_bytes()).collect(),
        _ => bits.flat_map(|at| half(at).to_ne_bytes()).collect(),
    }
}

pub(super) fn dtype(precision: Precision) -> DType {
    match precision {
        Precision::F32 => DType::F32,
        Precision::F16 => DType::F16,
        Precision::Bf16 => DType::BF16,
    }
}

pub(super) fn upload(bytes: &[u8], precision: Precision, shape: impl Into<Shape>) -> CubeTensor {
    let bytes = Bytes::from_bytes_vec(bytes.to_vec());
    let data = TensorData::from_bytes(bytes, shape.into(), dtype(precision));
    CubeBackend::float_from_data(data, &device())
}

pub(super) fn download(tensor: &CubeTensor) -> Vec<u8> {
    into_data_sync(tensor.clone()).as_bytes().to_vec()
}

/// A tensor of `len` counts that are not zero: kernels add.
pub(super) fn counts(len: usize) -> CubeTensor {
    let data = TensorData::new((0..len as u32).collect(), [len]);
    CubeBackend::int_from_data(data, &device())
}

/// What was added to [`counts`].
pub(super) fn counted(counts: &CubeTensor) -> Vec<usize> {
    let counts = into_data_sync(counts.clone()).try_to_vec::<u32>().unwrap();
    (0..)
        .zip(counts)
        .map(|(i, count)| count as usize - i)
        .collect()
}

/// Equal bits, or both NaN: conversions may change which NaN it is. x86's instruction from f32 to
/// bf16 takes subnormal numbers for zeros, on those CPUs that have it.
#[track_caller]
pub(super) fn assert_same(actual: &[u8], expected: &[u8], from: Precision, to: Precision) {
    assert_eq!(actual.len(), expected.len());
    let flushes = (from, to) == (Precision::F32, Precision::Bf16);
    let values = widen(actual, to).into_iter().zip(widen(expected, to));
    for (i, (a, e)) in values.enumerate() {
        let flushed = flushes && e.abs() <= f32::MIN_POSITIVE && a.to_bits() == (0.0 * e).to_bits();
        let same = a.to_bits() == e.to_bits() || a.is_nan() && e.is_nan();
        assert!(
            same || flushed,
            "{from:?} to {to:?}, element {i}: {a:e} instead of {e:e}"
        );
    }
}

/// Gradients that do not lie in order, with their elements in row-major order: transposed,
/// permuted, sliced (rows with gaps, and with a first element inside the buffer), expanded.
pub(super) fn strided(precision: Precision) -> Vec<(&'static str, CubeTensor, Vec<u8>)> {
    let size = precision.size();
    let gather = |bytes: &[u8], order: Vec<usize>| -> Vec<u8> {
        let element = |i: usize| bytes[i * size..(i + 1) * size].iter().copied();
        order.into_iter().flat_map(element).collect()
    };
    let mut out = vec![];
    for (rows, columns) in [(3, 5), (48, 80), (33, 130)] {
        let bytes = elements(precision, rows * columns, rows);
        let tensor = upload(&bytes, precision, [rows, columns]);
        let order = (0..rows * columns).map(|i| i % rows * columns + i / rows);
        let transposed = CubeBackend::float_transpose(tensor);
        out.push(("transposed", transposed, gather(&bytes, order.collect())));
    }

    let bytes = elements(precision, 4 * 6 * 32, 5);
    let tensor = upload(&bytes, precision, [4, 6, 32]);
    let order = (0..4 * 6 * 32).map(|i| (i / 32 % 4 * 6 + i / 128) * 32 + i % 32);
    let permuted = CubeBackend::float_permute(tensor, &[1, 0, 2]);
    out.push(("permuted", permuted, gather(&bytes, order.collect())));

    // Offsets a multiple of the runtime's alignment, else the slice is a copy.
    let bytes = elements(precision, 40 * 192, 6);
    let tensor = upload(&bytes, precision, [40, 192]);
    for columns in [64..128, 64..192] {
        let width = columns.len();
        let order = (0..30 * width).map(|i| (i / width + 2) * 192 + 64 + i % width);
        let sliced = CubeBackend::float_slice(tensor.clone(), &[(2..32).into(), columns.into()]);
        out.push(("sliced", sliced, gather(&bytes, order.collect())));
    }

    let bytes = elements(precision, 7, 7);
    let tensor = upload(&bytes, precision, [7, 1]);
    let expanded = CubeBackend::float_expand(tensor, Shape::from([7, 9]));
    out.push((
        "expanded",
        expanded,
        gather(&bytes, (0..63).map(|i| i / 9).collect()),
    ));

    for (name, tensor, _) in &out {
        assert!(!tensor.is_contiguous(), "{name} is a copy");
    }
    out
}
