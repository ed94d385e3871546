//! A list: each command filters its rows; this module sorts, writes and watches them for all commands.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use serde::ser::{Serialize, SerializeMap as _, Serializer};
use serde_json::Value;

use super::document::{json, yaml};
use super::error::ListError;
use super::table::Table;
use crate::args::list::Output;
use proxy_core::model::nearest::{did_you_mean, nearest};

/// Formats of the table in which a column is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Both,
    Wide,
    Narrow,
    Neither,
}

/// A column of the table.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Column {
    heading: &'static str,
    /// Field of the JSON output to sort by, if the cells are only for people.
    field: Option<&'static str>,
    form: Form,
    is_number: bool,
    is_clock: bool,
}

impl Column {
    /// Creates a column that every table has.
    pub const fn new(heading: &'static str) -> Self {
        Self { heading, field: None, form: Form::Both, is_number: false, is_clock: false }
    }

    /// Returns the heading.
    pub const fn heading(self) -> &'static str {
        self.heading
    }

    /// Shows the column only with `-o wide`.
    pub const fn wide(self) -> Self {
        Self { form: Form::Wide, ..self }
    }

    /// Hides the column with `-o wide`.
    pub const fn narrow(self) -> Self {
        Self { form: Form::Narrow, ..self }
    }

    /// Never shows the column.
    pub const fn hidden(self) -> Self {
        Self { form: Form::Neither, ..self }
    }

    /// Sorts the column by this field of the JSON output, because its cells have units or words.
    pub const fn sorted_by(self, field: &'static str) -> Self {
        Self { field: Some(field), ..self }
    }

    /// Aligns the column to the right.
    pub const fn number(self) -> Self {
        Self { is_number: true, ..self }
    }

    /// The column changes with time alone; a watch does not print such a change.
    pub const fn clock(self) -> Self {
        Self { is_clock: true, ..self }
    }
}

/// A row.
#[derive(Clone, Debug)]
pub struct Row<T> {
    /// Name of the JSON list that contains the row.
    pub group: &'static str,
    /// Output of the row with `-o name`.
    pub name: String,
    /// Identifies the row for as long as it exists.
    pub key: String,
    /// One cell for each column, whether it is shown or not.
    pub cells: Vec<String>,
    /// The row in JSON.
    pub value: T,
}

/// Rows with columns.
#[derive(Clone, Debug)]
pub struct List<T> {
    group: &'static str,
    columns: Vec<Column>,
    rows: Vec<Row<T>>,
    otherwise: &'static str,
}

impl<T: Serialize> List<T> {
    /// Creates the list `{"<group>": [...]}`; `otherwise` tells people that there are no rows.
    pub fn new(
        group: &'static str,
        columns: impl IntoIterator<Item = Column>,
        otherwise: &'static str,
    ) -> Self {
        Self { group, columns: columns.into_iter().collect(), rows: Vec::new(), otherwise }
    }

    /// Adds a row.
    pub fn push(&mut self, row: Row<T>) {
        self.rows.push(row);
    }

    /// Keeps the rows for which `is_kept` is true.
    pub fn retain(&mut self, is_kept: impl FnMut(&Row<T>) -> bool) {
        self.rows.retain(is_kept);
    }

    /// Reverses the order of the rows.
    pub fn reverse(&mut self) {
        self.rows.reverse();
    }

    /// Returns the rows.
    pub fn rows(&self) -> &[Row<T>] {
        &self.rows
    }

    /// Sorts by a field of the JSON output, or by a column. The sort is stable.
    pub fn sort_by(&mut self, field: &str) -> Result<(), ListError> {
        if self.rows.is_empty() {
            return Ok(());
        }
        let asked = field_name(field);
        let values = self.rows.iter().map(|row| serde_json::to_value(&row.value));
        let values: Vec<Value> = values.collect::<Result<_, _>>()?;
        let mut columns = self.columns.iter().enumerate();
        let column = columns.find(|(_, column)| column.heading.eq_ignore_ascii_case(asked));
        let pointer = |field: &str| format!("/{}", field.replace('.', "/"));
        let of_field = |field: &str| -> Vec<Value> {
            let pointer = pointer(field);
            values.iter().map(|value| value.pointer(&pointer).cloned().unwrap_or_default()).collect()
        };
        let is_field = values.iter().any(|value| value.pointer(&pointer(asked)).is_some());
        let keys = match column {
            _ if is_field => of_field(asked),
            Some((_, Column { field: Some(field), .. })) => of_field(field),
            Some((position, _)) => {
                let cell = |row: &Row<T>| row.cells.get(position).cloned().unwrap_or_default().into();
                self.rows.iter().map(cell).collect()
            }
            None => return Err(self.no_field(asked, &values)),
        };
        let mut keyed: Vec<(Value, Row<T>)> = keys.into_iter().zip(self.rows.drain(..)).collect();
        keyed.sort_by(|(one, _), (other, _)| compare(one, other));
        self.rows = keyed.into_iter().map(|(_, row)| row).collect();
        Ok(())
    }

    fn no_field(&self, asked: &str, values: &[Value]) -> ListError {
        let fields = values.iter().filter_map(Value::as_object).flat_map(|object| object.keys());
        let fields: BTreeSet<&str> = fields.map(String::as_str).collect();
        let is_new = |heading: &&str| !fields.iter().any(|field| field.eq_ignore_ascii_case(heading));
        let mut known: Vec<&str> = fields.iter().copied().collect();
        for heading in self.columns.iter().map(|column| column.heading).filter(is_new) {
            if !known.contains(&heading) {
                known.push(heading);
            }
        }
        let near = did_you_mean(&nearest(asked, known.iter().copied()));
        ListError::NoField { asked: asked.to_owned(), near, known: known.join(", ") }
    }

