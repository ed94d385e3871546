//! `ballast monitor` and `ballast explain`.

use std::time::Duration;

use clap::ValueEnum;

use super::bpffs::BpffsArgs;
use super::common::{AgentArgs, ReaderArgs};
use super::list::{ApiArgs, Output, SelectorArgs};
use crate::candidates;
use crate::question::{self, ClientArg, DestinationArg, Peer};
use crate::value;

/// `ballast monitor`.
#[derive(Clone, Debug, clap::Args)]
pub struct MonitorArgs {
    /// Its maps.
    #[command(flatten)]
    pub maps: BpffsArgs,
    /// Output format.
    #[arg(short, long, env = "BALLAST_OUTPUT", default_value = "text", value_parser = Output::parser(&[Output::Otlp]))]
    pub output: Output,
    /// Which.
    #[command(flatten)]
    pub selector: SelectorArgs,
    /// Only packets of this client: an address or a range, with or without :PORT. A socket has no address yet when it
    /// connects; select it with --pid.
    #[arg(short = 's', long, visible_alias = "src", env = "BALLAST_CLIENT", value_name = "ADDRESS[:PORT]")]
    pub client: Option<Peer>,
    /// Only socket calls of this process.
    #[arg(long, env = "BALLAST_PID", value_name = "PID")]
    pub pid: Option<u32>,
    /// Only events with this reason, like `no_endpoint`; can be given several times.
    #[arg(long, env = "BALLAST_REASON", value_name = "NAME", value_delimiter = ',', value_parser = question::reasons(), hide_possible_values = true)]
    pub reason: Vec<proxy_common::reason::Reason>,
    /// Only events of this kind; can be given several times.
    #[arg(long, env = "BALLAST_KIND", value_name = "KIND", value_delimiter = ',')]
    pub kind: Vec<EventKind>,
    /// Show the last N events and exit. The history has refusals, drops and passes; new flows only of times when a monitor ran.
    #[arg(long, env = "BALLAST_LAST", value_name = "N")]
    pub last: Option<usize>,
    /// With --last: then show new events, as without it.
    #[arg(short, long, env = "BALLAST_FOLLOW")]
    pub follow: bool,
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
    /// Namespace of a pod or Service that is given without one. Default: `default`.
    #[arg(short, long, env = "BALLAST_NAMESPACE", value_name = "NAMESPACE")]
    pub namespace: Option<String>,
    /// The API server, which knows pods.
    #[command(flatten)]
    pub api: ApiArgs,
    /// The agent, which knows why a Service is not programmed.
    #[command(flatten)]
    pub agent: AgentArgs,
    /// The client: an IP address, `host` (a process on the node), `pod` (a process in a pod of this node), or pod/NAME or
    /// pod/NAMESPACE/NAME, which is read from the API server (the agent's account may not read pods: give --kubeconfig, or use
    /// `kubectl ballast explain`).
    #[arg(value_name = "CLIENT", add = candidates::clients())]
    pub client: ClientArg,
    /// The address that the client connects to, like `10.96.0.10:80` or `[fd00::1]:53/udp`, or a Service: NAME,
    /// NAMESPACE/NAME, svc/NAME or service/NAME, with :PORT (a name or number) if it has several ports.
    #[arg(value_name = "DESTINATION")]
    pub destination: DestinationArg,
}
