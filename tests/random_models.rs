//! Whatever the model and the order of events: the offloaded run is the plain one, bit for bit.

mod draw;

use burn::module::{Module, Param, ParamGroup};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, LionConfig, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use burn_zero_offload::optimize::rules::{Adam, Lion, Momentum, WeightDecay};
use burn_zero_offload::{
    Accumulation, DynamicLossScaleConfig, LossScaleConfig, OffloadConfig, Schedule, WithOffload,
};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use self::draw::{Group, Look, Run, run};
use crate::common::reference::{Ended, PlainLoop, add, image, parameter};
use crate::common::{optimizer_time, optimizer_values, values, weights};

impl Run {
    /// The parameters that a pass uses, once for each use.
    fn uses(&self, mask: u8) -> Vec<usize> {
        let used = self.parameters.iter().enumerate();
        let used = used.filter(|(index, _)| *index == 0 || mask & (1 << index) != 0);
        used.flat_map(|(index, spec)| vec![index; spec.uses])
            .collect()
    }

    fn initial(&self, index: usize) -> Vec<f32> {
        values(self.parameters[index].len, index as u64 + 1)
    }

    /// The loss of a pass from the weights of each use.
    fn loss(
        &self,
        round: usize,
        pass: usize,
        uses: &[usize],
        weights: Vec<Tensor<1>>,
    ) -> Tensor<1> {
        let term = |(number, (&index, w)): (usize, (&usize, Tensor<1>))| {
            let (device, len) = (w.device(), w.dims()[0]);
            let seed = (round * 64 + pass * 8 + number) as u64 + 100;
            let mut c = values(len, seed);
            if self.overflows.contains(&(round, pass, index)) && len > 0 {
                c[len / 2] = f32::INFINITY;
            }
            let c = Tensor::<1>::from_data(TensorData::new(c, [len]), (&device, w.dtype()));
            (w.clone() * c + w.clone() * w).cast(FloatDType::F32).sum()
        };
        let terms = uses.iter().zip(weights).enumerate().map(term);
        terms
            .reduce(|sum, term| sum + term)
            .expect("every pass uses a parameter")
    }

    /// Whether the uses of a parameter in one pass are summed in `f32` before they travel: where that is
    /// less to carry. Not on Flex, where nothing travels.
    fn sums_on(&self, device: &Device, index: usize) -> bool {
        let uses = self.parameters[index].uses;
        let enough = match self.dtype {
            FloatDType::F32 => 2,
            _ => 3,
        };
        *device != Device::flex().autodiff() && uses >= enough
    }

    fn learning_rate(&self, round: usize) -> f64 {
        0.01 / (1.0 + round as f64)
    }

    fn plain(&self, device: &Device) -> (PlainLoop, Vec<Ended>) {
        let parameters = self.parameters.iter().enumerate().map(|(index, spec)| {
            let master = self.initial(index);
            match spec.group {
                Group::AdamW => {
                    let rule = Adam {
                        beta_1: 0.9,
                        beta_2: 0.999,
                        epsilon: 1e-5,
                        weight_decay: WeightDecay::Decoupled(0.1),
                    };
                    parameter(rule, None, master)
                }
                Group::Momentum => {
                    let rule = Momentum {
                        penalty: 0.0,
                        momentum: 0.9,
                        dampening: 0.1,
                        nesterov: false,
                    };
                    parameter(rule, None, master)
                }
                Group::Lion => {
                    let rule = Lion {
                        beta_1: 0.9,
                        beta_2: 0.99,
                        weight_decay: 0.0,
                    };
                    parameter(rule, None, master)
                }
            }
        });
        let mut run = PlainLoop::new(parameters.collect(), self.first_scale);
        run.max_norm = self.max_norm.map(f64::from);
        run.mean = self.mean;
        run.growth_interval = self.growth_interval;
        let mut ended = vec![];
        let masters = |run: &PlainLoop| -> Vec<Vec<f32>> {
            run.parameters.iter().map(|p| p.master().to_vec()).collect()
        };
        // What forward passes see.
        let mut seen = masters(&run);
        for (round, passes) in self.rounds.iter().enumerate() {
            let mut sums = vec![None; self.parameters.len()];
            for (pass, &mask) in passes.iter().enumerate() {
                let uses = self.uses(mask);
                let leaf = |&index: &usize| {
                    let leaf = image(&seen[index], self.dtype, device);
                    match self.parameters[index].frozen {
                        true => leaf,
                        false => leaf.require_grad(),
                    }
                };
                let leaves: Vec<_> = uses.iter().map(leaf).collect();
                let loss = self.loss(round, pass, &uses, leaves.clone());
                let grads = (loss * run.scale).backward();
                let mut on_device = vec![None; self.parameters.len()];
                for (&index, leaf) in uses.iter().zip(&leaves).rev() {
                    let sum = match self.sums_on(device, index) {
                        true => &mut on_device[index],
                        false => &mut sums[index],
                    };
                    if let Some(gradient) = leaf.grad(&grads) {
                        add(sum, gradient);
                    }
                }
                for (sum, on_device) in sums.iter_mut().zip(on_device) {
                    if let Some(gradient) = on_device {
                        add(
                            sum,
                            Tensor::from_floats(gradient.as_slice(), &Device::flex()),
                        );
                    }
                }
            }
            let before = masters(&run);
            ended.push(run.end(self.learning_rate(round), passes.len(), &sums));
            let delayed =
                matches!(self.schedule, Schedule::Delayed { warmup } if round as u64 + 1 >= warmup);
            seen = match delayed && !matches!(self.looks[round], Look::Flush | Look::Settle) {
                true => before,
                false => masters(&run),
            };
        }
        (run, ended)
    }

