//! EndpointSlices.

use std::net::IpAddr;
use std::time::SystemTime;

use super::{
    Name, Names, Problem, ServiceName, SliceName, Version,
    net::{IpFamily, Protocol},
};

/// Some of the endpoints of a Service, all of one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSlice {
    /// Its own name.
    pub name: SliceName,
    /// The Service it belongs to: the label `kubernetes.io/service-name`.
    pub service: ServiceName,
    /// Its edition, which counts in no comparison.
    pub version: Version,
    /// `addressType`.
    pub family: IpFamily,
    /// The ports that every endpoint of it has, sorted.
    pub ports: Vec<EndpointPort>,
    /// Its endpoints, sorted.
    pub endpoints: Vec<Endpoint>,
    /// When what it tells of happened: the annotation `endpoints.kubernetes.io/last-change-trigger-time`.
    pub triggered: Option<SystemTime>,
    /// What in it could not be used.
    pub problems: Vec<Problem>,
}

impl EndpointSlice {
    /// A slice without ports and endpoints.
    pub fn new(name: SliceName, service: ServiceName, family: IpFamily) -> Self {
        Self {
            name,
            service,
            version: Version::default(),
            family,
            ports: Vec::new(),
            endpoints: Vec::new(),
            triggered: None,
            problems: Vec::new(),
        }
    }

    /// Whether it says the same as another one; what triggered it does not count.
    pub fn says_the_same(&self, other: &Self) -> bool {
        let Self { name, service, version: _, family, ports, endpoints, triggered: _, problems } = self;
        *name == other.name
            && *service == other.service
            && *family == other.family
            && *ports == other.ports
            && *endpoints == other.endpoints
            && *problems == other.problems
    }

    /// Whether any endpoint says which zones or nodes it is meant for.
    pub fn has_hints(&self) -> bool {
        self.endpoints.iter().any(|e| !e.zone_hints.is_empty() || !e.node_hints.is_empty())
    }
}

/// A port of all endpoints of a slice.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EndpointPort {
    /// The name of the Service port that it serves.
    pub name: Name,
    /// Its protocol.
    pub protocol: Protocol,
    /// The port that the endpoints listen on; not 0.
    pub port: u16,
}

/// One endpoint.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Endpoint {
    /// Its address: the first of `addresses`, all of which are the same pod's.
    pub address: IpAddr,
    /// `conditions.ready`; true where the object does not say, and with `publishNotReadyAddresses`.
    pub ready: bool,
    /// `conditions.serving`; true where the object does not say.
    pub serving: bool,
    /// `conditions.terminating`; false where the object does not say.
    pub terminating: bool,
    /// `nodeName`: where it runs.
    pub node: Option<Name>,
    /// `zone`.
    pub zone: Option<Name>,
    /// The weight that its slice gives to it (annotation `ballast.io/weights`).
    pub weight: Option<u16>,
    /// `hints.forZones`: the zones whose clients should use it.
    pub zone_hints: Names,
    /// `hints.forNodes`: the nodes whose clients should use it.
    pub node_hints: Names,
}

impl Endpoint {
    /// An endpoint that is ready, without hints.
    pub fn new(address: IpAddr) -> Self {
        Self {
            address,
            ready: true,
            serving: true,
            terminating: false,
            node: None,
            zone: None,
            weight: None,
            zone_hints: Names::default(),
            node_hints: Names::default(),
        }
    }

    /// Whether connections to it may go on: it is ready, or serves on while it terminates.
    pub fn is_serving(&self) -> bool {
        self.ready || self.serving
    }
}
