//! The events that a source of objects reports.

use std::fmt;

use super::{EndpointSlice, HostView, NodeView, Service, ServiceCidr, ServiceName, SliceName};

/// One event. Events of one object arrive in the order in which they happened; events of different objects arrive in any order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The object is new or has changed.
    Apply(Object),
    /// The object was deleted, or Ballast no longer handles it.
    Delete(Key),
    /// All objects of one kind: the result of a list or a relist.
    Reset(Listing),
    /// All objects of a folder that is served in addition to an API server.
    Static {
        /// Its Services.
        services: Vec<Service>,
        /// Its EndpointSlices.
        slices: Vec<EndpointSlice>,
    },
    /// The agent has read the state of the host.
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

/// The kind and the name of an object.
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
    /// This node; `None` if it has no Node object.
    Node(Option<NodeView>),
    /// All other nodes; this node may be among them.
    Others(Vec<NodeView>),
    /// All `ServiceCIDR`s.
    ServiceCidrs(Vec<ServiceCidr>),
}

/// A kind of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ObjectKind {
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
    /// Returns the kind and the name of the object.
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
    /// Returns the kind of the listed objects.
    pub const fn kind(&self) -> ObjectKind {
        match self {
            Self::Services(_) => ObjectKind::Service,
            Self::Slices(_) => ObjectKind::Slice,
            Self::Node(_) | Self::Others(_) => ObjectKind::Node,
            Self::ServiceCidrs(_) => ObjectKind::ServiceCidr,
        }
    }
}
