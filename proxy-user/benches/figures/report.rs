//! One table of what was measured, on the terminal and as JSON.

use std::path::Path;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub group: &'static str,
    pub what: String,
    pub unit: &'static str,
    pub value: f64,
    /// At most this much; `None` where there is no target.
    pub target: Option<f64>,
    /// The figure by the target: above 1 the target is missed.
    pub of_target: Option<f64>,
}

impl Row {
    pub fn new(
        group: &'static str,
        what: impl Into<String>,
        value: f64,
        unit: &'static str,
        target: Option<f64>,
    ) -> Self {
        let of_target = target.map(|target| value / target);
        Self { group, what: what.into(), unit, value, target, of_target }
    }
}

/// Prints the table.
pub fn print(rows: &[Row]) {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(["", "figure", "measured", "target", "of target"]);
    let mut last = "";
    for row in rows {
        let group = if row.group == last { "" } else { row.group };
        last = row.group;
        table.add_row([
            group.to_owned(),
            row.what.clone(),
            number(row.value, row.unit),
            row.target.map_or_else(String::new, |target| format!("<= {}", number(target, row.unit))),
            row.of_target.map_or_else(String::new, |ratio| {
                format!("{ratio:.2}{}", if ratio > 1.0 { " MISSED" } else { "" })
            }),
        ]);
    }
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    println!("{table}");
}

fn number(value: f64, unit: &str) -> String {
    let digits = if unit == "x" { 3 } else { usize::from(value.abs() < 100.0) };
    format!("{value:.digits$} {unit}")
}

/// Writes the rows as JSON.
pub fn write(rows: &[Row], path: &Path) {
    let text = serde_json::to_string_pretty(rows).unwrap();
    std::fs::write(path, text).unwrap();
    println!("{}", path.display());
}

/// The middle of the numbers.
pub fn median(mut numbers: Vec<f64>) -> f64 {
    percentile(&mut numbers, 50)
}

/// The mean of the middle half: finer than the median where the numbers are few whole ones.
pub fn middle(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let quarter = numbers.len() / 4;
    let half = &numbers[quarter..numbers.len() - quarter];
    half.iter().sum::<f64>() / half.len() as f64
}

/// The number that so many percent are not above.
pub fn percentile(numbers: &mut [f64], percent: usize) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[(numbers.len() * percent / 100).min(numbers.len() - 1)]
}
