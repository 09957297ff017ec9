//! Where the stations write down what they do.

use std::time::Duration;

use parking_lot::Mutex;

use super::{GroupReport, Outcome, StepReport};
use crate::optimize::ScalerState;

/// Counters of the round that is running and of the one before.
#[derive(Debug)]
pub(crate) struct Meter(Mutex<Rounds>);

#[derive(Debug)]
struct Rounds {
    current: StepReport,
    last: StepReport,
    /// Whether the round that is running has been judged: `last` is of no interest any more.
    judged: bool,
}

/// What the verdict adds to a report.
pub(crate) struct Judged {
    pub(crate) outcome: Outcome,
    pub(crate) passes: usize,
    pub(crate) carried: usize,
    pub(crate) loss_scale: f32,
    pub(crate) grad_norm: f64,
    pub(crate) clipped_grad_norm: f64,
    pub(crate) took: Duration,
    /// The scaler after the verdict.
    pub(crate) scaler: ScalerState,
}

impl Meter {
    /// A meter before its first round, of which `fixed` has the fields that never change.
    pub(crate) fn new(fixed: StepReport) -> Self {
        let current = StepReport {
            round: 1,
            loss_scale: 1.0,
            ..fixed
        };
        Self(Mutex::new(Rounds {
            last: current.clone(),
            current,
            judged: false,
        }))
    }

    /// Begins the next round.
    pub(crate) fn next_round(&self) {
        let mut rounds = self.0.lock();
        let current = &rounds.current;
        let next = StepReport {
            round: current.round + 1,
            loss_scale: 1.0,
            next_loss_scale: current.next_loss_scale,
            skips: current.skips,
            last_overflow: current.last_overflow,
            groups: current.groups.iter().map(GroupReport::next).collect(),
            simd: current.simd,
            threads: current.threads,
            placement: current.placement.clone(),
            state_precision: current.state_precision,
            in_flight_budget: current.in_flight_budget,
            pinned_up: current.pinned_up,
            pinning: current.pinning.clone(),
            ..Default::default()
        };
        rounds.last = std::mem::replace(&mut rounds.current, next);
        rounds.judged = false;
    }

    /// Number of the round that is running.
    pub(crate) fn round(&self) -> u64 {
        self.0.lock().current.round
    }

    /// Number of the round that was judged last, 0 if none was.
    pub(crate) fn rounds_judged(&self) -> u64 {
        let rounds = self.0.lock();
        rounds.current.round - u64::from(!rounds.judged)
    }

    /// Goes on counting from a record: `round` is the last one it has seen.
    pub(crate) fn resume(&self, round: u64, scaler: &ScalerState) {
        let mut rounds = self.0.lock();
        set_scaler(&mut rounds.current, scaler);
        rounds.last = StepReport {
            round,
            ..rounds.current.clone()
        };
        rounds.current.round = round + 1;
        rounds.judged = false;
    }

    /// A gradient begins its way: `bytes` are in flight now, and its tap has waited for room.
    pub(crate) fn in_flight(&self, bytes: usize, waited: Duration) {
        let current = &mut self.0.lock().current;
        current.peak_in_flight = current.peak_in_flight.max(bytes);
        current.blocked_on_budget += waited;
    }

    /// A transfer of `bytes` has come down through `pinned` bytes of pinned memory.
    pub(crate) fn downloaded(&self, bytes: usize, pinned: usize) {
        let current = &mut self.0.lock().current;
        current.bytes_down += bytes as u64;
        current.transfers_down += 1;
        current.pinned_down = current.pinned_down.max(pinned);
    }

    /// Bytes of upper halves that somebody held when they were to be written.
    pub(crate) fn copied(&self, bytes: usize) {
        self.0.lock().current.bytes_copied += bytes as u64;
    }

    /// Values of a gradient that are NaN or infinite.
    pub(crate) fn non_finite(&self, values: u64) {
        self.0.lock().current.non_finite += values;
    }

    /// The step waited for downloads.
    pub(crate) fn waited(&self, for_downloads: Duration) {
        self.0.lock().current.blocked_on_download += for_downloads;
    }

