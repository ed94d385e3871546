//! Tables that are one for all nodes: written once, or followed by their changes.

use std::io::Write;

use serde::Serialize;
use serde_json::{Map, Value};

use super::answers::Outcome;
use super::error::KubectlError;
use crate::args::list::ViewArgs;
use crate::output::{List, ListError, Watch, document};

/// A table of all nodes.
pub(super) struct MergedList<T> {
    pub list: List<T>,
    /// Lines below the table, for people.
    pub notes: Vec<String>,
    /// What nodes report, and that there are no rows, for standard error.
    pub messages: Vec<String>,
    /// What the document has besides the rows, or instead of them.
    pub document: Map<String, Value>,
    pub is_well: bool,
}

/// Writes the table that `read` returns; with `--watch`, asks all nodes repeatedly until the command is interrupted.
pub(super) async fn write<T: Serialize>(
    options: &ViewArgs,
    out: &mut impl Write,
    err: &mut impl Write,
    mut read: impl AsyncFnMut() -> Result<MergedList<T>, KubectlError>,
) -> Result<Outcome, KubectlError> {
    let output = options.format.output.output;
    let mut sorted = async || -> Result<MergedList<T>, KubectlError> {
        let mut all = read().await?;
        if let Some(field) = &options.sort_by {
            all.list.sort_by(field)?;
        }
        Ok(all)
    };
    if !options.watch {
        let all = sorted().await?;
        let mut outcome = Outcome::new(String::new(), all.is_well);
        if output.is_document() {
            let mut whole = serde_json::to_value(&all.list).map_err(ListError::from)?;
            if let Value::Object(whole) = &mut whole {
                whole.extend(all.document);
            }
            outcome.stdout = document(&whole, output)?;
        } else {
            outcome.stdout = all.list.render(output, !options.format.no_headers)?;
            if output.is_text() {
                outcome.stdout.extend(all.notes.into_iter().flat_map(|note| [note, "\n".to_owned()]));
            }
            outcome.stderr.extend(all.messages.into_iter().flat_map(|line| [line, "\n".to_owned()]));
        }
        return Ok(outcome);
    }
    let (mut watch, mut shown) = (Watch::default(), Vec::new());
    loop {
        let all = sorted().await?;
        out.write_all(watch.changes(&all.list, options)?.as_bytes())?;
        let notes = if output.is_text() { all.notes } else { Vec::new() };
        for note in notes.iter().filter(|note| !shown.contains(*note)) {
            writeln!(out, "{note}")?;
        }
        for message in all.messages.iter().filter(|message| !shown.contains(*message)) {
            writeln!(err, "{message}")?;
        }
        out.flush()?;
        shown = [notes, all.messages].concat();
        tokio::time::sleep(options.interval).await;
    }
}
