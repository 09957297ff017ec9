//! The timeline as an SVG, drawn by hand: no fonts or drawing libraries are needed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Arguments, Write};
use std::time::Duration;

use super::marks::{Mark, Scale, marks, ms};
use super::rows::{busy, rows};
use super::{Lane, Trace, Work};

const WIDTH: f64 = 1240.0;
const LEFT: f64 = 110.0;
const RIGHT: f64 = 30.0;
const TOP: f64 = 100.0;
/// Height of a lane, unless it has many rows.
const LANE: f64 = 32.0;
/// Least height of a row.
const ROW: f64 = 8.0;
const GAP: f64 = 8.0;
/// Rounds that begin nearer to each other than this are not marked and not labelled.
const ROUND_LINE: f64 = 3.0;
const ROUND_LABEL: f64 = 64.0;
/// Estimated width of a letter of 11 pixels.
const LETTER: f64 = 6.3;

/// A picture of the trace. Its height depends on the rows of its lanes.
pub(super) fn svg(trace: &Trace) -> String {
    let scale = scale(trace);
    let mut body = String::new();
    header(&mut body, trace, &scale);
    let mut top = TOP;
    for lane in Lane::ALL {
        top += draw_lane(&mut body, trace, lane, top, &scale) + GAP;
    }
    draw_rounds(&mut body, trace, top, &scale);
    draw_axis(&mut body, top, &scale);
    let height = draw_legend(&mut body, trace, top + 66.0) + 16.0;
    format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' \
         font-family='sans-serif' font-size='13'>\n<rect width='100%' height='100%' fill='white'/>\n\
         {body}</svg>\n"
    )
}

/// From the first span to the end of the last.
fn scale(trace: &Trace) -> Scale {
    let spans = trace.spans();
    let zero = spans.first().map_or(Duration::ZERO, |span| span.start);
    let end = spans.iter().map(|span| span.end()).max().unwrap_or(zero);
    let length = match ms(end - zero) {
        0.0 => 1.0,
        length => length,
    };
    Scale {
        zero,
        length,
        left: LEFT,
        width: WIDTH - LEFT - RIGHT,
    }
}

/// What is seen, the busy time of each lane, and how long training waited for the CPU step. Waits
/// of several threads are added up.
fn header(svg: &mut String, trace: &Trace, scale: &Scale) {
    let rounds = match trace.rounds().map(|rounds| rounds.into_inner()) {
        None => "nothing recorded".into(),
        Some((first, last)) if first == last => format!("round {first}"),
        Some((first, last)) => format!("rounds {first} to {last}"),
    };
    let dropped = match trace.dropped() {
        0 => String::new(),
        dropped => format!("; {dropped} older spans dropped"),
    };
    let lanes = Lane::ALL.map(|lane| {
        let busy = ms(busy(trace.lane(lane)));
        format!("{} {busy:.2} ms", lane.label())
    });
    let exposed = |work| matches!(work, Work::WaitForward | Work::WaitStep);
    let waits = trace.spans().iter().filter(|span| exposed(span.work));
    let waited = ms(waits.map(|span| span.took).sum());
    let step = ms(busy(trace.lane(Lane::Step)));
    let share = match step {
        0.0 => String::new(),
        step => format!(", {:.1} % of its busy time", waited / step * 100.0),
    };
    push(
        svg,
        format_args!(
            "<text x='16' y='26' font-size='15' font-weight='bold'>burn-zero-offload, {rounds}: \
             {:.2} ms</text>\n\
             <text x='{}' y='26' text-anchor='end' fill='#666666'>begins {:.3} s after the engine \
             was built{dropped}</text>\n\
             <text x='16' y='48'>Busy: {}</text>\n\
             <text x='16' y='67'>Exposed: forward and optimizer.step waited {waited:.2} ms for the \
             CPU step{share}</text>",
            scale.length,
            WIDTH - RIGHT,
            scale.zero.as_secs_f64(),
            lanes.join(", "),
        ),
    );
}

/// Draws a lane and returns its height.
fn draw_lane(svg: &mut String, trace: &Trace, lane: Lane, top: f64, scale: &Scale) -> f64 {
    let rows = rows(trace.lane(lane));
    let height = LANE.max(ROW * rows.len() as f64);
    let busy = ms(busy(trace.lane(lane)));
    push(
        svg,
        format_args!(
            "<text x='{}' y='{}' text-anchor='end'>{label}</text>\n\
             <rect x='{LEFT}' y='{top}' width='{}' height='{height}' fill='#f3f3f3'>\
             <title>{label}: busy {busy:.3} ms, {:.1} % of the time</title></rect>",
            LEFT - 10.0,
            top + height / 2.0 + 4.5,
            scale.width,
            busy / scale.length * 100.0,
            label = lane.label(),
        ),
    );
    let row_height = height / rows.len().max(1) as f64;
    for (index, row) in rows.iter().enumerate() {
        let y = top + index as f64 * row_height;
        for mark in marks(row, scale) {
            draw_mark(svg, &mark, y, row_height - 1.0, scale);
        }
    }
    height
}

