//! The command line. Parsing has no side effects; the doc comments of this module are the help texts.

pub mod gate;
pub mod kube_proxy;
pub mod log;
mod options;
pub mod sizes;
pub mod takeover;
pub mod timeouts;

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::FalseyValueParser;
use clap::{Parser, Subcommand};

use crate::cli::candidates;
use crate::config::choices::choice;
use crate::config::devices::device_pattern;
use crate::config::network::Network;
use crate::config::otlp::OtlpOptions;
use crate::config::page::PageSettings;
use crate::config::paths::Paths;
use crate::host::selection::DevicePattern;
use crate::programs::PacketHook;
use proxy_cli::args::change::{self, CleanupArgs};
use proxy_cli::args::inspect::{self, BackendCommand, FlowCommand, MapCommand, ServiceCommand, StatusArgs};
use proxy_cli::args::{check, examples, observe, programmed, top};
use proxy_cli::value::{self, Listen, LogFormat, LogLevel, ProxyMode};

/// Replaces kube-proxy: sends the traffic of Kubernetes Services to their endpoints with eBPF.
///
/// `ballast run` starts the agent, which runs on each node. The other commands read the BPF maps that the agent writes, and also
/// work while the agent is stopped, except `config` and `programmed`, which ask the agent.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "ballast",
    version,
    propagate_version = true,
    arg_required_else_help = true,
    mut_subcommands(examples::prepare)
)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Run the agent: watch Services and EndpointSlices, and program the BPF maps.
    // As with kube-proxy, a repeated flag replaces the one before, or adds to its list.
    #[command(args_override_self = true)]
    Run(Box<RunArgs>),
    /// Show the state of the agent, programs and maps, and the refused traffic. Exits with code 1 if the agent does not answer or reports a problem.
    Status(StatusArgs),
    /// Check whether this node meets the requirements (--pre), and whether Ballast works on it. Exits with code 1 if a check fails.
    Check(Box<check::CheckArgs>),
    /// List Services with their endpoints, show one Service, or reset counters.
    #[command(visible_alias = "svc")]
    Service {
        /// The subcommand.
        #[command(subcommand)]
        command: ServiceCommand,
    },
    /// List the endpoints of Services, one per line.
    #[command(visible_aliases = ["endpoint", "ep"])]
    Backend {
        /// The subcommand.
        #[command(subcommand)]
        command: BackendCommand,
    },
    /// List or delete connections in the flow table of the packet path. Connections that are translated at the socket have no entry.
    Flow {
        /// The subcommand.
        #[command(subcommand)]
        command: FlowCommand,
    },
    /// Show counters or rates of Services: connections, packets, bytes and refusals.
    Stats(inspect::StatsArgs),
    /// Show the BPF maps: entries in use, sizes and contents.
    Map {
        /// The subcommand.
        #[command(subcommand)]
        command: MapCommand,
    },
    /// Explain, step by step, what the programs would do with a connection. Sends no packet.
    Explain(observe::ExplainArgs),
    /// Show refusals, drops and new connections live.
    Monitor(observe::MonitorArgs),
    /// Show live rates of Services and endpoints, drops and connections on a terminal.
    Top(top::TopArgs),
    /// Show which version of each Service and its EndpointSlices is programmed into the maps.
    Programmed(programmed::ProgrammedArgs),
    /// Show the agent's settings and the source of each: flag, environment variable, file or default.
    Config(inspect::ConfigArgs),
    /// Collect the information for a bug report in an archive, without secrets.
    Sysdump(change::SysdumpArgs),
    /// Show the version of this program and of the agent.
    Version(inspect::VersionArgs),
    /// Print a shell script that completes commands, flags, and the names of Services and maps.
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
    /// Migrate a live node from kube-proxy: remove the rules of kube-proxy, and keep its connections until they end.
    Takeover(takeover::TakeoverArgs),
    /// Close connected UDP sockets in pods after their endpoint was removed. Runs next to an agent without the capabilities for that.
    EndUdpSockets(log::EndUdpSocketsArgs),
    /// In a pod: set a readiness gate of the pod once every node has programmed it, and hold its end until no node sends it new
    /// connections.
    Gate(gate::GateArgs),
    /// Remove Ballast's programs, maps and pins from the kernel, and nothing else. Stop the agent first.
    Cleanup(CleanupArgs),
}

