//! What can be typed. Parsing has no effects; the comments here are the help texts.

pub mod bpffs;
pub mod change;
pub mod check;
mod choices;
pub mod common;
pub mod downgrade;
pub mod end_udp_sockets;
pub mod inspect;
pub mod kube_proxy;
pub mod kubectl;
pub mod list;
pub mod network;
pub mod observe;
mod options;
pub mod otlp;
pub mod page;
pub mod paths;
pub mod programmed;
pub mod sizes;
pub mod takeover;
pub mod timeouts;
pub mod top;

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::FalseyValueParser;
use clap::{Parser, Subcommand};

pub use self::change::CleanupArgs;
pub use self::common::{AgentArgs, Output, ReaderArgs};
pub use self::inspect::{BackendCommand, FlowCommand, MapCommand, ServiceCommand, StatusArgs};
use crate::config::value::{self, Listen, LogFormat, LogLevel, ProxyMode};
use crate::host::selection::DevicePattern;
use crate::programs::PacketHook;

/// Sends traffic for Kubernetes Services to their endpoints, by eBPF instead of kube-proxy.
///
/// `ballast run` is the agent, which runs on each node. The other commands read the BPF maps that it maintains, and
/// also work while the agent is stopped.
#[derive(Clone, Debug, Parser)]
#[command(name = "ballast", version, propagate_version = true, arg_required_else_help = true)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Run the agent: watch Services and EndpointSlices, and program the BPF maps.
    Run(Box<RunArgs>),
    /// Show the state of agent, programs, maps and refused traffic. Exits with 1 when the agent does not answer or reports a problem.
    Status(StatusArgs),
    /// Check whether this node meets the requirements (--pre), and whether Ballast works on it. Exits with 1 when a check fails.
    Check(Box<check::CheckArgs>),
    /// List Services with their endpoints, show one, zero counters.
    #[command(visible_alias = "svc")]
    Service {
        /// What of them.
        #[command(subcommand)]
        command: ServiceCommand,
    },
    /// List the endpoints of Services, one per line.
    #[command(visible_aliases = ["endpoint", "ep"])]
    Backend {
        /// What of them.
        #[command(subcommand)]
        command: BackendCommand,
    },
    /// List or delete connections in the flow table of the packet path. (Sockets are translated at connect, and not tracked.)
    Flow {
        /// What of them.
        #[command(subcommand)]
        command: FlowCommand,
    },
    /// Show counters of Services: connections, packets, bytes, refusals; or their rates.
    Stats(inspect::StatsArgs),
    /// Show the BPF maps: entries in use, size, contents.
    Map {
        /// What of them.
        #[command(subcommand)]
        command: MapCommand,
    },
    /// Explain, rule by rule, what would happen to a connection. No packet is sent.
    Explain(observe::ExplainArgs),
    /// Show refusals, drops and new connections while they happen.
    Monitor(observe::MonitorArgs),
    /// Show Services, endpoints, drops and connections as they happen, on a terminal.
    Top(top::TopArgs),
    /// Show which version of each Service and its EndpointSlices is programmed into the maps, as JSON.
    Programmed(programmed::ProgrammedArgs),
    /// Show the agent's settings, and where each comes from: flag, variable, file or default.
    Config(inspect::ConfigArgs),
    /// Write an archive with the information that a bug report needs, without secrets.
    Sysdump(change::SysdumpArgs),
    /// Print a shell script that completes commands, flags, Services and maps.
    Completion {
        /// The shell.
        shell: inspect::Shell,
    },
    /// Write the manual pages into a folder.
    #[command(hide = true)]
    Man {
        /// The folder.
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
    /// Migrate a live node from kube-proxy: remove its rules, and keep its connections until they end.
    Takeover(takeover::TakeoverArgs),
    /// Prepare a downgrade: make the maps of the previous version, and copy flows until its agent runs.
    Downgrade(downgrade::DowngradeArgs),
    /// End connected UDP sockets in pods when their endpoint leaves, beside an agent that lacks the capabilities for it.
    EndUdpSockets(end_udp_sockets::EndUdpSocketsArgs),
    /// Remove Ballast's programs, maps and pins from the kernel, and nothing else. Stop the agent first.
    Cleanup(CleanupArgs),
}

