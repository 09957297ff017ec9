//! The updates of parameters: pieces over threads, one fused loop within each piece.

mod fused;
mod kernel;
mod lanes;
mod staged;

use std::ops::Range;

use smallvec::SmallVec;

use super::codec::{MasterMut, MomentMut};
use super::{GradientView, ImageMut, SimdLevel, TILE, Update};

/// The state of one parameter or of a range of it, borrowed for a step. All of it has the same length.
#[derive(Debug)]
pub struct StateMut<'a> {
    /// Number of its first element within the parameter: the random bits of an element depend on it.
    pub start: usize,
    /// Master weights.
    pub master: MasterMut<'a>,
    /// What the rule keeps for each weight, in the order of [`Rule::STATE`](super::Rule::STATE).
    pub state: Vec<MomentMut<'a>>,
}

impl<'a> StateMut<'a> {
    /// All in `f32`.
    pub fn full(master: &'a mut [f32], state: Vec<&'a mut [f32]>) -> Self {
        Self {
            start: 0,
            master: MasterMut::F32(master),
            state: state.into_iter().map(MomentMut::F32).collect(),
        }
    }

    /// Elements that pieces of it have to begin at a multiple of.
    pub(crate) fn granularity(&self) -> usize {
        let all = self.state.iter().map(MomentMut::granularity);
        all.max().unwrap_or(1)
    }

    /// The same state, borrowed for less long.
    pub fn reborrow(&mut self) -> StateMut<'_> {
        self.slice(0..self.master.len())
    }

    /// The state of the elements in `range`.
    ///
    /// # Panics
    ///
    /// If `range` is out of bounds, or cuts 8-bit state elsewhere than at multiples of 512 elements.
    pub fn slice(&mut self, range: Range<usize>) -> StateMut<'_> {
        let state = self.state.iter_mut();
        StateMut {
            start: self.start + range.start,
            master: self.master.slice(range.clone()),
            state: state.map(|values| values.slice(range.clone())).collect(),
        }
    }
}

/// How updates are carried out; changes speed, never a bit of the result.
#[derive(Clone, Copy, Debug)]
pub struct TileStep {
    /// Instruction set of the inner loop.
    pub simd: SimdLevel,
    /// Elements per tile, [`TILE`] unless a test asks for less. At most [`TILE`]; 8-bit state is cut at
    /// the next multiple of 512.
    pub tile: usize,
}

/// Tiles that one task does one after the other: handing over a task costs as much as part of a tile.
const TILES_PER_TASK: usize = 4;

/// An update of one parameter, ready to be carried out.
#[derive(Debug)]
pub struct Work<'a> {
    /// The rule with its scalars.
    pub update: &'a Update,
    /// What it changes.
    pub state: StateMut<'a>,
    /// The gradient.
    pub gradient: GradientView<'a>,
    /// Where the device's image of the new master weights goes. The image of split masters holds their
    /// upper halves before, too.
    pub image: ImageMut<'a>,
}

impl TileStep {
    /// Tiles of the default size on instruction set `simd`.
    pub fn new(simd: SimdLevel) -> Self {
        Self { simd, tile: TILE }
    }

    /// Applies `update` to `state` and writes the device's image of the new master weights.
    /// Runs on the current rayon pool; a few tiles run on the calling thread.
    ///
    /// # Panics
    ///
    /// If the lengths of `gradient`, `state` and `image` differ, if `state` has another number of values
    /// per weight than the rule or is kept in what the rule does not bear, or if the image of a split master
    /// is not bf16.
    pub fn update(
        &self,
        update: &Update,
        state: StateMut<'_>,
        gradient: GradientView<'_>,
        image: ImageMut<'_>,
    ) {
        self.task(Task::new(Work {
            update,
            state,
            gradient,
            image,
        }));
    }

    /// The same for many parameters at once: small ones share tasks, so that ten thousand of a few elements
    /// keep all threads as busy as one large one.
    ///
    /// # Panics
    ///
    /// As [`update`](Self::update).
    pub fn update_all(&self, work: Vec<Work<'_>>) {
        let tasks = work.into_iter().map(|work| Some(Task::new(work)));
        self.tasks(&mut tasks.collect::<Vec<_>>());
    }

