//! The losses of a run.

use anyhow::{Context, Result, ensure};

const HEADER: &str = "step,learning_rate,loss,tokens_per_second";
/// Weight of the past in the smoothed losses.
const SMOOTHING: f64 = 0.95;

/// What one optimizer step gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Learning rate of the step.
    pub lr: f64,
    /// Mean training loss over the micro-batches, in nats per token.
    pub loss: f32,
    /// Speed of the step.
    pub tokens_per_second: f64,
}

/// What every step of a run gave, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// One point for each step.
    pub points: Vec<Point>,
}

impl History {
    /// The losses as they are.
    pub fn losses(&self) -> Vec<f64> {
        self.points
            .iter()
            .map(|point| f64::from(point.loss))
            .collect()
    }

    /// The losses as an exponential moving average, without its bias to the start.
    pub fn smoothed(&self) -> Vec<f64> {
        let (mut sum, mut weight) = (0.0, 0.0);
        let average = |loss| {
            sum = SMOOTHING * sum + loss;
            weight = SMOOTHING * weight + 1.0;
            sum / weight
        };
        self.losses().into_iter().map(average).collect()
    }

    /// The largest and the mean distance between the smoothed losses of two runs.
    pub fn distance(&self, other: &Self) -> (f64, f64) {
        let (mut largest, mut sum, mut count) = (0.0_f64, 0.0, 0);
        for (a, b) in self.smoothed().into_iter().zip(other.smoothed()) {
            let distance = (a - b).abs();
            largest = largest.max(distance);
            sum += distance;
            count += 1;
        }
        (largest, sum / f64::from(count.max(1)))
    }

    /// Median time of a step, in seconds, if each had so many tokens.
    pub fn median_step(&self, tokens: usize) -> f64 {
        let mut speeds: Vec<f64> = self.points.iter().map(|p| p.tokens_per_second).collect();
        speeds.sort_by(f64::total_cmp);
        let median = speeds.get(speeds.len() / 2);
        median.map_or(0.0, |speed| tokens as f64 / speed)
    }

    /// The first step, counted from one, whose losses in two runs are not the same bits. A step that one of
    /// them has not taken counts.
    pub fn first_difference(&self, other: &Self) -> Option<usize> {
        let bits = |history: &Self, step: usize| {
            let point = history.points.get(step);
            point.map(|point| point.loss.to_bits())
        };
        let steps = self.points.len().max(other.points.len());
        let differs = |&step: &usize| bits(self, step) != bits(other, step);
        (0..steps).find(differs).map(|step| step + 1)
    }

    /// A table with one line for each step, counted from one.
    pub fn to_csv(&self) -> String {
        let mut csv = format!("{HEADER}\n");
        for (index, point) in self.points.iter().enumerate() {
            // The shortest decimals that read back as the same number.
            let Point {
                lr,
                loss,
                tokens_per_second,
            } = point;
            csv += &format!("{},{lr},{loss},{tokens_per_second:.0}\n", index + 1);
        }
        csv
    }

    /// The inverse of [`to_csv`](Self::to_csv).
    ///
    /// # Errors
    ///
    /// Fails if the table has been changed.
    pub fn from_csv(csv: &str) -> Result<Self> {
        let mut lines = csv.lines();
        ensure!(
            lines.next() == Some(HEADER),
            "the table of losses has another header"
        );
        let points = lines.enumerate().map(|(index, line)| {
            let invalid = || format!("line {} of the table of losses is {line:?}", index + 2);
            let fields: Vec<&str> = line.split(',').collect();
            let [step, lr, loss, tokens_per_second] = fields[..] else {
                anyhow::bail!(invalid());
            };
            ensure!(step.parse() == Ok(index + 1), invalid());
            Ok(Point {
                lr: lr.parse().with_context(invalid)?,
                loss: loss.parse().with_context(invalid)?,
                tokens_per_second: tokens_per_second.parse().with_context(invalid)?,
            })
        });
        Ok(Self {
            points: points.collect::<Result<_>>()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(losses: &[f32]) -> History {
        let point = |&loss| Point {
            lr: 1e-3 / 3.0,
            loss,
            tokens_per_second: 100.0,
        };
        History {
            points: losses.iter().map(point).collect(),
        }
    }

    #[test]
    fn the_table_reads_back() {
        let history = history(&[5.5, 1.0 / 3.0, 2.0]);
        assert_eq!(History::from_csv(&history.to_csv()).unwrap(), history);
        assert!(History::from_csv(&history.to_csv().replace("\n2,", "\n3,")).is_err());
        assert!(History::from_csv("").is_err());
    }

    #[test]
    fn smoothing_keeps_a_constant_and_follows_a_change() {
        assert!(
            history(&[2.0; 50])
                .smoothed()
                .iter()
                .all(|loss| (loss - 2.0).abs() < 1e-12)
        );
        let smoothed = history(&[[4.0; 50], [2.0; 50]].concat()).smoothed();
        assert!(smoothed[50] < 4.0 && smoothed[99] > 2.0 && smoothed[99] < 2.2);
    }

    #[test]
    fn the_first_different_bit_is_found() {
        let first = history(&[5.0, 4.0, 3.0]);
        assert_eq!(first.first_difference(&first), None);
        let other = history(&[5.0, 4.0f32.next_up(), 3.0]);
        assert_eq!(first.first_difference(&other), Some(2));
        assert_eq!(first.first_difference(&history(&[5.0, 4.0])), Some(3));
    }

    #[test]
    fn a_slow_step_does_not_move_the_median() {
        let mut history = history(&[1.0; 5]);
        history.points[1].tokens_per_second = 1.0;
        assert_eq!(history.median_step(50), 0.5);
        assert_eq!(History::default().median_step(50), 0.0);
    }

    #[test]
    fn distances_are_between_smoothed_losses() {
        let (largest, mean) = history(&[2.0; 9]).distance(&history(&[2.5; 9]));
        assert!((largest - 0.5).abs() < 1e-9 && (mean - 0.5).abs() < 1e-9);
    }
}
