//! The loss scale: how it grows, and how it backs off.
//!
//! Gradients below 6e-8 vanish in f16. Multiplying the loss by a power of two moves them into its range
//! without touching a mantissa; dividing by the same number on the host, in `f32`, brings them back
//! exactly (Micikevicius et al., arXiv 1710.03740).

/// How the scale is chosen. All numbers are powers of two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum LossScale {
    /// Always this; 1 is no scaling.
    Static(f32),
    /// As large as gradients allow.
    Dynamic {
        initial: f32,
        growth_factor: f32,
        backoff_factor: f32,
        growth_interval: u64,
        hysteresis: u64,
        minimum: f32,
        maximum: f32,
    },
}

/// Whether `value` is a power of two that `f32` holds with its full precision.
pub(crate) fn is_power_of_two(value: f32) -> bool {
    const MANTISSA: u32 = (1 << (f32::MANTISSA_DIGITS - 1)) - 1;
    value.is_normal() && value > 0.0 && value.to_bits() & MANTISSA == 0
}

/// What a scaler remembers from round to round; records carry it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ScalerState {
    /// The scale that the next backward pass uses.
    pub(crate) scale: f32,
    /// Updates applied since the scale changed or a round was skipped.
    pub(crate) good_steps: u64,
    /// Overflows that may come before the scale backs off.
    pub(crate) tolerated: u64,
    /// Rounds skipped since an update was applied.
    pub(crate) consecutive_skips: u64,
    /// Rounds skipped in all.
    pub(crate) skips: u64,
    /// Number of the last round that was skipped; 0 if none was.
    pub(crate) last_overflow: u64,
}

/// The scale and what happened to it.
#[derive(Clone, Debug)]
pub(crate) struct LossScaler {
    policy: LossScale,
    state: ScalerState,
}

impl LossScaler {
    pub(crate) fn new(policy: LossScale) -> Self {
        let (scale, tolerated) = match policy {
            LossScale::Static(scale) => (scale, 0),
            LossScale::Dynamic {
                initial,
                hysteresis,
                ..
            } => (initial, hysteresis - 1),
        };
        let state = ScalerState {
            scale,
            good_steps: 0,
            tolerated,
            consecutive_skips: 0,
            skips: 0,
            last_overflow: 0,
        };
        Self { policy, state }
    }

    pub(crate) fn state(&self) -> ScalerState {
        self.state
    }

    /// Goes on from the state of a record, within what the config allows: a static scale stays what it
    /// is, a dynamic one between its bounds. A scale that is none leaves the scale as it is.
    pub(crate) fn restore(&mut self, state: ScalerState) {
        let scale = match self.policy {
            LossScale::Static(scale) => scale,
            LossScale::Dynamic {
                minimum, maximum, ..
            } if is_power_of_two(state.scale) => state.scale.clamp(minimum, maximum),
            LossScale::Dynamic { .. } => self.state.scale,
        };
        self.state = ScalerState { scale, ..state };
    }

    /// A round was applied. Its gradients say something about the scale only if they were `scaled`.
    pub(crate) fn applied(&mut self, scaled: bool) {
        let state = &mut self.state;
        state.consecutive_skips = 0;
        if !scaled {
            return;
        }
        state.good_steps += 1;
        if let LossScale::Dynamic {
            growth_factor,
            growth_interval,
            hysteresis,
            maximum,
            ..
        } = self.policy
            && state.good_steps >= growth_interval
        {
            state.scale = (state.scale * growth_factor).min(maximum);
            state.good_steps = 0;
            state.tolerated = hysteresis - 1;
        }
    }

