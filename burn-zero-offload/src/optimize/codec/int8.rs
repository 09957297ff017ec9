//! State in 8 bits: blocks of 32 values share a scale.
//!
//! Values that may be negative are companded so that small ones have finer steps; values that may not
//! be are kept as their square roots, which is what Adam and RMSProp divide by. With `s` the scale of
//! the block and `q` the code:
//!
//! ```text
//! signed        x = m / s           y = 2 x / (1 + |x|)   q = 127 y     x = y / (2 - |y|)
//! not negative  y = sqrt(v) / s                           q = 255 y     v = (s y)^2
//! ```
//!
//! (Gonzalez Ortiz et al., FlashOptim, arXiv 2602.23349, who round to nearest and have scales in f16.) Codes
//! are rounded stochastically, by noise in 256ths. The scale is the largest value of the block, rounded up to
//! bf16: f16 ends at 6e-8, and first moments of small gradients are smaller. A root that is not zero never gets code 0: dividing by what was left would throw the
//! weight away. The reciprocals are a polynomial in fused multiply-adds, the same on every machine.
//!
//! A block is every 16th of 512 consecutive elements: its largest value then falls out of vector
//! operations on rows, without any across a vector.

use half::bf16;

use super::half::Half;
use super::{Column, LANES, Noise, Rows, Use, lane_noise};
use crate::optimize::rule::StateKind;

/// Rows whose values in one lane share a scale.
pub(in crate::optimize) const GROUP_ROWS: usize = 32;
/// Elements that 16 blocks share.
pub(crate) const GROUP: usize = GROUP_ROWS * LANES;

/// Scales for `len` elements.
pub(crate) fn scales_for(len: usize) -> usize {
    len.div_ceil(GROUP) * LANES
}

/// Smallest scale, 2^-60: the square of the smallest root that has a code, `s / 255`, is an `f32` still.
const SMALLEST: u32 = (127 - 60) << 23;
/// 1.5 * 2^23: added to a number of up to 2^22 it leaves its nearest integer in the low bits.
const MAGIC: f32 = 12_582_912.0;
/// Noise is in 256ths of a code.
const PARTS: f32 = 256.0;
/// Noise that rounds to nearest.
pub(super) const NEAREST: u32 = 128;

/// `1 / (1 + u)` for `u` in 0 to 1, within 3.9e-4 of itself; 1 at 0, and at 1 one half less 1e-7, so that
/// no code is beyond the last. Minimax among such polynomials of degree 4.
#[inline(always)]
fn reciprocal(u: f32) -> f32 {
    const C: [f32; 5] = [1.0, -0.988_047_1, 0.874_829_9, -0.541_493_36, 0.154_710_5];
    let q = C[4].mul_add(u, C[3]).mul_add(u, C[2]);
    q.mul_add(u, C[1]).mul_add(u, C[0])
}

/// The scale of a block whose largest value has the bits `peak`.
#[inline(always)]
fn scale_of(peak: u32) -> bf16 {
    let up = (peak.wrapping_add(0xffff) & 0xffff_0000).max(SMALLEST);
    bf16::from_bits(if peak == 0 { 0 } else { up >> 16 } as u16)
}

/// What a code is multiplied by to get a companded value, or a root.
#[inline(always)]
fn unit(scale: bf16, kind: StateKind) -> f32 {
    scale.widen() / steps(kind)
}

/// What a value, or a root, is multiplied by before it is encoded.
#[inline(always)]
fn inverse(scale: bf16, kind: StateKind) -> f32 {
    let scale = f32::from_bits(scale.widen().to_bits().max(SMALLEST));
    match kind {
        StateKind::Signed => 1.0 / scale,
        StateKind::NonNegative => steps(kind) * PARTS / scale,
    }
}

/// Codes between 0 and the largest.
#[inline(always)]
fn steps(kind: StateKind) -> f32 {
    match kind {
        StateKind::Signed => 127.0,
        StateKind::NonNegative => 255.0,
    }
}

