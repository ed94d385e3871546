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
    /// Its name.
    pub name: SliceName,
    /// The Service it belongs to: the label `kubernetes.io/service-name`.
    pub service: ServiceName,
    /// Its version, which comparisons ignore.
    pub version: Version,
    /// `addressType`.
    pub family: IpFamily,
    /// The ports of each of its endpoints, sorted.
    pub ports: Vec<EndpointPort>,
    /// Its endpoints, sorted.
    pub endpoints: Vec<Endpoint>,
    /// The time of the change that triggered this version: annotation `endpoints.kubernetes.io/last-change-trigger-time`.
    pub triggered: Option<SystemTime>,
    /// Problems of the parts that could not be used.
    pub problems: Vec<Problem>,
}

impl EndpointSlice {
    /// Returns a slice without ports and endpoints.
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

    /// Whether both slices have the same content; `version` and `triggered` are ignored.
    pub fn has_same_content(&self, other: &Self) -> bool {
        let Self { name, service, version: _, family, ports, endpoints, triggered: _, problems } = self;
        *name == other.name
            && *service == other.service
            && *family == other.family
            && *ports == other.ports
            && *endpoints == other.endpoints
            && *problems == other.problems
    }

    /// Whether any endpoint has hints for zones or nodes.
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
    /// Its address: the first of `addresses`, which all belong to the same pod.
    pub address: IpAddr,
    /// `conditions.ready`; true if the object does not set it, and with `publishNotReadyAddresses`.
    pub ready: bool,
    /// `conditions.serving`; true if the object does not set it.
    pub serving: bool,
    /// `conditions.terminating`; false if the object does not set it.
    pub terminating: bool,
    /// `nodeName`: where it runs.
    pub node: Option<Name>,
    /// `zone`.
    pub zone: Option<Name>,
    /// The weight from an annotation of its slice (`ballast.io/weights`).
    pub weight: Option<u16>,
    /// `hints.forZones`: the zones whose clients should use it.
    pub zone_hints: Names,
    /// `hints.forNodes`: the nodes whose clients should use it.
    pub node_hints: Names,
}

impl Endpoint {
    /// Returns a ready endpoint without hints.
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

    /// Whether connections to the endpoint may continue: it is ready, or its condition `serving` is true, for example while it
    /// terminates.
    pub fn is_serving(&self) -> bool {
        self.ready || self.serving
    }
}
