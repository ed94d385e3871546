//! The traits of [`env`](crate::env), with maps in ordinary memory.

use std::boxed::Box;
use std::collections::{BTreeMap, BTreeSet};
use std::vec::Vec;

use proxy_common::affinity::{AffinityEntry, AffinityKey, NetnsAffinityKey};
use proxy_common::backend::BackendEntry;
use proxy_common::config::NodeConfig;
use proxy_common::flow::{Bucket, DIRECT_WORDS, FlowEntry, FlowKey};
use proxy_common::fragment::{FragmentEntry, FragmentKey};
use proxy_common::health::SKIP_COUNT;
use proxy_common::latency::SocketExample;
use proxy_common::node::{Cidr, Device, NodeAddr, NodeEntry, Tunnel};
use proxy_common::prefilter::PREFILTER_WORDS;
use proxy_common::reason::Reason;
use proxy_common::service::{ServiceEntry, ServiceKey};
use proxy_common::socket::{SocketEntry, SocketKey};
use proxy_common::stats::{RefusalKey, ServiceStats};
use proxy_common::{Address, Family, maglev};

use super::frame::HostFrame;
use crate::calls::{
    direct, early_calls, flow_calls, health_calls, new_flow_calls, node_calls, routing_calls, service_calls,
    stage_calls,
};
use crate::context::{Packet, PacketCtx, Tuple};
use crate::early::EarlyStages;
use crate::env::{
    Affinity, ClockWindow, ConnectLatency, ConnectOutcome, Counters, EventKind, FIB_CACHE_ENTRIES, FibCache,
    FibEntry, FlowTable, Fragments, Health, Node, OpenConnections, Pods, RateLimit, Services, Sockets,
    TOKEN_BUCKETS, TokenBucket, Words,
};
use crate::flow::bucket::BucketAt;
use crate::flow::memory::Entry;
use crate::frame::{Fib, Frame, Route};
use crate::parse::{Parsed, Stop};
use crate::pipeline::{Ip, Stages};
use crate::select::load;
use crate::shared::{Raw, Shared};
use crate::sock::Sockaddr;
use crate::stage::direct::DirectCase;
use crate::stage::established::Lookup;
use crate::stage::existing::{Existing, NewFlows};
use crate::stage::forward::Routing;
use crate::stage::refuse::Refusal;
use crate::step::{Step, StepCode};

/// Number of ids of backends, of ids of Services, and of slots.
pub const IDS: u32 = 128;
/// Number of words of `maglev`.
const MAGLEV_WORDS: usize = 16_384;
/// Maximum number of entries of an LRU map.
const LRU_ENTRIES: usize = 1024;

/// Contents of all maps of a family.
pub(super) struct Tables<A: Address> {
    pub config: NodeConfig,
    pub node: NodeEntry<A>,
    pub node_addrs: BTreeMap<A, NodeAddr>,
    pub tunnels: BTreeMap<u32, Tunnel>,
    pub devices: BTreeMap<u32, Device>,
    pub early_devices: BTreeSet<u32>,
    pub services: BTreeMap<ServiceKey<A>, ServiceEntry>,
    /// Number of the next lookups of a Service that find nothing, since the agent replaces the entry.
    pub service_misses: u32,
    pub slots: Vec<u32>,
    pub maglev_index: Vec<u64>,
    pub maglev: Vec<u64>,
    pub turns: Vec<u64>,
    pub open_connections: Vec<u64>,
    pub backends: Vec<BackendEntry<A>>,
    pub health: Vec<u64>,
    pub skips: Vec<u64>,
    pub prefilter: BTreeMap<u32, u64>,
    pub source_ranges: Vec<(u32, Cidr<A>)>,
    pub affinity: BTreeMap<AffinityKey<A>, AffinityEntry>,
    pub flows: Vec<FlowEntry<A>>,
    pub buckets: Vec<Bucket>,
    pub clock_window: ClockWindow,
    pub clock_hand: u64,
    pub direct_seen: Vec<u32>,
    pub opens_flows: bool,
    pub fragments: BTreeMap<FragmentKey<A>, FragmentEntry>,
    pub fib_cache: Vec<FibEntry<A>>,
    pub rate_limits: [TokenBucket; TOKEN_BUCKETS as usize],
    pub service_stats: Vec<ServiceStats>,
    pub backend_connections: Vec<u64>,
    pub reasons: Vec<u64>,
    pub refusals: BTreeMap<RefusalKey, u64>,
    pub events: Vec<(u32, EventKind)>,
    pub scratch: PacketCtx<A>,
    pub sockets: BTreeMap<SocketKey<A>, SocketEntry<A>>,
    pub socket_entries: usize,
    pub netns_affinity: BTreeMap<NetnsAffinityKey, AffinityEntry>,
    pub namespaces: BTreeSet<u64>,
    /// The cgroups of the current process, from level 1 on.
    pub cgroups: Vec<u64>,
    pub can_set_errno: bool,
    pub errno: Option<i32>,
    pub measures_latency: bool,
    pub connect_outcomes: Vec<(u32, u32, ConnectOutcome)>,
    pub syn_answers: Vec<(u32, u32, bool)>,
    pub socket_examples: Vec<(u32, SocketExample)>,
    pub jiffies: u32,
    pub random: u64,
}

