//! Where the state of the model lives, with and without offload, and what schedules of updates come to.

use burn_zero_offload::MemoryReport;

use crate::timeline::Updates;

const MIB: f64 = (1 << 20) as f64;

/// Bytes of one kind of state for each kind of placement.
struct Row {
    setup: String,
    weights: usize,
    gradients: usize,
    master: usize,
    moments: usize,
}

/// The table for a model of `parameters` parameters, and the memory of the run if it was offloaded, with
/// its description.
pub fn memory_table(parameters: usize, offload: Option<(&MemoryReport, &str)>) -> String {
    let mut rows = Vec::new();
    if let Some((memory, run)) = offload {
        rows.push(Row {
            setup: format!("this run: {run}, on the device"),
            weights: memory.device_weights,
            gradients: 0,
            master: 0,
            moments: 0,
        });
        rows.push(Row {
            setup: format!("this run: {run}, on the host"),
            // Delayed updates wait there for the next step.
            weights: memory.host_waiting,
            // What is kept for them: whether they are there just now depends on the schedule.
            gradients: memory.host_gradient_buffers,
            master: memory.host_master,
            moments: memory.host_moments,
        });
    }
    rows.push(Row {
        setup: "half precision without offload, on the device".into(),
        weights: 2 * parameters,
        gradients: 2 * parameters,
        master: 4 * parameters,
        moments: 8 * parameters,
    });
    let here = if offload.is_none() { "this run: " } else { "" };
    rows.push(Row {
        setup: format!("{here}f32 without offload, on the device"),
        weights: 4 * parameters,
        gradients: 4 * parameters,
        master: 0,
        moments: 8 * parameters,
    });

    let mut lines = vec![
        [
            "Model state",
            "weights",
            "gradients",
            "master",
            "m and v",
            "total",
            "per parameter",
        ]
        .map(String::from),
    ];
    lines.extend(rows.into_iter().map(|row| {
        let total = row.weights + row.gradients + row.master + row.moments;
        let per_parameter = format!("{:.1} B", total as f64 / parameters as f64);
        let [weights, gradients, master, moments, total] =
            [row.weights, row.gradients, row.master, row.moments, total].map(mebibytes);
        [
            row.setup,
            weights,
            gradients,
            master,
            moments,
            total,
            per_parameter,
        ]
    }));
    align(&lines)
}

/// A run with one schedule of its updates.
pub struct ScheduleRow {
    pub name: &'static str,
    /// In nats per byte.
    pub validation_loss: Option<f64>,
    /// In percent of that of the synchronous run.
    pub difference: Option<f64>,
    /// Median time of a step, in seconds.
    pub step: f64,
    pub updates: Option<Updates>,
}

/// What every schedule came to.
pub fn schedule_table(rows: &[ScheduleRow]) -> String {
    fn or_dash(text: Option<String>) -> String {
        text.unwrap_or_else(|| "-".into())
    }
    let mut lines = vec![
        [
            "Schedule",
            "validation loss",
            "difference",
            "step, median",
            "updates in it",
            "waited for",
        ]
        .map(String::from),
    ];
    lines.extend(rows.iter().map(|row| {
        [
            row.name.into(),
            or_dash(row.validation_loss.map(|loss| format!("{loss:.4}"))),
            or_dash(row.difference.map(|percent| format!("{percent:+.2} %"))),
            format!("{:.1} ms", 1e3 * row.step),
            or_dash(row.updates.map(|updates| {
                let took = updates.took.as_secs_f64();
                format!("{:.2} ms", 1e3 * took)
            })),
            or_dash(
                row.updates
                    .map(|updates| format!("{:.0} %", 100.0 * updates.exposed)),
            ),
        ]
    }));
    align(&lines)
}

fn mebibytes(bytes: usize) -> String {
    match bytes {
        0 => "-".into(),
        _ => format!("{:.2} MiB", bytes as f64 / MIB),
    }
}

/// Columns of equal width: the first to the left, the others to the right.
fn align<const COLUMNS: usize>(lines: &[[String; COLUMNS]]) -> String {
    let widths: [usize; COLUMNS] = std::array::from_fn(|column| {
        lines
            .iter()
            .map(|line| line[column].len())
            .max()
            .unwrap_or(0)
    });
    let mut table = String::new();
    for line in lines {
        table += &format!("{:<width$}", line[0], width = widths[0]);
        for (cell, width) in line.iter().zip(widths).skip(1) {
            table += &format!("  {cell:>width$}");
        }
        table.push('\n');
    }
    table
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_is_not_known_is_a_dash() {
        let row = |updates| ScheduleRow {
            name: "delayed",
            validation_loss: Some(2.5),
            difference: Some(0.125),
            step: 0.25,
            updates,
        };
        let updates = Updates {
            took: Duration::from_millis(12),
            exposed: 0.345,
        };
        let table = schedule_table(&[row(Some(updates)), row(None)]);
        let cells: Vec<Vec<&str>> = table
            .lines()
            .map(|line| line.split("  ").filter(|cell| !cell.is_empty()).collect())
            .collect();
        let trimmed = |line: usize| cells[line].iter().map(|c| c.trim()).collect::<Vec<_>>();
        let known = [
            "delayed", "2.5000", "+0.12 %", "250.0 ms", "12.00 ms", "34 %",
        ];
        assert_eq!(trimmed(1), known);
        assert_eq!(trimmed(2)[4..], ["-", "-"]);
    }

    #[test]
    fn without_offload_a_parameter_takes_sixteen_bytes_on_the_device() {
        let table = memory_table(1 << 20, None);
        assert_eq!(table.matches("16.0 B").count(), 2, "{table}");
        let lengths: Vec<usize> = table.lines().map(str::len).collect();
        assert!(
            lengths.iter().all(|&length| length == lengths[0]),
            "{table}"
        );
    }
}
