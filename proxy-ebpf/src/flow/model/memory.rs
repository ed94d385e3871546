//! The flow table on loom's atomics.
//!
//! Memory model: an exchange that succeeds is a full barrier, one that fails is no barrier (arm64 without LSE); plain loads
//! and stores are relaxed. A dependent load ([`EntryRef::after`], `load_after`) is an acquire fence, which orders more than
//! the dependency does: the model does not check whether each witness covers all fields that were read. Each key of an
//! entry is one word: the model does not show torn reads inside a key.

use std::boxed::Box;
use std::cell::UnsafeCell;
use std::sync::OnceLock;
use std::vec::Vec;

use loom::sync::atomic::Ordering::{Acquire, Relaxed};
use loom::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, fence};
use proxy_common::backend::{BACKEND_ACTIVE, BackendEntry};
use proxy_common::config::{FlowSize, NodeConfig, PortRange};
use proxy_common::flow::{
    BUCKET_WORDS, DIRECTION_FORWARD, DIRECTION_REPLY, FlowKey, NO_POSITION, frontend_window,
};
use proxy_common::node::{Device, NodeAddr, NodeEntry};
use proxy_common::service::{ServiceEntry, ServiceKey};
use proxy_common::{PROTO_UDP, V4};

use super::words::{Word16, Word32, Word64};
use crate::calls::{direct, flow_calls, health_calls, node_calls, service_calls};
use crate::context::{Packet, PacketCtx, Tuple};
use crate::env::{ClockWindow, FlowTable, Health, Node, OpenConnections, Services};
use crate::flow::bucket::BucketRef;
use crate::flow::memory::{EntryRef, NewFlow};
use crate::select::load;
use crate::shared::{Exchange, Raw, Shared};

/// Maximum number of CPUs.
const CPUS: usize = 4;
/// Jiffies in a second.
pub const HZ: u32 = 100;
/// Source ports for SNAT: only a few, so that collisions occur.
pub const SNAT_PORTS: PortRange = PortRange::new(2000, 2001);

type A = [u32; 1];

/// An entry.
pub struct EntryWords {
    state: AtomicU64,
    keys: [AtomicU64; 2],
    /// Position and tag of each key.
    positions: [AtomicU64; 2],
    last_seen: AtomicU32,
    seq: [AtomicU16; 2],
}

impl EntryWords {
    fn new() -> Self {
        Self {
            state: AtomicU64::new(0),
            keys: [AtomicU64::new(0), AtomicU64::new(0)],
            positions: [AtomicU64::new(0), AtomicU64::new(0)],
            last_seen: AtomicU32::new(0),
            seq: [AtomicU16::new(0), AtomicU16::new(0)],
        }
    }
}

/// Packs a key into one word: the model's addresses are below 256.
fn pack(key: &FlowKey<A>) -> u64 {
    let ([src], [dst]) = (key.src, key.dst);
    assert!(src < 256 && dst < 256, "the model's addresses are small");
    u64::from(src)
        | u64::from(dst) << 8
        | u64::from(key.src_port) << 16
        | u64::from(key.dst_port) << 32
        | u64::from(key.proto) << 48
}

fn unpack(word: u64, direction: u8) -> FlowKey<A> {
    FlowKey {
        src: [word as u32 & 0xff],
        dst: [(word >> 8) as u32 & 0xff],
        src_port: (word >> 16) as u16,
        dst_port: (word >> 32) as u16,
        proto: (word >> 48) as u8,
        direction,
        reserved: 0,
    }
}

#[derive(Clone, Copy)]
pub struct ModelEntry(*const EntryWords);

impl ModelEntry {
    fn words(&self) -> &EntryWords {
        // SAFETY: the table lives until all threads of the model are joined.
        unsafe { &*self.0 }
    }

    fn load_key(self, direction: u8) -> u64 {
        self.words().keys[usize::from(direction)].load(Relaxed)
    }
}

impl EntryRef<A> for ModelEntry {
    fn state(self) -> impl Exchange<Value = u64> {
        Word64(&raw const self.words().state)
    }

    fn after(self, _witness: u64) -> Self {
        fence(Acquire);
        self
    }

    fn differs_from(self, key: &FlowKey<A>) -> u64 {
        self.load_key(key.direction) ^ pack(key)
    }

    fn differs_from_entry(self, other: Self, direction: u8) -> u64 {
        self.load_key(direction) ^ other.load_key(direction)
    }

    fn to_backend(self) -> (Tuple<A>, u64) {
        (Tuple::to_backend(&self.key(DIRECTION_REPLY)), 0)
    }

    fn to_client(self) -> (Tuple<A>, u64) {
        (Tuple::to_backend(&self.key(DIRECTION_FORWARD)), 0)
    }

