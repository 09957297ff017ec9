//! The state of one parameter and its form in records.

use std::ops::Range;

use half::bf16;

use super::arena::{Arena, ArenaLayout};
use super::halves::Halves;
use crate::optimize::{
    DeviceImage, GradientView, HostRule, ImageMut, MasterCodec, MasterMut, Noise, Precision,
    StateKind, StateMut, StatePrecision, Update, Use, Work,
};

/// Master weights, state of the rule and update count of one parameter on the host, kept as
/// [`StatePrecision`] says.
///
/// The engine keeps one for each parameter. It is public for measurements and for optimizers without a
/// device.
#[derive(Debug)]
pub struct HostState {
    arena: Arena,
    /// Upper halves, if the master is split.
    halves: Option<Halves>,
    precision: Precision,
    kinds: Option<&'static [StateKind]>,
    /// Updates applied so far: `t` of the rules.
    pub(crate) time: u64,
}

/// A parameter's optimizer state outside the engine, as records carry it.
#[derive(Debug, PartialEq)]
pub(crate) struct SavedState {
    /// Updates applied so far. Records of some of Burn's optimizers do not have it.
    pub(crate) time: Option<u64>,
    /// What the rule keeps, in its order; those that the record has.
    pub(crate) state: Vec<Option<Vec<f32>>>,
    /// Scales of 8-bit state: with them its codes come back as they were.
    pub(crate) scales: Vec<Option<Vec<f32>>>,
}

/// What a step borrows.
pub(crate) struct Borrowed<'a> {
    pub(crate) state: StateMut<'a>,
    pub(crate) halves: Option<&'a mut Halves>,
}

/// Elements that one thread writes at least.
const WORTH_A_THREAD: usize = 256 << 10;

impl HostState {
    /// State for weights that are in `precision` on the device, `master` as it is, without any update
    /// yet.
    ///
    /// # Panics
    ///
    /// If `kept` rounds state that the rule cannot have rounded.
    pub fn new(
        rule: &HostRule,
        precision: Precision,
        kept: StatePrecision,
        master: &[f32],
    ) -> Self {
        let mut state = Self::zeroed(rule, precision, kept, master.len());
        state.set_master(master);
        state
    }

    /// The same for `len` weights of zero. Memory is taken when it is written.
    ///
    /// # Panics
    ///
    /// As [`new`](Self::new).
    pub fn zeroed(rule: &HostRule, precision: Precision, kept: StatePrecision, len: usize) -> Self {
        let whole = |range: Range<usize>| Halves::new(vec![range], |_| None);
        Self::in_pieces(rule, precision, kept, len, || whole(0..len))
    }

    /// The same with upper halves, if there are any, in `halves`.
    pub(crate) fn in_pieces(
        rule: &HostRule,
        precision: Precision,
        kept: StatePrecision,
        len: usize,
        halves: impl FnOnce() -> Halves,
    ) -> Self {
        assert!(
            !kept.is_lossy() || rule.lossy().is_some(),
            "the state of {rule:?} does not bear rounding: keep it as {}",
            StatePrecision::Full
        );
        let layout = ArenaLayout::new(len, precision, rule, kept);
        Self {
            arena: Arena::new(layout),
            halves: (layout.master != MasterCodec::F32).then(halves),
            precision,
            kinds: rule.lossy(),
            time: 0,
        }
    }

