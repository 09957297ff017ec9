//! Pending updates go into a model between steps.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::Tensor;

use crate::engine::Engine;
use crate::error::OffloadError;

/// Puts the newest weights of every offloaded parameter into `model`.
pub(super) fn settle<M: Module>(engine: &Engine, model: M) -> Result<M, OffloadError> {
    let layouts = || engine.layouts().enumerate();
    let mut settler = Settler {
        engine,
        by_path: layouts().map(|(slot, l)| (l.path.clone(), slot)).collect(),
        by_id: layouts().map(|(slot, l)| (l.id, slot)).collect(),
        path: Vec::new(),
        error: None,
    };
    let model = model.map(&mut settler);
    settler.error.map_or(Ok(model), Err)
}

struct Settler<'a> {
    engine: &'a Engine,
    by_path: HashMap<String, usize>,
    by_id: HashMap<ParamId, usize>,
    path: Vec<String>,
    error: Option<OffloadError>,
}

impl ModuleMapper for Settler<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // As the optimizer finds it: ids come first.
        let by_path = || self.by_path.get(&self.path.join("."));
        let Some(&slot) = self.by_id.get(&param.id).or_else(by_path) else {
            return param;
        };
        if self.error.is_some() {
            return param;
        }
        if let Err(error) = self.engine.settled(slot) {
            self.error = Some(error);
            return param;
        }
        // Consuming lets go of the old value: it can be gone before the new one comes.
        let (id, value, mapper) = param.consume();
        let value = self.engine.settle(slot, value);
        Param::from_mapped_value(id, value, mapper)
    }
}