/// The value of a code.
#[inline(always)]
pub(super) fn decode(code: u8, unit: f32, kind: StateKind) -> f32 {
    match kind {
        StateKind::Signed => {
            let q = code as i8 as f32;
            // 2 - |y| is 1 + u.
            let u = q.abs().mul_add(-1.0 / 127.0, 1.0);
            (q * unit) * reciprocal(u)
        }
        StateKind::NonNegative => {
            let root = code as f32 * unit;
            root * root
        }
    }
}

/// The code of a value, or of a root. `noise` is 0 to 255.
#[inline(always)]
fn encode(value: f32, inverse: f32, noise: u32, kind: StateKind) -> u8 {
    match kind {
        StateKind::Signed => {
            let x = value * inverse;
            let y = (x * (2.0 * 127.0 * PARTS)).mul_add(reciprocal(x.abs()), MAGIC);
            (y.to_bits().wrapping_add(noise) >> 8) as u8
        }
        StateKind::NonNegative => {
            let y = value.mul_add(inverse, MAGIC);
            // At least code 1. In a block of zeros the scale is zero, and the code does not matter.
            let least = MAGIC.to_bits() + 256;
            (y.to_bits().wrapping_add(noise).max(least) >> 8) as u8
        }
    }
}

/// What is encoded: the value, or its root.
#[inline(always)]
fn encoded(value: f32, kind: StateKind) -> f32 {
    match kind {
        StateKind::Signed => value,
        StateKind::NonNegative => value.sqrt(),
    }
}

/// Encodes `values`, the elements from `start` on of a group or more. With `scales` of their own the
/// codes of decoded values come back exactly.
pub(super) fn encode_slice(
    values: &[f32],
    codes: &mut [u8],
    scales: &mut [bf16],
    keep_scales: bool,
    kind: StateKind,
    noise: impl Fn(usize) -> u32,
) {
    let groups = values.chunks(GROUP).zip(codes.chunks_mut(GROUP));
    for (group, (values, codes)) in groups.enumerate() {
        for lane in 0..LANES {
            let scale = &mut scales[group * LANES + lane];
            let members = (lane..values.len()).step_by(LANES);
            if !keep_scales {
                let bits = |i: usize| encoded(values[i], kind).to_bits() & 0x7fff_ffff;
                *scale = scale_of(members.clone().map(bits).max().unwrap_or(0));
            }
            let inverse = inverse(*scale, kind);
            for i in members {
                let noise = noise(group * GROUP + i);
                codes[i] = encode(encoded(values[i], kind), inverse, noise, kind);
            }
        }
    }
}

/// Decodes whole groups; the last may be shorter.
pub(crate) fn decode_slice(codes: &[u8], scales: &[bf16], kind: StateKind, values: &mut [f32]) {
    for (i, (value, &code)) in values.iter_mut().zip(codes).enumerate() {
        let scale = scales[i / GROUP * LANES + i % LANES];
        *value = decode(code, unit(scale, kind), kind);
    }
}

/// Values of a group between the update and their encoding.
#[repr(align(64))]
pub(in crate::optimize) struct Scratch([[f32; LANES]; GROUP_ROWS]);

impl Scratch {
    pub(in crate::optimize) const fn new() -> Self {
        Self([[0.0; LANES]; GROUP_ROWS])
    }
}

/// A value per lane, where a vector of them can be read back at once: one across two cache lines waits.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct PerLane<T>([T; LANES]);

/// 8-bit codes with their scales.
pub(in crate::optimize) struct Codes<'a> {
    codes: Rows<'a, u8>,
    scales: &'a mut [[bf16; LANES]],
    scratch: &'a mut Scratch,
    kind: StateKind,
    /// Of the group: what codes are multiplied with, and the largest values so far. They are read and written
    /// whole: one index that is not a constant, and the columns would live in memory, not in registers.
    unit: PerLane<f32>,
    peak: PerLane<u32>,
}

