//! What hides behind what: a step against its parts, each measured alone.

use burn::module::Module;
use burn_zero_offload::{OffloadConfig, WithOffload};

use crate::args::Setting;
use crate::gpt::{Tokens, adamw, config};
use crate::model::Gpt;
use crate::parts::{Offloaded, cast, cpu_step_rate, forward_and_backward};
use crate::table::{Row, number};
use crate::transfers::Link;

/// The measurement.
pub fn measure(setting: &Setting, link: &Link) -> Vec<Row> {
    if let Some(reason) = setting.no_gpt() {
        return vec![Row::skip("the step and its parts", reason)];
    }
    let (config, batch) = config(setting);
    let device = setting.device.clone().autodiff();
    let tokens = Tokens::new(&config, batch, &device);
    let (warm, count) = (setting.size(1, 3), setting.size(2, 7));

    let made = adamw()
        .with_offload(OffloadConfig::new())
        .init(config.init(&device));
    let trained = Offloaded::new(made.expect("a GPT can be offloaded"), &setting.device);
    let loss = |model: &Gpt| tokens.loss(model);
    let (trained, parts) = trained.steps(warm, count, false, loss);
    let (dtype, parameters) = (trained.offload.dtype(), trained.model.num_params());
    let sample = parameters.min(64_000_000);
    let cpu_step = parameters as f64 / cpu_step_rate(&trained.offload, sample);
    drop(trained);

    let model = cast(config.init(&device), dtype);
    let alone = forward_and_backward(&setting.device, warm, count, || tokens.loss(&model));
    let report = &parts.report;
    let ms = |seconds: f64| number(1e3 * seconds);
    let mut slowest = alone.max(cpu_step);
    let mut rows = vec![
        Row::info(
            format!("{dtype:?} GPT of {parameters} parameters: offloaded step"),
            ms(parts.whole()),
            "ms",
        ),
        Row::info(
            "of that forward and backward",
            ms(parts.forward + parts.backward),
            "ms",
        ),
        Row::info(
            "of that waiting for the last gradients",
            ms(parts.downloads),
            "ms",
        ),
        Row::info(
            "of that CPU step and upload",
            ms(parts.step + parts.rest),
            "ms",
        ),
        Row::info("alone: forward and backward, no optimizer", ms(alone), "ms"),
        Row::info("alone: CPU step", ms(cpu_step), "ms"),
    ];
    if link.up > 0.0 && link.down > 0.0 {
        let (down, up) = (
            report.bytes_down as f64 / link.down,
            report.bytes_up as f64 / link.up,
        );
        slowest = slowest.max(down).max(up);
        rows.push(Row::info(
            "alone: gradients at the peak of the link",
            ms(down),
            "ms",
        ));
        rows.push(Row::info(
            "alone: weights at the peak of the link",
            ms(up),
            "ms",
        ));
    } else {
        rows.push(Row::skip(
            "alone: transfers",
            "no rate of the link is known",
        ));
    }
    let efficiency = 100.0 * slowest / parts.whole();
    rows.push(Row::info(
        "efficiency: slowest part over the step",
        number(efficiency),
        "%",
    ));
    for (name, waited) in [
        (
            "backward waited for room in the budget",
            report.blocked_on_budget,
        ),
        ("the step waited for gradients", report.blocked_on_download),
        ("the step waited for uploads", report.blocked_on_upload),
    ] {
        rows.push(Row::info(name, ms(waited.as_secs_f64()), "ms"));
    }
    rows
}
