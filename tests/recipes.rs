//! Models with float inputs or float constants: Burn does not promote element types, so weights in
//! half precision want inputs and constants in half precision. The ways the README names.
//!
//! The third way, half precision as the device's default, has a test binary of its own
//! (`half_by_default.rs`): defaults hold for a whole process.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    BatchNorm, BatchNormConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, RotaryEncoding,
    RotaryEncodingConfig,
};
use burn::optim::AdamWConfig;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, activation};
use burn_zero_offload::WithOffload;

use crate::common::{config, devices, step, tensor};

/// Trains until the loss has fallen to under half on Flex. On CubeCL's CPU runtime, where a matrix
/// product takes a tenth of a second on two cores, three steps have to lower it.
#[track_caller]
fn assert_learns<M: Module>(
    model: M,
    dtype: FloatDType,
    steps: usize,
    loss: impl Fn(&M) -> Tensor<1>,
) -> M {
    let on_flex = model.devices()[0] == Device::flex().autodiff();
    let (steps, share) = if on_flex { (steps, 0.5) } else { (3, 1.0) };
    let (mut model, offload) = AdamWConfig::new()
        .with_offload(config(dtype))
        .init(model)
        .unwrap();
    let mut optimizer = offload.optimizer();
    let mut curve = vec![];
    for _ in 0..steps {
        let loss = loss(&model);
        curve.push(loss.clone().into_scalar::<f32>());
        model = step(&mut optimizer, 1e-2, model, loss);
    }
    assert!(curve[steps - 1] < share * curve[0], "{curve:?}");
    model
}

#[derive(Module, Debug)]
struct Cnn {
    conv: Conv2d,
    norm: BatchNorm,
    out: Linear,
}

impl Cnn {
    fn new(device: &Device) -> Self {
        Self {
            conv: Conv2dConfig::new([1, 4], [3, 3]).init(device),
            norm: BatchNormConfig::new(4).init(device),
            out: LinearConfig::new(4, 3).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let h = activation::relu(self.norm.forward(self.conv.forward(images)));
        let [batch, channels, ..] = h.dims();
        // Pooled over the image: CubeCL's CPU runtime refuses wide products in half precision.
        self.out
            .forward(h.mean_dim(3).mean_dim(2).reshape([batch, channels]))
    }
}

/// Float images: the input is cast to the weights' type. Buffers (running statistics) follow.
#[test]
fn a_cnn_on_float_images() {
    for device in devices() {
        for dtype in [FloatDType::BF16, FloatDType::F32] {
            let labels = Tensor::<1, Int>::from_ints([0, 1, 2, 0, 1, 2], &device);
            let brightness = labels.clone().float().reshape([6, 1, 1, 1]);
            let images = (tensor([6, 1, 6, 6], 3, &device) * 0.3 + brightness).cast(dtype);
            let criterion = CrossEntropyLossConfig::new().init(&device);
            let model = assert_learns(Cnn::new(&device), dtype, 60, |m| {
                criterion.forward(
                    m.forward(images.clone()).cast(FloatDType::F32),
                    labels.clone(),
                )
            });
            let valid = model.valid();
            let logits = valid.forward(images.inner());
            assert_eq!(logits.dtype(), DType::from(dtype));
        }
    }
}

/// A record of a model with buffers is loaded before `init`, which casts them with the weights.
#[test]
fn a_record_with_running_statistics_is_loaded_before_init() {
    for device in devices() {
        let offload = |model| {
            AdamWConfig::new()
                .with_offload(config(FloatDType::BF16))
                .init(model)
                .unwrap()
                .0
        };
        let images = tensor([6, 1, 6, 6], 3, &device).cast(FloatDType::BF16);
        let model = offload(Cnn::new(&device));
        model.forward(images.clone());
        // Burn folds what a forward pass added to running statistics in when it makes a validation
        // copy; a record taken before has the older ones, with and without offload.
        let expected = model.valid();
        let resumed = offload(Cnn::new(&device).load_record(model.into_record()));
        let actual = resumed.valid();
        let logits = |m: &Cnn| crate::common::read(&m.forward(images.clone().inner()));
        assert_eq!(logits(&actual), logits(&expected));
    }
}

#[derive(Module, Debug)]
struct Rotary {
    norm: LayerNorm,
    qkv: Linear,
    rope: RotaryEncoding,
    out: Linear,
}

impl Rotary {
    fn new(device: &Device) -> Self {
        Self {
            norm: LayerNormConfig::new(8).init(device),
            qkv: LinearConfig::new(8, 24).init(device),
            rope: RotaryEncodingConfig::new(6, 8).init(device),
            out: LinearConfig::new(8, 8).init(device),
        }
    }

