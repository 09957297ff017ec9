//! The state of one parameter and its form in records.

use super::Arena;
use crate::optimize::{HostRule, StateMut};

/// Master weights, state of the rule and update count of one parameter.
#[derive(Debug)]
pub(crate) struct SlotState {
    /// The buffers.
    pub(crate) arena: Arena,
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
}

impl SlotState {
    /// State with `master` as it is, `values` of state per weight, and no update yet.
    pub(crate) fn new(master: &[f32], values: usize) -> Self {
        let mut arena = Arena::new(master.len(), values);
        arena.master.copy_from_slice(master);
        Self { arena, time: 0 }
    }

    /// The buffers, borrowed for an update.
    pub(crate) fn as_mut(&mut self) -> StateMut<'_> {
        StateMut {
            master: &mut self.arena.master,
            state: self.arena.state.iter_mut().map(|v| &mut v[..]).collect(),
        }
    }

    /// Copies the state of the rule out.
    pub(crate) fn save(&self) -> Vec<Vec<f32>> {
        self.arena.state.iter().map(|v| v.to_vec()).collect()
    }

    /// Replaces the state of the rule; the master weights stay.
    ///
    /// What is missing is completed as `rule` knows how; nothing is needed where there was no update. A
    /// record without an update count has seen at least one. Returns `false`, with nothing changed, if
    /// something does not fit.
    pub(crate) fn restore(&mut self, rule: &HostRule, saved: SavedState) -> bool {
        let SavedState { time, state } = saved;
        if time == Some(0) {
            self.reset();
            return true;
        }
        let len = self.arena.master.len();
        let fits = |values: &Vec<f32>| values.len() == len;
        if !state.iter().flatten().all(fits) {
            return false;
        }
        let Some(state) = rule.complete(state) else {
            return false;
        };
        self.time = time.unwrap_or(1);
        for (buffer, values) in self.arena.state.iter_mut().zip(state) {
            buffer.copy_from_slice(&values);
        }
        true
    }

    /// Forgets the state of the rule; the master weights stay.
    pub(crate) fn reset(&mut self) {
        self.time = 0;
        for buffer in &mut self.arena.state {
            buffer.fill(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimize::rules::{Adam, AmsGrad, WeightDecay};

    const ADAM: Adam = Adam {
        beta_1: 0.9,
        beta_2: 0.999,
        epsilon: 1e-8,
        weight_decay: WeightDecay::None,
    };

    fn saved(time: Option<u64>, state: [Option<Vec<f32>>; 3]) -> SavedState {
        SavedState {
            time,
            state: state.into(),
        }
    }

    #[test]
    fn saved_state_comes_back_and_leaves_the_master_alone() {
        let rule = HostRule::new(AmsGrad(ADAM));
        let mut state = SlotState::new(&[1.0, 2.0], 3);
        state.time = 3;
        state.arena.state[0].copy_from_slice(&[0.1, 0.2]);
        state.arena.state[2].copy_from_slice(&[0.3, 0.4]);
        let copy = state.save();
        state.reset();
        assert_eq!(state.save(), vec![vec![0.0; 2]; 3]);
        let saved = SavedState {
            time: Some(3),
            state: copy.into_iter().map(Some).collect(),
        };
        assert!(state.restore(&rule, saved));
        assert_eq!(state.time, 3);
        assert_eq!(state.arena.state[2].to_vec(), [0.3, 0.4]);
        assert_eq!(state.arena.master.to_vec(), [1.0, 2.0]);
    }

    #[test]
    fn state_of_another_length_is_refused_whole() {
        let rule = HostRule::new(AmsGrad(ADAM));
        let mut state = SlotState::new(&[1.0, 2.0], 3);
        let one = |len| Some(vec![1.0; len]);
        assert!(!state.restore(&rule, saved(Some(9), [one(2), one(3), None])));
        assert!(!state.restore(&rule, saved(Some(9), [one(2), None, one(2)])));
        assert_eq!((state.time, state.save()), (0, vec![vec![0.0; 2]; 3]));
    }

    #[test]
    fn a_record_from_before_the_first_update_needs_no_state() {
        let rule = HostRule::new(AmsGrad(ADAM));
        let mut state = SlotState::new(&[1.0], 3);
        state.time = 5;
        state.arena.state[1].copy_from_slice(&[0.5]);
        assert!(state.restore(&rule, saved(Some(0), [None, None, None])));
        assert_eq!((state.time, state.save()), (0, vec![vec![0.0]; 3]));
    }

    #[test]
    fn a_record_of_plain_adam_continues_as_amsgrad_from_its_second_moments() {
        let rule = HostRule::new(AmsGrad(ADAM));
        let mut state = SlotState::new(&[1.0], 3);
        let record = saved(None, [Some(vec![0.5]), Some(vec![0.25]), None]);
        assert!(state.restore(&rule, record));
        assert_eq!(state.save(), [[0.5], [0.25], [0.25]]);
        assert_eq!(state.time, 1, "it has seen an update");
    }
}
