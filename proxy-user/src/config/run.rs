//! What `ballast run` was asked to do, checked.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use super::error::ConfigError;
use super::kube_proxy::merge::{self, Overlay};
use super::network::{Network, node_settings};
use super::options::{Options, SYNC_PERIOD};
use super::otlp::OtlpSettings;
use super::page::{PageSettings, Shows};
use super::paths::Paths;
use super::value::{Listen, LogFormat, LogLevel, ProxyMode, SnatPorts, seconds};
use crate::host::selection::Selection;
use crate::host::{memory, ports};
use crate::model::net::IpFamily;
use crate::model::ports::{LOCAL_PORTS, snat_ports};
use crate::model::settings::{FlowTimeouts, NodeSettings};
use crate::programs::{Capacities, PacketHook};

/// Port of the health server, as kube-proxy's.
pub const HEALTHZ_PORT: u16 = 10_256;
/// Port of the metrics server, as kube-proxy's.
pub const METRICS_PORT: u16 = 10_249;

/// Where objects come from: a folder, a cluster, or both.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Source {
    /// A folder of manifests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manifests: Option<PathBuf>,
    /// API servers. They are not asked where a folder is given, and no word of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster: Option<Cluster>,
}

/// The API servers of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Cluster {
    /// File with address and credentials; `None`: as client libraries find them.
    pub kubeconfig: Option<PathBuf>,
    /// Addresses that override the file's, in the order in which they are tried.
    pub master: Vec<String>,
}

impl Source {
    fn new(kubeconfig: Option<PathBuf>, mut master: Vec<String>, manifests: Option<PathBuf>) -> Self {
        // kube-proxy's default is the empty text.
        master.retain(|url| !url.is_empty());
        let has_cluster = manifests.is_none() || kubeconfig.is_some() || !master.is_empty();
        Self { manifests, cluster: has_cluster.then_some(Cluster { kubeconfig, master }) }
    }
}

/// The checked settings of the agent. `/configz` shows them as they are serialized here.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RunConfig {
    /// Where objects come from.
    pub source: Source,
    /// Name of this node, in lower case as kube-proxy makes it.
    pub node_name: String,
    /// Root of the control groups; `None`: where cgroup2 is mounted.
    pub cgroup_root: Option<PathBuf>,
    /// Where the BPF file system is mounted.
    pub bpffs: PathBuf,
    /// The node's address, or unspecified.
    pub bind_address: IpAddr,
    /// Devices whose packets are translated.
    pub devices: Selection,
    /// How programs are put on devices.
    pub packet_hook: PacketHook,
    /// How sockets and packets are met.
    #[serde(flatten)]
    pub paths: Paths,
    /// What the network around the node is like; with the source ports in effect.
    pub network: Network,
    /// The same, checked.
    #[serde(skip)]
    pub node: NodeSettings,
    /// Where the health server listens, if anywhere.
    pub healthz_bind_address: Option<SocketAddr>,
    /// Where the metrics server listens, if anywhere.
    pub metrics_bind_address: Option<SocketAddr>,
    /// What its page shows.
    #[serde(flatten)]
    pub page: PageSettings,
    /// Where telemetry is exported to, if anywhere.
    #[serde(flatten)]
    pub otlp: Option<OtlpSettings>,
    /// How large the maps are made.
    pub capacities: Capacities,
    /// How long flows may be silent, in seconds.
    pub flow_timeouts: FlowTimeouts,
    /// Least time between two passes.
    #[serde(serialize_with = "seconds")]
    pub min_sync_period: Duration,
    /// Time between two full comparisons.
    #[serde(serialize_with = "seconds")]
    pub sync_period: Duration,
    /// How often Services and EndpointSlices are listed once more and compared with what is programmed; zero: never.
    #[serde(serialize_with = "seconds")]
    pub api_audit_period: Duration,
    /// How log lines are written.
    pub log_format: LogFormat,
    /// How much is logged.
    pub log_level: LogLevel,
    /// What only kube-proxy's file and flags tell.
    #[serde(flatten)]
    pub kube_proxy: Overlay,
    /// A mode of kube-proxy that was asked for and means `ebpf` here; to be said once in the log.
    pub legacy_proxy_mode: Option<&'static str>,
}

