//! Writes a list once, or continues with its changes.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::atomic::Ordering;

use serde::Serialize;

use super::document::yaml;
use super::error::ListError;
use super::input::input_end;
use super::list::{List, Row};
use crate::args::list::{Output, ViewArgs};

/// Writes the list that `read` returns; with `--watch`, reads it repeatedly until the reader of standard output has gone or,
/// with `--end-with-stdin`, until standard input ends.
pub fn write_list<T: Serialize, E: From<ListError> + From<io::Error>>(
    options: &ViewArgs,
    out: &mut impl Write,
    mut read: impl FnMut() -> Result<List<T>, E>,
) -> Result<(), E> {
    let mut sorted = || -> Result<List<T>, E> {
        let mut list = read()?;
        if let Some(field) = &options.sort_by {
            list.sort_by(field)?;
        }
        Ok(list)
    };
    let output = options.format.output.output;
    if !options.watch {
        let list = sorted()?;
        out.write_all(list.render(output, !options.format.no_headers)?.as_bytes())?;
        let note = list.note(output).map(str::to_owned);
        let unchecked = options.sort_by.as_deref().and_then(|field| list.unchecked(field));
        for note in note.into_iter().chain(unchecked) {
            writeln!(io::stderr(), "{note}")?;
        }
        return Ok(());
    }
    let mut watch = Watch::default();
    let has_ended = options.end_with_stdin.then(input_end);
    while !has_ended.as_ref().is_some_and(|ended| ended.load(Ordering::Relaxed)) {
        out.write_all(watch.changes(&sorted()?, options)?.as_bytes())?;
        out.flush()?;
        std::thread::sleep(options.interval);
    }
    Ok(())
}

/// The rows that were printed last.
#[derive(Default)]
pub struct Watch {
    known: BTreeMap<String, PrintedRow>,
    widths: Vec<u16>,
}

struct PrintedRow {
    state: String,
    /// Cells to print when the row disappears.
    cells: Vec<String>,
    json: serde_json::Value,
    name: String,
}

impl Watch {
    /// Returns lines for rows that are new or changed since the last call; only the first lines have headings.
    pub fn changes<T: Serialize>(&mut self, list: &List<T>, options: &ViewArgs) -> Result<String, ListError> {
        let is_first = self.widths.is_empty();
        let output = options.format.output.output;
        let mut now = BTreeMap::new();
        let mut lines = Vec::new();
        for row in list.rows() {
            let known = PrintedRow::of(list, row, output)?;
            match self.known.get(&row.key) {
                None => lines.push(("ADDED", row.key.clone())),
                Some(before) if before.state != known.state => lines.push(("MODIFIED", row.key.clone())),
                Some(_) => {}
            }
            now.insert(row.key.clone(), known);
        }
        let before = std::mem::replace(&mut self.known, now);
        let gone = before.iter().filter(|(key, _)| !self.known.contains_key(*key));
        let mut lines: Vec<(&str, &PrintedRow)> =
            lines.iter().filter_map(|(event, key)| Some((*event, self.known.get(key)?))).collect();
        if options.output_watch_events {
            lines.extend(gone.map(|(_, known)| ("DELETED", known)));
        }
        if !output.is_text() {
            return lines.into_iter().map(|(event, known)| document(event, known, options)).collect();
        }
        let with_headings = is_first && !options.format.no_headers;
        let mut table = list.table(output, with_headings, options.output_watch_events);
        let is_empty = lines.is_empty();
        for (event, known) in lines {
            let event = options.output_watch_events.then(|| event.to_owned());
            table.row(event.into_iter().chain(known.cells.iter().cloned()));
        }
        // Headings are printed with the first line.
        if is_empty {
            return Ok(String::new());
        }
        if is_first && options.output_watch_events {
            // All events fit, so that the columns never move.
            self.widths.push("MODIFIED".len() as u16);
        }
        Ok(table.render_below(&mut self.widths))
    }
}

impl PrintedRow {
    fn of<T: Serialize>(list: &List<T>, row: &Row<T>, output: Output) -> Result<Self, ListError> {
        Ok(Self {
            state: list.state(row),
            cells: list.cells(row, output),
            json: serde_json::to_value(&row.value)?,
            name: row.name.clone(),
        })
    }
}

/// Returns one object: JSON on one line, or a separate YAML document.
fn document(event: &str, known: &PrintedRow, options: &ViewArgs) -> Result<String, ListError> {
    let object = if options.output_watch_events {
        serde_json::json!({"type": event, "object": known.json})
    } else {
        known.json.clone()
    };
    Ok(match options.format.output.output {
        Output::Yaml => format!("---\n{}", yaml(&object)?),
        Output::Name => format!("{}\n", known.name),
        _ => format!("{}\n", serde_json::to_string(&object)?),
    })
}
