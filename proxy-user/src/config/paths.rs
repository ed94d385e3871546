//! How sockets and packets are met.

use std::time::Duration;

use serde::Serialize;

use super::value::{AlgorithmName, seconds};
use crate::model::ForwardingMode;
use crate::model::settings::{SocketDrop, SocketLb};
use crate::programs::{TcxOrder, Xdp};

/// How sockets and packets are met. The fields are the flags of these names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Paths {
    /// Where the packet programs run among those of others on a device (TCX).
    pub tcx_order: TcxOrder,
    /// Where packets to other nodes are forwarded before tc sees them.
    pub xdp: Xdp,
    /// How connections are spread over endpoints; `None`: `random` inside the cluster, `mh` for clients outside.
    pub algorithm: Option<AlgorithmName>,
    /// How packets of clients outside reach endpoints on other nodes.
    pub forwarding_mode: ForwardingMode,
    /// Whether new connections skip endpoints that fail.
    pub ejection: Ejection,
    /// Time in which the share of an endpoint that joins grows to its weight.
    #[serde(serialize_with = "seconds")]
    pub slow_start: Duration,
    /// Which sockets are translated when they connect.
    pub socket_lb: SocketLb,
    /// What a socket's call does where kube-proxy drops the packet.
    pub socket_drop: SocketDrop,
}

/// `--ejection`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Ejection {
    /// For a second after two clients met a failure in a row, longer each time; never the last endpoint.
    #[default]
    On,
    /// As with kube-proxy, which leads connections to an endpoint as long as it is ready.
    Off,
}