/// The settings of the agent.
#[derive(Clone, Debug, clap::Args)]
pub struct RunArgs {
    /// File with the API server's address and credentials. Default: $KUBECONFIG or ~/.kube/config, then the pod's service account.
    #[arg(long, env = "BALLAST_KUBECONFIG", value_name = "FILE", help_heading = "Source of Services")]
    pub kubeconfig: Option<PathBuf>,
    /// Comma-separated URLs of the API servers, instead of the one in the kubeconfig. The agent uses the first one that
    /// answers, and changes to the next one when it fails.
    #[arg(
        long,
        env = "BALLAST_MASTER",
        value_name = "URL",
        value_delimiter = ',',
        value_parser = value::api_server,
        help_heading = "Source of Services"
    )]
    pub master: Vec<String>,
    /// Folder of YAML files with Services and EndpointSlices; the agent watches it for changes. Without --kubeconfig and
    /// --master the agent uses no API server. With one of them it serves the Services of both, and those of the folder
    /// before the API server answers.
    #[arg(long, env = "BALLAST_MANIFESTS", value_name = "DIR", help_heading = "Source of Services")]
    pub manifests: Option<PathBuf>,

    /// Name of this node in the cluster. Default: the host name.
    #[arg(long, env = "BALLAST_HOSTNAME_OVERRIDE", value_name = "NAME", help_heading = "Node")]
    pub hostname_override: Option<String>,
    /// Root of the cgroups whose sockets are translated. Default: the mount point of cgroup2.
    #[arg(long, env = "BALLAST_CGROUP_ROOT", value_name = "DIR", help_heading = "Node")]
    pub cgroup_root: Option<PathBuf>,
    /// Mount point of the BPF file system. The agent pins programs and maps in its folder `ballast`.
    #[arg(
        long,
        env = "BALLAST_BPFFS",
        value_name = "DIR",
        default_value = "/sys/fs/bpf",
        help_heading = "Node"
    )]
    pub bpffs: PathBuf,
    /// Address of the node, if it is not the `InternalIP` of the Node; 0.0.0.0 or :: keep the `InternalIP`. Its family is the primary one of the node, and the family of the default health and metrics addresses. Default: 0.0.0.0.
    #[arg(long, env = "BALLAST_BIND_ADDRESS", value_name = "IP", help_heading = "Node")]
    pub bind_address: Option<IpAddr>,
    /// Devices to attach packet programs to: comma-separated names with * and ?; !NAME excludes a device.
    /// Default: all devices that carry traffic of pods or of other machines.
    #[arg(
        long,
        env = "BALLAST_DEVICES",
        value_name = "GLOB",
        value_delimiter = ',',
        value_parser = device_pattern,
        add = candidates::devices(),
        help_heading = "Node"
    )]
    pub devices: Vec<DevicePattern>,
    /// How programs are attached to devices. Only tests need it.
    #[arg(long, env = "BALLAST_PACKET_HOOK", value_name = "HOOK", default_value = "auto", hide = true, value_parser = choice::<PacketHook>())]
    pub packet_hook: PacketHook,
    /// How sockets and packets are met.
    #[command(flatten)]
    pub paths: Paths,

    /// The network.
    #[command(flatten)]
    pub network: Network,

    /// Address of the health server (/healthz, /livez, /readyz), which load balancers query. Empty: no health server.
    /// Default: 0.0.0.0:10256, or `[::]:10256` with an IPv6 --bind-address.
    #[arg(
        long,
        env = "BALLAST_HEALTHZ_BIND_ADDRESS",
        value_name = "ADDRESS",
        help_heading = "Health, metrics, logs"
    )]
    pub healthz_bind_address: Option<Listen>,
    /// Address of the metrics server (/metrics, /proxyMode, /configz, /status, /programmed). Empty: no
    /// metrics server.
    /// Default: 127.0.0.1:10249, or `[::1]:10249` with an IPv6 --bind-address.
    #[arg(
        long,
        env = "BALLAST_METRICS_BIND_ADDRESS",
        value_name = "ADDRESS",
        help_heading = "Health, metrics, logs"
    )]
    pub metrics_bind_address: Option<Listen>,
    /// The page.
    #[command(flatten)]
    pub page: PageSettings,
    /// Export of telemetry.
    #[command(flatten)]
    pub otlp: OtlpOptions,
    /// Format of log lines. Default: text.
    #[arg(long, env = "BALLAST_LOG_FORMAT", value_name = "FORMAT", help_heading = "Health, metrics, logs", value_parser = choice::<LogFormat>())]
    pub log_format: Option<LogFormat>,
    /// Log level: error, warn, info, debug, trace, or a klog number. The variable `BALLAST_LOG` sets it for single
    /// modules, like `info,ballast::sync=trace`. Default: info.
    #[arg(
        short = 'v',
        long,
        alias = "v",
        env = "BALLAST_LOG_LEVEL",
        value_name = "LEVEL",
        help_heading = "Health, metrics, logs"
    )]
    pub log_level: Option<LogLevel>,

    /// Sizes of the maps.
    #[command(flatten)]
    pub sizes: sizes::SizeArgs,

    /// How long flows may be silent.
    #[command(flatten)]
    pub timeouts: timeouts::TimeoutArgs,

    /// Shortest time between two syncs of the maps; the agent applies the changes in between together. Default: 0 (no delay).
    #[arg(
        long,
        env = "BALLAST_MIN_SYNC_PERIOD",
        value_name = "DURATION",
        value_parser = value::duration,
        help_heading = "Timing"
    )]
    pub min_sync_period: Option<Duration>,
    /// How often the agent compares all maps with the desired state and repairs differences. /healthz fails when a change is not applied after two such periods. Default: 30s.
    #[arg(
        long,
        env = "BALLAST_SYNC_PERIOD",
        value_name = "DURATION",
        value_parser = value::duration,
        help_heading = "Timing"
    )]
    pub sync_period: Option<Duration>,

    /// How often the agent lists all Services and EndpointSlices again and compares them with what is programmed, which
    /// the API server pays for. It counts and repairs differences that persist. 0: never.
    #[arg(
        long,
        env = "BALLAST_API_AUDIT_PERIOD",
        value_name = "DURATION",
        default_value = "0",
        value_parser = value::duration,
        help_heading = "Timing"
    )]
    pub api_audit_period: Duration,

    /// File with a `KubeProxyConfiguration`, the format of kube-proxy. With it, the agent ignores the flags that kube-proxy
    /// also has, except the log flags, --hostname-override and --master. When the file changes, the agent exits with an
    /// error, so that it is restarted.
    #[arg(long, env = "BALLAST_CONFIG", value_name = "FILE", help_heading = "kube-proxy compatibility")]
    pub config: Option<PathBuf>,
    /// Write the effective settings as a `KubeProxyConfiguration` to this file, and exit.
    #[arg(
        long,
        env = "BALLAST_WRITE_CONFIG_TO",
        value_name = "FILE",
        help_heading = "kube-proxy compatibility"
    )]
    pub write_config_to: Option<PathBuf>,
    /// Do only the work that needs full privileges (mount bpffs and cgroup2, set netfilter sysctls), and exit.
    #[arg(
        long,
        env = "BALLAST_INIT_ONLY",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = FalseyValueParser::new(),
        help_heading = "kube-proxy compatibility"
    )]
    pub init_only: Option<bool>,
    /// Do what `ballast cleanup` does, and exit.
    #[arg(
        long,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = FalseyValueParser::new(),
        help_heading = "kube-proxy compatibility"
    )]
    pub cleanup: Option<bool>,
    /// Only for compatibility: ebpf. The modes of kube-proxy are accepted with a line in the log, and mean ebpf.
    #[arg(long, env = "BALLAST_PROXY_MODE", value_name = "MODE", help_heading = "kube-proxy compatibility")]
    pub proxy_mode: Option<ProxyMode>,
    /// Flags of kube-proxy that Ballast does not have.
    #[command(flatten)]
    pub kube_proxy: kube_proxy::KubeProxyFlags,
}

