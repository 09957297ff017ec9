//! The bound on gradient bytes that are alive on the device because of downloads.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

/// A number of bytes, part of which is taken.
///
/// Two kinds of use share it. Gradients *in flight* give their bytes back by themselves, as soon as
/// the reader has them on the host. Sums that are *held* on the device until their last use has
/// arrived give theirs back only when they are sent; what they hold is decided from the order of the
/// taps alone ([`hold`](Self::hold)), never from how far the reader has come, so that the grouping
/// of a sum, and with it its rounding, does not depend on timing.
#[derive(Debug)]
pub(super) struct Budget {
    limit: usize,
    #[cfg_attr(not(feature = "cubecl-backend"), allow(dead_code))]
    /// What has to stay free of held sums: the largest gradient must always fit.
    largest: usize,
    used: Mutex<Used>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct Used {
    in_flight: usize,
    held: usize,
    /// Counts releases: whoever waits for one can tell that there was one.
    releases: u64,
}

/// Bytes taken from a budget; dropping it gives them back.
#[derive(Debug)]
pub(super) struct Room {
    budget: Arc<Budget>,
    bytes: usize,
    held: bool,
}

impl Budget {
    /// `limit` bytes, of which sums may hold what `largest` leaves.
    pub(super) fn new(limit: usize, largest: usize) -> Arc<Self> {
        Arc::new(Self {
            limit,
            largest,
            used: Mutex::default(),
            freed: Condvar::new(),
        })
    }

    /// Bytes that may be taken.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Takes `bytes` if they are free now, and returns what is taken then. A request of more than
    /// the limit is granted when nothing else is in flight: it could never be met otherwise.
    pub(super) fn try_take(self: &Arc<Self>, bytes: usize) -> Result<(Room, usize), Ticket> {
        let mut used = self.used.lock();
        let fits = used.in_flight + used.held + bytes <= self.limit;
        if !fits && used.in_flight > 0 {
            return Err(self.refuse(&used));
        }
        used.in_flight += bytes;
        let room = Room {
            budget: self.clone(),
            bytes,
            held: false,
        };
        Ok((room, used.in_flight + used.held))
    }

    #[cfg_attr(not(feature = "cubecl-backend"), allow(dead_code))]
    /// Takes `bytes` for a sum, if sums may hold that much. They may not be free yet: see
    /// [`settle`](Self::settle).
    pub(super) fn hold(self: &Arc<Self>, bytes: usize) -> Option<Room> {
        let mut used = self.used.lock();
        if used.held + bytes + self.largest > self.limit {
            return None;
        }
        used.held += bytes;
        Some(Room {
            budget: self.clone(),
            bytes,
            held: true,
        })
    }

    #[cfg_attr(not(feature = "cubecl-backend"), allow(dead_code))]
    /// The bytes taken, once they are within the limit. Not before something in flight has landed, if
    /// sums were begun meanwhile.
    pub(super) fn settle(self: &Arc<Self>) -> Result<usize, Ticket> {
        let used = self.used.lock();
        if used.in_flight + used.held > self.limit && used.in_flight > 0 {
            return Err(self.refuse(&used));
        }
        Ok(used.in_flight + used.held)
    }

    fn refuse(self: &Arc<Self>, used: &Used) -> Ticket {
        Ticket {
            budget: self.clone(),
            releases: used.releases,
        }
    }
}

/// What a refused request waits with.
#[derive(Debug)]
pub(super) struct Ticket {
    budget: Arc<Budget>,
    releases: u64,
}

impl Ticket {
    /// Waits until anything was given back since the request was refused.
    pub(super) fn wait(self) {
        let mut used = self.budget.used.lock();
        while used.releases == self.releases {
            self.budget.freed.wait(&mut used);
        }
    }
}

impl Room {
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes over the bytes of another room in flight.
    pub(super) fn absorb(&mut self, mut other: Room) {
        self.bytes += std::mem::take(&mut other.bytes);
    }

    #[cfg_attr(not(feature = "cubecl-backend"), allow(dead_code))]
    /// From held to in flight: the sum is being sent.
    pub(super) fn send(&mut self) {
        if std::mem::replace(&mut self.held, false) {
            let mut used = self.budget.used.lock();
            used.held -= self.bytes;
            used.in_flight += self.bytes;
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut used = self.budget.used.lock();
        let counter = if self.held {
            &mut used.held
        } else {
            &mut used.in_flight
        };
        *counter -= self.bytes;
        used.releases += 1;
        drop(used);
        self.budget.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_given_back_when_dropped() {
        let budget = Budget::new(10, 4);
        let (a, used) = budget.try_take(6).unwrap();
        assert_eq!(used, 6);
        assert!(budget.try_take(5).is_err());
        let (_b, used) = budget.try_take(4).unwrap();
        assert_eq!(used, 10);
        drop(a);
        assert_eq!(budget.try_take(6).unwrap().1, 10);
    }

    #[test]
    fn a_waiter_wakes_for_the_release_that_came_before_it_waited() {
        let budget = Budget::new(10, 4);
        let (room, _) = budget.try_take(10).unwrap();
        let ticket = budget.try_take(1).unwrap_err();
        drop(room);
        ticket.wait();
        assert!(budget.try_take(10).is_ok());
    }

    #[test]
    fn more_than_the_limit_is_granted_alone() {
        let budget = Budget::new(10, 4);
        let (room, used) = budget.try_take(50).unwrap();
        assert_eq!(used, 50);
        assert!(budget.try_take(1).is_err());
        drop(room);
        assert!(budget.try_take(1).is_ok());
    }

    #[test]
    fn sums_leave_room_for_the_largest_gradient() {
        let budget = Budget::new(10, 4);
        assert!(budget.hold(7).is_none());
        let mut sum = budget.hold(4).unwrap();
        assert!(budget.hold(3).is_none());
        // Held bytes are not waited for: nothing in flight would give them back.
        let (gradient, used) = budget.try_take(6).unwrap();
        assert_eq!(used, 10);
        drop(gradient);
        sum.send();
        assert!(budget.hold(6).is_some());
        drop(sum);
        assert_eq!(budget.try_take(10).unwrap().1, 10);
    }

    #[test]
    fn a_sum_settles_when_what_was_in_flight_before_it_has_landed() {
        let budget = Budget::new(10, 4);
        let (gradient, _) = budget.try_take(8).unwrap();
        let _sum = budget.hold(6).unwrap();
        let ticket = budget.settle().unwrap_err();
        drop(gradient);
        ticket.wait();
        assert_eq!(budget.settle().unwrap(), 6);
    }
}
