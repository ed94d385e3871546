//! The maps. The comment on each map says who writes it, who reads it, what a miss means, and why it has this kind and
//! size. Sizes are the defaults; the agent's `--max-*` flags change them. `docs/maps.md` shows how to inspect the maps.

use aya_ebpf::bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC};
use aya_ebpf::btf_maps::{
    Array, ArrayOfMaps, HashMap, LpmTrie, LruHashMap, PerCpuArray, ProgramArray, RingBuf, SkStorage,
};
use aya_ebpf::macros::btf_map;
use proxy_common::affinity::{AffinityEntry, AffinityKey, NetnsAffinityKey};
use proxy_common::backend::BackendEntry;
use proxy_common::config::NodeConfig;
use proxy_common::event::Monitor;
use proxy_common::flow::{Bucket, DIRECT_WORDS, FlowEntry};
use proxy_common::fragment::{FragmentEntry, FragmentKey};
use proxy_common::health::SKIP_COUNT;
use proxy_common::latency::{ExampleKey, LatencyEntry, LatencyKey, SocketExample};
use proxy_common::map_names as sizes;
use proxy_common::name::PortName;
use proxy_common::node::{Device, NodeAddr, NodeEntry, Tunnel};
use proxy_common::prefilter::PREFILTER_WORDS;
use proxy_common::service::{ServiceEntry, ServiceKey};
use proxy_common::socket::{SocketEntry, SocketKey, SocketPeers, SocketStorage};
use proxy_common::source_range::SourceRangeKey;
use proxy_common::stats::{RefusalKey, ServiceStats};

use crate::context::PacketCtx;
use crate::env::{ClockWindow, FIB_CACHE_ENTRIES, FibEntry, TOKEN_BUCKETS, TokenBucket};

const FRONTENDS: usize = sizes::DEFAULT_FRONTENDS as usize;
const SERVICE_IDS: usize = sizes::SERVICE_SEGMENT as usize;
const MAGLEV_WORDS: usize = sizes::MAGLEV_SEGMENT as usize;
const MAGLEV_INDEXES: usize = sizes::MAGLEV_INDEX_SEGMENT as usize;
const SLOT_COUNT: usize = sizes::SLOT_SEGMENT as usize;
const BACKEND_IDS: usize = sizes::BACKEND_SEGMENT as usize;
const FLOW_COUNT: usize = sizes::FLOW_SEGMENT as usize;
const FLOW_BUCKETS: usize = sizes::BUCKET_SEGMENT as usize;
const SYN_TIME_COUNT: usize = sizes::SYN_TIME_SEGMENT as usize;
const SOCKET_COUNT: usize = sizes::DEFAULT_SOCKETS as usize;
const NODE_ADDR_IDS: usize = sizes::NODE_ADDR_COUNT as usize;
const TUNNEL_IDS: usize = sizes::TUNNEL_COUNT as usize;
const DEVICE_IDS: usize = sizes::DEVICE_COUNT as usize;
const AFFINITY_COUNT: usize = sizes::DEFAULT_AFFINITY as usize;
const FRAGMENT_COUNT: usize = sizes::FRAGMENT_COUNT as usize;
const SRC_RANGE_COUNT: usize = sizes::DEFAULT_SRC_RANGES as usize;
const MMAPABLE: usize = BPF_F_MMAPABLE as usize;
const NO_PREALLOC: usize = BPF_F_NO_PREALLOC as usize;

/// A map that grows: an array of arrays of equal size, the segments, to which the agent adds further ones. The size of a
/// segment is a constant, so a lookup is a few instructions without a call, as in a plain array.
type Grows<Segment> = ArrayOfMaps<Segment, { sizes::SEGMENTS as usize }>;

/// Access to the elements of a map that grows. An index beyond the segments is a miss.
pub(super) trait Elements {
    type Value;
    /// Returns an element.
    fn at(&self, index: u32) -> Option<*mut Self::Value>;
}

impl<T, const N: usize, const FLAGS: usize> Elements for Grows<Array<T, N, FLAGS>> {
    type Value = T;

    #[inline(always)]
    fn at(&self, index: u32) -> Option<*mut T> {
        self.get_value_ptr_mut(index / N as u32, &(index % N as u32))
    }
}

