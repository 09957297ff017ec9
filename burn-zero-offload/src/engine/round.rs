//! Rounds: which backward passes belong together, and what is decided about their gradients.
//!
//! A round begins with a backward pass and is judged by the first parameter that the optimizer steps.
//! Burn's optimizers never say that their walk over the parameters is over. So a round is over when a
//! new pass begins, or when a parameter is stepped a second time.

use std::time::Instant;

use burn::tensor::{Tensor, TensorData};

use super::Engine;
use crate::error::OffloadError;
use crate::host::Contribution;
use crate::kernels::twin::count_non_finite_bytes;
use crate::optimize::{
    GradientClip, GradientScaling, GradientView, Judgement, LossScaler, Precision, ScalerState,
    Verdict, sum_of_squares,
};
use crate::report::{Judged, Outcome, Overflow};
use crate::upload;

/// What a user decided about rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoundPolicy {
    /// Limit on the norm of all gradients together.
    pub(crate) max_grad_norm: Option<f64>,
    /// Divide by the number of passes.
    pub(crate) mean: bool,
    /// Passes there must be.
    pub(crate) micro_batches: Option<usize>,
    /// Rounds that may be skipped in a row.
    pub(crate) max_consecutive_skips: u64,
}

/// The round that is running.
#[derive(Debug)]
pub(super) struct Round {
    policy: RoundPolicy,
    scaler: LossScaler,
    /// Backward passes so far.
    passes: usize,
    /// Loss scale of the last of them.
    scale: f32,
    /// Whether any of them was scaled.
    scaled: bool,
    /// Set while the optimizer walks over the parameters.
    decision: Option<Decision>,
    /// Slots the walk has met.
    stepped: Vec<bool>,
}

/// What happens to the gradients of a round.
#[derive(Clone, Copy, Debug)]
pub(super) enum Decision {
    /// There are none.
    Nothing,
    /// They are multiplied by this, after the loss scale is taken off, and applied.
    Apply(f64),
    /// They are dropped.
    Skip,
}

impl Round {
    pub(super) fn new(policy: RoundPolicy, scaler: LossScaler, slots: usize) -> Self {
        Self {
            policy,
            scaler,
            passes: 0,
            scale: 1.0,
            scaled: false,
            decision: None,
            stepped: vec![false; slots],
        }
    }

    pub(super) fn loss_scale(&self) -> f32 {
        self.scaler.state().scale
    }

    fn reset(&mut self) {
        self.passes = 0;
        self.scale = 1.0;
        self.scaled = false;
        self.decision = None;
        self.stepped.fill(false);
    }

    fn divisor(&self) -> f64 {
        match self.policy.mean {
            true => self.passes.max(1) as f64,
            false => 1.0,
        }
    }
}

impl Engine {
    /// Ends the round. One that had no gradient is not counted.
    fn next_round(&self, round: &mut Round) {
        if !matches!(round.decision, Some(Decision::Nothing)) {
            self.meter.next_round();
        }
        round.reset();
    }

    /// A backward pass begins; see [`GradientSink::pass_began`](crate::capture::GradientSink).
    pub(super) fn begin_pass(&self, scale: Option<f32>) {
        let mut round = self.round.lock();
        if round.decision.is_some() {
            self.next_round(&mut round);
        }
        round.passes += 1;
        round.scale = scale.unwrap_or(1.0);
        round.scaled |= scale.is_some();
    }

    /// Waits until every gradient handed over is on the host. If one did not make it, the
    /// gradients of the round are dropped: a part of them must not be applied.
    pub(crate) fn finish_downloads(&self) -> Result<(), OffloadError> {
        self.finish(&mut self.round.lock())
    }

    fn finish(&self, round: &mut Round) -> Result<(), OffloadError> {
        self.downloader.finish().map_err(|failure| {
            self.gradients.clear();
            self.next_round(round);
            OffloadError::Download {
                path: self.slots[failure.slot].layout.path.clone(),
                reason: failure.reason,
            }
        })
    }

    /// Drops the gradients of the round, failed ones included.
    pub(crate) fn discard_gradients(&self) {
        let mut round = self.round.lock();
        let _dropped_with_the_rest = self.downloader.finish();
        self.gradients.clear();
        if round.decision.is_none() {
            round.reset();
        }
    }

    /// What happens to the gradient of `slot`, which the optimizer steps now. The first slot of a walk
    /// has the round judged.
    ///
    /// `past_the_taps` is a full-size gradient that came through Burn's containers.
    pub(super) fn decide(
        &self,
        slot: usize,
        past_the_taps: Option<TensorData>,
    ) -> Result<Decision, OffloadError> {
        let mut round = self.round.lock();
        let empty = matches!(round.decision, Some(Decision::Nothing));
        let over = round.decision.is_some() && round.stepped[slot];
        if over || (empty && past_the_taps.is_some()) {
            self.next_round(&mut round);
        }
        if let Some(data) = past_the_taps {
            self.store(slot, data, &round)?;
        }
        let decision = match round.decision {
            Some(decision) => decision,
            None => self.judge(&mut round)?,
        };
        round.stepped[slot] = true;
        Ok(decision)
    }

