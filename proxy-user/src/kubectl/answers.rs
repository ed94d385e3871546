//! What nodes answer.

use std::collections::BTreeMap;

/// What a command has printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// It exited with 0.
    pub is_well: bool,
}

/// What a node has answered, or why it has not, by node.
pub(super) type PerNode<T> = BTreeMap<String, Result<T, String>>;