fn draw_mark(svg: &mut String, mark: &Mark<'_>, y: f64, height: f64, scale: &Scale) {
    let (x, end) = (scale.x(mark.from), scale.x(mark.to));
    // A hairline between neighbours; and what is very short can still be seen.
    let width = match end - x {
        wide if wide > 2.0 => wide - 0.4,
        narrow => narrow.max(0.5),
    };
    let span = mark.span;
    let name = escape(span.name());
    let (from, took) = (scale.ms(mark.from), ms(mark.to - mark.from));
    let what = match (mark.spans, &span.parameter) {
        (1, Some(_)) => format!("{name}: {}", span.work.label()),
        (1, None) => name.clone(),
        (spans, _) => format!("{spans} spans, the longest {name}: {}", span.work.label()),
    };
    push(
        svg,
        format_args!(
            "<rect x='{x:.2}' y='{y:.1}' width='{width:.2}' height='{height:.1}' fill='{}'>\
             <title>{what}, round {}, {took:.3} ms from {from:.3} ms</title></rect>",
            colour(span.work),
            span.round,
        ),
    );
    let letters = span.name().chars().count() as f64;
    if mark.spans == 1 && height >= 14.0 && width > letters * LETTER + 6.0 {
        push(
            svg,
            format_args!(
                "<text x='{:.2}' y='{:.1}' font-size='11' fill='white' text-anchor='middle' \
                 pointer-events='none'>{name}</text>",
                x + width / 2.0,
                y + height / 2.0 + 4.0,
            ),
        );
    }
}

/// A line where each round begins: at its first span of the thread of training.
fn draw_rounds(svg: &mut String, trace: &Trace, bottom: f64, scale: &Scale) {
    let mut begins = BTreeMap::new();
    for span in trace.lane(Lane::Compute) {
        begins.entry(span.round).or_insert(span.start);
    }
    let (mut line, mut label) = (f64::NEG_INFINITY, f64::NEG_INFINITY);
    for (round, begin) in begins {
        let x = scale.x(begin);
        if x - line >= ROUND_LINE {
            line = x;
            push(
                svg,
                format_args!(
                    "<path d='M{x:.2} {}V{bottom}' stroke='black' stroke-width='0.7' \
                     stroke-opacity='0.6' pointer-events='none'/>",
                    TOP - 14.0
                ),
            );
        }
        if x - label >= ROUND_LABEL && x + ROUND_LABEL <= WIDTH {
            label = x;
            let y = TOP - 5.0;
            push(
                svg,
                format_args!(
                    "<text x='{:.2}' y='{y}' font-size='11'>round {round}</text>",
                    x + 4.0
                ),
            );
        }
    }
}

fn draw_axis(svg: &mut String, y: f64, scale: &Scale) {
    let right = WIDTH - RIGHT;
    push(
        svg,
        format_args!("<path d='M{LEFT} {y}H{right}' stroke='black'/>"),
    );
    let (spacing, decimals) = scale.ticks();
    for tick in 0..=(scale.length / spacing) as u32 {
        let time = f64::from(tick) * spacing;
        let x = LEFT + scale.pixels(time);
        push(
            svg,
            format_args!(
                "<path d='M{x:.2} {y}v5' stroke='black'/><text x='{x:.2}' y='{}' \
                 text-anchor='middle'>{time:.decimals$}</text>",
                y + 20.0
            ),
        );
    }
    let middle = (LEFT + right) / 2.0;
    push(
        svg,
        format_args!(
            "<text x='{middle}' y='{}' text-anchor='middle'>ms</text>",
            y + 38.0
        ),
    );
}

/// Draws the colours of what there is, and returns where it ends.
fn draw_legend(svg: &mut String, trace: &Trace, top: f64) -> f64 {
    let works: BTreeSet<Work> = trace.spans().iter().map(|span| span.work).collect();
    let (mut x, mut y) = (LEFT, top);
    for work in works {
        let width = 18.0 + work.label().len() as f64 * 7.0 + 20.0;
        if x + width > WIDTH {
            (x, y) = (LEFT, y + 20.0);
        }
        push(
            svg,
            format_args!(
                "<rect x='{x}' y='{}' width='12' height='12' fill='{}'/>\
                 <text x='{}' y='{y}'>{}</text>",
                y - 11.0,
                colour(work),
                x + 18.0,
                work.label()
            ),
        );
        x += width;
    }
    y
}

/// Cool colours for work, red and orange for waits; white letters can be read on all of them.
fn colour(work: Work) -> &'static str {
    match work {
        Work::Forward => "#0072b2",
        Work::Backward => "#1f4e79",
        Work::Walk => "#7f8790",
        Work::Gradient => "#6a51a3",
        Work::Download => "#0a85a8",
        Work::Verdict => "#5d4037",
        Work::Step => "#5b8a1e",
        Work::Upload => "#0b6e63",
        Work::WaitForward => "#e00000",
        Work::WaitStep => "#f26a00",
        Work::WaitVerdict => "#e69f00",
        Work::WaitBudget => "#e0007a",
        Work::WaitFlush => "#a00030",
    }
}

fn push(svg: &mut String, element: Arguments<'_>) {
    // Writing to a string does not fail.
    let _ = writeln!(svg, "{element}");
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace(char::is_control, "\u{fffd}")
}

#[cfg(test)]
mod tests;
