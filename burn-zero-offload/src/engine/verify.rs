//! The verify mode: is what the step and the upload did what they should have done?

use std::ops::Range;

use burn::tensor::Tensor;

use crate::error::OffloadError;
use crate::layout::SlotLayout;
use crate::optimize::{DeviceImage, GradientView, StateMut, TILE, TilePlan, Update};
use crate::upload;

/// Tiles of a parameter that the oracle computes once more: the first, the last, and one between them
/// that changes from round to round.
pub(super) struct Samples(Vec<Sample>);

/// A tile as the oracle says it has to be.
struct Sample {
    range: Range<usize>,
    master: Vec<f32>,
    state: Vec<Vec<f32>>,
}

impl Samples {
    /// Computes the samples of an update that is about to happen.
    pub(super) fn before(
        layout: &SlotLayout,
        round: u64,
        update: &Update,
        state: &StateMut<'_>,
        gradient: GradientView<'_>,
    ) -> Self {
        let plan = TilePlan::new(layout.len(), TILE);
        let count = plan.count();
        let mut tiles = match count {
            0 => vec![],
            _ => vec![0, round as usize % count, count - 1],
        };
        tiles.sort_unstable();
        tiles.dedup();
        let oracle = |tile: usize| {
            let range = plan.range(tile);
            let copy = |values: &[f32]| values[range.clone()].to_vec();
            let mut sample = Sample {
                master: copy(state.master),
                state: state.state.iter().map(|values| copy(values)).collect(),
                range: range.clone(),
            };
            let mut values = vec![0.0; range.len()];
            gradient.widen_into(range, &mut values);
            update.oracle(&mut sample.master, &mut sample.state, &values);
            sample
        };
        Self(tiles.into_iter().map(oracle).collect())
    }

    /// Compares what the step made of them. Returns the number of elements compared.
    pub(super) fn compare(
        &self,
        layout: &SlotLayout,
        state: &StateMut<'_>,
    ) -> Result<u64, OffloadError> {
        for sample in &self.0 {
            let names = layout.rule.state();
            let values = std::iter::once((&sample.master, &*state.master, "master weight"));
            let others = sample.state.iter().zip(&state.state).zip(names);
            let others = others.map(|((expected, got), name)| (expected, &**got, *name));
            for (expected, got, what) in values.chain(others) {
                let got = &got[sample.range.clone()];
                let bits = expected.iter().zip(got);
                let wrong = bits
                    .enumerate()
                    .find(|(_, (expected, got))| expected.to_bits() != got.to_bits());
                if let Some((index, (expected, got))) = wrong {
                    return Err(OffloadError::Verify {
                        path: layout.path.clone(),
                        what,
                        element: sample.range.start + index,
                        expected: expected.to_string(),
                        got: got.to_string(),
                    });
                }
            }
        }
        let elements = self.0.iter().map(|sample| sample.range.len() as u64);
        Ok(elements.sum())
    }
}

/// Reads the weights back and compares them with the image of `master`. Returns their number.
pub(super) fn weights<const D: usize>(
    layout: &SlotLayout,
    master: &[f32],
    on_device: &Tensor<D>,
) -> Result<u64, OffloadError> {
    let path = || layout.path.clone();
    let data = upload::read(on_device.clone());
    let data = data.map_err(|reason| OffloadError::ReadWeights {
        path: path(),
        reason,
    })?;
    let image = DeviceImage::of(layout.precision, master);
    let size = layout.precision.size();
    let (expected, got) = (image.as_bytes(), data.as_bytes());
    let mut elements = expected.chunks(size).zip(got.chunks(size));
    if expected.len() == got.len() && expected == got {
        return Ok(master.len() as u64);
    }
    let element = elements.position(|(expected, got)| expected != got);
    let element = element.unwrap_or(expected.len().min(got.len()) / size);
    Err(OffloadError::Verify {
        path: path(),
        what: "weight on the device",
        element,
        expected: master.get(element).map_or("none".into(), f32::to_string),
        got: data
            .iter::<f32>()
            .nth(element)
            .map_or("none".into(), |v| v.to_string()),
    })
}
