//! How fast the link is, and how fast the offload uses it.

use burn::optim::AdamWConfig;
use burn_zero_offload::{OffloadConfig, WithOffload};

use crate::args::Setting;
use crate::parts::Offloaded;
use crate::rates;
use crate::stack::StackConfig;
use crate::table::{Row, number};

/// The best rates that were measured, in bytes per second; 0 where there is no link.
#[derive(Clone, Copy, Debug, Default)]
pub struct Link {
    /// Host to device.
    pub up: f64,
    /// Device to host.
    pub down: f64,
}

/// The measurement.
pub fn measure(setting: &Setting, link: &mut Link) -> Vec<Row> {
    let sizes = rates::sizes(setting.size(1 << 20, 256 << 20));
    let rates = rates::measure(&setting.device, &sizes, setting.size(3, 9));
    let mut rows: Vec<Row> = rates
        .iter()
        .map(|rate| {
            let size = rate.bytes >> 10;
            let what = format!("{}, {size} KiB", rate.way.name());
            Row::info(what, number(rate.per_second() / 1e9), "GB/s")
        })
        .collect();
    if setting.is_gpu() {
        (link.up, link.down) = rates::best(&rates);
        rows.push(Row::info("link peak, up", number(link.up / 1e9), "GB/s"));
        rows.push(Row::info(
            "link peak, down",
            number(link.down / 1e9),
            "GB/s",
        ));
    } else {
        let reason = format!(
            "{} has no link: its memory is the host's",
            setting.backend.name()
        );
        rows.push(Row::skip("link peak", reason));
    }

    let config = StackConfig::of(setting);
    let device = setting.device.clone().autodiff();
    let made = AdamWConfig::new()
        .with_offload(OffloadConfig::new().with_dtype(Some(setting.products())))
        .init(config.init(&device));
    let trained = Offloaded::new(made.expect("a stack can be offloaded"), &setting.device);
    let input = config.input(&device, trained.offload.dtype());
    let loss = |model: &crate::stack::Stack| model.loss(input.clone());
    let (_, parts) = trained.steps(1, setting.size(2, 5), true, loss);
    let share = |rate: f64, peak: f64| match peak > 0.0 {
        true => format!(
            "{} ({:.0} % of the peak)",
            number(rate / 1e9),
            100.0 * rate / peak
        ),
        false => number(rate / 1e9),
    };
    let down = parts.report.bytes_down as f64 / (parts.backward + parts.downloads);
    let up = parts.report.bytes_up as f64 / (parts.step + parts.rest);
    rows.push(Row::info(
        "offload, gradients over the time of backward",
        share(down, link.down),
        "GB/s",
    ));
    rows.push(Row::info(
        "offload, weights over the time of the step",
        share(up, link.up),
        "GB/s",
    ));
    let report = &parts.report;
    rows.push(Row::info(
        "offload, transfers down and up",
        format!("{} and {}", report.transfers_down, report.transfers_up),
        "",
    ));
    rows.push(Row::info("offload, pinned memory", &report.pinning, ""));
    rows
}
