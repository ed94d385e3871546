//! The operator's settings for this node.

use std::fmt;
use std::net::IpAddr;
use std::num::NonZeroU16;
use std::str::FromStr;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use proxy_common::config::{MESH_PORTS, NodeConfig, PortRange, SNAT_PORTS, SNAT_RANGES, seconds};
use serde::{Serialize, Serializer};

use super::ports::NODE_PORTS;

/// What `/proxyMode` of the agent answers, where kube-proxy names its mode.
pub const PROXY_MODE: &str = "ebpf";

/// Settings that determine the configuration of the programs for this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeSettings {
    /// The node's address in its family, if the operator sets it.
    pub address: Option<IpAddr>,
    /// The addresses of the node on which node ports answer.
    pub node_port_addresses: NodePortAddresses,
    /// How pods of this node are recognized.
    pub detect_local: DetectLocal,
    /// Packets to cluster addresses get SNAT to the node's own address.
    pub masquerade_all: bool,
    /// The bit of `skb->mark` by which netfilter knows the packets of clients outside to endpoints of this node, which it
    /// masquerades unless the policy is Local; 0: it does not.
    pub masquerade_mark: u32,
    /// Echo requests to addresses of Services are answered.
    pub vip_echo: bool,
    /// Source ports for SNAT.
    pub snat_ports: [PortRange; SNAT_RANGES],
    /// Ports that the API server gives to Services as node ports.
    pub node_ports: PortRange,
    /// Ranges of Service addresses, in addition to those that the cluster reports.
    pub service_cidrs: Vec<IpNet>,
    /// What happens to packets to addresses in these ranges that no Service has.
    pub unallocated: UnallocatedAddresses,
    /// Which sockets are translated.
    pub socket_lb: SocketLb,
    /// Ports by which the proxy of a service mesh in a pod is recognised.
    pub mesh_ports: MeshPorts,
    /// What happens to a socket call if kube-proxy would drop the packet.
    pub socket_drop: SocketDrop,
    /// Whether a process of the node may bind a node port.
    pub node_port_bind: NodePortBind,
    /// Timeouts of flows.
    pub timeouts: FlowTimeouts,
    /// How packets reach endpoints on other nodes by DSR.
    pub dsr: DsrSettings,
}

/// How packets reach endpoints on other nodes by DSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DsrSettings {
    /// Number of flows that may begin on a CPU in a second and keep an entry (`--dsr-flow-rate`); 0: not limited.
    pub flow_rate: u32,
    /// Ranges of the sources of outer headers.
    pub sources: DsrSources,
}

/// The ranges from which all nodes take the sources of the packets that they encapsulate (`--dsr-source-ranges`), at most one of each
/// family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DsrSources {
    /// IPv4.
    pub v4: Option<Ipv4Net>,
    /// IPv6.
    pub v6: Option<Ipv6Net>,
}

/// A value of `--dsr-source-ranges` that is no list of ranges.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DsrSourcesError {
    /// The text is no range.
    #[error("{0:?} is no range of addresses")]
    NoRange(String),
    /// The range has too few addresses, or is all addresses of its family.
    #[error("{0}: a range has at least 256 addresses, and is not all of its family")]
    Size(IpNet),
    /// There is more than one range of a family.
    #[error("{0}: at most one range of each address family")]
    Twice(IpNet),
}

impl DsrSources {
    /// Bits of an address that the hash of a flow selects, at least. With fewer, the packets may reach a part of the queues only.
    const BITS: u8 = 8;
}

impl FromStr for DsrSources {
    type Err = DsrSourcesError;

    fn from_str(text: &str) -> Result<Self, DsrSourcesError> {
        let mut found = Self::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let range: IpNet = part.parse().map_err(|_| DsrSourcesError::NoRange(part.to_owned()))?;
            if range.prefix_len() == 0 || range.max_prefix_len() - range.prefix_len() < Self::BITS {
                return Err(DsrSourcesError::Size(range));
            }
            let is_first = match range {
                IpNet::V4(range) => found.v4.replace(range.trunc()).is_none(),
                IpNet::V6(range) => found.v6.replace(range.trunc()).is_none(),
            };
            if !is_first {
                return Err(DsrSourcesError::Twice(range));
            }
        }
        Ok(found)
    }
}

impl fmt::Display for DsrSources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges = [self.v4.map(IpNet::V4), self.v6.map(IpNet::V6)].into_iter().flatten();
        f.write_str(&ranges.map(|range| range.to_string()).collect::<Vec<_>>().join(","))
    }
}

impl Serialize for DsrSources {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl DsrSettings {
    /// Default of `--dsr-flow-rate`.
    pub const FLOW_RATE: u32 = 50_000;
}

impl Default for DsrSettings {
    fn default() -> Self {
        Self { flow_rate: Self::FLOW_RATE, sources: DsrSources::default() }
    }
}

/// Which sockets are translated when they connect (`--socket-lb`); for other sockets, the packets are translated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SocketLb {
    /// The sockets of the node and of its pods.
    #[default]
    All,
    /// The sockets in the node's own network namespace.
    HostOnly,
    /// No socket.
    Off,
}

