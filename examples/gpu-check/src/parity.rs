//! Does an offloaded model train as Burn's own optimizer trains it?

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{FloatDType, Tensor};
use burn_zero_offload::{DynamicLossScaleConfig, LossScaleConfig, OffloadConfig, WithOffload};

use crate::args::Setting;
use crate::device::Backend;
use crate::gpt::{Tokens, adamw, step};
use crate::model::{Gpt, GptConfig};
use crate::table::{Row, number};

const LR: f64 = 1e-3;

/// The largest difference between weights, absolute plus relative, that is taken for rounding.
///
/// On Flex and on CubeCL's CPU runtime both runs compute the same gradients, and the two updates
/// differ by the rounding of a few operations. On a GPU a matrix product may be summed in another
/// order each time, and may take its inputs in tf32 (relative error 5e-4). Adam divides a gradient by
/// its own size, so an error of the gradient becomes the same relative error of a step of up to 1e-3:
/// 20 steps are worth up to 20 * 1e-3 * 5e-4 = 1e-5. Gradients near zero are worse, as they may change
/// their sign. 1e-4 leaves room for those, and is a tenth of a single step. Beside it stands how far
/// two runs without offload are apart.
fn tolerance(backend: Backend) -> f64 {
    match backend {
        Backend::Flex | Backend::Cpu => 1e-6,
        _ => 1e-4,
    }
}

/// The check.
pub fn check(setting: &Setting) -> Vec<Row> {
    let device = setting.device.clone().autodiff();
    let (config, batch) = setting.size(
        (
            GptConfig {
                vocab: 16,
                layers: 1,
                width: 32,
                heads: 2,
                context: 8,
            },
            2,
        ),
        (
            GptConfig {
                vocab: 256,
                layers: 4,
                width: 256,
                heads: 8,
                context: 64,
            },
            8,
        ),
    );
    let steps = if setting.no_gpt().is_some() {
        2
    } else {
        setting.size(5, 20)
    };
    let tokens = Tokens::new(&config, batch, &device);
    // Clones share the weights they begin with: a seed would not do where a generator is shared.
    let first = config.init(&device);

    let run = |mut model: Gpt, mut optimizer: ModuleOptimizer, lr: f64| {
        let mut losses = Vec::new();
        for _ in 0..steps {
            let loss;
            (model, loss) = step(&mut optimizer, lr, model, &tokens);
            losses.push(loss.into_scalar::<f32>());
        }
        (weights(&model), losses)
    };
    let offloaded = |dtype: Option<FloatDType>| {
        let config = OffloadConfig::new().with_dtype(dtype);
        let made = adamw().with_offload(config).init(first.clone());
        let (model, offload) = made.expect("a GPT can be offloaded");
        (model, offload.optimizer(), offload)
    };

    let mut rows = Vec::new();
    let (plain, _) = run(first.clone(), adamw().init(), LR);
    if setting.is_gpu() {
        let (again, _) = run(first.clone(), adamw().init(), LR);
        let what = "f32 AdamW twice, without offload: largest difference of weights";
        rows.push(Row::info(what, number(distance(&again, &plain)), ""));
    }
    let (model, optimizer, _) = offloaded(Some(FloatDType::F32));
    let (full, _) = run(model, optimizer, LR);
    let (bound, difference) = (tolerance(setting.backend), distance(&full, &plain));
    let what = format!(
        "f32 offloaded against f32 AdamW, {} weights (tied head), {steps} steps: largest difference, \
         at most {bound:e}",
        plain.len()
    );
    rows.push(Row::check(
        what,
        number(difference),
        "",
        difference <= bound,
    ));

    if let Some(reason) = setting.no_gpt() {
        rows.push(Row::skip(
            "half precision: the loss stays finite and falls",
            reason,
        ));
        rows.push(Row::skip(SCALED, reason));
        return rows;
    }
    let (model, optimizer, offload) = offloaded(None);
    let (_, losses) = run(model, optimizer, 3.0 * LR);
    let (from, to) = (losses[0], losses[losses.len() - 1]);
    let falls = losses.iter().all(|loss| loss.is_finite()) && to < from;
    rows.push(Row::check(
        format!(
            "{:?} offloaded, {steps} steps: the loss stays finite and falls",
            offload.dtype()
        ),
        format!("{from:.4} to {to:.4}"),
        "nats",
        falls,
    ));
    rows.push(scaled(first, &tokens, steps));
    rows
}

const SCALED: &str = "F16, scaled and clipped, every step verified against the scalar loop and read back: \
                      an overflow changes no weight, and the loss falls";

/// Mixed precision with everything on, and one step in the middle that overflows.
fn scaled(model: Gpt, tokens: &Tokens, steps: usize) -> Row {
    let scale = LossScaleConfig::Dynamic(DynamicLossScaleConfig::new().with_initial(1024.0));
    let config = OffloadConfig::new()
        .with_dtype(Some(FloatDType::F16))
        .with_loss_scale(Some(scale))
        .with_max_grad_norm(Some(1.0))
        .with_verify(true);
    let made = adamw().with_offload(config).init(model);
    let (mut model, offload) = made.expect("a GPT can be offloaded");
    let mut optimizer = offload.optimizer();
    let (mut losses, mut untouched) = (Vec::new(), false);
    for number in 0..steps + 1 {
        let overflows = number == steps / 2;
        let before = overflows.then(|| weights(&model));
        let loss = tokens.loss(&model);
        let factor = if overflows { f32::INFINITY } else { 1.0 };
        let scaled = offload.scale(loss.clone() * factor);
        let grads = GradientsParams::from_grads(scaled.backward(), &model);
        model = optimizer.step(3.0 * LR, model, grads);
        match before {
            Some(before) => {
                untouched = offload.report().overflow().is_some() && weights(&model) == before;
            }
            None => losses.push(loss.inner().into_scalar::<f32>()),
        }
    }
    let (from, to) = (losses[0], losses[losses.len() - 1]);
    let falls = losses.iter().all(|loss| loss.is_finite()) && to < from;
    let skips = offload.report().skips;
    let value = format!("{from:.4} to {to:.4}, {skips} skipped");
    Row::check(SCALED, value, "nats", falls && untouched)
}

/// The largest of `|a - b| / (1 + |b|)`; infinite where one is not a number.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let each = a
        .iter()
        .zip(b)
        .map(|(a, b)| f64::from((a - b).abs()) / (1.0 + f64::from(b.abs())));
    each.fold(0.0, |largest, d| {
        if d.is_nan() {
            f64::INFINITY
        } else {
            d.max(largest)
        }
    })
}

/// All weights of a model.
fn weights<M: Module>(model: &M) -> Vec<f32> {
    struct Collect(Vec<f32>);
    impl ModuleVisitor for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let values = param.base().inner().try_into_vec_as::<f32>();
            self.0.extend(values.expect("weights can be read"));
        }
    }
    let mut collect = Collect(Vec::new());
    model.visit(&mut collect);
    collect.0
}
