//! Commands that look, and change nothing.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::builder::FalseyValueParser;
use clap::{Subcommand, ValueEnum};

use super::list::{ListOptions, NamespaceArgs, ScopeArgs};
use crate::cli::value::Listen;

/// `ballast service ...`.
#[derive(Clone, Debug, Subcommand)]
pub enum ServiceCommand {
    /// One line for each address that a client may dial.
    #[command(visible_alias = "ls")]
    List(ServiceListArgs),
    /// One Service in full: addresses, endpoints, connections, refusals.
    Show(ServiceShowArgs),
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
}

/// `ballast map ...`.
#[derive(Clone, Debug, Subcommand)]
pub enum MapCommand {
    /// One line for each map.
    #[command(visible_alias = "ls")]
    List(MapListArgs),
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
    #[arg(value_name = "NAMESPACE/NAME[:PORT]")]
    pub service: String,
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
    #[arg(long, env = "BALLAST_SERVICE", value_name = "SERVICE")]
    pub service: Option<String>,
}

/// `ballast flow list`.
#[derive(Clone, Debug, clap::Args)]
pub struct FlowListArgs {
    /// How.
    #[command(flatten)]
    pub list: ListOptions,
    /// Which.
    #[command(flatten)]
    pub scope: ScopeArgs,
    /// Only those to this Service, as an argument without flag.
    #[arg(long, env = "BALLAST_SERVICE", value_name = "SERVICE")]
    pub service: Option<String>,
    /// Only those of this client.
    #[arg(long, env = "BALLAST_CLIENT", value_name = "IP")]
    pub client: Option<IpAddr>,
    /// Expired ones too: silent for too long, but their place was not needed yet.
    #[arg(long, env = "BALLAST_ALL", value_parser = FalseyValueParser::new())]
    pub all: bool,
}

/// `ballast map list`.
#[derive(Clone, Debug, clap::Args)]
pub struct MapListArgs {
    /// How.
    #[command(flatten)]
    pub list: ListOptions,
    /// Only these maps. Default: all.
    #[arg(value_name = "MAP")]
    pub names: Vec<String>,
}
