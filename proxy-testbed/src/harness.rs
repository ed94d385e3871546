//! The packet programs, loaded into this kernel with maps of their own and attached to no hook.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use aya::maps::{Array, HashMap, MapData, PerCpuArray, PerCpuValues};
use aya::programs::{SchedClassifier, Xdp};
use aya::{Ebpf, EbpfLoader, TestRun as _, TestRunOptions};
use proxy_common::PROTO_UDP;
use proxy_common::backend::{BACKEND_ACTIVE, BACKEND_GONE};
use proxy_common::config::NodeConfig;
use proxy_common::flow::{
    BUCKET_SLOTS, Bucket, FlowEntry, FlowKey, SLOT_PENDING, SLOT_TAG, buckets_for, buckets_of, flow_of,
    frontend_window, generation_of, slot_of, tag,
};
use proxy_common::fragment::{FragmentEntry, FragmentKey};
use proxy_common::latency::{LatencyEntry, LatencyKey};
use proxy_common::maglev::index;
use proxy_common::map_names as names;
use proxy_common::prefilter::{Role, position};
use proxy_common::reason::Reason;
use proxy_common::service::{KIND_CLUSTER_IP, SCOPE_INTERNAL, SERVICE_SOURCE_RANGES, ServiceEntry};
use proxy_common::stats::{RefusalKey, ServiceStats};
use proxy_common::version::ABI_VERSION;
use proxy_core::plan::BackendAddress;
use proxy_core::plan::maglev::{self, Member};
use proxy_core::store::{Backend, FrontendKey, MaglevTable, Store as _, Table, Write};
use proxy_user::maps::KernelStore;
use proxy_user::maps::segments::{self, first_segment};
use proxy_user::maps::view::View;
use proxy_user::programs::{Capacities, EMBEDDED, create_segments, load_packet_path};

use crate::Family;

/// Most scenarios use Service ids below this number.
const LOW: u32 = 64;

/// Verdicts of a tc program: `TC_ACT_UNSPEC` (the next program runs), `TC_ACT_SHOT`, `TC_ACT_REDIRECT`.
pub const NEXT: i32 = -1;
pub const DROP: i32 = 2;
pub const REDIRECT: i32 = 7;

/// Jiffies in a second, as configured for the programs; the kernel's own number may differ.
pub const HZ: u32 = 1000;

const EMPTY: Bucket = Bucket::EMPTY;

static NUMBER: AtomicU32 = AtomicU32::new(0);
/// Harnesses that are not in use: loading the programs and creating their maps takes longer than most tests.
static IDLE: Mutex<Vec<Harness>> = Mutex::new(Vec::new());

/// The hook, which selects the tc program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    Ingress,
    Egress,
}

impl Hook {
    pub const fn program(self) -> &'static str {
        match self {
            Self::Ingress => "tc_ingress",
            Self::Egress => "tc_egress",
        }
    }
}

/// A Service port.
#[derive(Clone, Debug)]
pub struct Service {
    pub id: u32,
    pub frontend: SocketAddr,
    pub proto: u8,
    /// Ids and addresses of its endpoints.
    pub backends: Vec<(u32, SocketAddr)>,
    pub flags: u16,
}

impl Service {
    /// Creates a Service. The ids of its backends and the position of its slots are derived from its id.
    pub fn new(id: u32, proto: u8, frontend: SocketAddr, backends: &[SocketAddr]) -> Self {
        let backends = backends.iter().zip(id * 16..).map(|(addr, id)| (id, *addr)).collect();
        Self { id, frontend, proto, backends, flags: 0 }
    }

    /// Returns the writes that give the Service this algorithm, with a Maglev table of its endpoints that begins at the
    /// word `base`.
    pub fn writes_with_table(&self, algorithm: u8, base: u32) -> [Write; 3] {
        let member = |(id, at): &(u32, SocketAddr)| Member {
            at: BackendAddress { address: at.ip(), port: at.port() },
            weight: 1,
            id: *id,
        };
        let members: Vec<_> = self.backends.iter().map(member).collect();
        let words = maglev::length(members.len());
        let table = MaglevTable { base, words, signature: maglev::signature(&members) };
        [
            Write::MaglevTable(base, maglev::packed(&members)),
            Write::MaglevIndex(index(self.id, false), table.into()),
            Write::Service(self.frontend_key(), ServiceEntry { algorithm, ..self.entry() }),
        ]
    }

