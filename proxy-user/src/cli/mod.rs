//! The command line. [`args`] parses it without side effects; [`config`](crate::config) derives the agent's settings from it.
//!
//! [`show`] implements the reading commands. It reads the pinned maps itself, so it works without a running agent.

pub mod args;
mod candidates;
pub mod check;
pub mod colour;
pub mod complete;
pub mod confirm;
pub mod explain;
pub mod export_conntrack;
pub mod monitor;
pub mod origins;
pub mod programmed;
pub mod selector;
pub mod show;
pub mod sysdump;
pub mod takeover;
pub mod variables;
pub mod version;

pub use args::{Args, Command};
