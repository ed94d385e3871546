//! The flags that say how sockets and packets are met.

use std::time::Duration;

use clap::ValueEnum;
use serde::Serialize;

use crate::cli::config;
use crate::cli::value::{self, AlgorithmName};
use crate::model::{ForwardingMode, settings};
use crate::programs;

/// How sockets and packets are met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::Args, Serialize)]
#[command(next_help_heading = "The two paths")]
#[serde(rename_all = "camelCase")]
pub struct PathArgs {
    /// Where the packet programs run among those of others on a device (TCX).
    #[arg(long, env = "BALLAST_TCX_ORDER", value_name = "ORDER", default_value = "nest")]
    pub tcx_order: TcxOrder,
    /// Where packets to other nodes are forwarded before tc sees them.
    #[arg(long, env = "BALLAST_XDP", value_name = "MODE", default_value = "auto")]
    pub xdp: Xdp,
    /// How connections are spread over the endpoints of Services that do not say it (annotation `ballast.io/algorithm`), by
    /// IPVS' names: random, rr, wrr, sh, dh, mh, lc, wlc, sed, nq. Default: random for clients inside the cluster, mh
    /// (Maglev) for those outside.
    #[arg(long, env = "BALLAST_ALGORITHM", value_name = "NAME")]
    pub algorithm: Option<AlgorithmName>,
    /// How packets of clients outside reach endpoints on other nodes, for Services that do not say it (annotation
    /// `ballast.io/forwarding-mode`).
    #[arg(long, env = "BALLAST_FORWARDING_MODE", value_name = "MODE", default_value = "snat")]
    pub forwarding_mode: Forwarding,
    /// Whether new connections skip endpoints that refuse connections or do not answer them, where a Service has more than one
    /// and does not say it (annotation `ballast.io/ejection`).
    #[arg(long, env = "BALLAST_EJECTION", value_name = "WHEN", default_value = "on")]
    pub ejection: Ejection,
    /// Time in which the share of an endpoint that joins a Service with others grows from a tenth to its weight; not with sh,
    /// dh and mh. 0: it has it at once.
    #[arg(long, env = "BALLAST_SLOW_START", value_name = "DURATION", default_value = "0s", value_parser = value::duration)]
    #[serde(serialize_with = "config::seconds")]
    pub slow_start: Duration,
    /// Which sockets are translated when they connect; packets of the others are translated.
    #[arg(long, env = "BALLAST_SOCKET_LB", value_name = "WHICH", default_value = "all")]
    pub socket_lb: SocketLb,
    /// What a socket's call does where kube-proxy drops the packet.
    #[arg(long, env = "BALLAST_SOCKET_DROP", value_name = "HOW", default_value = "silent")]
    pub socket_drop: SocketDrop,
}

/// `--tcx-order`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TcxOrder {
    /// First at ingress, last at egress: the programs of others see endpoints both ways, never Services.
    #[default]
    Nest,
    /// First on both: others see requests to endpoints, and replies of Services.
    First,
    /// Last on both: others see requests to Services, and replies of endpoints.
    Last,
}

/// `--xdp`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Xdp {
    /// On uplinks whose driver runs XDP programs; never on virtual devices, where it costs more than it saves.
    #[default]
    Auto,
    /// On every uplink whose driver runs XDP programs, veth too.
    Native,
    /// On every uplink, by the kernel's stack: no faster than tc; for tests.
    Generic,
    /// Nowhere.
    Off,
}

/// `--forwarding-mode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Forwarding {
    /// Under this node's address; replies come back through it.
    #[default]
    Snat,
    /// Encapsulated (IP in IP) to the endpoint's node, which answers the client directly: the endpoint sees the client's
    /// address. SCTP as with snat.
    Dsr,
    /// TCP as with dsr, all else as with snat.
    Hybrid,
}

impl From<Forwarding> for ForwardingMode {
    fn from(mode: Forwarding) -> Self {
        match mode {
            Forwarding::Snat => Self::Snat,
            Forwarding::Dsr => Self::Dsr,
            Forwarding::Hybrid => Self::Hybrid,
        }
    }
}

/// `--ejection`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Ejection {
    /// For a second after two clients met a failure in a row, longer each time; never the last endpoint.
    #[default]
    On,
    /// As with kube-proxy, which leads connections to an endpoint as long as it is ready.
    Off,
}

/// `--socket-lb`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SocketLb {
    /// Those of the node and of its pods.
    #[default]
    All,
    /// Those in the node's own network namespace: rules inside pods (a mesh's REDIRECT) meet the Service's address.
    HostOnly,
    /// None.
    Off,
}

/// `--socket-drop`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SocketDrop {
    /// It goes on, as with kube-proxy: its packets are dropped until somebody may have them.
    #[default]
    Silent,
    /// It fails at once (ETIMEDOUT).
    Fail,
}

impl From<TcxOrder> for programs::TcxOrder {
    fn from(order: TcxOrder) -> Self {
        match order {
            TcxOrder::Nest => Self::Nest,
            TcxOrder::First => Self::First,
            TcxOrder::Last => Self::Last,
        }
    }
}

impl From<Xdp> for programs::Xdp {
    fn from(xdp: Xdp) -> Self {
        match xdp {
            Xdp::Auto => Self::Auto,
            Xdp::Native => Self::Native,
            Xdp::Generic => Self::Generic,
            Xdp::Off => Self::Off,
        }
    }
}

impl From<SocketLb> for settings::SocketLb {
    fn from(which: SocketLb) -> Self {
        match which {
            SocketLb::All => Self::All,
            SocketLb::HostOnly => Self::HostOnly,
            SocketLb::Off => Self::Off,
        }
    }
}

impl From<SocketDrop> for settings::SocketDrop {
    fn from(how: SocketDrop) -> Self {
        match how {
            SocketDrop::Silent => Self::Silent,
            SocketDrop::Fail => Self::Fail,
        }
    }
}