/// What happens to packets and calls to an address in a range of Service addresses that no Service has, and to a port that the
/// Service of an address does not have (`--unallocated-addresses`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum UnallocatedAddresses {
    /// They are dropped, and those to such a port refused, as in kube-proxy's mode nftables.
    #[default]
    Drop,
    /// They pass, as in kube-proxy's mode iptables.
    Pass,
}

/// What happens to a socket call if kube-proxy would drop the packet (`--socket-drop`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SocketDrop {
    /// The call continues, and its packets are dropped as long as no endpoint may receive them.
    #[default]
    Silent,
    /// The call fails at once.
    Fail,
}

/// Ports at which the proxy of a service mesh takes the connections of its pod (`--mesh-ports`): those of
/// [`NodeConfig::mesh_ports`](proxy_common::config::NodeConfig::mesh_ports).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeshPorts(pub [u16; MESH_PORTS]);

impl MeshPorts {
    /// No port.
    pub const NONE: Self = Self([0; MESH_PORTS]);
}

impl Default for MeshPorts {
    /// Istio's, Consul's and Kuma's proxies listen at 15001, as does Istio's ztunnel in the namespace of each pod; Linkerd's proxy
    /// at 4140.
    fn default() -> Self {
        Self([15_001, 4_140, 0, 0])
    }
}

/// A value of `--mesh-ports` that is no list of ports.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no list of at most {MESH_PORTS} ports between 1 and 65535; \"none\" is the empty list")]
pub struct MeshPortsError(String);

impl FromStr for MeshPorts {
    type Err = MeshPortsError;

    fn from_str(text: &str) -> Result<Self, MeshPortsError> {
        let error = || MeshPortsError(text.to_owned());
        let mut ports = [0; MESH_PORTS];
        let parts = (text.trim() != "none").then(|| text.split(',').map(str::trim));
        for (number, part) in parts.into_iter().flatten().enumerate() {
            let port: NonZeroU16 = part.parse().map_err(|_| error())?;
            *ports.get_mut(number).ok_or_else(error)? = port.get();
        }
        Ok(Self(ports))
    }
}

impl fmt::Display for MeshPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ports: Vec<_> = self.0.iter().filter(|port| **port != 0).map(u16::to_string).collect();
        f.write_str(if ports.is_empty() { "none" } else { "" })?;
        f.write_str(&ports.join(","))
    }
}

