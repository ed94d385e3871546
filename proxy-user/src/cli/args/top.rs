//! `ballast top`.

use std::time::Duration;

use clap::ValueEnum;
use clap::builder::FalseyValueParser;

use super::bpffs::BpffsArgs;
use super::common::AgentArgs;
use crate::config::value;

/// `ballast top`.
#[derive(Clone, Debug, clap::Args)]
pub struct TopArgs {
    /// Its maps.
    #[command(flatten)]
    pub maps: BpffsArgs,
    /// The agent.
    #[command(flatten)]
    pub agent: AgentArgs,
    /// Between two looks at the counters.
    #[arg(long, env = "BALLAST_INTERVAL", value_name = "DURATION", default_value = "2s", value_parser = value::duration)]
    pub interval: Duration,
    /// Look twice, print what happened in between as text, and end.
    #[arg(long, env = "BALLAST_ONCE", value_parser = FalseyValueParser::new())]
    pub once: bool,
    /// What is shown first.
    #[arg(long, env = "BALLAST_SCREEN", value_name = "SCREEN", default_value = "services")]
    pub screen: Screen,
    /// What Services are sorted by.
    #[arg(long, env = "BALLAST_SORT", value_name = "COLUMN", default_value = "connections")]
    pub sort: SortBy,
    /// Only what has this text in its line: part of a name, of an address, of a reason.
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
    /// Connections that the packet path follows.
    Flows,
}

/// What Services are sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SortBy {
    /// Connections a second.
    #[default]
    Connections,
    /// Packets a second.
    Packets,
    /// Bytes a second.
    Bytes,
    /// Refusals and drops a second.
    Failures,
    /// The name.
    Name,
}
