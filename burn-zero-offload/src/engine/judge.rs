//! The verdict on the gradients of a round, before any weight changes.

use std::time::Instant;

use super::Engine;
use super::round::{Decision, Mode, Round};
use crate::error::OffloadError;
use crate::kernels::twin::count_non_finite_bytes;
use crate::optimize::{
    GradientClip, GradientScaling, GradientView, Judgement, Precision, Verdict, sum_of_squares,
};
use crate::report::{Judged, Outcome, Overflow, Work};

impl Engine {
    /// Waits for the round's gradients and decides about them.
    pub(super) fn judge(&self, round: &mut Round) -> Result<Decision, OffloadError> {
        let number = self.core.meter.round();
        let started = Instant::now();
        self.finish(round)?;
        self.core.meter.waited(started.elapsed());
        self.core
            .trace
            .span(Work::WaitVerdict, number, None, started);
        let started = Instant::now();
        self.start_fresh_where_a_record_had_nothing();
        let carried = self.core.gradients.seal();
        let known = self.core.gradients.judgements();
        if let Some(expected) = round.policy.micro_batches
            && !known.is_empty()
            && round.passes != expected
        {
            let got = round.passes;
            self.core.gradients.clear_sealed();
            self.next_round(round);
            return Err(OffloadError::MicroBatches { expected, got });
        }

        let judgements = known.iter().map(|(_, judgement)| *judgement);
        let verdict = Verdict::of(judgements, round.divisor(), round.policy.max_grad_norm);
        let (decision, outcome, norms) = match verdict {
            Verdict::Nothing => {
                round.decision = Some(Decision::Nothing);
                return Ok(Decision::Nothing);
            }
            Verdict::Apply { norm, factor } => {
                round.scaler.applied(round.scaled);
                let after = norm * factor * round.divisor();
                let norms = [norm, self.clipped_norm(&known, after, factor)];
                (Decision::Apply(factor), Outcome::Applied, norms)
            }
            Verdict::Skip { norm } => {
                let overflow = self.overflow(&known);
                self.core.gradients.clear_sealed();
                round.scaler.skipped(round.scaled, self.core.meter.round());
                (Decision::Skip, Outcome::Skipped(overflow), [norm; 2])
            }
        };
        round.decision = Some(decision);
        if round.mode == Mode::Delayed {
            self.show_what_is_due(number);
        }
        self.core.trace.span(Work::Verdict, number, None, started);
        let scaler = round.scaler.state();
        let too_many = match &outcome {
            Outcome::Skipped(overflow)
                if scaler.consecutive_skips > round.policy.max_consecutive_skips =>
            {
                Some(OffloadError::TooManySkips {
                    skips: scaler.consecutive_skips,
                    scale: round.scale,
                    overflow: overflow.clone(),
                })
            }
            _ => None,
        };
        self.core.meter.judged(Judged {
            outcome,
            passes: round.passes,
            carried,
            loss_scale: round.scale,
            grad_norm: norms[0],
            clipped_grad_norm: norms[1],
            took: started.elapsed(),
            scaler,
        });
        too_many.map_or(Ok(decision), Err)
    }

    /// The norm of all gradients after the clipping of each parameter's own optimizer config; `norm`
    /// is the one before.
    fn clipped_norm(&self, known: &[(usize, Judgement)], norm: f64, factor: f64) -> f64 {
        let clip = |slot: usize| self.core.slots[slot].layout.rule.clipping();
        if known.iter().all(|(slot, _)| clip(*slot).is_none()) {
            return norm;
        }
        let squares = known.iter().map(|(slot, judgement)| {
            let (scaling, norm) = scaling(judgement, factor, clip(*slot));
            match clip(*slot) {
                None => norm * norm,
                Some(GradientClip::Norm(limit)) => norm.min(limit as f64).powi(2),
                Some(GradientClip::Value(_)) => {
                    let sum = |view: GradientView<'_>| {
                        sum_of_squares(&view, scaling, self.core.step.simd, Some(&self.core.pool))
                    };
                    self.core
                        .gradients
                        .with_sealed(*slot, sum)
                        .unwrap_or_default()
                }
            }
        });
        squares.sum::<f64>().sqrt()
    }

    /// Where the values are that are not finite.
    fn overflow(&self, known: &[(usize, Judgement)]) -> Overflow {
        let bad = known.iter().filter(|(_, j)| !j.squares.is_finite());
        let slots: Vec<usize> = bad.map(|(slot, _)| *slot).collect();
        // Squares of finite `f32` cannot overflow `f64`, nor can any sum of them that fits in memory.
        let first = slots.first().copied().unwrap_or_default();
        let count = |view: GradientView<'_>| {
            let (bytes, precision) = match view {
                GradientView::F32(g) => (bytemuck::cast_slice(g), Precision::F32),
                GradientView::F16(g) => (bytemuck::cast_slice(g), Precision::F16),
                GradientView::Bf16(g) => (bytemuck::cast_slice(g), Precision::Bf16),
            };
            count_non_finite_bytes(bytes, precision)
        };
        let values = self.core.gradients.with_sealed(first, count);
        Overflow {
            path: self.core.slots[first].layout.path.clone(),
            values: values.unwrap_or_default(),
            parameters: slots.len(),
        }
    }
}

/// What a gradient is multiplied by and bounded to in the step, and its norm before the clipping of its
/// own config. `factor` is the round's.
pub(super) fn scaling(
    judgement: &Judgement,
    factor: f64,
    clip: Option<GradientClip>,
) -> (GradientScaling, f64) {
    let factor = factor / judgement.scale as f64;
    let norm = judgement.squares.sqrt() * factor;
    (GradientScaling::new(factor, norm, clip), norm)
}
