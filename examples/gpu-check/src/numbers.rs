//! Numbers that are the same in every run and every process.

use std::time::Duration;

/// A small generator (xorshift64, Marsaglia 2003).
pub struct Numbers(u64);

impl Numbers {
    /// A generator for `seed`; seeds next to each other give unrelated numbers.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 32) % bound
    }

    /// `len` numbers of -1, 0 and 1.
    pub fn thirds(&mut self, len: usize) -> Vec<i32> {
        (0..len).map(|_| self.below(3) as i32 - 1).collect()
    }

    /// `len` numbers of -1 and 1.
    pub fn signs(&mut self, len: usize) -> Vec<i32> {
        (0..len).map(|_| 1 - 2 * self.below(2) as i32).collect()
    }

    /// Sleeps now and then, and not for long.
    pub fn sleep(&mut self) {
        if self.below(3) == 0 {
            std::thread::sleep(Duration::from_micros(self.below(1500)));
        }
    }
}
