//! `ballast check`.

use std::path::PathBuf;

use clap::builder::FalseyValueParser;

use super::bpffs::BpffsArgs;
use super::common::AgentArgs;
use super::list::{ApiArgs, Output};
use crate::value::NodePortRange;

/// `ballast check`.
#[derive(Clone, Debug, clap::Args)]
pub struct CheckArgs {
    /// Check the node before Ballast is installed. Skips the checks of the agent and of its programs and maps.
    #[arg(long, env = "BALLAST_PRE", value_parser = FalseyValueParser::new())]
    pub pre: bool,
    /// Exit with code 0 for every result, for an init container that only reports.
    #[arg(long, env = "BALLAST_REPORT_ONLY", value_parser = FalseyValueParser::new())]
    pub report_only: bool,
    /// Output format.
    #[arg(short, long, env = "BALLAST_OUTPUT", default_value = "text", value_parser = Output::parser(&[Output::Short]))]
    pub output: Output,
    /// Only these checks, like `kernel-version`, each with its section of the manual. Default: all, without the sections.
    #[arg(value_name = "CHECK")]
    pub checks: Vec<String>,
    /// Its maps.
    #[command(flatten)]
    pub maps: BpffsArgs,
    /// Root of the cgroups whose sockets are translated. Default: the mount point of cgroup2.
    #[arg(long, env = "BALLAST_CGROUP_ROOT", value_name = "DIR")]
    pub cgroup_root: Option<PathBuf>,
    /// The agent.
    #[command(flatten)]
    pub agent: AgentArgs,
    /// The API server.
    #[command(flatten)]
    pub api: ApiArgs,
    /// Skip the checks that query the API server. For nodes whose Services come from a folder (--manifests).
    #[arg(long, env = "BALLAST_NO_API", value_parser = FalseyValueParser::new())]
    pub no_api: bool,
    /// Port range for NodePorts; the same value as the API server's flag of this name.
    #[arg(long, env = "BALLAST_SERVICE_NODE_PORT_RANGE", value_name = "FIRST-LAST", default_value_t)]
    pub service_node_port_range: NodePortRange,
    /// Folder with the configuration of the CNI plugins.
    #[arg(long, env = "BALLAST_CNI_CONF_DIR", value_name = "DIR", default_value = "/etc/cni/net.d")]
    pub cni_conf_dir: PathBuf,
}