    /// Number of weights.
    pub fn len(&self) -> usize {
        self.arena.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the master weights, the device's image included where it is part of them.
    pub fn master_bytes(&self) -> usize {
        self.arena.master_bytes() + self.halves.as_ref().map_or(0, Halves::bytes)
    }

    /// Bytes of what the rule keeps.
    pub fn state_bytes(&self) -> usize {
        self.arena.state_bytes()
    }

    /// Bytes of pinned memory in it.
    pub(crate) fn pinned(&self) -> usize {
        self.halves.as_ref().map_or(0, Halves::pinned)
    }

    /// The work of one update. `image` is where the device's image goes; a split master has it in
    /// itself and leaves `image` alone.
    pub fn work<'a>(
        &'a mut self,
        update: &'a Update,
        gradient: GradientView<'a>,
        image: ImageMut<'a>,
    ) -> Work<'a> {
        let Borrowed { state, halves } = self.borrow();
        Work {
            update,
            state,
            gradient,
            image: match halves {
                Some(halves) => ImageMut::Bf16(halves.piece_mut(0)),
                None => image,
            },
        }
    }

    /// What a step needs.
    pub(crate) fn borrow(&mut self) -> Borrowed<'_> {
        let (master, state) = self.arena.as_mut();
        Borrowed {
            state: StateMut {
                start: 0,
                master,
                state,
            },
            halves: self.halves.as_mut(),
        }
    }

    /// The master weights.
    pub fn master(&self) -> Vec<f32> {
        self.master_of(0..self.len())
    }

    /// The master weights of `range`.
    pub(crate) fn master_of(&self, range: Range<usize>) -> Vec<f32> {
        let upper = self
            .halves
            .as_ref()
            .map(|halves| halves.copy(range.clone()));
        let mut out = vec![0.0; range.len()];
        self.arena
            .read_master(range, &upper.unwrap_or_default(), &mut out);
        out
    }

    /// Replaces the master weights. Large ones are written by the threads of the current rayon pool, whose
    /// memory the system then puts near them.
    pub(crate) fn set_master(&mut self, values: &[f32]) {
        self.write_master(0, values, None);
    }

    /// Replaces the master weights from `start` on, in whole pieces or within one.
    pub(crate) fn write_master(&mut self, start: usize, values: &[f32], noise: Option<Noise>) {
        let end = start + values.len();
        let Some(halves) = &mut self.halves else {
            return write(
                self.arena.master_mut().slice(start..end),
                values,
                None,
                noise,
            );
        };
        for (index, piece) in halves.ranges().into_iter().enumerate() {
            let (from, to) = (piece.start.max(start), piece.end.min(end));
            if from < to {
                let upper = &mut halves.piece_mut(index)[from - piece.start..to - piece.start];
                let values = &values[from - start..to - start];
                let noise = noise.map(|noise| noise.from(from - start));
                let mut master = self.arena.master_mut();
                write(master.slice(from..to), values, Some(upper), noise);
            }
        }
    }

    /// What the device holds of the master weights.
    pub fn image(&self) -> DeviceImage {
        match (&self.halves, self.arena.whole_master()) {
            (Some(halves), _) => DeviceImage::Bf16(halves.copy(0..self.len())),
            (None, Some(master)) => DeviceImage::of(self.precision, master),
            (None, None) => unreachable!("a split master has its upper halves"),
        }
    }

    /// What the device would hold if `values` were the master weights.
    pub(crate) fn image_of(&self, values: &[f32]) -> DeviceImage {
        match self.halves {
            Some(_) => DeviceImage::Bf16(self.arena.upper_halves(values)),
            None => DeviceImage::of(self.precision, values),
        }
    }

    /// Whether `bytes` are the device's image of the master weights.
    pub(crate) fn has_image(&self, bytes: &[u8]) -> bool {
        let Some(halves) = &self.halves else {
            return self.image().as_bytes() == bytes;
        };
        let mut rest = bytes;
        let same = halves.pieces().all(|piece| {
            let piece: &[u8] = bytemuck::cast_slice(piece);
            let matches = rest.starts_with(piece);
            rest = rest.get(piece.len()..).unwrap_or_default();
            matches
        });
        same && rest.is_empty()
    }

    /// Pieces of the upper halves, if the master is split.
    pub(crate) fn halves(&self) -> Option<&Halves> {
        self.halves.as_ref()
    }

    fn usage(&self, index: usize) -> Use {
        Use::of(
            index,
            self.kinds.map_or(StateKind::Signed, |kinds| kinds[index]),
        )
    }

    /// What the rule keeps, in `f32`.
    pub fn state(&self) -> Vec<Vec<f32>> {
        self.state_of(0..self.len())
    }

    /// The same of `range`, which cuts 8-bit state at multiples of 512 only.
    pub(crate) fn state_of(&self, range: Range<usize>) -> Vec<Vec<f32>> {
        let read = |index| {
            let mut out = vec![0.0; range.len()];
            let kind = self.usage(index).kind;
            self.arena.read_state(index, range.clone(), kind, &mut out);
            out
        };
        (0..self.arena.values()).map(read).collect()
    }

    /// Replaces what the rule keeps. Rounds by `noise`, as the step does, or to nearest.
    pub(crate) fn set_state(&mut self, values: &[Vec<f32>], noise: Option<Noise>) {
        for (index, values) in values.iter().enumerate() {
            let usage = self.usage(index);
            self.arena.moment_mut(index).write(values, usage, noise);
        }
    }

    /// Scales of 8-bit state, for records.
    pub(crate) fn scales(&self) -> Vec<Option<Vec<f32>>> {
        self.arena.scales()
    }

    /// Replaces the state of the rule; the master weights stay.
    ///
    /// What is missing is completed as `rule` knows how; nothing is needed where there was no update. A
    /// record without an update count has seen at least one. Returns `false`, with nothing changed, if
    /// something does not fit.
    pub(crate) fn restore(&mut self, rule: &HostRule, saved: SavedState) -> bool {
        let SavedState {
            time,
            state,
            scales,
        } = saved;
        if time == Some(0) {
            self.reset();
            return true;
        }
        let len = self.len();
        let fits = |values: &Vec<f32>| values.len() == len;
        if !state.iter().flatten().all(fits) {
            return false;
        }
        let Some(state) = rule.complete(state) else {
            return false;
        };
        self.time = time.unwrap_or(1);
        let scales = scales.into_iter().chain(std::iter::repeat(None));
        for (index, (values, scales)) in state.iter().zip(scales).enumerate() {
            let usage = self.usage(index);
            let mut moment = self.arena.moment_mut(index);
            let exact = scales.is_some_and(|s| moment.write_scaled(values, usage.kind, &s));
            if !exact {
                moment.write(values, usage, None);
            }
        }
        true
    }

    /// Forgets the state of the rule; the master weights stay.
    pub(crate) fn reset(&mut self) {
        self.time = 0;
        self.arena.clear_state();
    }

    /// A state of `len` weights kept in the same way.
    pub(crate) fn like(&self, len: usize) -> Self {
        let layout = ArenaLayout {
            len,
            ..self.arena.layout()
        };
        let halves = self.halves.as_ref();
        Self {
            arena: Arena::new(layout),
            halves: halves.map(|_| Halves::new(std::iter::once(0..len).collect(), |_| None)),
            ..*self
        }
    }
}

fn write(
    mut master: MasterMut<'_>,
    values: &[f32],
    upper: Option<&mut [bf16]>,
    noise: Option<Noise>,
) {
    if values.len() <= WORTH_A_THREAD {
        return master.write(values, upper.unwrap_or_default(), noise);
    }
    let middle = (values.len() / 2).next_multiple_of(64);
    let (left, right) = values.split_at(middle);
    let (left_master, right_master) = master.split_at(middle);
    let (left_upper, right_upper) = upper.map(|upper| upper.split_at_mut(middle)).unzip();
    let right_noise = noise.map(|noise| noise.from(middle));
    rayon::join(
        || write(left_master, left, left_upper, noise),
        || write(right_master, right, right_upper, right_noise),
    );
}

#[cfg(test)]
mod tests;
