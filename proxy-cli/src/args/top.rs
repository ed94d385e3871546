//! `ballast top`.

use std::time::Duration;

use clap::ValueEnum;
use clap::builder::FalseyValueParser;

use super::bpffs::BpffsArgs;
use super::common::AgentArgs;
use super::list::{OutputArgs, SelectorArgs};
use crate::question;

/// `ballast top`.
#[derive(Clone, Debug, clap::Args)]
pub struct TopArgs {
    /// Its maps.
    #[command(flatten)]
    pub maps: BpffsArgs,
    /// The agent.
    #[command(flatten)]
    pub agent: AgentArgs,
    /// How often the counters are read.
    #[arg(long, env = "BALLAST_INTERVAL", value_name = "DURATION", default_value = "2s", value_parser = question::period)]
    pub interval: Duration,
    /// Read the counters twice, print the difference as text, and exit.
    #[arg(long, env = "BALLAST_ONCE", value_parser = FalseyValueParser::new())]
    pub once: bool,
    /// The screen to start with.
    #[arg(long, env = "BALLAST_SCREEN", value_name = "SCREEN", default_value = "services")]
    pub screen: Screen,
    /// The column to sort Services by.
    #[arg(long, env = "BALLAST_SORT", value_name = "COLUMN", default_value = "connections")]
    pub sort: SortBy,
    /// Output format; each one except `text` prints once.
    #[command(flatten)]
    pub format: OutputArgs,
    /// Which Services.
    #[command(flatten)]
    pub selector: SelectorArgs,
    /// Only show lines that contain this text: a part of a name, an address or a reason.
    #[arg(long, env = "BALLAST_FILTER", value_name = "TEXT", default_value = "")]
    pub filter: String,
}

/// What is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Screen {
    /// One line for each Service port.
    #[default]
    Services,
    /// Refusals and drops by reason, with the last examples.
    Drops,
    /// Connections that the packet programs track.
    Flows,
}

/// What Services are sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SortBy {
    /// Connections per second.
    #[default]
    Connections,
    /// Packets per second.
    Packets,
    /// Bytes per second.
    Bytes,
    /// Refusals and drops per second.
    Failures,
    /// The name.
    Name,
}
