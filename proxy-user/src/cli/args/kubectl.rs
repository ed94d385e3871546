//! `kubectl ballast`: the program under the name `kubectl-ballast`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};

use super::examples;
use super::list::Output;
use super::observe::EventKind;
use crate::cli::question::{self, Peer};
use crate::config::value;
use crate::maps::view::FlowState;
use proxy_core::model::net::Protocol;

/// Formats of an answer that is one for all nodes.
const MERGED: &[Output] = &[Output::Text, Output::Json, Output::Yaml];

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
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig.
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
    /// Only Services of this namespace. Without it, lists show all namespaces, and a name without namespace is in the
    /// namespace of the context.
    #[arg(short, long, global = true, value_name = "NAME")]
    pub namespace: Option<String>,
    /// Only these nodes; can be given several times. Default: all nodes.
    #[arg(long, global = true, value_name = "NODE", value_delimiter = ',')]
    pub node: Vec<String>,
    /// Namespace of the agents' pods. Default: all namespaces are searched, and agents in more than one are an error, because any
    /// tenant can give its pods the labels of an agent.
    #[arg(long, global = true, value_name = "NAME")]
    pub agents_namespace: Option<String>,
    /// How long to wait for the answer of a node.
    #[arg(long, global = true, value_name = "DURATION", default_value = "15s", value_parser = value::duration)]
    pub patience: Duration,
}