/// Jiffies at the start, soon before they wrap around.
const START: u32 = u32::MAX - 300_000;

impl<A: Address> Tables<A> {
    pub fn new() -> Self {
        let (none, route) = (A::ZERO, Route::default());
        let no_route = FibEntry { src: none, dst: none, from: 0, at: 0, probed: 0, reserved: 0, route };
        let ids = IDS as usize;
        Self {
            config: NodeConfig::default(),
            node: NodeEntry::UNKNOWN,
            node_addrs: BTreeMap::new(),
            tunnels: BTreeMap::new(),
            devices: BTreeMap::new(),
            early_devices: BTreeSet::new(),
            services: BTreeMap::new(),
            service_misses: 0,
            slots: std::vec![0; ids],
            maglev_index: std::vec![0; 2 * ids * maglev::INDEX_WORDS as usize],
            maglev: std::vec![0; MAGLEV_WORDS],
            turns: std::vec![0; ids],
            open_connections: std::vec![0; ids],
            backends: std::vec![BackendEntry::FREE; ids],
            health: std::vec![0; ids],
            skips: std::vec![0; SKIP_COUNT as usize],
            prefilter: BTreeMap::new(),
            source_ranges: Vec::new(),
            affinity: BTreeMap::new(),
            flows: Vec::new(),
            buckets: Vec::new(),
            clock_window: ClockWindow::default(),
            clock_hand: 0,
            direct_seen: std::vec![0; DIRECT_WORDS as usize],
            opens_flows: true,
            fragments: BTreeMap::new(),
            fib_cache: std::vec![no_route; FIB_CACHE_ENTRIES],
            rate_limits: [TokenBucket::default(); TOKEN_BUCKETS as usize],
            service_stats: std::vec![ServiceStats::default(); ids],
            backend_connections: std::vec![0; ids],
            reasons: std::vec![0; Reason::COUNT as usize],
            refusals: BTreeMap::new(),
            events: Vec::new(),
            scratch: PacketCtx::EMPTY,
            sockets: BTreeMap::new(),
            socket_entries: LRU_ENTRIES,
            netns_affinity: BTreeMap::new(),
            namespaces: BTreeSet::new(),
            cgroups: Vec::new(),
            can_set_errno: true,
            errno: None,
            measures_latency: false,
            connect_outcomes: Vec::new(),
            syn_answers: Vec::new(),
            socket_examples: Vec::new(),
            jiffies: START,
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }
}

/// The maps of one address family, as one CPU sees them: a handle that is passed by copy, and stays on its thread.
#[derive(Clone, Copy)]
pub struct HostMaps<F: Family>(pub(super) *mut Tables<F::Words>);

/// Returns a mutable reference to a field of the tables.
macro_rules! at {
    ($maps:expr, $field:ident) => {
        // SAFETY: `leak` has allocated the tables, and they are never freed. The handle is for one thread, and no other
        // reference to this field is used while this one is: it ends with the call.
        unsafe { &mut (*$maps.0).$field }
    };
}
pub(super) use at;

impl<F: Family> HostMaps<F> {
    /// Allocates maps that exist until the process ends. A test or a fuzz target allocates them once for a thread, and clears
    /// them.
    pub fn leak() -> Self {
        Self(Box::into_raw(Box::new(Tables::new())))
    }

