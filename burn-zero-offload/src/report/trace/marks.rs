use std::time::Duration;

use super::Span;

/// Marks narrower than this, in pixels, join a neighbour that is nearer than this.
const NARROW: f64 = 0.25;

/// Maps times to positions in the picture.
#[derive(Clone, Copy)]
pub(super) struct Scale {
    /// The time at `left`.
    pub(super) zero: Duration,
    /// Milliseconds from `left` to `left + width`.
    pub(super) length: f64,
    pub(super) left: f64,
    pub(super) width: f64,
}

/// One rectangle: a span, or several that are too short to be told apart.
pub(super) struct Mark<'a> {
    /// The longest of the spans.
    pub(super) span: &'a Span,
    pub(super) spans: usize,
    pub(super) from: Duration,
    pub(super) to: Duration,
}

impl Scale {
    /// Milliseconds since the left end.
    pub(super) fn ms(&self, time: Duration) -> f64 {
        ms(time.saturating_sub(self.zero))
    }

    pub(super) fn x(&self, time: Duration) -> f64 {
        self.left + self.pixels(self.ms(time))
    }

    /// Distance between round numbers on the axis, at least a twelfth of it, and decimals to write.
    pub(super) fn ticks(&self) -> (f64, usize) {
        round_spacing(self.length / 12.0)
    }

    pub(super) fn pixels(&self, ms: f64) -> f64 {
        ms / self.length * self.width
    }
}

pub(super) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Joins spans that are too short to be told apart. However many spans a row has, it has at most a
/// few marks per pixel. The spans do not overlap and come in the order in which they began.
pub(super) fn marks<'a>(row: &[&'a Span], scale: &Scale) -> Vec<Mark<'a>> {
    let narrow = |time: Duration| scale.pixels(ms(time)) < NARROW;
    let mut marks: Vec<Mark<'_>> = Vec::new();
    // Whether the last mark consists of narrow spans. Together they may be wide.
    let mut open = false;
    for &span in row {
        let short = narrow(span.took);
        match marks.last_mut() {
            Some(last) if open && short && narrow(span.start.saturating_sub(last.to)) => {
                last.to = span.end();
                last.spans += 1;
                if span.took > last.span.took {
                    last.span = span;
                }
            }
            _ => marks.push(Mark {
                span,
                spans: 1,
                from: span.start,
                to: span.end(),
            }),
        }
        open = short;
    }
    marks
}

/// The smallest of ..., 0.1, 0.2, 0.5, 1, 2, 5, ... that is at least `least`, and its decimals.
fn round_spacing(least: f64) -> (f64, usize) {
    let exponent = least.log10().floor() as i32;
    let spacing = |factor: f64, exponent: i32| {
        let decimals = exponent.min(0).unsigned_abs() as usize;
        // A division keeps 0.1 and its like as near as they can be.
        let spacing = match exponent {
            0.. => factor * 10f64.powi(exponent),
            _ => factor / 10f64.powi(-exponent),
        };
        (spacing, decimals)
    };
    let factors = [1.0, 2.0, 5.0].map(|factor| spacing(factor, exponent));
    let enough = factors.into_iter().find(|(spacing, _)| *spacing >= least);
    enough.unwrap_or(spacing(1.0, exponent + 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::trace::{Trace, Work};

    /// A pixel is 4 µs: a span is narrow below 1 µs.
    const SCALE: Scale = Scale {
        zero: Duration::ZERO,
        length: 4.0,
        left: 100.0,
        width: 1000.0,
    };

    fn drawn(spans: &[(Work, u64, u64, u64)]) -> Vec<(Work, usize, u128, u128)> {
        // Spans come in tenths of microseconds.
        let mut trace = Trace::of(spans);
        for span in &mut trace.spans {
            span.start /= 10;
            span.took /= 10;
        }
        let row: Vec<&Span> = trace.spans().iter().collect();
        let mark = |mark: Mark<'_>| {
            let (from, to) = (mark.from.as_nanos(), mark.to.as_nanos());
            (mark.span.work, mark.spans, from, to)
        };
        marks(&row, &SCALE).into_iter().map(mark).collect()
    }

    #[test]
    fn only_short_neighbours_are_joined() {
        let (step, verdict) = (Work::Step, Work::Verdict);
        let spans = [
            (step, 1, 0, 5),
            (verdict, 1, 5, 8),
            (step, 1, 15, 7),
            // Not short.
            (step, 1, 22, 10),
            (step, 1, 32, 2),
            // Too far.
            (step, 1, 50, 2),
        ];
        let expected = [
            (verdict, 3, 0, 2200),
            (step, 1, 2200, 3200),
            (step, 1, 3200, 3400),
            (step, 1, 5000, 5200),
        ];
        assert_eq!(drawn(&spans), expected);
    }

    #[test]
    fn any_number_of_spans_is_few_marks() {
        let spans: Vec<_> = (0..100_000).map(|i| (Work::Step, 1, 9 * i, 9)).collect();
        assert_eq!(drawn(&spans), [(Work::Step, 100_000, 0, 90_000_000)]);
    }

    #[test]
    fn positions_and_ticks_are_round() {
        assert_eq!(SCALE.x(Duration::from_millis(1)), 350.0);
        assert_eq!(SCALE.ticks(), (0.5, 1));
        assert_eq!(round_spacing(0.5), (0.5, 1));
        assert_eq!(round_spacing(0.0003), (0.0005, 4));
        assert_eq!(round_spacing(6.0), (10.0, 0));
        assert_eq!(round_spacing(0.06), (0.1, 1));
        assert_eq!(round_spacing(1000.0), (1000.0, 0));
        assert_eq!(round_spacing(150.0), (200.0, 0));
    }
}
