//! A model with every kind of parameter there is on the way, trained for a few rounds.

use std::sync::Arc;

use burn::module::{Module, Param, ParamGroup};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, LionConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor, TensorData};

use crate::boundary::{Boundaries, Hook};
use crate::{Offload, OffloadConfig, StatePrecision, WithOffload};

/// Updates per training run.
pub(super) const ROUNDS: usize = 3;
/// Backward passes per update.
pub(super) const PASSES: usize = 2;

/// Small gradients that are packed, one that travels alone, one weight that is used twice and one that
/// is used often enough to be summed on the device. Products and sums of single elements only: the same
/// bits on every run.
#[derive(Module, Debug)]
pub(super) struct Net {
    pub(super) large: Param<Tensor<2>>,
    pub(super) twice: Param<Tensor<1>>,
    pub(super) often: Param<Tensor<1>>,
    pub(super) single: Param<Tensor<1>>,
    pub(super) small: Vec<Param<Tensor<1>>>,
}

fn param<const D: usize>(shape: [usize; D], seed: usize, device: &Device) -> Param<Tensor<D>> {
    let len = shape.iter().product::<usize>();
    let value = |i: usize| ((i * 37 + seed * 11) % 101) as f32 / 64.0 - 0.75;
    let values: Vec<f32> = (0..len).map(value).collect();
    Param::from_data(TensorData::new(values, shape), device)
}

impl Net {
    pub(super) fn new(device: &Device) -> Self {
        Self {
            // 80 KiB in half precision.
            large: param([160, 256], 1, device),
            twice: param([300], 2, device),
            often: param([257], 3, device),
            single: param([1], 4, device),
            small: (5..9).map(|i| param([i * 7], i, device)).collect(),
        }
    }

    pub(super) fn loss(&self, pass: usize) -> Tensor<1> {
        let scale = 1.0 + pass as f32 / 4.0;
        let often = (1..=4).fold(self.often.val(), |x, i| {
            x * self.often.val() + i as f32 / 8.0
        });
        let small = self.small.iter().map(|p| (p.val() * p.val()).sum());
        let parts = [
            (self.large.val() * self.large.val()).sum(),
            (self.twice.val() * scale + self.twice.val() * self.twice.val()).sum(),
            often.sum(),
            (self.single.val() * scale).sum(),
        ];
        let parts = parts.into_iter().chain(small);
        parts
            .map(|part| part.cast(FloatDType::F32) * scale)
            .fold(Tensor::zeros([1], &self.single.device()), |sum, part| {
                sum + part
            })
    }

    /// The bits of every weight on the device.
    pub(super) fn bits(&self) -> Vec<Vec<u8>> {
        fn bits<const D: usize>(param: &Param<Tensor<D>>) -> Vec<u8> {
            crate::upload::read(param.base())
                .unwrap()
                .as_bytes()
                .to_vec()
        }
        let fixed = [
            bits(&self.large),
            bits(&self.twice),
            bits(&self.often),
            bits(&self.single),
        ];
        fixed
            .into_iter()
            .chain(self.small.iter().map(bits))
            .collect()
    }
}

pub(super) fn devices() -> Vec<Device> {
    vec![
        Device::flex().autodiff(),
        #[cfg(feature = "cpu")]
        Device::cpu().autodiff(),
    ]
}

/// Half weights, tiles of 1000 elements.
pub(super) fn config() -> OffloadConfig {
    OffloadConfig::new()
        .with_dtype(Some(FloatDType::BF16))
        .with_upload_tile(Some(1000))
}

/// The same with split masters, which are sent from where they are, and with whole ones, which go through
/// buffers.
pub(super) fn both_kinds() -> [OffloadConfig; 2] {
    let kept = |precision| config().with_state_precision(Some(precision));
    [
        kept(StatePrecision::SplitMaster),
        kept(StatePrecision::Full),
    ]
}

/// Each of the `configs` on each device.
pub(super) fn on_every_device(configs: [OffloadConfig; 2]) -> Vec<(Device, OffloadConfig)> {
    let with = |device: Device| configs.clone().map(|config| (device.clone(), config));
    devices().into_iter().flat_map(with).collect()
}

/// An offloaded model, with `hook` at its boundaries.
pub(super) fn offloaded(
    device: &Device,
    config: OffloadConfig,
    hook: Option<Arc<Hook>>,
) -> (Net, Offload, ModuleOptimizer) {
    let build = || {
        let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
        let config = AdamWConfig::new()
            .with_offload(config)
            .with_group(ParamGroup::from_path("twice"), LionConfig::new())
            .with_group(ParamGroup::from_predicate("small"), momentum);
        config.init(Net::new(device)).unwrap()
    };
    let (net, offload) = match hook {
        Some(hook) => Boundaries::with(hook, build),
        None => build(),
    };
    let optimizer = offload.optimizer();
    (net, offload, optimizer)
}

/// The passes of round `round`.
pub(super) fn backward(net: &Net, round: usize) -> GradientsParams {
    let pass = |pass| net.loss(round * PASSES + pass).backward();
    let last = (1..PASSES).fold(pass(0), |_earlier, next| pass(next));
    GradientsParams::from_grads(last, net)
}

/// Trains from the beginning and returns the bits of the weights after each round.
pub(super) fn train(
    device: &Device,
    config: OffloadConfig,
    hook: Option<Arc<Hook>>,
) -> Vec<Vec<Vec<u8>>> {
    let (mut net, offload, mut optimizer) = offloaded(device, config, hook);
    let mut all = vec![];
    for round in 0..ROUNDS {
        let grads = backward(&net, round);
        net = optimizer.step(1e-2, net, grads);
        let report = offload.report();
        assert!(report.peak_in_flight <= report.in_flight_budget, "{report}");
        assert_eq!(report.non_finite, 0, "{report}");
        all.push(net.bits());
    }
    all
}
