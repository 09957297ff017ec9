use super::super::Span;
use super::*;

/// Whether every element that is opened is closed, in order.
fn balanced(svg: &str) -> bool {
    let mut open = Vec::new();
    for tag in svg.split('<').skip(1) {
        let (tag, _) = tag.split_once('>').unwrap();
        let name = |tag: &str| tag.split(' ').next().unwrap().to_string();
        if let Some(closed) = tag.strip_prefix('/') {
            if open.pop() != Some(name(closed)) {
                return false;
            }
        } else if !tag.ends_with('/') {
            open.push(name(tag));
        }
    }
    open.is_empty()
}

/// The plot is 1100 pixels wide and begins at 110.
#[test]
fn spans_are_where_their_times_say() {
    let svg = svg(&Trace::of(&[
        (Work::Forward, 4, 50_000, 4_000),
        (Work::WaitStep, 4, 54_000, 6_000),
    ]));
    assert!(balanced(&svg), "{svg}");
    for expected in [
        "<rect x='110.00' y='100.0' width='439.60' height='31.0' fill='#0072b2'><title>forward, \
         round 4, 4.000 ms from 0.000 ms</title></rect>\n",
        "<rect x='550.00' y='300.0' width='659.60' height='31.0' fill='#f26a00'><title>optimizer.step \
         waits for the CPU step, round 4, 6.000 ms from 4.000 ms</title></rect>\n",
        "burn-zero-offload, round 4: 10.00 ms</text>",
        "begins 0.050 s after",
        "Busy: compute 4.00 ms, device 0.00 ms, download 0.00 ms, CPU step 0.00 ms, upload 0.00 ms, \
         waits 6.00 ms</text>",
        "text-anchor='end'>upload</text>",
        "<path d='M110.00 86V340' ",
        "<path d='M1210.00 340v5' stroke='black'/><text x='1210.00' y='360' \
         text-anchor='middle'>10</text>",
    ] {
        assert!(svg.contains(expected), "{expected:?} is not in\n{svg}");
    }
}

#[test]
fn what_training_waits_for_is_a_share_of_the_step() {
    let svg = svg(&Trace::of(&[
        (Work::Step, 1, 0, 4_000),
        (Work::Step, 1, 2_000, 6_000),
        (Work::WaitForward, 2, 6_000, 500),
        (Work::WaitForward, 2, 6_500, 500),
        (Work::WaitBudget, 2, 7_000, 500),
    ]));
    let expected = "waited 1.00 ms for the CPU step, 12.5 % of its busy time</text>";
    assert!(svg.contains(expected), "{svg}");
    // Spans that overlap share the height of the lane.
    assert!(
        svg.contains("y='236.0' width='824.60' height='15.0'"),
        "{svg}"
    );
}

#[test]
fn names_are_escaped() {
    let span = |start| Span {
        work: Work::Download,
        round: 1,
        parameter: Some("a<b>&\u{1}".into()),
        start: Duration::from_millis(start),
        took: Duration::from_millis(5),
    };
    let trace = Trace {
        spans: vec![span(0), span(5)],
        dropped: 3,
    };
    let svg = svg(&trace);
    assert!(balanced(&svg), "{svg}");
    let title = "<title>a&lt;b&gt;&amp;\u{fffd}: download, round 1, 5.000 ms from 5.000 ms</title>";
    assert!(svg.contains(title), "{svg}");
    assert!(svg.contains("; 3 older spans dropped"));
}

#[test]
fn many_spans_are_a_small_file() {
    let spans: Vec<_> = (0..30_000)
        .map(|i| (Work::Step, i / 10, 10 * i, 9))
        .collect();
    let svg = svg(&Trace::of(&spans));
    assert!(svg.len() < 20_000, "{} bytes", svg.len());
    assert!(svg.contains("<title>30000 spans, the longest CPU step"));
}

#[test]
fn no_span_and_one_without_length_can_be_drawn() {
    for trace in [Trace::default(), Trace::of(&[(Work::Walk, 1, 3, 0)])] {
        let svg = svg(&trace);
        assert!(balanced(&svg) && !svg.contains("NaN"), "{svg}");
    }
}
