//! Compares `KernelStore` with `MemoryStore`: the same writes must result in the same contents.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::time::Instant;

use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, HashMap, Map, MapData, PerCpuArray, PerCpuValues};
use ipnet::IpNet;
use proxy_common::backend::{BACKEND_ACTIVE, BACKEND_GONE, BackendEntry};
use proxy_common::config::{
    CONFIG_MASQUERADE_ALL, CONFIG_SNAT_MOVED, CONFIG_SOCKET_LB_HOST_ONLY, CONFIG_VIP_ECHO, Limits,
    NodeConfig, PortRange,
};
use proxy_common::latency::{ExampleKey, LatencyEntry, LatencyKey, SocketExample};
use proxy_common::map_names::{
    BACKEND_STATS, CONFIG, CONNECT_LATENCY, CONNECTIONS, HEALTH, MAGLEV_INDEX, REFUSALS, SERVICE_STATS,
    SOCKET_EXAMPLES, TUNNEL_COUNT,
};
use proxy_common::name::PortName;
use proxy_common::node::{Cidr, NodeEntry, Tunnel};
use proxy_common::prefilter::PREFILTER_WORDS;
use proxy_common::select::Algorithm;
use proxy_common::service::{ServiceEntry, ServiceKey};
use proxy_common::source_range::SourceRangeKey;
use proxy_common::stats::{RefusalKey, ServiceStats};
use proxy_core::model::net::{IpFamily, Protocol};
use proxy_core::model::{ServiceName, SortedMap};
use proxy_core::plan::{
    BackendAddress, BackendFacts, Changing, Frontend, FrontendKind, FrontendPlan, PortPlan, Scope,
    ServicePlan, ServicePortName,
};
use proxy_core::store::{
    Backend, Capacity, ConfigRow, Contents, FrontendKey, MapError, MemoryStore, NodeContents, NodeFamily,
    NodeRow, Store, Table, TunnelRow, Write,
};
use proxy_core::sync::{QuarantinePeriods, Reconciler, Step};
use proxy_user::maps::KernelStore;
use proxy_user::maps::segments;

/// `BPF_F_NO_PREALLOC` and `BPF_F_MMAPABLE` (uapi/linux/bpf.h).
const NO_PREALLOC: u32 = 1;
const MMAPABLE: u32 = 1 << 10;

/// Maps pinned in a separate bpffs, which is unmounted when the value is dropped.
struct Pins {
    dir: tempfile::TempDir,
}

impl Pins {
    fn new(capacity: Capacity) -> Self {
        let dir = tempfile::tempdir().unwrap();
        rustix::mount::mount("bpf", dir.path(), "bpf", rustix::mount::MountFlags::empty(), None).unwrap();
        let pins = Self { dir };
        let Capacity { frontends, slots, maglev, backends, services, ranges } = capacity;
        let at = |table: Table| pins.path().join(table.name());
        let hash4: HashMap<MapData, ServiceKey<[u8; 4]>, ServiceEntry> =
            HashMap::create(frontends, 0).unwrap();
        hash4.pin(at(Table::Services)).unwrap();
        let hash6: HashMap<MapData, ServiceKey<[u8; 16]>, ServiceEntry> =
            HashMap::create(frontends, 0).unwrap();
        hash6.pin(at(Table::Services6)).unwrap();
        let names: HashMap<MapData, u32, PortName> = HashMap::create(services, NO_PREALLOC).unwrap();
        names.pin(at(Table::Names)).unwrap();
        Array::<MapData, u32>::create(slots, MMAPABLE).unwrap().pin(at(Table::Slots)).unwrap();
        Array::<MapData, u64>::create(maglev, MMAPABLE).unwrap().pin(at(Table::Maglev)).unwrap();
        let index = Array::<MapData, u64>::create(2 * services, MMAPABLE).unwrap();
        index.pin(pins.path().join(MAGLEV_INDEX)).unwrap();
        Array::<MapData, u64>::create(PREFILTER_WORDS, MMAPABLE).unwrap().pin(at(Table::Prefilter)).unwrap();
        Array::<MapData, BackendEntry<[u8; 4]>>::create(backends, 0)
            .unwrap()
            .pin(at(Table::Backends))
            .unwrap();
        Array::<MapData, BackendEntry<[u8; 16]>>::create(backends, 0)
            .unwrap()
            .pin(at(Table::Backends6))
            .unwrap();
        PerCpuArray::<MapData, ServiceStats>::create(services, 0)
            .unwrap()
            .pin(pins.path().join(SERVICE_STATS))
            .unwrap();
        for name in [BACKEND_STATS, CONNECTIONS] {
            Array::<MapData, u64>::create(backends, 0).unwrap().pin(pins.path().join(name)).unwrap();
        }
        let health = Array::<MapData, u64>::create(backends, MMAPABLE).unwrap();
        health.pin(pins.path().join(HEALTH)).unwrap();
        // aya has functions to create the other types of maps, but not this one.
        let kind = aya_obj::generated::bpf_map_type::BPF_MAP_TYPE_LRU_HASH as u32;
        let lru = aya_obj::Map::new_from_params(kind, size_of::<RefusalKey>() as u32, 8, 64, 0);
        MapData::create(lru, "refusals", None).unwrap().pin(pins.path().join(REFUSALS)).unwrap();
        let (key, value) = (size_of::<LatencyKey>() as u32, size_of::<LatencyEntry>() as u32);
        let lru = aya_obj::Map::new_from_params(kind, key, value, 64, 0);
        let latency = MapData::create(lru, CONNECT_LATENCY, None).unwrap();
        latency.pin(pins.path().join(CONNECT_LATENCY)).unwrap();
        let (key, value) = (size_of::<ExampleKey>() as u32, size_of::<SocketExample>() as u32);
        let lru = aya_obj::Map::new_from_params(kind, key, value, 64, 0);
        let examples = MapData::create(lru, SOCKET_EXAMPLES, None).unwrap();
        examples.pin(pins.path().join(SOCKET_EXAMPLES)).unwrap();
        pins.make_node(ranges);
        pins
    }

