//! A table of all figures, on the terminal and as JSON.

#![expect(clippy::cast_precision_loss, reason = "no count here comes near 2^52")]

use std::path::Path;
use std::time::Instant;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub group: &'static str,
    pub what: String,
    pub unit: &'static str,
    pub value: f64,
    /// Range of the middle half of the rounds; `None` if there are no rounds, or the figure is computed from two others.
    pub quartiles: Option<[f64; 2]>,
    /// Upper limit; `None` if there is no target.
    pub target: Option<f64>,
    /// The figure divided by the target: above 1, the target is missed.
    pub of_target: Option<f64>,
}

impl Row {
    pub fn new(
        group: &'static str,
        what: impl Into<String>,
        value: impl Into<Sample>,
        unit: &'static str,
        target: Option<f64>,
    ) -> Self {
        let Sample { value, quartiles } = value.into();
        let of_target =
            target.map(|target| if value <= target && target == 0.0 { 1.0 } else { value / target });
        Self { group, what: what.into(), unit, value, quartiles, target, of_target }
    }
}

/// Result of many rounds.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub value: f64,
    pub quartiles: Option<[f64; 2]>,
}

impl From<f64> for Sample {
    fn from(value: f64) -> Self {
        Self { value, quartiles: None }
    }
}

impl Sample {
    /// The median of the rounds.
    pub fn median(rounds: Vec<f64>) -> Self {
        Self::with(rounds, |rounds| percentile(rounds, 50))
    }

    /// The mean of the middle half: finer than the median if the values are few integers.
    pub fn middle(rounds: Vec<f64>) -> Self {
        Self::with(rounds, |rounds| {
            let quarter = rounds.len() / 4;
            let half = &rounds[quarter..rounds.len() - quarter];
            half.iter().sum::<f64>() / half.len() as f64
        })
    }

    /// `value` gets the sorted rounds.
    fn with(mut rounds: Vec<f64>, value: fn(&mut [f64]) -> f64) -> Self {
        let quartiles = [25, 75].map(|percent| percentile(&mut rounds, percent));
        Self { value: value(&mut rounds), quartiles: Some(quartiles) }
    }
}

/// Prints the table.
pub fn print(rows: &[Row]) {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(["", "figure", "measured", "middle half", "target", "of target"]);
    let mut last = "";
    for row in rows {
        let group = if row.group == last { "" } else { row.group };
        last = row.group;
        table.add_row([
            group.to_owned(),
            row.what.clone(),
            number(row.value, row.unit),
            row.quartiles.map_or_else(String::new, |[low, high]| {
                format!("{} to {}", number(low, row.unit), number(high, row.unit))
            }),
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

/// Returns the median.
pub fn median(mut numbers: Vec<f64>) -> f64 {
    percentile(&mut numbers, 50)
}

/// Returns the number at this percentile.
pub fn percentile(numbers: &mut [f64], percent: usize) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[(numbers.len() * percent / 100).min(numbers.len() - 1)]
}

/// Returns the nanoseconds of one step of a fixed loop that accesses no memory: the current speed of the processor. That of
/// a virtual machine may have several speeds, for minutes each.
pub fn speed() -> f64 {
    const STEPS: u32 = 20_000_000;
    let begun = Instant::now();
    // xorshift32: each step depends on the one before.
    let last = (0..STEPS).fold(1_u32, |word, _| {
        let word = word ^ (word << 13);
        let word = word ^ (word >> 17);
        word ^ (word << 5)
    });
    std::hint::black_box(last);
    begun.elapsed().as_nanos() as f64 / f64::from(STEPS)
}

/// Returns the fastest and the slowest of these: figures measured at different speeds cannot be compared.
pub fn speeds(mut speeds: Vec<f64>) -> Vec<Row> {
    let mut row =
        |what: &str, percent| Row::new("Processor", what, percentile(&mut speeds, percent), "ns", None);
    vec![row("one step of a fixed loop, fastest", 0), row("one step of a fixed loop, slowest", 100)]
}