    fn key(self, direction: u8) -> FlowKey<A> {
        unpack(self.load_key(direction), direction)
    }

    fn fill(self, new: &NewFlow<'_, A>) {
        let words = self.words();
        words.keys[0].store(pack(&new.packet.key), Relaxed);
        words.keys[1].store(pack(&new.plan.reply), Relaxed);
        words.last_seen.store(new.now, Relaxed);
        words.positions[0].store(u64::from(NO_POSITION), Relaxed);
        words.positions[1].store(u64::from(NO_POSITION), Relaxed);
        let is_udp = new.packet.key.proto == PROTO_UDP;
        let first = if is_udp { frontend_window(new.now) } else { (new.packet.seq >> 16) as u16 };
        words.seq[0].store(first, Relaxed);
        words.seq[1].store(0, Relaxed);
    }

    fn set_source_port(self, port: u16) {
        let key = FlowKey { dst_port: port, ..self.key(DIRECTION_REPLY) };
        self.words().keys[1].store(pack(&key), Relaxed);
    }

    fn source_port(self) -> u16 {
        self.key(DIRECTION_REPLY).dst_port
    }

    fn proto(self) -> u8 {
        proxy_common::PROTO_TCP
    }

    fn service(self) -> u32 {
        1
    }

    fn backend(self) -> (u32, A, u16) {
        (1, [2], 80)
    }

    fn backend_id(self) -> u32 {
        1
    }

    fn created(self) -> u32 {
        0
    }

    fn last_seen(self) -> impl Shared<Value = u32> {
        Word32(&raw const self.words().last_seen)
    }

    fn seq(self, direction: u8) -> impl Shared<Value = u16> {
        Word16(&raw const self.words().seq[usize::from(direction)])
    }

    fn position(self, direction: u8) -> (u32, u32) {
        let word = self.words().positions[usize::from(direction)].load(Relaxed);
        (word as u32, (word >> 32) as u32)
    }

    fn set_position(self, direction: u8, position: u32, tag: u32) {
        let word = u64::from(position) | u64::from(tag) << 32;
        self.words().positions[usize::from(direction)].store(word, Relaxed);
    }

    fn prefetch(self) {}
}

/// A bucket.
pub struct BucketWords {
    slots: Vec<AtomicU32>,
    overflow: AtomicU32,
}

#[derive(Clone, Copy)]
pub struct ModelBucket(*const BucketWords);

impl BucketRef for ModelBucket {
    fn slot(self, number: u32) -> impl Exchange<Value = u32> {
        // SAFETY: the table lives until all threads of the model are joined.
        let words = unsafe { &*self.0 };
        let slot = words.slots.get((number & (BUCKET_WORDS - 1)) as usize);
        Word32(slot.map_or(&raw const words.overflow, core::ptr::from_ref))
    }

    fn overflows(self) -> bool {
        self.slot(BUCKET_WORDS - 1).load() != 0
    }

    fn set_overflow(self) {
        self.slot(BUCKET_WORDS - 1).compare_exchange(0, 1);
    }

    fn prefetch(self) {}
}

/// The state that all CPUs share, and the state of each CPU.
pub struct Table {
    config: NodeConfig,
    pub entries: Vec<EntryWords>,
    pub buckets: Vec<BucketWords>,
    clock_hand: AtomicU64,
    windows: [UnsafeCell<ClockWindow>; CPUS],
    random: [UnsafeCell<u32>; CPUS],
    direct_seen: AtomicU32,
    /// Number of open connections of the only backend. Not one of loom's atomics: the CPUs only add to it, and it is read
    /// after all threads are done.
    pub open: std::sync::atomic::AtomicU64,
}

impl Table {
    /// Returns a table with `entries` entries and `buckets` buckets of `slots` slots each.
    pub fn new(entries: u32, buckets: u32, slots: u32) -> Box<Self> {
        static CONFIG: OnceLock<NodeConfig> = OnceLock::new();
        let mut config = *CONFIG.get_or_init(|| NodeConfig::new(HZ, 1, 2, 1));
        config.flows = [FlowSize::new(entries, buckets); 2];
        config.snat = [SNAT_PORTS, PortRange::default()];
        let free = || (0..slots).map(|_| AtomicU32::new(0)).collect();
        Box::new(Self {
            config,
            entries: (0..entries).map(|_| EntryWords::new()).collect(),
            buckets: (0..buckets)
                .map(|_| BucketWords { slots: free(), overflow: AtomicU32::new(0) })
                .collect(),
            clock_hand: AtomicU64::new(0),
            windows: [const { UnsafeCell::new(ClockWindow { next: 0, left: 0 }) }; CPUS],
            random: [const { UnsafeCell::new(0) }; CPUS],
            direct_seen: AtomicU32::new(0),
            open: std::sync::atomic::AtomicU64::new(0),
        })
    }

