//! `ballast monitor` and `ballast explain`.

use std::net::IpAddr;
use std::time::Duration;

use clap::ValueEnum;

use super::bpffs::BpffsArgs;
use super::common::ReaderArgs;
use crate::cli::question::{self, Client, Destination};
use crate::config::value;

/// `ballast monitor`.
#[derive(Clone, Debug, clap::Args)]
pub struct MonitorArgs {
    /// Its maps.
    #[command(flatten)]
    pub maps: BpffsArgs,
    /// Output format.
    #[arg(short, long, env = "BALLAST_OUTPUT", default_value = "text")]
    pub output: EventOutput,
    /// Only events of this Service: NAMESPACE/NAME or NAMESPACE/NAME:PORT.
    #[arg(long, env = "BALLAST_SERVICE", value_name = "SERVICE")]
    pub service: Option<String>,
    /// Only packets of this client. A socket has no address yet when it connects; select it with --pid.
    #[arg(long, env = "BALLAST_CLIENT", value_name = "IP")]
    pub client: Option<IpAddr>,
    /// Only socket calls of this process.
    #[arg(long, env = "BALLAST_PID", value_name = "PID")]
    pub pid: Option<u32>,
    /// Only events with this reason, like `no_endpoint`; can be given several times.
    #[arg(long, env = "BALLAST_REASON", value_name = "NAME", value_delimiter = ',', value_parser = question::reason)]
    pub reason: Vec<proxy_common::reason::Reason>,
    /// Only events of this kind; can be given several times.
    #[arg(long, env = "BALLAST_KIND", value_name = "KIND", value_delimiter = ',')]
    pub kind: Vec<EventKind>,
    /// Show one of every N new flows; 0: none. Refusals, drops and passes are always shown.
    #[arg(long, env = "BALLAST_SAMPLE", value_name = "N", default_value_t = 1)]
    pub sample: u32,
    /// Exit after this many events.
    #[arg(long, env = "BALLAST_COUNT", value_name = "N")]
    pub count: Option<u64>,
    /// Exit after this time.
    #[arg(long, env = "BALLAST_TIMEOUT", value_name = "DURATION", value_parser = value::duration)]
    pub timeout: Option<Duration>,
    /// Exit when standard input is closed. `kubectl exec -i` closes it when it is interrupted, but does not stop the process.
    #[arg(long, env = "BALLAST_END_WITH_STDIN")]
    pub end_with_stdin: bool,
}

/// How events are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum EventOutput {
    /// Text.
    #[default]
    #[value(alias = "wide")]
    Text,
    /// JSON, one object per line, with stable field names.
    Json,
    /// YAML documents, with the fields of JSON.
    Yaml,
    /// OpenTelemetry log records: OTLP/JSON, one document per line, as the OTLP file exporter writes them.
    Otlp,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum EventKind {
    /// A new connection to an endpoint.
    New,
    /// A connection was refused, and the client received an error.
    Reject,
    /// A packet was dropped without an answer.
    Drop,
    /// A packet or call passed without translation.
    Pass,
}

/// `ballast explain`.
#[derive(Clone, Debug, clap::Args)]
pub struct ExplainArgs {
    /// Common flags.
    #[command(flatten)]
    pub reader: ReaderArgs,
    /// The client: an IP address, `host` (a process on the node), or `pod` (a process in a pod of this node).
    #[arg(value_name = "CLIENT")]
    pub client: Client,
    /// The address that the client dials, like `10.96.0.10:80` or `[fd00::1]:53/udp`.
    #[arg(value_name = "ADDRESS:PORT[/PROTOCOL]")]
    pub destination: Destination,
}
