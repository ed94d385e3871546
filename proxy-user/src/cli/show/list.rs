//! A list: each command filters its rows; they are sorted, written and watched here for all commands.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use serde::ser::{Serialize, SerializeMap as _, Serializer};
use serde_json::Value;

use super::document::{json, yaml};
use super::error::ShowError;
use super::table::Table;
use crate::cli::args::list::ListOutput;
use crate::model::nearest::{did_you_mean, nearest};

/// In which forms of the table a column is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Both,
    Wide,
    Narrow,
}

/// A column of the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    heading: &'static str,
    /// The field of the JSON form by which it is sorted, where its cells are for people only.
    field: Option<&'static str>,
    form: Form,
    is_number: bool,
    is_clock: bool,
}

impl Column {
    pub(super) const fn new(heading: &'static str) -> Self {
        Self { heading, field: None, form: Form::Both, is_number: false, is_clock: false }
    }

    /// Shown with `-o wide` only.
    pub(super) const fn wide(self) -> Self {
        Self { form: Form::Wide, ..self }
    }

    /// Not shown with `-o wide`.
    pub(super) const fn narrow(self) -> Self {
        Self { form: Form::Narrow, ..self }
    }

    /// Sorted by this field of the JSON form: its cells have units, or words beside a number.
    pub(super) const fn sorted_by(self, field: &'static str) -> Self {
        Self { field: Some(field), ..self }
    }

    /// Numbers stand under each other.
    pub(super) const fn number(self) -> Self {
        Self { is_number: true, ..self }
    }

    /// It runs by itself: that is no change which a watch would print.
    pub(super) const fn clock(self) -> Self {
        Self { is_clock: true, ..self }
    }
}

/// A row.
#[derive(Clone, Debug)]
pub(super) struct Row<T> {
    /// The list of the JSON form in which it is.
    pub(super) group: &'static str,
    /// What `-o name` prints.
    pub(super) name: String,
    /// What tells it from the others, for as long as it is there.
    pub(super) key: String,
    /// One cell for each column, whether it is shown or not.
    pub(super) cells: Vec<String>,
    /// Its JSON form.
    pub(super) value: T,
}

/// Rows under headings.
#[derive(Clone, Debug)]
pub struct List<T> {
    group: &'static str,
    columns: Vec<Column>,
    rows: Vec<Row<T>>,
    otherwise: &'static str,
}

impl<T: Serialize> List<T> {
    /// `{"<group>": [...]}`; `otherwise` is what the table says when there is no row.
    pub(super) fn new(
        group: &'static str,
        columns: impl IntoIterator<Item = Column>,
        otherwise: &'static str,
    ) -> Self {
        Self { group, columns: columns.into_iter().collect(), rows: Vec::new(), otherwise }
    }

    pub(super) fn push(&mut self, row: Row<T>) {
        self.rows.push(row);
    }

    pub(super) fn rows(&self) -> &[Row<T>] {
        &self.rows
    }

    /// Sorts by a field of the JSON form, or by a column. Rows that are equal in it stay as they were.
    pub fn sort_by(&mut self, field: &str) -> Result<(), ShowError> {
        if self.rows.is_empty() {
            return Ok(());
        }
        // As kubectl writes it, too: `.connections`, `{.connections}`.
        let asked = field.trim_start_matches('{').trim_end_matches('}').trim_start_matches('.');
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

    fn no_field(&self, asked: &str, values: &[Value]) -> ShowError {
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
        ShowError::NoField { asked: asked.to_owned(), near, known: known.join(", ") }
    }

    /// All of it.
    pub fn render(&self, output: ListOutput, with_headings: bool) -> Result<String, ShowError> {
        match output {
            ListOutput::Json => json(self),
            ListOutput::Yaml => yaml(self),
            ListOutput::Name => Ok(self.names()),
            ListOutput::Text | ListOutput::Wide => {
                let mut table = self.table(output, with_headings, false);
                for row in &self.rows {
                    table.row(self.cells(row, output));
                }
                Ok(table.render(self.otherwise))
            }
        }
    }

    fn names(&self) -> String {
        // A Service with several addresses is one name.
        let mut met = BTreeSet::new();
        let names =
            self.rows.iter().map(|row| &*row.name).filter(|name| !name.is_empty() && met.insert(*name));
        names.flat_map(|name| [name, "\n"]).collect()
    }

    /// An empty table with the columns of that form; for a watch, with the kind of event in front.
    pub(super) fn table(&self, output: ListOutput, with_headings: bool, with_event: bool) -> Table {
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

    fn shown(&self, output: ListOutput) -> impl Iterator<Item = (usize, Column)> {
        let columns = self.columns.iter().copied().enumerate();
        let other = if output == ListOutput::Wide { Form::Narrow } else { Form::Wide };
        columns.filter(move |(_, column)| column.form != other)
    }

    pub(super) fn cells(&self, row: &Row<T>, output: ListOutput) -> Vec<String> {
        let cells = self.shown(output).map(|(position, _)| row.cells.get(position).cloned());
        cells.map(Option::unwrap_or_default).collect()
    }

    /// The cells in which a change counts.
    pub(super) fn state(&self, row: &Row<T>) -> String {
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

/// Numbers as numbers, addresses as addresses, anything else as text; what is missing comes first.
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

/// `10.96.0.10:80/TCP`, or without port or protocol.
fn socket(text: &str) -> Option<(IpAddr, u16, &str)> {
    let (address, protocol) = text.split_once('/').unwrap_or((text, ""));
    let of_socket = address.parse::<SocketAddr>().ok().map(|socket| (socket.ip(), socket.port(), protocol));
    of_socket.or_else(|| Some((address.parse().ok()?, 0, protocol)))
}

#[cfg(test)]
mod tests;
