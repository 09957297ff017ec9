//! Which parameters train, and how: every kind a model can have.

use burn::module::{Module, Param};
use burn::nn::{Embedding, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_zero_offload::{OffloadConfig, OffloadError, WithOffload};

use crate::common::{
    assert_close, assert_models_close, config, devices, param, read, step, tensor, weights,
};

const LR: f64 = 1e-2;

fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.1)
}

/// Trains `model` offloaded in f32 and with Burn's optimizer, and compares.
#[track_caller]
fn assert_equals_burn<M: Module>(model: M, steps: usize, loss: impl Fn(&M) -> Tensor<1>) -> M {
    let mut reference = model.clone();
    let (mut offloaded, offload) = adamw()
        .with_offload(config(FloatDType::F32))
        .init(model)
        .unwrap();
    let (mut optimizer, mut plain) = (offload.optimizer(), adamw().init());
    for _ in 0..steps {
        let (a, b) = (loss(&offloaded), loss(&reference));
        offloaded = step(&mut optimizer, LR, offloaded, a);
        reference = step(&mut plain, LR, reference, b);
    }
    assert_models_close(&offloaded, &reference, 1e-6, 1e-6);
    offloaded
}

#[derive(Module, Debug)]
struct One<const D: usize> {
    weight: Param<Tensor<D>>,
}

impl<const D: usize> One<D> {
    fn new(shape: [usize; D], device: &Device) -> Self {
        Self {
            weight: param(shape, 3, device),
        }
    }

    fn loss(&self) -> Tensor<1> {
        let weight = self.weight.val();
        (weight.clone() * weight + 0.3).powf_scalar(2.0).sum()
    }
}

/// acceptance.md, CPU step 3.
#[test]
fn all_fifteen_elements_of_a_three_by_five_parameter_change() {
    for device in devices() {
        let model = One::new([3, 5], &device);
        let before = read(&model.weight.val());
        let after = assert_equals_burn(model, 1, |m| m.loss());
        let after = read(&after.weight.val());
        assert!(
            before.iter().zip(&after).all(|(b, a)| b != a),
            "{before:?} {after:?}"
        );
    }
}

#[test]
fn ranks_one_to_eight() {
    for device in devices() {
        assert_equals_burn(One::new([5], &device), 3, |m| m.loss());
        assert_equals_burn(One::new([3, 2], &device), 3, |m| m.loss());
        assert_equals_burn(One::new([3, 2, 2], &device), 3, |m| m.loss());
        assert_equals_burn(One::new([2, 1, 3, 2], &device), 3, |m| m.loss());
        assert_equals_burn(One::new([2, 1, 3, 2, 1], &device), 3, |m| m.loss());
        assert_equals_burn(One::new([2, 1, 3, 1, 1, 2], &device), 3, |m| m.loss());
        assert_equals_burn(One::new([2, 1, 1, 2, 1, 2, 1], &device), 3, |m| m.loss());
        assert_equals_burn(One::new([2, 1, 1, 2, 1, 1, 1, 3], &device), 3, |m| m.loss());
    }
}

#[test]
fn a_single_element() {
    for device in devices() {
        assert_equals_burn(One::new([1], &device), 3, |m| m.loss());
        assert_equals_burn(One::new([1, 1, 1], &device), 3, |m| m.loss());
    }
}

#[derive(Module, Debug)]
struct Pair {
    a: Param<Tensor<1>>,
    b: Param<Tensor<1>>,
}

/// acceptance.md, CPU step 11: the parameter of 4 changes, the one of 0 is a no-op.
#[test]
fn a_parameter_without_elements() {
    for device in devices() {
        let a = param([4], 1, &device);
        let b = Param::from_tensor(Tensor::<1>::empty([0], &device));
        let before = read(&a.val());
        let (mut model, offload) = adamw()
            .with_offload(config(FloatDType::BF16))
            .init(Pair { a, b })
            .unwrap();
        let mut optimizer = offload.optimizer();
        for _ in 0..2 {
            let sum = |p: &Param<Tensor<1>>| p.val().sum().cast(FloatDType::F32);
            let loss = sum(&model.a) + sum(&model.b);
            model = step(&mut optimizer, LR, model, loss);
        }
        assert!(
            before
                .iter()
                .zip(read(&model.a.val()))
                .all(|(b, a)| *b != a)
        );
        assert_eq!(model.b.val().dims(), [0]);
        assert_eq!(offload.memory().parameters, 4);
    }
}

/// acceptance.md, parameters 43: it does not move, and its moments and step count stay.
#[test]
fn a_parameter_unused_in_a_step_does_not_move() {
    for device in devices() {
        let model = Pair {
            a: param([4], 1, &device),
            b: param([4], 2, &device),
        };
        let both = |m: &Pair| (m.a.val() * m.b.val()).sum();
        let (mut offloaded, offload) = adamw()
            .with_offload(config(FloatDType::F32))
            .init(model.clone())
            .unwrap();
        let (mut optimizer, mut plain) = (offload.optimizer(), adamw().init());
        let mut reference = model;
        for i in 0..6 {
            let resting = read(&offloaded.b.val());
            let loss = |m: &Pair| if i % 2 == 0 { both(m) } else { m.a.val().sum() };
            let (a, b) = (loss(&offloaded), loss(&reference));
            offloaded = step(&mut optimizer, LR, offloaded, a);
            reference = step(&mut plain, LR, reference, b);
            if i % 2 == 1 {
                assert_eq!(read(&offloaded.b.val()), resting);
            }
        }
        assert_models_close(&offloaded, &reference, 1e-6, 1e-6);
    }
}

