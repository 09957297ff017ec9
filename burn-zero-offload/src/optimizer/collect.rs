//! Gradients that did not come through a tap, handed over before a step.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use super::names::Names;
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
    let mut collector = Collector {
        engine,
        names: Names::of(engine),
        grads,
        error: None,
    };
    model.visit(&mut collector);
    collector.error.map_or(Ok(collector.grads), Err)
}

struct Collector<'a> {
    engine: &'a Engine,
    names: Names,
    grads: GradientsParams,
    error: Option<OffloadError>,
}

impl ModuleVisitor for Collector<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.names.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.names.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.error.is_some() {
            return;
        }
        let Some(slot) = self.names.slot(param.id) else {
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
