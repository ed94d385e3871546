//! `xtask/explained.json`: the reasons why a line needs no test that runs it, or a change no test that detects it.
//!
//! An entry contains the text of its line, not the number: the entry stays valid if lines above change, and becomes invalid
//! if the line itself changes.

use std::fs;

use anyhow::{Context as _, Result};
use serde::Deserialize;

use crate::workspace::Workspace;

/// Path of the file from the root of the repository.
pub const FILE: &str = "xtask/explained.json";

/// Contents of the file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Explained {
    /// Lines that no test runs.
    pub lines: Vec<Lines>,
    /// Changes that no test detects.
    pub changes: Vec<Change>,
}

/// Lines of a file that no test runs, with one reason.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lines {
    /// Path from the root of the repository.
    pub file: String,
    /// Texts of the lines, trimmed; if a text occurs in several places, preceded by the line before and a line break.
    pub lines: Vec<String>,
    /// The reason.
    pub why: String,
}

/// Changes of a line that no test detects, with one reason.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Change {
    /// Path from the root of the repository.
    pub file: String,
    /// Text of the line, trimmed.
    pub line: String,
    /// Descriptions of the changes by cargo-mutants, without the position.
    pub changes: Vec<String>,
    /// The reason.
    pub why: String,
}

impl Explained {
    /// Reads the file.
    pub fn read(workspace: &Workspace) -> Result<Self> {
        let text =
            fs::read_to_string(workspace.root().join(FILE)).with_context(|| format!("cannot read {FILE}"))?;
        serde_json::from_str(&text)
            .with_context(|| format!("{FILE} does not have the format of xtask/src/explained.rs"))
    }

    /// Returns the reason why no test runs the line with this text, which follows the line `before`.
    #[must_use]
    pub fn line(&self, file: &str, before: &str, text: &str) -> Option<&str> {
        let both = format!("{}\n{}", before.trim(), text.trim());
        let is_it = |entry: &&Lines| {
            entry.file == file && entry.lines.iter().any(|line| line == text.trim() || *line == both)
        };
        self.lines.iter().find(is_it).map(|entry| &*entry.why)
    }

    /// Returns the reason why no test detects this change of the line with this text.
    #[must_use]
    pub fn change(&self, file: &str, text: &str, change: &str) -> Option<&str> {
        let is_it = |entry: &&Change| {
            entry.file == file
                && entry.line == text.trim()
                && entry.changes.iter().any(|known| known == change)
        };
        self.changes.iter().find(is_it).map(|entry| &*entry.why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_explained_is_in_the_source() {
        let workspace = Workspace::find().unwrap();
        let explained = Explained::read(&workspace).unwrap();
        let lines =
            explained.lines.iter().flat_map(|e| e.lines.iter().map(move |line| (&e.file, line, &e.why)));
        let changes = explained.changes.iter().map(|e| (&e.file, &e.line, &e.why));
        for (file, line, why) in lines.chain(changes) {
            let text = fs::read_to_string(workspace.root().join(file)).unwrap();
            let text: String = text.lines().flat_map(|line| [line.trim(), "\n"]).collect();
            assert!(format!("\n{text}").contains(&format!("\n{line}\n")), "{file} has no line `{line}`");
            assert!(!why.is_empty(), "{file}: {line}");
        }
    }

    #[test]
    fn an_entry_is_for_its_own_line_only() {
        let text = r#"{"lines": [{"file": "a.rs", "lines": ["x();", "one {\nz();"], "why": "a"}],
            "changes": [{"file": "a.rs", "line": "x();", "changes": ["replace x with ()"], "why": "b"}]}"#;
        let explained: Explained = serde_json::from_str(text).unwrap();
        assert_eq!(explained.line("a.rs", "", "    x();"), Some("a"));
        assert_eq!((explained.line("b.rs", "", "x();"), explained.line("a.rs", "", "y();")), (None, None));
        assert_eq!(explained.line("a.rs", "  one {", "    z();"), Some("a"));
        assert_eq!(explained.line("a.rs", "  other {", "    z();"), None);
        assert_eq!(explained.change("a.rs", "  x();", "replace x with ()"), Some("b"));
        assert_eq!(explained.change("a.rs", "x();", "replace x with 1"), None);
    }
}
