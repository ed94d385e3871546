//! Commands that only read.

use std::time::Duration;

use clap::builder::FalseyValueParser;
use clap::{Subcommand, ValueEnum};

use super::change::{FlowDeleteArgs, ServiceZeroArgs, without_variables};
use super::common::{AgentArgs, FlowFilterArgs, ReaderArgs, ZeroArgs};
use super::list::{ListOptions, OutputArgs, SelectorArgs, ViewArgs};
use crate::candidates;
use crate::question;

/// `ballast service ...`.
#[derive(Clone, Debug, Subcommand)]
pub enum ServiceCommand {
    /// List the frontends of Services (addresses that clients connect to), one per line.
    #[command(visible_alias = "ls")]
    List(ServiceListArgs),
    /// Show Services in full: addresses, endpoints, connections, refusals, problems.
    Show(ServiceShowArgs),
    /// Reset the counters that these commands show: connections, packets, bytes and refusals. The counters in the BPF maps,
    /// which Prometheus reads, keep their values.
    #[command(mut_args(without_variables))]
    Zero(ServiceZeroArgs),
}

/// `ballast backend ...`.
#[derive(Clone, Debug, Subcommand)]
pub enum BackendCommand {
    /// List endpoints, one per line.
    #[command(visible_alias = "ls")]
    List(BackendListArgs),
}

/// `ballast flow ...`.
#[derive(Clone, Debug, Subcommand)]
pub enum FlowCommand {
    /// List connections, one per line.
    #[command(visible_alias = "ls")]
    List(FlowListArgs),
    /// Delete connections from the flow table, as `conntrack -D`. The next packet of a deleted connection starts a new flow.
    #[command(mut_args(without_variables))]
    Delete(FlowDeleteArgs),
}

/// `ballast map ...`.
#[derive(Clone, Debug, Subcommand)]
pub enum MapCommand {
    /// List maps, one per line.
    #[command(visible_alias = "ls")]
    List(MapListArgs),
    /// Print the decoded entries of a map, one per line.
    Dump(MapDumpArgs),
}

/// `ballast status`.
#[derive(Clone, Debug, clap::Args)]
pub struct StatusArgs {
    /// Common flags.
    #[command(flatten)]
    pub reader: ReaderArgs,
    /// The agent.
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// `ballast service list`.
#[derive(Clone, Debug, clap::Args)]
pub struct ServiceListArgs {
    /// How.
    #[command(flatten)]
    pub list: ListOptions,
    /// Which.
    #[command(flatten)]
    pub selector: SelectorArgs,
}

/// `ballast service show`.
#[derive(Clone, Debug, clap::Args)]
pub struct ServiceShowArgs {
    /// Common flags.
    #[command(flatten)]
    pub reader: ReaderArgs,
    /// Which.
    #[command(flatten)]
    pub selector: SelectorArgs,
    /// The agent, which knows the problems of the Service.
    #[command(flatten)]
    pub agent: AgentArgs,
    /// The counters' zero.
    #[command(flatten)]
    pub zero: ZeroArgs,
}

/// `ballast stats`.
#[derive(Clone, Debug, clap::Args)]
pub struct StatsArgs {
    /// How.
    #[command(flatten)]
    pub list: ListOptions,
    /// Which.
    #[command(flatten)]
    pub selector: SelectorArgs,
    /// Show rates per second instead of counts, measured over this time. A number without unit means seconds.
    #[arg(
        long,
        env = "BALLAST_RATE",
        value_name = "DURATION",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "1s",
        value_parser = question::period
    )]
    pub rate: Option<Duration>,
    /// The counters' zero.
    #[command(flatten)]
    pub zero: ZeroArgs,
}

/// `ballast backend list`.
#[derive(Clone, Debug, clap::Args)]
pub struct BackendListArgs {
    /// How.
    #[command(flatten)]
    pub list: ListOptions,
    /// Which.
    #[command(flatten)]
    pub selector: SelectorArgs,
    /// The counters' zero.
    #[command(flatten)]
    pub zero: ZeroArgs,
}

/// `ballast flow list`.
#[derive(Clone, Debug, clap::Args)]
pub struct FlowListArgs {
    /// How.
    #[command(flatten)]
    pub list: ListOptions,
    /// Which.
    #[command(flatten)]
    pub which: FlowFilterArgs,
    /// Include expired connections whose entries are not reused yet.
    #[arg(long, env = "BALLAST_EXPIRED", value_parser = FalseyValueParser::new())]
    pub expired: bool,
}

/// `ballast map list`.
#[derive(Clone, Debug, clap::Args)]
pub struct MapListArgs {
    /// How.
    #[command(flatten)]
    pub list: ListOptions,
    /// Only these maps. Default: all.
    #[arg(value_name = "MAP", add = candidates::maps())]
    pub names: Vec<String>,
}

/// `ballast map dump`.
#[derive(Clone, Debug, clap::Args)]
pub struct MapDumpArgs {
    /// How.
    #[command(flatten)]
    pub list: ListOptions,
    /// The map, as `ballast map list` names it.
    #[arg(value_name = "MAP", add = candidates::maps())]
    pub name: String,
}

/// `ballast config`.
#[derive(Clone, Debug, clap::Args)]
pub struct ConfigArgs {
    /// The agent.
    #[command(flatten)]
    pub agent: AgentArgs,
    /// How.
    #[command(flatten)]
    pub list: ViewArgs,
    /// Only these settings, by the name of their flag or field. Default: all settings that were given.
    #[arg(value_name = "SETTING")]
    pub names: Vec<String>,
    /// Include the settings that have their default value.
    #[arg(long, env = "BALLAST_DEFAULTS", value_parser = FalseyValueParser::new())]
    pub defaults: bool,
}

/// `ballast version`.
#[derive(Clone, Debug, clap::Args)]
pub struct VersionArgs {
    /// How the answer is written.
    #[command(flatten)]
    pub format: OutputArgs,
    /// The agent.
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// A shell that can complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    /// GNU Bourne again shell.
    Bash,
    /// The Z shell.
    Zsh,
    /// The friendly interactive shell.
    Fish,
}
