//! Where the state of the model lives, with and without offload.

use burn_zero_offload::MemoryReport;

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
            weights: 0,
            gradients: memory.host_gradients,
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
    use super::*;

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