impl Serialize for MeshPorts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Whether a process of the node may bind a port that is a node port of a Service (`--node-port-bind`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum NodePortBind {
    /// It may; clients of the node port still reach the Service.
    #[default]
    Allow,
    /// The call fails with `EADDRINUSE`.
    Refuse,
}

macro_rules! flow_timeouts {
    ($($(#[doc = $doc:literal])+ $name:ident is $default:ident;)+) => {
        /// Timeouts of a flow of the packet path, in seconds, by its state.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
        #[serde(rename_all = "camelCase")]
        pub struct FlowTimeouts {
            $($(#[doc = $doc])+ pub $name: u32,)+
        }

        impl Default for FlowTimeouts {
            fn default() -> Self {
                Self { $($name: seconds::$default,)+ }
            }
        }

        impl FlowTimeouts {
            /// Returns the timeouts of `config`, which has them in jiffies. A timeout that is not a whole number of seconds
            /// was not written by Ballast and becomes 0.
            pub const fn of(config: &NodeConfig) -> Self {
                Self { $($name: whole_seconds(config.$name, config.hz),)+ }
            }

            /// Writes the timeouts into `config`, in jiffies.
            pub const fn apply(self, config: &mut NodeConfig) {
                $(config.$name = self.$name.saturating_mul(config.hz);)+
            }
        }
    };
}

flow_timeouts! {
    /// TCP whose backend has not answered.
    tcp_syn_sent is TCP_SYN_SENT;
    /// TCP whose client has not answered the backend's answer.
    tcp_syn_recv is TCP_SYN_RECV;
    /// TCP with data both ways.
    tcp_established is TCP_ESTABLISHED;
    /// TCP that one end has closed.
    tcp_close_wait is TCP_CLOSE_WAIT;
    /// TCP that both ends have closed.
    tcp_time_wait is TCP_TIME_WAIT;
    /// TCP that was reset.
    tcp_close is TCP_CLOSE;
    /// UDP without answer, or with one exchange.
    udp is UDP;
    /// UDP with more than one exchange.
    udp_stream is UDP_STREAM;
}

impl FlowTimeouts {
    /// The longest timeout, in seconds: half of the range of 32-bit jiffies at 1,000 per second (some 24 days).
    pub const LONGEST: u32 = (u32::MAX / 2) / 1_000;

    /// Returns the defaults, replaced by the timeouts that kube-proxy's settings set for netfilter, rounded to seconds.
    pub fn of_conntrack(conntrack: &Conntrack) -> Self {
        let default = Self::default();
        let seconds = |timeout: Option<Duration>, default| timeout.map_or(default, Self::seconds_rounded_up);
        Self {
            tcp_established: seconds(conntrack.tcp_established, default.tcp_established),
            tcp_close_wait: seconds(conntrack.tcp_close_wait, default.tcp_close_wait),
            udp: seconds(conntrack.udp, default.udp),
            udp_stream: seconds(conntrack.udp_stream, default.udp_stream),
            ..default
        }
    }

    /// Returns the timeout in seconds, rounded up, from 1 to [`FlowTimeouts::LONGEST`].
    pub fn seconds_rounded_up(timeout: Duration) -> u32 {
        let up = timeout.as_secs().saturating_add(u64::from(timeout.subsec_nanos() > 0));
        u32::try_from(up).unwrap_or(u32::MAX).clamp(1, Self::LONGEST)
    }
}

const fn whole_seconds(jiffies: u32, hz: u32) -> u32 {
    if hz == 0 || !jiffies.is_multiple_of(hz) { 0 } else { jiffies / hz }
}

impl Default for NodeSettings {
    fn default() -> Self {
        Self {
            address: None,
            node_port_addresses: NodePortAddresses::default(),
            detect_local: DetectLocal::default(),
            masquerade_all: false,
            masquerade_mark: 0,
            vip_echo: false,
            snat_ports: SNAT_PORTS,
            node_ports: NODE_PORTS,
            service_cidrs: Vec::new(),
            unallocated: UnallocatedAddresses::default(),
            socket_lb: SocketLb::default(),
            mesh_ports: MeshPorts::default(),
            socket_drop: SocketDrop::default(),
            node_port_bind: NodePortBind::default(),
            timeouts: FlowTimeouts::default(),
            dsr: DsrSettings::default(),
        }
    }
}

/// Addresses of the node on which node ports answer: every address that one of the first four fields selects.
#[expect(clippy::struct_excessive_bools, reason = "the operator sets them in every combination")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePortAddresses {
    /// All addresses, except loopback addresses.
    pub all: bool,
    /// The node's internal addresses.
    pub primary: bool,
    /// Loopback addresses, for sockets of the node itself.
    pub localhost: bool,
    /// The addresses in these ranges.
    pub ranges: Vec<IpNet>,
    /// No loopback address, even if a field selects it.
    pub no_loopback: bool,
}

/// How local pods are recognized.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DetectLocal {
    /// By their devices: all devices that are no uplinks.
    #[default]
    Devices,
    /// By their addresses: the ranges of all pods of the cluster, the first of each family.
    ClusterCidr(Vec<IpNet>),
    /// By their addresses: the ranges of this node's pods.
    NodeCidr,
    /// By the bridge that their devices are ports of.
    Bridge(String),
    /// By the prefix of the names of their devices.
    InterfaceNamePrefix(String),
}

/// The operator's settings for the node's own netfilter; `None`: the agent does not change the value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Conntrack {
    /// Maximum number of connections per core.
    pub max_per_core: Option<u32>,
    /// Minimum number of connections, regardless of `max_per_core`.
    pub min: Option<u32>,
    /// Timeout of an established TCP connection.
    pub tcp_established: Option<Duration>,
    /// Timeout of a TCP connection that the other side has closed.
    pub tcp_close_wait: Option<Duration>,
    /// Whether packets out of the window are not marked as invalid.
    pub tcp_be_liberal: bool,
    /// Timeout of an unreplied UDP flow.
    pub udp: Option<Duration>,
    /// Timeout of a UDP flow with replies.
    pub udp_stream: Option<Duration>,
}

impl Conntrack {
    /// kube-proxy's default of `conntrack.maxPerCore`.
    pub const MAX_PER_CORE: u32 = 32_768;
    /// kube-proxy's default of `conntrack.min`.
    pub const MIN: u32 = 131_072;
    /// kube-proxy's default of `conntrack.tcpEstablishedTimeout`.
    pub const TCP_ESTABLISHED: Duration = Duration::from_hours(24);
    /// kube-proxy's default of `conntrack.tcpCloseWaitTimeout`.
    pub const TCP_CLOSE_WAIT: Duration = Duration::from_hours(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dsr_sources_are_one_range_of_each_family() {
        let parse = |text: &str| text.parse::<DsrSources>();
        for text in ["", "10.9.0.0/16", "fd00:9::/64", "10.9.0.0/24,fd00:9::/120"] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
        assert_eq!(parse("10.9.1.1/16").unwrap().to_string(), "10.9.0.0/16");
        for text in ["10.9.0.1", "10.9.0.0/25", "0.0.0.0/0", "fd00::/121", "10.9.0.0/16,10.8.0.0/16", "none"]
        {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn mesh_ports_are_a_list_of_at_most_four_ports_or_none() {
        for text in ["none", "15001", "15001,4140", "1,2,3,65535"] {
            let ports: MeshPorts = text.parse().unwrap();
            assert_eq!(ports.to_string(), text);
        }
        assert_eq!(MeshPorts::default(), "15001, 4140".parse().unwrap());
        for text in ["", "0", "none,1", "65536", "1,2,3,4,5", "1,"] {
            assert!(text.parse::<MeshPorts>().is_err(), "{text}");
        }
    }
}
