//! The manifest that the demo shows. The demo removes and restores endpoints in it, as a user would with an editor.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// First line of an endpoint in the example.
const ENDPOINT: &str = "  - addresses:";
/// Indentation of the other lines of an endpoint.
const INSIDE: &str = "    ";

/// The manifest, in the directory that both agents watch.
#[derive(Debug)]
pub(super) struct Manifest {
    file: PathBuf,
    whole: String,
}

impl Manifest {
    /// Copies the example into `folder`.
    pub(super) fn copy(example: &Path, folder: &Path) -> Result<Self> {
        let whole =
            fs::read_to_string(example).with_context(|| format!("cannot read {}", example.display()))?;
        let manifest = Self { file: folder.join("redis.yaml"), whole };
        manifest.restore()?;
        Ok(manifest)
    }

    /// Path of the manifest.
    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    /// Removes the endpoints with these addresses.
    pub(super) fn take_out(&self, addresses: &[&str]) -> Result<()> {
        self.write(&without(&self.whole, addresses))
    }

    /// Restores all endpoints.
    pub(super) fn restore(&self) -> Result<()> {
        self.write(&self.whole)
    }

    /// Replaces the file atomically: a reader sees the old or the new text.
    fn write(&self, text: &str) -> Result<()> {
        let new = self.file.with_extension("new");
        fs::write(&new, text)
            .and_then(|()| fs::rename(&new, &self.file))
            .with_context(|| format!("cannot write {}", self.file.display()))
    }
}

fn without(text: &str, addresses: &[&str]) -> String {
    let quoted: Vec<_> = addresses.iter().map(|address| format!("\"{address}\"")).collect();
    let mut is_out = false;
    let mut left = String::new();
    for line in text.lines() {
        if line.starts_with(ENDPOINT) {
            is_out = quoted.iter().any(|address| line.contains(address));
        } else if !line.starts_with(INSIDE) {
            is_out = false;
        }
        if !is_out {
            left.push_str(line);
            left.push('\n');
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_goes_with_all_its_lines_and_no_other() {
        let example = include_str!("../../../deploy/examples/redis.yaml");
        let left = without(example, &["10.2.0.12", "fd02::12"]);
        for gone in ["10.2.0.12", "fd02::12", "redis-2"] {
            assert!(example.contains(gone) && !left.contains(gone), "{gone}");
        }
        assert_eq!(example.lines().count() - left.lines().count(), 8);
        assert_eq!(without(&left, &["10.2.0.12"]), left);
    }
}
