//! The plan: the desired state of a Service in the maps, in domain terms, without ids, slots or positions.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use proxy_common::reason::Verdict;
use proxy_common::select::Algorithm;

use crate::model::Problem;
use crate::model::net::{IpFamily, Protocol};
use crate::model::{Name, SortedMap, SortedSet, TrafficPolicy};

/// One port of one Service in one address family; each has its own id in the maps.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServicePortName {
    /// Namespace of the Service.
    pub namespace: Name,
    /// Name of the Service.
    pub name: Name,
    /// Name of the port; empty if the Service has one port without a name.
    pub port: Name,
    /// Its protocol.
    pub protocol: Protocol,
    /// The address family.
    pub family: IpFamily,
}

impl ServicePortName {
    /// Returns `namespace/name:port`, as the `names` map holds it; `namespace/name` for an unnamed port.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::Display, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum Scope {
    /// Clients inside the cluster, or all clients if no policy distinguishes them.
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

/// A frontend: the address, port and protocol that a client connects to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Frontend {
    /// Its address; unspecified (`0.0.0.0`, `::`) stands for the addresses of the node.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// Its protocol.
    pub protocol: Protocol,
    /// The clients that it is for.
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

/// The facts about an endpoint, besides its address.
#[expect(clippy::struct_excessive_bools, reason = "four facts, each of them a bit of the map")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackendFacts {
    /// The endpoint is on this node: its `nodeName` is this node's, or its address is one of the node's own. Its replies
    /// return through this node. Policy Local considers `nodeName` alone.
    pub local: bool,
    /// The endpoint is terminating.
    pub terminating: bool,
    /// The endpoint is usable for clients that may use any endpoint.
    pub in_cluster: bool,
    /// The endpoint is usable for clients that a policy keeps on this node.
    pub in_local: bool,
    /// The weight, at least 1; [`BackendFacts::default`] has 0, which counts as 1.
    pub weight: u16,
    /// While any endpoint of the port is in slow start: how many [`STEPS`](super::slow_start::STEPS) of its share this
    /// endpoint has. 0: no endpoint is in slow start.
    pub step: u16,
}

impl BackendFacts {
    /// Returns the share, in the steps of a slow start.
    pub fn share(&self) -> u16 {
        if self.step == 0 { self.weight } else { self.weight.max(1) * self.step }
    }
}

/// The plan of one frontend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrontendPlan {
    /// Where it comes from.
    pub kind: FrontendKind,
    /// The endpoints of the frontend, sorted, without duplicates; each is a key of [`PortPlan::backends`]. `None`: all of
    /// these, which takes no memory. Frontends of one port and policy share a list.
    pub slots: Option<Arc<[BackendAddress]>>,
    /// The policy that selected these endpoints.
    pub policy: TrafficPolicy,
    /// What happens to packets if there is no slot.
    pub when_empty: Verdict,
    /// Clients outside have a separate frontend, of [`Scope::External`].
    pub scoped: bool,
    /// Which clients may use it.
    pub access: Access,
    /// Packets of clients outside are encapsulated to the nodes of their endpoints (DSR).
    pub dsr: bool,
    /// It is new, and not at a cluster address: connections to its address and port may be older.
    pub recent: bool,
}

impl FrontendPlan {
    /// Returns a frontend of policy Cluster that accepts every client and uses all endpoints of its port.
    pub fn new(kind: FrontendKind) -> Self {
        let policy = TrafficPolicy::Cluster;
        Self {
            kind,
            slots: None,
            policy,
            when_empty: Verdict::Reject,
            scoped: false,
            access: Access::Unrestricted,
            dsr: false,
            recent: false,
        }
    }
}

/// Which clients may use a frontend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// All clients.
    #[default]
    Unrestricted,
    /// The clients in [`PortPlan::source_ranges`].
    Ranges {
        /// Whether this node is one of them.
        node: bool,
    },
}