impl<T, const N: usize> Elements for Grows<PerCpuArray<T, N>> {
    type Value = T;

    /// Returns this CPU's element.
    #[inline(always)]
    fn at(&self, index: u32) -> Option<*mut T> {
        self.get_value_ptr_mut(index / N as u32, &(index % N as u32))
    }
}

type A4 = [u8; 4];
type A6 = [u8; 16];

// Frontend to Service port. Written by the agent; read once for each new connection, by the packet and the socket path. A
// miss: the address is no frontend. A hash, since frontends are sparse; without preallocation, as only the agent writes it,
// which tries again. 65,536: about 10,000 Services with three ports and two kinds of address.
#[btf_map(name = "services")]
pub(super) static SERVICES: HashMap<ServiceKey<A4>, ServiceEntry, FRONTENDS, NO_PREALLOC> = HashMap::new();
#[btf_map(name = "services6")]
pub(super) static SERVICES6: HashMap<ServiceKey<A6>, ServiceEntry, FRONTENDS, NO_PREALLOC> = HashMap::new();

// Slot to backend id: each frontend refers to an extent of slots. Written by the agent through a mapping, before the entry
// of `services` that refers to it; read once for each new connection. A miss (an index beyond the array) is an
// inconsistency, and is counted. An array, because the lookup needs no function call. 524,288: during each change both the
// old and the new extent exist.
#[btf_map(name = "slots")]
pub(super) static SLOTS: Grows<Array<u32, SLOT_COUNT, MMAPABLE>> = Grows::new();

// Service port and policy to the first words of its tables in `maglev`. Written by the agent through a mapping, after the
// table and before the entry of `services` that needs it; read once for each new connection whose backend is selected by a
// hash, and eight times for a packet in the middle of a DSR connection without a flow. 0: there is no table, and the hash
// selects a slot. An array of twice four words for each Service port.
#[btf_map(name = "maglev_index")]
pub(super) static MAGLEV_INDEX: Grows<Array<u64, MAGLEV_INDEXES, MMAPABLE>> = Grows::new();

// Maglev tables, each of them contiguous (`proxy_common::maglev`). Written by the agent through a mapping, before
// `maglev_index` refers to the table; read three times for each new connection whose backend is selected by a hash. A miss
// (an index beyond the array): as without a table. An array of words, since tables differ in length: 786,432 words hold
// 5,800 tables of five endpoints.
#[btf_map(name = "maglev")]
pub(super) static MAGLEV: Grows<Array<u64, MAGLEV_WORDS, MMAPABLE>> = Grows::new();

// Service port id to the number of connections that were assigned in turn. Written and read by all programs for new
// connections of a Service whose backends are selected in turn. A miss: the id is beyond the array, and a random slot is
// selected. Shared by all CPUs, so that the turns have one order.
#[btf_map(name = "turns")]
pub(super) static TURNS: Grows<Array<u64, SERVICE_IDS>> = Grows::new();

// Backend id to endpoint. Written by the agent through a mapping, before any slot that refers to it; read for each new
// connection, for each UDP packet, and for SYNs. State 0: the id is free. An array, because the lookup needs no function
// call.
#[btf_map(name = "backends")]
pub(super) static BACKENDS: Grows<Array<BackendEntry<A4>, BACKEND_IDS, MMAPABLE>> = Grows::new();
#[btf_map(name = "backends6")]
pub(super) static BACKENDS6: Grows<Array<BackendEntry<A6>, BACKEND_IDS, MMAPABLE>> = Grows::new();

// Backend id to the results of connections to the backend (`proxy_common::health`). Written by the programs when a
// connection fails, or is answered after a failure, and by the agent through a mapping when it allocates an id; read for
// each new connection to a Service with ejection. 0: nothing is known. A miss: the backend gets connections. One word,
// changed by compare-and-exchange, so that failures on all CPUs count.
#[btf_map(name = "health")]
pub(super) static HEALTH: Grows<Array<u64, BACKEND_IDS, MMAPABLE>> = Grows::new();

