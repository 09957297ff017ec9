//! A look at the model before anything is changed.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Tensor};

use crate::capture::TAP_NAME;
use crate::error::OffloadError;

/// What `init` must know before it walks the parameters.
#[derive(Default)]
pub(super) struct Scan {
    /// Paths of parameters whose value a reparameterization computes (the bases of LoRA adapters).
    pub(super) reparameterized: HashSet<String>,
    /// Device of the first float parameter.
    pub(super) device: Option<Device>,
}

/// Looks through `model` without initialising lazy parameters.
pub(super) fn scan<M: Module>(model: &M) -> Result<Scan, OffloadError> {
    let mut visitor = Visitor::default();
    model.visit(&mut visitor);
    visitor.error.map_or(Ok(visitor.scan), Err)
}

#[derive(Default)]
struct Visitor {
    scan: Scan,
    path: Vec<String>,
    /// The parameter visited last: a reparameterization is entered right after its base.
    last: Option<Base>,
    seen: HashMap<ParamId, String>,
    error: Option<OffloadError>,
}

struct Base {
    path: String,
    trains: Box<dyn Fn() -> bool>,
}

impl ModuleVisitor for Visitor {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        // A mapper never sees a reparameterization that is there already: Burn takes it off first.
        if container_type == "Reparameterization"
            && let Some(Base { path, trains }) = self.last.take()
        {
            if name == TAP_NAME {
                self.error
                    .get_or_insert(OffloadError::AlreadyOffloaded { path });
            } else if trains() {
                let name = name.to_string();
                let error = OffloadError::TrainableReparameterization { path, name };
                self.error.get_or_insert(error);
            } else {
                self.scan.reparameterized.insert(path);
            }
        }
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        if let Some(first) = self.seen.insert(param.id, path.clone()) {
            let second = path.clone();
            self.error
                .get_or_insert(OffloadError::SharedParameter { first, second });
        }
        self.scan.device.get_or_insert_with(|| param.lazy_device());
        let param = param.clone();
        // Asking initialises a lazy parameter; one with a reparameterization has been already.
        let trains = Box::new(move || param.is_require_grad());
        self.last = Some(Base { path, trains });
    }
}
