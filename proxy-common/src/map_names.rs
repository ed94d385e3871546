//! The names of the maps and of their pins, and the default sizes of the maps.
//!
//! The kernel keeps 15 bytes of a name. A map without suffix is for IPv4 or for both families; one with suffix `6` is for IPv6.

/// [`ServiceKey`](crate::service::ServiceKey) to [`ServiceEntry`](crate::service::ServiceEntry); hash.
pub const SERVICES: &str = "services";
/// The same for IPv6.
pub const SERVICES6: &str = "services6";
/// Slot number to backend id (`u32`); array, memory-mapped by the agent.
pub const SLOTS: &str = "slots";
/// Eight times the id of a Service port, plus four for policy Local, to the first of four words (`u64`) that have the positions
/// of its tables in `maglev`, two in a word: the lower half of the first word is the current table, the others are the tables
/// before it, the newest first; 0: none. Array, memory-mapped by the agent.
pub const MAGLEV_INDEX: &str = "maglev_index";
/// Words (`u64`) of the tables; see [`maglev`](crate::maglev); array, memory-mapped by the agent.
pub const MAGLEV: &str = "maglev";
/// Service port id to the number of connections that were selected in turn (`u64`), which determines the next turn; array.
pub const TURNS: &str = "turns";
/// Backend id to [`BackendEntry`](crate::backend::BackendEntry); array.
pub const BACKENDS: &str = "backends";
/// The same for IPv6; both maps share the ids, so an id is used in one of them only.
pub const BACKENDS6: &str = "backends6";
/// Backend id to the results of connections to it (`u64`); see [`health`](crate::health); array, memory-mapped by the agent.
pub const HEALTH: &str = "health";
/// Hash of a client and a backend to the client's last failed connection to it (`u64`); see [`health`](crate::health); array.
pub const SKIPS: &str = "skips";
/// Flow number to [`FlowEntry`](crate::flow::FlowEntry); array, memory-mapped by readers.
pub const FLOWS: &str = "flows";
/// The same for IPv6.
pub const FLOWS6: &str = "flows6";
/// Bucket number to [`Bucket`](crate::flow::Bucket): the index from a packet's key to its flow; array.
pub const FLOW_INDEX: &str = "flow_index";
/// The same for IPv6.
pub const FLOW_INDEX6: &str = "flow_index6";
/// Family index to the clock hand (`u64`) over the family's flows; array of two.
pub const CLOCK_HAND: &str = "clock_hand";
/// [`SocketKey`](crate::socket::SocketKey) to [`SocketEntry`](crate::socket::SocketEntry); hash, not preallocated.
pub const SOCKETS: &str = "sockets";
/// The same for IPv6.
pub const SOCKETS6: &str = "sockets6";
/// Socket to [`SocketStorage`](crate::socket::SocketStorage): frontend and backend of a connected socket; socket-local storage.
pub const SOCKET_STORAGE: &str = "socket_storage";
/// Socket to [`SocketPeers`](crate::socket::SocketPeers): the Services to which an unconnected UDP socket sends; socket-local
/// storage.
pub const SOCKET_PEERS: &str = "socket_peers";
/// Family and slot of a client to jiffies when a [`STATE_DIRECT`](crate::flow::STATE_DIRECT) flow was last seen
/// ([`direct_slot`](crate::flow::direct_slot)); array.
pub const DIRECT_SEEN: &str = "direct_seen";
/// [`prefilter`](crate::prefilter) words (`u64`); array, memory-mapped by the agent.
pub const PREFILTER: &str = "prefilter";
/// 0 to [`NodeConfig`](crate::config::NodeConfig); array of one.
pub const CONFIG: &str = "config";
/// Service port id to [`ServiceStats`](crate::stats::ServiceStats); array per CPU.
pub const SERVICE_STATS: &str = "service_stats";
/// Backend id to connections (`u64`); array.
pub const BACKEND_STATS: &str = "backend_stats";
/// Backend id to its open connections (`u64`), for Services whose algorithm counts them; array, memory-mapped by the agent.
pub const CONNECTIONS: &str = "connections";
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
/// Number to [`Tunnel`](crate::node::Tunnel), a node to which packets are encapsulated; array.
pub const TUNNELS: &str = "tunnels";
/// Interface index to [`Device`](crate::node::Device); hash.
pub const DEVICES: &str = "devices";
/// [`AffinityKey`](crate::affinity::AffinityKey) to [`AffinityEntry`](crate::affinity::AffinityEntry); hash, not
/// preallocated.
pub const AFFINITY: &str = "affinity";
/// The same for IPv6.
pub const AFFINITY6: &str = "affinity6";
/// [`NetnsAffinityKey`](crate::affinity::NetnsAffinityKey) to [`AffinityEntry`](crate::affinity::AffinityEntry); hash, not
/// preallocated.
pub const AFFINITY_NETNS: &str = "affinity_netns";
/// Cookie of a network namespace to `u32`, 1: the namespace of a pod, by the source of a connection; LRU hash.
pub const NAMESPACES: &str = "namespaces";
/// [`SourceRangeKey`](crate::source_range::SourceRangeKey) to `u32`, 1; longest prefix match.
pub const SRC_RANGES: &str = "src_ranges";
/// The same for IPv6.
pub const SRC_RANGES6: &str = "src_ranges6";

