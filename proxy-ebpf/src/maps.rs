//! The maps, private to this file; everyone else asks by function. `docs/maps.md` tells each one's story.

mod recast;
mod tables;

pub use tables::Tables;

use aya_ebpf::bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC};
use aya_ebpf::btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, RingBuf};
use aya_ebpf::macros::btf_map;
use aya_ebpf::maps::ring_buf::RingBufEntry;
use proxy_common::Address;
use proxy_common::affinity::{AffinityEntry, AffinityKey, NetnsAffinityKey};
use proxy_common::backend::BackendEntry;
use proxy_common::config::NodeConfig;
use proxy_common::event::{Event, Monitor};
use proxy_common::filter::{self, FILTER_WORDS, Role};
use proxy_common::flow::{Bucket, Flow, buckets_for};
use proxy_common::fragment::{FragmentEntry, FragmentKey};
use proxy_common::map_names as sizes;
use proxy_common::name::PortName;
use proxy_common::node::{Device, NodeAddr, NodeEntry};
use proxy_common::reason::Reason;
use proxy_common::service::{ServiceEntry, ServiceKey};
use proxy_common::socket::{SocketEntry, SocketKey};
use proxy_common::source_range::SourceRangeKey;
use proxy_common::stats::{RefusalKey, ServiceStats};

use crate::flow::Block;
use crate::packet::Scratch;
use crate::reject::Allowance;
use crate::route::{HOPS, Hop, Route};

const FRONTENDS: usize = sizes::DEFAULT_FRONTENDS as usize;
const SERVICE_IDS: usize = sizes::DEFAULT_SERVICES as usize;
const SLOT_COUNT: usize = sizes::DEFAULT_SLOTS as usize;
const BACKEND_IDS: usize = sizes::DEFAULT_BACKENDS as usize;
const FLOW_COUNT: usize = sizes::DEFAULT_FLOWS as usize;
const FLOW_BUCKETS: usize = buckets_for(sizes::DEFAULT_FLOWS) as usize;
const SOCKET_COUNT: usize = sizes::DEFAULT_SOCKETS as usize;
const NODE_ADDR_IDS: usize = sizes::NODE_ADDR_COUNT as usize;
const DEVICE_IDS: usize = sizes::DEVICE_COUNT as usize;
const AFFINITY_COUNT: usize = sizes::DEFAULT_AFFINITY as usize;
const FRAGMENT_COUNT: usize = sizes::FRAGMENT_COUNT as usize;
const SRC_RANGE_COUNT: usize = sizes::DEFAULT_SRC_RANGES as usize;
const MMAPABLE: usize = BPF_F_MMAPABLE as usize;
const NO_PREALLOC: usize = BPF_F_NO_PREALLOC as usize;

type A4 = [u8; 4];
type A6 = [u8; 16];

