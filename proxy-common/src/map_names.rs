//! The names of the maps, of their pins, and how large they are unless a setting says otherwise.
//!
//! The kernel keeps 15 bytes of a name. A map without suffix is IPv4's or shared, one with `6` is IPv6's.

/// [`ServiceKey`](crate::service::ServiceKey) to [`ServiceEntry`](crate::service::ServiceEntry); hash.
pub const SERVICES: &str = "services";
/// The same for IPv6.
pub const SERVICES6: &str = "services6";
/// Slot number to backend id (`u32`); array, memory-mapped by the agent.
pub const SLOTS: &str = "slots";
/// Backend id to [`BackendEntry`](crate::backend::BackendEntry); array.
pub const BACKENDS: &str = "backends";
/// The same for IPv6; ids are shared, so an id is used in one of the two.
pub const BACKENDS6: &str = "backends6";
/// Flow number to [`Flow`](crate::flow::Flow); array, memory-mapped by readers.
pub const FLOWS: &str = "flows";
/// The same for IPv6.
pub const FLOWS6: &str = "flows6";
/// Bucket number to [`Bucket`](crate::flow::Bucket): where a packet's flow is; array.
pub const FLOW_INDEX: &str = "flow_index";
/// The same for IPv6.
pub const FLOW_INDEX6: &str = "flow_index6";
/// Family index to the clock hand (`u64`) over its flow state; array of two.
pub const FLOW_HAND: &str = "flow_hand";
/// [`SocketKey`](crate::socket::SocketKey) to [`SocketEntry`](crate::socket::SocketEntry); LRU hash.
pub const SOCKETS: &str = "sockets";
/// The same for IPv6.
pub const SOCKETS6: &str = "sockets6";
/// [`filter`](crate::filter) words (`u64`); array, memory-mapped by the agent.
pub const FILTER: &str = "filter";
/// 0 to [`NodeConfig`](crate::config::NodeConfig); array of one.
pub const CONFIG: &str = "config";
/// Service port id to [`ServiceStats`](crate::stats::ServiceStats); array per CPU.
pub const SERVICE_STATS: &str = "service_stats";
/// Backend id to connections (`u64`); array.
pub const BACKEND_STATS: &str = "backend_stats";
/// Reason number to count (`u64`); array per CPU.
pub const REASONS: &str = "reasons";
/// [`RefusalKey`](crate::stats::RefusalKey) to count (`u64`); LRU hash.
pub const REFUSALS: &str = "refusals";
/// Service port id to [`PortName`](crate::name::PortName); hash, not preallocated. No program reads it.
pub const NAMES: &str = "names";

/// 0 to [`NodeEntry`](crate::node::NodeEntry); array of one.
pub const NODE: &str = "node";
/// The same for IPv6.
pub const NODE6: &str = "node6";
/// Address of this node to [`NodeAddr`](crate::node::NodeAddr); hash.
pub const NODE_ADDRS: &str = "node_addrs";
/// The same for IPv6.
pub const NODE_ADDRS6: &str = "node_addrs6";
/// Interface index to [`Device`](crate::node::Device); hash.
pub const DEVICES: &str = "devices";
/// [`AffinityKey`](crate::affinity::AffinityKey) to [`AffinityEntry`](crate::affinity::AffinityEntry); LRU hash.
pub const AFFINITY: &str = "affinity";
/// The same for IPv6.
pub const AFFINITY6: &str = "affinity6";
/// [`NetnsAffinityKey`](crate::affinity::NetnsAffinityKey) to the same; LRU hash.
pub const AFFINITY_NETNS: &str = "affinity_netns";
/// [`SourceRangeKey`](crate::source_range::SourceRangeKey) to `u32`, 1; longest prefix match.
pub const SRC_RANGES: &str = "src_ranges";
/// The same for IPv6.
pub const SRC_RANGES6: &str = "src_ranges6";

/// [`Event`](crate::event::Event)s on their way to listeners; ring buffer.
pub const EVENTS: &str = "events";
/// 0 to [`Monitor`](crate::event::Monitor): whether anybody listens; array of one, memory-mapped by listeners.
pub const MONITOR: &str = "monitor";

