//! Host memory for the state of parameters, of exact size and aligned to cache lines.

use bytemuck::{Pod, Zeroable};

/// One cache line of single precision values; gives buffers their alignment without unsafe code.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([f32; Line::LEN]);

impl Line {
    const LEN: usize = 16;
}

/// `len` values of `f32` that start on a 64-byte boundary, zero at first.
///
/// Zeroed pages come from the operating system and cost nothing until they are written.
#[derive(Debug)]
pub(crate) struct AlignedBuffer {
    lines: Box<[Line]>,
    len: usize,
}

impl AlignedBuffer {
    /// A zeroed buffer of `len` values.
    pub(crate) fn zeroed(len: usize) -> Self {
        let lines = bytemuck::allocation::zeroed_slice_box(len.div_ceil(Line::LEN));
        Self { lines, len }
    }

    /// Bytes taken, padding to the last cache line included.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.lines)
    }
}

impl std::ops::Deref for AlignedBuffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }
}

impl std::ops::DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

/// The buffers of one parameter: master weights, and what its rule keeps for each of them.
///
/// Each parameter has its own allocations, so that `init` can walk a model one parameter at a time,
/// a frozen parameter takes nothing, and parameters can be locked one by one.
#[derive(Debug)]
pub(crate) struct Arena {
    /// fp32 master weights.
    pub(crate) master: AlignedBuffer,
    /// State of the rule, one buffer per value it keeps for each weight.
    pub(crate) state: Vec<AlignedBuffer>,
}

impl Arena {
    /// Buffers for `len` weights with `values` of state each, all zero.
    pub(crate) fn new(len: usize, values: usize) -> Self {
        Self {
            master: AlignedBuffer::zeroed(len),
            state: (0..values).map(|_| AlignedBuffer::zeroed(len)).collect(),
        }
    }

    /// Bytes of the state.
    pub(crate) fn state_bytes(&self) -> usize {
        self.state.iter().map(AlignedBuffer::bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_start_on_a_cache_line_and_have_the_length_asked_for() {
        for len in [0, 1, 15, 16, 17, 1000] {
            let mut buffer = AlignedBuffer::zeroed(len);
            assert_eq!(buffer.len(), len);
            assert_eq!(buffer.as_ptr() as usize % 64, 0);
            assert!(buffer.iter().all(|&x| x == 0.0));
            assert_eq!(buffer.bytes(), len.div_ceil(16) * 64);
            if let Some(last) = buffer.last_mut() {
                *last = 1.0;
                assert_eq!(buffer[len - 1], 1.0);
            }
        }
    }

    #[test]
    fn state_takes_what_the_rule_keeps_and_no_more() {
        for values in 0..4 {
            assert_eq!(Arena::new(16, values).state_bytes(), 64 * values);
        }
    }
}
