//! The checked settings of `ballast run`.

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
use super::timeouts::Timeouts;
use crate::host::cpus::Cpus;
use crate::host::selection::Selection;
use crate::host::{memory, ports};
use crate::programs::{Capacities, PacketHook};
use proxy_cli::value::{Listen, LogFormat, LogLevel, ProxyMode, SnatPorts, seconds};
use proxy_core::model::net::IpFamily;
use proxy_core::model::ports::{LOCAL_PORTS, snat_ports};
use proxy_core::model::settings::{Conntrack, DsrSettings, FlowTimeouts, NodeSettings};

/// The port of the health server, as in kube-proxy.
pub const HEALTHZ_PORT: u16 = 10_256;
/// The port of the metrics server, as in kube-proxy.
pub const METRICS_PORT: u16 = 10_249;

/// The sources of objects: a folder, a cluster, or both.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Source {
    /// A folder of manifests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manifests: Option<PathBuf>,
    /// The API servers; `None` if a folder is given, and nothing about API servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster: Option<Cluster>,
}

/// The API servers of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Cluster {
    /// The file with address and credentials; `None`: found as client libraries do.
    pub kubeconfig: Option<PathBuf>,
    /// URLs that override the file's, the first of which is the first to be tried.
    pub master: Vec<String>,
}

impl Source {
    fn new(kubeconfig: Option<PathBuf>, mut master: Vec<String>, manifests: Option<PathBuf>) -> Self {
        // kube-proxy's default is an empty string.
        master.retain(|url| !url.is_empty());
        let has_cluster = manifests.is_none() || kubeconfig.is_some() || !master.is_empty();
        Self { manifests, cluster: has_cluster.then_some(Cluster { kubeconfig, master }) }
    }
}

/// The checked settings of the agent. `/configz` shows them as they are serialized here.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RunConfig {
    /// The sources of objects.
    pub source: Source,
    /// The name of this node, in lower case, as in kube-proxy.
    pub node_name: String,
    /// The root of the cgroup hierarchy; `None`: where cgroup2 is mounted.
    pub cgroup_root: Option<PathBuf>,
    /// Where the BPF file system is mounted.
    pub bpffs: PathBuf,
    /// The node's address, or unspecified.
    pub bind_address: IpAddr,
    /// Devices whose packets are translated.
    pub devices: Selection,
    /// How programs are attached to devices.
    pub packet_hook: PacketHook,
    /// How sockets and packets are handled.
    #[serde(flatten)]
    pub paths: Paths,
    /// The settings of the network around the node, with the SNAT ports in effect.
    pub network: Network,
    /// The checked settings of `network` and `paths`.
    #[serde(skip)]
    pub node: NodeSettings,
    /// The address of the health server; `None`: it is off.
    pub healthz_bind_address: Option<SocketAddr>,
    /// The address of the metrics server; `None`: it is off.
    pub metrics_bind_address: Option<SocketAddr>,
    /// The settings of the page.
    #[serde(flatten)]
    pub page: PageSettings,
    /// Where telemetry is exported to; `None`: nowhere.
    #[serde(flatten)]
    pub otlp: Option<OtlpSettings>,
    /// The capacities of the maps.
    pub capacities: Capacities,
    /// The timeouts of flows, in seconds.
    pub flow_timeouts: FlowTimeouts,
    /// The shortest time between two syncs.
    #[serde(serialize_with = "seconds")]
    pub min_sync_period: Duration,
    /// Time between two full comparisons.
    #[serde(serialize_with = "seconds")]
    pub sync_period: Duration,
    /// How often Services and EndpointSlices are listed again and compared with what is programmed; zero: never.
    #[serde(serialize_with = "seconds")]
    pub api_audit_period: Duration,
    /// The format of log lines.
    pub log_format: LogFormat,
    /// The level of the log.
    pub log_level: LogLevel,
    /// Settings that come only from kube-proxy's file and flags.
    #[serde(flatten)]
    pub kube_proxy: Overlay,
    /// The mode of kube-proxy that was given and means `ebpf` here; logged once.
    pub legacy_proxy_mode: Option<&'static str>,
}

