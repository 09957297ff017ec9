//! The verify mode: is what the step and the upload did what they should have done?

use std::ops::Range;

use burn::tensor::Tensor;

use super::work::Check;
use crate::error::OffloadError;
use crate::host::HostState;
use crate::layout::SlotLayout;
use crate::optimize::{GradientView, TILE, TilePlan, Update};
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
        state: &HostState,
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
            let (mut master, mut values) = (
                state.master_of(range.clone()),
                state.state_of(range.clone()),
            );
            let mut scaled = vec![0.0; range.len()];
            gradient.widen_into(range.clone(), &mut scaled);
            update.oracle(&mut master, &mut values, &scaled);
            // As they are once they have been kept.
            let noise = update.noise().from(range.start);
            let mut kept = state.like(range.len());
            kept.write_master(0, &master, Some(noise));
            kept.set_state(&values, Some(noise));
            Sample {
                master: kept.master(),
                state: kept.state(),
                range,
            }
        };
        Self(tiles.into_iter().map(oracle).collect())
    }

    /// Compares what the step made of them. Returns the number of elements compared.
    pub(super) fn compare(
        &self,
        layout: &SlotLayout,
        state: &HostState,
    ) -> Result<u64, OffloadError> {
        for sample in &self.0 {
            let names = layout.rule.state();
            let (master, values) = (
                state.master_of(sample.range.clone()),
                state.state_of(sample.range.clone()),
            );
            let masters = std::iter::once((&sample.master, &master, "master weight"));
            let others = sample.state.iter().zip(&values).zip(names);
            let others = others.map(|((expected, got), name)| (expected, got, *name));
            for (expected, got, what) in masters.chain(others) {
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

/// The check of weights that are still on their way, for when they have landed.
pub(super) fn later<const D: usize>(layout: &SlotLayout, on_device: &Tensor<D>) -> Box<Check> {
    let (layout, on_device) = (layout.clone(), on_device.clone());
    Box::new(move |state| weights(&layout, state, &on_device))
}

/// Reads the weights back and compares them with what `state` says they are. Returns their number.
pub(super) fn weights<const D: usize>(
    layout: &SlotLayout,
    state: &HostState,
    on_device: &Tensor<D>,
) -> Result<u64, OffloadError> {
    let path = || layout.path.clone();
    let data = upload::read(on_device.clone());
    let data = data.map_err(|reason| OffloadError::ReadWeights {
        path: path(),
        reason,
    })?;
    let image = state.image();
    let size = layout.precision.size();
    let (expected, got) = (image.as_bytes(), data.as_bytes());
    let mut elements = expected.chunks(size).zip(got.chunks(size));
    if expected.len() == got.len() && expected == got {
        return Ok(state.len() as u64);
    }
    let element = elements.position(|(expected, got)| expected != got);
    let element = element.unwrap_or(expected.len().min(got.len()) / size);
    Err(OffloadError::Verify {
        path: path(),
        what: "weight on the device",
        element,
        expected: (state.master().get(element)).map_or("none".into(), f32::to_string),
        got: data
            .iter::<f32>()
            .nth(element)
            .map_or("none".into(), |v| v.to_string()),
    })
}
