//! `kubectl ballast`: the program under the name `kubectl-ballast`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};

use super::observe::EventKind;
use crate::cli::question;
use crate::config::value;

/// Asks the agents of all nodes of a cluster, and puts their answers together.
///
/// It runs `ballast` in the agents' pods (`pods/exec`), with the rights of your kubeconfig.
#[derive(Clone, Debug, Parser)]
#[command(name = "kubectl-ballast", bin_name = "kubectl ballast", version, arg_required_else_help = true)]
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
    /// File with the API server's address and credentials. Default: as kubectl.
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The context of that file.
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
    /// The namespace of names that do not say one. Default: the context's.
    #[arg(short, long, global = true, value_name = "NAME")]
    pub namespace: Option<String>,
    /// Only these nodes; may be given several times. Default: all.
    #[arg(long, global = true, value_name = "NODE", value_delimiter = ',')]
    pub node: Vec<String>,
    /// The namespace of the agents' pods. Default: all are searched.
    #[arg(long, global = true, value_name = "NAME")]
    pub agents_namespace: Option<String>,
    /// How long a node may take to answer.
    #[arg(long, global = true, value_name = "DURATION", default_value = "15s", value_parser = value::duration)]
    pub patience: Duration,
}

/// The commands.
#[derive(Clone, Debug, Subcommand)]
pub enum KubectlCommand {
    /// Say of each node whether all is well, and what is wrong. Exits with 1 when it is not well on a node.
    Status {
        /// How the answer is written.
        #[arg(short, long, default_value = "text")]
        output: MergedOutput,
    },
    /// Services and where their traffic goes.
    #[command(visible_alias = "svc")]
    Service {
        /// What of them.
        #[command(subcommand)]
        command: MergedServiceCommand,
    },
    /// Say what would happen to a connection, on the node where it begins. Nothing is sent.
    Explain {
        /// Who connects: pod/NAMESPACE/NAME, pod/NAME, node/NAME, or what `ballast explain` takes.
        #[arg(value_name = "CLIENT")]
        client: String,
        /// What it dials: svc/NAMESPACE/NAME:PORT, svc/NAME:PORT, with /udp or /sctp where it is not TCP, or ADDRESS:PORT.
        #[arg(value_name = "DESTINATION")]
        destination: String,
    },
    /// Show refusals, drops and new connections of all nodes as one stream.
    Monitor(MergedMonitorArgs),
    /// Serve a page of the whole cluster on this machine, until control-c: what the agents' own pages show (--page, the chart's
    /// `page`), put together. Reaches the agents by `pods/portforward`.
    Ui {
        /// The port on 127.0.0.1; 0: any that is free.
        #[arg(long, value_name = "PORT", default_value_t = 8249)]
        port: u16,
    },
    /// Wait until every node serves a Service as the API server has it now.
    Wait {
        /// service/NAME, svc/NAMESPACE/NAME.
        #[arg(value_name = "service/NAME")]
        object: String,
        /// Until it is programmed: there is nothing else to wait for.
        #[arg(long, required = true)]
        programmed: bool,
        /// How long to wait at most.
        #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = value::duration)]
        timeout: Duration,
    },
}

/// `kubectl ballast service ...`.
#[derive(Clone, Debug, Subcommand)]
pub enum MergedServiceCommand {
    /// One line for each address that a client may dial, and which nodes differ from the others.
    #[command(visible_alias = "ls")]
    List {
        /// How the answer is written.
        #[arg(short, long, default_value = "text")]
        output: MergedOutput,
    },
}

/// How an answer of many nodes is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum MergedOutput {
    /// A table.
    #[default]
    Text,
    /// JSON, with field names that stay.
    Json,
}

/// How events of many nodes are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum MergedEventOutput {
    /// Text, with the node in front.
    #[default]
    Text,
    /// JSON, one object on each line, with the field `node`.
    Json,
    /// OpenTelemetry log records: OTLP/JSON, one document on each line, with the node as `k8s.node.name` of its resource.
    Otlp,
}

/// `kubectl ballast monitor`: the filters of `ballast monitor`.
#[derive(Clone, Debug, clap::Args)]
pub struct MergedMonitorArgs {
    /// How events are written.
    #[arg(short, long, default_value = "text")]
    pub output: MergedEventOutput,
    /// Only events of this Service: NAMESPACE/NAME or NAMESPACE/NAME:PORT.
    #[arg(long, value_name = "SERVICE")]
    pub service: Option<String>,
    /// Only packets of this client.
    #[arg(long, value_name = "IP")]
    pub client: Option<IpAddr>,
    /// Only events with this reason; may be given several times.
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = question::reason)]
    pub reason: Vec<proxy_common::reason::Reason>,
    /// Only events of this kind; may be given several times.
    #[arg(long, value_name = "KIND", value_delimiter = ',')]
    pub kind: Vec<EventKind>,
    /// Of new flows, one in so many; 0: none.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub sample: u32,
    /// End after so long: what is left of it on the nodes ends then, too.
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = value::duration)]
    pub timeout: Duration,
}