    pub fn frontend_key(&self) -> FrontendKey {
        FrontendKey {
            addr: self.frontend.ip(),
            port: self.frontend.port(),
            proto: self.proto,
            scope: SCOPE_INTERNAL,
        }
    }

    pub fn entry(&self) -> ServiceEntry {
        ServiceEntry {
            tag: self.frontend_key().tag(),
            id: self.id,
            slot_base: self.id * 16,
            slot_count: self.backends.len() as u32,
            // A Service's set of source ranges, if it has one, has its id.
            ranges: if self.flags & SERVICE_SOURCE_RANGES == 0 { 0 } else { self.id },
            flags: self.flags,
            kind: KIND_CLUSTER_IP,
            ..ServiceEntry::default()
        }
    }

    fn row(&self, addr: SocketAddr, state: u8) -> Backend {
        Backend { addr: addr.ip(), port: addr.port(), proto: self.proto, state, service: self.id, flags: 0 }
    }

    /// Returns all writes that create the Service, in the agent's order.
    pub fn writes(&self) -> Vec<Write> {
        let mut writes = Vec::new();
        for (id, addr) in &self.backends {
            writes.push(Write::Backend(*id, self.row(*addr, BACKEND_ACTIVE)));
        }
        writes.push(filter(Role::Frontend, self.frontend, self.proto));
        writes.extend(self.backends.iter().map(|(_, addr)| filter(Role::Backend, *addr, self.proto)));
        writes.push(Write::Slots(self.id * 16, self.backends.iter().map(|(id, _)| *id).collect()));
        writes.push(Write::Service(self.frontend_key(), self.entry()));
        writes
    }
}

/// Returns the write that sets the prefilter bit of an address, port and protocol.
pub fn filter(role: Role, addr: SocketAddr, proto: u8) -> Write {
    let (word, mask) = match addr.ip() {
        IpAddr::V4(ip) => position(role, &ip.octets(), addr.port(), proto),
        IpAddr::V6(ip) => position(role, &ip.octets(), addr.port(), proto),
    };
    Write::PrefilterSet(word, mask)
}

/// Returns a `struct __sk_buff` with the device of the hook (0: loopback), and at ingress the device on which the packet arrived.
pub fn context_of(hook: Hook, device: u32) -> [u8; 192] {
    let mut context = [0; 192];
    if hook == Hook::Ingress {
        context[36..40].copy_from_slice(&device.max(1).to_ne_bytes());
    }
    context[40..44].copy_from_slice(&device.to_ne_bytes());
    context
}

/// The result of a program for a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub verdict: i32,
    pub packet: Vec<u8>,
}

/// A tracked flow, of either family.
#[derive(Clone, Copy, Debug)]
pub struct Tracked {
    pub index: u32,
    pub client: SocketAddr,
    pub frontend: SocketAddr,
    pub backend: SocketAddr,
    pub source: SocketAddr,
    pub proto: u8,
    /// The bits of the state word.
    pub state: u32,
    pub created: u32,
    pub last_seen: u32,
    pub generation: u32,
    forward: Key,
    reply: Key,
}

/// A key of a tracked flow.
#[derive(Clone, Copy, Debug)]
enum Key {
    V4(FlowKey<[u8; 4]>),
    V6(FlowKey<[u8; 16]>),
}

/// Selects one of the two keys of a flow.
#[derive(Clone, Copy, Debug)]
pub enum Side {
    Forward,
    Reply,
}

/// The programs and their maps.
pub struct Harness {
    pub ebpf: Ebpf,
    store: KernelStore,
    view: View,
    maps: PathBuf,
    flows: u32,
    buffer: Vec<u8>,
    /// Whether XDP runs before tc for packets at ingress.
    early: bool,
    /// Number of these packets that XDP processed without passing them to tc.
    pub taken: usize,
}

/// `XDP_DROP`, `XDP_PASS`.
const XDP: [u32; 2] = [1, 2];

impl Harness {
    /// Runs `test` with empty maps for `flows` flows. A harness whose test has failed is not used again. `early`: XDP runs
    /// before tc for packets at ingress, as on an uplink.
    pub fn with(bpffs: &Path, flows: u32, early: bool, test: impl FnOnce(&mut Self)) {
        let idle = || IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rigs = idle();
        let found = rigs.iter().position(|harness| harness.flows == flows).map(|at| rigs.swap_remove(at));
        drop(rigs);
        let mut harness = found.unwrap_or_else(|| Self::new(bpffs, flows));
        (harness.early, harness.taken) = (early, 0);
        test(&mut harness);
        harness.clear();
        idle().push(harness);
    }

