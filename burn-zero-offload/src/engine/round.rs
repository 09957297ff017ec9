//! Rounds: which backward passes belong together, and what is decided about their gradients.
//!
//! A round begins with a backward pass and is judged by the first parameter that the optimizer steps.
//! Burn's optimizers never say that their walk over the parameters is over. So a round is over when a
//! new pass begins, or when a parameter is stepped a second time.

use burn::tensor::{Tensor, TensorData};

use super::Engine;
use crate::config::Schedule;
use crate::error::OffloadError;
use crate::host::Contribution;
use crate::kernels::twin::count_non_finite_bytes;
use crate::optimize::{LossScaler, Precision, ScalerState};
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
    pub(super) policy: RoundPolicy,
    pub(super) scaler: LossScaler,
    /// Backward passes so far.
    pub(super) passes: usize,
    /// Loss scale of the last of them.
    pub(super) scale: f32,
    /// Whether any of them was scaled.
    pub(super) scaled: bool,
    schedule: Schedule,
    /// Set while the optimizer walks over the parameters.
    pub(super) decision: Option<Decision>,
    /// How the updates of the walk are done.
    pub(super) mode: Mode,
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

/// When the updates of a walk are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// In the walk.
    Now,
    /// Behind it.
    Behind,
    /// Behind the next round.
    Delayed,
}

/// What a walk needs to know of its round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Verdicted {
    pub(super) decision: Decision,
    pub(super) mode: Mode,
    /// Its number.
    pub(super) round: u64,
}

impl Mode {
    fn of(schedule: Schedule, round: u64) -> Self {
        match schedule {
            Schedule::Synchronous => Self::Now,
            Schedule::ForwardOverlapped => Self::Behind,
            Schedule::Delayed { warmup } if round >= warmup => Self::Delayed,
            Schedule::Delayed { .. } => Self::Now,
        }
    }
}

impl Round {
    pub(super) fn new(
        policy: RoundPolicy,
        schedule: Schedule,
        scaler: LossScaler,
        slots: usize,
    ) -> Self {
        Self {
            policy,
            schedule,
            mode: Mode::Now,
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

    pub(super) fn schedule(&self) -> Schedule {
        self.schedule
    }

    /// For the walks that begin from here on.
    pub(super) fn set_schedule(&mut self, schedule: Schedule) {
        self.schedule = schedule;
    }

    fn reset(&mut self) {
        self.passes = 0;
        self.scale = 1.0;
        self.scaled = false;
        self.decision = None;
        self.stepped.fill(false);
    }

    pub(super) fn divisor(&self) -> f64 {
        match self.policy.mean {
            true => self.passes.max(1) as f64,
            false => 1.0,
        }
    }
}

impl Engine {
    /// Ends the round. One that had no gradient is not counted.
    pub(super) fn next_round(&self, round: &mut Round) {
        if !matches!(round.decision, Some(Decision::Nothing)) {
            self.core.meter.next_round();
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
        let core = &self.core;
        let number = core.meter.round();
        core.trace.device_from_here();
        core.phases.backward(&core.trace, number);
        self.order.backward();
    }

    /// Waits until every gradient handed over is on the host. If one did not make it, the
    /// gradients of the round are dropped: a part of them must not be applied.
    pub(crate) fn finish_downloads(&self) -> Result<(), OffloadError> {
        self.finish(&mut self.round.lock())
    }

    pub(super) fn finish(&self, round: &mut Round) -> Result<(), OffloadError> {
        self.downloader.finish().map_err(|failure| {
            self.core.gradients.clear();
            self.next_round(round);
            OffloadError::Download {
                path: self.core.slots[failure.slot].layout.path.clone(),
                reason: failure.reason,
            }
        })
    }

    /// Drops the gradients of the round, failed ones included.
    pub(crate) fn discard_gradients(&self) {
        let mut round = self.round.lock();
        let _dropped_with_the_rest = self.downloader.finish();
        self.core.gradients.clear();
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
    ) -> Result<Verdicted, OffloadError> {
        let mut round = self.round.lock();
        let empty = matches!(round.decision, Some(Decision::Nothing));
        let over = round.decision.is_some() && round.stepped[slot];
        if over || (empty && past_the_taps.is_some()) {
            self.next_round(&mut round);
        }
        if let Some(data) = past_the_taps {
            self.store(slot, data, &round)?;
        }
        let number = self.core.meter.round();
        let decision = match round.decision {
            Some(decision) => decision,
            None => {
                self.core.phases.walk(&self.core.trace, number);
                round.mode = Mode::of(round.schedule, number);
                self.judge(&mut round)?
            }
        };
        round.stepped[slot] = true;
        Ok(Verdicted {
            decision,
            mode: round.mode,
            round: number,
        })
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
        let path = &self.core.slots[slot].layout.path;
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
            None | Some(Decision::Nothing) => self.core.gradients.add(slot, contribution, |_| ()),
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
            Some(Decision::Apply(_)) => self.core.gradients.add_sealed(slot, contribution),
        }
        self.core.meter.non_finite(non_finite as u64);
        Ok(())
    }

    /// The loss scale for the next pass that is scaled.
    pub(crate) fn current_loss_scale(&self) -> f32 {
        self.round.lock().loss_scale()
    }

    /// What records carry besides the state of parameters: the scaler, and the rounds it has seen.
    pub(crate) fn save_scaler(&self) -> (ScalerState, u64) {
        let scaler = self.round.lock().scaler.state();
        (scaler, self.core.meter.rounds_judged())
    }

    /// Goes on from what [`save_scaler`](Self::save_scaler) returned.
    pub(crate) fn restore_scaler(&self, scaler: ScalerState, rounds: u64) {
        let mut round = self.round.lock();
        round.scaler.restore(scaler);
        self.core.meter.resume(rounds, &round.scaler.state());
    }
}