impl RunConfig {
    /// Checks `options`, with the settings of kube-proxy's file. Reads the host's memory and OpenTelemetry's variables,
    /// and, unless they are given, the host's name and the ports that its kernel assigns to sockets; nothing else is
    /// read from the host.
    pub fn new(mut options: Options) -> Result<Self, ConfigError> {
        let mut kube_proxy = merge::apply(&mut options)?;
        let Options {
            // These have been merged into the other options.
            config: _,
            kube_proxy: _,
            // Instead of these, the agent does not run.
            write_config_to: _,
            init_only: _,
            cleanup: _,
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
        if let (Some(healthz), Some(metrics)) = (healthz, metrics)
            && is_same(healthz, metrics)
        {
            let error = ConfigError::SameAddress { healthz, metrics };
            if kube_proxy.bind_address_hard_fail {
                return Err(error);
            }
            // As kube-proxy: the server that is later tries again and again.
            kube_proxy.notes.push(error.to_string());
        }
        if page.page != Shows::Off && metrics.is_none() {
            return Err(ConfigError::PageWithoutServer);
        }
        let node_name = node_name_or_host(hostname_override)?;

        network.snat_ports.get_or_insert_with(|| {
            let local = ports::local().unwrap_or_else(|| vec![LOCAL_PORTS]);
            SnatPorts(snat_ports(&local, network.service_node_port_range.0))
        });
        let flow_timeouts = timeouts.over(FlowTimeouts::of_conntrack(&kube_proxy.conntrack));
        if network.masquerade_external {
            raise_to(&mut kube_proxy.netfilter, timeouts);
        }
        let mut node = NodeSettings {
            socket_lb: paths.socket_lb,
            socket_drop: paths.socket_drop,
            node_port_bind: paths.node_port_bind,
            mesh_ports: paths.mesh_ports,
            timeouts: flow_timeouts,
            dsr: DsrSettings { flow_rate: paths.dsr_flow_rate, sources: paths.dsr_source_ranges },
            ..node_settings(&network, bind_address, kube_proxy.masquerade_mark)?
        };
        node.node_port_addresses.no_loopback = kube_proxy.no_loopback_node_ports;

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
            capacities: sizes.resolve(memory::total(), Cpus::of_machine(), &kube_proxy.conntrack)?,
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

/// Whether two servers cannot listen on their addresses at the same time.
fn is_same(one: SocketAddr, other: SocketAddr) -> bool {
    let is_shared = one.ip() == other.ip() || one.ip().is_unspecified() || other.ip().is_unspecified();
    is_shared && one.port() == other.port() && one.port() != 0
}

/// Returns the node's name: `given`, or the host's name.
pub fn node_name_or_host(given: Option<String>) -> Result<String, ConfigError> {
    match given {
        Some(name) => node_name(&name).ok_or(ConfigError::NodeName(name)),
        None => host_name(),
    }
}

/// Returns a node name, which is a DNS subdomain; upper case is lowered as kube-proxy does (`nodeutil.GetHostname`).
fn node_name(text: &str) -> Option<String> {
    let name = text.trim().to_ascii_lowercase();
    let legal = !name.is_empty()
        && name.len() <= 253
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.'));
    legal.then_some(name)
}

/// Returns the host's name, in lower case.
fn host_name() -> Result<String, ConfigError> {
    // This file needs neither a system call wrapper nor a resolver.
    const PATH: &str = "/proc/sys/kernel/hostname";
    let text =
        std::fs::read_to_string(PATH).map_err(|source| ConfigError::HostName { path: PATH, source })?;
    node_name(&text).ok_or(ConfigError::NodeName(text))
}

/// Raises netfilter's timeouts to those that are given for flows: netfilter tracks the connections that it masquerades, and the
/// shorter timeout would end them.
fn raise_to(netfilter: &mut Conntrack, given: Timeouts) {
    let default = FlowTimeouts::default();
    for (timeout, given, default) in [
        (&mut netfilter.tcp_established, given.flow_timeout_tcp_established, default.tcp_established),
        (&mut netfilter.tcp_close_wait, given.flow_timeout_tcp_close_wait, default.tcp_close_wait),
        (&mut netfilter.udp, given.flow_timeout_udp, default.udp),
        (&mut netfilter.udp_stream, given.flow_timeout_udp_stream, default.udp_stream),
    ] {
        let seconds = |seconds: u32| Duration::from_secs(seconds.into());
        let known = timeout.unwrap_or_else(|| seconds(default));
        if let Some(given) = given.map(seconds).filter(|given| *given > known) {
            *timeout = Some(given);
        }
    }
}

#[cfg(test)]
mod tests;
