//! Host memory for the state of one parameter.

use std::ops::Range;

use half::bf16;

use super::memory::Buffer;
use crate::optimize::{
    HostRule, MasterCodec, MasterMut, MomentMut, Precision, StateCodec, StateKind, StatePrecision,
    decode_slice, join8_slice, join16_slice, scales_for,
};

/// The buffers of one parameter: master weights, or what a split master has besides its image, and what its
/// rule keeps for each of them.
///
/// Each parameter has its own allocations, so that `init` can walk a model one parameter at a time,
/// a frozen parameter takes nothing, and parameters can be locked one by one.
#[derive(Debug)]
pub(crate) struct Arena {
    master: Master,
    state: Vec<Moment>,
}

#[derive(Debug)]
enum Master {
    F32(Buffer<f32>),
    Lower16(Buffer<u16>),
    Lower8(Buffer<u8>),
}

#[derive(Debug)]
enum Moment {
    F32(Buffer<f32>),
    Bf16(Buffer<bf16>),
    Int8 {
        codes: Buffer<u8>,
        scales: Buffer<bf16>,
    },
}

/// What the arena of a parameter looks like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ArenaLayout {
    pub(crate) len: usize,
    pub(crate) master: MasterCodec,
    pub(crate) state: StateCodec,
    /// Values of state for each weight.
    pub(crate) values: usize,
}

impl ArenaLayout {
    /// For a parameter of `len` weights that are in `precision` on the device.
    pub(crate) fn new(
        len: usize,
        precision: Precision,
        rule: &HostRule,
        kept: StatePrecision,
    ) -> Self {
        Self {
            len,
            master: kept.master(precision),
            state: kept.state(),
            values: rule.state().len(),
        }
    }
}

impl Arena {
    /// Buffers of zeros.
    pub(crate) fn new(layout: ArenaLayout) -> Self {
        let len = layout.len;
        let moment = |_| match layout.state {
            StateCodec::F32 => Moment::F32(Buffer::zeroed(len)),
            StateCodec::Bf16 => Moment::Bf16(Buffer::zeroed(len)),
            StateCodec::Int8 => Moment::Int8 {
                codes: Buffer::zeroed(len),
                scales: Buffer::zeroed(scales_for(len)),
            },
        };
        Self {
            master: match layout.master {
                MasterCodec::F32 => Master::F32(Buffer::zeroed(len)),
                MasterCodec::Split16 => Master::Lower16(Buffer::zeroed(len)),
                MasterCodec::Split8 => Master::Lower8(Buffer::zeroed(len)),
            },
            state: (0..layout.values).map(moment).collect(),
        }
    }

    /// Number of weights.
    pub(crate) fn len(&self) -> usize {
        match &self.master {
            Master::F32(values) => values.len(),
            Master::Lower16(values) => values.len(),
            Master::Lower8(values) => values.len(),
        }
    }

    /// The master weights, where they are whole.
    pub(crate) fn whole_master(&self) -> Option<&[f32]> {
        match &self.master {
            Master::F32(values) => Some(values),
            Master::Lower16(_) | Master::Lower8(_) => None,
        }
    }

    /// Bytes of the master weights without the image of split ones.
    pub(crate) fn master_bytes(&self) -> usize {
        match &self.master {
            Master::F32(values) => size_of_val(&values[..]),
            Master::Lower16(values) => size_of_val(&values[..]),
            Master::Lower8(values) => size_of_val(&values[..]),
        }
    }

    /// Bytes of the state.
    pub(crate) fn state_bytes(&self) -> usize {
        let bytes = |moment: &Moment| match moment {
            Moment::F32(values) => values.bytes(),
            Moment::Bf16(values) => values.bytes(),
            Moment::Int8 { codes, scales } => codes.bytes() + scales.bytes(),
        };
        self.state.iter().map(bytes).sum()
    }

