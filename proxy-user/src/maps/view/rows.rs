//! Rows of the maps, as types of the domain.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use proxy_common::Address;
use proxy_common::backend::{
    BACKEND_ACTIVE, BACKEND_FREE, BACKEND_LOCAL, BACKEND_RESET, BACKEND_TERMINATING, BackendEntry, weight_of,
};
use proxy_common::decide;
use proxy_common::name::PortName;
use proxy_common::select::{Algorithm, is_by_load};
use proxy_common::service::{
    KIND_CLUSTER_IP, KIND_EXTERNAL_IP, KIND_LOAD_BALANCER, KIND_NODE_PORT, SCOPE_EXTERNAL, SERVICE_DSR,
    SERVICE_LOCAL, SERVICE_MAGLEV_OUTSIDE, SERVICE_SOURCE_RANGES, ServiceEntry, ServiceKey,
};

use proxy_core::model::net::{IpFamily, Protocol};
use proxy_core::plan::Scope;
use serde::{Serialize, Serializer};

/// An IP protocol number as a map holds it, which may be one that Ballast never wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Transport(pub u8);

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Protocol::from_number(self.0) {
            Some(protocol) => protocol.fmt(f),
            None => self.0.fmt(f),
        }
    }
}

/// Where a frontend comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FrontendRowKind {
    /// A cluster address.
    ClusterIp,
    /// A node port.
    NodePort,
    /// A load balancer's ingress address.
    LoadBalancer,
    /// An external address.
    ExternalIp,
    /// A number that this version does not know.
    Unknown(u8),
}

impl FrontendRowKind {
    /// Returns the name that Kubernetes uses.
    pub const fn label(self) -> &'static str {
        match self {
            Self::ClusterIp => "ClusterIP",
            Self::NodePort => "NodePort",
            Self::LoadBalancer => "LoadBalancer",
            Self::ExternalIp => "ExternalIP",
            Self::Unknown(_) => "Unknown",
        }
    }
}

impl From<u8> for FrontendRowKind {
    fn from(number: u8) -> Self {
        match number {
            KIND_CLUSTER_IP => Self::ClusterIp,
            KIND_NODE_PORT => Self::NodePort,
            KIND_LOAD_BALANCER => Self::LoadBalancer,
            KIND_EXTERNAL_IP => Self::ExternalIp,
            other => Self::Unknown(other),
        }
    }
}

/// One frontend.
#[expect(clippy::struct_excessive_bools, reason = "facts of a row, each apart")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrontendRow {
    /// Id of the Service port.
    pub service: u32,
    /// Its address; the unspecified address stands for all addresses of the node.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// Its protocol.
    pub protocol: Transport,
    /// The clients that it is for.
    pub scope: Scope,
    /// Where it comes from.
    pub kind: FrontendRowKind,
    /// Ids of the backends, each once, in the order of the slots. An id may have been freed since; [`BackendRow::service`]
    /// tells.
    pub backends: Vec<u32>,
    /// Number of slots; each endpoint has as many as its weight says.
    pub slots: u32,
    /// Seconds of session affinity by client address; 0: none.
    pub affinity_secs: u32,
    /// The algorithm; `unknown` for a number that this version does not know.
    pub algorithm: &'static str,
    /// Whether the algorithm uses open connections.
    pub by_load: bool,
    /// The algorithm for clients outside of the cluster, if it is another one.
    pub outside: Option<&'static str>,
    /// Whether packets of clients outside are encapsulated to endpoints on other nodes (DSR).
    pub dsr: bool,
    /// What happens to packets if there is no backend: `reject`, `drop` or `pass`.
    pub when_empty: &'static str,
    /// Whether a traffic policy limits the backends to those of this node.
    pub local: bool,
    /// Whether only clients in the Service's source ranges are allowed.
    pub restricted: bool,
}

