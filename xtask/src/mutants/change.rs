//! A change of the source.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::Deserialize;

/// A change, as `cargo mutants --list --json` prints it.
#[derive(Clone, Debug, Deserialize)]
pub struct Change {
    /// File, line and column, and a description of the change.
    pub name: String,
    /// Path from the root of the repository.
    pub file: String,
    /// Position of the change.
    pub span: Span,
}

/// A range of a file, of which only the start is used.
#[derive(Clone, Debug, Deserialize)]
pub struct Span {
    /// Position of the first character.
    pub start: Place,
}

/// A place in a file.
#[derive(Clone, Debug, Deserialize)]
pub struct Place {
    /// Line number from 1.
    pub line: usize,
}

impl Change {
    /// Returns the description without the position.
    pub fn what(&self) -> &str {
        self.name.splitn(4, ':').nth(3).unwrap_or(&self.name).trim()
    }

    /// Returns the text of the line, trimmed.
    pub fn line(&self, root: &Path) -> Result<String> {
        let text = fs::read_to_string(root.join(&self.file)).with_context(|| self.file.clone())?;
        Ok(text.lines().nth(self.span.start.line.saturating_sub(1)).unwrap_or_default().trim().to_owned())
    }
}