    /// Resets the maps to their initial state. No program may run at the same time, since it would hold references to the old
    /// state.
    pub fn clear(self) {
        // SAFETY: as in `at`.
        unsafe { *self.0 = Tables::new() };
    }

    /// Runs a program with this CPU's context, which holds what the previous packet has left.
    pub(super) fn with_scratch<T>(self, run: impl FnOnce(&mut PacketCtx<F::Words>) -> T) -> T {
        run(at!(self, scratch))
    }
}

impl<F: Family> Node for HostMaps<F> {
    type Family = F;

    fn config(self) -> Option<&'static NodeConfig> {
        Some(at!(self, config))
    }

    fn node(self) -> Option<&'static NodeEntry<F::Words>> {
        Some(at!(self, node))
    }

    fn node_addr(self, addr: &F::Words) -> NodeAddr {
        at!(self, node_addrs).get(addr).copied().unwrap_or(0)
    }

    fn tunnel(self, number: u32) -> Option<*const Tunnel> {
        at!(self, tunnels).get(&number).map(core::ptr::from_ref)
    }

    fn device(self, ifindex: u32) -> Device {
        at!(self, devices).get(&ifindex).copied().unwrap_or(0)
    }

    fn is_early_device(self, ifindex: u32) -> bool {
        at!(self, early_devices).contains(&ifindex)
    }

    fn jiffies(self) -> u32 {
        *at!(self, jiffies)
    }

    fn measures_latency(self) -> bool {
        *at!(self, measures_latency)
    }

    fn opens_flows(self) -> bool {
        *at!(self, opens_flows)
    }

    fn random(self) -> u32 {
        // Xorshift64*.
        let random = at!(self, random);
        *random ^= *random >> 12;
        *random ^= *random << 25;
        *random ^= *random >> 27;
        (random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    node_calls!(direct!(), F::Words);
}

impl<F: Family> Health for HostMaps<F> {
    health_calls!(direct!());

    fn health(self, id: u32) -> Option<Raw<u64>> {
        let word = at!(self, health).get_mut(id as usize)?;
        // SAFETY: the word exists until the maps are cleared.
        Some(unsafe { Raw::new(word) })
    }

    fn skip(self, index: u32) -> Option<Raw<u64>> {
        let word = at!(self, skips).get_mut(index as usize)?;
        // SAFETY: as in `health`.
        Some(unsafe { Raw::new(word) })
    }
}

impl<F: Family> OpenConnections for HostMaps<F> {
    fn open_connections(self, backend: u32) -> Option<*mut u64> {
        at!(self, open_connections).get_mut(backend as usize).map(core::ptr::from_mut)
    }

    fn count_open(self, backend: u32, change: u64, created: u32) {
        load::count(self, backend, change, created);
    }
}

impl<F: Family> Services for HostMaps<F> {
    service_calls!(direct!(), Words<Self>);

    fn service_entry(self, key: &ServiceKey<F::Words>) -> Option<*const ServiceEntry> {
        let misses = at!(self, service_misses);
        if *misses != 0 {
            *misses -= 1;
            return None;
        }
        at!(self, services).get(key).map(core::ptr::from_ref)
    }

    fn slot(self, index: u32) -> Option<u32> {
        at!(self, slots).get(index as usize).copied()
    }

    fn maglev_base(self, index: u32, number: u32) -> u32 {
        let word = at!(self, maglev_index).get(maglev::index_word(index, number) as usize);
        word.map_or(0, |word| maglev::base_in(*word, number))
    }

    fn maglev(self, index: u32) -> Option<u64> {
        at!(self, maglev).get(index as usize).copied()
    }

    fn turns(self, service: u32) -> Option<*mut u64> {
        at!(self, turns).get_mut(service as usize).map(core::ptr::from_mut)
    }

    fn backend(self, id: u32) -> Option<&'static BackendEntry<F::Words>> {
        at!(self, backends).get(id as usize)
    }

    fn prefilter(self, word: u32) -> Option<u64> {
        (word < PREFILTER_WORDS).then(|| at!(self, prefilter).get(&word).copied().unwrap_or(0))
    }

    fn admits(self, set: u32, client: &F::Words) -> bool {
        at!(self, source_ranges).iter().any(|(id, range)| *id == set && range.contains(client))
    }
}

