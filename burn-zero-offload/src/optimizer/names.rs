//! Which slot a parameter has that is met on the way through a model.

use std::collections::HashMap;

use burn::module::ParamId;

use crate::engine::Engine;

/// The slots of an engine by path and by id, and the path that a visitor or mapper is at.
pub(super) struct Names {
    by_path: HashMap<String, usize>,
    by_id: HashMap<ParamId, usize>,
    path: Vec<String>,
}

impl Names {
    pub(super) fn of(engine: &Engine) -> Self {
        let layouts = || engine.layouts().enumerate();
        Self {
            by_path: layouts().map(|(slot, l)| (l.path.clone(), slot)).collect(),
            by_id: layouts().map(|(slot, l)| (l.id, slot)).collect(),
            path: Vec::new(),
        }
    }

    pub(super) fn enter(&mut self, name: &str) {
        self.path.push(name.to_string());
    }

    pub(super) fn exit(&mut self) {
        self.path.pop();
    }

    /// The slot of the parameter with this id here, found as the optimizer finds it: ids come first.
    pub(super) fn slot(&self, id: ParamId) -> Option<usize> {
        let by_path = || self.by_path.get(&self.path.join("."));
        self.by_id.get(&id).or_else(by_path).copied()
    }
}
