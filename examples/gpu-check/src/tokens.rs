//! Tokens per second, offloaded and not.

use std::time::Instant;

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn_zero_offload::{OffloadConfig, WithOffload};

use crate::args::Setting;
use crate::gpt::{Tokens, adamw, config, step};
use crate::model::Gpt;
use crate::parts::{cast, finish, median};
use crate::table::{Row, number};

/// The measurement.
pub fn measure(setting: &Setting) -> Vec<Row> {
    if let Some(reason) = setting.no_gpt() {
        return vec![Row::skip("tokens per second", reason)];
    }
    let (config, batch) = config(setting);
    let device = setting.device.clone().autodiff();
    let tokens = Tokens::new(&config, batch, &device);
    let (warm, count) = (setting.size(1, 3), setting.size(2, 8));
    let rate = |mut model: Gpt, mut optimizer: ModuleOptimizer| {
        let mut seconds = Vec::new();
        for number in 0..warm + count {
            let started = Instant::now();
            (model, _) = step(&mut optimizer, 1e-4, model, &tokens);
            finish(&setting.device);
            if number >= warm {
                seconds.push(started.elapsed().as_secs_f64());
            }
        }
        (batch * config.context) as f64 / median(seconds)
    };

    let made = adamw()
        .with_offload(OffloadConfig::new())
        .init(config.init(&device));
    let (model, offload) = made.expect("a GPT can be offloaded");
    let (dtype, parameters) = (offload.dtype(), model.num_params());
    let optimizer = offload.optimizer();
    let mut rows = vec![Row::info(
        "the model",
        format!(
            "{parameters} parameters, {} layers, width {}, {batch} x {} tokens a step",
            config.layers, config.width, config.context
        ),
        "",
    )];
    let mut add = |name: String, rate: f64| rows.push(Row::info(name, number(rate), "tokens/s"));
    add(format!("{dtype:?} offloaded"), rate(model, optimizer));
    drop(offload);
    setting.device.memory_cleanup();
    add(
        "f32 AdamW on the device".into(),
        rate(config.init(&device), adamw().init()),
    );
    setting.device.memory_cleanup();
    let model = cast(config.init(&device), dtype);
    add(
        format!("{dtype:?} AdamW on the device (no fp32 master)"),
        rate(model, adamw().init()),
    );
    rows
}