    /// Loads the programs with maps for `flows` flows, and pins the maps below `bpffs`.
    pub fn new(bpffs: &Path, flows: u32) -> Self {
        let capacities = Capacities {
            services: 1024,
            frontends: 1024,
            slots: 1024 * 16,
            maglev_words: 1024 * 16,
            backends: 1024 * 16,
            flows,
            sockets: 16,
            source_ranges: 64,
            refusals: 64,
            connect_latency: true,
            by_memory: 1,
        };
        Self::with_capacities(bpffs, &capacities)
    }

    pub fn with_capacities(bpffs: &Path, capacities: &Capacities) -> Self {
        let root = bpffs.join(format!("rig{}", NUMBER.fetch_add(1, Ordering::Relaxed)));
        let maps = root.join("ballast").join(format!("v{ABI_VERSION}"));
        fs::create_dir_all(&maps).unwrap();
        create_segments(EMBEDDED, &maps).unwrap();
        let buckets = buckets_for(capacities.flows);
        for (name, len) in [
            (names::FLOWS, capacities.flows),
            (names::FLOWS6, capacities.flows),
            (names::FLOW_INDEX, buckets),
            (names::FLOW_INDEX6, buckets),
            (names::SYN_TIMES, 2 * capacities.flows),
        ] {
            segments::grow(&maps, name, len as usize).unwrap();
        }
        let mut loader = EbpfLoader::new();
        loader.btf(None);
        loader.override_global("LOOPBACK_DEVICE", &0u64, true);
        for name in names::ALL.iter().chain(names::OPTIONAL) {
            loader.map_pin_path(name, maps.join(name));
            if let Some((entries, _)) = capacities.of(name).filter(|_| !names::SEGMENTED.contains(name)) {
                loader.map_max_entries(name, entries);
            }
        }
        if capacities.connect_latency {
            loader.override_global("CONNECT_LATENCY", &1u64, true);
        }
        let mut ebpf = loader.load(EMBEDDED).unwrap();
        load_packet_path(&mut ebpf).unwrap();
        for name in ["clock", "nop"] {
            let program: &mut SchedClassifier = ebpf.program_mut(name).unwrap().try_into().unwrap();
            program.load().unwrap();
        }
        for name in ["xdp_ingress", "xdp_generic", "xdp_nop"] {
            let program: &mut Xdp = ebpf.program_mut(name).unwrap().try_into().unwrap();
            program.load().unwrap();
        }
        let config = NodeConfig::new(HZ, capacities.flows, buckets_for(capacities.flows), 0x5eed);
        let mut map: Array<_, NodeConfig> = ebpf.map_mut(names::CONFIG).unwrap().try_into().unwrap();
        map.set(0, config, 0).unwrap();
        let (store, view) = (KernelStore::open(&maps).unwrap(), View::open(&root).unwrap());
        let (flows, buffer) = (capacities.flows, vec![0; 8192]);
        Self { ebpf, store, view, maps, flows, buffer, early: false, taken: 0 }
    }

    /// Returns the directory in which the maps are pinned.
    pub fn pins(&self) -> &Path {
        &self.maps
    }

    /// Writes Services to the maps.
    pub fn serve(&mut self, services: &[Service]) {
        let writes: Vec<_> = services.iter().flat_map(Service::writes).collect();
        self.write(&writes);
    }

    pub fn write(&mut self, writes: &[Write]) {
        self.store.write(writes).unwrap();
    }