    /// The table of a rotary encoding is a plain tensor, not a parameter: it stays in f32, and
    /// queries and keys are cast around it.
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let dtype = FloatDType::from(x.dtype());
        let qkv = self.qkv.forward(self.norm.forward(x.clone())).chunk(3, 2);
        let turn = |t: &Tensor<3>| {
            self.rope
                .forward(t.clone().cast(FloatDType::F32))
                .cast(dtype)
        };
        let scores = turn(&qkv[0]).matmul(turn(&qkv[1]).swap_dims(1, 2)) / 8f32.sqrt();
        x + self
            .out
            .forward(activation::softmax(scores, 2).matmul(qkv[2].clone()))
    }
}

/// Float constants: cast around them.
#[test]
fn a_transformer_with_rotary_encoding() {
    for device in devices() {
        let dtype = FloatDType::BF16;
        let x = tensor([3, 6, 8], 4, &device).cast(dtype);
        let target = tensor([3, 6, 8], 5, &device).cast(dtype);
        assert_learns(Rotary::new(&device), dtype, 60, |m| {
            let error = m.forward(x.clone()) - target.clone();
            error.cast(FloatDType::F32).powf_scalar(2.0).mean()
        });
    }
}

#[derive(Module, Debug)]
struct Mlp {
    a: Linear,
    b: Linear,
}

/// `with_dtype(F32)`: nothing to cast, 4 bytes a parameter on the device, still 12 off it.
#[test]
fn an_mlp_in_f32() {
    for device in devices() {
        let model = Mlp {
            a: LinearConfig::new(4, 16).init(&device),
            b: LinearConfig::new(16, 2).init(&device),
        };
        let x = tensor([16, 4], 1, &device);
        let target = tensor([16, 2], 2, &device);
        let model = assert_learns(model, FloatDType::F32, 80, |m| {
            let h = m.b.forward(m.a.forward(x.clone()).tanh());
            (h - target.clone()).powf_scalar(2.0).mean()
        });
        assert_eq!(model.a.weight.val().dtype(), DType::F32);
    }
}

/// f16 weights lose updates below their resolution; their fp32 masters do not.
#[test]
fn updates_below_the_devices_resolution_add_up() {
    for device in devices() {
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let weight = crate::common::param([8], 1, &device)
                .map(|t| Tensor::from_inner(t.inner().ones_like()).require_grad());
            #[derive(Module, Debug)]
            struct One {
                w: burn::module::Param<Tensor<1>>,
            }
            let adamw = AdamWConfig::new().with_weight_decay(0.0).with_epsilon(1e-8);
            let (mut model, offload) = adamw
                .with_offload(config(dtype))
                .init(One { w: weight })
                .unwrap();
            let mut optimizer = offload.optimizer();
            // Each update takes 1e-4 off: less than half a unit in the last place of 1 in either.
            for _ in 0..200 {
                let loss = model.w.val().sum();
                model = step(&mut optimizer, 1e-4, model, loss);
            }
            let values = crate::common::read(&model.w.val());
            assert!(
                values.iter().all(|v| (v - 0.98).abs() < 0.004),
                "{dtype:?}: {values:?}"
            );
        }
    }
}
