//! Pending updates go into a model between steps.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;

use super::names::Names;
use crate::engine::Engine;
use crate::error::OffloadError;

/// Puts the newest weights of every offloaded parameter into `model`.
pub(super) fn settle<M: Module>(engine: &Engine, model: M) -> Result<M, OffloadError> {
    let mut settler = Settler {
        engine,
        names: Names::of(engine),
        error: None,
    };
    let model = model.map(&mut settler);
    settler.error.map_or(Ok(model), Err)
}

struct Settler<'a> {
    engine: &'a Engine,
    names: Names,
    error: Option<OffloadError>,
}

impl ModuleMapper for Settler<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.names.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.names.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(slot) = self.names.slot(param.id) else {
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