/// Adds an entry to an LRU map. If the map is full, the entry with the lowest key is removed, not the least recently used
/// one.
fn put<K: Ord, V>(map: &mut BTreeMap<K, V>, key: K, value: V) {
    if map.len() >= LRU_ENTRIES && !map.contains_key(&key) {
        map.pop_first();
    }
    map.insert(key, value);
}

impl<F: Family> Affinity for HostMaps<F> {
    fn affinity(self, key: &AffinityKey<F::Words>) -> Option<*mut AffinityEntry> {
        at!(self, affinity).get_mut(key).map(core::ptr::from_mut)
    }

    fn put_affinity(self, key: &AffinityKey<F::Words>, entry: &AffinityEntry) -> Result<(), i32> {
        put(at!(self, affinity), *key, *entry);
        Ok(())
    }
}

impl<F: Family> FlowTable for HostMaps<F> {
    type Entry = Entry<F::Words>;
    type Bucket = BucketAt;
    flow_calls!(direct!(), Words<Self>);

    fn entry(self, index: u32) -> Option<Entry<F::Words>> {
        let flow = at!(self, flows).get_mut(index as usize)?;
        // SAFETY: the entry exists until the maps are cleared.
        Some(unsafe { Entry::new(flow) })
    }

    fn bucket(self, number: u32) -> Option<BucketAt> {
        let bucket = at!(self, buckets).get_mut(number as usize)?;
        // SAFETY: the bucket exists until the maps are cleared.
        Some(unsafe { BucketAt::new(bucket) })
    }

    fn clock_window(self) -> Option<*mut ClockWindow> {
        Some(at!(self, clock_window))
    }

    fn advance_clock_hand(self, by: u32) -> Option<u64> {
        let hand = at!(self, clock_hand);
        let stood = *hand;
        *hand += u64::from(by);
        Some(stood)
    }

    fn direct_seen(self, slot: u32) -> Option<impl Shared<Value = u32>> {
        let seen: *mut u32 = at!(self, direct_seen).get_mut(slot as usize)?;
        // SAFETY: the word exists as long as the maps.
        Some(unsafe { Raw::new(seen) })
    }

    fn syn_answered(self, _flow: u32, service: u32, backend: u32, refused: bool) {
        at!(self, syn_answers).push((service, backend, refused));
    }
}

impl<F: Family> Fragments for HostMaps<F> {
    fn fragment(self, key: &FragmentKey<F::Words>) -> Option<FragmentEntry> {
        at!(self, fragments).get(key).copied()
    }

    fn put_fragment(self, key: &FragmentKey<F::Words>, entry: &FragmentEntry) -> Result<(), i32> {
        put(at!(self, fragments), *key, *entry);
        Ok(())
    }
}

impl<F: Family> FibCache for HostMaps<F> {
    fn fib_entry(self, number: u32) -> Option<*mut FibEntry<F::Words>> {
        at!(self, fib_cache).get_mut(number as usize).map(core::ptr::from_mut)
    }
}

impl<F: Family> RateLimit for HostMaps<F> {
    fn token_bucket(self, number: u32) -> Option<*mut TokenBucket> {
        at!(self, rate_limits).get_mut(number as usize).map(core::ptr::from_mut)
    }
}

impl<F: Family> Counters for HostMaps<F> {
    fn service_stats(self, id: u32) -> Option<*mut ServiceStats> {
        at!(self, service_stats).get_mut(id as usize).map(core::ptr::from_mut)
    }

    fn backend_connections(self, id: u32) -> Option<*mut u64> {
        at!(self, backend_connections).get_mut(id as usize).map(core::ptr::from_mut)
    }