// Pair of client and backend to the client's last failed connection (`proxy_common::health`), by a hash of both; the word has
// a tag. Written by the programs when a connection fails; read for new connections to a backend whose word in `health` says
// so. A miss, or another tag: the client does not skip the backend. Pairs with the same index replace each other, since a
// lost word only means that the client tries the backend again.
#[btf_map(name = "skips")]
pub(super) static SKIPS: Array<u64, { SKIP_COUNT as usize }, MMAPABLE> = Array::new();

// Flow number to flow: connection tracking of the packet path. Written and read by the packet programs for each packet of a
// flow; the agent reads it through a mapping. State 0: the entry is free. An array with our own index and CLOCK eviction:
// the kernel's LRU hash evicts established flows, and an insertion into it costs more than everything else that a new flow
// needs.
#[btf_map(name = "flows")]
pub(super) static FLOWS: Grows<Array<FlowEntry<A4>, FLOW_COUNT, MMAPABLE>> = Grows::new();
#[btf_map(name = "flows6")]
pub(super) static FLOWS6: Grows<Array<FlowEntry<A6>, FLOW_COUNT, MMAPABLE>> = Grows::new();

// Index that maps the keys of the flows to their entries. Written and read by the packet programs. If no slot has the key's
// tag, there is no flow. An array of cache lines with half as many buckets as flows: on average a bucket of 15 slots holds
// four keys.
#[btf_map(name = "flow_index")]
pub(super) static FLOW_INDEX: Grows<Array<Bucket, FLOW_BUCKETS, MMAPABLE>> = Grows::new();
#[btf_map(name = "flow_index6")]
pub(super) static FLOW_INDEX6: Grows<Array<Bucket, FLOW_BUCKETS, MMAPABLE>> = Grows::new();

// Family to the clock hand over its flows, which only increases. Written by the packet programs, once for every 16 new
// flows of a CPU. Never a miss. An array of two elements, shared by all CPUs.
#[btf_map(name = "clock_hand")]
pub(super) static CLOCK_HAND: Array<u64, 2> = Array::new();

// Family to the entries that this CPU examines next. Written and read by the packet programs for new flows. Never a miss.
// Per CPU, so that the cache line of the clock hand does not move between CPUs with each new flow.
#[btf_map(name = "clock_window")]
pub(super) static CLOCK_WINDOW: PerCpuArray<ClockWindow, 2> = PerCpuArray::new();

// Slot of a client (hash of address, port and protocol) to jiffies when a packet of a direct flow (`STATE_DIRECT`) was last
// seen; 0: none was seen, and packets of these clients directly to endpoints have no flow. Written and read by the packet
// programs. Never a miss. An array of words, of which one for each family covers all clients.
#[btf_map(name = "direct_seen")]
pub(super) static DIRECT_SEEN: Array<u32, { 2 * DIRECT_WORDS as usize }> = Array::new();

// The original destination of a connected socket, and the backend that replaced it. Written by `connect`, and by `sendmsg`
// and the release of a socket when a connection ends; read by these, `getpeername`, `recvmsg`, `sock_ops`,
// `tc_egress` and the iterators.
// A miss: the socket is connected to no Service. Socket-local storage: the kernel frees it with the socket, and no other
// socket can evict it.
#[btf_map(name = "socket_storage")]
pub(super) static SOCKET_STORAGE: SkStorage<SocketStorage> = SkStorage::new();

// The Services to which an unconnected UDP socket sends, each with its backend. Written by `sendmsg`; read by `sendmsg`,
// `recvmsg` and `tc_egress`. A miss in `sendmsg`: another backend is selected; in `recvmsg`: the peer's address stays as it is. Socket-local
// storage, as above; a socket with more peers than it holds uses `sockets` for the others.
#[btf_map(name = "socket_peers")]
pub(super) static SOCKET_PEERS: SkStorage<SocketPeers> = SkStorage::new();

// Peers that no storage holds, with an entry for each direction: those of unconnected UDP sockets beyond `socket_peers`, and
// those of sockets whose storage could not be allocated. Written by `sendmsg`, and by `connect` for the latter; read by
// both, and by `recvmsg` and `getpeername`. A miss: as above. No event shows that such a socket no longer needs a peer, so
// the agent removes the entries that were not used for long; without preallocation, as an LRU map would have memory for all
// entries from the start.
#[btf_map(name = "sockets")]
pub(super) static SOCKETS: HashMap<SocketKey<A4>, SocketEntry<A4>, SOCKET_COUNT, NO_PREALLOC> =
    HashMap::new();