#[cfg(test)]
mod tests {
    use clap::{Command, CommandFactory as _, Parser as _};

    use super::Args;
    use proxy_cli::args::examples::EXAMPLES;
    use proxy_cli::args::kubectl::KubectlArgs;

    #[test]
    fn every_command_has_examples_and_each_of_them_is_accepted() {
        fn collect(command: &Command, path: &str, found: &mut Vec<String>) {
            for one in command.get_subcommands().filter(|one| !one.is_hide_set()) {
                let path = format!("{path} {}", one.get_name());
                let help = one.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(help.contains("Examples:"), "{path}");
                found.push(path.trim().to_owned());
                collect(one, &path, found);
            }
        }
        let mut found = Vec::new();
        collect(&Args::command(), "", &mut found);
        collect(&KubectlArgs::command(), "kubectl ballast", &mut found);
        for (path, examples) in EXAMPLES {
            assert!(found.iter().any(|one| one == path), "there is no command {path}");
            for (what, words) in *examples {
                let error = match words.strip_prefix("kubectl ") {
                    Some(words) => KubectlArgs::try_parse_from(words.split(' ')).err(),
                    None => Args::try_parse_from(words.split(' ')).err(),
                };
                assert!(error.is_none(), "{what}: {words}: {}", error.unwrap());
            }
        }
    }

    #[test]
    fn words_count_in_any_case() {
        for words in [
            "flow list --state ESTABLISHED --protocol TCP -o JSON",
            "monitor --kind Reject --reason NO_ENDPOINT",
            "top --screen Drops --sort BYTES",
            "run --xdp AUTO --log-format Json",
        ] {
            let all = ["ballast"].into_iter().chain(words.split(' '));
            assert!(Args::try_parse_from(all).is_ok(), "{words}");
        }
        for words in ["status -o JSON", "monitor --kind NEW -o Otlp", "flow list --state ESTABLISHED -o WIDE"]
        {
            let all = ["kubectl-ballast"].into_iter().chain(words.split(' '));
            assert!(KubectlArgs::try_parse_from(all).is_ok(), "{words}");
        }
    }

    #[test]
    fn the_agents_own_flags_come_before_those_of_kube_proxy() {
        let mut command = Args::command();
        let help = command.find_subcommand_mut("run").unwrap().render_long_help().to_string();
        let at = |text: &str| help.find(text).unwrap_or_else(|| panic!("no {text}"));
        assert!(at("--manifests") < at("--config <FILE>"));
        assert!(at("--sync-period") < at("--proxy-mode"));
        assert!(at("--proxy-mode") < at("Other flags of kube-proxy"));
    }
}
