//! What the API server tells commands about endpoints and pods.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::Serialize;

/// Where an endpoint runs; `None`: its slice does not tell.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Place {
    /// Name of the pod.
    pub pod: Option<String>,
    /// Name of the node.
    pub node: Option<String>,
    /// Zone of the node.
    pub zone: Option<String>,
}

/// Places of endpoints, by the namespace and name of their Service and their address.
pub type Places = BTreeMap<(String, String, IpAddr), Place>;

/// A pod as a client of connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodFacts {
    /// Its node; `None` before it is scheduled.
    pub node: Option<String>,
    /// It uses the network of its node.
    pub has_host_network: bool,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
}