#[btf_map(name = "sockets6")]
pub(super) static SOCKETS6: HashMap<SocketKey<A6>, SocketEntry<A6>, SOCKET_COUNT, NO_PREALLOC> =
    HashMap::new();

// Bitmap of hashed frontends and backends, which lets foreign packets pass without further lookups. Written by the agent
// through a mapping, before the first entry that needs a bit; read for each packet and each call. A clear bit: certainly no
// frontend or backend. 2 x 2^20 bits: 10,000 frontends set 1 % of them.
#[btf_map(name = "prefilter")]
pub(super) static PREFILTER: Array<u64, { PREFILTER_WORDS as usize }, MMAPABLE> = Array::new();

// Settings, sizes and timeouts. Written by the agent; read for nearly every packet that is not foreign. Never a miss.
#[btf_map(name = "config")]
pub(super) static CONFIG: Array<NodeConfig, 1> = Array::new();

// Service port id to traffic counters. Written by all programs; read by the agent. A miss: the id is beyond the array, and
// nothing is counted. Per CPU: a shared counter would be the most contended cache line of all.
#[btf_map(name = "service_stats")]
pub(super) static SERVICE_STATS: Grows<PerCpuArray<ServiceStats, SERVICE_IDS>> = Grows::new();

// Backend id to number of connections. Written for each new connection; read by the agent. Not per CPU, because of the
// memory for 262,144 ids.
#[btf_map(name = "backend_stats")]
pub(super) static BACKEND_STATS: Grows<Array<u64, BACKEND_IDS>> = Grows::new();

// Backend id to its number of open connections and the time to its first answers (`proxy_common::connections`). Written by all
// programs when a connection of a Service that spreads by load begins, is answered or ends; read for each new connection of such
// a Service, and by the agent, which corrects it through a mapping. A miss: the id is beyond the array, and nothing is counted.
// Shared by all CPUs: with a count per CPU, each selection would have to add up the counts of all CPUs.
#[btf_map(name = "connections")]
pub(super) static CONNECTIONS: Grows<Array<u64, BACKEND_IDS, MMAPABLE>> = Grows::new();

// Reason to count. Written by all programs; read by the agent. Never a miss.
#[btf_map(name = "reasons")]
pub(super) static REASONS: PerCpuArray<u64, { sizes::REASON_COUNT as usize }> = PerCpuArray::new();

// Service port and reason to count. Written if the Service is known; read by the agent. LRU, so that the entries of removed
// Services disappear.
#[btf_map(name = "refusals")]
pub(super) static REFUSALS: LruHashMap<RefusalKey, u64, { sizes::DEFAULT_REFUSALS as usize }> =
    LruHashMap::new();

// Backend and Service port to a histogram of the time until a SYN is answered, and the number of SYNs without an answer.
// Written when a SYN is answered or repeated, if the measurement is on (otherwise the map has one entry); read by the agent
// and by users. A miss: an entry is created. LRU, so that the entries of removed backends and Services disappear.
#[btf_map(name = "connect_latency")]
pub(super) static CONNECT_LATENCY: LruHashMap<LatencyKey, LatencyEntry, { sizes::LATENCY_COUNT as usize }> =
    LruHashMap::new();

// Flow to the time of its SYN, later to the time until the answer. Written when a flow begins, and read and written at its
// first answer, if the measurement is on (otherwise the map has one element); read by the agent for examples. 0: not noted.
// Not part of `flows`, since nothing else needs nanoseconds and the entry's cache line is full.
#[btf_map(name = "syn_times")]
pub(super) static SYN_TIMES: Grows<Array<u64, SYN_TIME_COUNT, MMAPABLE>> = Grows::new();

// Socket to the time of its first SYN. Written when the socket connects, read when it is connected, if the measurement is
// on. A miss: not noted. Socket-local storage: the kernel frees it with the socket.
#[btf_map(name = "connect_times")]
pub(super) static CONNECT_TIMES: SkStorage<u64> = SkStorage::new();

