//! What master weights and state of each parameter are kept in.

use std::collections::HashSet;

use burn::module::{ParamGroup, ParamId};

use crate::error::OffloadError;
use crate::optimize::{HostRule, Precision, StatePrecision};

/// What the user asked for.
pub(super) struct Kept {
    all: Option<StatePrecision>,
    groups: Vec<(ParamGroup, StatePrecision)>,
    /// Groups that match some parameter.
    used: HashSet<usize>,
}

impl Kept {
    /// `all` is for parameters that no group has.
    pub(super) fn new(
        all: Option<StatePrecision>,
        groups: Vec<(ParamGroup, StatePrecision)>,
    ) -> Self {
        Self {
            all,
            groups,
            used: HashSet::new(),
        }
    }

    /// The first group that has matched no parameter.
    pub(super) fn unused(&self) -> Option<usize> {
        (0..self.groups.len()).find(|index| !self.used.contains(index))
    }

    /// That of a parameter in `precision` on the device: of the last group that matches, or of all, or
    /// the default.
    pub(super) fn of(
        &mut self,
        id: &ParamId,
        path: &str,
        precision: Precision,
        rule: &HostRule,
    ) -> Result<StatePrecision, OffloadError> {
        let mut asked = self.all;
        for (index, (group, kept)) in self.groups.iter().enumerate() {
            if group.matches(id, Some(path)) {
                self.used.insert(index);
                asked = Some(*kept);
            }
        }
        let Some(kept) = asked else {
            return Ok(StatePrecision::default_for(precision));
        };
        let refused = |reason: String| {
            Err(OffloadError::StatePrecision {
                path: path.to_string(),
                kept,
                reason,
            })
        };
        if kept.needs_bf16() && precision == Precision::F16 {
            return refused("its weights on the device are f16, not bf16".into());
        }
        if kept.is_lossy() && rule.lossy().is_none() {
            return refused(format!("the state of {rule:?} does not bear rounding"));
        }
        Ok(kept.of_weights(precision))
    }
}
