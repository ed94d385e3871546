//! Spans of the agent's own work: a name, attributes, and how long it took.
//!
//! The log does not show them. They are exported with `--otlp-endpoint` ([`crate::otlp`]); without it no subscriber wants them,
//! and they cost nothing.

/// The target of each span, by which subscribers know them from spans of libraries.
pub const TARGET: &str = "ballast_spans";