/// The commands.
#[derive(Clone, Debug, Subcommand)]
pub enum KubectlCommand {
    /// Show the state of each node and its problems. Exits with code 1 if a node has a problem or does not answer.
    Status {
        /// Output format.
        #[arg(short, long, default_value = "text", value_parser = Output::parser_of(MERGED))]
        output: Output,
    },
    /// Show Services and their endpoints on all nodes.
    #[command(visible_alias = "svc")]
    Service {
        /// The subcommand.
        #[command(subcommand)]
        command: MergedServiceCommand,
    },
    /// Check the installation on each node, and show what does not pass. Exits with code 1 if a check fails or a node does not
    /// answer.
    Check {
        /// Output format.
        #[arg(short, long, default_value = "text", value_parser = Output::parser_of(MERGED))]
        output: Output,
    },
    /// Show the endpoints of Services on each node.
    #[command(visible_aliases = ["endpoint", "ep"])]
    Backend {
        /// The subcommand.
        #[command(subcommand)]
        command: NodeBackendCommand,
    },
    /// Show the connections in the flow table of each node.
    Flow {
        /// The subcommand.
        #[command(subcommand)]
        command: NodeFlowCommand,
    },
    /// Show the counters of Services on each node.
    Stats(NodeListArgs),
    /// Explain what the programs would do with a connection, on the node where it starts. Sends no packet.
    Explain {
        /// The client: pod/NAMESPACE/NAME, pod/NAME, node/NAME, or a client as for `ballast explain`.
        #[arg(value_name = "CLIENT")]
        client: String,
        /// The destination: svc/NAMESPACE/NAME:PORT, svc/NAME:PORT or ADDRESS:PORT; with /udp or /sctp if it is not TCP.
        #[arg(value_name = "DESTINATION")]
        destination: String,
    },
    /// Show refusals, drops and new connections of all nodes live, in one stream.
    Monitor(MergedMonitorArgs),
    /// Serve a web page of the whole cluster on this machine, until Ctrl-C. It merges the data of the agents' own pages (flag
    /// --page, value `page` of the chart), which it reads through `pods/portforward`.
    Ui {
        /// The port on 127.0.0.1; 0: any free port.
        #[arg(long, value_name = "PORT", default_value_t = 8249)]
        port: u16,
    },
    /// Write an archive with the archive of `ballast sysdump` of each node. Exits with code 1 if a node does not answer.
    Sysdump {
        /// The file to write. Default: ballast-sysdump-<time>.tar in the current folder.
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// Wait until every node has programmed the current version of a Service.
    Wait {
        /// The Service: service/NAME or svc/NAMESPACE/NAME.
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

/// `kubectl ballast service ...`.
#[derive(Clone, Debug, Subcommand)]
pub enum MergedServiceCommand {
    /// List the frontends of Services (addresses that clients connect to), one per line, and mark nodes that differ.
    #[command(visible_alias = "ls")]
    List {
        /// Output format.
        #[arg(short, long, default_value = "text", value_parser = Output::parser(&[]))]
        output: Output,
        /// Which.
        #[command(flatten)]
        selector: MergedSelectorArgs,
    },
}

/// `kubectl ballast backend ...`.
#[derive(Clone, Debug, Subcommand)]
pub enum NodeBackendCommand {
    /// List endpoints, one per line.
    #[command(visible_alias = "ls")]
    List(NodeListArgs),
}

/// `kubectl ballast flow ...`.
#[derive(Clone, Debug, Subcommand)]
pub enum NodeFlowCommand {
    /// List connections, one per line.
    #[command(visible_alias = "ls")]
    List(NodeFlowArgs),
}

/// Which Services a command of all nodes is about.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct MergedSelectorArgs {
    /// All namespaces; overrides --namespace. Also searches all namespaces for a name without namespace.
    #[arg(short = 'A', long)]
    pub all_namespaces: bool,
    /// Only Services with these labels, like `app=web,tier!=test`.
    #[arg(short = 'l', long, value_name = "LABELS")]
    pub selector: Option<String>,
    /// Only these Services: NAME, NAMESPACE/NAME or svc/NAME, each with or without :PORT.
    #[arg(value_name = "SERVICE")]
    pub services: Vec<String>,
}

/// What a list takes that is read on each node: the arguments of the command with this name on a node.
#[derive(Clone, Debug, clap::Args)]
pub struct NodeListArgs {
    /// Output format.
    #[arg(short, long, default_value = "text", value_parser = Output::parser(&[]))]
    pub output: Output,
    /// Sort by this field of the JSON output, or by the column of this name.
    #[arg(long, value_name = "FIELD")]
    pub sort_by: Option<String>,
    /// After the lists, print each row that is added or changed, with its node, until the command is interrupted.
    #[arg(short, long)]
    pub watch: bool,
    /// With --watch: print ADDED, MODIFIED or DELETED in front of each row. Without this flag, deleted rows are not printed.
    #[arg(long)]
    pub output_watch_events: bool,
    /// Which.
    #[command(flatten)]
    pub selector: MergedSelectorArgs,
}

/// `kubectl ballast flow list`.
#[derive(Clone, Debug, clap::Args)]
pub struct NodeFlowArgs {
    /// The list.
    #[command(flatten)]
    pub list: NodeListArgs,
    /// Only connections of this client: an address or a range, with or without :PORT.
    #[arg(long, visible_alias = "src", value_name = "ADDRESS[:PORT]")]
    pub client: Option<Peer>,
    /// Only connections to this frontend: the destination to which the client connected.
    #[arg(long, visible_alias = "dst", value_name = "ADDRESS[:PORT]")]
    pub frontend: Option<Peer>,
    /// Only connections to this endpoint.
    #[arg(long, value_name = "ADDRESS[:PORT]")]
    pub backend: Option<Peer>,
    /// Only connections of this protocol.
    #[arg(long, visible_alias = "proto", value_name = "PROTOCOL", value_parser = question::protocols())]
    pub protocol: Option<Protocol>,
    /// Only connections in this state.
    #[arg(long, value_name = "STATE", value_parser = question::flow_states())]
    pub state: Option<FlowState>,
}

/// How events of many nodes are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum MergedEventOutput {
    /// Text, each line with the node in front.
    #[default]
    Text,
    /// JSON, one object per line, with the field `node`.
    Json,
    /// OpenTelemetry log records: OTLP/JSON, one document per line, with the node as the resource attribute `k8s.node.name`.
    Otlp,
}

/// `kubectl ballast monitor`: the filters of `ballast monitor`.
#[derive(Clone, Debug, clap::Args)]
pub struct MergedMonitorArgs {
    /// Output format.
    #[arg(short, long, default_value = "text")]
    pub output: MergedEventOutput,
    /// Which.
    #[command(flatten)]
    pub selector: MergedSelectorArgs,
    /// Only packets of this client: an address or a range, with or without :PORT.
    #[arg(long, value_name = "ADDRESS[:PORT]")]
    pub client: Option<Peer>,
    /// Only events with this reason; may be given several times.
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = question::reasons(), hide_possible_values = true)]
    pub reason: Vec<proxy_common::reason::Reason>,
    /// Only events of this kind; can be given several times.
    #[arg(long, value_name = "KIND", value_delimiter = ',')]
    pub kind: Vec<EventKind>,
    /// Show one of every N new flows; 0: none.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub sample: u32,
    /// Exit after this time; the processes on the nodes exit then, too.
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = value::duration)]
    pub timeout: Duration,
}