/// [`Event`](crate::event::Event)s for listeners; ring buffer.
pub const EVENTS: &str = "events";
/// 0 to [`Monitor`](crate::event::Monitor): whether there is a listener; array of one, memory-mapped by listeners.
pub const MONITOR: &str = "monitor";

/// [`LatencyKey`](crate::latency::LatencyKey) to [`LatencyEntry`](crate::latency::LatencyEntry); LRU hash.
pub const CONNECT_LATENCY: &str = "connect_latency";

/// Twice the number of a flow, plus the index of its family, to the time of its SYN in nanoseconds of `bpf_ktime_get_ns`,
/// or the time until the answer ([`ANSWERED`](crate::latency::ANSWERED)); array.
pub const SYN_TIMES: &str = "syn_times";

/// [`ExampleKey`](crate::latency::ExampleKey) to [`SocketExample`](crate::latency::SocketExample); LRU hash.
pub const SOCKET_EXAMPLES: &str = "socket_examples";

/// Pinned maps that the agent creates again if their size is not the wanted one, because they hold no state of connections.
/// An earlier version of the same layout may lack them.
pub const OPTIONAL: &[&str] = &[CONNECT_LATENCY, SYN_TIMES, SOCKET_EXAMPLES];

/// Maps with an element for each backend id.
pub const OF_BACKENDS: &[&str] = &[BACKENDS, BACKENDS6, BACKEND_STATS, CONNECTIONS, HEALTH];

/// Returns the flag that sets the size of a map; "" for other maps.
pub fn flag(name: &str) -> &'static str {
    match name {
        SERVICES | SERVICES6 => "--max-frontends",
        SLOTS => "--max-slots",
        MAGLEV => "--max-maglev-words",
        name if OF_BACKENDS.contains(&name) => "--max-backends",
        FLOWS | FLOWS6 | FLOW_INDEX | FLOW_INDEX6 | SYN_TIMES => "--max-flows",
        SOCKETS | SOCKETS6 => "--max-sockets",
        SRC_RANGES | SRC_RANGES6 => "--max-source-ranges",
        SERVICE_STATS | NAMES | TURNS | MAGLEV_INDEX => "--max-services",
        _ => "",
    }
}

/// Pinned maps whose contents no program outside of the kernel can list: storage of sockets, and the ring buffer of events.
pub const UNLISTED: &[&str] = &[SOCKET_STORAGE, SOCKET_PEERS, EVENTS];