    fn make_node(&self, ranges: u32) {
        let at = |table: Table| self.path().join(table.name());
        let mut node = Array::<MapData, NodeEntry<[u8; 4]>>::create(1, 0).unwrap();
        node.set(0, NodeEntry::UNKNOWN, 0).unwrap();
        node.pin(at(Table::Node)).unwrap();
        let mut node = Array::<MapData, NodeEntry<[u8; 16]>>::create(1, 0).unwrap();
        node.set(0, NodeEntry::UNKNOWN, 0).unwrap();
        node.pin(at(Table::Node6)).unwrap();
        let nodes = Array::<MapData, Tunnel>::create(TUNNEL_COUNT, 0).unwrap();
        nodes.pin(at(Table::Tunnels)).unwrap();
        let mut config = Array::<MapData, NodeConfig>::create(1, 0).unwrap();
        config.set(0, NodeConfig::new(250, 9, 16, 77), 0).unwrap();
        config.pin(at(Table::Config)).unwrap();
        HashMap::<MapData, [u8; 4], u32>::create(8, NO_PREALLOC).unwrap().pin(at(Table::NodeAddrs)).unwrap();
        HashMap::<MapData, [u8; 16], u32>::create(8, NO_PREALLOC)
            .unwrap()
            .pin(at(Table::NodeAddrs6))
            .unwrap();
        HashMap::<MapData, u32, u64>::create(8, NO_PREALLOC).unwrap().pin(at(Table::Devices)).unwrap();
        let trie = LpmTrie::<MapData, SourceRangeKey<[u8; 4]>, u32>::create(ranges, NO_PREALLOC).unwrap();
        trie.pin(at(Table::SrcRanges)).unwrap();
        let trie = LpmTrie::<MapData, SourceRangeKey<[u8; 16]>, u32>::create(ranges, NO_PREALLOC).unwrap();
        trie.pin(at(Table::SrcRanges6)).unwrap();
    }

    /// Returns the counters of the programs for Services and for backends.
    fn stats(&self) -> (PerCpuArray<MapData, ServiceStats>, Array<MapData, u64>) {
        let map = |name| MapData::from_pin(self.path().join(name)).unwrap();
        (
            Map::PerCpuArray(map(SERVICE_STATS)).try_into().unwrap(),
            Map::Array(map(BACKEND_STATS)).try_into().unwrap(),
        )
    }