    fn reason(self, reason: Reason) -> Option<*mut u64> {
        at!(self, reasons).get_mut(reason as usize).map(core::ptr::from_mut)
    }

    fn refusals(self, key: &RefusalKey) -> Option<*mut u64> {
        at!(self, refusals).get_mut(key).map(core::ptr::from_mut)
    }

    fn begin_refusals(self, key: &RefusalKey) -> Result<(), i32> {
        put(at!(self, refusals), *key, 0);
        Ok(())
    }

    fn notify<G: Frame>(self, _frame: G, _ctx: &PacketCtx<Words<Self>>, service: u32, what: EventKind) {
        at!(self, events).push((service, what));
    }

    fn notify_reason(self, service: u32, why: Reason) {
        at!(self, events).push((service, EventKind::Reason(why)));
    }
}

impl<F: Family> Pods for HostMaps<F> {
    fn has_namespace(self, netns: u64) -> bool {
        at!(self, namespaces).contains(&netns)
    }

    fn add_namespace(self, netns: u64) {
        at!(self, namespaces).insert(netns);
    }

    fn ancestor_cgroup(self, level: i32) -> u64 {
        let place = usize::try_from(level - 1).unwrap_or(usize::MAX);
        at!(self, cgroups).get(place).copied().unwrap_or(0)
    }
}

/// `E2BIG`.
const FULL: i32 = -7;

impl<F: Family> Sockets for HostMaps<F> {
    fn peer(self, key: &SocketKey<F::Words>) -> Option<*mut SocketEntry<F::Words>> {
        at!(self, sockets).get_mut(key).map(core::ptr::from_mut)
    }

    fn put_peer(self, key: &SocketKey<F::Words>, entry: &SocketEntry<F::Words>) -> Result<(), i32> {
        let sockets = at!(self, sockets);
        if sockets.len() >= *at!(self, socket_entries) && !sockets.contains_key(key) {
            return Err(FULL);
        }
        sockets.insert(*key, *entry);
        Ok(())
    }

    fn remove_peer(self, key: &SocketKey<F::Words>) {
        at!(self, sockets).remove(key);
    }

    fn netns_affinity(self, key: &NetnsAffinityKey) -> Option<*mut AffinityEntry> {
        at!(self, netns_affinity).get_mut(key).map(core::ptr::from_mut)
    }

    fn put_netns_affinity(self, key: &NetnsAffinityKey, entry: &AffinityEntry) -> Result<(), i32> {
        put(at!(self, netns_affinity), *key, *entry);
        Ok(())
    }

    fn can_set_errno(self) -> bool {
        *at!(self, can_set_errno)
    }

    fn set_errno(self, errno: i32) {
        *at!(self, errno) = Some(errno);
    }

    fn notify_call<S: Sockaddr<Family = F>>(self, _call: &S, service: u32, what: EventKind) {
        at!(self, events).push((service, what));
    }
}

impl<F: Family> ConnectLatency for HostMaps<F> {
    fn note_outcome(self, service: u32, backend: u32, outcome: ConnectOutcome) {
        at!(self, connect_outcomes).push((service, backend, outcome));
    }

    fn keep_example(self, service: u32, example: &SocketExample) {
        at!(self, socket_examples).push((service, *example));
    }
}

impl<F: Ip, const EARLY: bool> Routing<HostFrame<'_, EARLY>> for HostMaps<F> {
    routing_calls!(direct!(), F::Words, HostFrame<'_, EARLY>);
}

impl<F: Ip, const EARLY: bool> NewFlows<HostFrame<'_, EARLY>> for HostMaps<F> {
    new_flow_calls!(direct!(), F::Words, HostFrame<'_, EARLY>);
}

impl<F: Ip> Stages<HostFrame<'_>> for HostMaps<F> {
    stage_calls!(direct!(), F::Words, HostFrame<'_>);
}

impl<F: Ip> EarlyStages<HostFrame<'_, true>> for HostMaps<F> {
    early_calls!(direct!(), F::Words, HostFrame<'_, true>);
}
