//! The rule that the table is compared with, stated independently of the code: which clients are served, by which
//! endpoints, and under which address.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::nodes::{link_ip, node_ip, pod_ip};
use crate::peer::SocketKind;
use proxy_testbed::Family;

/// How the nodes detect pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Devices,
    ClusterCidr,
    /// Like [`Mode::ClusterCidr`], configured by the file that kubeadm writes.
    Kubeadm,
    NodeCidr,
    Bridge,
    Prefix,
}

/// The client that connects to a node port of node 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Who {
    LocalPod,
    OtherPod,
    MasqueradedPod,
    TunnelPod,
    HostProcess,
    Outside,
    SecondNic,
    Vlan,
}

impl Who {
    pub const ALL: [Self; 8] = [
        Self::LocalPod,
        Self::OtherPod,
        Self::MasqueradedPod,
        Self::TunnelPod,
        Self::HostProcess,
        Self::Outside,
        Self::SecondNic,
        Self::Vlan,
    ];

    pub fn label(self) -> &'static str {
        match self {
            Self::LocalPod => "pod of this node",
            Self::OtherPod => "another node's pod",
            Self::MasqueradedPod => "another node's pod, masqueraded",
            Self::TunnelPod => "another node's pod, by a tunnel",
            Self::HostProcess => "process of this node",
            Self::Outside => "outside, by the uplink",
            Self::SecondNic => "outside, by a second NIC",
            Self::Vlan => "outside, by a VLAN",
        }
    }

    /// Returns the client's address as node 1 sees it.
    pub fn ip(self, family: Family) -> IpAddr {
        match self {
            Self::LocalPod => pod_ip(family, 1, 3),
            Self::OtherPod => pod_ip(family, 2, 2),
            Self::MasqueradedPod => node_ip(family, 2),
            Self::TunnelPod => pod_ip(family, 2, 4),
            Self::HostProcess => node_ip(family, 1),
            Self::Outside => link_ip(family, 30, 100),
            Self::SecondNic => link_ip(family, 31, 2),
            Self::Vlan => link_ip(family, 32, 101),
        }
    }

    /// Returns the address of node 1 that the client connects to.
    pub fn orig_dst(self, family: Family) -> IpAddr {
        match self {
            Self::SecondNic => link_ip(family, 31, 1),
            Self::Vlan => link_ip(family, 32, 1),
            _ => node_ip(family, 1),
        }
    }
}

/// Where the endpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Location {
    /// A pod of node 1.
    Near,
    /// A pod of node 3.
    Far,
    /// Both of these pods.
    Both,
    /// A process of node 1; the slice does not name its node.
    Node,
    /// The client itself, if it is a pod.
    Itself(Who),
}

pub const POLICIES: [&str; 2] = ["Cluster", "Local"];
pub const PLACES: [Location; 8] = [
    Location::Near,
    Location::Far,
    Location::Both,
    Location::Node,
    Location::Itself(Who::LocalPod),
    Location::Itself(Who::OtherPod),
    Location::Itself(Who::MasqueradedPod),
    Location::Itself(Who::TunnelPod),
];

impl Location {
    /// Returns address, node (if the slice names it) and server name of each endpoint.
    pub fn endpoints(self, family: Family) -> Vec<(IpAddr, Option<&'static str>, &'static str)> {
        let near = (pod_ip(family, 1, 2), Some("node1"), "1/2");
        let far = (pod_ip(family, 3, 2), Some("node3"), "3/2");
        match self {
            Self::Near => vec![near],
            Self::Far => vec![far],
            Self::Both => vec![near, far],
            Self::Node => vec![(node_ip(family, 1), None, "node1")],
            Self::Itself(Who::LocalPod) => vec![(pod_ip(family, 1, 3), Some("node1"), "1/3")],
            Self::Itself(Who::OtherPod) => vec![(pod_ip(family, 2, 2), Some("node2"), "2/2")],
            Self::Itself(Who::MasqueradedPod) => vec![(pod_ip(family, 2, 3), Some("node2"), "2/3")],
            Self::Itself(_) => vec![(pod_ip(family, 2, 4), Some("node2"), "2/4")],
        }
    }

    pub fn label(self) -> &'static str {
        match self {
            Self::Near => "a pod here",
            Self::Far => "a pod of a third node",
            Self::Both => "both",
            Self::Node => "this node itself",
            Self::Itself(_) => "the client itself",
        }
    }
}

/// Returns the node port of a Service; the port for UDP is one higher than the port for TCP.
pub fn node_port(policy: usize, location: Location, kind: SocketKind) -> u16 {
    let location = PLACES.iter().position(|one| *one == location).unwrap_or_default();
    31_000 + (policy * PLACES.len() + location) as u16 * 2 + u16::from(!kind.is_tcp())
}

/// What a client has to see: the servers, and the client's address that each server sees. Empty: no answer.
pub type ExpectedAnswers = BTreeSet<(String, IpAddr)>;

/// Returns the expected outcome. The rule is kube-proxy's contract, except for two things: a client's address is kept
/// wherever the reply certainly returns through this node, and pods that no detector knows are known by their devices.
pub fn expected(mode: Mode, who: Who, policy: usize, location: Location, family: Family) -> ExpectedAnswers {
    let is_inside = match who {
        Who::HostProcess | Who::LocalPod => true,
        // By their addresses, pods of every node belong to the cluster.
        Who::OtherPod | Who::TunnelPod => matches!(mode, Mode::ClusterCidr | Mode::Kubeadm),
        Who::MasqueradedPod | Who::Outside | Who::SecondNic | Who::Vlan => false,
    };
    let by_uplink = !matches!(who, Who::LocalPod | Who::HostProcess);
    let endpoints = location.endpoints(family).into_iter().filter_map(|(ip, node, server)| {
        // A policy depends on what the slice says, and the return path on where the endpoint really is.
        let is_left_out = POLICIES[policy] == "Local" && !is_inside && node != Some("node1");
        let is_here = node == Some("node1") || ip == node_ip(family, 1);
        let is_itself = location == Location::Itself(who);
        let source = match who {
            // The kernel selects the source address of a socket.
            Who::HostProcess if ip == pod_ip(family, 1, 2) || ip == pod_ip(family, 1, 3) => {
                pod_ip(family, 1, 1)
            }
            Who::HostProcess => node_ip(family, 1),
            // An address of the device that leads to the endpoint, as with MASQUERADE.
            Who::TunnelPod if is_itself => link_ip(family, 33, 1),
            // The bridge of the pods does not have the prefix.
            Who::LocalPod if is_itself && mode == Mode::Prefix => pod_ip(family, 1, 1),
            _ if is_itself || (!is_here && by_uplink) => node_ip(family, 1),
            _ => who.ip(family),
        };
        (!is_left_out).then(|| (server.to_owned(), source))
    });
    endpoints.collect()
}
