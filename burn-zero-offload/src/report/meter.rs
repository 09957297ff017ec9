//! Where the stations write down what they do.

use std::time::Duration;

use parking_lot::Mutex;

use super::StepReport;

/// Counters of the round that is running and of the one before.
#[derive(Debug)]
pub(crate) struct Meter(Mutex<Rounds>);

#[derive(Debug)]
struct Rounds {
    current: StepReport,
    last: StepReport,
    /// Whether the optimizer has begun to walk over the parameters.
    stepping: bool,
}

impl Meter {
    /// A meter before its first round, of which `fixed` has the fields that never change.
    pub(crate) fn new(fixed: StepReport) -> Self {
        let current = StepReport { round: 1, ..fixed };
        Self(Mutex::new(Rounds {
            last: current.clone(),
            current,
            stepping: false,
        }))
    }

    /// A gradient begins its way: `bytes` are in flight now, and its tap has waited for room.
    pub(crate) fn in_flight(&self, bytes: usize, waited: Duration) {
        let mut rounds = self.0.lock();
        rounds.begin_if_over();
        let current = &mut rounds.current;
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

    /// Values of a gradient that are NaN or infinite.
    pub(crate) fn non_finite(&self, values: u64) {
        self.0.lock().current.non_finite += values;
    }

    /// The walk over the parameters goes on; it waited for downloads.
    pub(crate) fn stepping(&self, waited: Duration) {
        let mut rounds = self.0.lock();
        rounds.stepping = true;
        rounds.current.blocked_on_download += waited;
    }

    /// Weights of `bytes` went up in so many transfers; the step waited for them.
    pub(crate) fn uploaded(&self, bytes: usize, transfers: u64, waited: Duration) {
        let current = &mut self.0.lock().current;
        current.bytes_up += bytes as u64;
        current.transfers_up += transfers;
        current.blocked_on_upload += waited;
    }

    /// The round that was stepped last, or the first one if none was.
    pub(crate) fn report(&self) -> StepReport {
        let rounds = self.0.lock();
        let stepped = rounds.stepping || rounds.current.round == 1;
        let report = if stepped {
            &rounds.current
        } else {
            &rounds.last
        };
        report.clone()
    }
}

impl Rounds {
    /// Burn's optimizers never say that their walk is over: the next gradient does.
    fn begin_if_over(&mut self) {
        if !std::mem::take(&mut self.stepping) {
            return;
        }
        let next = StepReport {
            round: self.current.round + 1,
            in_flight_budget: self.current.in_flight_budget,
            pinned_up: self.current.pinned_up,
            pinning: self.current.pinning.clone(),
            ..Default::default()
        };
        self.last = std::mem::replace(&mut self.current, next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_ends_where_the_next_gradient_begins() {
        let fixed = StepReport {
            in_flight_budget: 100,
            ..Default::default()
        };
        let meter = Meter::new(fixed);
        let ms = Duration::from_millis;
        meter.in_flight(40, ms(1));
        meter.in_flight(30, ms(1));
        meter.downloaded(70, 0);
        meter.stepping(ms(5));
        meter.uploaded(10, 1, ms(2));
        meter.uploaded(10, 2, ms(2));
        let first = meter.report();
        assert_eq!((first.round, first.bytes_down, first.bytes_up), (1, 70, 20));
        assert_eq!((first.peak_in_flight, first.transfers_up), (40, 3));
        assert_eq!(first.blocked_on_budget, ms(2));
        assert_eq!(
            (first.blocked_on_download, first.blocked_on_upload),
            (ms(5), ms(4))
        );

        meter.in_flight(20, ms(0));
        meter.non_finite(3);
        assert_eq!(meter.report(), first, "the second round is not stepped yet");
        meter.stepping(ms(0));
        let second = meter.report();
        assert_eq!(
            (second.round, second.bytes_down, second.non_finite),
            (2, 0, 3)
        );
        assert_eq!((second.peak_in_flight, second.in_flight_budget), (20, 100));
    }
}
