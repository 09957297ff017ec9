//! The same training with integers, in a few plain loops.

use super::tangle::{BATCH, Plan};

/// The weights as they have to be.
pub struct Expected(Vec<Vec<i32>>);

impl Expected {
    /// The weights of `plan` after so many rounds. Each round replaces a weight by minus its gradient.
    pub fn after(plan: &Plan, rounds: u64) -> Self {
        let mut weights = plan.first();
        for round in 0..rounds {
            let mut numbers = plan.data(round);
            let mut at = 0;
            for &(len, uses) in &plan.pairs {
                let signs = numbers.signs(len);
                let mut left: Vec<i32> = (0..len).map(|i| weights[at + 1][i] * signs[i]).collect();
                let right = (0..len).map(|i| -weights[at][i] * signs[i]).collect();
                for _ in 1..uses {
                    let data = numbers.thirds(len);
                    left.iter_mut()
                        .zip(data)
                        .for_each(|(sum, data)| *sum += data);
                }
                weights[at] = left.into_iter().map(|gradient| -gradient).collect();
                weights[at + 1] = right;
                at += 2;
            }
            for &(rows, columns) in &plan.grids {
                let signs = numbers.signs(rows * columns);
                let x = numbers.thirds(BATCH * rows);
                let y = numbers.thirds(BATCH * columns);
                for row in 0..rows {
                    for column in 0..columns {
                        let i = row * columns + column;
                        let outer = (0..BATCH).map(|b| x[b * rows + row] * y[b * columns + column]);
                        weights[at][i] = -(weights[at][i] * signs[i] + outer.sum::<i32>());
                    }
                }
                at += 1;
            }
        }
        let largest = weights.iter().flatten().map(|w| w.abs()).max().unwrap_or(0);
        // Integers up to 256 are exact in bf16, those up to 2048 in f16.
        assert!(
            largest <= 256,
            "the numbers of this check grew to {largest}"
        );
        Self(weights)
    }

    /// How many of `weights` are something else.
    pub fn differences(&self, weights: &[f32]) -> usize {
        let expected = self.0.iter().flatten();
        let wrong = expected.zip(weights).filter(|(e, w)| **e as f32 != **w);
        let missing = self
            .0
            .iter()
            .map(Vec::len)
            .sum::<usize>()
            .abs_diff(weights.len());
        wrong.count() + missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_exact_in_every_type() {
        for index in 0..4 {
            for small in [false, true] {
                let rounds = super::super::rounds(small);
                let expected = Expected::after(&Plan::new(index, small, false), rounds);
                let all: Vec<f32> = expected.0.iter().flatten().map(|&w| w as f32).collect();
                assert_eq!(expected.differences(&all), 0);
                assert_eq!(
                    expected.differences(&all[1..]),
                    all.len() - count_equal(&all)
                );
            }
        }
    }

    /// Elements that equal their successor, which `differences` cannot tell apart.
    fn count_equal(all: &[f32]) -> usize {
        all.windows(2).filter(|pair| pair[0] == pair[1]).count()
    }
}
