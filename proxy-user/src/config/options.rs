//! The settings from the command line and the environment, parsed; `None` or empty: not given.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::FalseyValueParser;

use super::choices::choice;
use super::kube_proxy::Values;
use super::network::Network;
use super::otlp::OtlpOptions;
use super::page::PageSettings;
use super::paths::Paths;
use super::sizes::Sizes;
use super::timeouts::Timeouts;
use crate::host::selection::DevicePattern;
use crate::programs::PacketHook;
use proxy_cli::value::{self, Listen, LogFormat, LogLevel, ProxyMode, ValueError};

/// The default time between two full comparisons.
pub const SYNC_PERIOD: Duration = Duration::from_secs(30);

/// The settings of `ballast run`, before kube-proxy's file is read. The fields are the flags with these names.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Options {
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
        value_parser = |text: &str| text.parse::<DevicePattern>().map_err(|_| ValueError::Devices),
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
    pub sizes: Sizes,

    /// How long flows may be silent.
    #[command(flatten)]
    pub timeouts: Timeouts,

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
    pub kube_proxy: Values,
}
