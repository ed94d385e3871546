//! What a source of objects reports.

use std::fmt;

use super::{EndpointSlice, HostView, NodeView, Service, ServiceCidr, ServiceName, SliceName};

/// One report. Reports about one object come in the order in which they happened; reports about different
/// objects come in any order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The object is new or has changed.
    Apply(Object),
    /// The object is gone, or no business of ours any more.
    Delete(Key),
    /// Everything of one kind that there is: after a list, and after a list that was needed again.
    Reset(Listing),
    /// Everything that a folder holds which is served beside an API server.
    Static {
        /// Its Services.
        services: Vec<Service>,
        /// Its EndpointSlices.
        slices: Vec<EndpointSlice>,
    },
    /// The machine has been looked at.
    Host(HostView),
}

/// An object of one of the kinds that are watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Object {
    /// A Service.
    Service(Service),
    /// An EndpointSlice.
    Slice(EndpointSlice),
    /// This node, or another one.
    Node(NodeView),
    /// A `ServiceCIDR`.
    ServiceCidr(ServiceCidr),
}

/// The name of an object and its kind.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// A Service.
    Service(ServiceName),
    /// An EndpointSlice.
    Slice(SliceName),
    /// A node, by name.
    Node(String),
    /// A `ServiceCIDR`, by name.
    ServiceCidr(String),
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Service(name) => write!(f, "Service {name}"),
            Self::Slice(name) => write!(f, "EndpointSlice {name}"),
            Self::Node(name) => write!(f, "Node {name}"),
            Self::ServiceCidr(name) => write!(f, "ServiceCIDR {name}"),
        }
    }
}

/// All objects of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listing {
    /// All Services.
    Services(Vec<Service>),
    /// All EndpointSlices.
    Slices(Vec<EndpointSlice>),
    /// This node, if it has an object.
    Node(Option<NodeView>),
    /// All nodes but this one, which may be among them.
    Others(Vec<NodeView>),
    /// All `ServiceCIDR`s.
    ServiceCidrs(Vec<ServiceCidr>),
}

/// A kind of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Services.
    Service,
    /// EndpointSlices.
    Slice,
    /// Nodes.
    Node,
    /// `ServiceCIDR`s.
    ServiceCidr,
}

impl Object {
    /// Its name.
    pub fn key(&self) -> Key {
        match self {
            Self::Service(service) => Key::Service(service.name.clone()),
            Self::Slice(slice) => Key::Slice(slice.name.clone()),
            Self::Node(node) => Key::Node(node.name.clone()),
            Self::ServiceCidr(cidr) => Key::ServiceCidr(cidr.name.clone()),
        }
    }
}

impl Listing {
    /// What it is a list of.
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Services(_) => Kind::Service,
            Self::Slices(_) => Kind::Slice,
            Self::Node(_) | Self::Others(_) => Kind::Node,
            Self::ServiceCidrs(_) => Kind::ServiceCidr,
        }
    }
}
