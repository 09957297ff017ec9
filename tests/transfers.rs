//! What crosses the link: exact bytes, few transfers, a bounded number in flight.

use burn::module::{Module, Param};
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_zero_offload::{OffloadConfig, OffloadError, StepReport, WithOffload};

use crate::common::{config, devices, param, weights};

/// The weights of a model without layers.
#[derive(Module, Debug)]
struct Bag {
    params: Vec<Param<Tensor<1>>>,
}

impl Bag {
    fn new(lens: &[usize], device: &Device) -> Self {
        let params = lens.iter().enumerate();
        let params = params.map(|(i, &len)| param([len], i as u64, device));
        Self {
            params: params.collect(),
        }
    }

    /// Uses parameter `i` of the bag `uses[i]` times.
    fn loss(&self, uses: &[usize]) -> Tensor<1> {
        let used = self.params.iter().zip(uses);
        let terms = used.flat_map(|(p, &n)| (0..n).map(|use_| (p.val() * (use_ + 1) as f32).sum()));
        terms.reduce(|sum, term| sum + term).expect("a use")
    }
}

/// Trains one round of `passes` backward passes, and reports it.
fn round(
    device: &Device,
    config: OffloadConfig,
    lens: &[usize],
    uses: &[usize],
    passes: usize,
) -> (StepReport, Bag) {
    let adam = AdamConfig::new().with_offload(config);
    let (bag, offload) = adam.init(Bag::new(lens, device)).unwrap();
    let mut grads = bag.loss(uses).backward();
    for _ in 1..passes {
        grads = bag.loss(uses).backward();
    }
    let grads = GradientsParams::from_grads(grads, &bag);
    let bag = offload.optimizer().step(1e-2, bag, grads);
    (offload.report(), bag)
}

#[test]
fn a_half_parameter_costs_two_bytes_down_for_each_pass_and_two_up() {
    let lens = [1, 64, 40_000];
    let elements: u64 = lens.iter().map(|&len| len as u64).sum();
    for device in devices() {
        for (dtype, size) in [(FloatDType::BF16, 2), (FloatDType::F32, 4)] {
            for passes in [1, 4] {
                let (report, _) = round(&device, config(dtype), &lens, &[1; 3], passes);
                let down = size * elements * passes as u64;
                assert_eq!(
                    (report.bytes_down, report.bytes_up),
                    (down, size * elements)
                );
                assert_eq!(report.round, 1);
            }
        }
    }
}

/// Two uses of a half weight come down as two gradients of 2 bytes. More are summed on the device, in
/// f32, and come down as one; in single precision that begins with two uses. On Flex, where the device
/// is the host, every use is counted.
#[test]
fn a_weight_used_often_comes_down_once() {
    let lens = [100, 40_000];
    let elements: u64 = 40_100;
    for device in devices() {
        let flex = device == Device::flex().autodiff();
        for (dtype, uses, bytes) in [
            (FloatDType::BF16, 2, 2 * 2),
            (FloatDType::BF16, 3, if flex { 3 * 2 } else { 4 }),
            (FloatDType::BF16, 7, if flex { 7 * 2 } else { 4 }),
            (FloatDType::F32, 2, if flex { 2 * 4 } else { 4 }),
        ] {
            let (report, _) = round(&device, config(dtype), &lens, &[uses; 2], 1);
            assert_eq!(
                report.bytes_down,
                bytes * elements,
                "{dtype:?}, {uses} uses"
            );
        }
    }
}

/// The sum of a weight's uses is the same bits, added up on the device or on the host.
#[test]
fn sums_on_the_device_are_those_of_the_host() {
    let lens = [100, 40_000];
    for device in devices() {
        let ample = config(FloatDType::BF16).with_in_flight(Some(1 << 20));
        // No room beside the largest gradient: every use travels.
        let tight = config(FloatDType::BF16).with_in_flight(Some(80_000));
        let (_, on_device) = round(&device, ample, &lens, &[5; 2], 1);
        let (report, on_host) = round(&device, tight, &lens, &[5; 2], 1);
        assert_eq!(report.bytes_down, 5 * 2 * 40_000 + 5 * 2 * 100);
        assert_eq!(weights(&on_device), weights(&on_host));
    }
}

