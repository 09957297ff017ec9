//! Backward passes: telling one from the next, and the loss scale of each.
//!
//! A call of `backward` has one container of gradients, which taps see as they fire. A sink leaves a mark
//! in it the first time; a tap that finds no mark knows that a new pass has begun. The loss scale is a
//! mark of the same kind, left by the operation that scaled: gradients are unscaled by what scaled
//! them, whatever the scale has become since, and those of a pass that scaled nothing by nothing.

use std::sync::{Arc, LazyLock};

use burn::backend::autodiff::grads::Gradients;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend, Flex};
use burn::tensor::{FloatDType, TensorData, read_sync};

use super::sink::GradientSink;

/// A place in the containers of gradients that no parameter has. Marks live on Flex whatever backend the
/// model runs on.
type Mark = FloatTensor<Autodiff<Flex>>;

fn new_mark() -> Mark {
    let nothing = Flex::float_empty([0].into(), &Default::default(), FloatDType::F32);
    <Autodiff<Flex> as AutodiffBackend>::from_inner(nothing)
}

/// Where a pass notes its loss scale. One for all models: where one backward runs through several, all
/// their gradients carry the same scale.
static SCALE: LazyLock<Mark> = LazyLock::new(new_mark);

/// Puts `value` at `mark`, where nothing may be yet: the container adds.
fn put(grads: &mut Gradients, mark: &Mark, value: f32) {
    let data = TensorData::from([value]);
    let value = Flex::float_from_data(data, &Default::default());
    grads.register::<Flex>(mark.id(), value);
}

/// The scale of the pass that `grads` belongs to, if one is noted.
fn noted_scale(grads: &Gradients) -> Option<f32> {
    let noted = grads.get::<Flex>(&SCALE)?;
    let data = read_sync(Flex::float_into_data(noted)).ok()?;
    data.iter::<f32>().next()
}

/// A sink, and how it tells backward passes apart.
#[derive(Clone)]
pub(crate) struct Passes {
    pub(super) sink: Arc<dyn GradientSink>,
    mark: Mark,
}

impl Passes {
    /// Passes through the taps of `sink`.
    pub(crate) fn of(sink: Arc<dyn GradientSink>) -> Self {
        Self {
            sink,
            mark: new_mark(),
        }
    }

    /// Tells the sink of a new pass where this is one. Returns the loss scale of the pass.
    pub(super) fn enter(&self, grads: &mut Gradients) -> f32 {
        let scale = noted_scale(grads);
        self.note(grads, scale);
        scale.unwrap_or(1.0)
    }

    /// The same for the operation that scales: the first of a pass decides on the scale.
    pub(super) fn enter_scaled(&self, grads: &mut Gradients) -> f32 {
        let scale = noted_scale(grads).unwrap_or_else(|| {
            let scale = self.sink.loss_scale();
            put(grads, &SCALE, scale);
            scale
        });
        self.note(grads, Some(scale));
        scale
    }

    fn note(&self, grads: &mut Gradients, scale: Option<f32>) {
        if grads.get::<Flex>(&self.mark).is_none() {
            put(grads, &self.mark, 0.0);
            self.sink.pass_began(scale);
        }
    }
}
