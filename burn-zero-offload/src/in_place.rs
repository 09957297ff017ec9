//! One handle to a model where Burn keeps two.

use std::fmt;
use std::sync::Arc;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor};
use burn::optim::{GradientsParams, ModuleOptimizer, MultiGradientsParams};
use burn::tensor::Device;
use burn::train::{InferenceStep, TrainOutput, TrainStep};
use parking_lot::Mutex;

/// A model for burn-train's `Learner` whose clones are the same model.
///
/// `Learner` clones its model before each step and drops the old one when the new one is complete, so
/// the old weights stay on the device during the step: up to 2 bytes per half parameter more than
/// offloaded training needs otherwise. Wrapped in this, a clone shares the model instead of copying its
/// handles, and old weights go one by one as they are replaced.
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn::tensor::Device;
/// use burn_zero_offload::InPlace;
/// # let model = LinearConfig::new(2, 2).init(&Device::flex().autodiff());
/// let model = InPlace::new(model); // then `Learner::new(model, offload.optimizer(), scheduler)`
/// // ... and after training
/// let model = model.into_inner();
/// ```
///
/// That gives up Burn's value semantics: what one clone learns or loads, all have. A validation copy
/// (`valid()`) is a model of its own, as always. If a step panics in the middle the model is lost, to
/// all clones.
pub struct InPlace<M>(Arc<Mutex<Option<M>>>);

const GONE: &str = "this model was in a step, or being mapped, when that panicked or another clone of \
                    the same `InPlace` was used: use one clone at a time, and build the model anew \
                    after a panic";

impl<M> InPlace<M> {
    /// Wraps a model.
    pub fn new(model: M) -> Self {
        Self(Arc::new(Mutex::new(Some(model))))
    }

    /// Calls `look` with the model.
    ///
    /// # Panics
    ///
    /// If a step of this model has panicked.
    pub fn with<R>(&self, look: impl FnOnce(&M) -> R) -> R {
        look(self.0.lock().as_ref().expect(GONE))
    }

    /// Takes the model out; other clones are of no use afterwards.
    ///
    /// # Panics
    ///
    /// If a step of this model has panicked.
    pub fn into_inner(self) -> M {
        self.0.lock().take().expect(GONE)
    }

    fn replace(self, change: impl FnOnce(M) -> M) -> Self {
        // Not within the lock: the old value must be gone before the new one is complete.
        let old = self.0.lock().take().expect(GONE);
        let new = change(old);
        *self.0.lock() = Some(new);
        self
    }
}

impl<M> Clone for InPlace<M> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<M: fmt::Debug> fmt::Debug for InPlace<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("InPlace").field(&self.0.lock()).finish()
    }
}

impl<M: fmt::Display> fmt::Display for InPlace<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.with(|model| model.fmt(f))
    }
}

impl<M: Module> Module for InPlace<M> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.with(|model| model.collect_devices(devices))
    }

    fn fork(self, device: &Device) -> Self {
        self.replace(|model| model.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.replace(|model| model.to_device(device))
    }

    fn train(self) -> Self {
        self.replace(M::train)
    }

    fn valid(&self) -> Self {
        Self::new(self.with(M::valid))
    }

    fn materialize(self) -> Self {
        self.replace(M::materialize)
    }

    fn visit<Visitor: ModuleVisitor>(&self, visitor: &mut Visitor) {
        self.with(|model| model.visit(visitor));
    }

    fn map<Mapper: ModuleMapper>(self, mapper: &mut Mapper) -> Self {
        self.replace(|model| model.map(mapper))
    }
}

impl<M: TrainStep + Module> TrainStep for InPlace<M> {
    type Input = M::Input;
    type Output = M::Output;

    fn step(&self, item: Self::Input) -> TrainOutput<Self::Output> {
        self.with(|model| TrainStep::step(model, item))
    }

    fn optimize(
        self,
        optim: &mut ModuleOptimizer,
        lr_module: ModuleLearningRate,
        grads: GradientsParams,
    ) -> Self {
        self.replace(|model| model.optimize(optim, lr_module, grads))
    }

    fn optimize_multi(
        self,
        optim: &mut ModuleOptimizer,
        lr_module: ModuleLearningRate,
        grads: MultiGradientsParams,
    ) -> Self {
        self.replace(|model| model.optimize_multi(optim, lr_module, grads))
    }
}

impl<M: InferenceStep> InferenceStep for InPlace<M> {
    type Input = M::Input;
    type Output = M::Output;

    fn step(&self, item: Self::Input) -> Self::Output {
        self.with(|model| InferenceStep::step(model, item))
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use burn::module::Param;
    use burn::tensor::Tensor;

    use super::*;

    #[derive(Module, Debug)]
    struct One {
        weight: Param<Tensor<1>>,
    }

    fn one() -> InPlace<One> {
        let device = Device::flex().autodiff();
        InPlace::new(One {
            weight: Param::from_data([1.0f32, 2.0], &device),
        })
    }

    fn values(model: &InPlace<One>) -> Vec<f32> {
        model.with(|one| one.weight.val().try_into_vec_as().unwrap())
    }

    struct Double;

    impl ModuleMapper for Double {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| value * 2.0)
        }
    }

    #[test]
    fn clones_are_the_same_model_and_validation_copies_are_not() {
        let model = one();
        let (clone, valid) = (model.clone(), model.valid());
        let model = model.map(&mut Double);
        assert_eq!(values(&model), [2.0, 4.0]);
        assert_eq!(values(&clone), [2.0, 4.0]);
        assert_eq!(values(&valid), [1.0, 2.0]);
        assert_eq!((model.num_params(), model.devices().len()), (2, 1));
        let loaded = one().load_record(clone.into_record());
        assert_eq!(values(&loaded), [2.0, 4.0]);
    }

    #[test]
    fn after_a_panic_in_a_step_clones_say_so() {
        struct Fails;
        impl ModuleMapper for Fails {
            fn map_float<const D: usize>(&mut self, _: Param<Tensor<D>>) -> Param<Tensor<D>> {
                panic!("in the middle");
            }
        }
        let model = one();
        let clone = model.clone();
        assert!(catch_unwind(AssertUnwindSafe(|| model.map(&mut Fails))).is_err());
        let panic = catch_unwind(AssertUnwindSafe(|| values(&clone))).unwrap_err();
        assert!(crate::panics::message(panic).contains("build the model anew"));
    }
}