/// Every pinned map, except those in [`OPTIONAL`].
pub const ALL: &[&str] = &[
    SERVICES,
    SERVICES6,
    SLOTS,
    MAGLEV_INDEX,
    MAGLEV,
    TURNS,
    BACKENDS,
    BACKENDS6,
    HEALTH,
    SKIPS,
    FLOWS,
    FLOWS6,
    FLOW_INDEX,
    FLOW_INDEX6,
    CLOCK_HAND,
    SOCKETS,
    SOCKETS6,
    SOCKET_STORAGE,
    SOCKET_PEERS,
    DIRECT_SEEN,
    PREFILTER,
    CONFIG,
    SERVICE_STATS,
    BACKEND_STATS,
    CONNECTIONS,
    REASONS,
    REFUSALS,
    NAMES,
    NODE,
    NODE6,
    NODE_ADDRS,
    NODE_ADDRS6,
    TUNNELS,
    DEVICES,
    AFFINITY,
    AFFINITY6,
    AFFINITY_NETNS,
    NAMESPACES,
    SRC_RANGES,
    SRC_RANGES6,
    EVENTS,
    MONITOR,
];

/// 0 to the context of the packet that a CPU processes; array per CPU.
pub const SCRATCH: &str = "scratch";
/// The same for IPv6.
pub const SCRATCH6: &str = "scratch6";

/// Number to a route that the CPU caches for one tick of the clock; array per CPU.
pub const FIB_CACHE: &str = "fib_cache";
/// The same for IPv6.
pub const FIB_CACHE6: &str = "fib_cache6";

/// [`FragmentKey`](crate::fragment::FragmentKey) to [`FragmentEntry`](crate::fragment::FragmentEntry); LRU hash.
pub const FRAGMENTS: &str = "fragments";
/// The same for IPv6.
pub const FRAGMENTS6: &str = "fragments6";

/// 0 to the token bucket of a CPU's ICMP errors, 1 to that of its echo replies, 2 to that of its new flows to other nodes (DSR);
/// array per CPU.
pub const RATE_LIMITS: &str = "rate_limits";

/// Family index to the entries of its flow table that the CPU examines next for a new flow; array per CPU, of two.
pub const CLOCK_WINDOW: &str = "clock_window";

/// Socket to nanoseconds of `bpf_ktime_get_ns` when it sent its first SYN; socket-local storage.
pub const CONNECT_TIMES: &str = "connect_times";

/// Index of a device on which XDP may send packets of other devices; the value has no meaning; hash.
pub const XDP_DEVICES: &str = "xdp_devices";

/// Number to a program of [`TAIL_CALL_TARGETS`]; array of programs. Each load of the programs has its own array, pinned under the ids
/// of the programs that use it.
pub const CALLS: &str = "calls";

/// The targets of the packet programs' tail calls, by their number in [`CALLS`].
pub const TAIL_CALL_TARGETS: [&str; 6] = ["known4", "known6", "stages4", "stages6", "tunnel4", "tunnel6"];

/// Maximum number of segments of a map that grows. The map is an array of arrays of equal size: element `i` is in segment
/// `i / n`, where `n` is the number of elements of a segment.
pub const SEGMENTS: u32 = 1024;
/// Elements of a segment of `slots`.
pub const SLOT_SEGMENT: u32 = 1 << 14;
/// Words of a segment of `maglev`.
pub const MAGLEV_SEGMENT: u32 = 1 << 16;
/// Words of a segment of `maglev_index`: four for each Service port and policy.
pub const MAGLEV_INDEX_SEGMENT: u32 = 1 << 13;
/// Backend ids of a segment of `backends`, `backends6`, `health`, `backend_stats` and `connections`.
pub const BACKEND_SEGMENT: u32 = 1 << 14;
/// Service port ids of a segment of `service_stats` and `turns`.
pub const SERVICE_SEGMENT: u32 = 1 << 12;
/// Flows of a segment of `flows` and `flows6`.
pub const FLOW_SEGMENT: u32 = 1 << 14;
/// Buckets of a segment of `flow_index` and `flow_index6`.
pub const BUCKET_SEGMENT: u32 = 1 << 13;
/// Elements of a segment of `syn_times`.
pub const SYN_TIME_SEGMENT: u32 = 2 * FLOW_SEGMENT;

/// Flows of each address family with which a node starts.
pub const FIRST_FLOWS: u32 = FLOW_SEGMENT;

