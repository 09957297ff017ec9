//! Records of an offloaded model hold fp32 master weights and move between plain and offloaded
//! models, also into a process whose parameter ids differ.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_zero_offload::{Offload, WithOffload};

use crate::common::{
    assert_close, assert_models_close, config, devices, optimizer_state, param, read, step, tensor,
    weights,
};

const LR: f64 = 1e-2;

#[derive(Module, Debug)]
struct Net {
    a: Linear,
    b: Linear,
}

impl Net {
    fn new(seed: u64, device: &Device) -> Self {
        let layer = |seed| Linear {
            weight: param([5, 5], seed, device),
            bias: Some(param([5], seed + 1, device)),
        };
        Self {
            a: layer(seed),
            b: layer(seed + 2),
        }
    }

    fn loss(&self, seed: u64) -> Tensor<1> {
        let weight = self.a.weight.val();
        let x = tensor([4, 5], seed, &weight.device()).cast(FloatDType::from(weight.dtype()));
        let h = self.b.forward(self.a.forward(x).tanh());
        h.cast(FloatDType::F32).powf_scalar(2.0).mean()
    }
}

fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_weight_decay(0.1)
}

fn offloaded(model: Net, dtype: FloatDType) -> (Net, Offload, ModuleOptimizer) {
    let (model, offload) = adamw().with_offload(config(dtype)).init(model).unwrap();
    let optimizer = offload.optimizer();
    (model, offload, optimizer)
}

fn train(mut model: Net, optimizer: &mut ModuleOptimizer, seeds: std::ops::Range<u64>) -> Net {
    for seed in seeds {
        let loss = model.loss(seed);
        model = step(optimizer, LR, model, loss);
    }
    model
}

/// The record of a model, through its bytes as a file would hold them.
fn record(model: &Net) -> ModuleRecord {
    ModuleRecord::from_bytes(model.clone().into_record().into_bytes().unwrap()).unwrap()
}

#[test]
fn a_record_holds_the_master_weights_in_f32() {
    for device in devices() {
        let start = Net::new(1, &device);
        let (model, ..) = offloaded(start.clone(), FloatDType::BF16);
        assert_eq!(model.a.weight.val().dtype(), DType::BF16);
        assert_ne!(read(&model.a.weight.val()), read(&start.a.weight.val()));
        let plain = Net::new(9, &device).load_record(record(&model));
        assert_eq!(plain.a.weight.val().dtype(), DType::F32);
        assert_eq!(weights(&plain), weights(&start));
    }
}

/// The test that a resumed run is the same run: fresh parameter ids, model and optimizer loaded,
/// the next updates equal bit for bit.
#[test]
fn a_run_continues_in_a_process_with_other_parameter_ids() {
    for device in devices() {
        for dtype in [FloatDType::F32, FloatDType::BF16, FloatDType::F16] {
            let (model, _, mut optimizer) = offloaded(Net::new(1, &device), dtype);
            let model = train(model, &mut optimizer, 0..3);
            let (saved, state) = (record(&model), optimizer.into_bytes().unwrap());

            let (fresh, _, other) = offloaded(Net::new(9, &device), dtype);
            assert_ne!(fresh.a.weight.id, model.a.weight.id);
            let resumed = fresh.load_record(saved);
            let mut resumed_optimizer = other.from_bytes(state).unwrap();
            assert_eq!(weights(&resumed), weights(&model));

            let model = train(model, &mut optimizer, 3..6);
            let resumed = train(resumed, &mut resumed_optimizer, 3..6);
            assert_eq!(weights(&resumed), weights(&model));
            assert_eq!(
                weights(&Net::new(0, &device).load_record(record(&resumed))),
                { weights(&Net::new(0, &device).load_record(record(&model))) }
            );
            assert_eq!(
                optimizer_state(&resumed_optimizer),
                optimizer_state(&optimizer)
            );
        }
    }
}

#[test]
fn a_plain_run_continues_offloaded_and_back() {
    for device in devices() {
        let mut plain_optimizer = adamw().init();
        let mut plain = train(Net::new(1, &device), &mut plain_optimizer, 0..3);

        let (fresh, _, optimizer) = offloaded(Net::new(9, &device), FloatDType::F32);
        let mut model = fresh.load_record(record(&plain));
        let state = plain_optimizer.into_bytes().unwrap();
        let mut optimizer = optimizer.from_bytes(state).unwrap();
        plain = train(plain, &mut plain_optimizer, 3..6);
        model = train(model, &mut optimizer, 3..6);
        assert_models_close(&model, &plain, 1e-6, 1e-6);

        let mut back = Net::new(9, &device).load_record(record(&model));
        let state = optimizer.into_bytes().unwrap();
        let mut back_optimizer = adamw().init().from_bytes(state).unwrap();
        plain = train(plain, &mut plain_optimizer, 6..9);
        back = train(back, &mut back_optimizer, 6..9);
        assert_models_close(&back, &plain, 1e-6, 1e-6);
    }
}