    /// Returns the map of refusals by Service and reason.
    fn refusals(&self) -> HashMap<MapData, RefusalKey, u64> {
        Map::LruHashMap(MapData::from_pin(self.path().join(REFUSALS)).unwrap()).try_into().unwrap()
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        rustix::mount::unmount(self.dir.path(), rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}

const SMALL: Capacity =
    Capacity { frontends: 4, slots: 64, maglev: 4096, backends: 16, services: 4, ranges: 2 };

fn key(addr: impl Into<IpAddr>) -> FrontendKey {
    FrontendKey { addr: addr.into(), port: 80, proto: 6, scope: 0 }
}

fn row(addr: impl Into<IpAddr>, state: u8) -> Backend {
    Backend { addr: addr.into(), port: 8080, proto: 6, state, service: 1, flags: 1 }
}

fn name(text: &str) -> Box<PortName> {
    Box::new(PortName::new(text, 6, 4).unwrap())
}

fn v4(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 96, 0, last)
}

fn v6(last: u16) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last)
}

fn entry(id: u32) -> ServiceEntry {
    ServiceEntry {
        tag: 7,
        id,
        slot_base: 3,
        slot_count: 2,
        affinity_secs: 5,
        flags: 1,
        algorithm: 0,
        kind: 1,
        ranges: 0,
    }
}

