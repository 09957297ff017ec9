//! Rows of results, and the Markdown table they become.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// What is to be said about a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Within its bound.
    Pass,
    /// Out of its bound.
    Fail,
    /// A measurement without a bound.
    Info,
    /// Not run.
    Skip,
}

/// One result.
#[derive(Clone, Debug)]
pub struct Row {
    name: String,
    value: String,
    unit: String,
    verdict: Verdict,
}

impl Row {
    /// A measurement without a bound.
    pub fn info(name: impl Into<String>, value: impl ToString, unit: &str) -> Self {
        Self {
            name: name.into(),
            value: value.to_string(),
            unit: unit.into(),
            verdict: Verdict::Info,
        }
    }

    /// A result with a bound, within which it `holds` or not.
    pub fn check(name: impl Into<String>, value: impl ToString, unit: &str, holds: bool) -> Self {
        Self {
            verdict: if holds { Verdict::Pass } else { Verdict::Fail },
            ..Self::info(name, value, unit)
        }
    }

    /// Something that was not run, and why.
    pub fn skip(name: impl Into<String>, reason: impl ToString) -> Self {
        Self {
            verdict: Verdict::Skip,
            ..Self::info(name, reason, "")
        }
    }
}

/// A number with three significant digits or more, without an exponent where it can be read.
pub fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        v if v < 1e-3 => format!("{value:.2e}"),
        v if v < 10.0 => format!("{value:.3}"),
        v if v < 100.0 => format!("{value:.2}"),
        v if v < 1000.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// Bytes as megabytes (10^6).
pub fn megabytes(bytes: u64) -> String {
    number(bytes as f64 / 1e6)
}

/// All results so far. Kept on disk too, as a device that hangs must not take them with it.
pub struct Table {
    header: String,
    file: Option<PathBuf>,
    rows: Mutex<Vec<(&'static str, Row)>>,
}

impl Table {
    /// A table without rows below `header`, kept in `file` if there is one.
    pub fn new(header: String, file: Option<PathBuf>) -> Self {
        Self {
            header,
            file,
            rows: Mutex::default(),
        }
    }

    /// Adds the rows of a section.
    pub fn add(&self, section: &'static str, rows: Vec<Row>) {
        let mut all = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend(rows.into_iter().map(|row| (section, row)));
        drop(all);
        if let Some(file) = &self.file
            && let Err(error) = std::fs::write(file, self.print())
        {
            eprintln!("gpu-check: cannot write {}: {error}", file.display());
        }
    }

    /// Whether a row is out of its bound.
    pub fn failed(&self) -> bool {
        let rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        rows.iter().any(|(_, row)| row.verdict == Verdict::Fail)
    }

    /// The table in Markdown.
    pub fn print(&self) -> String {
        let rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let mut text = format!("{}\n\n", self.header);
        text += "| section | what | value | unit | verdict |\n|---|---|---:|---|---|\n";
        let mut before = "";
        for (section, row) in rows.iter() {
            let verdict = match row.verdict {
                Verdict::Pass => "pass",
                Verdict::Fail => "**FAIL**",
                Verdict::Info => "info",
                Verdict::Skip => "skip",
            };
            let name = if *section == before { "" } else { section };
            let cell = |text: &str| text.replace('|', "/").replace('\n', " ");
            let (what, value) = (cell(&row.name), cell(&row.value));
            text += &format!("| {name} | {what} | {value} | {} | {verdict} |\n", row.unit);
            before = section;
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_a_table_and_one_failure_fails_it() {
        let table = Table::new("# Title".into(), None);
        table.add(
            "one",
            vec![Row::check("a", 1, "MB", true), Row::info("b | c", 2, "s")],
        );
        assert!(!table.failed());
        table.add("two", vec![Row::check("d", "x", "", false)]);
        assert!(table.failed());
        let text = table.print();
        assert!(text.starts_with("# Title\n\n| section |"), "{text}");
        assert!(text.contains("|  | b / c | 2 | s | info |"), "{text}");
        assert!(text.contains("| two | d | x |  | **FAIL** |"), "{text}");
    }

    #[test]
    fn numbers_keep_three_digits() {
        let printed = [0.0, 1.5e-7, 0.1234, 12.345, 123.45, 98765.4].map(number);
        assert_eq!(
            printed,
            ["0", "1.50e-7", "0.123", "12.35", "123.5", "98765"]
        );
    }
}
