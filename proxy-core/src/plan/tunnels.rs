//! The addresses to which packets for endpoints on other nodes are encapsulated (DSR).

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::model::net::IpFamily;
use crate::model::plural::plural;
use crate::model::{Cluster, Endpoint, Problem, Service};

use super::PortPlan;
use super::merged::MergedEndpoints;

/// Maximum number of nodes that a problem names.
const NAMED: usize = 3;

/// The addresses of other nodes that this node can send to, in the order of preference for endpoints of one family.
pub struct Tunnels<'a> {
    cluster: &'a Cluster,
    families: Vec<IpFamily>,
}

impl<'a> Tunnels<'a> {
    /// Returns the addresses for endpoints of `family`. A node without an address of this family is reached by the other
    /// family.
    pub fn new(cluster: &'a Cluster, family: IpFamily) -> Self {
        let other = if family == IpFamily::V4 { IpFamily::V6 } else { IpFamily::V4 };
        let has = |family: &IpFamily| cluster.own_internal_ips().any(|own| IpFamily::of(own) == *family);
        Self { cluster, families: [family, other].into_iter().filter(has).collect() }
    }

    /// Returns the address of the endpoint's node, or `None` if this node can send to none.
    pub fn to(&self, endpoint: &Endpoint) -> Option<IpAddr> {
        let addresses = self.cluster.others()?.get(endpoint.node.as_deref()?)?;
        let of = |family: &IpFamily| addresses.iter().find(|address| IpFamily::of(**address) == *family);
        self.families.iter().find_map(of).copied()
    }

    /// Returns a problem if packets for some endpoints cannot be encapsulated.
    pub fn problem(
        &self,
        service: &Service,
        port: &PortPlan,
        merged: &MergedEndpoints<'_>,
    ) -> Option<Problem> {
        let is_asked = port.frontends.values().any(|frontend| frontend.dsr);
        if !is_asked || self.cluster.others().is_none() {
            return None;
        }
        let lacks = |(at, endpoint): &(&_, &&Endpoint)| {
            port.backends.get(at).is_some_and(|facts| !facts.local) && self.to(endpoint).is_none()
        };
        let nodes: BTreeSet<&str> = merged
            .iter()
            .filter(lacks)
            .map(|(_, endpoint)| endpoint.node.as_deref().unwrap_or("(no nodeName)"))
            .collect();
        let first = nodes.iter().take(NAMED).copied().collect::<Vec<_>>().join(", ");
        (!nodes.is_empty()).then(|| Problem {
            object: format!("Service {}", service.name),
            field: "metadata.annotations[ballast.io/forwarding-mode]".to_owned(),
            message: format!(
                "packets to endpoints on {} ({first}) use snat: no InternalIP that this node can send to, \
                 or no Linux",
                plural(nodes.len(), "node")
            ),
        })
    }
}
