//! The node that the agent runs on.

use std::net::IpAddr;

use ipnet::IpNet;

/// What the cluster says of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeView {
    /// Its name, as endpoints name it in `nodeName`.
    pub name: String,
    /// Its zone, the label `topology.kubernetes.io/zone`; never empty.
    pub zone: Option<String>,
    /// It is being deleted, or about to be: new traffic should go elsewhere.
    pub leaves: bool,
    /// `status.addresses` of type `InternalIP`.
    pub internal_ips: Vec<IpAddr>,
    /// `spec.podCIDRs`.
    pub pod_cidrs: Vec<IpNet>,
}

impl NodeView {
    /// A node that stays, of which nothing but the name is known.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }
}