// Service port and histogram bucket to the newest connection of a socket. Written when a socket is connected, if the
// measurement is on (otherwise the map has one entry); read by the agent for examples. A miss: there was none. LRU: buckets
// without new connections disappear.
#[btf_map(name = "socket_examples")]
pub(super) static SOCKET_EXAMPLES: LruHashMap<ExampleKey, SocketExample, { sizes::LATENCY_COUNT as usize }> =
    LruHashMap::new();

// Service port id to its name. Written by the agent; read by users and by the commands of `ballast`. No program reads it.
#[btf_map(name = "names")]
pub(super) static NAMES: HashMap<u32, PortName, { sizes::DEFAULT_SERVICES as usize }, NO_PREALLOC> =
    HashMap::new();

// The packet that a CPU processes. Written and read by the packet programs; the contents are valid for this packet only.
// Per CPU: packets do not interrupt each other.
#[btf_map(name = "scratch")]
pub(super) static SCRATCH: PerCpuArray<PacketCtx<[u32; 1]>, 1> = PerCpuArray::new();
#[btf_map(name = "scratch6")]
pub(super) static SCRATCH6: PerCpuArray<PacketCtx<[u32; 4]>, 1> = PerCpuArray::new();

// Number to a program that a packet program tail-calls (`map_names::TAIL_CALL_TARGETS`). Written by the agent before the programs are
// attached; read for each packet that is not foreign. A miss: the packet is dropped and counted. The kernel empties the map
// when it has neither a file descriptor nor a pin, so it stays pinned as long as programs use it.
#[btf_map(name = "calls")]
pub(super) static CALLS: ProgramArray<{ sizes::TAIL_CALL_TARGETS.len() }> = ProgramArray::new();

// Routes that were looked up in this tick of the clock, by a hash of both addresses. Written and read when packets are
// forwarded. A miss: the kernel's routing table is used. Per CPU, and direct-mapped: a conflict costs as much as a miss.
#[btf_map(name = "fib_cache")]
pub(super) static FIB_CACHE: PerCpuArray<FibEntry<[u32; 1]>, FIB_CACHE_ENTRIES> = PerCpuArray::new();
#[btf_map(name = "fib_cache6")]
pub(super) static FIB_CACHE6: PerCpuArray<FibEntry<[u32; 4]>, FIB_CACHE_ENTRIES> = PerCpuArray::new();

// The token buckets for ICMP errors, echo replies, and new flows to other nodes (DSR). Written and read when a packet is refused, an
// echo request is answered, or such a flow begins. Per CPU, as the limits are.
#[btf_map(name = "rate_limits")]
pub(super) static RATE_LIMITS: PerCpuArray<TokenBucket, { TOKEN_BUCKETS as usize }> = PerCpuArray::new();

// The ports of fragmented packets. Written for first fragments, read for later fragments. A miss: the ports of the fragment
// are unknown. LRU: no event shows that the last fragment has passed.
#[btf_map(name = "fragments")]
pub(super) static FRAGMENTS: LruHashMap<FragmentKey<[u32; 1]>, FragmentEntry, FRAGMENT_COUNT> =
    LruHashMap::new();
#[btf_map(name = "fragments6")]
pub(super) static FRAGMENTS6: LruHashMap<FragmentKey<[u32; 4]>, FragmentEntry, FRAGMENT_COUNT> =
    LruHashMap::new();

// Settings of the node for one family: SNAT source, range of the pods, Service ranges. Written by the agent; read for new
// connections, and for packets that are not to a frontend. Never a miss.
#[btf_map(name = "node")]
pub(super) static NODE: Array<NodeEntry<A4>, 1> = Array::new();
#[btf_map(name = "node6")]
pub(super) static NODE6: Array<NodeEntry<A6>, 1> = Array::new();

// Addresses of this node, and with DSR the addresses of all nodes. Written by the agent; read for new connections, and for
// encapsulated packets. A miss: the address belongs to another machine. A hash without preallocation: most nodes have about
// a dozen addresses.
#[btf_map(name = "node_addrs")]
pub(super) static NODE_ADDRS: HashMap<A4, NodeAddr, NODE_ADDR_IDS, NO_PREALLOC> = HashMap::new();
#[btf_map(name = "node_addrs6")]
pub(super) static NODE_ADDRS6: HashMap<A6, NodeAddr, NODE_ADDR_IDS, NO_PREALLOC> = HashMap::new();

