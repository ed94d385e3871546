//! Output for programs.

use serde::Serialize;

use super::error::ListError;
use crate::args::list::Output;

/// Returns JSON with line breaks, also at the end.
pub fn json(value: &impl Serialize) -> Result<String, ListError> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    Ok(text)
}

/// Returns YAML.
pub fn yaml(value: &impl Serialize) -> Result<String, ListError> {
    Ok(serde_saphyr::to_string(value)?)
}

/// Returns a document for programs in the requested format.
pub fn document(value: &impl Serialize, output: Output) -> Result<String, ListError> {
    if output == Output::Yaml { yaml(value) } else { json(value) }
}
