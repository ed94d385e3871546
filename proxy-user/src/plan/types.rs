//! The plan: what a Service should look like in the maps, in domain terms, without ids, slots or positions.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use proxy_common::select::Algorithm;

use crate::model::Problem;
use crate::model::net::{IpFamily, Protocol};
use crate::model::{Name, SortedMap, SortedSet, TrafficPolicy};

/// One port of one Service in one address family: what gets an id of its own.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServicePortName {
    /// Namespace of the Service.
    pub namespace: Name,
    /// Name of the Service.
    pub name: Name,
    /// Name of the port; empty for the one port of a Service that names none.
    pub port: Name,
    /// Its protocol.
    pub protocol: Protocol,
    /// The address family.
    pub family: IpFamily,
}

impl ServicePortName {
    /// `namespace/name:port`, as the `names` map holds it; `namespace/name` for an unnamed port.
    pub fn text(&self) -> String {
        let Self { namespace, name, port, .. } = self;
        if port.is_empty() { format!("{namespace}/{name}") } else { format!("{namespace}/{name}:{port}") }
    }
}

impl fmt::Display for ServicePortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, {})", self.text(), self.protocol, self.family)
    }
}

/// Which clients a frontend entry is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Clients inside the cluster, or all of them where it makes no difference.
    Internal,
    /// Clients outside.
    External,
}

/// Where a frontend comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FrontendKind {
    /// `spec.clusterIPs`.
    ClusterIp,
    /// `spec.ports[].nodePort`.
    NodePort,
    /// `status.loadBalancer.ingress[].ip`.
    LoadBalancer,
    /// `spec.externalIPs`.
    ExternalIp,
}

/// What a client dials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Frontend {
    /// Its address; unspecified (`0.0.0.0`, `::`) stands for the addresses of the node.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// Its protocol.
    pub protocol: Protocol,
    /// Who it is for.
    pub scope: Scope,
}

/// The address of one endpoint of a Service port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BackendAddress {
    /// Endpoint address.
    pub address: IpAddr,
    /// Endpoint port, after the slice resolved its name.
    pub port: u16,
}

/// What is known of an endpoint beyond its address.
#[expect(clippy::struct_excessive_bools, reason = "four facts, each of them a bit of the map")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackendFacts {
    /// It is on this node: `nodeName` says so, or its address is one of the node's own. What it answers comes back
    /// through here. Which endpoints a policy keeps on this node goes by `nodeName` alone.
    pub local: bool,
    /// It is terminating.
    pub terminating: bool,
    /// Clients that may be sent anywhere may be sent to it.
    pub in_cluster: bool,
    /// Clients that a policy keeps on this node may be sent to it.
    pub in_local: bool,
    /// How large its share is, from 1 on; [`BackendFacts::default`] has 0, which counts as 1.
    pub weight: u16,
    /// While an endpoint of the port starts slowly: how many [`STEPS`](super::slow_start::STEPS) of its share it has by now.
    /// 0: none does.
    pub step: u16,
}

impl BackendFacts {
    /// The share in the steps of a slow start.
    pub fn share(&self) -> u16 {
        if self.step == 0 { self.weight } else { self.weight.max(1) * self.step }
    }
}

/// What one frontend does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrontendPlan {
    /// Where it comes from.
    pub kind: FrontendKind,
    /// The endpoints it spreads over, sorted, without duplicates; each is a key of [`PortPlan::backends`].
    /// `None`: all of these, which takes no memory. Frontends of one port and policy share a list.
    pub slots: Option<Arc<[BackendAddress]>>,
    /// The policy that chose them.
    pub policy: TrafficPolicy,
    /// With no slot: drop instead of refuse (the policy is Local and only other nodes have endpoints).
    pub drop_when_empty: bool,
    /// Clients outside have a frontend of their own, of [`Scope::External`].
    pub scoped: bool,
    /// Which clients may use it.
    pub access: Access,
    /// Packets of clients outside are encapsulated to the nodes of their endpoints (DSR).
    pub dsr: bool,
}

