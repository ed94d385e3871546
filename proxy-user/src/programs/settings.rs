//! Settings for loading and attaching the programs.

use std::path::PathBuf;

use serde::Serialize;

use super::bpf;
use super::capacities::Capacities;
use super::hooks::Direction;
use super::xdp::keeper::Xdp;

/// How packet programs are attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PacketHook {
    /// TCX if the kernel has it, otherwise clsact.
    #[default]
    Auto,
    /// TCX only.
    Tcx,
    /// The clsact qdisc.
    Clsact,
}

impl PacketHook {
    /// Whether packet programs are attached with TCX on this kernel.
    pub fn uses_tcx(self) -> bool {
        match self {
            Self::Auto => bpf::has_tcx() == Some(true),
            Self::Tcx => true,
            Self::Clsact => false,
        }
    }
}

/// Where packet programs run among other programs on a TCX hook (`--tcx-order`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TcxOrder {
    /// First at ingress, last at egress: other programs see endpoints in both directions, never Services.
    #[default]
    Nest,
    /// First on both: other programs see requests to endpoints, and replies of Services.
    First,
    /// Last on both: other programs see requests to Services, and replies of endpoints.
    Last,
}

impl TcxOrder {
    pub(super) const fn rank(self, direction: Direction) -> bpf::Rank {
        match (self, direction) {
            (Self::First, _) | (Self::Nest, Direction::Ingress) => bpf::Rank::First,
            (Self::Last, _) | (Self::Nest, Direction::Egress) => bpf::Rank::Last,
        }
    }
}

/// The priority of packet programs among the filters of the clsact qdisc (`--clsact-priority`); the lowest runs first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct ClsactPriority(pub u16);

impl Default for ClsactPriority {
    /// A high priority, but not the highest: another filter can come before Ballast's.
    fn default() -> Self {
        Self(2)
    }
}

/// Settings for loading and attaching the programs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The BPF object.
    pub object: &'static [u8],
    /// The bpffs; mounted if it is not yet.
    pub bpffs: PathBuf,
    /// The cgroup whose sockets are translated, from [`host::cgroup::find`](crate::host::cgroup::find).
    pub cgroup: PathBuf,
    /// Sizes of the maps.
    pub capacities: Capacities,
    /// How packet programs are attached.
    pub packet_hook: PacketHook,
    /// Where they run among other programs.
    pub tcx_order: TcxOrder,
    /// Their priority among other filters, without TCX.
    pub clsact_priority: ClsactPriority,
    /// Which devices get the XDP program.
    pub xdp: Xdp,
}
