//! The state of one parameter and its form in records.

use super::Arena;
use crate::optimize::Moments;

/// Master weights, moments and update count of one parameter.
#[derive(Debug)]
pub(crate) struct SlotState {
    /// The buffers.
    pub(crate) arena: Arena,
    /// Updates applied so far: `t` of the bias corrections.
    pub(crate) time: u64,
}

/// A parameter's optimizer state outside the engine, as records carry it.
#[derive(Debug, PartialEq)]
pub(crate) struct SavedState {
    /// Updates applied so far.
    pub(crate) time: u64,
    /// First moments.
    pub(crate) first: Vec<f32>,
    /// Second moments.
    pub(crate) second: Vec<f32>,
    /// Largest second moments, with AMSGrad.
    pub(crate) largest: Option<Vec<f32>>,
}

impl SlotState {
    /// State with `master` as it is, no moments and no update yet.
    pub(crate) fn new(master: &[f32], amsgrad: bool) -> Self {
        let mut arena = Arena::new(master.len(), amsgrad);
        arena.master.copy_from_slice(master);
        Self { arena, time: 0 }
    }

    /// The buffers, borrowed for an update.
    pub(crate) fn moments(&mut self) -> Moments<'_> {
        Moments {
            master: &mut self.arena.master,
            first: &mut self.arena.first,
            second: &mut self.arena.second,
            largest: self.arena.largest.as_deref_mut(),
        }
    }

    /// Copies the optimizer state out.
    pub(crate) fn save(&self) -> SavedState {
        SavedState {
            time: self.time,
            first: self.arena.first.to_vec(),
            second: self.arena.second.to_vec(),
            largest: self.arena.largest.as_ref().map(|largest| largest.to_vec()),
        }
    }

    /// Replaces the optimizer state; the master weights stay.
    ///
    /// State without largest second moments continues an AMSGrad run from its second moments, as
    /// Burn does. Returns `false`, with nothing changed, if a length does not fit.
    pub(crate) fn restore(&mut self, saved: SavedState) -> bool {
        let len = self.arena.master.len();
        let fits = |values: &[f32]| values.len() == len;
        let largest_fits = saved.largest.as_deref().is_none_or(fits);
        if !fits(&saved.first) || !fits(&saved.second) || !largest_fits {
            return false;
        }
        self.time = saved.time;
        self.arena.first.copy_from_slice(&saved.first);
        self.arena.second.copy_from_slice(&saved.second);
        if let Some(largest) = &mut self.arena.largest {
            largest.copy_from_slice(saved.largest.as_ref().unwrap_or(&saved.second));
        }
        true
    }

    /// Forgets the optimizer state; the master weights stay.
    pub(crate) fn reset(&mut self) {
        self.time = 0;
        self.arena.first.fill(0.0);
        self.arena.second.fill(0.0);
        if let Some(largest) = &mut self.arena.largest {
            largest.fill(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_state_comes_back_and_leaves_the_master_alone() {
        let mut state = SlotState::new(&[1.0, 2.0], true);
        state.time = 3;
        state.arena.first.copy_from_slice(&[0.1, 0.2]);
        state.arena.second.copy_from_slice(&[0.3, 0.4]);
        let saved = state.save();
        state.reset();
        assert_eq!((state.time, state.arena.first.to_vec()), (0, vec![0.0; 2]));
        assert!(state.restore(saved));
        assert_eq!(state.time, 3);
        assert_eq!(state.arena.second.to_vec(), [0.3, 0.4]);
        assert_eq!(state.arena.master.to_vec(), [1.0, 2.0]);
    }

    #[test]
    fn state_of_another_length_is_refused_whole() {
        let mut state = SlotState::new(&[1.0, 2.0], false);
        let saved = SavedState {
            time: 9,
            first: vec![1.0; 2],
            second: vec![1.0; 3],
            largest: None,
        };
        assert!(!state.restore(saved));
        assert_eq!((state.time, state.arena.first.to_vec()), (0, vec![0.0; 2]));
    }
}