    /// Round number `round` overflowed and was skipped. See [`applied`](Self::applied).
    pub(crate) fn skipped(&mut self, scaled: bool, round: u64) {
        let state = &mut self.state;
        state.consecutive_skips += 1;
        state.skips += 1;
        state.last_overflow = round;
        if !scaled {
            return;
        }
        state.good_steps = 0;
        if let LossScale::Dynamic {
            backoff_factor,
            minimum,
            ..
        } = self.policy
        {
            if state.tolerated > 0 {
                state.tolerated -= 1;
            } else {
                state.scale = (state.scale * backoff_factor).max(minimum);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dynamic(hysteresis: u64) -> LossScaler {
        LossScaler::new(LossScale::Dynamic {
            initial: 8.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 3,
            hysteresis,
            minimum: 2.0,
            maximum: 32.0,
        })
    }

    /// The scale after each round; `true` is an applied one.
    fn scales(scaler: &mut LossScaler, rounds: &[bool]) -> Vec<f32> {
        let mut after = vec![];
        for (index, &applied) in rounds.iter().enumerate() {
            if applied {
                scaler.applied(true);
            } else {
                scaler.skipped(true, index as u64 + 1);
            }
            after.push(scaler.state().scale);
        }
        after
    }

    #[test]
    fn it_grows_after_an_interval_of_good_steps_up_to_the_maximum() {
        let grown = scales(&mut dynamic(1), &[true; 10]);
        assert_eq!(grown, [8., 8., 16., 16., 16., 32., 32., 32., 32., 32.]);
    }

    #[test]
    fn it_backs_off_at_once_down_to_the_minimum_and_counts_anew() {
        let mut scaler = dynamic(1);
        let rounds = [true, true, false, true, true, true, false, false, false];
        let after = scales(&mut scaler, &rounds);
        assert_eq!(after, [8., 8., 4., 4., 4., 8., 4., 2., 2.]);
        let state = scaler.state();
        assert_eq!(
            (state.consecutive_skips, state.skips, state.last_overflow),
            (3, 4, 9)
        );
    }

    #[test]
    fn hysteresis_tolerates_overflows_between_two_growths() {
        let rounds = [false, true, false, false, true, true, true, false, false];
        let after = scales(&mut dynamic(2), &rounds);
        assert_eq!(after, [8., 8., 4., 2., 2., 2., 4., 4., 2.]);
    }

    #[test]
    fn rounds_without_scaling_leave_the_scale_alone() {
        let mut scaler = dynamic(1);
        for _ in 0..5 {
            scaler.applied(false);
        }
        scaler.skipped(false, 6);
        let state = scaler.state();
        assert_eq!((state.scale, state.good_steps), (8.0, 0));
        assert_eq!((state.consecutive_skips, state.skips), (1, 1));
    }

    #[test]
    fn a_static_scale_never_moves_and_no_record_moves_it() {
        let mut scaler = LossScaler::new(LossScale::Static(4.0));
        assert_eq!(scales(&mut scaler, &[true, false, true]), [4.0; 3]);
        scaler.restore(ScalerState {
            scale: 64.0,
            skips: 9,
            ..scaler.state()
        });
        assert_eq!((scaler.state().scale, scaler.state().skips), (4.0, 9));
    }

    #[test]
    fn a_restored_scale_stays_within_the_bounds_of_the_config() {
        let restored = |scale| {
            let mut scaler = dynamic(1);
            let state = scaler.state();
            scaler.restore(ScalerState { scale, ..state });
            scaler.state().scale
        };
        assert_eq!([16.0, 1024.0, 0.5].map(restored), [16.0, 32.0, 2.0]);
        assert_eq!(
            [0.0, 3.0, -4.0, f32::NAN, f32::INFINITY].map(restored),
            [8.0; 5]
        );
    }

    /// acceptance.md, loss scaling 41: the next ten scales are identical.
    #[test]
    fn a_restored_scaler_goes_on_identically() {
        let mut scaler = dynamic(2);
        scales(&mut scaler, &[true, false, true, true]);
        let mut other = dynamic(2);
        other.restore(scaler.state());
        let rounds = [
            true, false, false, true, true, true, true, false, true, true,
        ];
        assert_eq!(scales(&mut other, &rounds), scales(&mut scaler, &rounds));
        assert_eq!(other.state(), scaler.state());
    }
}