    /// The master weights, borrowed.
    pub(super) fn master_mut(&mut self) -> MasterMut<'_> {
        self.master.as_mut()
    }

    /// Master weights and state, borrowed.
    pub(super) fn as_mut(&mut self) -> (MasterMut<'_>, Vec<MomentMut<'_>>) {
        let state = self.state.iter_mut().map(Moment::as_mut).collect();
        (self.master.as_mut(), state)
    }

    /// How it is laid out.
    pub(super) fn layout(&self) -> ArenaLayout {
        ArenaLayout {
            len: self.len(),
            master: match self.master {
                Master::F32(_) => MasterCodec::F32,
                Master::Lower16(_) => MasterCodec::Split16,
                Master::Lower8(_) => MasterCodec::Split8,
            },
            state: match self.state.first() {
                None | Some(Moment::F32(_)) => StateCodec::F32,
                Some(Moment::Bf16(_)) => StateCodec::Bf16,
                Some(Moment::Int8 { .. }) => StateCodec::Int8,
            },
            values: self.state.len(),
        }
    }

    /// Writes the master weights of `range` into `out`; `upper` are their upper halves, if they are
    /// split.
    pub(super) fn read_master(&self, range: Range<usize>, upper: &[bf16], out: &mut [f32]) {
        match &self.master {
            Master::F32(values) => out.copy_from_slice(&values[range]),
            Master::Lower16(lower) => join16_slice(upper, &lower[range], out),
            Master::Lower8(lower) => join8_slice(upper, &lower[range], out),
        }
    }

    /// The upper halves of `values`, to nearest where masters are rounded.
    pub(super) fn upper_halves(&self, values: &[f32]) -> Vec<bf16> {
        let mut upper = vec![bf16::ZERO; values.len()];
        let (mut words, mut bytes);
        let mut lower = match &self.master {
            Master::Lower8(_) => {
                bytes = vec![0; values.len()];
                MasterMut::Lower8(&mut bytes)
            }
            Master::F32(_) | Master::Lower16(_) => {
                words = vec![0; values.len()];
                MasterMut::Lower16(&mut words)
            }
        };
        lower.write(values, &mut upper, None);
        upper
    }

    /// Number of values kept for each weight.
    pub(super) fn values(&self) -> usize {
        self.state.len()
    }

    pub(super) fn moment_mut(&mut self, index: usize) -> MomentMut<'_> {
        self.state[index].as_mut()
    }

    /// Writes value number `index` of the weights in `range` into `out`.
    pub(super) fn read_state(
        &self,
        index: usize,
        range: Range<usize>,
        kind: StateKind,
        out: &mut [f32],
    ) {
        match &self.state[index] {
            Moment::F32(values) => out.copy_from_slice(&values[range]),
            Moment::Bf16(values) => {
                let pairs = out.iter_mut().zip(&values[range]);
                pairs.for_each(|(out, value)| *out = value.to_f32());
            }
            Moment::Int8 { codes, scales } => {
                let blocks = scales_for(range.start)..scales_for(range.end);
                decode_slice(&codes[range], &scales[blocks], kind, out);
            }
        }
    }

    /// Forgets the state.
    pub(super) fn clear_state(&mut self) {
        self.state.iter_mut().for_each(Moment::clear);
    }

    /// The scales of 8-bit state, exact in `f32`.
    pub(super) fn scales(&self) -> Vec<Option<Vec<f32>>> {
        let scales = |moment: &Moment| match moment {
            Moment::Int8 { scales, .. } => {
                Some(scales.iter().map(|scale| scale.to_f32()).collect())
            }
            Moment::F32(_) | Moment::Bf16(_) => None,
        };
        self.state.iter().map(scales).collect()
    }
}

impl Master {
    fn as_mut(&mut self) -> MasterMut<'_> {
        match self {
            Self::F32(values) => MasterMut::F32(values),
            Self::Lower16(values) => MasterMut::Lower16(values),
            Self::Lower8(values) => MasterMut::Lower8(values),
        }
    }
}

impl Moment {
    fn as_mut(&mut self) -> MomentMut<'_> {
        match self {
            Self::F32(values) => MomentMut::F32(values),
            Self::Bf16(values) => MomentMut::Bf16(values),
            Self::Int8 { codes, scales } => MomentMut::Int8 { codes, scales },
        }
    }

    fn clear(&mut self) {
        match self {
            Self::F32(values) => values.fill(0.0),
            Self::Bf16(values) => values.fill(bf16::ZERO),
            Self::Int8 { codes, scales } => {
                codes.fill(0);
                scales.fill(bf16::ZERO);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Host bytes per weight of Adam: 12, 10 (and 2 of the image), 6, 4.06, 3.06.
    #[test]
    fn a_parameter_takes_what_its_precision_says_and_no_more() {
        let len = 1 << 14;
        let bytes = |kept: StatePrecision| {
            let arena = Arena::new(ArenaLayout {
                len,
                master: kept.master(Precision::Bf16),
                state: kept.state(),
                values: 2,
            });
            (arena.master_bytes(), arena.state_bytes())
        };
        let scales = 2 * len / 32 * 2;
        for (kept, master, state) in [
            (StatePrecision::Full, 4, 8 * len),
            (StatePrecision::SplitMaster, 2, 8 * len),
            (StatePrecision::Bf16Moments, 2, 4 * len),
            (StatePrecision::Int8Moments, 2, 2 * len + scales),
            (StatePrecision::Int8Master24, 1, 2 * len + scales),
        ] {
            assert_eq!(bytes(kept), (master * len, state), "{kept}");
        }
    }
}
