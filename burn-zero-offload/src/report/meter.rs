//! Where the stations write down what they do.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;

use super::{GroupReport, LongestWait, Outcome, StepReport, WaitedFor, Work};
use crate::optimize::ScalerState;

/// Counters of the round that is running and of those before whose updates may not be done.
#[derive(Debug)]
pub(crate) struct Meter(Mutex<Rounds>);

#[derive(Debug)]
struct Rounds {
    current: StepReport,
    /// The newest last; at least one.
    before: VecDeque<StepReport>,
    /// Whether the round that is running has been judged: those before are of no interest any more.
    judged: bool,
}

/// Rounds that are remembered besides the current one: more than can have updates left to be done in a
/// model whose parameters are all used.
const REMEMBERED: usize = 4;

impl Rounds {
    /// Calls `change` with the report of `round`, unless that is long over.
    fn of(&mut self, round: u64, change: impl FnOnce(&mut StepReport)) {
        let mut all = std::iter::once(&mut self.current).chain(self.before.iter_mut().rev());
        all.find(|report| report.round == round).map(change);
    }

    fn remember(&mut self, report: StepReport) {
        if self.before.len() >= REMEMBERED {
            self.before.pop_front();
        }
        self.before.push_back(report);
    }
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
            before: VecDeque::from([current.clone()]),
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
        let last = std::mem::replace(&mut rounds.current, next);
        rounds.remember(last);
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
        let last = StepReport {
            round,
            ..rounds.current.clone()
        };
        rounds.before.clear();
        rounds.remember(last);
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
    pub(crate) fn copied(&self, round: u64, bytes: usize) {
        self.in_round(round, |report| report.bytes_copied += bytes as u64);
    }

    fn in_round(&self, round: u64, change: impl FnOnce(&mut StepReport)) {
        self.0.lock().of(round, change);
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
    pub(crate) fn updated(&self, round: u64, group: usize, lr: f64, took: Duration) {
        self.in_round(round, |report| {
            report.updating += took;
            if let Some(group) = report.groups.get_mut(group) {
                group.updated += 1;
                if !group.learning_rates.contains(&lr) {
                    group.learning_rates.push(lr);
                }
            }
        });
    }

    /// An update was queued, to be done behind the training loop.
    pub(crate) fn queued(&self, round: u64) {
        self.in_round(round, |report| report.pending += 1);
    }

    /// One that was queued is done.
    pub(crate) fn completed(&self, round: u64) {
        self.in_round(round, |report| {
            report.pending = report.pending.saturating_sub(1);
        });
    }

    /// The training loop waited for the update of a parameter, or did it itself.
    pub(crate) fn exposed(
        &self,
        round: u64,
        wait: Work,
        path: &str,
        waited_for: WaitedFor,
        took: Duration,
    ) {
        self.in_round(round, |report| {
            match wait {
                Work::WaitForward => report.exposed_in_forward += took,
                Work::WaitStep => report.exposed_in_step += took,
                _ => report.exposed_elsewhere += took,
            }
            let longest = report.longest_wait.as_ref();
            if longest.is_none_or(|longest| longest.took < took) {
                report.longest_wait = Some(LongestWait {
                    path: path.to_owned(),
                    waited_for,
                    took,
                });
            }
        });
    }

    /// Weights of `bytes` went up in so many transfers.
    pub(crate) fn uploaded(&self, round: u64, bytes: usize, transfers: u64) {
        self.in_round(round, |report| {
            report.bytes_up += bytes as u64;
            report.transfers_up += transfers;
        });
    }

    /// The update waited for weights to be taken by the device.
    pub(crate) fn waited_for_upload(&self, round: u64, waited: Duration) {
        self.in_round(round, |report| report.blocked_on_upload += waited);
    }

    /// So many values were found to be right.
    pub(crate) fn verified(&self, round: u64, values: u64) {
        self.in_round(round, |report| report.verified += values);
    }

    /// The rounds that are remembered and have been judged, the oldest first.
    pub(crate) fn reports(&self) -> Vec<StepReport> {
        let rounds = self.0.lock();
        let current = rounds.judged.then_some(&rounds.current);
        let before = rounds.before.iter();
        let judged = |report: &&StepReport| report.outcome != Outcome::Pending;
        before.filter(judged).chain(current).cloned().collect()
    }

    /// The round that was judged last, or the first one if none was.
    pub(crate) fn report(&self) -> StepReport {
        let rounds = self.0.lock();
        let current = &rounds.current;
        let last = rounds.before.back();
        let report = match rounds.judged || current.round == 1 {
            true => current,
            false => last.unwrap_or(current),
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
        meter.uploaded(1, 10, 1);
        meter.uploaded(1, 10, 2);
        meter.waited_for_upload(1, ms(4));
        meter.updated(1, 1, 0.1, ms(3));
        meter.updated(1, 1, 0.1, ms(3));
        meter.updated(1, 1, 0.2, ms(3));
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

    #[test]
    fn updates_behind_the_loop_are_counted_to_their_round() {
        let meter = Meter::new(StepReport {
            groups: vec![GroupReport::default()],
            ..Default::default()
        });
        let ms = Duration::from_millis;
        meter.queued(1);
        meter.queued(1);
        meter.judged(judged(Outcome::Applied, 1.0));
        meter.next_round();
        assert_eq!(meter.report().pending, 2);
        meter.updated(1, 0, 0.1, ms(2));
        meter.completed(1);
        meter.exposed(1, Work::WaitForward, "a", WaitedFor::Turn, ms(3));
        meter.exposed(1, Work::WaitStep, "b", WaitedFor::Upload, ms(5));
        meter.exposed(1, Work::WaitFlush, "c", WaitedFor::Step, ms(4));
        let report = meter.report();
        assert_eq!((report.round, report.pending), (1, 1));
        assert_eq!(report.groups[0].updated, 1);
        let exposed = [
            report.exposed_in_forward,
            report.exposed_in_step,
            report.exposed_elsewhere,
        ];
        assert_eq!(exposed, [ms(3), ms(5), ms(4)]);
        let longest = report.longest_wait.unwrap();
        assert_eq!(
            (&*longest.path, longest.waited_for),
            ("b", WaitedFor::Upload)
        );
        meter.judged(judged(Outcome::Applied, 2.0));
        let reports = meter.reports();
        let known: Vec<_> = reports.iter().map(|r| (r.round, r.pending)).collect();
        assert_eq!(known, [(1, 1), (2, 0)]);
        for _ in 0..10 {
            meter.next_round();
        }
        meter.completed(1);
        meter.updated(1, 0, 0.1, ms(2));
        assert_eq!(meter.report().groups[0].updated, 0, "round 1 is long over");
    }
}
