//! How the operator wants this node to be seen.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use proxy_common::config::{NodeConfig, PortRange, SNAT_PORTS, SNAT_RANGES, seconds};
use serde::Serialize;

use super::ports::NODE_PORTS;

/// Settings that decide what the programs are told of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeSettings {
    /// The node's address in its family, where the operator says so.
    pub address: Option<IpAddr>,
    /// Which addresses of the node answer at node ports.
    pub node_port_addresses: NodePortAddresses,
    /// How pods of this node are known.
    pub detect_local: DetectLocal,
    /// Packets to cluster addresses are sent on under the node's own address.
    pub masquerade_all: bool,
    /// Source ports of packets that are forwarded under the node's own address.
    pub snat_ports: [PortRange; SNAT_RANGES],
    /// Ports that the API server gives to Services as node ports.
    pub node_ports: PortRange,
    /// Ranges of Service addresses, beside those that the cluster tells.
    pub service_cidrs: Vec<IpNet>,
    /// Which sockets are translated.
    pub socket_lb: SocketLb,
    /// What becomes of a call where kube-proxy drops the packet.
    pub socket_drop: SocketDrop,
    /// How long flows may be silent.
    pub timeouts: FlowTimeouts,
}

/// Which sockets are translated when they are connected (`--socket-lb`); packets of the others are translated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SocketLb {
    /// Those of the node and of its pods.
    #[default]
    All,
    /// Those in the node's own network namespace.
    HostOnly,
    /// None.
    Off,
}

/// What becomes of a call where kube-proxy drops the packet (`--socket-drop`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SocketDrop {
    /// It goes on, and its packets are dropped for as long as no endpoint may take them.
    #[default]
    Silent,
    /// It fails at once.
    Fail,
}

macro_rules! flow_timeouts {
    ($($(#[doc = $doc:literal])+ $name:ident is $default:ident;)+) => {
        /// How long a flow of the packet path may be silent, in seconds, by its state.
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

        /// Those of them that were given.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct GivenFlowTimeouts {
            $($(#[doc = $doc])+ pub $name: Option<u32>,)+
        }

        impl GivenFlowTimeouts {
            /// These, and of `below` those that were not given.
            pub fn over(self, below: FlowTimeouts) -> FlowTimeouts {
                FlowTimeouts { $($name: self.$name.unwrap_or(below.$name),)+ }
            }
        }

        impl FlowTimeouts {
            /// Those of `config`, in jiffies. One that is no whole number of seconds is none of ours: 0.
            pub const fn of(config: &NodeConfig) -> Self {
                Self { $($name: whole_seconds(config.$name, config.hz),)+ }
            }

            /// Writes them into `config`, in its jiffies.
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
    /// The longest one, in seconds: half of what 32 bits of jiffies hold at 1,000 a second (some 24 days).
    pub const LONGEST: u32 = (u32::MAX / 2) / 1_000;

    /// The defaults, and what kube-proxy's settings ask of netfilter, to the nearest second.
    pub fn of_conntrack(conntrack: &Conntrack) -> Self {
        let default = Self::default();
        let told = |timeout: Option<Duration>, default| timeout.map_or(default, Self::nearest);
        Self {
            tcp_established: told(conntrack.tcp_established, default.tcp_established),
            tcp_close_wait: told(conntrack.tcp_close_wait, default.tcp_close_wait),
            udp: told(conntrack.udp, default.udp),
            udp_stream: told(conntrack.udp_stream, default.udp_stream),
            ..default
        }
    }

    /// The seconds of the timeout that comes nearest; not shorter, if one can be so long.
    pub fn nearest(timeout: Duration) -> u32 {
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
            snat_ports: SNAT_PORTS,
            node_ports: NODE_PORTS,
            service_cidrs: Vec::new(),
            socket_lb: SocketLb::default(),
            socket_drop: SocketDrop::default(),
            timeouts: FlowTimeouts::default(),
        }
    }
}

/// Addresses of the node that answer at node ports; an address that one of them names does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePortAddresses {
    /// All that other machines may know.
    pub all: bool,
    /// The node's internal addresses.
    pub primary: bool,
    /// Loopback addresses, for sockets of the node itself.
    pub localhost: bool,
    /// Those in these ranges.
    pub ranges: Vec<IpNet>,
}

/// How local pods are known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DetectLocal {
    /// By their devices: all that do not lead outside.
    #[default]
    Devices,
    /// By their addresses: the ranges of all pods of the cluster, the first of each family.
    ClusterCidr(Vec<IpNet>),
    /// By their addresses: the ranges of this node's pods.
    NodeCidr,
    /// By the bridge that their devices are ports of.
    Bridge(String),
    /// By how the names of their devices begin.
    InterfaceNamePrefix(String),
}

/// What the operator asks of the node's own netfilter; nothing: left as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Conntrack {
    /// Connections for each core.
    pub max_per_core: Option<u32>,
    /// Connections at least.
    pub min: Option<u32>,
    /// How long a TCP connection may be silent.
    pub tcp_established: Option<Duration>,
    /// How long one that the other side has closed may be.
    pub tcp_close_wait: Option<Duration>,
    /// Packets out of the window are not invalid.
    pub tcp_be_liberal: bool,
    /// How long a UDP flow without answer is kept.
    pub udp: Option<Duration>,
    /// How long one with answers is.
    pub udp_stream: Option<Duration>,
}
