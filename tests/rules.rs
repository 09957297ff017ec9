//! Rules beyond Adam: those of Burn follow Burn, in records too, and each group has its own.

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Module, Param, ParamGroup};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdamConfig, AdamWConfig, GradientsParams, LionConfig, ModuleOptimizer,
    RmsPropConfig, SgdConfig,
};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_zero_offload::optimize::{HostRule, Rule};
use burn_zero_offload::{OffloadError, WithOffload};

use crate::common::vectors::Vectors;
use crate::common::{
    assert_close, assert_models_close, config, devices, param, read, step, tensor,
};

/// Products and sums of single elements: the gradients are the same bits with and without offload.
#[derive(Module, Debug)]
struct Net {
    a: Param<Tensor<2>>,
    b: Param<Tensor<1>>,
}

impl Net {
    fn new(seed: u64, device: &Device) -> Self {
        Self {
            a: param([5, 7], seed, device),
            b: param([7], seed + 1, device),
        }
    }

    fn loss(&self, round: u64) -> Tensor<1> {
        let x = tensor([5, 7], 100 + round, &self.b.base().device());
        let h = self.a.val() * x + self.b.val().unsqueeze();
        (h.clone() * h).mean()
    }
}

fn train(
    mut model: Net,
    optimizer: &mut ModuleOptimizer,
    rounds: std::ops::Range<u64>,
    lr: f64,
) -> Net {
    for round in rounds {
        let loss = model.loss(round);
        model = step(optimizer, lr, model, loss);
    }
    model
}

/// Six rounds next to Burn, then three in which each goes on from the other's record.
#[track_caller]
fn assert_is_burns(rule: impl WithOffload, plain: impl Fn() -> ModuleOptimizer, lr: f64) {
    let rule = rule.host_rule().expect("a rule that works");
    #[derive(Clone)]
    struct Ready(HostRule);
    impl WithOffload for Ready {
        fn host_rule(&self) -> Result<HostRule, OffloadError> {
            Ok(self.0.clone())
        }
    }
    let device = Device::flex().autodiff();
    let offloaded = || {
        let config = Ready(rule.clone()).with_offload(config(FloatDType::F32));
        let (model, offload) = config.init(Net::new(1, &device)).unwrap();
        let optimizer = offload.optimizer();
        (model, optimizer)
    };
    let (model, mut optimizer) = offloaded();
    let mut burns = plain();
    let reference = train(Net::new(1, &device), &mut burns, 0..6, lr);
    let model = train(model, &mut optimizer, 0..6, lr);
    assert_models_close(&model, &reference, 1e-6, 1e-6);

    let (other, fresh) = offloaded();
    let other = other.load_record(reference.clone().into_record());
    let mut from_burn = fresh.from_bytes(burns.into_bytes().unwrap()).unwrap();
    let mut to_burn = plain().from_bytes(optimizer.into_bytes().unwrap()).unwrap();
    let there = Net::new(9, &device).load_record(model.clone().into_record());
    let here = train(other, &mut from_burn, 6..9, lr);
    let there = train(there, &mut to_burn, 6..9, lr);
    let reference = train(reference, &mut burns, 6..9, lr);
    assert_models_close(&here, &reference, 1e-6, 1e-6);
    assert_models_close(&there, &reference, 1e-6, 1e-6);
}

macro_rules! is_burns {
    ($($name:ident: $config:expr, $lr:literal;)*) => {
        $(#[test]
        fn $name() {
            assert_is_burns($config, || $config.init(), $lr);
        })*
    };
}

fn decay() -> Option<WeightDecayConfig> {
    Some(WeightDecayConfig::new(0.1))
}

fn momentum() -> MomentumConfig {
    MomentumConfig::new().with_momentum(0.8)
}

fn norm() -> Option<GradientClippingConfig> {
    Some(GradientClippingConfig::Norm(0.02))
}

is_burns! {
    sgd: SgdConfig::new(), 0.1;
    sgd_with_decay_and_clipping:
        SgdConfig::new().with_weight_decay(decay()).with_gradient_clipping(norm()), 0.1;
    sgd_with_momentum: SgdConfig::new().with_momentum(Some(momentum())), 0.1;
    sgd_with_nesterov_momentum_and_decay:
        SgdConfig::new()
            .with_momentum(Some(momentum().with_nesterov(true).with_dampening(0.0)))
            .with_weight_decay(decay()), 0.1;
    lion: LionConfig::new(), 1e-3;
    lion_with_decay_and_other_rates:
        LionConfig::new().with_beta_1(0.8).with_beta_2(0.9).with_weight_decay(0.5), 1e-3;
    adagrad: AdaGradConfig::new(), 1e-2;
    adagrad_with_falling_rate_and_decay:
        AdaGradConfig::new().with_lr_decay(0.5).with_weight_decay(decay()), 1e-2;
    rms_prop: RmsPropConfig::new(), 1e-3;
    rms_prop_without_momentum: RmsPropConfig::new().with_momentum(0.0), 1e-3;
    rms_prop_centered: RmsPropConfig::new().with_centered(true), 1e-3;
    rms_prop_centered_without_momentum:
        RmsPropConfig::new().with_centered(true).with_momentum(0.0).with_weight_decay(decay()), 1e-3;
    adam_keeps_its_records: AdamConfig::new(), 1e-3;
    amsgrad_keeps_its_records: AdamWConfig::new().with_amsgrad(true), 1e-3;
}

