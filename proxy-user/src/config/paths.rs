//! How sockets and packets are handled.

use std::time::Duration;

use serde::Serialize;

use crate::programs::{ClsactPriority, TcxOrder, Xdp};
use proxy_cli::value::{AlgorithmName, seconds};
use proxy_core::model::ForwardingMode;
use proxy_core::model::annotations::Annotations;
use proxy_core::model::settings::{MeshPorts, NodePortBind, SocketDrop, SocketLb};

/// How sockets and packets are handled. The fields are the flags with these names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Paths {
    /// The position of the packet programs among the programs of others on a device (TCX).
    pub tcx_order: TcxOrder,
    /// The priority of the packet programs among the filters of others on a device (clsact).
    pub clsact_priority: ClsactPriority,
    /// Whether and how XDP forwards packets to other nodes, before tc sees them.
    pub xdp: Xdp,
    /// How endpoints are selected; `None`: `random` inside the cluster, `mh` for clients outside.
    pub algorithm: Option<AlgorithmName>,
    /// How packets of clients outside are sent to endpoints on other nodes.
    pub forwarding_mode: ForwardingMode,
    /// Packets that other nodes encapsulate (DSR) are accepted before a Service has DSR on this node.
    pub accept_dsr: bool,
    /// Whether new connections skip endpoints that fail.
    pub ejection: Ejection,
    /// The annotations of Services that count.
    pub tenant_annotations: Annotations,
    /// The time in which the share of a new endpoint grows to its weight.
    #[serde(serialize_with = "seconds")]
    pub slow_start: Duration,
    /// Which sockets are translated when they connect.
    pub socket_lb: SocketLb,
    /// Ports by which the proxy of a service mesh in a pod is recognised: the sockets of such a pod are not translated.
    pub mesh_ports: MeshPorts,
    /// The result of a socket call for which kube-proxy would drop the packet.
    pub socket_drop: SocketDrop,
    /// Whether a process of the node may bind a node port.
    pub node_port_bind: NodePortBind,
    /// The agent starts on a `PREEMPT_RT` kernel of Linux 6.18 or newer.
    pub allow_preempt_rt: bool,
}

/// The value of `--ejection`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Ejection {
    /// A client skips an endpoint after a failed connection of its own. All clients skip an endpoint for a second after it has
    /// refused two of them in a row, and longer each time; never the last one.
    #[default]
    On,
    /// Endpoints are not skipped, as with kube-proxy, which sends connections to an endpoint as long as it is ready.
    Off,
}
