//! Tables as kubectl prints them: two spaces between columns, no lines.

use std::time::Duration;

use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table as Grid, Width};

/// Rows under headings.
#[derive(Debug)]
pub struct Table {
    grid: Grid,
    rows: usize,
    right: Vec<usize>,
}

impl Table {
    /// Creates a table with these headings and no rows.
    pub fn new<I: IntoIterator<Item = &'static str>>(headings: I) -> Self {
        let mut table = Self::without_headings();
        table.grid.set_header(headings);
        table
    }

    /// Creates a table without headings.
    pub fn without_headings() -> Self {
        let mut grid = Grid::new();
        grid.load_style(comfy_table::presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        Self { grid, rows: 0, right: Vec::new() }
    }

    /// Aligns these columns to the right.
    #[must_use]
    pub fn right(mut self, columns: &[usize]) -> Self {
        self.right = columns.to_vec();
        self
    }

    /// Adds a row.
    pub fn row<I: IntoIterator<Item = String>>(&mut self, cells: I) {
        self.grid.add_row(cells);
        self.rows += 1;
    }

    /// Returns the table as text, or `otherwise` if there are no rows.
    pub fn render(self, otherwise: &str) -> String {
        if self.rows == 0 { format!("{otherwise}\n") } else { self.render_rows() }
    }

    /// Returns the table as text; nothing if there are no rows.
    pub fn render_rows(self) -> String {
        if self.rows == 0 { String::new() } else { self.render_below(&mut Vec::new()) }
    }

    /// Returns the table with columns at least as wide as `widths`, and sets `widths` to the widths of its columns.
    pub fn render_below(mut self, widths: &mut Vec<u16>) -> String {
        for column in &self.right {
            if let Some(column) = self.grid.column_mut(*column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        let content = self.grid.column_max_content_widths();
        widths.resize(content.len(), 1);
        for (width, own) in widths.iter_mut().zip(content) {
            *width = own.max(*width);
        }
        for (column, width) in self.grid.column_iter_mut().zip(widths.iter()) {
            column.set_padding((0, 2));
            // The constraint includes the padding.
            column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(width + 2)));
        }
        let mut text = String::new();
        for line in self.grid.lines() {
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// Returns a duration in at most two units, as kubectl writes ages: `12s`, `3m20s`, `5h`, `2d3h`.
pub fn age(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (large, small, units) = match seconds {
        0..60 => return format!("{seconds}s"),
        60..3_600 => (seconds / 60, seconds % 60, ("m", "s")),
        3_600..86_400 => (seconds / 3_600, seconds % 3_600 / 60, ("h", "m")),
        _ => (seconds / 86_400, seconds % 86_400 / 3_600, ("d", "h")),
    };
    if small == 0 { format!("{large}{}", units.0) } else { format!("{large}{}{small}{}", units.0, units.1) }
}

/// Returns a size in the largest unit of 1024 that gives at least 1: `512 B`, `1.5 KiB`, `24.0 MiB`.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    #[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
    let mut value = count as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS.get(unit).copied().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(0, "0s")]
    #[case(59, "59s")]
    #[case(60, "1m")]
    #[case(200, "3m20s")]
    #[case(3_600, "1h")]
    #[case(86_400 + 3_600 * 3 + 59, "1d3h")]
    fn ages(#[case] seconds: u64, #[case] expected: &str) {
        assert_eq!(age(Duration::from_secs(seconds)), expected);
    }

    #[rstest]
    #[case(0, "0 B")]
    #[case(1023, "1023 B")]
    #[case(1536, "1.5 KiB")]
    #[case(24 << 20, "24.0 MiB")]
    #[case(u64::MAX, "16384.0 PiB")]
    fn sizes(#[case] count: u64, #[case] expected: &str) {
        assert_eq!(bytes(count), expected);
    }
}