impl<'a> Codes<'a> {
    pub(in crate::optimize) fn new(
        codes: &'a mut [u8],
        scales: &'a mut [bf16],
        scratch: &'a mut Scratch,
        kind: StateKind,
    ) -> Self {
        Self {
            codes: Rows::new(codes),
            scales: scales.as_chunks_mut().0,
            scratch,
            kind,
            unit: PerLane([0.0; LANES]),
            peak: PerLane([0; LANES]),
        }
    }
}

/// A row of codes and what becomes of it. All that its elements need is in it: an array per lane that is
/// read through `self` would keep the loop over lanes from being vectorised.
#[derive(Clone, Copy, Default)]
pub(in crate::optimize) struct CodesRow {
    codes: [u8; LANES],
    unit: PerLane<f32>,
    values: PerLane<f32>,
    peak: PerLane<u32>,
}

impl Codes<'_> {
    #[inline(always)]
    fn row(&self, codes: [u8; LANES]) -> CodesRow {
        CodesRow {
            codes,
            unit: self.unit,
            values: PerLane([0.0; LANES]),
            peak: self.peak,
        }
    }
}

impl Column for Codes<'_> {
    type Row = CodesRow;

    #[inline(always)]
    fn begin(&mut self, group: usize) {
        let scales = self.scales[group];
        let mut units = [0.0; LANES];
        for lane in 0..LANES {
            units[lane] = unit(scales[lane], self.kind);
        }
        self.unit = PerLane(units);
        self.peak = PerLane([0; LANES]);
    }

    #[inline(always)]
    fn read(&self, row: usize) -> Self::Row {
        self.row(self.codes.read(row))
    }

    #[inline(always)]
    fn read_rest(&mut self) -> Self::Row {
        self.row(self.codes.read_rest())
    }

    #[inline(always)]
    fn write(&mut self, row: usize, values: Self::Row) {
        self.scratch.0[row % GROUP_ROWS] = values.values.0;
        self.peak = values.peak;
    }

    #[inline(always)]
    fn write_rest(&mut self, row: usize, mut values: Self::Row) {
        let before = self.peak;
        for lane in self.codes.rest_len()..LANES {
            values.peak.0[lane] = before.0[lane];
        }
        self.write(row, values);
    }

    #[inline(always)]
    fn get(&self, row: &Self::Row, lane: usize, of: Use) -> f32 {
        decode(row.codes[lane], row.unit.0[lane], of.kind)
    }

    #[inline(always)]
    fn put(&mut self, row: &mut Self::Row, lane: usize, value: f32, _noise: u32, of: Use) {
        let value = encoded(value, of.kind);
        row.values.0[lane] = value;
        row.peak.0[lane] = row.peak.0[lane].max(value.to_bits() & 0x7fff_ffff);
    }

    #[inline(always)]
    fn finish(&mut self, group: usize, rows: usize, noise: Noise, of: Use) {
        let peak = self.peak;
        let (mut scales, mut factor) = ([bf16::ZERO; LANES], [0.0; LANES]);
        for lane in 0..LANES {
            scales[lane] = scale_of(peak.0[lane]);
            factor[lane] = inverse(scales[lane], of.kind);
        }
        self.scales[group] = scales;
        let before = group * GROUP_ROWS;
        let full = rows.min(self.codes.full_rows() - before);
        for row in 0..full {
            let codes = encode_row(&self.scratch.0[row], &factor, row, noise, of);
            self.codes.write(before + row, codes);
        }
        if rows > full {
            let codes = encode_row(&self.scratch.0[full], &factor, full, noise, of);
            self.codes.write_rest(codes);
        }
    }
}

/// The codes of a row; `noise` is that of the first row of its group.
#[inline(always)]
fn encode_row(
    values: &[f32; LANES],
    factor: &[f32; LANES],
    row: usize,
    noise: Noise,
    of: Use,
) -> [u8; LANES] {
    let first = noise.from(row * LANES).bits();
    let (values, factor, mut codes) = (*values, *factor, [0; LANES]);
    for lane in 0..LANES {
        let noise = of.bits(lane_noise(first, lane)) & 0xff;
        codes[lane] = encode(values[lane], factor[lane], noise, of.kind);
    }
    codes
}

#[cfg(test)]
mod tests;