    /// Adds a gradient that did not come through a tap to the round that is being collected. One that
    /// is stepped already is over. `false` for a placeholder.
    pub(crate) fn collect<const D: usize>(
        &self,
        slot: usize,
        gradient: Tensor<D>,
    ) -> Result<bool, OffloadError> {
        let Some(data) = self.full_size(slot, gradient)? else {
            return Ok(false);
        };
        let mut round = self.round.lock();
        if round.decision.is_some() {
            self.next_round(&mut round);
        }
        self.store(slot, data, &round).map(|()| true)
    }

    /// Adds a gradient that did not come through a tap: to the gradients that wait for their verdict,
    /// or, where the verdict is in, to those it allowed.
    fn store(&self, slot: usize, data: TensorData, round: &Round) -> Result<(), OffloadError> {
        let path = &self.slots[slot].layout.path;
        let refused = |reason: String| {
            Err(OffloadError::Gradient {
                path: path.clone(),
                reason,
            })
        };
        let (precision, data) = match upload::to_precision(data.dtype()) {
            Some(precision) => (precision, data),
            None => (Precision::F32, data.convert::<f32>()),
        };
        let bytes = data.as_bytes();
        let non_finite = count_non_finite_bytes(bytes, precision);
        let contribution = Contribution {
            precision,
            bytes,
            scale: round.scale,
        };
        match round.decision {
            None | Some(Decision::Nothing) => self.gradients.add(slot, contribution, |_| ()),
            Some(Decision::Skip) => {}
            Some(Decision::Apply(_)) if round.policy.max_grad_norm.is_some() => {
                return refused(
                    "it reached `step` when the norm over all gradients had been taken. Hand \
                     gradients that do not come from `val()` over before `step`, with \
                     `Offload::collect`"
                        .into(),
                );
            }
            Some(Decision::Apply(_)) if non_finite > 0 => {
                return refused(format!(
                    "{non_finite} of its values are not finite. Hand gradients that do not come \
                     from `val()` over before `step`, with `Offload::collect`, and such a round is \
                     skipped as a whole"
                ));
            }
            Some(Decision::Apply(_)) => self.gradients.add_sealed(slot, contribution),
        }
        self.meter.non_finite(non_finite as u64);
        Ok(())
    }

    /// Waits for the round's gradients and decides about them.
    fn judge(&self, round: &mut Round) -> Result<Decision, OffloadError> {
        let started = Instant::now();
        self.finish(round)?;
        self.meter.waited(started.elapsed());
        let started = Instant::now();
        self.start_fresh_where_a_record_had_nothing();
        let carried = self.gradients.seal();
        let known = self.gradients.judgements();
        if let Some(expected) = round.policy.micro_batches
            && !known.is_empty()
            && round.passes != expected
        {
            let got = round.passes;
            self.gradients.clear_sealed();
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
                self.gradients.clear_sealed();
                round.scaler.skipped(round.scaled, self.meter.round());
                (Decision::Skip, Outcome::Skipped(overflow), [norm; 2])
            }
        };
        round.decision = Some(decision);
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
        self.meter.judged(Judged {
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
        let clip = |slot: usize| self.slots[slot].layout.rule.clipping();
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
                        sum_of_squares(&view, scaling, self.step.simd, Some(&self.pool))
                    };
                    self.gradients.with_sealed(*slot, sum).unwrap_or_default()
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
        let values = self.gradients.with_sealed(first, count);
        Overflow {
            path: self.slots[first].layout.path.clone(),
            values: values.unwrap_or_default(),
            parameters: slots.len(),
        }
    }

    /// The loss scale for the next pass that is scaled.
    pub(crate) fn current_loss_scale(&self) -> f32 {
        self.round.lock().loss_scale()
    }

    /// What records carry besides the state of parameters: the scaler, and the rounds it has seen.
    pub(crate) fn save_scaler(&self) -> (ScalerState, u64) {
        let scaler = self.round.lock().scaler.state();
        (scaler, self.meter.rounds_judged())
    }

    /// Goes on from what [`save_scaler`](Self::save_scaler) returned.
    pub(crate) fn restore_scaler(&self, scaler: ScalerState, rounds: u64) {
        let mut round = self.round.lock();
        round.scaler.restore(scaler);
        self.meter.resume(rounds, &round.scaler.state());
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
