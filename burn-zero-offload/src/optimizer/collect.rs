//! Gradients that did not come through a tap, handed over before a step.

use std::collections::HashMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use crate::capture::placeholder_shape;
use crate::engine::Engine;
use crate::error::OffloadError;

/// Moves full-size gradients of `model` from `grads` to the host. Placeholders stay for them, so that
/// the optimizer visits the parameters.
pub(super) fn collect<M: Module>(
    engine: &Engine,
    model: &M,
    grads: GradientsParams,
) -> Result<GradientsParams, OffloadError> {
    let layouts = engine.layouts().enumerate();
    let mut collector = Collector {
        engine,
        by_path: layouts.map(|(slot, l)| (l.path.clone(), slot)).collect(),
        by_id: engine
            .layouts()
            .enumerate()
            .map(|(slot, l)| (l.id, slot))
            .collect(),
        path: Vec::new(),
        grads,
        error: None,
    };
    model.visit(&mut collector);
    collector.error.map_or(Ok(collector.grads), Err)
}

struct Collector<'a> {
    engine: &'a Engine,
    by_path: HashMap<String, usize>,
    by_id: HashMap<ParamId, usize>,
    path: Vec<String>,
    grads: GradientsParams,
    error: Option<OffloadError>,
}

impl ModuleVisitor for Collector<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.error.is_some() {
            return;
        }
        // As the optimizer finds it: ids come first.
        let by_path = || self.by_path.get(&self.path.join("."));
        let Some(&slot) = self.by_id.get(&param.id).or_else(by_path) else {
            return;
        };
        let Some(gradient) = self.grads.remove::<D>(param.id) else {
            return;
        };
        let shape = placeholder_shape(&self.engine.layout(slot).shape);
        let options = (&gradient.device(), gradient.dtype());
        match self.engine.collect(slot, gradient.clone()) {
            Ok(true) => {
                let placeholder = Tensor::<D>::full(shape, f32::NAN, options);
                self.grads.register::<D>(param.id, placeholder);
            }
            Ok(false) => self.grads.register::<D>(param.id, gradient),
            Err(error) => self.error = Some(error),
        }
    }
}
