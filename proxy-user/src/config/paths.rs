//! How sockets and packets are handled.

use std::time::Duration;

use clap::builder::{FalseyValueParser, TypedValueParser as _};
use proxy_common::config::MAX_RATE;
use serde::Serialize;

use super::choices::{choice, choices};
use crate::programs::{ClsactPriority, TcxOrder, Xdp};
use proxy_cli::value::{self, AlgorithmName, seconds};
use proxy_core::model::ForwardingMode;
use proxy_core::model::annotations::Annotations;
use proxy_core::model::settings::{DsrSettings, DsrSources, MeshPorts, NodePortBind, SocketDrop, SocketLb};

/// How sockets and packets are handled. The fields are the flags with these names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, clap::Args)]
#[serde(rename_all = "camelCase")]
#[command(next_help_heading = "Data path")]
pub struct Paths {
    /// Position of Ballast's packet programs among other programs on a device (TCX).
    #[arg(long, env = "BALLAST_TCX_ORDER", value_name = "ORDER", default_value = "nest", value_parser = choice::<TcxOrder>())]
    pub tcx_order: TcxOrder,
    /// Priority of Ballast's packet programs among the filters of other programs on a device, on kernels before 6.6: from 1
    /// to 65535, the lowest runs first; of the same priority, Ballast's runs first.
    #[arg(long, env = "BALLAST_CLSACT_PRIORITY", value_name = "NUMBER", default_value = "2", value_parser = clap::value_parser!(u16).range(1..).map(ClsactPriority))]
    pub clsact_priority: ClsactPriority,
    /// Devices on which an XDP program forwards packets to other nodes before they reach tc.
    #[arg(long, env = "BALLAST_XDP", value_name = "MODE", default_value = "auto", value_parser = choice::<Xdp>())]
    pub xdp: Xdp,
    /// Load-balancing algorithm of Services without the annotation `ballast.io/algorithm`, by the names of IPVS: random, rr,
    /// wrr, sh, dh, mh (or maglev), lc, wlc, sed, nq, latency. Default: random for clients inside the cluster, mh (Maglev) for
    /// clients outside.
    #[arg(long, env = "BALLAST_ALGORITHM", value_name = "NAME")]
    pub algorithm: Option<AlgorithmName>,
    /// How packets of clients outside the cluster reach endpoints on other nodes, for Services without the annotation
    /// `ballast.io/forwarding-mode`.
    #[arg(long, env = "BALLAST_FORWARDING_MODE", value_name = "MODE", default_value = "snat", value_parser = choice::<ForwardingMode>())]
    pub forwarding_mode: ForwardingMode,
    /// Accept packets that other nodes encapsulate (DSR) before a Service has DSR on this node. Give it to all agents before you
    /// change --forwarding-mode to dsr, and until it is changed back on all nodes: an agent that does not accept them yet leaves
    /// them to the kernel, which refuses them.
    #[arg(long, env = "BALLAST_ACCEPT_DSR", value_parser = FalseyValueParser::new())]
    pub accept_dsr: bool,
    /// Number of connections to endpoints on other nodes (DSR) that may begin on a CPU in a second. Packets of connections beyond it
    /// are sent to the endpoint that the Maglev table selects, and keep no entry in the flow table. 0: no limit.
    #[arg(
        long,
        env = "BALLAST_DSR_FLOW_RATE",
        value_name = "NUMBER",
        default_value_t = DsrSettings::FLOW_RATE,
        value_parser = clap::value_parser!(u32).range(0..=i64::from(MAX_RATE))
    )]
    pub dsr_flow_rate: u32,
    /// Ranges from which nodes take the source address of packets that they encapsulate (DSR), at most one of each address family: a
    /// hash of the connection selects the address, so that the queues of the other node's network card share the packets. The same
    /// on all nodes; no other machine may have an address in them. Default: an `InternalIP` of the node.
    #[arg(
        long,
        env = "BALLAST_DSR_SOURCE_RANGES",
        value_name = "CIDR[,CIDR]",
        default_value = "",
        hide_default_value = true
    )]
    pub dsr_source_ranges: DsrSources,
    /// Whether new connections skip endpoints that refuse connections or do not answer them, for Services with several
    /// endpoints and without the annotation `ballast.io/ejection`.
    #[arg(long, env = "BALLAST_EJECTION", value_name = "WHEN", default_value = "on", value_parser = choice::<Ejection>())]
    pub ejection: Ejection,
    /// Annotations `ballast.io/...` of Services that count, as a list of algorithm, ejection, external-failover, forwarding-mode,
    /// rebalance, removal-policy, socket-lb and weights; or all, or none. With external-failover, nodes send packets of clients
    /// outside on, untranslated. With forwarding-mode, a Service that asks for DSR makes every agent watch all nodes and accept packets that
    /// they encapsulate.
    #[arg(
        long,
        env = "BALLAST_TENANT_ANNOTATIONS",
        value_name = "LIST",
        default_value = "algorithm,ejection,rebalance,removal-policy,socket-lb,weights"
    )]
    pub tenant_annotations: Annotations,
    /// Time in which the share of a new endpoint grows from a tenth of its weight to its weight; not with sh, dh and mh.
    /// 0: no slow start.
    #[serde(serialize_with = "seconds")]
    #[arg(long, env = "BALLAST_SLOW_START", value_name = "DURATION", default_value = "0s", value_parser = value::duration)]
    pub slow_start: Duration,
    /// Which sockets are translated at connect. For all other sockets, the packet programs translate their packets.
    #[arg(long, env = "BALLAST_SOCKET_LB", value_name = "WHICH", default_value = "all", value_parser = choice::<SocketLb>())]
    pub socket_lb: SocketLb,
    /// Ports at which the proxy of a service mesh listens in the network namespace of a pod, at most 4: the sockets of such a pod
    /// are not translated, so that its rules see the addresses of Services. none: no port.
    #[arg(long, env = "BALLAST_MESH_PORTS", value_name = "PORTS", default_value_t)]
    pub mesh_ports: MeshPorts,
    /// What connect and sendmsg of a translated socket do where kube-proxy would drop the packet.
    #[arg(long, env = "BALLAST_SOCKET_DROP", value_name = "HOW", default_value = "silent", value_parser = choice::<SocketDrop>())]
    pub socket_drop: SocketDrop,
    /// Whether a process of the node may bind a port that is a node port of a Service.
    #[arg(long, env = "BALLAST_NODE_PORT_BIND", value_name = "WHETHER", default_value = "allow", value_parser = choice::<NodePortBind>())]
    pub node_port_bind: NodePortBind,
    /// Start although the kernel is `PREEMPT_RT`, of Linux 6.18 or newer: only if it was built with
    /// `CONFIG_PREEMPT_RT_NEEDS_BH_LOCK=y`.
    #[arg(long, env = "BALLAST_ALLOW_PREEMPT_RT", value_parser = FalseyValueParser::new())]
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

choices! {
    Ejection {
        On = "on":
            "A client skips an endpoint after its own failed connection; all clients skip one that refused two clients in a row, \
             for one second, and longer each time. If all endpoints fail, none is skipped",
        Off = "off": "Never: like kube-proxy, select each endpoint as long as it is ready",
    }
}
