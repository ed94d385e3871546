//! The project's text files, and what is found in them.

use std::path::{Path, PathBuf};

use anyhow::Result;
use fs_err as fs;

/// A text file of the project.
#[derive(Clone, Debug)]
pub(super) struct SourceFile {
    /// Path from the project's root.
    pub path: PathBuf,
    pub text: String,
}

/// Returns all text files below the root, without cargo's and git's folders (`target`, `.git`).
pub(super) fn files(root: &Path) -> Result<Vec<SourceFile>> {
    let mut files = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            let is_kept_out = ["target", ".git"].iter().any(|name| path.ends_with(name));
            if is_kept_out || path.is_symlink() {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if let Ok(text) = fs::read_to_string(&path) {
                let path = path.strip_prefix(root).unwrap_or(&path).to_owned();
                files.push(SourceFile { path, text });
            }
        }
    }
    Ok(files)
}

/// A place that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Finding {
    pub file: PathBuf,
    /// Line number from 1; 0 for the file as a whole.
    pub line: usize,
    pub what: String,
}