impl RunConfig {
    /// Checks `options`. Asks the host for its memory, for OpenTelemetry's variables, and for its name and the ports that it
    /// gives to sockets, unless name and source ports are given; these are the only looks outside.
    pub fn new(mut options: Options) -> Result<Self, ConfigError> {
        let kube_proxy = merge::apply(&mut options)?;
        let Options {
            // The file has been read, with the flags that stand for it.
            config: _,
            kube_proxy: _,
            kubeconfig,
            master,
            manifests,
            hostname_override,
            cgroup_root,
            bpffs,
            bind_address,
            devices,
            packet_hook,
            paths,
            mut network,
            healthz_bind_address,
            metrics_bind_address,
            page,
            otlp,
            log_format,
            log_level,
            sizes,
            timeouts,
            min_sync_period,
            sync_period,
            api_audit_period,
            proxy_mode,
        } = options;

        let bind_address = bind_address.unwrap_or(Ipv4Addr::UNSPECIFIED.into());
        let sync_period = sync_period.unwrap_or(SYNC_PERIOD);
        let min_sync_period = min_sync_period.unwrap_or_default();
        if sync_period < Duration::from_secs(1) {
            return Err(ConfigError::SyncPeriod(sync_period));
        }
        if min_sync_period > sync_period {
            return Err(ConfigError::Periods { min: min_sync_period, max: sync_period });
        }
        let devices = Selection(devices);
        if devices.only_excludes() {
            return Err(ConfigError::OnlyExcludes(devices));
        }
        let (any, loopback): (IpAddr, IpAddr) = match IpFamily::of(bind_address) {
            IpFamily::V4 => (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::LOCALHOST.into()),
            IpFamily::V6 => (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::LOCALHOST.into()),
        };
        let healthz = healthz_bind_address.unwrap_or(Listen::Address(any)).resolve(HEALTHZ_PORT);
        let metrics = metrics_bind_address.unwrap_or(Listen::Address(loopback)).resolve(METRICS_PORT);
        if let (Some(one), Some(other)) = (healthz, metrics)
            && one == other
            && one.port() != 0
        {
            return Err(ConfigError::SameAddress(one));
        }
        if page.page != Shows::Off && metrics.is_none() {
            return Err(ConfigError::PageWithoutServer);
        }
        let node_name = node_name_or_host(hostname_override)?;

        network.snat_ports.get_or_insert_with(|| {
            let local = ports::local().unwrap_or(LOCAL_PORTS);
            SnatPorts(snat_ports(local, network.service_node_port_range.0))
        });
        let flow_timeouts = timeouts.over(FlowTimeouts::of_conntrack(&kube_proxy.conntrack));
        let node = NodeSettings {
            socket_lb: paths.socket_lb,
            socket_drop: paths.socket_drop,
            timeouts: flow_timeouts,
            ..node_settings(&network, bind_address)?
        };

        Ok(Self {
            source: Source::new(kubeconfig, master, manifests),
            node_name,
            cgroup_root,
            bpffs,
            bind_address,
            devices,
            packet_hook,
            paths,
            node,
            network,
            healthz_bind_address: healthz,
            metrics_bind_address: metrics,
            page,
            otlp: OtlpSettings::new(otlp, |name| std::env::var(name).ok())?,
            capacities: sizes.resolve(memory::total()),
            flow_timeouts,
            min_sync_period,
            sync_period,
            api_audit_period,
            log_format: log_format.unwrap_or_default(),
            log_level: log_level.unwrap_or_default(),
            kube_proxy,
            legacy_proxy_mode: match proxy_mode {
                None | Some(ProxyMode::Ebpf) => None,
                Some(ProxyMode::Legacy(mode)) => Some(mode),
            },
        })
    }
}

/// The node's name as the agent takes it: `given`, or the host's.
pub fn node_name_or_host(given: Option<String>) -> Result<String, ConfigError> {
    match given {
        Some(name) => node_name(&name).ok_or(ConfigError::NodeName(name)),
        None => host_name(),
    }
}

/// A node name: a DNS subdomain; upper case is lowered as kube-proxy does (`nodeutil.GetHostname`).
fn node_name(text: &str) -> Option<String> {
    let name = text.trim().to_ascii_lowercase();
    let legal = !name.is_empty()
        && name.len() <= 253
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.'));
    legal.then_some(name)
}

/// The host's name, in lower case.
fn host_name() -> Result<String, ConfigError> {
    // Of all ways to ask, this one needs neither a system call wrapper nor a resolver.
    const PATH: &str = "/proc/sys/kernel/hostname";
    let text =
        std::fs::read_to_string(PATH).map_err(|source| ConfigError::HostName { path: PATH, source })?;
    node_name(&text).ok_or(ConfigError::NodeName(text))
}

#[cfg(test)]
mod tests;
