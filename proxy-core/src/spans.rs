//! Spans of the agent's own work: a name, attributes, and a duration.
//!
//! The log does not show spans. They are exported with `--otlp-endpoint`; without it no subscriber enables them, and they cost
//! nothing.

/// The target of each span, by which subscribers distinguish them from spans of libraries.
pub const TARGET: &str = "ballast_spans";
