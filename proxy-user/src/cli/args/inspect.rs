//! Commands that look, and change nothing.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::FalseyValueParser;
use clap::{Subcommand, ValueEnum};

use super::change::{FlowDeleteArgs, ServiceZeroArgs, without_variables};
use super::list::{ListOptions, NamespaceArgs, ScopeArgs};
use crate::cli::complete;
use crate::cli::question::{self, Peer};
use crate::config::value::Listen;
use crate::maps::view::FlowState;
use crate::model::net::Protocol;

/// `ballast service ...`.
#[derive(Clone, Debug, Subcommand)]
pub enum ServiceCommand {
    /// One line for each address that a client may dial.
    #[command(visible_alias = "ls")]
    List(ServiceListArgs),
    /// One Service in full: addresses, endpoints, connections, refusals.
    Show(ServiceShowArgs),
    /// Count from 0 again: connections, packets, bytes and refusals, as these commands show them. The counters of the
    /// kernel, which Prometheus reads, go on.
    #[command(mut_args(without_variables))]
    Zero(ServiceZeroArgs),
}

/// `ballast backend ...`.
#[derive(Clone, Debug, Subcommand)]
pub enum BackendCommand {
    /// One line for each endpoint.
    #[command(visible_alias = "ls")]
    List(BackendListArgs),
}

/// `ballast flow ...`.
#[derive(Clone, Debug, Subcommand)]
pub enum FlowCommand {
    /// One line for each connection.
    #[command(visible_alias = "ls")]
    List(FlowListArgs),
    /// Remove connections from the table, as `conntrack -D`: of both directions. If packets of one go on, it begins again.
    #[command(mut_args(without_variables))]
    Delete(FlowDeleteArgs),
}

/// `ballast map ...`.
#[derive(Clone, Debug, Subcommand)]
pub enum MapCommand {
    /// One line for each map.
    #[command(visible_alias = "ls")]
    List(MapListArgs),
    /// One line for each entry of a map, decoded.
    Dump(MapDumpArgs),
}

/// How an answer is written that is no list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Text.
    #[default]
    Text,
    /// Text that says more.
    Wide,
    /// JSON, with field names that stay.
    Json,
    /// The same as YAML.
    Yaml,
}

/// What every reading command takes that is no list.
#[derive(Clone, Debug, clap::Args)]
pub struct ReaderArgs {
    /// Where the BPF file system is mounted that the agent uses.
    #[arg(long, env = "BALLAST_BPFFS", value_name = "DIR", default_value = "/sys/fs/bpf")]
    pub bpffs: PathBuf,
    /// How the answer is written.
    #[arg(short, long, env = "BALLAST_OUTPUT", default_value = "text")]
    pub output: Output,
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

/// What every command takes that asks the agent whether it is well.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct AgentArgs {
    /// Where the agent answers /healthz.
    #[arg(
        long,
        env = "BALLAST_METRICS_BIND_ADDRESS",
        value_name = "ADDRESS",
        default_value = "127.0.0.1:10249"
    )]
    pub metrics_bind_address: Listen,
}

/// `ballast service list`.
#[derive(Clone, Debug, clap::Args)]
pub struct ServiceListArgs {
    /// How.
    #[command(flatten)]
    pub list: ListOptions,
    /// Which.
    #[command(flatten)]
    pub scope: ScopeArgs,
}

/// `ballast service show`.
#[derive(Clone, Debug, clap::Args)]
pub struct ServiceShowArgs {
    /// Common flags.
    #[command(flatten)]
    pub reader: ReaderArgs,
    /// The namespace.
    #[command(flatten)]
    pub namespace: NamespaceArgs,
    /// NAMESPACE/NAME, or NAMESPACE/NAME:PORT for one of its ports; without namespace, `default`.
    #[arg(value_name = "NAMESPACE/NAME[:PORT]", add = complete::services())]
    pub service: String,
    /// The counters' zero.
    #[command(flatten)]
    pub zero: ZeroArgs,
}