    /// Returns the message for a list without rows, whose fields are not known, if no column has this name.
    pub fn unchecked(&self, field: &str) -> Option<String> {
        let asked = field_name(field);
        let is_column =
            |column: &Column| column.heading.eq_ignore_ascii_case(asked) || column.field == Some(asked);
        let is_unknown = self.rows.is_empty() && !self.columns.iter().any(is_column);
        is_unknown
            .then(|| format!("--sort-by {asked}: no such column; the fields of an empty list are not known"))
    }

    /// Renders the list; nothing if there are no rows, except in a document.
    pub fn render(&self, output: Output, with_headings: bool) -> Result<String, ListError> {
        match output {
            Output::Json | Output::Otlp => json(self),
            Output::Yaml => yaml(self),
            Output::Name => Ok(self.names()),
            Output::Text | Output::Wide | Output::Short => {
                let mut table = self.table(output, with_headings, false);
                for row in &self.rows {
                    table.row(self.cells(row, output));
                }
                Ok(table.render_rows())
            }
        }
    }

    /// Returns the message for a list without rows; it does not belong to the output.
    pub fn note(&self, output: Output) -> Option<&'static str> {
        (self.rows.is_empty() && !output.is_document()).then_some(self.otherwise)
    }

    /// Returns the columns.
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn names(&self) -> String {
        // A Service with several addresses is printed once.
        let mut met = BTreeSet::new();
        let names =
            self.rows.iter().map(|row| &*row.name).filter(|name| !name.is_empty() && met.insert(*name));
        names.flat_map(|name| [name, "\n"]).collect()
    }

    /// Returns an empty table with the columns of this format; for a watch, the first column is the kind of event.
    pub fn table(&self, output: Output, with_headings: bool, with_event: bool) -> Table {
        let event = with_event.then_some(Column::new("EVENT"));
        let columns: Vec<Column> =
            event.into_iter().chain(self.shown(output).map(|(_, column)| column)).collect();
        let table = if with_headings {
            Table::new(columns.iter().map(|column| column.heading))
        } else {
            Table::without_headings()
        };
        let numbers = columns.iter().enumerate().filter(|(_, column)| column.is_number);
        table.right(&numbers.map(|(position, _)| position).collect::<Vec<_>>())
    }

    fn shown(&self, output: Output) -> impl Iterator<Item = (usize, Column)> {
        let columns = self.columns.iter().copied().enumerate();
        let other = if output == Output::Wide { Form::Narrow } else { Form::Wide };
        columns.filter(move |(_, column)| column.form != other && column.form != Form::Neither)
    }

    /// Returns the cells that this format shows.
    pub fn cells(&self, row: &Row<T>, output: Output) -> Vec<String> {
        let cells = self.shown(output).map(|(position, _)| row.cells.get(position).cloned());
        cells.map(Option::unwrap_or_default).collect()
    }

    /// Returns the cells in which a change counts.
    pub fn state(&self, row: &Row<T>) -> String {
        let cells = self.columns.iter().zip(&row.cells).filter(|(column, _)| !column.is_clock);
        cells.flat_map(|(_, cell)| [cell, "\n"]).collect()
    }
}

impl<T: Serialize> Serialize for List<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut groups = vec![self.group];
        for row in &self.rows {
            if !groups.contains(&row.group) {
                groups.push(row.group);
            }
        }
        let mut map = serializer.serialize_map(Some(groups.len()))?;
        for group in groups {
            let rows = self.rows.iter().filter(|row| row.group == group).map(|row| &row.value);
            map.serialize_entry(group, &rows.collect::<Vec<_>>())?;
        }
        map.end()
    }
}

/// Returns the name of a field; kubectl's notations are accepted as well: `.connections`, `{.connections}`.
fn field_name(field: &str) -> &str {
    field.trim_start_matches('{').trim_end_matches('}').trim_start_matches('.')
}

/// Compares numbers as numbers, addresses as addresses, and anything else as text; missing values come first.
fn compare(one: &Value, other: &Value) -> Ordering {
    if let (Some(one), Some(other)) = (one.as_f64(), other.as_f64()) {
        return one.total_cmp(&other);
    }
    if let (Some(one), Some(other)) = (one.as_str(), other.as_str()) {
        return match (socket(one), socket(other)) {
            (Some(one), Some(other)) => one.cmp(&other),
            _ => match (one.parse::<f64>(), other.parse::<f64>()) {
                (Ok(one), Ok(other)) => one.total_cmp(&other),
                _ => one.cmp(other),
            },
        };
    }
    let rank = |value: &Value| (!value.is_null(), value.to_string());
    rank(one).cmp(&rank(other))
}

/// Parses `10.96.0.10:80/TCP`, with or without port and protocol.
fn socket(text: &str) -> Option<(IpAddr, u16, &str)> {
    let (address, protocol) = text.split_once('/').unwrap_or((text, ""));
    let of_socket = address.parse::<SocketAddr>().ok().map(|socket| (socket.ip(), socket.port(), protocol));
    of_socket.or_else(|| Some((address.parse().ok()?, 0, protocol)))
}

#[cfg(test)]
mod tests;