#[btf_map(name = "services")]
static SERVICES: HashMap<ServiceKey<A4>, ServiceEntry, FRONTENDS> = HashMap::new();
#[btf_map(name = "services6")]
static SERVICES6: HashMap<ServiceKey<A6>, ServiceEntry, FRONTENDS> = HashMap::new();
#[btf_map(name = "slots")]
static SLOTS: Array<u32, SLOT_COUNT, MMAPABLE> = Array::new();
#[btf_map(name = "backends")]
static BACKENDS: Array<BackendEntry<A4>, BACKEND_IDS, MMAPABLE> = Array::new();
#[btf_map(name = "backends6")]
static BACKENDS6: Array<BackendEntry<A6>, BACKEND_IDS, MMAPABLE> = Array::new();
#[btf_map(name = "flows")]
static FLOWS: Array<Flow<A4>, FLOW_COUNT, MMAPABLE> = Array::new();
#[btf_map(name = "flows6")]
static FLOWS6: Array<Flow<A6>, FLOW_COUNT, MMAPABLE> = Array::new();
#[btf_map(name = "flow_index")]
static FLOW_INDEX: Array<Bucket, FLOW_BUCKETS, MMAPABLE> = Array::new();
#[btf_map(name = "flow_index6")]
static FLOW_INDEX6: Array<Bucket, FLOW_BUCKETS, MMAPABLE> = Array::new();
#[btf_map(name = "flow_hand")]
static FLOW_HAND: Array<u64, 2> = Array::new();
#[btf_map(name = "flow_block")]
static FLOW_BLOCK: PerCpuArray<Block, 2> = PerCpuArray::new();
#[btf_map(name = "sockets")]
static SOCKETS: LruHashMap<SocketKey<A4>, SocketEntry<A4>, SOCKET_COUNT> = LruHashMap::new();
#[btf_map(name = "sockets6")]
static SOCKETS6: LruHashMap<SocketKey<A6>, SocketEntry<A6>, SOCKET_COUNT> = LruHashMap::new();
#[btf_map(name = "filter")]
static FILTER: Array<u64, { FILTER_WORDS as usize }, MMAPABLE> = Array::new();
#[btf_map(name = "config")]
static CONFIG: Array<NodeConfig, 1> = Array::new();
#[btf_map(name = "service_stats")]
static SERVICE_STATS: PerCpuArray<ServiceStats, SERVICE_IDS> = PerCpuArray::new();
#[btf_map(name = "backend_stats")]
static BACKEND_STATS: Array<u64, BACKEND_IDS> = Array::new();
#[btf_map(name = "reasons")]
static REASONS: PerCpuArray<u64, { Reason::COUNT as usize }> = PerCpuArray::new();
#[btf_map(name = "refusals")]
static REFUSALS: LruHashMap<RefusalKey, u64, { sizes::DEFAULT_REFUSALS as usize }> = LruHashMap::new();
#[btf_map(name = "names")]
static NAMES: HashMap<u32, PortName, SERVICE_IDS, NO_PREALLOC> = HashMap::new();
#[btf_map(name = "scratch")]
static SCRATCH: PerCpuArray<Scratch<[u32; 1]>, 1> = PerCpuArray::new();
#[btf_map(name = "scratch6")]
static SCRATCH6: PerCpuArray<Scratch<[u32; 4]>, 1> = PerCpuArray::new();
#[btf_map(name = "route")]
static ROUTE: PerCpuArray<Route, 1> = PerCpuArray::new();
#[btf_map(name = "ways")]
static WAYS: PerCpuArray<Hop<[u32; 1]>, HOPS> = PerCpuArray::new();
#[btf_map(name = "ways6")]
static WAYS6: PerCpuArray<Hop<[u32; 4]>, HOPS> = PerCpuArray::new();
#[btf_map(name = "answers")]
static ANSWERS: PerCpuArray<Allowance, 1> = PerCpuArray::new();
#[btf_map(name = "fragments")]
static FRAGMENTS: LruHashMap<FragmentKey<[u32; 1]>, FragmentEntry, FRAGMENT_COUNT> = LruHashMap::new();
#[btf_map(name = "fragments6")]
static FRAGMENTS6: LruHashMap<FragmentKey<[u32; 4]>, FragmentEntry, FRAGMENT_COUNT> = LruHashMap::new();
#[btf_map(name = "node")]
static NODE: Array<NodeEntry<A4>, 1> = Array::new();
#[btf_map(name = "node6")]
static NODE6: Array<NodeEntry<A6>, 1> = Array::new();
#[btf_map(name = "node_addrs")]
static NODE_ADDRS: HashMap<A4, NodeAddr, NODE_ADDR_IDS, NO_PREALLOC> = HashMap::new();
#[btf_map(name = "node_addrs6")]
static NODE_ADDRS6: HashMap<A6, NodeAddr, NODE_ADDR_IDS, NO_PREALLOC> = HashMap::new();
#[btf_map(name = "devices")]
static DEVICES: HashMap<u32, Device, DEVICE_IDS, NO_PREALLOC> = HashMap::new();
#[btf_map(name = "affinity")]
static AFFINITY: LruHashMap<AffinityKey<A4>, AffinityEntry, AFFINITY_COUNT> = LruHashMap::new();
#[btf_map(name = "affinity6")]
static AFFINITY6: LruHashMap<AffinityKey<A6>, AffinityEntry, AFFINITY_COUNT> = LruHashMap::new();
#[btf_map(name = "affinity_netns")]
static AFFINITY_NETNS: LruHashMap<NetnsAffinityKey, AffinityEntry, AFFINITY_COUNT> = LruHashMap::new();
#[btf_map(name = "src_ranges")]
static SRC_RANGES: LpmTrie<SourceRangeKey<A4>, u32, SRC_RANGE_COUNT> = LpmTrie::new();
#[btf_map(name = "src_ranges6")]
static SRC_RANGES6: LpmTrie<SourceRangeKey<A6>, u32, SRC_RANGE_COUNT> = LpmTrie::new();