/// acceptance.md, CPU step 15: SGD and Lion on the host, each for its group, and AdamW for the rest.
#[test]
fn every_group_has_its_own_rule() {
    #[derive(Module, Debug)]
    struct Three {
        plain: Vectors,
        lion: Vectors,
        rest: Vectors,
    }
    for device in devices() {
        for dtype in [FloatDType::F32, FloatDType::BF16, FloatDType::F16] {
            let vectors = || Vectors::new(1.0, [2, 1], &device);
            let model = Three {
                plain: vectors(),
                lion: vectors(),
                rest: vectors(),
            };
            let adamw = AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.0);
            let (model, offload) = adamw
                .with_offload(config(dtype))
                .with_group(ParamGroup::from_predicate("plain"), SgdConfig::new())
                .with_group(ParamGroup::from_predicate("lion"), LionConfig::new())
                .init(model)
                .unwrap();
            // Lion keeps one value a weight, AdamW two, SGD none; each in whole cache lines.
            assert_eq!(offload.memory().host_moments, (2 + 2 * 2) * 64);
            let mut optimizer = offload.optimizer();
            let gradient = |v: &Vectors| v.loss(&[0.25, -8.0], &[0.0]);
            let loss = gradient(&model.plain) + gradient(&model.lion) + gradient(&model.rest);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let model = optimizer.step(0.5, model, grads);
            let after = |v: &Vectors| (read(&v.a.val()), read(&v.b.val()));
            assert_eq!(after(&model.plain), (vec![0.875, 5.0], vec![1.0]));
            assert_eq!(after(&model.lion), (vec![0.5, 1.5], vec![1.0]));
            // The first step of Adam is the sign of the gradient.
            let (a, b) = after(&model.rest);
            assert_close(&a, &[0.5, 1.5], 1e-6, 0.0);
            assert_eq!(b, [1.0]);
            let report = offload.report();
            let updated: Vec<_> = report.groups.iter().map(|group| group.updated).collect();
            assert_eq!(updated, [2, 2, 2]);
        }
    }
}

/// acceptance.md, learning rate 82, and parameters 53: groups follow learning rates of their own.
#[test]
fn schedules_are_applied_exactly_per_group() {
    use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;

    for device in devices() {
        let (mut model, offload) = SgdConfig::new()
            .with_offload(config(FloatDType::F32))
            .with_group(
                ParamGroup::from_predicate("b"),
                SgdConfig::new().with_weight_decay(Some(WeightDecayConfig::new(1.0))),
            )
            .init(Vectors::new(1.0, [1, 1], &device))
            .unwrap();
        let mut optimizer = offload.optimizer();
        let [mut a, mut b] = [1.0f32; 2];
        for lr in [1e-2, 1e-3] {
            let mut schedule =
                ModuleLrScheduler::new(lr).with_group(ParamGroup::from_predicate("b"), 3.0 * lr);
            let rates = schedule.step();
            let loss = model.loss(&[0.5], &[0.25]);
            model = step(&mut optimizer, rates, model, loss);
            a = (-(lr as f32)).mul_add(0.5, a);
            b = ((3.0 * lr) as f32).mul_add(-(0.25 + b), b);
            assert_eq!(
                (read(&model.a.val()), read(&model.b.val())),
                (vec![a], vec![b])
            );
            let report = offload.report();
            assert_eq!(report.groups[0].learning_rates, [lr]);
            assert_eq!(report.groups[1].learning_rates, [3.0 * lr]);
        }
    }
}

/// A rule of a user, with a state of its own: records carry it under the names it gives.
#[derive(Clone, Debug)]
struct Mean;

impl Rule<1> for Mean {
    type Scalars = f32;

    const STATE: [&'static str; 1] = ["mean"];

    fn scalars(&self, time: u64, lr: f64) -> f32 {
        (lr * time as f64) as f32
    }

    #[inline(always)]
    fn update(s: &f32, p: f32, [mean]: [f32; 1], g: f32) -> (f32, [f32; 1]) {
        let mean = 0.5 * mean + 0.5 * g;
        (p - s * mean, [mean])
    }
}

impl WithOffload for Mean {
    fn host_rule(&self) -> Result<HostRule, OffloadError> {
        Ok(HostRule::new(self.clone()))
    }
}

#[test]
fn a_users_own_rule_trains_and_resumes() {
    for device in devices() {
        let offloaded = || {
            let config = Mean.with_offload(config(FloatDType::F32));
            let (model, offload) = config.init(Vectors::new(0.0, [2, 1], &device)).unwrap();
            let optimizer = offload.optimizer();
            (model, offload, optimizer)
        };
        let (model, _, mut optimizer) = offloaded();
        let loss = model.loss(&[2.0, 4.0], &[1.0]);
        let model = step(&mut optimizer, 1.0, model, loss);
        assert_eq!(read(&model.a.val()), [-1.0, -2.0]);
        let (other, _, fresh) = offloaded();
        let other = other.load_record(model.into_record());
        let mut resumed = fresh.from_bytes(optimizer.into_bytes().unwrap()).unwrap();
        // Update 2: the mean is .5 * 1 + .5 * 2, the factor 2.
        let loss = other.loss(&[2.0, 4.0], &[1.0]);
        let other = step(&mut resumed, 1.0, other, loss);
        assert_eq!(read(&other.a.val()), [-4.0, -8.0]);
    }
}
