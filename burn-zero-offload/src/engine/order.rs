//! The order in which forward passes use the parameters.

use parking_lot::Mutex;

/// The order of the last forward pass that was to run backward.
#[derive(Debug)]
pub(super) struct ForwardOrder(Mutex<Order>);

#[derive(Debug)]
struct Order {
    /// Place of each parameter; those that were never used come last.
    ranks: Vec<u32>,
    /// Whether the current pass has used the parameter.
    used: Vec<bool>,
    next: u32,
    /// A backward pass has begun: the next use is the first of another forward.
    over: bool,
}

impl ForwardOrder {
    pub(super) fn new(slots: usize) -> Self {
        Self(Mutex::new(Order {
            ranks: vec![u32::MAX; slots],
            used: vec![false; slots],
            next: 0,
            over: false,
        }))
    }

    /// A forward pass uses the parameter in `slot`. Returns whether the pass begins with it.
    pub(super) fn used(&self, slot: usize) -> bool {
        let mut order = self.0.lock();
        let begins = order.over || order.next == 0;
        if order.over {
            order.used.fill(false);
            order.next = 0;
            order.over = false;
        }
        if !std::mem::replace(&mut order.used[slot], true) {
            order.ranks[slot] = order.next;
            order.next += 1;
        }
        begins
    }

    /// A backward pass begins.
    pub(super) fn backward(&self) {
        self.0.lock().over = true;
    }

    /// The place of a parameter.
    pub(super) fn rank(&self, slot: usize) -> u32 {
        self.0.lock().ranks[slot]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_forward_counts_and_the_first_use_in_it() {
        let order = ForwardOrder::new(4);
        let pass =
            |slots: &[usize]| -> Vec<bool> { slots.iter().map(|&s| order.used(s)).collect() };
        assert_eq!(pass(&[2, 0, 2, 1]), [true, false, false, false]);
        let ranks = || [0, 1, 2, 3].map(|slot| order.rank(slot));
        assert_eq!(ranks(), [1, 2, 0, u32::MAX]);
        order.backward();
        order.backward();
        assert_eq!(pass(&[1, 2]), [true, false]);
        // What it has not used keeps the place it had.
        assert_eq!(ranks(), [1, 0, 1, u32::MAX]);
    }
}