#[btf_map(name = "events")]
static EVENTS: RingBuf<(), { sizes::EVENTS_BYTES as usize }> = RingBuf::new();
#[btf_map(name = "monitor")]
static MONITOR: Array<Monitor, 1, MMAPABLE> = Array::new();

/// The one cheap check: whether the tables have to be asked about this tuple at all.
#[inline(always)]
pub fn may_be<A: Address>(role: Role, addr: &A, port: u16, proto: u8) -> bool {
    let (word, mask) = filter::position(role, addr, port, proto);
    FILTER.get(word).is_some_and(|bits| bits & mask != 0)
}

/// The backend id in a slot.
#[inline(always)]
pub fn slot(index: u32) -> Option<u32> {
    SLOTS.get(index).copied()
}

/// What the agent says of this node.
#[inline(always)]
pub fn config() -> Option<&'static NodeConfig> {
    CONFIG.get(0)
}

/// Who listens to events.
#[inline(always)]
pub fn monitor() -> Option<*mut Monitor> {
    MONITOR.get_ptr_mut(0)
}

/// Room for an event; `None` when listeners are too slow.
#[inline(always)]
pub fn event() -> Option<RingBufEntry<Event>> {
    EVENTS.reserve_untyped(0)
}

/// Where the packet goes on.
#[inline(always)]
pub fn route() -> Option<*mut Route> {
    ROUTE.get_ptr_mut(0)
}

/// Whether a network namespace is the node's own.
#[inline(always)]
pub fn is_host(netns: u64) -> bool {
    config().is_some_and(|config| config.host_netns == netns)
}

/// How many refusals this CPU may answer.
#[inline(always)]
pub fn allowance() -> Option<*mut Allowance> {
    ANSWERS.get_ptr_mut(0)
}

/// `DEVICE_*` bits of a device.
#[inline(always)]
pub fn device(ifindex: u32) -> Device {
    // SAFETY: an integer, which is read at once.
    unsafe { DEVICES.get(ifindex).copied() }.unwrap_or(0)
}

/// The backend that a network namespace stays with.
#[inline(always)]
pub fn netns_affinity(key: &NetnsAffinityKey) -> Option<*mut AffinityEntry> {
    AFFINITY_NETNS.get_ptr_mut(key)
}

/// Remembers it.
#[inline(always)]
pub fn put_netns_affinity(key: &NetnsAffinityKey, value: &AffinityEntry) -> Result<(), i32> {
    AFFINITY_NETNS.insert(key, value, 0)
}

/// The entries that this CPU looks at next.
#[inline(always)]
pub fn flow_block(family: u32) -> Option<*mut Block> {
    FLOW_BLOCK.get_ptr_mut(family)
}

/// The clock hand over a family's flows.
#[inline(always)]
pub fn flow_hand(family: u32) -> Option<*mut u64> {
    FLOW_HAND.get_ptr_mut(family)
}

/// This CPU's counters of a Service port.
#[inline(always)]
pub fn service_stats(id: u32) -> Option<*mut ServiceStats> {
    SERVICE_STATS.get_ptr_mut(id)
}

/// The connection count of a backend.
#[inline(always)]
pub fn backend_connections(id: u32) -> Option<*mut u64> {
    BACKEND_STATS.get_ptr_mut(id)
}

/// This CPU's count of a reason.
#[inline(always)]
pub fn reason(reason: Reason) -> Option<*mut u64> {
    REASONS.get_ptr_mut(reason as u32)
}

/// The count of a Service's refusals for one reason.
#[inline(always)]
pub fn refusals(key: &RefusalKey) -> Option<*mut u64> {
    REFUSALS.get_ptr_mut(key)
}

/// Begins that count.
#[inline(always)]
pub fn begin_refusals(key: &RefusalKey) -> Result<(), i32> {
    REFUSALS.insert(key, 0u64, u64::from(aya_ebpf::bindings::BPF_NOEXIST))
}
