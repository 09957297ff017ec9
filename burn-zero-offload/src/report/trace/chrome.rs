//! The Chrome trace event format:
//! <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>.

use std::time::Duration;

use serde_json::{Value, json};

use super::rows::rows;
use super::{Lane, Span, Trace};

/// There is one process.
const PROCESS: u64 = 1;

/// Threads are numbered by lane, and within a lane by row: lanes stay in order however many rows
/// they have.
const ROWS_PER_LANE: usize = 1000;

/// The trace, one event per line. Events are turned into text one by one: as one tree of values, a
/// full trace would take many times the memory of its text.
pub(super) fn json(trace: &Trace) -> String {
    let mut events = vec![metadata(
        "process_name",
        0,
        json!({ "name": "burn-zero-offload" }),
    )];
    for lane in Lane::ALL {
        let rows = rows(trace.lane(lane));
        // A lane is named even if nothing has happened in it.
        for row in 0..rows.len().max(1) {
            let thread = thread(lane, row);
            let name = match row {
                0 => lane.label().to_string(),
                _ => format!("{} {}", lane.label(), row + 1),
            };
            events.push(metadata("thread_name", thread, json!({ "name": name })));
            let index = json!({ "sort_index": thread });
            events.push(metadata("thread_sort_index", thread, index));
        }
        for (row, spans) in rows.iter().enumerate() {
            events.extend(spans.iter().map(|span| complete(span, thread(lane, row))));
        }
    }
    let other = json!({
        "crate": concat!("burn-zero-offload ", env!("CARGO_PKG_VERSION")),
        "dropped": trace.dropped(),
    });
    format!(
        "{{\"displayTimeUnit\":\"ms\",\"otherData\":{other},\"traceEvents\":[\n{}\n]}}\n",
        events.join(",\n")
    )
}

fn thread(lane: Lane, row: usize) -> usize {
    lane as usize * ROWS_PER_LANE + row + 1
}

fn metadata(name: &str, thread: usize, args: Value) -> String {
    json!({ "ph": "M", "name": name, "pid": PROCESS, "tid": thread, "args": args }).to_string()
}

fn complete(span: &Span, thread: usize) -> String {
    json!({
        "ph": "X",
        "name": span.name(),
        "cat": span.work.lane().label(),
        "pid": PROCESS,
        "tid": thread,
        "ts": microseconds(span.start),
        "dur": microseconds(span.took),
        "args": {
            "round": span.round,
            "parameter": span.parameter,
            "work": span.work.label(),
        },
    })
    .to_string()
}

/// Exact to the nanosecond: a double has 53 bits, enough for nanoseconds of 104 days.
fn microseconds(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::trace::Work;

    fn parsed(trace: &Trace) -> Value {
        serde_json::from_str(&json(trace)).unwrap()
    }

    fn events<'a>(value: &'a Value, phase: &str) -> Vec<&'a Value> {
        let events = value["traceEvents"].as_array().unwrap();
        events.iter().filter(|event| event["ph"] == phase).collect()
    }

    #[test]
    fn a_span_is_a_complete_event_in_microseconds() {
        let trace = Trace {
            spans: vec![Span {
                work: Work::Step,
                round: 7,
                parameter: Some("head.\"weight\"".into()),
                start: Duration::from_nanos(3_000_001_234_567),
                took: Duration::from_nanos(1),
            }],
            dropped: 12,
        };
        let value = parsed(&trace);
        assert_eq!(value["displayTimeUnit"], "ms");
        assert_eq!(value["otherData"]["dropped"], 12);
        let expected = json!({
            "ph": "X", "name": "head.\"weight\"", "cat": "CPU step", "pid": 1, "tid": 3001,
            "ts": 3_000_001_234.567, "dur": 0.001,
            "args": { "round": 7, "parameter": "head.\"weight\"", "work": "CPU step" },
        });
        assert_eq!(events(&value, "X"), [&expected]);
    }

    #[test]
    fn a_span_without_a_parameter_is_named_by_its_work() {
        let value = parsed(&Trace::of(&[(Work::WaitForward, 2, 1500, 250)]));
        let expected = json!({
            "ph": "X", "name": "forward waits for weights", "cat": "waits", "pid": 1, "tid": 5001,
            "ts": 1500.0, "dur": 250.0,
            "args": { "round": 2, "parameter": null, "work": "forward waits for weights" },
        });
        assert_eq!(events(&value, "X"), [&expected]);
    }

    #[test]
    fn the_process_and_each_lane_are_named() {
        let value = parsed(&Trace::default());
        let names: Vec<_> = events(&value, "M")
            .into_iter()
            .filter(|event| event["name"] != "thread_sort_index")
            .map(|event| event["args"]["name"].as_str().unwrap())
            .collect();
        let expected = [
            "burn-zero-offload",
            "compute",
            "device",
            "download",
            "CPU step",
            "upload",
            "waits",
        ];
        assert_eq!(names, expected);
        let order = json!({
            "ph": "M", "name": "thread_sort_index", "pid": 1, "tid": 1001,
            "args": { "sort_index": 1001 },
        });
        assert!(events(&value, "M").contains(&&order));
    }

    #[test]
    fn spans_of_a_lane_that_overlap_are_on_several_threads() {
        let spans = [
            (Work::Upload, 1, 0, 10),
            (Work::Upload, 1, 5, 10),
            (Work::Upload, 1, 12, 1),
        ];
        let value = parsed(&Trace::of(&spans));
        let threads = events(&value, "X").into_iter().map(|event| &event["tid"]);
        assert_eq!(threads.collect::<Vec<_>>(), [4001, 4001, 4002]);
        let name = json!({
            "ph": "M", "name": "thread_name", "pid": 1, "tid": 4002,
            "args": { "name": "upload 2" },
        });
        assert!(events(&value, "M").contains(&&name));
    }
}
