//! How the operator wants this node to be seen.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use proxy_common::config::SNAT_PORTS;
use serde::Serialize;

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
    /// First and last source port of packets that are sent on under the node's own address.
    pub snat_ports: (u16, u16),
    /// Ranges of Service addresses, beside those that the cluster tells.
    pub service_cidrs: Vec<IpNet>,
}

impl Default for NodeSettings {
    fn default() -> Self {
        Self {
            address: None,
            node_port_addresses: NodePortAddresses::default(),
            detect_local: DetectLocal::default(),
            masquerade_all: false,
            snat_ports: SNAT_PORTS,
            service_cidrs: Vec::new(),
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