/// The settings of the agent.
#[derive(Clone, Debug, clap::Args)]
pub struct RunArgs {
    /// A `KubeProxyConfiguration`, as kube-proxy reads it. Flags that kube-proxy has are ignored then, but those
    /// for the log, --hostname-override and --master. When the file changes, the agent ends with an error, to be
    /// started again.
    #[arg(long, env = "BALLAST_CONFIG", value_name = "FILE", help_heading = "As kube-proxy")]
    pub config: Option<PathBuf>,
    /// Write the effective settings as a `KubeProxyConfiguration` to this file, and exit.
    #[arg(long, env = "BALLAST_WRITE_CONFIG_TO", value_name = "FILE", help_heading = "As kube-proxy")]
    pub write_config_to: Option<PathBuf>,
    /// Do the work that needs full privileges, and exit: mount bpffs and cgroup2, set netfilter's sysctls.
    #[arg(
        long,
        env = "BALLAST_INIT_ONLY",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = FalseyValueParser::new(),
        help_heading = "As kube-proxy"
    )]
    pub init_only: Option<bool>,
    /// Do what `ballast cleanup` does, and end.
    #[arg(
        long,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = FalseyValueParser::new(),
        help_heading = "As kube-proxy"
    )]
    pub cleanup: Option<bool>,
    /// Flags of kube-proxy that Ballast does not have.
    #[command(flatten)]
    pub kube_proxy: kube_proxy::KubeProxyFlags,

    /// File with the API server's address and credentials. Default: $KUBECONFIG, then the pod's service account, then ~/.kube/config.
    #[arg(long, env = "BALLAST_KUBECONFIG", value_name = "FILE", help_heading = "Where objects come from")]
    pub kubeconfig: Option<PathBuf>,
    /// Addresses of the API servers, separated by commas, instead of the one that the credentials name. The first one that
    /// answers is used, and the next ones when it fails.
    #[arg(
        long,
        env = "BALLAST_MASTER",
        value_name = "URL",
        value_delimiter = ',',
        help_heading = "Where objects come from"
    )]
    pub master: Vec<String>,
    /// Folder of YAML files with Services and EndpointSlices, watched for changes. No cluster is asked, unless
    /// --kubeconfig or --master is given: then the folder's Services are served beside it, from the start on.
    #[arg(long, env = "BALLAST_MANIFESTS", value_name = "DIR", help_heading = "Where objects come from")]
    pub manifests: Option<PathBuf>,

    /// Name of this node in the cluster. Default: the host's name.
    #[arg(long, env = "BALLAST_HOSTNAME_OVERRIDE", value_name = "NAME", help_heading = "This node")]
    pub hostname_override: Option<String>,
    /// Root of the control groups whose sockets are served. Default: where cgroup2 is mounted.
    #[arg(long, env = "BALLAST_CGROUP_ROOT", value_name = "DIR", help_heading = "This node")]
    pub cgroup_root: Option<PathBuf>,
    /// Where the BPF file system is mounted. Programs and maps are pinned below its folder `ballast`.
    #[arg(
        long,
        env = "BALLAST_BPFFS",
        value_name = "DIR",
        default_value = "/sys/fs/bpf",
        help_heading = "This node"
    )]
    pub bpffs: PathBuf,
    /// The node's address, if it is not its internal one, or all (0.0.0.0, ::). Its family is the node's first one, and the default of the two addresses below. Default: 0.0.0.0.
    #[arg(long, env = "BALLAST_BIND_ADDRESS", value_name = "IP", help_heading = "This node")]
    pub bind_address: Option<IpAddr>,
    /// Devices whose packets are translated, as names with * and ?, separated by commas; !NAME leaves one out.
    /// Default: all that carry traffic of pods or of the outside.
    #[arg(
        long,
        env = "BALLAST_DEVICES",
        value_name = "GLOB",
        value_delimiter = ',',
        value_parser = value::device_pattern,
        help_heading = "This node"
    )]
    pub devices: Vec<DevicePattern>,
    /// How programs are attached to devices. Only tests need it.
    #[arg(long, env = "BALLAST_PACKET_HOOK", value_name = "HOOK", default_value = "auto", hide = true)]
    pub packet_hook: PacketHook,
    /// How sockets and packets are met.
    #[command(flatten)]
    pub paths: paths::PathArgs,

    /// The network.
    #[command(flatten)]
    pub network: network::NetworkArgs,

    /// Where load balancers ask whether this node works (/healthz, /livez). Empty: nowhere.
    /// Default: 0.0.0.0:10256, or `[::]:10256` with an IPv6 --bind-address.
    #[arg(
        long,
        env = "BALLAST_HEALTHZ_BIND_ADDRESS",
        value_name = "ADDRESS",
        help_heading = "Health, metrics, log"
    )]
    pub healthz_bind_address: Option<Listen>,
    /// Where /metrics, /proxyMode and /configz are answered. Empty: nowhere.
    /// Default: 127.0.0.1:10249, or `[::1]:10249` with an IPv6 --bind-address.
    #[arg(
        long,
        env = "BALLAST_METRICS_BIND_ADDRESS",
        value_name = "ADDRESS",
        help_heading = "Health, metrics, log"
    )]
    pub metrics_bind_address: Option<Listen>,
    /// The page.
    #[command(flatten)]
    pub page: page::PageArgs,
    /// Export of telemetry.
    #[command(flatten)]
    pub otlp: otlp::OtlpArgs,
    /// How log lines are written. Default: text.
    #[arg(long, env = "BALLAST_LOG_FORMAT", value_name = "FORMAT", help_heading = "Health, metrics, log")]
    pub log_format: Option<LogFormat>,
    /// How much is logged: error, warn, info, debug, trace, or a klog number. `BALLAST_LOG` sets it for each
    /// module, like `info,ballast::sync=trace`. Default: info.
    #[arg(
        short = 'v',
        long,
        alias = "v",
        env = "BALLAST_LOG_LEVEL",
        value_name = "LEVEL",
        help_heading = "Health, metrics, log"
    )]
    pub log_level: Option<LogLevel>,

    /// Sizes of the maps.
    #[command(flatten)]
    pub sizes: sizes::SizeArgs,

    /// How long flows may be silent.
    #[command(flatten)]
    pub timeouts: timeouts::TimeoutArgs,

    /// Least time between two passes over the maps; changes in between are made together. Default: 0, at once.
    #[arg(
        long,
        env = "BALLAST_MIN_SYNC_PERIOD",
        value_name = "DURATION",
        value_parser = value::duration,
        help_heading = "Timing"
    )]
    pub min_sync_period: Option<Duration>,
    /// How often the maps are compared in full with what they should be. /healthz fails when a change has waited for two such periods. Default: 30s.
    #[arg(
        long,
        env = "BALLAST_SYNC_PERIOD",
        value_name = "DURATION",
        value_parser = value::duration,
        help_heading = "Timing"
    )]
    pub sync_period: Option<Duration>,

    /// How often all Services and EndpointSlices are listed once more and compared with what is programmed; a difference that
    /// lasts is repaired and counted. 0: never.
    #[arg(
        long,
        env = "BALLAST_API_AUDIT_PERIOD",
        value_name = "DURATION",
        default_value = "1h",
        value_parser = value::duration,
        help_heading = "Timing"
    )]
    pub api_audit_period: Duration,

    /// For kube-proxy's sake: ebpf. Its own modes are taken too, with a line in the log, and mean ebpf.
    #[arg(long, env = "BALLAST_PROXY_MODE", value_name = "MODE", help_heading = "As kube-proxy")]
    pub proxy_mode: Option<ProxyMode>,
}