/// Maps that grow by segments.
pub const SEGMENTED: &[&str] = &[
    SLOTS,
    MAGLEV_INDEX,
    MAGLEV,
    TURNS,
    BACKENDS,
    BACKENDS6,
    HEALTH,
    FLOWS,
    FLOWS6,
    FLOW_INDEX,
    FLOW_INDEX6,
    SERVICE_STATS,
    BACKEND_STATS,
    CONNECTIONS,
    SYN_TIMES,
];

/// Maps that are not pinned by name: their content is not needed after the packet, or can be created again.
pub const PRIVATE: &[&str] = &[
    SCRATCH,
    SCRATCH6,
    FIB_CACHE,
    FIB_CACHE6,
    RATE_LIMITS,
    CLOCK_WINDOW,
    FRAGMENTS,
    FRAGMENTS6,
    XDP_DEVICES,
    CALLS,
    CONNECT_TIMES,
];

/// Frontends in each of `services` and `services6`.
pub const DEFAULT_FRONTENDS: u32 = 65_536;
/// Service port ids: `service_stats`, `turns`, `names`, and an eighth of the words of `maglev_index`.
pub const DEFAULT_SERVICES: u32 = 32_768;
/// Elements of `slots`; a change of a Service needs its old and its new extent for a moment.
pub const DEFAULT_SLOTS: u32 = 524_288;
/// Words of `maglev`, of eight bytes: a table of five endpoints has 134, one of a hundred 2,101. 6 MiB.
pub const DEFAULT_MAGLEV_WORDS: u32 = 786_432;
/// Backend ids: `backends`, `backends6`, `health`, `backend_stats` and `connections`.
pub const DEFAULT_BACKENDS: u32 = 262_144;
/// Flows in each of `flows` and `flows6`; `flow_index` and `flow_index6` have half as many buckets, rounded up to a
/// power of two.
pub const DEFAULT_FLOWS: u32 = 131_072;
/// Entries in each of `sockets` and `sockets6`.
pub const DEFAULT_SOCKETS: u32 = 131_072;
/// Entries in `refusals`.
pub const DEFAULT_REFUSALS: u32 = 16_384;
/// Entries in each of `connect_latency` and `socket_examples`, with `--connect-latency`.
pub const LATENCY_COUNT: u32 = 16_384;
/// Clients in each of `affinity`, `affinity6` and `affinity_netns`.
pub const DEFAULT_AFFINITY: u32 = 65_536;
/// Network namespaces in `namespaces`.
pub const NAMESPACE_COUNT: u32 = 4_096;
/// Elements of `reasons`: more than there are reasons, since the map stays when a later version adds some.
pub const REASON_COUNT: u32 = 128;
const _: () = assert!(crate::reason::Reason::COUNT <= REASON_COUNT);
/// Fragmented packets at a time, in each of `fragments` and `fragments6`.
pub const FRAGMENT_COUNT: u32 = 16_384;
/// Ranges in each of `src_ranges` and `src_ranges6`.
pub const DEFAULT_SRC_RANGES: u32 = 65_536;
/// Bytes of `events`, a power of two: room for some 5,000 events.
pub const EVENTS_BYTES: u32 = 1 << 19;
/// Addresses in each of `node_addrs` and `node_addrs6`.
pub const NODE_ADDR_COUNT: u32 = 16_384;
/// Maximum number of this node's own addresses among [`NODE_ADDR_COUNT`]; the others are addresses of other nodes.
pub const OWN_ADDR_COUNT: u32 = 4_096;
/// Elements of `tunnels`, a power of two: the number of another node is an index, and 0 is no node's number.
pub const TUNNEL_COUNT: u32 = 1 << 12;
/// Devices in `devices`.
pub const DEVICE_COUNT: u32 = 16_384;

#[cfg(test)]
mod tests {
    use super::{ALL, OPTIONAL, PRIVATE};

    #[test]
    fn names_fit_the_kernel() {
        for name in ALL.iter().chain(OPTIONAL).chain(PRIVATE) {
            assert!(name.len() <= 15, "{name} is cut by the kernel");
            assert!(
                name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'),
                "{name}"
            );
        }
    }
}