/// Where it is noted what the counters were when they were made zero.
#[derive(Clone, Debug, clap::Args)]
pub struct ZeroArgs {
    /// Folder in which `ballast service zero` notes what the counters were.
    #[arg(long, env = "BALLAST_RUN_DIR", value_name = "DIR", default_value = "/run/ballast")]
    pub run_dir: PathBuf,
}

/// `ballast stats`.
#[derive(Clone, Debug, clap::Args)]
pub struct StatsArgs {
    /// How.
    #[command(flatten)]
    pub list: ListOptions,
    /// Which.
    #[command(flatten)]
    pub scope: ScopeArgs,
    /// Rates a second instead of counts, measured over so long: a number is of seconds.
    #[arg(
        long,
        env = "BALLAST_RATE",
        value_name = "DURATION",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "1s",
        value_parser = question::seconds
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
    pub scope: ScopeArgs,
    /// Only those of this Service, as an argument without flag.
    #[arg(long, env = "BALLAST_SERVICE", value_name = "SERVICE", add = complete::services())]
    pub service: Option<String>,
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
    /// Expired ones too: silent for too long, but their place was not needed yet.
    #[arg(long, env = "BALLAST_ALL", value_parser = FalseyValueParser::new())]
    pub all: bool,
}

/// Which connections are meant; those that all of it fits.
#[derive(Clone, Debug, clap::Args)]
pub struct FlowFilterArgs {
    /// Of which Services.
    #[command(flatten)]
    pub scope: ScopeArgs,
    /// Only those to this Service, as an argument without flag.
    #[arg(long, env = "BALLAST_SERVICE", value_name = "SERVICE", add = complete::services())]
    pub service: Option<String>,
    /// Only those of this client: an address, a range, either with :PORT.
    #[arg(short = 's', long, visible_alias = "src", env = "BALLAST_CLIENT", value_name = "ADDRESS[:PORT]")]
    pub client: Option<Peer>,
    /// Only those that dialled this.
    #[arg(short = 'd', long, visible_alias = "dst", env = "BALLAST_FRONTEND", value_name = "ADDRESS[:PORT]")]
    pub frontend: Option<Peer>,
    /// Only those to this endpoint.
    #[arg(long, env = "BALLAST_BACKEND", value_name = "ADDRESS[:PORT]")]
    pub backend: Option<Peer>,
    /// Only those of this protocol: tcp, udp or sctp.
    #[arg(short, long, visible_alias = "proto", env = "BALLAST_PROTOCOL", value_name = "PROTOCOL", value_parser = question::protocol)]
    pub protocol: Option<Protocol>,
    /// Only those in this state: unreplied, half-open, established, closing, closed or expired.
    #[arg(long, env = "BALLAST_STATE", value_name = "STATE", value_parser = question::flow_state)]
    pub state: Option<FlowState>,
}

/// `ballast map list`.
#[derive(Clone, Debug, clap::Args)]
pub struct MapListArgs {
    /// How.
    #[command(flatten)]
    pub list: ListOptions,
    /// Only these maps. Default: all.
    #[arg(value_name = "MAP", add = complete::maps())]
    pub names: Vec<String>,
}

/// `ballast map dump`.
#[derive(Clone, Debug, clap::Args)]
pub struct MapDumpArgs {
    /// How.
    #[command(flatten)]
    pub list: ListOptions,
    /// The map, as `ballast map list` names it.
    #[arg(value_name = "MAP", add = complete::maps())]
    pub name: String,
}

/// `ballast config`.
#[derive(Clone, Debug, clap::Args)]
pub struct ConfigArgs {
    /// The agent.
    #[command(flatten)]
    pub agent: AgentArgs,
    /// How the list is written.
    #[arg(short, long, env = "BALLAST_OUTPUT", default_value = "text")]
    pub output: super::list::ListOutput,
    /// Leave out the headings of the table.
    #[arg(long, env = "BALLAST_NO_HEADERS", value_parser = FalseyValueParser::new())]
    pub no_headers: bool,
    /// Only these settings, by the name of their flag or field. Default: all that are not as they are without being said.
    #[arg(value_name = "SETTING")]
    pub names: Vec<String>,
    /// All settings.
    #[arg(long, env = "BALLAST_ALL", value_parser = FalseyValueParser::new())]
    pub all: bool,
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