#[test]
fn small_gradients_travel_together() {
    // Ten thousand on Flex, fewer on CubeCL's CPU runtime, where a launch takes long. The station alone
    // is tested with ten thousand there (`download/downloader.rs`).
    for (device, count) in devices().into_iter().zip([10_000, 1000]) {
        let lens = vec![64; count];
        let uses = vec![1; count];
        let (report, bag) = round(&device, config(FloatDType::BF16), &lens, &uses, 1);
        assert_eq!(report.bytes_down, 2 * 64 * count as u64);
        assert!(report.transfers_down * 100 <= count as u64, "{report}");
        let before = Bag::new(&lens, &device);
        for ((_, after), (_, before)) in weights(&bag).iter().zip(weights(&before)) {
            assert!(after.iter().zip(before).all(|(a, b)| *a < b));
        }
    }
}

#[test]
fn no_more_than_the_budget_is_in_flight() {
    let lens = [30_000, 40_000, 20_000, 100, 7];
    for device in devices() {
        for budget in [80_000, 100_000, 1 << 20] {
            let config = config(FloatDType::BF16).with_in_flight(Some(budget));
            let (report, _) = round(&device, config, &lens, &[1, 2, 3, 4, 5], 3);
            assert_eq!(report.in_flight_budget, budget);
            assert!(report.peak_in_flight <= budget, "{report}");
            assert!(report.peak_in_flight > 0);
        }
    }
}

#[test]
fn a_budget_below_the_largest_gradient_is_refused_by_name() {
    for device in devices() {
        for (dtype, needed) in [(FloatDType::BF16, 400), (FloatDType::F32, 800)] {
            let init = |budget| {
                let config = config(dtype).with_in_flight(Some(budget));
                let adamw = AdamWConfig::new().with_offload(config);
                adamw.init(Bag::new(&[100, 200, 50], &device))
            };
            let error = init(needed - 1).map(|_| ()).unwrap_err();
            let text = error.to_string();
            assert!(
                matches!(&error, OffloadError::BudgetTooSmall { budget, path, needed: n }
                    if *budget == needed - 1 && path == "params.1" && *n == needed),
                "{error:?}"
            );
            assert!(
                text.contains("`params.1` takes") && text.contains("with_in_flight"),
                "{text}"
            );
            assert!(init(needed).is_ok());
        }
    }
}

#[test]
fn the_default_budget_holds_the_largest_gradient_twice() {
    for device in devices() {
        let adamw = AdamWConfig::new().with_offload(config(FloatDType::BF16));
        let (_, offload) = adamw.init(Bag::new(&[3_000_000, 10], &device)).unwrap();
        assert_eq!(offload.memory().in_flight_budget, 2 * 2 * 3_000_000);
        let adamw = AdamWConfig::new().with_offload(config(FloatDType::BF16));
        let (_, offload) = adamw.init(Bag::new(&[10], &device)).unwrap();
        assert_eq!(offload.report().in_flight_budget, 4 << 20);
    }
}

#[test]
fn non_finite_values_are_counted_where_they_arise() {
    for device in devices() {
        let adam = AdamConfig::new().with_offload(config(FloatDType::BF16));
        let (bag, offload) = adam.init(Bag::new(&[40, 40_000], &device)).unwrap();
        let huge = Tensor::<1>::full([1], 3e38, (&device, DType::F32));
        // The gradient of the first parameter overflows in all elements, the second's is finite.
        let overflow = bag.params[0].val().cast(FloatDType::F32) * huge.clone() * huge;
        let loss = overflow.sum() + bag.params[1].val().cast(FloatDType::F32).sum();
        let grads = GradientsParams::from_grads(loss.backward(), &bag);
        offload.flush().unwrap();
        assert_eq!(offload.report().non_finite, 40);
        drop(grads);
    }
}

#[test]
fn a_report_prints_what_it_counted() {
    let device = Device::flex().autodiff();
    let (report, _) = round(&device, config(FloatDType::BF16), &[500_000], &[1], 1);
    let text = report.to_string();
    for part in [
        "round 1",
        "1.000 MB in 1 transfers",
        "not pinned:",
        "budget 4.194 MB",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let json = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<StepReport>(&json).unwrap(), report);
}
