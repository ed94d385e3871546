//! The capacities of the maps, and settings for loading and attaching the programs.

use std::path::PathBuf;

use proxy_common::config::Limits;
use proxy_common::flow::buckets_for;
use proxy_common::maglev::INDEX_WORDS;
use proxy_common::map_names as names;
use serde::Serialize;

use super::bpf;
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

/// Capacities of the maps, in entries. `/configz` shows them as they are serialized here. A pinned map keeps its size until
/// it is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Capacities {
    /// Service ports.
    pub services: u32,
    /// Frontends of each address family.
    pub frontends: u32,
    /// Elements of `slots`.
    pub slots: u32,
    /// Words of `maglev`.
    pub maglev_words: u32,
    /// Backend ids.
    pub backends: u32,
    /// Flows of each address family.
    pub flows: u32,
    /// Source ranges of each address family.
    pub source_ranges: u32,
    /// Remembered socket addresses of each address family.
    pub sockets: u32,
    /// Pairs of Service port and reason of refusal.
    pub refusals: u32,
    /// Whether the time until endpoints answer is measured; if not, the maps for it have one entry.
    pub connect_latency: bool,
    /// Factor by which the maps of Services are larger than by default if no setting gives their size; 1: no larger.
    #[serde(skip)]
    pub by_memory: u32,
}

impl Default for Capacities {
    fn default() -> Self {
        Self {
            services: names::DEFAULT_SERVICES,
            frontends: names::DEFAULT_FRONTENDS,
            slots: names::DEFAULT_SLOTS,
            maglev_words: names::DEFAULT_MAGLEV_WORDS,
            backends: names::DEFAULT_BACKENDS,
            flows: names::DEFAULT_FLOWS,
            source_ranges: names::DEFAULT_SRC_RANGES,
            sockets: names::DEFAULT_SOCKETS,
            refusals: names::DEFAULT_REFUSALS,
            connect_latency: false,
            by_memory: 1,
        }
    }
}

/// The maps that `--connect-latency` needs.
const OF_LATENCY: [&str; 3] = [names::CONNECT_LATENCY, names::SOCKET_EXAMPLES, names::SYN_TIMES];

impl Capacities {
    /// Whether a map is larger than by default only because of the node's memory.
    pub(super) fn is_by_memory(&self, map: &str) -> bool {
        let plain = Self::default().of(map).map(|(entries, _)| entries.saturating_mul(self.by_memory));
        self.by_memory > 1 && plain == self.of(map).map(|(entries, _)| entries)
    }

    /// Returns the ceilings of the maps that grow.
    pub fn limits(&self) -> Limits {
        let Self { services, slots, maglev_words, backends, flows, .. } = *self;
        Limits { services, slots, maglev_words, backends, flows }
    }

    /// Returns the number of entries of a map, and the setting that changes it; `None` for maps of fixed size.
    pub fn of(&self, map: &str) -> Option<(u32, &'static str)> {
        let is_off = |map| OF_LATENCY.contains(&map) && !self.connect_latency;
        let entries = match map {
            names::SERVICES | names::SERVICES6 => self.frontends,
            names::SLOTS => self.slots,
            names::MAGLEV => self.maglev_words,
            map if names::OF_BACKENDS.contains(&map) => self.backends,
            names::FLOWS | names::FLOWS6 => self.flows,
            names::FLOW_INDEX | names::FLOW_INDEX6 => buckets_for(self.flows),
            names::SRC_RANGES | names::SRC_RANGES6 => self.source_ranges,
            names::SOCKETS | names::SOCKETS6 => self.sockets,
            names::MAGLEV_INDEX => self.services.saturating_mul(2 * INDEX_WORDS),
            names::SERVICE_STATS | names::NAMES | names::TURNS => self.services,
            // No flag: the map is an LRU hash, which evicts the oldest entries instead of refusing new ones.
            names::REFUSALS => self.refusals,
            map if is_off(map) => return Some((1, "--connect-latency")),
            names::CONNECT_LATENCY | names::SOCKET_EXAMPLES => names::LATENCY_COUNT,
            names::SYN_TIMES => self.flows.saturating_mul(2),
            _ => return None,
        };
        Some((entries, names::flag(map)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn map_that_grows_has_a_setting() {
        let capacities = Capacities::default();
        let fixed: Vec<_> = names::ALL.iter().filter(|name| capacities.of(name).is_none()).collect();
        let small = [
            "skips",
            "clock_hand",
            "socket_storage",
            "socket_peers",
            "direct_seen",
            "prefilter",
            "config",
            "reasons",
        ];
        let node = ["node", "node6", "node_addrs", "node_addrs6", "tunnels", "devices"];
        // Their sizes need no flag.
        let others = ["affinity", "affinity6", "affinity_netns", "namespaces", "events", "monitor"];
        assert!(fixed.into_iter().eq(small.iter().chain(&node).chain(&others)));
        assert_eq!(capacities.of(names::FLOWS), Some((capacities.flows, "--max-flows")));
        assert_eq!(capacities.of(names::FLOW_INDEX6), Some((buckets_for(capacities.flows), "--max-flows")));
    }

    #[test]
    fn latency_maps_without_measurement_take_no_memory() {
        let off = Capacities::default();
        let on = Capacities { connect_latency: true, ..off };
        let entries = |capacities: &Capacities| {
            names::OPTIONAL.iter().map(|name| capacities.of(name).unwrap().0).collect::<Vec<_>>()
        };
        assert_eq!(entries(&off), [1, 1, 1]);
        assert_eq!(entries(&on), [names::LATENCY_COUNT, 2 * on.flows, names::LATENCY_COUNT]);
    }
}
