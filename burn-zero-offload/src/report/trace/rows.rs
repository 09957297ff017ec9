use std::time::Duration;

use super::Span;

/// Spreads spans of a lane over rows, so that no two of a row overlap. Several threads may work in
/// one lane. Spans come in the order in which they began, and each goes to the first free row.
pub(super) fn rows<'a>(spans: impl Iterator<Item = &'a Span>) -> Vec<Vec<&'a Span>> {
    let mut rows: Vec<Vec<&Span>> = Vec::new();
    for span in spans {
        let free = |row: &&mut Vec<&Span>| row.last().is_none_or(|last| last.end() <= span.start);
        match rows.iter_mut().find(free) {
            Some(row) => row.push(span),
            None => rows.push(vec![span]),
        }
    }
    rows
}

/// Time in which at least one of the spans was going on. They come in the order of their starts.
pub(super) fn busy<'a>(spans: impl Iterator<Item = &'a Span>) -> Duration {
    let mut until = Duration::ZERO;
    let mut busy = Duration::ZERO;
    for span in spans {
        busy += span.end().saturating_sub(span.start.max(until));
        until = until.max(span.end());
    }
    busy
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::trace::{Trace, Work};

    #[test]
    fn spans_that_overlap_are_on_several_rows_and_are_busy_once() {
        let upload = |start, took| (Work::Upload, 1, start, took);
        let trace = Trace::of(&[
            upload(0, 10),
            upload(5, 10),
            upload(6, 1),
            upload(10, 2),
            upload(20, 4),
        ]);
        let rows = rows(trace.spans().iter());
        let starts = |row: &Vec<&Span>| row.iter().map(|span| span.start.as_micros()).collect();
        let starts: Vec<Vec<u128>> = rows.iter().map(starts).collect();
        assert_eq!(starts, [vec![0, 10, 20], vec![5], vec![6]]);
        assert_eq!(busy(trace.spans().iter()), Duration::from_micros(19));
    }

    #[test]
    fn no_spans_need_no_row() {
        assert!(rows([].iter()).is_empty());
        assert_eq!(busy([].iter()), Duration::ZERO);
    }
}