    /// Runs offloaded next to the plain loop and compares all there is.
    fn check(&self, device: &Device) -> Result<(), TestCaseError> {
        #[derive(Module, Debug)]
        struct Model {
            parameters: Vec<Param<Tensor<1>>>,
        }
        let new = |device: &Device| Model {
            parameters: (0..self.parameters.len())
                .map(|index| {
                    let data = TensorData::from(self.initial(index).as_slice());
                    let param = Param::from_data(data, device);
                    match self.parameters[index].frozen {
                        true => param.no_grad(),
                        false => param,
                    }
                })
                .collect(),
        };
        let group = |group: Group| {
            let members = self.parameters.iter().enumerate();
            let members = members.filter(|(_, spec)| spec.group == group && !spec.frozen);
            let paths: Vec<_> = members.map(|(i, _)| format!("parameters.{i}")).collect();
            (!paths.is_empty()).then(|| ParamGroup::from_paths(paths))
        };
        let dynamic = DynamicLossScaleConfig::new()
            .with_initial(self.first_scale)
            .with_growth_interval(self.growth_interval as u64);
        let accumulation = match self.mean {
            true => Accumulation::Mean,
            false => Accumulation::Sum,
        };
        let config = OffloadConfig::new()
            .with_dtype(Some(self.dtype))
            .with_threads(Some(self.threads))
            .with_schedule(self.schedule)
            .with_loss_scale(Some(LossScaleConfig::Dynamic(dynamic)))
            .with_max_grad_norm(self.max_norm)
            .with_accumulation(accumulation);
        let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
        let mut config = AdamWConfig::new()
            .with_weight_decay(0.1)
            .with_offload(config);
        if let Some(members) = group(Group::Momentum) {
            config = config.with_group(members, momentum);
        }
        if let Some(members) = group(Group::Lion) {
            config = config.with_group(members, LionConfig::new());
        }
        let (mut model, offload) = config.init(new(device)).unwrap();
        let mut optimizer = offload.optimizer();

        let (plain, ended) = self.plain(device);
        for (round, (passes, ended)) in self.rounds.iter().zip(ended).enumerate() {
            let mut sums = GradientsAccumulator::new();
            for (pass, &mask) in passes.iter().enumerate() {
                let uses = self.uses(mask);
                let weights = uses.iter().map(|&i| model.parameters[i].val()).collect();
                let loss = offload.scale(self.loss(round, pass, &uses, weights));
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                sums.accumulate(&model, grads);
            }
            model = optimizer.step(self.learning_rate(round), model, sums.grads());
            let report = offload.report();
            match ended {
                Ended::Applied(_) => prop_assert!(report.applied(), "round {round}: {report}"),
                Ended::Skipped => {
                    prop_assert!(report.overflow().is_some(), "round {round}: {report}")
                }
                Ended::Empty => prop_assert!(false, "every round has gradients"),
            }
            prop_assert_eq!(report.passes, passes.len());
            match self.looks[round] {
                Look::Away => {}
                Look::Flush => offload.flush().unwrap(),
                Look::Settle => model = offload.settle(model).unwrap(),
                Look::Save => drop(model.clone().into_record()),
                Look::Validate => {
                    // Without gradients: a use that never runs backward would be waited for in the sums of
                    // uses on the device, which groups them otherwise.
                    let (valid, model) = (model.valid(), model.clone().no_grad());
                    for (param, copy) in model.parameters.iter().zip(&valid.parameters) {
                        let bits = |param: &Param<Tensor<1>>| {
                            param.val().try_into_vec_as::<f32>().unwrap()
                        };
                        prop_assert_eq!(bits(param), bits(copy));
                    }
                }
                Look::Memory => {
                    let offloaded = self.parameters.iter().filter(|spec| !spec.frozen);
                    let elements = offloaded.map(|spec| spec.len).sum::<usize>();
                    prop_assert_eq!(offload.memory().parameters, elements);
                }
            }
        }
        prop_assert_eq!(offload.loss_scale(), plain.scale);
        let masters = weights(&new(&Device::flex()).load_record(model.into_record()));
        for (index, (spec, expected)) in self.parameters.iter().zip(&plain.parameters).enumerate() {
            let (path, master) = &masters[index];
            if spec.frozen {
                continue;
            }
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            prop_assert!(bits(master) == bits(expected.master()), "masters of {path}");
            if expected.time() == 0 {
                continue;
            }
            prop_assert_eq!(optimizer_time(&optimizer, path), expected.time());
            for (leaf, values) in expected.state() {
                let got = optimizer_values(&optimizer, path, leaf);
                prop_assert!(bits(&got) == bits(values), "{leaf} of {path}");
            }
        }
        Ok(())
    }
}

/// Draws so many models, or as many as `PROPTEST_CASES` says.
fn check(device: &Device, cases: u32) {
    let wanted = std::env::var("PROPTEST_CASES").ok();
    let cases = wanted.and_then(|cases| cases.parse().ok()).unwrap_or(cases);
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        ..Default::default()
    };
    // Burn's fusion was seen running operations on a tensor without elements and on one of a single element
    // in one kernel, over no elements at all: what the model computes is wrong then, offloaded or not.
    let shortest = usize::from(*device != Device::flex().autodiff());
    let device = device.clone();
    let checked = TestRunner::new(config).run(&run(shortest), |run| run.check(&device));
    if let Err(failure) = checked {
        panic!("{failure}");
    }
}

#[test]
fn random_models_train_as_the_plain_loop_does() {
    check(&Device::flex().autodiff(), 200);
}

#[cfg(feature = "cpu")]
#[test]
fn random_models_train_as_the_plain_loop_does_on_the_cpu_runtime() {
    check(&Device::cpu().autodiff(), 5);
}
