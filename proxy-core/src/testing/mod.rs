//! For tests, also of other crates: valid clusters and plans, and what the tables lead to.
#![allow(
    missing_docs,
    clippy::missing_panics_doc,
    clippy::unwrap_used,
    clippy::panic,
    reason = "these are parts of tests"
)]

pub mod arbitrary;
pub mod generator;
pub mod oracle;
