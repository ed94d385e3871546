//! The model of the cluster: without Kubernetes types, without a clock, without I/O.
//!
//! A source reports [`Event`]s; a [`Cluster`] is the state after all events so far. The objects of the model are validated:
//! an address is an address, and a port is not zero. A part that could not be used is a [`Problem`] of the object in which
//! it was found.

pub mod annotations;
pub mod api_servers;
pub mod cluster;
pub mod endpoint;
pub mod event;
pub mod flow_state;
pub mod forwarding;
pub mod host;
pub mod name;
pub mod nearest;
pub mod net;
pub mod node;
pub mod notice;
pub mod plural;
pub mod ports;
pub mod problem;
pub mod removal;
pub mod service;
pub mod service_cidr;
pub mod settings;
pub mod sorted;
pub mod spread;
pub mod version;

pub use api_servers::{ApiServers, WatchFailure, Watches};
pub use cluster::Cluster;
pub use endpoint::{Endpoint, EndpointPort, EndpointSlice};
pub use event::{Event, Key, Listing, Object, ObjectKind};
pub use flow_state::FlowState;
pub use forwarding::ForwardingMode;
pub use host::{
    DefaultRoute, DeviceKind, DeviceRole, HostDevice, HostView, IPVS_DEVICE, IpsecPolicy, PROXY_DEVICES,
};
pub use name::{Name, Names, ServiceName, SliceName};
pub use node::NodeView;
pub use problem::Problem;
pub use removal::RemovalPolicy;
pub use service::{Service, ServiceKind, ServicePort, TrafficPolicy};
pub use service_cidr::ServiceCidr;
pub use sorted::{SortedMap, SortedSet, pack};
pub use version::{Opaque, Version};

pub mod lookup;
