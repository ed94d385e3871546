//! Services.

use std::net::IpAddr;

use ipnet::IpNet;
use proxy_common::select::Algorithm;

use super::net::{IpFamily, Protocol};
use super::spread::Weights;
use super::{ForwardingMode, Name, Problem, RemovalPolicy, ServiceName, Version};

/// A Service that has an address: never headless, never an ExternalName.
#[expect(clippy::struct_excessive_bools, reason = "each is a setting of its own, in every combination")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Its name.
    pub name: ServiceName,
    /// Its version, which comparisons ignore.
    pub version: Version,
    /// Another proxy serves the Service (label `service.kubernetes.io/service-proxy-name`). Only its name and cluster
    /// addresses are known here, so that Ballast does not drop packets to these addresses.
    pub is_foreign: bool,
    /// `spec.type`.
    pub kind: ServiceKind,
    /// `spec.clusterIPs`, at most one of each family.
    pub cluster_ips: Vec<IpAddr>,
    /// The families of cluster addresses that are not programmed because they have another meaning on every machine (link-local,
    /// loopback). The rest of the Service is served in these families, too.
    pub refused_families: [Option<IpFamily>; 2],
    /// `spec.externalIPs`.
    pub external_ips: Vec<IpAddr>,
    /// `status.loadBalancer.ingress[].ip`, without those whose `ipMode` is `Proxy`.
    pub load_balancer_ips: Vec<IpAddr>,
    /// `spec.loadBalancerSourceRanges`: `None` accepts every client, an empty list none (all ranges were unusable).
    pub source_ranges: Option<Vec<IpNet>>,
    /// `spec.ports`, in the order of the object.
    pub ports: Vec<ServicePort>,
    /// `spec.internalTrafficPolicy`.
    pub internal_policy: TrafficPolicy,
    /// `spec.externalTrafficPolicy`.
    pub external_policy: TrafficPolicy,
    /// Seconds of affinity by client address; 0: none.
    pub affinity_secs: u32,
    /// The algorithm that selects endpoints, if the Service sets it (annotation `ballast.io/algorithm`).
    pub algorithm: Option<Algorithm>,
    /// How packets of clients outside reach endpoints on other nodes, if the Service sets it (annotation
    /// `ballast.io/forwarding-mode`).
    pub forwarding: Option<ForwardingMode>,
    /// Whether new connections skip endpoints that fail, if the Service sets it (annotation `ballast.io/ejection`).
    pub ejection: Option<bool>,
    /// The sockets of pods are not translated; their packets are (annotation `ballast.io/socket-lb: host-only`).
    pub no_sockets: bool,
    /// Packets of clients outside pass untranslated if policy Local has no endpoint on this node (annotation
    /// `ballast.io/external-failover: passthrough`).
    pub passes_when_empty: bool,
    /// What happens to TCP connections to a removed endpoint (annotations `ballast.io/removal-policy` and
    /// `ballast.io/removal-delay`).
    pub removal: RemovalPolicy,
    /// When endpoints join, idle TCP connections move to them (annotation `ballast.io/rebalance: on`).
    pub rebalances: bool,
    /// Weights of its endpoints (annotation `ballast.io/weights`).
    pub weights: Weights,
    /// `spec.healthCheckNodePort`; 0: none.
    pub health_check_node_port: u16,
    /// When the Service was created, in seconds since 1970; 0 if the object does not contain it.
    pub created: i64,
    /// Problems of the parts that could not be used.
    pub problems: Vec<Problem>,
}

impl Service {
    /// Returns a ClusterIP Service with the API's defaults, without addresses and ports.
    pub fn new(name: ServiceName) -> Self {
        Self {
            name,
            version: Version::default(),
            is_foreign: false,
            kind: ServiceKind::ClusterIp,
            cluster_ips: Vec::new(),
            refused_families: [None; 2],
            external_ips: Vec::new(),
            load_balancer_ips: Vec::new(),
            source_ranges: None,
            ports: Vec::new(),
            internal_policy: TrafficPolicy::Cluster,
            external_policy: TrafficPolicy::Cluster,
            affinity_secs: 0,
            algorithm: None,
            forwarding: None,
            ejection: None,
            no_sockets: false,
            passes_when_empty: false,
            removal: RemovalPolicy::Drain,
            rebalances: false,
            weights: Weights::default(),
            health_check_node_port: 0,
            created: 0,
            problems: Vec::new(),
        }
    }

    /// Returns the families of its cluster addresses, which are those in which it is served (`spec.ipFamilies`).
    pub fn families(&self) -> impl Iterator<Item = IpFamily> {
        let programmed = self.cluster_ips.iter().copied().map(IpFamily::of);
        programmed.chain(self.refused_families.into_iter().flatten())
    }

    /// Whether clients outside the cluster can reach this port by any address of the Service.
    pub fn is_external(&self, port: &ServicePort) -> bool {
        port.node_port != 0 || !self.external_ips.is_empty() || !self.load_balancer_ips.is_empty()
    }
}

/// `spec.type` of a Service that has an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ServiceKind {
    /// The Service has an address inside the cluster.
    ClusterIp,
    /// The Service also has a port of each node.
    NodePort,
    /// The Service also has addresses outside.
    LoadBalancer,
}

/// Which endpoints traffic may go to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum TrafficPolicy {
    /// The endpoints on all nodes.
    #[default]
    Cluster,
    /// The endpoints on the node at which the traffic arrives.
    Local,
}

/// One port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Its name; empty if the Service has one port without a name.
    pub name: Name,
    /// Its protocol.
    pub protocol: Protocol,
    /// The port that clients connect to; not 0.
    pub port: u16,
    /// `nodePort`; 0: none.
    pub node_port: u16,
}
