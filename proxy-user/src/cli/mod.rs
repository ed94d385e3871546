//! The command line, in two steps: [`args`] are what was typed, without effects; [`config`] is what was meant,
//! checked. Everything behind them takes the checked type.
//!
//! [`show`] answers the reading commands. It reads the pinned maps itself, so it works while no agent runs.

pub mod args;
pub mod check;
pub mod colour;
pub mod config;
pub mod explain;
pub mod handover;
pub mod kube_proxy;
pub mod monitor;
mod network;
pub mod programmed;
pub mod question;
pub mod show;
pub mod takeover;
pub mod value;

pub use args::{Args, Command};
pub use config::RunConfig;