    /// Empties every map.
    fn clear(&mut self) {
        let contents = self.store.read(u32::MAX).unwrap();
        let mut writes: Vec<_> = contents.services.keys().map(|key| Write::NoService(*key)).collect();
        writes.extend(contents.backends.keys().map(|id| Write::NoBackend(*id, Table::Backends)));
        writes.extend(contents.backends6.keys().map(|id| Write::NoBackend(*id, Table::Backends6)));
        let words = contents.prefilter.iter().zip(0..).filter(|(bits, _)| **bits != 0);
        writes.extend(words.map(|(bits, word)| Write::PrefilterClear(word, *bits)));
        self.write(&writes);
        self.forget_flows();
        let mut hands = self.array::<u64>(names::CLOCK_HAND);
        (0..2).for_each(|family| hands.set(family, 0, 0).unwrap());
        // A test may have removed Services with low ids, so `services` does not name them all.
        let ids = contents.services.values().map(|entry| entry.id).filter(|id| *id >= LOW);
        for id in (0..LOW).chain(ids) {
            self.zero(names::SERVICE_STATS, id, ServiceStats::default());
        }
        self.zero_reasons();
        // The previous test may have used up the ICMP answers of a CPU.
        let map = self.ebpf.map_mut(names::RATE_LIMITS).unwrap();
        let mut answers: PerCpuArray<_, u64> = map.try_into().unwrap();
        let cpus = aya::util::nr_cpus().unwrap();
        answers.set(0, PerCpuValues::try_from(vec![0; cpus]).unwrap(), 0).unwrap();
        let map = self.ebpf.map_mut(names::CLOCK_WINDOW).unwrap();
        let mut blocks: PerCpuArray<_, u64> = map.try_into().unwrap();
        (0..2).for_each(|family| {
            blocks.set(family, PerCpuValues::try_from(vec![0; cpus]).unwrap(), 0).unwrap();
        });
        let map = aya::maps::Map::LruHashMap(self.map(names::REFUSALS));
        let mut refusals: HashMap<_, RefusalKey, u64> = map.try_into().unwrap();
        let keys: Vec<_> = refusals.keys().map(Result::unwrap).collect();
        for key in keys {
            refusals.remove(&key).unwrap();
        }
        let map = aya::maps::Map::LruHashMap(self.map(names::CONNECT_LATENCY));
        let mut latency: HashMap<_, LatencyKey, LatencyEntry> = map.try_into().unwrap();
        let keys: Vec<_> = latency.keys().map(Result::unwrap).collect();
        for key in keys {
            latency.remove(&key).unwrap();
        }
        self.forget_fragments::<[u32; 1]>(names::FRAGMENTS);
        self.forget_fragments::<[u32; 4]>(names::FRAGMENTS6);
    }

    /// Sets the counters of all reasons to zero.
    pub fn zero_reasons(&self) {
        (0..Reason::COUNT).for_each(|reason| self.zero(names::REASONS, reason, 0u64));
    }

    /// Removes every flow.
    pub fn forget_flows(&self) {
        self.forget::<[u8; 4]>(names::FLOW_INDEX, names::FLOWS);
        self.forget::<[u8; 16]>(names::FLOW_INDEX6, names::FLOWS6);
    }

    fn forget<A: proxy_common::Address>(&self, index: &str, states: &str) {
        for mut buckets in self.all_segments::<Bucket>(index) {
            for number in 0..buckets.len() {
                buckets.set(number, EMPTY, 0).unwrap();
            }
        }
        for mut flows in self.all_segments::<FlowEntry<A>>(states) {
            for index in 0..flows.len() {
                let flow = flows.get(&index, 0).unwrap();
                if flow.bits() != 0 {
                    flows.set(index, FlowEntry { state: 0, ..flow }, 0).unwrap();
                }
            }
        }
    }

    fn forget_fragments<A: proxy_common::Address>(&mut self, name: &str) {
        let map = self.ebpf.map_mut(name).unwrap();
        let mut map: HashMap<_, FragmentKey<A>, FragmentEntry> = map.try_into().unwrap();
        let keys: Vec<_> = map.keys().map(Result::unwrap).collect();
        for key in keys {
            map.remove(&key).unwrap();
        }
    }

    fn zero<V: aya::Pod>(&self, name: &str, index: u32, zero: V) {
        let map = aya::maps::Map::PerCpuArray(self.map(name));
        let mut counters: PerCpuArray<_, V> = map.try_into().unwrap();
        let cpus = aya::util::nr_cpus().unwrap();
        counters.set(index, PerCpuValues::try_from(vec![zero; cpus]).unwrap(), 0).unwrap();
    }