/// Every map that is pinned.
pub const ALL: &[&str] = &[
    SERVICES,
    SERVICES6,
    SLOTS,
    BACKENDS,
    BACKENDS6,
    FLOWS,
    FLOWS6,
    FLOW_INDEX,
    FLOW_INDEX6,
    FLOW_HAND,
    SOCKETS,
    SOCKETS6,
    FILTER,
    CONFIG,
    SERVICE_STATS,
    BACKEND_STATS,
    REASONS,
    REFUSALS,
    NAMES,
    NODE,
    NODE6,
    NODE_ADDRS,
    NODE_ADDRS6,
    DEVICES,
    AFFINITY,
    AFFINITY6,
    AFFINITY_NETNS,
    SRC_RANGES,
    SRC_RANGES6,
    EVENTS,
    MONITOR,
];

/// Where a program leaves a parsed packet to its next step; one for each CPU.
pub const SCRATCH: &str = "scratch";
/// The same for IPv6.
pub const SCRATCH6: &str = "scratch6";

/// Where a packet goes on from here, between two steps; one for each CPU.
pub const ROUTE: &str = "route";

/// Number to a way that the CPU remembers for one tick of the clock; array per CPU.
pub const WAYS: &str = "ways";
/// The same for IPv6.
pub const WAYS6: &str = "ways6";

/// [`FragmentKey`](crate::fragment::FragmentKey) to [`FragmentEntry`](crate::fragment::FragmentEntry); LRU hash.
pub const FRAGMENTS: &str = "fragments";
/// The same for IPv6.
pub const FRAGMENTS6: &str = "fragments6";

/// 0 to how many ICMP answers a CPU may send; array per CPU.
pub const ANSWERS: &str = "answers";

/// Family index to the entries of its flow state that the CPU looks at next; array per CPU, of two.
pub const FLOW_BLOCK: &str = "flow_block";

/// Maps that are not pinned: what they hold is over with the packet, or nobody misses it.
pub const PRIVATE: &[&str] =
    &[SCRATCH, SCRATCH6, ROUTE, WAYS, WAYS6, ANSWERS, FLOW_BLOCK, FRAGMENTS, FRAGMENTS6];

/// Frontends in each of `services` and `services6`.
pub const DEFAULT_FRONTENDS: u32 = 65_536;
/// Service port ids: `service_stats` and `names`.
pub const DEFAULT_SERVICES: u32 = 32_768;
/// Elements of `slots`; a change of a Service needs its old and its new extent for a moment.
pub const DEFAULT_SLOTS: u32 = 524_288;
/// Backend ids: `backends`, `backends6` and `backend_stats`.
pub const DEFAULT_BACKENDS: u32 = 262_144;
/// Flows in each of `flows` and `flows6`; `flow_index` and `flow_index6` have half as many buckets, rounded up to a
/// power of two.
pub const DEFAULT_FLOWS: u32 = 131_072;
/// Entries in each of `sockets` and `sockets6`.
pub const DEFAULT_SOCKETS: u32 = 131_072;
/// Entries in `refusals`.
pub const DEFAULT_REFUSALS: u32 = 16_384;
/// Clients in each of `affinity`, `affinity6` and `affinity_netns`.
pub const DEFAULT_AFFINITY: u32 = 65_536;
/// Packets whose fragments are under way, in each of `fragments` and `fragments6`.
pub const FRAGMENT_COUNT: u32 = 16_384;
/// Ranges in each of `src_ranges` and `src_ranges6`.
pub const DEFAULT_SRC_RANGES: u32 = 16_384;
/// Bytes of `events`, a power of two: some 5,000 of them.
pub const EVENTS_BYTES: u32 = 1 << 19;
/// Addresses in each of `node_addrs` and `node_addrs6`.
pub const NODE_ADDR_COUNT: u32 = 4_096;
/// Devices in `devices`.
pub const DEVICE_COUNT: u32 = 16_384;

#[cfg(test)]
mod tests {
    use super::{ALL, PRIVATE};

    #[test]
    fn names_fit_the_kernel() {
        for name in ALL.iter().chain(PRIVATE) {
            assert!(name.len() <= 15, "{name} is cut by the kernel");
            assert!(
                name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'),
                "{name}"
            );
        }
    }
}