    /// Tasks that are still there, each once.
    fn tasks(&self, tasks: &mut [Option<Task<'_>>]) {
        let len = |task: &Option<Task<'_>>| task.as_ref().map_or(0, Task::len);
        let all: usize = tasks.iter().map(len).sum();
        if tasks.len() > 1 && all > self.most() {
            // Where about half of the elements are to the left.
            let mut left = 0;
            let middle = tasks.iter().position(|task| {
                left += len(task);
                left > all / 2
            });
            let middle = middle.unwrap_or(1).clamp(1, tasks.len() - 1);
            let (left, right) = tasks.split_at_mut(middle);
            rayon::join(|| self.tasks(left), || self.tasks(right));
            return;
        }
        for task in tasks.iter_mut().filter_map(Option::take) {
            self.task(task);
        }
    }

    /// Whether an update of `len` elements is one task: it runs on the calling thread, whichever that is, and
    /// handing it to a pool would only cost time.
    pub(crate) fn is_one_task(&self, len: usize) -> bool {
        len <= self.most()
    }

    /// Elements that one task may have.
    fn most(&self) -> usize {
        assert!(
            self.tile > 0 && self.tile <= TILE,
            "a tile has 1 to {TILE} elements"
        );
        TILES_PER_TASK * self.tile
    }

    /// Halves a task, at the border of a tile, until it is short.
    fn task(&self, task: Task<'_>) {
        let tile = self.tile.next_multiple_of(task.granularity());
        if task.len() > self.most().max(tile) {
            let middle = task.len().div_ceil(tile) / 2 * tile;
            let (left, right) = task.split_at(middle);
            rayon::join(|| self.task(left), || self.task(right));
            return;
        }
        let update = task.update;
        update.begun.run(self.simd, update, task.piece);
    }
}

/// A piece of a parameter and what happens to it.
struct Task<'a> {
    update: &'a Update,
    piece: Piece<'a>,
}

/// Streams of the same elements.
pub(super) struct Piece<'a> {
    start: usize,
    master: MasterMut<'a>,
    state: SmallVec<[MomentMut<'a>; 3]>,
    gradient: GradientView<'a>,
    image: ImageMut<'a>,
}

impl<'a> Task<'a> {
    fn new(work: Work<'a>) -> Self {
        let Work {
            update,
            state,
            gradient,
            image,
        } = work;
        let len = state.master.len();
        let same = |what: &str, other: usize| {
            assert_eq!(other, len, "{what} and master weights differ in length");
        };
        same("gradient", gradient.len());
        same("device image", image.len());
        state.state.iter().for_each(|s| same("state", s.len()));
        Self {
            update,
            piece: Piece {
                start: state.start,
                master: state.master,
                state: state.state.into(),
                gradient,
                image,
            },
        }
    }

    fn len(&self) -> usize {
        self.piece.len()
    }

    fn granularity(&self) -> usize {
        let all = self.piece.state.iter().map(MomentMut::granularity);
        all.max().unwrap_or(1)
    }

    fn split_at(self, at: usize) -> (Self, Self) {
        let update = self.update;
        let (left, right) = self.piece.split_at(at);
        let task = |piece| Self { update, piece };
        (task(left), task(right))
    }
}

impl Piece<'_> {
    fn len(&self) -> usize {
        self.master.len()
    }

    fn split_at(self, at: usize) -> (Self, Self) {
        let len = self.len();
        let (left, right) = self.master.split_at(at);
        let (left_image, right_image) = self.image.split_at(at);
        let (left_state, right_state) = self.state.into_iter().map(|s| s.split_at(at)).unzip();
        let piece = |start, master, state, gradient, image| Self {
            start,
            master,
            state,
            gradient,
            image,
        };
        let (from, to) = (self.gradient.slice(0..at), self.gradient.slice(at..len));
        (
            piece(self.start, left, left_state, from, left_image),
            piece(self.start + at, right, right_state, to, right_image),
        )
    }
}

pub(super) use kernel::{Begun, BegunUpdate};

#[cfg(test)]
mod tests;
