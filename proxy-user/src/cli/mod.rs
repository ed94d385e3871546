//! The command line. [`args`] are what was typed, without effects; [`config`](crate::config) makes the agent's settings of it.
//!
//! [`show`] answers the reading commands. It reads the pinned maps itself, so it works while no agent runs.

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
pub mod question;
pub mod show;
pub mod sysdump;
pub mod takeover;

pub use args::{Args, Command};
