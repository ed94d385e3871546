//! `ballast check`.

use std::path::PathBuf;

use clap::ValueEnum;
use clap::builder::FalseyValueParser;

use super::bpffs::BpffsArgs;
use super::common::AgentArgs;
use super::list::ApiArgs;
use crate::config::value::NodePortRange;

/// `ballast check`.
#[derive(Clone, Debug, clap::Args)]
pub struct CheckArgs {
    /// Check the node before Ballast is installed: nothing is asked of the agent and of what it puts into the kernel.
    #[arg(long, env = "BALLAST_PRE", value_parser = FalseyValueParser::new())]
    pub pre: bool,
    /// Exit with 0 whatever the result, for an init container that only reports.
    #[arg(long, env = "BALLAST_REPORT_ONLY", value_parser = FalseyValueParser::new())]
    pub report_only: bool,
    /// How the result is written.
    #[arg(short, long, env = "BALLAST_OUTPUT", default_value = "text")]
    pub output: CheckOutput,
    /// Its maps.
    #[command(flatten)]
    pub maps: BpffsArgs,
    /// Root of the control groups whose sockets are served. Default: where cgroup2 is mounted.
    #[arg(long, env = "BALLAST_CGROUP_ROOT", value_name = "DIR")]
    pub cgroup_root: Option<PathBuf>,
    /// The agent.
    #[command(flatten)]
    pub agent: AgentArgs,
    /// The API server.
    #[command(flatten)]
    pub api: ApiArgs,
    /// Do not ask the API server: for a node whose objects come from a folder.
    #[arg(long, env = "BALLAST_NO_API", value_parser = FalseyValueParser::new())]
    pub no_api: bool,
    /// Ports that the API server gives to Services as node ports, as its flag of this name says.
    #[arg(long, env = "BALLAST_SERVICE_NODE_PORT_RANGE", value_name = "FIRST-LAST", default_value_t)]
    pub service_node_port_range: NodePortRange,
    /// Where the configuration of the CNI plugins is.
    #[arg(long, env = "BALLAST_CNI_CONF_DIR", value_name = "DIR", default_value = "/etc/cni/net.d")]
    pub cni_conf_dir: PathBuf,
}

/// How the result of `ballast check` is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum CheckOutput {
    /// Lines in groups, with what to do.
    #[default]
    Text,
    /// A table with all columns.
    Wide,
    /// Only what warns or fails, one line each.
    Short,
    /// JSON, with field names that stay.
    Json,
}