/// Gradients that reach the tap as views: transposed, sliced, expanded.
#[test]
fn gradients_that_are_not_contiguous() {
    for device in devices() {
        assert_equals_burn(One::new([3, 5], &device), 2, |m| {
            let x = tensor([5, 3], 9, &device);
            (m.weight.val().transpose() * x).sum()
        });
        assert_equals_burn(One::new([3, 5], &device), 2, |m| {
            m.weight.val().slice([1..3, 0..4]).powf_scalar(2.0).sum()
        });
        assert_equals_burn(One::new([3, 1], &device), 2, |m| {
            (m.weight.val().expand([3, 7]) * tensor([3, 7], 4, &device)).sum()
        });
        assert_equals_burn(One::new([2, 3, 4], &device), 2, |m| {
            (m.weight.val().permute([2, 0, 1]) * tensor([4, 2, 3], 4, &device)).sum()
        });
    }
}

#[derive(Module, Debug)]
struct Tied {
    embedding: Embedding,
    layer: Linear,
}

impl Tied {
    fn new(device: &Device) -> Self {
        let layer = Linear {
            weight: param([4, 4], 1, device),
            bias: Some(param([4], 2, device)),
        };
        Self {
            embedding: Embedding {
                weight: param([9, 4], 3, device),
            },
            layer,
        }
    }

    /// The layer is called twice, the embedding is the head too.
    fn loss(&self) -> Tensor<1> {
        let tokens =
            Tensor::<2, Int>::from_ints([[1, 2, 3], [3, 8, 5]], &self.layer.weight.device());
        let h = self.embedding.forward(tokens);
        let h = self
            .layer
            .forward(self.layer.forward(h).tanh())
            .tanh()
            .reshape([6, 4]);
        let logits = h.matmul(self.embedding.weight.val().transpose());
        logits.cast(FloatDType::F32).powf_scalar(2.0).mean()
    }
}

/// acceptance.md, parameters 50 and 51: one master, one state, one buffer, saved once.
#[test]
fn a_tied_embedding_and_a_layer_called_twice() {
    for device in devices() {
        assert_equals_burn(Tied::new(&device), 5, Tied::loss);
        let model = Tied::new(&device);
        let (model, offload) = adamw()
            .with_offload(config(FloatDType::BF16))
            .init(model)
            .unwrap();
        let memory = offload.memory();
        assert_eq!(memory.parameters, 9 * 4 + 4 * 4 + 4);
        assert_eq!(memory.device_weights, 2 * memory.parameters);
        assert_eq!(memory.host_master, 4 * memory.parameters);
        assert_eq!(model.into_record().len(), 3);
    }
}

#[test]
fn one_parameter_in_two_fields_is_refused() {
    let device = Device::flex().autodiff();
    let a = param([4], 1, &device);
    let model = Pair { b: a.clone(), a };
    let error = adamw()
        .with_offload(OffloadConfig::new())
        .init(model)
        .unwrap_err();
    assert!(
        matches!(&error, OffloadError::SharedParameter { first, second }
        if first == "a" && second == "b")
    );
}

/// Lazily initialised parameters get the values their own initialiser draws: a clone, which shares it,
/// sees the same.
#[test]
fn lazy_parameters_are_initialised_as_they_would_be() {
    for device in devices() {
        let model = LinearConfig::new(6, 5).init(&device);
        let clone = model.clone();
        assert!(!model.weight.is_initialized());
        let (model, _) = adamw()
            .with_offload(config(FloatDType::F32))
            .init(model)
            .unwrap();
        assert!(clone.weight.is_initialized());
        assert_eq!(weights(&model), weights(&clone));
    }
}

/// A gradient that comes to the optimizer in full, past the tap, counts as one more contribution.
#[test]
fn gradients_that_bypass_the_tap_are_added() {
    for device in devices() {
        let model = One::new([4], &device);
        let (model, offload) = adamw()
            .with_offload(config(FloatDType::F32))
            .init(model)
            .unwrap();
        let mut optimizer = offload.optimizer();
        let x = tensor([4], 5, &device);
        let twice = (model.weight.val() * x.clone()).sum().backward();
        let mut grads = GradientsParams::from_grads(twice, &model);
        let more = tensor([4], 6, &device).inner();
        grads.register(model.weight.id, more.clone());
        let start = One {
            weight: model.weight.clone(),
        }
        .materialize();
        let model = optimizer.step(LR, model, grads);

        let mut expected = GradientsParams::new();
        expected.register(start.weight.id, x.inner() + more);
        let expected = adamw().init().step(LR, start, expected);
        assert_close(
            &read(&model.weight.val()),
            &read(&expected.weight.val()),
            1e-6,
            1e-6,
        );
    }
}
