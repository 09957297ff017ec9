//! Devices, small models and exact comparisons.

pub mod layer;
pub mod reference;
pub mod scalar;
pub mod vectors;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use burn_zero_offload::OffloadConfig;

/// An autodiff device of every backend in this build.
pub fn devices() -> Vec<Device> {
    vec![
        Device::flex().autodiff(),
        #[cfg(feature = "cpu")]
        Device::cpu().autodiff(),
    ]
}

/// Weights on the device in `dtype`, everything else at its default.
pub fn config(dtype: FloatDType) -> OffloadConfig {
    OffloadConfig::new().with_dtype(Some(dtype))
}

/// Deterministic values between -1 and 1.
pub fn values(len: usize, seed: u64) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// A tensor of [`values`], without autodiff on a plain device.
pub fn tensor<const D: usize>(shape: [usize; D], seed: u64, device: &Device) -> Tensor<D> {
    let len = shape.iter().product();
    Tensor::from_data(TensorData::new(values(len, seed), shape), device)
}

/// A trainable parameter of [`values`].
pub fn param<const D: usize>(shape: [usize; D], seed: u64, device: &Device) -> Param<Tensor<D>> {
    let len = shape.iter().product();
    Param::from_data(TensorData::new(values(len, seed), shape), device)
}

/// The values of a tensor in `f32`.
pub fn read<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.clone().inner().try_into_vec_as().unwrap()
}

/// The values a model's parameters hold on the device, by path.
pub fn weights<M: Module>(model: &M) -> Vec<(String, Vec<f32>)> {
    #[derive(Default)]
    struct Collect {
        path: Vec<String>,
        out: Vec<(String, Vec<f32>)>,
    }
    impl ModuleVisitor for Collect {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.push(name.to_string());
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.out.push((self.path.join("."), read(&param.base())));
        }
    }
    let mut collect = Collect::default();
    model.visit(&mut collect);
    collect.out
}

/// Compares element by element: absolute plus relative tolerance.
#[track_caller]
pub fn assert_close(actual: &[f32], expected: &[f32], absolute: f32, relative: f32) {
    assert_eq!(actual.len(), expected.len());
    for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
        let bound = absolute + relative * e.abs();
        assert!(
            (a - e).abs() <= bound,
            "element {i}: {a} against {e}, allowed {bound}"
        );
    }
}

/// Compares two models parameter by parameter.
#[track_caller]
pub fn assert_models_close<M: Module>(actual: &M, expected: &M, absolute: f32, relative: f32) {
    let (actual, expected) = (weights(actual), weights(expected));
    assert_eq!(actual.len(), expected.len());
    for ((path, a), (other, e)) in actual.iter().zip(&expected) {
        assert_eq!(path, other);
        assert_close(a, e, absolute, relative);
    }
}

/// The message `use_it` panics with.
#[track_caller]
pub fn panic_of<R>(use_it: impl FnOnce() -> R) -> String {
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(use_it));
    let Err(panic) = result else {
        panic!("this use should be refused")
    };
    match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => panic.downcast_ref::<&str>().unwrap_or(&"").to_string(),
    }
}

/// One step of Burn's plain training loop on `loss`.
pub fn step<M: Module>(
    optimizer: &mut ModuleOptimizer,
    lr: impl Into<ModuleLearningRate>,
    model: M,
    loss: Tensor<1>,
) -> M {
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    optimizer.step(lr, model, grads)
}

/// What an optimizer record holds of one parameter, as Burn's Adam and AdamW name it.
#[derive(Debug, PartialEq)]
pub struct ParameterState {
    pub path: String,
    pub time: usize,
    pub first: Vec<f32>,
    pub second: Vec<f32>,
    pub largest: Option<Vec<f32>>,
}

/// The state an optimizer would save, by path.
pub fn optimizer_state(optimizer: &ModuleOptimizer) -> Vec<ParameterState> {
    let reader = burn_pack::Reader::from_bytes(optimizer.into_bytes().unwrap()).unwrap();
    let names: Vec<String> = reader
        .tensor_names()
        .iter()
        .map(|name| name.to_string())
        .collect();
    let tensor = |id: &str, leaf: &str| {
        let name = format!("{id}.momentum.{leaf}");
        names.contains(&name).then(|| {
            let bytes = reader.tensor_data(&name).unwrap();
            bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                .collect()
        })
    };
    let mut states: Vec<_> = reader
        .metadata()
        .iter()
        .map(|(id, path)| ParameterState {
            path: path.clone(),
            time: usize::try_from(reader.scalars()[&format!("{id}.momentum.time")]).unwrap(),
            first: tensor(id, "moment_1").unwrap(),
            second: tensor(id, "moment_2").unwrap(),
            largest: tensor(id, "max_moment_2"),
        })
        .collect();
    states.sort_by(|a, b| a.path.cmp(&b.path));
    states
}

/// Updates that the parameter at `path` has seen, as an optimizer record tells.
pub fn optimizer_time(optimizer: &ModuleOptimizer, path: &str) -> u64 {
    let reader = burn_pack::Reader::from_bytes(optimizer.into_bytes().unwrap()).unwrap();
    let mut paths = reader.metadata().iter();
    let (id, _) = paths.find(|(_, known)| known.as_str() == path).unwrap();
    let time = reader.scalars()[&format!("{id}.offload.time")];
    usize::try_from(time).unwrap() as u64
}

/// What an optimizer record holds under the name `leaf` of the parameter at `path`.
pub fn optimizer_values(optimizer: &ModuleOptimizer, path: &str, leaf: &str) -> Vec<f32> {
    let reader = burn_pack::Reader::from_bytes(optimizer.into_bytes().unwrap()).unwrap();
    let mut paths = reader.metadata().iter();
    let (id, _) = paths.find(|(_, known)| known.as_str() == path).unwrap();
    let bytes = reader.tensor_data(&format!("{id}.{leaf}")).unwrap();
    let values = bytes.chunks_exact(4);
    values
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}