    /// Removes all endpoints except `left`, in the agent's order: first the slots, then the states of the backends.
    pub fn shrink(&mut self, service: &mut Service, left: &[SocketAddr]) {
        let is_left = |backend: &(u32, SocketAddr)| left.contains(&backend.1);
        let (stay, gone): (Vec<_>, Vec<_>) = service.backends.drain(..).partition(is_left);
        service.backends = stay;
        let mut writes = vec![
            Write::Slots(service.id * 16, service.backends.iter().map(|(id, _)| *id).collect()),
            Write::Service(service.frontend_key(), service.entry()),
        ];
        writes.extend(gone.iter().map(|(id, addr)| Write::Backend(*id, service.row(*addr, BACKEND_GONE))));
        self.write(&writes);
    }

    pub fn program(&self, name: &str) -> &SchedClassifier {
        self.ebpf.program(name).unwrap().try_into().unwrap()
    }

    /// Returns an XDP program.
    pub fn early_program(&self, name: &str) -> &Xdp {
        self.ebpf.program(name).unwrap().try_into().unwrap()
    }

    /// Runs a program on a packet once.
    pub fn run(&mut self, hook: Hook, packet: &[u8]) -> Seen {
        self.run_on(hook, packet, None)
    }

    /// Like `run`, as if the packet were on the device with this index.
    pub fn run_on(&mut self, hook: Hook, packet: &[u8], device: Option<u32>) -> Seen {
        if self.early
            && hook == Hook::Ingress
            && let Some(seen) = self.run_early(packet, device)
        {
            return seen;
        }
        self.run_with(hook, packet, &context_of(hook, device.unwrap_or_default()))
    }

    /// Runs XDP on a packet. Returns the result as a tc verdict, or `None` if XDP passes the packet unchanged to tc.
    fn run_early(&mut self, packet: &[u8], device: Option<u32>) -> Option<Seen> {
        if packet.len() < 14 {
            return None;
        }
        let (verdict, out) = self.run_xdp(packet, device.unwrap_or(1));
        let [drop, pass] = XDP;
        if verdict == pass {
            assert_eq!(out, packet, "XDP has changed what it leaves to tc");
            return None;
        }
        self.taken += 1;
        Some(Seen { verdict: if verdict == drop { DROP } else { REDIRECT }, packet: out })
    }

    /// Runs XDP on a packet that arrives on a device. Returns XDP's verdict, and the packet with what is in front of it.
    pub fn run_xdp(&self, packet: &[u8], device: u32) -> (u32, Vec<u8>) {
        let mut out = vec![0; packet.len() + 64];
        let mut context = [0; 24];
        context[4..8].copy_from_slice(&(packet.len() as u32).to_ne_bytes());
        context[12..16].copy_from_slice(&device.to_ne_bytes());
        let options = TestRunOptions {
            data_in: Some(packet),
            data_out: Some(&mut out),
            ctx_in: Some(&context),
            ..TestRunOptions::default()
        };
        let result = self.early_program("xdp_ingress").test_run(options).unwrap();
        out.truncate(result.data_size_out as usize);
        (result.return_value, out)
    }

    /// Runs the tc program on a packet with this `struct __sk_buff`.
    pub fn run_with(&mut self, hook: Hook, packet: &[u8], context: &[u8; 192]) -> Seen {
        let mut buffer = std::mem::take(&mut self.buffer);
        let options = TestRunOptions {
            data_in: Some(packet),
            data_out: Some(&mut buffer),
            ctx_in: Some(context),
            ..TestRunOptions::default()
        };
        let result = self.program(hook.program()).test_run(options).unwrap();
        let seen = Seen {
            verdict: result.return_value.cast_signed(),
            packet: buffer[..result.data_size_out as usize].to_vec(),
        };
        self.buffer = buffer;
        seen
    }

    /// Returns the kernel's jiffies in the form in which flows store them.
    pub fn now(&self) -> u32 {
        let mut out = [0; 64];
        let options =
            TestRunOptions { data_in: Some(&[0; 64]), data_out: Some(&mut out), ..TestRunOptions::default() };
        self.program("clock").test_run(options).unwrap();
        u32::from_ne_bytes(*out.first_chunk().unwrap())
    }

    /// Returns the counters of all reasons that are not zero.
    pub fn reasons(&self) -> Vec<(Reason, u64)> {
        self.view.reasons().unwrap().into_iter().filter(|(_, count)| *count > 0).collect()
    }

    /// Returns the refusals: Service, reason, count.
    pub fn refusals(&self) -> Vec<(u32, Reason, u64)> {
        let rows = self.view.refusals().unwrap();
        rows.into_iter().map(|((service, reason), count)| (service, reason, count)).collect()
    }

