//! Output for programs.

use serde::Serialize;

use super::error::ShowError;
use crate::cli::args::list::Output;

/// Returns JSON with line breaks, also at the end.
pub(in crate::cli) fn json(value: &impl Serialize) -> Result<String, ShowError> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    Ok(text)
}

/// Returns YAML.
pub(in crate::cli) fn yaml(value: &impl Serialize) -> Result<String, ShowError> {
    Ok(serde_saphyr::to_string(value)?)
}

/// Returns a document for programs in the requested format.
pub(crate) fn document(value: &impl Serialize, output: Output) -> Result<String, ShowError> {
    if output == Output::Yaml { yaml(value) } else { json(value) }
}
