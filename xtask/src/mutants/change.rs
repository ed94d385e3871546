//! A change of the source.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::Deserialize;

/// A change, as `cargo mutants --list --json` tells it.
#[derive(Clone, Debug, Deserialize)]
pub struct Change {
    /// What it does, after file, line and column.
    pub name: String,
    /// From the root of the repository.
    pub file: String,
    /// Where.
    pub span: Span,
}

/// From where on.
#[derive(Clone, Debug, Deserialize)]
pub struct Span {
    /// The first character.
    pub start: Place,
}

/// A place in a file.
#[derive(Clone, Debug, Deserialize)]
pub struct Place {
    /// From 1 on.
    pub line: usize,
}

impl Change {
    /// What it does, without its place.
    pub fn what(&self) -> &str {
        self.name.splitn(4, ':').nth(3).unwrap_or(&self.name).trim()
    }

    /// The line's text.
    pub fn line(&self, root: &Path) -> Result<String> {
        let text = fs::read_to_string(root.join(&self.file)).with_context(|| self.file.clone())?;
        Ok(text.lines().nth(self.span.start.line.saturating_sub(1)).unwrap_or_default().trim().to_owned())
    }
}