    pub fn stats(&self, service: u32) -> ServiceStats {
        self.view.service_stats([service]).unwrap()[&service]
    }

    pub fn map(&self, name: &str) -> MapData {
        MapData::from_pin(first_segment(self.pins(), name)).unwrap()
    }

    pub fn array<V: aya::Pod>(&self, name: &str) -> Array<MapData, V> {
        aya::maps::Map::Array(self.map(name)).try_into().unwrap()
    }

    /// Opens all segments of an array that grows.
    fn all_segments<V: aya::Pod>(&self, name: &str) -> Vec<Array<MapData, V>> {
        let pins = (0..).map(|number| self.pins().join(segments::FOLDER).join(format!("{name}_{number}")));
        let maps = pins.take_while(|pin| pin.exists()).map(|pin| MapData::from_pin(pin).unwrap());
        maps.map(|map| aya::maps::Map::Array(map).try_into().unwrap()).collect()
    }

    /// Changes the settings of the node; returns the previous ones.
    pub fn configure(&self, change: impl FnOnce(&mut NodeConfig)) -> NodeConfig {
        let mut map: Array<_, NodeConfig> = self.array(names::CONFIG);
        let old = map.get(&0, 0).unwrap();
        let mut new = old;
        change(&mut new);
        map.set(0, new, 0).unwrap();
        old
    }

    /// Returns the maps as the command line reads them.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Returns the listeners of events.
    pub fn monitor(&self) -> proxy_common::event::Monitor {
        self.array(names::MONITOR).get(&0, 0).unwrap()
    }

    pub fn set_monitor(&self, monitor: &proxy_common::event::Monitor) {
        self.array(names::MONITOR).set(0, *monitor, 0).unwrap();
    }

    /// Returns every flow in use.
    pub fn flows(&self, family: Family) -> Vec<Tracked> {
        let mut flows: Vec<Tracked> = match family {
            Family::V4 => {
                let rows = self.all_segments::<FlowEntry<[u8; 4]>>(names::FLOWS);
                self.first(&rows).map(|(flow, index)| tracked(index, &flow, Key::V4)).collect()
            }
            Family::V6 => {
                let rows = self.all_segments::<FlowEntry<[u8; 16]>>(names::FLOWS6);
                self.first(&rows).map(|(flow, index)| tracked(index, &flow, Key::V6)).collect()
            }
        };
        flows.retain(|flow| flow.state != 0);
        flows
    }

    /// Returns the entries that the programs use, with their numbers.
    fn first<A: proxy_common::Address>(
        &self,
        rows: &[Array<MapData, FlowEntry<A>>],
    ) -> impl Iterator<Item = (FlowEntry<A>, u32)> {
        let rows = rows.iter().flat_map(Array::iter).map(Result::unwrap);
        rows.zip(0..self.flows)
    }

    /// Returns the only flow in use.
    pub fn flow(&self, family: Family) -> Tracked {
        let flows = self.flows(family);
        assert_eq!(flows.len(), 1, "{flows:?}");
        flows[0]
    }

    /// Writes these fields of a flow: when it began and was last seen, its state word, and the ports of its client and source.
    pub fn change(&self, flow: &Tracked) {
        match Family::of(flow.client.ip()) {
            Family::V4 => {
                change::<[u8; 4]>(&mut self.array(names::FLOWS), flow);
            }
            Family::V6 => {
                change::<[u8; 16]>(&mut self.array(names::FLOWS6), flow);
            }
        }
    }

    /// Removes one key of a flow from the index.
    pub fn lose(&self, flow: &Tracked, side: Side) {
        let (mut index, number, slot) = self.slot(flow, side).unwrap();
        let mut bucket = index.get(&number, 0).unwrap();
        bucket.slots[slot] = 0;
        index.set(number, bucket, 0).unwrap();
    }

    /// Returns the number of the flow to which a key of a flow leads; `None` if the index does not hold the key.
    pub fn leads_to(&self, flow: &Tracked, side: Side) -> Option<u32> {
        let (index, number, slot) = self.slot(flow, side)?;
        Some(flow_of(index.get(&number, 0).unwrap().slots[slot]))
    }

