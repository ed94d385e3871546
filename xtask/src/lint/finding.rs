//! A finding of lint.

use std::path::PathBuf;

/// A place that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Finding {
    pub file: PathBuf,
    /// Line number from 1; 0 for the file as a whole.
    pub line: usize,
    pub what: String,
}
