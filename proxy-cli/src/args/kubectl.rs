//! `kubectl ballast`: the program under the name `kubectl-ballast`. Commands that run on the nodes have the arguments of `ballast`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};

use super::check::CheckArgs;
use super::examples;
use super::inspect::{
    BackendListArgs, FlowListArgs, MapDumpArgs, MapListArgs, ServiceListArgs, ServiceShowArgs, StatsArgs,
};
use super::list::{OutputArgs, ViewArgs};
use super::observe::MonitorArgs;
use super::on_nodes::OnNodes;
use super::programmed::ProgrammedArgs;
use super::top::TopArgs;
use crate::value;

/// Queries the agents on all nodes of a cluster, and merges their answers.
///
/// The plugin runs `ballast` in the pods of the agents (`pods/exec`), with the permissions of your kubeconfig.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "kubectl-ballast",
    bin_name = "kubectl ballast",
    version,
    arg_required_else_help = true,
    mut_subcommands(examples::prepare_plugin)
)]
pub struct KubectlArgs {
    /// The cluster, and who of it is asked.
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// What to do.
    #[command(subcommand)]
    pub command: KubectlCommand,
}

/// Which cluster, and who of it is asked.
#[derive(Clone, Debug, clap::Args)]
pub struct ClusterArgs {
    /// File with the API server's address and credentials. Default: the same as kubectl.
    #[arg(long, global = true, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig.
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
    /// Only these nodes; can be given several times. Default: all nodes.
    #[arg(long, global = true, value_name = "NODE", value_delimiter = ',')]
    pub node: Vec<String>,
    /// Namespace of the agents' pods. Default: all namespaces are searched, and agents in more than one are an error, because any
    /// tenant can give its pods the labels of an agent.
    #[arg(long, global = true, value_name = "NAME")]
    pub agents_namespace: Option<String>,
    /// How long to wait for the answer of a node, or of the API server; 0: without limit.
    #[arg(long, global = true, value_name = "DURATION", default_value = "15s", value_parser = value::duration)]
    pub request_timeout: Duration,
}

/// In which namespace an object without one in its name is.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct NamedIn {
    /// Namespace of a pod or Service that is given without one. Default: that of the context.
    #[arg(short, long, value_name = "NAMESPACE")]
    pub namespace: Option<String>,
}