impl FrontendRow {
    pub(super) fn of<A: Address + Into<IpAddr>>(key: ServiceKey<A>, entry: &ServiceEntry) -> Self {
        Self {
            service: entry.id,
            address: key.addr.into(),
            port: key.port,
            protocol: Transport(key.proto),
            scope: if key.scope == SCOPE_EXTERNAL { Scope::External } else { Scope::Internal },
            kind: entry.kind.into(),
            backends: Vec::new(),
            slots: 0,
            affinity_secs: entry.affinity_secs,
            algorithm: Algorithm::from_number(entry.algorithm).map_or("unknown", Algorithm::label),
            by_load: is_by_load(entry.algorithm),
            outside: (entry.flags & SERVICE_MAGLEV_OUTSIDE != 0).then_some(Algorithm::Maglev.label()),
            dsr: entry.flags & SERVICE_DSR != 0,
            when_empty: decide::no_endpoint_reason(entry).verdict().label(),
            local: entry.flags & SERVICE_LOCAL != 0,
            restricted: entry.flags & SERVICE_SOURCE_RANGES != 0,
        }
    }

    /// Returns address and port.
    pub fn socket(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.port)
    }
}

/// An unmanaged cluster address: packets and sockets to it are neither translated nor refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct UnmanagedRow {
    /// The address.
    pub address: IpAddr,
    /// Whether this node has the address itself; otherwise another proxy serves it.
    #[serde(rename = "reason", serialize_with = "reason")]
    pub is_own: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over the field")]
fn reason<S: Serializer>(is_own: &bool, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(if *is_own { "own-address" } else { "other-proxy" })
}

impl UnmanagedRow {
    /// Returns the reason, in words.
    pub const fn why(&self) -> &'static str {
        if self.is_own { "an address of this node" } else { "another proxy serves it" }
    }
}

/// The name of a Service port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NameRow {
    /// Its namespace.
    pub namespace: String,
    /// Its Service.
    pub name: String,
    /// The port's name; empty if it has none.
    pub port: String,
    /// Its protocol.
    pub protocol: Transport,
    /// Its address family.
    pub family: IpFamily,
}

impl NameRow {
    pub(super) fn of(entry: &PortName) -> Self {
        let text = entry.as_str();
        let (namespace, rest) = text.split_once('/').unwrap_or(("", text));
        let (name, port) = rest.split_once(':').unwrap_or((rest, ""));
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            port: port.to_owned(),
            protocol: Transport(entry.proto),
            family: if entry.family == IpFamily::V6.number() { IpFamily::V6 } else { IpFamily::V4 },
        }
    }
}

impl fmt::Display for NameRow {
    /// Writes `namespace/name:port`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)?;
        if self.port.is_empty() { Ok(()) } else { write!(f, ":{}", self.port) }
    }
}

/// The state of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum BackendState {
    /// It serves.
    Active,
    /// It was removed; its id is not reused until nothing refers to it.
    Gone,
    /// It was removed, and connections to it are reset.
    Reset,
}

impl BackendState {
    /// All states.
    pub const ALL: [Self; 3] = [Self::Active, Self::Gone, Self::Reset];

    /// Returns the word used in tables and JSON.
    pub fn label(self) -> &'static str {
        self.into()
    }
}

/// One endpoint of one Service port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendRow {
    /// Address and port.
    pub socket: SocketAddr,
    /// Its protocol.
    pub protocol: Transport,
    /// Id of the Service port.
    pub service: u32,
    /// Its state.
    pub state: BackendState,
    /// Whether it runs on this node.
    pub local: bool,
    /// Whether it is terminating.
    pub terminating: bool,
    /// Its weight.
    pub weight: u32,
}

impl BackendRow {
    /// Reads an entry; `None` for a free id.
    pub(super) fn of<A: Address + Into<IpAddr>>(entry: BackendEntry<A>) -> Option<Self> {
        (entry.state != BACKEND_FREE).then(|| Self {
            socket: SocketAddr::new(entry.addr.into(), entry.port),
            protocol: Transport(entry.proto),
            service: entry.service,
            state: match entry.state {
                BACKEND_ACTIVE => BackendState::Active,
                BACKEND_RESET => BackendState::Reset,
                _ => BackendState::Gone,
            },
            local: entry.flags & BACKEND_LOCAL != 0,
            terminating: entry.flags & BACKEND_TERMINATING != 0,
            weight: weight_of(entry.flags),
        })
    }
}