/// Applies the writes to both stores, and returns their contents, which must be equal.
fn compare(kernel: &mut KernelStore, memory: &mut MemoryStore, writes: &[Write]) -> Contents {
    kernel.write(writes).unwrap();
    memory.write(writes).unwrap();
    let contents = kernel.read(u32::MAX).unwrap();
    assert!(contents == memory.read(u32::MAX).unwrap(), "after {writes:?}");
    contents
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn every_write_does_in_the_kernel_what_it_does_in_memory() {
    let pins = Pins::new(SMALL);
    let mut kernel = KernelStore::open(pins.path()).unwrap();
    let mut memory = MemoryStore::new(SMALL);
    assert_eq!(kernel.capacity(), SMALL);
    compare(&mut kernel, &mut memory, &[]);
    let all = compare(
        &mut kernel,
        &mut memory,
        &[
            Write::Name(1, name("default/a:http")),
            Write::Name(2, name("default/b")),
            Write::Backend(1, row(v4(1), BACKEND_ACTIVE)),
            Write::Backend(2, row(v6(1), BACKEND_ACTIVE)),
            Write::Backend(15, row(v4(2), BACKEND_GONE)),
            Write::PrefilterSet(0, 1 << 63),
            Write::PrefilterSet(PREFILTER_WORDS - 1, 5),
            Write::Slots(3, vec![1, 15]),
            Write::Slots(62, vec![8, 9]),
            Write::Service(key(v4(1)), entry(1)),
            Write::Service(key(v6(1)), entry(2)),
            Write::Service(FrontendKey { scope: 1, ..key(v4(1)) }, entry(3)),
        ],
    );
    assert_eq!((all.services.len(), all.names.len(), all.backends.len(), all.backends6.len()), (3, 2, 2, 1));
    // A store that is opened now, as another process would, reads the same.
    assert!(KernelStore::open(pins.path()).unwrap().read(u32::MAX).unwrap() == all);
    assert_eq!(kernel.read(2).unwrap().backends.len(), 1, "ids below 2 only");
    let left = compare(
        &mut kernel,
        &mut memory,
        &[
            // Removing an absent element is not an error, at any position of the batch.
            Write::NoService(key(v4(9))),
            Write::NoService(key(v4(1))),
            Write::NoService(key(v4(8))),
            Write::NoService(key(v6(1))),
            Write::NoName(3),
            Write::NoName(2),
            Write::NoBackend(1, Table::Backends),
            Write::Backend(15, row(v4(3), BACKEND_ACTIVE)),
            Write::NoBackend(2, Table::Backends6),
            Write::PrefilterClear(PREFILTER_WORDS - 1, 4),
            Write::Slots(3, vec![15]),
        ],
    );
    assert_eq!(
        (left.services.len(), left.names.len(), left.backends.len(), left.backends6.len()),
        (1, 1, 1, 0)
    );
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn rows_above_a_lowered_limit_are_freed() {
    let pins = Pins::new(SMALL);
    let mut kernel = KernelStore::open(pins.path()).unwrap();
    let last = SMALL.backends - 1;
    kernel
        .write(&[
            Write::Name(1, name("default/a:http")),
            Write::Backend(1, row(v4(8), BACKEND_ACTIVE)),
            Write::Backend(last, row(v4(9), BACKEND_ACTIVE)),
        ])
        .unwrap();
    let config = MapData::from_pin(pins.path().join(CONFIG)).unwrap();
    let mut config: Array<MapData, NodeConfig> = Map::Array(config).try_into().unwrap();
    let old = config.get(&0, 0).unwrap();
    config.set(0, NodeConfig { limits: Limits { backends: 2, ..old.limits }, ..old }, 0).unwrap();
    let kernel = KernelStore::open(pins.path()).unwrap();
    assert_eq!(kernel.capacity().backends, 2);
    let now = Instant::now();
    let mut reconciler = Reconciler::recover(kernel, QuarantinePeriods::default(), now).unwrap();
    reconciler.sync(now, BTreeMap::new());
    config.set(0, old, 0).unwrap();
    let mut kernel = KernelStore::open(pins.path()).unwrap();
    let left = kernel.read_range(Table::Backends, 0..SMALL.backends).unwrap().backends;
    assert_eq!(left.into_keys().collect::<Vec<_>>(), [1], "its quarantine is not over");
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn arrays_grow_as_they_are_written() {
    const PER: u32 = 512;
    let pins = Pins::new(SMALL);
    let value = |name: &str| match name {
        "slots" => 4,
        "backends" => 16,
        "backends6" => 28,
        _ => 8,
    };
    let names = ["slots", "backends", "backends6", HEALTH, BACKEND_STATS, CONNECTIONS];
    let segments = |name: &str| {
        (0..1024).take_while(|n| pins.path().join(format!("segments/{name}_{n}")).exists()).count()
    };
    for name in names {
        std::fs::remove_file(pins.path().join(name)).unwrap();
        let segment = aya_obj::Map::new_from_params(2, 4, value(name), PER, MMAPABLE);
        segments::create(pins.path(), name, segment, None).unwrap();
        assert_eq!(segments(name), 1);
    }
    let mut kernel = KernelStore::open(pins.path()).unwrap();
    assert_eq!((kernel.capacity().slots, kernel.capacity().backends), (1024 * PER, 1024 * PER));
    let ids: Vec<u32> = (1..=2 * PER).collect();
    kernel
        .write(&[Write::Backend(2 * PER, row(v4(9), BACKEND_ACTIVE)), Write::Slots(PER - 3, ids.clone())])
        .unwrap();
    assert_eq!(names.map(segments), [3; 6], "an endpoint with an id needs the same elements of the others");
    let found = kernel.read_range(Table::Slots, PER - 3..3 * PER - 3).unwrap();
    assert_eq!(found.slots, ids);
    assert_eq!(
        kernel.read_range(Table::Backends, 0..4 * PER).unwrap().backends,
        BTreeMap::from([(2 * PER, row(v4(9), BACKEND_ACTIVE))])
    );
    // Segments beyond the most that there may be are an error, and the map stays as it is.
    let error = kernel.write(&[Write::Slots(1024 * PER - 1, vec![7, 8])]).unwrap_err();
    assert!(error.error.to_string().contains("raise --max-slots"), "{}", error.error);
    drop(kernel);
    // The next agent finds all of them, also those whose pins were lost.
    std::fs::remove_file(pins.path().join("segments/slots_1")).unwrap();
    assert_eq!(segments::repair(pins.path()).unwrap(), 1);
    let mut kernel = KernelStore::open(pins.path()).unwrap();
    assert_eq!(kernel.read_range(Table::Slots, PER - 3..3 * PER - 3).unwrap().slots, ids);
    let outer = aya::maps::MapInfo::from_pin(pins.path().join("slots")).unwrap();
    assert_eq!((outer.map_type().unwrap(), outer.max_entries()), (aya::maps::MapType::ArrayOfMaps, 1024));
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn a_full_table_is_an_error_that_names_the_setting_and_what_was_done() {
    let pins = Pins::new(SMALL);
    let mut kernel = KernelStore::open(pins.path()).unwrap();
    let writes: Vec<_> = (1..=6).map(|last| Write::Service(key(v4(last)), entry(1))).collect();
    let failed = kernel.write(&writes).unwrap_err();
    assert_eq!(failed.done, 4);
    assert!(matches!(failed.error, MapError::Full { setting: "--max-frontends", .. }), "{}", failed.error);
    assert_eq!(kernel.read(u32::MAX).unwrap().services.len(), 4);
    let names: Vec<_> = (1..=5).map(|id| Write::Name(id, name("default/a"))).collect();
    let failed = kernel.write(&names).unwrap_err();
    assert!(failed.done == 4 && failed.error.to_string().contains("--max-services"), "{}", failed.error);
    let failed =
        kernel.write(&[Write::Backend(15, row(v4(1), 1)), Write::Backend(16, row(v4(2), 1))]).unwrap_err();
    assert!(failed.done == 1 && failed.error.to_string().contains("--max-backends"), "{}", failed.error);
    let failed = kernel.write(&[Write::Slots(0, vec![1]), Write::Slots(63, vec![1, 2])]).unwrap_err();
    assert!(failed.done == 1 && failed.error.to_string().contains("--max-slots"), "{}", failed.error);
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn counters_of_a_reused_id_start_at_zero() {
    let pins = Pins::new(SMALL);
    let (mut services, mut backends) = pins.stats();
    let counted = ServiceStats { connections: 7, packets: 8, ..ServiceStats::default() };
    let cpus = aya::util::nr_cpus().unwrap();
    for id in 1..4 {
        services.set(id, PerCpuValues::try_from(vec![counted; cpus]).unwrap(), 0).unwrap();
        backends.set(id, 9, 0).unwrap();
    }
    let mut refusals = pins.refusals();
    for (service, reason) in [(1, 5), (1, 6), (2, 5), (3, 5)] {
        refusals.insert(RefusalKey { service, reason }, 4, 0).unwrap();
    }
    let latency = MapData::from_pin(pins.path().join(CONNECT_LATENCY)).unwrap();
    let mut latency: HashMap<_, LatencyKey, LatencyEntry> = Map::LruHashMap(latency).try_into().unwrap();
    for (service, backend) in [(1, 0), (1, 1), (2, 0), (3, 0), (3, 1), (3, 2)] {
        latency.insert(LatencyKey { service, backend }, LatencyEntry::default(), 0).unwrap();
    }
    let examples = MapData::from_pin(pins.path().join(SOCKET_EXAMPLES)).unwrap();
    let mut examples: HashMap<_, ExampleKey, SocketExample> = Map::LruHashMap(examples).try_into().unwrap();
    for (service, bucket) in [(1, 0), (2, 3), (3, 3)] {
        examples.insert(ExampleKey { service, bucket }, SocketExample::default(), 0).unwrap();
    }
    let mut kernel = KernelStore::open(pins.path()).unwrap();
    let writes = [
        Write::Name(1, name("default/a")),
        Write::Name(2, name("default/b")),
        Write::Backend(1, row(v4(1), BACKEND_ACTIVE)),
        Write::Backend(2, row(v4(2), BACKEND_ACTIVE)),
        Write::Backend(3, row(v6(3), BACKEND_ACTIVE)),
    ];
    kernel.write(&writes).unwrap();
    assert!(services.get(&2, 0).unwrap().iter().all(|stats| *stats == counted), "it may be a repair");
    let free = [
        Write::NoName(2),
        Write::NoName(1),
        Write::Backend(1, row(v4(9), BACKEND_GONE)),
        Write::NoBackend(2, Table::Backends),
        Write::NoBackend(3, Table::Backends6),
    ];
    kernel.write(&free).unwrap();
    for (id, expected) in [(1, ServiceStats::default()), (2, ServiceStats::default()), (3, counted)] {
        assert!(services.get(&id, 0).unwrap().iter().all(|stats| *stats == expected), "Service port {id}");
    }
    assert_eq!([1, 2, 3].map(|id| backends.get(&id, 0).unwrap()), [9, 0, 0]);
    let left: Vec<_> = refusals.keys().map(|key| key.unwrap().service).collect();
    assert_eq!(left, [3], "refusals of a Service whose id is given away");
    let left: BTreeSet<_> = latency.keys().map(Result::unwrap).collect();
    let expected = [(3, 0), (3, 1)].map(|(service, backend)| LatencyKey { service, backend });
    assert_eq!(left, expected.into(), "latency of Services and backends whose ids are given away");
    let left: Vec<_> = examples.keys().map(|key| key.unwrap().service).collect();
    assert_eq!(left, [3], "examples of Services whose ids are given away");
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn reads_in_pieces_equal_the_full_read() {
    let pins = Pins::new(Capacity::default());
    let mut kernel = KernelStore::open(pins.path()).unwrap();
    let writes: Vec<_> = (1..=200_u8)
        .flat_map(|number| {
            let id = u32::from(number);
            [
                Write::Name(id, name("default/a")),
                Write::Backend(id, row(v4(number), BACKEND_ACTIVE)),
                Write::Backend(id, row(v6(number.into()), BACKEND_ACTIVE)),
                Write::Slots(id, vec![id]),
                Write::PrefilterSet(id, 1),
                Write::Service(key(v4(number)), entry(id)),
                Write::Service(key(v6(number.into())), entry(id)),
            ]
        })
        .collect();
    kernel.write(&writes).unwrap();
    let whole = kernel.read(201).unwrap();
    assert_eq!((whole.services.len(), whole.names.len(), whole.backends6.len()), (400, 200, 200));
    let mut walked = Contents::default();
    for table in [Table::Services, Table::Services6, Table::Names] {
        let (mut place, mut walks) = (None, 0);
        loop {
            let (found, next) = kernel.walk(table, place, 16).unwrap();
            assert!(found.services.len() + found.names.len() <= 32, "{table}: a piece is small");
            walked.services.extend(found.services);
            walked.names.extend(found.names);
            (place, walks) = (next, walks + 1);
            if place.is_none() {
                break;
            }
        }
        assert!(walks > 5, "{table}: {walks} walks");
    }
    assert_eq!((walked.services, walked.names), (whole.services, whole.names));
    for (from, to) in [(0, 1), (1, 2), (3, 77), (150, 201), (201, 201)] {
        let (start, end) = (from as usize, to as usize);
        let range = |table| kernel.read_range(table, from..to).unwrap();
        let [slots, filter, backends, backends6] =
            [Table::Slots, Table::Prefilter, Table::Backends, Table::Backends6].map(range);
        assert_eq!(slots.slots, whole.slots[start..end]);
        assert_eq!(filter.prefilter, whole.prefilter[start..end]);
        assert!(backends.backends.iter().eq(whole.backends.range(from..to)));
        assert!(backends6.backends6.iter().eq(whole.backends6.range(from..to)));
    }
    let last = Capacity::default().slots;
    assert_eq!(kernel.read_range(Table::Slots, last - 1..last + 5).unwrap().slots.len(), 1);
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn a_pin_that_is_not_ours_is_refused() {
    let pins = Pins::new(SMALL);
    let path = pins.path().join(Table::Names.name());
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(KernelStore::open(pins.path()), Err(MapError::Open { table: Table::Names, .. })));
    HashMap::<MapData, u32, u64>::create(4, 0).unwrap().pin(&path).unwrap();
    assert!(matches!(KernelStore::open(pins.path()), Err(MapError::Shape { table: Table::Names, .. })));
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn a_thousand_services_go_in_and_come_back_after_a_restart() {
    let pins = Pins::new(Capacity::default());
    let plans: BTreeMap<_, _> = (0..1000).map(|number| plan(number, 10)).collect();
    let now = Instant::now();
    let store = KernelStore::open(pins.path()).unwrap();
    let mut first = Reconciler::recover(store, QuarantinePeriods::default(), now).unwrap();
    let opened = now.elapsed();
    let begun = Instant::now();
    first.sync(now, plans.clone());
    println!(
        "opened and read in {opened:?}; 1,000 Services of 10 endpoints written in {:?}",
        begun.elapsed()
    );
    assert_eq!((first.failing(), first.problems()), (0, Vec::new()));
    let begun = Instant::now();
    first.sync(now, BTreeMap::from([plan(500, 11)]));
    println!("one endpoint more in {:?}", begun.elapsed());
    let begun = Instant::now();
    assert_eq!(first.audit(now).unwrap(), 0);
    println!("compared with the maps in {:?}", begun.elapsed());
    let mut pieces = Vec::new();
    let end = loop {
        let begun = Instant::now();
        let step = first.audit_step(1024).unwrap();
        pieces.push(begun.elapsed());
        if step != Step::More {
            break step;
        }
    };
    assert_eq!(end, Step::Clean);
    println!(
        "compared in {} pieces, of which the longest took {:?}",
        pieces.len(),
        pieces.iter().max().unwrap()
    );
    let before = first.store_mut().read(u32::MAX).unwrap();
    assert_eq!((before.services.len(), before.backends.len(), before.names.len()), (1000, 10_001, 1000));
    for entry in before.services.values() {
        let slots = &before.slots[entry.slot_base as usize..(entry.slot_base + entry.slot_count) as usize];
        assert!(
            slots
                .iter()
                .all(|id| before.backends[id].service == entry.id
                    && before.backends[id].state == BACKEND_ACTIVE)
        );
    }
    drop(first);

    let store = KernelStore::open(pins.path()).unwrap();
    let mut second = Reconciler::recover(store, QuarantinePeriods::default(), now).unwrap();
    let begun = Instant::now();
    second.sync(now, plans.into_iter().chain([plan(500, 11)]).collect());
    println!("a restarted agent found all as it should be in {:?}", begun.elapsed());
    assert_eq!(second.counters().total(), 0, "a restart writes nothing");
    let half: BTreeMap<_, _> = (0..500).map(|number| (plan(number, 0).0, None)).collect();
    let begun = Instant::now();
    second.sync(now, half);
    println!("half of them gone in {:?}", begun.elapsed());
    assert_eq!(second.store_mut().read(u32::MAX).unwrap().services.len(), 500);
}

/// Returns the write of the node's IPv4 row.
fn node(source: [u8; 4]) -> Write {
    Write::Node(Box::new(NodeRow::V4(NodeFamily {
        source: Some(source.into()),
        pods: Some("10.244.0.0/16".parse().unwrap()),
        service_cidrs: vec!["10.96.0.0/12".parse().unwrap()],
        sources: vec![(7, [192, 0, 2, 9].into())],
        ipsec: vec![("192.0.2.1/32".parse().unwrap(), "10.244.0.0/16".parse().unwrap())],
        routes_by_mark: false,
    })))
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn node_entries_round_trip() {
    let pins = Pins::new(SMALL);
    let mut store = KernelStore::open(pins.path()).unwrap();
    let empty = store.read(16).unwrap().node;
    let config = ConfigRow(NodeConfig {
        flags: CONFIG_MASQUERADE_ALL | CONFIG_SOCKET_LB_HOST_ONLY | CONFIG_SNAT_MOVED | CONFIG_VIP_ECHO,
        udp: 7,
        snat: [PortRange::new(5_000, 6_000), PortRange::new(61_000, 62_000)],
        masquerade_mark: 1 << 20,
        host_netns: 3,
        mesh_ports: [15_001, 0, 7, 0],
        pod_cgroups: [4, 5],
        pods4: Cidr { addr: [10], mask: [!0] },
        pods6: Cidr { addr: [0xfd; 4], mask: [!0, !0, 0, 0] },
        dsr_sources4: Cidr { addr: [11], mask: [!0] },
        dsr_sources6: Cidr { addr: [0xfc; 4], mask: [!0, 0, 0, 0] },
        dsr_flow_rate: 9,
        uplinks: [7, 8, 0],
        macs: [70, 80, 0],
        ..ConfigRow::default().0
    });
    let addresses: [IpAddr; 2] = [v4(1).into(), v6(1).into()];
    let writes = [
        node([192, 0, 2, 1]),
        Write::NodeAddr(addresses[0], 1),
        Write::NodeAddr(addresses[1], 3),
        Write::Tunnel(5, Some(TunnelRow { addr: v4(2).into(), source: v4(1).into() })),
        Write::Tunnel(9, Some(TunnelRow { addr: v6(2).into(), source: v6(1).into() })),
        Write::Device(7, 2),
        Write::Config(Box::new(config)),
    ];
    store.write(&writes).unwrap();
    let found = store.read(16).unwrap().node;
    assert_eq!(found.config, config);
    assert_eq!(found.addresses, BTreeMap::from([(addresses[0], 1), (addresses[1], 3)]));
    assert_eq!(found.devices, BTreeMap::from([(7, 2)]));
    let nodes: Vec<_> = found.tunnels.iter().map(|(number, row)| (*number, row.addr, row.source)).collect();
    assert_eq!(nodes, [(5, v4(2).into(), v4(1).into()), (9, v6(2).into(), v6(1).into())]);
    let NodeRow::V4(row) = &found.rows[&Table::Node] else { panic!("{found:?}") };
    assert_eq!((row.source, row.service_cidrs.len()), (Some([192, 0, 2, 1].into()), 1));
    for table in NodeContents::TABLES {
        assert_eq!(store.walk(table, None, 1).unwrap().0.node, found.of(table), "{table}");
    }

    let others: Array<MapData, NodeConfig> =
        Map::Array(MapData::from_pin(pins.path().join(CONFIG)).unwrap()).try_into().unwrap();
    let entry = others.get(&0, 0).unwrap();
    assert_eq!((entry.flows[0].entries, entry.flow_seed, entry.hz), (9, 77, 250), "these are not ours");

    let gone = [
        Write::NoNodeAddr(addresses[0]),
        Write::NoNodeAddr(addresses[1]),
        Write::NoDevice(7),
        Write::NoDevice(8),
        Write::Tunnel(5, None),
        Write::Tunnel(9, None),
    ];
    store.write(&gone).unwrap();
    let left = store.read(16).unwrap().node;
    assert_eq!((left.addresses, left.devices), (empty.addresses, empty.devices));
    assert_eq!(left.tunnels, empty.tunnels);
}

#[test]
#[ignore = "needs root: cargo xtask test bpf"]
fn source_ranges_are_kept_apart_by_set_and_a_full_table_says_so() {
    let pins = Pins::new(SMALL);
    let mut store = KernelStore::open(pins.path()).unwrap();
    let range = |text: &str| text.parse::<IpNet>().unwrap();
    let all = [(1, range("10.0.0.0/8")), (2, range("10.0.0.0/8")), (2, range("2001:db8::/32"))];
    store.write(&all.map(|(id, range)| Write::SourceRange(id, range))).unwrap();
    assert_eq!(store.read(16).unwrap().source_ranges, all.into_iter().collect());
    let error = store.write(&[Write::SourceRange(3, range("192.0.2.0/24"))]).unwrap_err().error;
    assert!(matches!(error, MapError::Full { table: Table::SrcRanges, .. }), "{error}");

    let lookup = |set: u32, addr: [u8; 4]| {
        let map: LpmTrie<MapData, SourceRangeKey<[u8; 4]>, u32> =
            Map::LpmTrie(MapData::from_pin(pins.path().join(Table::SrcRanges.name())).unwrap())
                .try_into()
                .unwrap();
        map.get(&Key::new(64, SourceRangeKey { set, addr }), 0).ok()
    };
    assert_eq!(
        (lookup(1, [10, 9, 9, 9]), lookup(3, [10, 9, 9, 9]), lookup(1, [11, 0, 0, 1])),
        (Some(1), None, None)
    );
    let (first, place) = store.walk(Table::SrcRanges, None, 1).unwrap();
    let (second, end) = store.walk(Table::SrcRanges, place, 8).unwrap();
    assert!(place.is_some() && end.is_none());
    assert_eq!((first.source_ranges.len(), second.source_ranges.len()), (1, 1));
    assert_eq!(&first.source_ranges | &second.source_ranges, all.into_iter().take(2).collect());
    store
        .write(&[Write::NoSourceRange(1, range("10.0.0.0/8")), Write::NoSourceRange(9, range("10.0.0.0/8"))])
        .unwrap();
    assert_eq!(lookup(1, [10, 9, 9, 9]), None);
    assert_eq!(store.read(16).unwrap().source_ranges, all.into_iter().skip(1).collect());
}

fn plan(number: u16, endpoints: u8) -> (ServiceName, Option<ServicePlan>) {
    let [high, low] = number.to_be_bytes();
    let name = ServiceName::new("default", format!("service-{number}"));
    let port = ServicePortName {
        namespace: name.namespace.clone(),
        name: name.name.clone(),
        port: "http".into(),
        protocol: Protocol::Tcp,
        family: IpFamily::V4,
    };
    let at = |last| BackendAddress { address: Ipv4Addr::new(10, 128 + high, low, last).into(), port: 8080 };
    let backends: SortedMap<_, _> = (1..=endpoints).map(|last| (at(last), BackendFacts::default())).collect();
    let what = FrontendPlan::new(FrontendKind::ClusterIp);
    let frontend = Frontend {
        address: Ipv4Addr::new(10, 96, high, low).into(),
        port: 80,
        protocol: Protocol::Tcp,
        scope: Scope::Internal,
    };
    let frontends = SortedMap::from([(frontend, what)]);
    let plan = PortPlan {
        frontends,
        backends,
        tunnels: SortedMap::default(),
        affinity_secs: 0,
        algorithm: Algorithm::Random,
        maglev_outside: false,
        ejects: false,
        no_sockets: false,
        changing: Changing::No,
        rebalances: false,
        reset_after: None,
        source_ranges: [].into(),
    };
    (name, Some(ServicePlan { ports: [(port, plan)].into(), created: 1, ..ServicePlan::default() }))
}