/// The commands.
#[derive(Clone, Debug, Subcommand)]
pub enum KubectlCommand {
    /// Show the state of each node and its problems. Exits with code 1 if a node has a problem or does not answer.
    #[command(mut_arg("interval", |arg| arg.default_value(ROUND)))]
    Status(OnNodes<ViewArgs>),
    /// Show Services and their endpoints on all nodes.
    #[command(visible_alias = "svc")]
    Service {
        /// The subcommand.
        #[command(subcommand)]
        command: NodesServiceCommand,
    },
    /// Check the installation on each node, and show what does not pass; with `-o wide` also what passes. Exits with code 1 if
    /// a check fails or a node does not answer.
    #[command(mut_arg("checks", |arg| arg.help("Only these checks, like `kernel-version`. Default: all")))]
    Check(Box<OnNodes<CheckArgs>>),
    /// Show the endpoints of Services on each node.
    #[command(visible_aliases = ["endpoint", "ep"])]
    Backend {
        /// The subcommand.
        #[command(subcommand)]
        command: NodesBackendCommand,
    },
    /// Show the connections in the flow table of each node.
    Flow {
        /// The subcommand.
        #[command(subcommand)]
        command: NodesFlowCommand,
    },
    /// Show counters or rates of Services on each node.
    Stats(OnNodes<StatsArgs>),
    /// Show the BPF maps of each node.
    Map {
        /// The subcommand.
        #[command(subcommand)]
        command: NodesMapCommand,
    },
    /// Explain what the programs would do with a connection, on the node where it starts. Sends no packet.
    Explain {
        /// Namespace of the names.
        #[command(flatten)]
        named_in: NamedIn,
        /// How the answer is written.
        #[command(flatten)]
        format: OutputArgs,
        /// The client: pod/NAMESPACE/NAME, pod/NAME, node/NAME, or a client as for `ballast explain`.
        #[arg(value_name = "CLIENT")]
        client: String,
        /// The destination: svc/NAMESPACE/NAME:PORT, svc/NAME:PORT, NAME:PORT or ADDRESS:PORT; with /udp or /sctp if it is not TCP.
        #[arg(value_name = "DESTINATION")]
        destination: String,
    },
    /// Show refusals, drops and new connections of all nodes live, in one stream. The processes on the nodes end with the command,
    /// and after --timeout.
    #[command(mut_arg("timeout", |arg| arg.default_value("1h")))]
    Monitor(OnNodes<MonitorArgs>),
    /// Show rates of Services and endpoints, drops or connections of each node, measured once. `ui` shows all nodes live.
    Top(OnNodes<TopArgs>),
    /// Show which version of each Service and its EndpointSlices each node has programmed.
    Programmed(OnNodes<ProgrammedArgs>),
    /// Serve a web page of the whole cluster on this machine, until Ctrl-C. It merges the data of the agents' own pages (flag
    /// --page, value `page` of the chart), which it reads through `pods/portforward`.
    Ui {
        /// The port on 127.0.0.1; 0: any free port.
        #[arg(long, value_name = "PORT", default_value_t = 8249)]
        port: u16,
    },
    /// Write an archive with the archive of `ballast sysdump` of each node. Exits with code 1 if a node does not answer.
    Sysdump {
        /// The file to write; `-`: standard output. Default: ballast-sysdump-<time>.tar in the current folder.
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// Show the versions of this program, and of the program and the agent of each node.
    #[command(mut_arg("interval", |arg| arg.default_value(ROUND)))]
    Version(OnNodes<ViewArgs>),
    /// Wait until every node has programmed the current version of a Service.
    Wait {
        /// Namespace of the Service.
        #[command(flatten)]
        named_in: NamedIn,
        /// The Service: NAME, service/NAME or svc/NAMESPACE/NAME.
        #[arg(value_name = "service/NAME")]
        object: String,
        /// The condition. The only one is `programmed`.
        #[arg(long, required = true)]
        programmed: bool,
        /// The longest time to wait.
        #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = value::duration)]
        timeout: Duration,
    },
}

/// How often all nodes are asked for a table that is merged from their answers: each time runs a process on each node.
const ROUND: &str = "5s";

/// `kubectl ballast service ...`.
#[derive(Clone, Debug, Subcommand)]
pub enum NodesServiceCommand {
    /// List the frontends of Services (addresses that clients connect to), one per line, and mark nodes that differ.
    #[command(visible_alias = "ls", mut_arg("interval", |arg| arg.default_value(ROUND)))]
    List(OnNodes<ServiceListArgs>),
    /// Show Services in full as each node has them: addresses, endpoints, connections, refusals, problems.
    Show(OnNodes<ServiceShowArgs>),
}

/// `kubectl ballast backend ...`.
#[derive(Clone, Debug, Subcommand)]
pub enum NodesBackendCommand {
    /// List endpoints, one per line.
    #[command(visible_alias = "ls")]
    List(OnNodes<BackendListArgs>),
}

/// `kubectl ballast flow ...`.
#[derive(Clone, Debug, Subcommand)]
pub enum NodesFlowCommand {
    /// List connections, one per line.
    #[command(visible_alias = "ls")]
    List(OnNodes<FlowListArgs>),
}

/// `kubectl ballast map ...`.
#[derive(Clone, Debug, Subcommand)]
pub enum NodesMapCommand {
    /// List maps, one per line.
    #[command(visible_alias = "ls")]
    List(OnNodes<MapListArgs>),
    /// Print the decoded entries of a map, one per line.
    Dump(OnNodes<MapDumpArgs>),
}