// Number to a node of the cluster to which packets are encapsulated. Written by the agent, before the first endpoint that
// has the number; read for each packet of a client outside to a Service with DSR. Family 0: the number is free, and the
// packet is dropped. An array, because the lookup needs no function call, and flows and endpoints have 12 bits for the
// number. Further nodes have no number, and packets to their endpoints get SNAT.
#[btf_map(name = "tunnels")]
pub(super) static TUNNELS: Array<Tunnel, TUNNEL_IDS> = Array::new();

// Devices that are uplinks or have no link-layer header. Written by the agent; read for new connections, if a node has more
// uplinks than `config` holds. A miss: a local device.
#[btf_map(name = "devices")]
pub(super) static DEVICES: HashMap<u32, Device, DEVICE_IDS, NO_PREALLOC> = HashMap::new();

// Devices on which XDP may send packets that arrived on other devices. Written by the agent when its program is attached to
// the device; read when a packet is forwarded. A miss: XDP leaves the packet to tc. A hash without preallocation: most
// nodes have one uplink.
#[btf_map(name = "xdp_devices")]
pub(super) static XDP_DEVICES: HashMap<u32, u32, DEVICE_IDS, NO_PREALLOC> = HashMap::new();

// Session affinity of clients, which are identified by their address or by their network namespace. Written and read for
// new connections. A miss: any backend may be selected. Most clients never return: the agent removes the entries whose
// timeout is over, and the oldest ones if the map is nearly full. Without preallocation, as most nodes have few clients.
#[btf_map(name = "affinity")]
pub(super) static AFFINITY: HashMap<AffinityKey<A4>, AffinityEntry, AFFINITY_COUNT, NO_PREALLOC> =
    HashMap::new();
#[btf_map(name = "affinity6")]
pub(super) static AFFINITY6: HashMap<AffinityKey<A6>, AffinityEntry, AFFINITY_COUNT, NO_PREALLOC> =
    HashMap::new();
#[btf_map(name = "affinity_netns")]
pub(super) static AFFINITY_NETNS: HashMap<NetnsAffinityKey, AffinityEntry, AFFINITY_COUNT, NO_PREALLOC> =
    HashMap::new();

// Cookie of a network namespace of a pod to 1, where pods are not known by their cgroup. Written when a connection has a source
// in the range of the node's pods; read for each call of a socket that is not the node's. A miss: the packets are translated.
// LRU: no event shows that a namespace is gone, and its next connection shows it again. Of fixed size: 0.3 MiB.
#[btf_map(name = "namespaces")]
pub(super) static NAMESPACES: LruHashMap<u64, u32, { sizes::NAMESPACE_COUNT as usize }> = LruHashMap::new();

// Ranges of clients that a Service accepts (`loadBalancerSourceRanges`). Written by the agent; read for new connections to
// such a Service. A miss: the client is refused. Longest prefix match, by the set of ranges and the address.
#[btf_map(name = "src_ranges")]
pub(super) static SRC_RANGES: LpmTrie<SourceRangeKey<A4>, u32, SRC_RANGE_COUNT> = LpmTrie::new();
#[btf_map(name = "src_ranges6")]
pub(super) static SRC_RANGES6: LpmTrie<SourceRangeKey<A6>, u32, SRC_RANGE_COUNT> = LpmTrie::new();

// Events for `ballast monitor`. Written by all programs while a listener is registered; read by the listeners. If the ring
// is full, the event is counted as lost. A ring buffer for about 5,000 events.
#[btf_map(name = "events")]
pub(super) static EVENTS: RingBuf<(), { sizes::EVENTS_BYTES as usize }> = RingBuf::new();

// The registered listeners. Written by the listeners through a mapping, and by the programs when a lease has run out or an
// event is lost; read wherever an event could be written. Never a miss.
#[btf_map(name = "monitor")]
pub(super) static MONITOR: Array<Monitor, 1, MMAPABLE> = Array::new();
