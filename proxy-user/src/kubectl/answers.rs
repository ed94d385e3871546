//! Answers of the nodes.

use std::collections::BTreeMap;

/// Output of a command on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentOutput<T = String> {
    /// Standard output.
    pub stdout: T,
    /// Standard error.
    pub stderr: String,
    /// Whether the exit code was 0.
    pub is_well: bool,
}

/// Answers of the nodes, or why a node did not answer, by the node's name.
pub(super) type PerNode<T> = BTreeMap<String, Result<T, String>>;