    /// The verdict on the round.
    pub(crate) fn judged(&self, judged: Judged) {
        let mut rounds = self.0.lock();
        rounds.judged = true;
        let current = &mut rounds.current;
        current.outcome = judged.outcome;
        current.passes = judged.passes;
        current.carried = judged.carried;
        current.loss_scale = judged.loss_scale;
        current.grad_norm = judged.grad_norm;
        current.clipped_grad_norm = judged.clipped_grad_norm;
        current.judging = judged.took;
        set_scaler(current, &judged.scaler);
    }

    /// A parameter of group `group` was updated at learning rate `lr`.
    pub(crate) fn updated(&self, group: usize, lr: f64, took: Duration) {
        let current = &mut self.0.lock().current;
        current.updating += took;
        if let Some(group) = current.groups.get_mut(group) {
            group.updated += 1;
            if !group.learning_rates.contains(&lr) {
                group.learning_rates.push(lr);
            }
        }
    }

    /// Weights of `bytes` went up in so many transfers; the step waited for them.
    pub(crate) fn uploaded(&self, bytes: usize, transfers: u64, waited: Duration) {
        let current = &mut self.0.lock().current;
        current.bytes_up += bytes as u64;
        current.transfers_up += transfers;
        current.blocked_on_upload += waited;
    }

    /// So many values were found to be right.
    pub(crate) fn verified(&self, values: u64) {
        self.0.lock().current.verified += values;
    }

    /// The round that was judged last, or the first one if none was.
    pub(crate) fn report(&self) -> StepReport {
        let rounds = self.0.lock();
        let current = &rounds.current;
        let report = if rounds.judged || current.round == 1 {
            current
        } else {
            &rounds.last
        };
        report.clone()
    }
}

fn set_scaler(report: &mut StepReport, scaler: &ScalerState) {
    report.next_loss_scale = scaler.scale;
    report.consecutive_skips = scaler.consecutive_skips;
    report.skips = scaler.skips;
    report.last_overflow = scaler.last_overflow;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimize::{LossScale, LossScaler};

    fn judged(outcome: Outcome, norm: f64) -> Judged {
        Judged {
            outcome,
            passes: 1,
            carried: 0,
            loss_scale: 1.0,
            grad_norm: norm,
            clipped_grad_norm: norm,
            took: Duration::ZERO,
            scaler: LossScaler::new(LossScale::Static(1.0)).state(),
        }
    }

    #[test]
    fn a_report_is_of_the_round_judged_last() {
        let fixed = StepReport {
            in_flight_budget: 100,
            groups: vec![GroupReport::default(); 2],
            ..Default::default()
        };
        let meter = Meter::new(fixed);
        let ms = Duration::from_millis;
        meter.in_flight(40, ms(1));
        meter.in_flight(30, ms(1));
        meter.downloaded(70, 0);
        meter.waited(ms(5));
        meter.judged(judged(Outcome::Applied, 2.0));
        meter.uploaded(10, 1, ms(2));
        meter.uploaded(10, 2, ms(2));
        meter.updated(1, 0.1, ms(3));
        meter.updated(1, 0.1, ms(3));
        meter.updated(1, 0.2, ms(3));
        let first = meter.report();
        assert_eq!((first.round, first.bytes_down, first.bytes_up), (1, 70, 20));
        assert_eq!((first.peak_in_flight, first.transfers_up), (40, 3));
        assert_eq!(first.blocked_on_budget, ms(2));
        assert_eq!(
            (first.blocked_on_download, first.blocked_on_upload),
            (ms(5), ms(4))
        );
        assert_eq!((first.grad_norm, first.updating), (2.0, ms(9)));
        assert_eq!(first.groups[0], GroupReport::default());
        let rates = vec![0.1, 0.2];
        let second_group = GroupReport {
            updated: 3,
            learning_rates: rates,
            ..Default::default()
        };
        assert_eq!(first.groups[1], second_group);

        meter.next_round();
        meter.in_flight(20, ms(0));
        meter.non_finite(3);
        assert_eq!(meter.report(), first, "the second round is not judged yet");
        meter.judged(judged(Outcome::Pending, 0.0));
        let second = meter.report();
        assert_eq!(
            (second.round, second.bytes_down, second.non_finite),
            (2, 0, 3)
        );
        assert_eq!((second.peak_in_flight, second.in_flight_budget), (20, 100));
        assert_eq!(second.groups, vec![GroupReport::default(); 2]);
    }
}
