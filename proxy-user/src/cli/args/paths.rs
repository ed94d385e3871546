//! The flags that say how sockets and packets are met.

use std::time::Duration;

use crate::config::paths::{Ejection, Paths};
use crate::config::value::{self, AlgorithmName};
use crate::model::ForwardingMode;
use crate::model::settings::{SocketDrop, SocketLb};
use crate::programs::{TcxOrder, Xdp};

/// How sockets and packets are met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::Args)]
#[command(next_help_heading = "Data path")]
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
    pub forwarding_mode: ForwardingMode,
    /// Whether new connections skip endpoints that refuse connections or do not answer them, where a Service has more than one
    /// and does not say it (annotation `ballast.io/ejection`).
    #[arg(long, env = "BALLAST_EJECTION", value_name = "WHEN", default_value = "on")]
    pub ejection: Ejection,
    /// Time in which the share of an endpoint that joins a Service with others grows from a tenth to its weight; not with sh,
    /// dh and mh. 0: it has it at once.
    #[arg(long, env = "BALLAST_SLOW_START", value_name = "DURATION", default_value = "0s", value_parser = value::duration)]
    pub slow_start: Duration,
    /// Which sockets are translated when they connect; packets of the others are translated.
    #[arg(long, env = "BALLAST_SOCKET_LB", value_name = "WHICH", default_value = "all")]
    pub socket_lb: SocketLb,
    /// What a socket's call does where kube-proxy drops the packet.
    #[arg(long, env = "BALLAST_SOCKET_DROP", value_name = "HOW", default_value = "silent")]
    pub socket_drop: SocketDrop,
}

impl From<PathArgs> for Paths {
    fn from(args: PathArgs) -> Self {
        let PathArgs {
            tcx_order,
            xdp,
            algorithm,
            forwarding_mode,
            ejection,
            slow_start,
            socket_lb,
            socket_drop,
        } = args;
        Self { tcx_order, xdp, algorithm, forwarding_mode, ejection, slow_start, socket_lb, socket_drop }
    }
}