    /// Returns a handle to the table for one CPU at jiffies `now`.
    pub fn cpu<const SLOTS: u32>(&self, cpu: usize, now: u32) -> Model<SLOTS> {
        assert!(self.buckets.iter().all(|bucket| bucket.slots.len() == SLOTS as usize));
        Model { table: self, cpu, now }
    }
}

/// Maps of the model.
#[derive(Clone, Copy)]
pub struct Model<const SLOTS: u32> {
    table: *const Table,
    cpu: usize,
    now: u32,
}

// SAFETY: the table lives until all threads of the model are joined, and each field that is not atomic is used by one CPU
// only.
unsafe impl<const SLOTS: u32> Send for Model<SLOTS> {}

impl<const SLOTS: u32> Model<SLOTS> {
    fn table(&self) -> &'static Table {
        // SAFETY: the handle is not used after the table is dropped.
        unsafe { &*self.table }
    }
}

impl<const SLOTS: u32> Node for Model<SLOTS> {
    type Family = V4;

    fn config(self) -> Option<&'static NodeConfig> {
        Some(&self.table().config)
    }

    fn node(self) -> Option<&'static NodeEntry<A>> {
        None
    }

    fn node_addr(self, _addr: &A) -> NodeAddr {
        0
    }

    fn device(self, _ifindex: u32) -> Device {
        0
    }

    fn jiffies(self) -> u32 {
        self.now
    }

    fn random(self) -> u32 {
        // Returns both ends of the range in turn; each CPU begins at another number.
        let random = self.table().random[self.cpu].get();
        // SAFETY: this CPU's own value.
        unsafe {
            *random += 1;
            (*random + self.cpu as u32).wrapping_mul(0x7fff_0000)
        }
    }

    node_calls!(direct!(), A);
}

impl<const SLOTS: u32> Health for Model<SLOTS> {
    health_calls!(direct!());

    fn health(self, _id: u32) -> Option<Raw<u64>> {
        None
    }

    fn skip(self, _index: u32) -> Option<Raw<u64>> {
        None
    }
}

impl<const SLOTS: u32> OpenConnections for Model<SLOTS> {
    fn open_connections(self, _backend: u32) -> Option<*mut u64> {
        Some(self.table().open.as_ptr())
    }

    fn count_open(self, backend: u32, change: u64, created: u32) {
        load::count(self, backend, change, created);
    }
}

impl<const SLOTS: u32> Services for Model<SLOTS> {
    service_calls!(direct!(), A);

    fn service_entry(self, _key: &ServiceKey<A>) -> Option<*const ServiceEntry> {
        None
    }

    fn slot(self, _index: u32) -> Option<u32> {
        None
    }

    fn maglev_base(self, _index: u32, _number: u32) -> u32 {
        0
    }

    fn maglev(self, _index: u32) -> Option<u64> {
        None
    }

    fn turns(self, _service: u32) -> Option<*mut u64> {
        None
    }

    fn backend(self, _id: u32) -> Option<&'static BackendEntry<A>> {
        static BACKEND: BackendEntry<A> =
            BackendEntry { addr: [2], port: 80, proto: 6, state: BACKEND_ACTIVE, service: 1, flags: 0 };
        Some(&BACKEND)
    }

    fn prefilter(self, _word: u32) -> Option<u64> {
        Some(!0)
    }

    fn admits(self, _set: u32, _client: &A) -> bool {
        true
    }
}

impl<const SLOTS: u32> FlowTable for Model<SLOTS> {
    type Entry = ModelEntry;
    type Bucket = ModelBucket;
    const SLOTS: u32 = SLOTS;
    flow_calls!(direct!(), A);

    fn entry(self, index: u32) -> Option<ModelEntry> {
        self.table().entries.get(index as usize).map(|words| ModelEntry(words))
    }

    fn bucket(self, number: u32) -> Option<ModelBucket> {
        self.table().buckets.get(number as usize).map(|words| ModelBucket(words))
    }

    fn clock_window(self) -> Option<*mut ClockWindow> {
        Some(self.table().windows[self.cpu].get())
    }

    fn advance_clock_hand(self, by: u32) -> Option<u64> {
        Some(self.table().clock_hand.fetch_add(u64::from(by), Relaxed))
    }

    fn direct_seen(self, _slot: u32) -> Option<impl Shared<Value = u32>> {
        Some(Word32(&raw const self.table().direct_seen))
    }
}