#[test]
fn files_work_as_records_do() {
    let device = Device::flex().autodiff();
    let folder = tempfile::tempdir().unwrap();
    let (path, state) = (
        folder.path().join("model.bpk"),
        folder.path().join("optimizer.bpk"),
    );
    let (model, _, mut optimizer) = offloaded(Net::new(1, &device), FloatDType::BF16);
    let model = train(model, &mut optimizer, 0..2);
    model.clone().save_file(&path).unwrap();
    optimizer.save(&state).unwrap();
    let (fresh, _, other) = offloaded(Net::new(9, &device), FloatDType::BF16);
    let resumed = fresh.load_file(&path);
    let mut other = other.load(&state).unwrap();
    let model = train(model, &mut optimizer, 2..4);
    let resumed = train(resumed, &mut other, 2..4);
    assert_eq!(weights(&resumed), weights(&model));
}

/// A linear layer in column layout transposes when it saves and loads; offloading keeps that. Burn
/// can load into such a layer while it is lazy; so it is with offload.
#[test]
fn mappers_a_parameter_already_has_still_work() {
    for device in devices() {
        let build = |seed| {
            device.clone().inner().seed(seed);
            LinearConfig::new(3, 5)
                .with_layout(LinearLayout::Col)
                .init(&device)
        };
        let column = build(1);
        let (model, _) = adamw()
            .with_offload(config(FloatDType::BF16))
            .init(column.clone())
            .unwrap();
        let saved = build(2).load_record(model.clone().into_record());
        assert_eq!(weights(&saved), weights(&column));

        let (fresh, offload) = adamw()
            .with_offload(config(FloatDType::F32))
            .init(build(3))
            .unwrap();
        let loaded = fresh.load_record(model.into_record());
        assert_eq!(weights(&loaded), weights(&column));
        let x = tensor([2, 3], 1, &device);
        let expected = read(&column.forward(x.clone()));
        assert_close(&read(&loaded.forward(x.clone())), &expected, 1e-6, 1e-6);
        let mut optimizer = offload.optimizer();
        let loss = loaded.forward(x).powf_scalar(2.0).mean();
        let stepped = step(&mut optimizer, LR, loaded.clone(), loss);
        assert_ne!(weights(&stepped), weights(&loaded));
    }
}

/// A record is the whole optimizer state: a parameter it has nothing for starts fresh, as in Burn.
#[test]
fn going_back_to_an_earlier_optimizer_record_forgets_later_state() {
    for device in devices() {
        let only_a = |m: &Net| {
            m.a.forward(tensor([2, 5], 3, &device))
                .powf_scalar(2.0)
                .mean()
        };
        let run = |model: Net, optimizer: &mut ModuleOptimizer| {
            let loss = only_a(&model);
            step(optimizer, LR, model, loss)
        };
        let (model, _, mut optimizer) = offloaded(Net::new(1, &device), FloatDType::F32);
        let mut plain_optimizer = adamw().init();
        let model = run(model, &mut optimizer);
        let plain = run(Net::new(1, &device), &mut plain_optimizer);
        // As bytes at once: a record of Burn's own optimizer reads the device when it is looked at.
        let early = optimizer.into_bytes().unwrap();
        let plain_early = plain_optimizer.into_bytes().unwrap();
        let model = train(model, &mut optimizer, 0..3);
        let plain = train(plain, &mut plain_optimizer, 0..3);
        let mut optimizer = optimizer.from_bytes(early).unwrap();
        let mut plain_optimizer = plain_optimizer.from_bytes(plain_early).unwrap();
        let model = train(model, &mut optimizer, 3..5);
        let plain = train(plain, &mut plain_optimizer, 3..5);
        assert_models_close(&model, &plain, 1e-6, 1e-6);
        let times: Vec<usize> = optimizer_state(&optimizer).iter().map(|s| s.time).collect();
        assert_eq!(times, [3, 3, 2, 2]);
    }
}

#[test]
fn optimizer_records_carry_amsgrads_third_moment() {
    let device = Device::flex().autodiff();
    let c = AdamWConfig::new().with_amsgrad(true);
    let (model, offload) = c
        .clone()
        .with_offload(config(FloatDType::F32))
        .init(Net::new(1, &device))
        .unwrap();
    let mut optimizer = offload.optimizer();
    train(model, &mut optimizer, 0..2);
    let states = optimizer_state(&optimizer);
    assert_eq!(states.len(), 4);
    assert!(states.iter().all(|s| s.time == 2 && s.largest.is_some()));
    let mut plain = c.init();
    train(Net::new(1, &device), &mut plain, 0..2);
    for (ours, burns) in states.iter().zip(optimizer_state(&plain)) {
        let largest = (
            ours.largest.as_ref().unwrap(),
            burns.largest.as_ref().unwrap(),
        );
        assert_close(largest.0, largest.1, 1e-9, 1e-5);
    }
}

#[test]
fn loading_a_record_of_another_shape_is_an_error_and_changes_nothing() {
    let device = Device::flex().autodiff();
    let (model, _, mut optimizer) = offloaded(Net::new(1, &device), FloatDType::F32);
    let before = weights(&model);
    let other = LinearConfig::new(2, 2).init(&device).into_record();
    let kept = model.clone();
    assert!(model.try_load_record(other).is_err());
    assert_eq!(weights(&kept), before);
    assert_ne!(weights(&train(kept, &mut optimizer, 0..1)), before);
}