impl FrontendPlan {
    /// One that is open to every client, of policy Cluster, and spreads over all endpoints of its port.
    pub fn new(kind: FrontendKind) -> Self {
        let policy = TrafficPolicy::Cluster;
        Self {
            kind,
            slots: None,
            policy,
            drop_when_empty: false,
            scoped: false,
            access: Access::Unrestricted,
            dsr: false,
        }
    }
}

/// Which clients may use a frontend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// All.
    #[default]
    Unrestricted,
    /// Those in [`PortPlan::source_ranges`].
    Ranges {
        /// This node is among them.
        node: bool,
    },
}

/// What one Service port does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortPlan {
    /// Its frontends.
    pub frontends: SortedMap<Frontend, FrontendPlan>,
    /// Every serving endpoint, whether or not a policy lets a frontend use it.
    pub backends: SortedMap<BackendAddress, BackendFacts>,
    /// With DSR: of endpoints on other nodes, the address of their node, to which packets are encapsulated. None for one whose
    /// node has no address that can be reached so.
    pub tunnels: SortedMap<BackendAddress, IpAddr>,
    /// Seconds of affinity by client address; 0: none.
    pub affinity_secs: u32,
    /// How connections are spread.
    pub algorithm: Algorithm,
    /// Those of clients outside are spread by Maglev, but at cluster addresses.
    pub maglev_outside: bool,
    /// New connections skip endpoints that fail.
    pub ejects: bool,
    /// So long after an endpoint has left, connections to it are reset; `None`: they go on. TCP only.
    pub reset_after: Option<Duration>,
    /// Clients that may use the frontends with [`Access::Ranges`].
    pub source_ranges: BTreeSet<IpNet>,
}

impl PortPlan {
    /// The endpoints that one of its frontends spreads over, sorted.
    pub fn slots<'a>(&'a self, frontend: &'a FrontendPlan) -> impl Iterator<Item = &'a BackendAddress> {
        let all = frontend.slots.is_none().then(|| self.backends.keys());
        frontend.slots.iter().flat_map(|slots| slots.iter()).chain(all.into_iter().flatten())
    }

    /// How many these are.
    pub fn slot_count(&self, frontend: &FrontendPlan) -> usize {
        frontend.slots.as_ref().map_or_else(|| self.backends.len(), |slots| slots.len())
    }
}

/// Everything about one Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServicePlan {
    /// Its ports, by identity.
    pub ports: SortedMap<ServicePortName, PortPlan>,
    /// Its cluster addresses: at a port that no Service has, clients are refused there.
    pub addresses: SortedSet<IpAddr>,
    /// Cluster addresses of it that are left alone, and why.
    pub unmanaged: BTreeMap<IpAddr, Unmanaged>,
    /// Its health check, if load balancers make one.
    pub health_check: Option<HealthCheck>,
    /// When the Service was created, in seconds since 1970: of two Services that claim one frontend the older
    /// one has it, then the one whose name sorts first.
    pub created: i64,
    /// What in the objects could not be used.
    pub problems: Vec<Problem>,
}

impl ServicePlan {
    /// Whether packets of clients outside are encapsulated anywhere.
    pub fn has_dsr(&self) -> bool {
        self.ports.values().flat_map(|port| port.frontends.values()).any(|frontend| frontend.dsr)
    }
}

/// Why a cluster address is left alone: packets and sockets to it are not translated, and not shut out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unmanaged {
    /// This node itself has the address (`NodeLocal` `DNSCache`): what is dialled there is meant for it.
    Own,
    /// Another proxy serves the Service (`service.kubernetes.io/service-proxy-name`).
    Foreign,
}

/// What load balancers ask this node about a Service (`spec.healthCheckNodePort`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// The port that answers.
    pub port: u16,
    /// Ready endpoints of this node, by family: an address counts once, whatever its ports.
    pub local: BTreeMap<IpFamily, usize>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_named_as_in_the_map_of_names() {
        let port = |port: &str| ServicePortName {
            namespace: "default".into(),
            name: "web".into(),
            port: port.into(),
            protocol: Protocol::Tcp,
            family: IpFamily::V6,
        };
        assert_eq!(port("http").text(), "default/web:http");
        assert_eq!(port("").text(), "default/web");
        assert_eq!(port("http").to_string(), "default/web:http (TCP, IPv6)");
    }
}
