//! Loss curves as a small SVG, drawn by hand: no fonts or drawing libraries are needed.

use std::fmt::Write;

use crate::history::History;

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 50.0;
/// Colours that also differ for the colour-blind (Okabe and Ito).
const COLOURS: [&str; 5] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"];

/// Maps steps and losses to positions in the picture.
struct Axes {
    steps: f64,
    lowest: f64,
    highest: f64,
}

/// A picture of the losses of each run, as they are and smoothed, with the name of the run.
pub fn loss_curves(runs: &[(&str, &History)]) -> String {
    let axes = Axes::around(runs);
    let mut svg = format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' \
         font-family='sans-serif' font-size='13'>\n<rect width='100%' height='100%' fill='white'/>\n"
    );
    axes.draw(&mut svg);
    for (layer, width, opacity) in [(Layer::Raw, 1.0, 0.25), (Layer::Smoothed, 2.0, 1.0)] {
        for (index, (_, history)) in runs.iter().enumerate() {
            let losses = match layer {
                Layer::Raw => history.losses(),
                Layer::Smoothed => history.smoothed(),
            };
            let points: Vec<String> = losses
                .iter()
                .enumerate()
                .map(|(step, &loss)| format!("{:.1},{:.1}", axes.x(step + 1), axes.y(loss)))
                .collect();
            push(
                &mut svg,
                format_args!(
                    "<polyline points='{}' fill='none' stroke='{}' stroke-width='{width}' \
                     stroke-opacity='{opacity}'/>",
                    points.join(" "),
                    COLOURS[index % COLOURS.len()],
                ),
            );
        }
    }
    for (index, (name, _)) in runs.iter().enumerate() {
        let y = TOP + 12.0 + 20.0 * index as f64;
        let x = WIDTH - RIGHT - 190.0;
        let colour = COLOURS[index % COLOURS.len()];
        push(
            &mut svg,
            format_args!(
                "<rect x='{x}' y='{}' width='24' height='3' fill='{colour}'/>\
                 <text x='{}' y='{y}'>{}</text>",
                y - 6.0,
                x + 32.0,
                escape(name)
            ),
        );
    }
    svg + "</svg>\n"
}

#[derive(Clone, Copy)]
enum Layer {
    Raw,
    Smoothed,
}

impl Axes {
    /// Axes with room for all losses of all runs.
    fn around(runs: &[(&str, &History)]) -> Self {
        let losses = || runs.iter().flat_map(|(_, history)| history.losses());
        let steps = runs
            .iter()
            .map(|(_, history)| history.points.len())
            .max()
            .unwrap_or(0);
        let lowest = losses().fold(f64::INFINITY, f64::min).floor();
        let highest = losses().fold(f64::NEG_INFINITY, f64::max).ceil();
        let (lowest, highest) = if lowest < highest {
            (lowest, highest)
        } else {
            (0.0, 1.0)
        };
        Self {
            steps: steps.max(2) as f64,
            lowest,
            highest,
        }
    }

    fn x(&self, step: usize) -> f64 {
        LEFT + (step as f64 - 1.0) / (self.steps - 1.0) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, loss: f64) -> f64 {
        TOP + (self.highest - loss) / (self.highest - self.lowest) * (HEIGHT - TOP - BOTTOM)
    }

    fn draw(&self, svg: &mut String) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let mut loss = self.lowest;
        while loss <= self.highest {
            let y = self.y(loss);
            push(
                svg,
                format_args!(
                    "<line x1='{LEFT}' y1='{y:.1}' x2='{right}' y2='{y:.1}' stroke='#dddddd'/>\
                     <text x='{}' y='{:.1}' text-anchor='end'>{loss}</text>",
                    LEFT - 8.0,
                    y + 4.0
                ),
            );
            loss += 0.5;
        }
        let spacing = round_spacing(self.steps / 6.0);
        for step in (0..=self.steps as usize)
            .step_by(spacing)
            .map(|step| step.max(1))
        {
            push(
                svg,
                format_args!(
                    "<text x='{:.1}' y='{}' text-anchor='middle'>{step}</text>",
                    self.x(step),
                    bottom + 20.0
                ),
            );
        }
        let (middle_x, middle_y) = ((LEFT + right) / 2.0, (TOP + bottom) / 2.0);
        push(
            svg,
            format_args!(
                "<path d='M{LEFT} {TOP}V{bottom}H{right}' fill='none' stroke='black'/>\
                 <text x='{middle_x}' y='22' text-anchor='middle' font-size='16'>Training loss</text>\
                 <text x='{middle_x}' y='{}' text-anchor='middle'>step</text>\
                 <text transform='translate(18 {middle_y}) rotate(-90)' text-anchor='middle'>\
                 nats per token</text>",
                HEIGHT - 8.0
            ),
        );
    }
}

/// The smallest of 1, 2, 5, 10, 20, ... that is at least `least`.
fn round_spacing(least: f64) -> usize {
    let mut decade = 1;
    loop {
        for factor in [1, 2, 5] {
            if (factor * decade) as f64 >= least {
                return factor * decade;
            }
        }
        decade *= 10;
    }
}

fn push(svg: &mut String, element: std::fmt::Arguments<'_>) {
    // Writing to a string does not fail.
    let _ = writeln!(svg, "{element}");
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::Point;

    fn history(losses: &[f32]) -> History {
        let point = |&loss| Point {
            lr: 1e-3,
            loss,
            tokens_per_second: 1.0,
        };
        History {
            points: losses.iter().map(point).collect(),
        }
    }

    #[test]
    fn curves_stay_inside_of_the_axes() {
        let run = history(&[5.5, 4.0, 2.5, 2.2]);
        let axes = Axes::around(&[("a", &run)]);
        for (step, loss) in run.losses().into_iter().enumerate() {
            assert!((LEFT..=WIDTH - RIGHT).contains(&axes.x(step + 1)));
            assert!((TOP..=HEIGHT - BOTTOM).contains(&axes.y(loss)));
        }
    }

    #[test]
    fn each_run_is_drawn_and_named() {
        let (first, second) = (history(&[3.0, 2.0]), history(&[3.0, 1.0]));
        let svg = loss_curves(&[("f32", &first), ("<bf16>", &second)]);
        assert_eq!(svg.matches("<polyline").count(), 4);
        assert!(svg.contains("f32") && svg.contains("&lt;bf16&gt;"));
    }

    #[test]
    fn one_step_and_none_can_be_drawn() {
        for losses in [&[3.0][..], &[]] {
            let svg = loss_curves(&[("a", &history(losses))]);
            assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN"), "{svg}");
        }
    }

    #[test]
    fn tick_spacing_is_round() {
        assert_eq!(round_spacing(0.5), 1);
        assert_eq!(round_spacing(50.0), 50);
        assert_eq!(round_spacing(51.0), 100);
    }
}
