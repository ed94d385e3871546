//! A node of the cluster, in most cases the node on which the agent runs.

use std::net::IpAddr;

use ipnet::IpNet;

/// The facts of a Node object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeView {
    /// Its name, as endpoints name it in `nodeName`.
    pub name: String,
    /// Its zone, the label `topology.kubernetes.io/zone`; never empty.
    pub zone: Option<String>,
    /// The node is being deleted, or is about to be: new traffic should go to other nodes.
    pub is_leaving: bool,
    /// `status.addresses` of type `InternalIP`.
    pub internal_ips: Vec<IpAddr>,
    /// `status.addresses` of type `ExternalIP`.
    pub external_ips: Vec<IpAddr>,
    /// `spec.podCIDRs`.
    pub pod_cidrs: Vec<IpNet>,
    /// The label `kubernetes.io/os` names another system than Linux, so the node has no agent.
    pub is_other_os: bool,
}

impl NodeView {
    /// Returns a node of which only the name is known, and which does not leave.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// Returns the addresses to which other nodes may encapsulate packets (DSR).
    pub fn tunnel_ips(&self) -> &[IpAddr] {
        if self.is_other_os { &[] } else { &self.internal_ips }
    }

    /// Returns its addresses in the order in which kube-proxy takes the first of each family (`pkg/util/node/node.go`,
    /// `GetNodeHostIPs`).
    pub fn addresses(&self) -> impl Iterator<Item = &IpAddr> {
        self.internal_ips.iter().chain(&self.external_ips)
    }
}
