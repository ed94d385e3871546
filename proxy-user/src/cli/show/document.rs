//! Answers for machines.

use serde::Serialize;

use super::error::ShowError;
use crate::cli::args::common::Output;

/// JSON with line breaks and a final one.
pub(in crate::cli) fn json(value: &impl Serialize) -> Result<String, ShowError> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    Ok(text)
}

/// The same as YAML.
pub(in crate::cli) fn yaml(value: &impl Serialize) -> Result<String, ShowError> {
    Ok(serde_saphyr::to_string(value)?)
}

/// A document for machines, in the form that was asked for.
pub(in crate::cli) fn document(value: &impl Serialize, output: Output) -> Result<String, ShowError> {
    if output == Output::Yaml { yaml(value) } else { json(value) }
}
