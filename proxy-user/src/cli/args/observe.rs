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
    /// How events are written.
    #[arg(short, long, env = "BALLAST_OUTPUT", default_value = "text")]
    pub output: EventOutput,
    /// Only events of this Service: NAMESPACE/NAME or NAMESPACE/NAME:PORT.
    #[arg(long, env = "BALLAST_SERVICE", value_name = "SERVICE")]
    pub service: Option<String>,
    /// Only packets of this client. (A socket has no address yet when it connects: see --pid.)
    #[arg(long, env = "BALLAST_CLIENT", value_name = "IP")]
    pub client: Option<IpAddr>,
    /// Only calls of this process.
    #[arg(long, env = "BALLAST_PID", value_name = "PID")]
    pub pid: Option<u32>,
    /// Only events with this reason, like `no_endpoint`; may be given several times.
    #[arg(long, env = "BALLAST_REASON", value_name = "NAME", value_delimiter = ',', value_parser = question::reason)]
    pub reason: Vec<proxy_common::reason::Reason>,
    /// Only events of this kind; may be given several times.
    #[arg(long, env = "BALLAST_KIND", value_name = "KIND", value_delimiter = ',')]
    pub kind: Vec<EventKind>,
    /// Of new flows, one in so many; 0: none. Refusals, drops and passes are always shown.
    #[arg(long, env = "BALLAST_SAMPLE", value_name = "N", default_value_t = 1)]
    pub sample: u32,
    /// End after so many events.
    #[arg(long, env = "BALLAST_COUNT", value_name = "N")]
    pub count: Option<u64>,
    /// End after so long.
    #[arg(long, env = "BALLAST_TIMEOUT", value_name = "DURATION", value_parser = value::duration)]
    pub timeout: Option<Duration>,
    /// End when standard input ends. `kubectl exec -i` closes it when it is interrupted, and ends no process by itself.
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
    /// JSON, one object on each line, with field names that stay.
    Json,
    /// The same as YAML documents.
    Yaml,
    /// OpenTelemetry log records: OTLP/JSON, one document on each line, as its file exporter writes them.
    Otlp,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum EventKind {
    /// A connection to an endpoint began.
    New,
    /// The client was told that it is not served.
    Reject,
    /// Silence.
    Drop,
    /// It went on untranslated.
    Pass,
}

/// `ballast explain`.
#[derive(Clone, Debug, clap::Args)]
pub struct ExplainArgs {
    /// Common flags.
    #[command(flatten)]
    pub reader: ReaderArgs,
    /// Who connects: an address, `host` (a process on the node), or `pod` (one in a pod of this node).
    #[arg(value_name = "CLIENT")]
    pub client: Client,
    /// What it dials, like `10.96.0.10:80` or `[fd00::1]:53/udp`.
    #[arg(value_name = "ADDRESS:PORT[/PROTOCOL]")]
    pub destination: Destination,
}