/// Whose sockets are not translated while the endpoints of a port change: packets hide the refusal of an endpoint that has just
/// ended, and connect(2) would return it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Changing {
    /// None: the endpoints do not change.
    #[default]
    No,
    /// Those of pods.
    Pods,
    /// Those of pods, and at cluster addresses those of the node itself.
    All,
}

/// The plan of one Service port.
#[expect(clippy::struct_excessive_bools, reason = "each is a setting of its own, in every combination")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortPlan {
    /// Its frontends.
    pub frontends: SortedMap<Frontend, FrontendPlan>,
    /// Every serving endpoint, whether or not a policy lets a frontend use it.
    pub backends: SortedMap<BackendAddress, BackendFacts>,
    /// With DSR: for each endpoint on another node, the address of that node, to which packets are encapsulated. An
    /// endpoint is missing if its node has no address to which this node can send.
    pub tunnels: SortedMap<BackendAddress, IpAddr>,
    /// Seconds of affinity by client address; 0: none.
    pub affinity_secs: u32,
    /// The algorithm that selects endpoints.
    pub algorithm: Algorithm,
    /// Maglev selects the endpoints for clients outside, except at cluster addresses.
    pub maglev_outside: bool,
    /// New connections skip endpoints that fail. TCP only.
    pub ejects: bool,
    /// The sockets of pods are not translated.
    pub no_sockets: bool,
    /// Whose sockets are not translated, because endpoints joined or left lately.
    pub changing: Changing,
    /// Idle connections move to endpoints that have joined. TCP only.
    pub rebalances: bool,
    /// Connections to a removed endpoint are reset this long after its removal; `None`: they drain. TCP only.
    pub reset_after: Option<Duration>,
    /// Clients that may use the frontends with [`Access::Ranges`], sorted. The ports of a Service share them.
    pub source_ranges: Arc<[IpNet]>,
}

impl PortPlan {
    /// Returns the endpoints of one of its frontends, sorted.
    pub fn slots<'a>(&'a self, frontend: &'a FrontendPlan) -> impl Iterator<Item = &'a BackendAddress> {
        let all = frontend.slots.is_none().then(|| self.backends.keys());
        frontend.slots.iter().flat_map(|slots| slots.iter()).chain(all.into_iter().flatten())
    }

    /// Returns the number of endpoints of one of its frontends.
    pub fn slot_count(&self, frontend: &FrontendPlan) -> usize {
        frontend.slots.as_ref().map_or_else(|| self.backends.len(), |slots| slots.len())
    }
}

/// The plan of one Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServicePlan {
    /// Its ports, by name, protocol and family.
    pub ports: SortedMap<ServicePortName, PortPlan>,
    /// Its cluster addresses: at ports of these addresses that no Service has, clients are refused.
    pub addresses: SortedSet<IpAddr>,
    /// Its unmanaged cluster addresses, with the reason.
    pub unmanaged: BTreeMap<IpAddr, Unmanaged>,
    /// Its health check, if load balancers use one.
    pub health_check: Option<HealthCheck>,
    /// When the Service was created, in seconds since 1970: if two Services claim one frontend, the older one gets it; if
    /// both have the same age, the one whose name sorts first.
    pub created: i64,
    /// Problems of the parts of its objects that could not be used.
    pub problems: Vec<Problem>,
}

impl ServicePlan {
    /// Whether packets of clients outside are encapsulated at any frontend.
    pub fn has_dsr(&self) -> bool {
        self.ports.values().flat_map(|port| port.frontends.values()).any(|frontend| frontend.dsr)
    }
}

/// Why a cluster address is unmanaged: packets and socket calls to it are not translated, and neither dropped nor refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unmanaged {
    /// This node itself has the address (`NodeLocal` `DNSCache`): connections to it are for a process of the node.
    Own,
    /// Another proxy serves the Service (`service.kubernetes.io/service-proxy-name`).
    Foreign,
}

/// The health check of a Service that load balancers use on this node (`spec.healthCheckNodePort`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// The port that answers.
    pub port: u16,
    /// Number of ready endpoints of this node, by family; an address with several ports counts once.
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