    /// Fills one of the two possible buckets of a key with stale slots.
    pub fn crowd(&self, flow: &Tracked, side: Side, which: usize) {
        let (mut index, hash, numbers) = self.buckets(flow, side);
        // The slots have another tag, so that the key's own slot differs. They refer to the last entry, which is
        // not in use.
        assert_ne!(tag(!hash), tag(hash));
        let stale = slot_of(tag(!hash), self.flows - 1);
        index.set(numbers[which], Bucket { slots: [stale; BUCKET_SLOTS as usize], ..EMPTY }, 0).unwrap();
    }

    /// Returns which of its two possible buckets holds a key of a flow.
    pub fn stands_in(&self, flow: &Tracked, side: Side) -> Option<usize> {
        let (_, number, _) = self.slot(flow, side)?;
        self.buckets(flow, side).2.iter().position(|one| *one == number)
    }

    /// Returns the index, the hash of a key of a flow, and the key's two possible buckets.
    fn buckets(&self, flow: &Tracked, side: Side) -> (Array<MapData, Bucket>, u64, [u32; 2]) {
        let config: Array<_, NodeConfig> = self.array(names::CONFIG);
        let NodeConfig { flow_seed, flows, .. } = config.get(&0, 0).unwrap();
        let (name, hash) = match flow.key(side) {
            Key::V4(key) => (names::FLOW_INDEX, key.hash(flow_seed)),
            Key::V6(key) => (names::FLOW_INDEX6, key.hash(flow_seed)),
        };
        (self.array(name), hash, buckets_of(hash, flows[0].buckets))
    }

    /// Returns the position of a key of a flow: the index, the bucket and the slot.
    fn slot(&self, flow: &Tracked, side: Side) -> Option<(Array<MapData, Bucket>, u32, usize)> {
        let (index, hash, numbers) = self.buckets(flow, side);
        let found = numbers.into_iter().find_map(|number| {
            let slots = index.get(&number, 0).unwrap().slots;
            let slot = slots.iter().position(|slot| slot & SLOT_TAG == tag(hash))?;
            assert_eq!(slots[slot] & SLOT_PENDING, 0, "no key stays pending");
            Some((number, slot))
        });
        found.map(|(number, slot)| (index, number, slot))
    }

    /// Returns the number of keys in the index.
    pub fn key_count(&self, family: Family) -> usize {
        let name = match family {
            Family::V4 => names::FLOW_INDEX,
            Family::V6 => names::FLOW_INDEX6,
        };
        let segments = self.all_segments::<Bucket>(name);
        let buckets = segments.iter().flat_map(Array::iter).map(Result::unwrap);
        let used = buckets.take(buckets_for(self.flows) as usize);
        used.flat_map(|bucket| bucket.slots).filter(|slot| *slot != 0).count()
    }
}

impl Tracked {
    fn key(&self, side: Side) -> Key {
        match side {
            Side::Forward => self.forward,
            Side::Reply => self.reply,
        }
    }
}

fn tracked<A: proxy_common::Address + Into<IpAddr>>(
    index: u32,
    flow: &FlowEntry<A>,
    key: fn(FlowKey<A>) -> Key,
) -> Tracked {
    Tracked {
        index,
        client: SocketAddr::new(flow.client.into(), flow.client_port),
        frontend: SocketAddr::new(flow.frontend.into(), flow.frontend_port),
        backend: SocketAddr::new(flow.backend.into(), flow.backend_port),
        source: SocketAddr::new(flow.source.into(), flow.source_port),
        proto: flow.proto,
        state: flow.bits(),
        created: flow.created,
        last_seen: flow.last_seen,
        generation: generation_of(flow.state),
        forward: key(flow.forward_key()),
        reply: key(flow.reply_key()),
    }
}

fn change<A: proxy_common::Address>(map: &mut Array<MapData, FlowEntry<A>>, flow: &Tracked) {
    let old = map.get(&flow.index, 0).unwrap();
    let (client_port, source_port) = (flow.client.port(), flow.source.port());
    let Tracked { created, last_seen, generation, .. } = *flow;
    let state = u64::from(generation) << 32 | u64::from(flow.state);
    let seq = if old.proto == PROTO_UDP { [frontend_window(last_seen), 0] } else { old.seq };
    let new = FlowEntry { created, last_seen, state, client_port, source_port, seq, ..old };
    map.set(flow.index, new, 0).unwrap();
}
