//! The packet programs, loaded into this kernel with maps of their own and attached to no hook.

pub mod early;

use std::collections::BTreeMap;
use std::fs;
use std::mem::offset_of;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use aya::maps::MapData;
use aya::programs::SchedClassifier;
use aya::{Ebpf, EbpfLoader};
use proxy_common::abi::Plain;
use proxy_common::affinity::{AffinityEntry, AffinityKey};
use proxy_common::config::NodeConfig;
use proxy_common::conntrack::{ASSURED, is_closed};
use proxy_common::flow::{Bucket, FlowEntry, buckets_for, frontend_window};
use proxy_common::fragment::{FragmentEntry, FragmentKey};
use proxy_common::health::{HEALTH_SINCE, HEALTH_TIME, SKIP_COUNT, SKIP_TIME, SKIP_USED};
use proxy_common::map_names as names;
use proxy_common::reason::Reason;
use proxy_common::version::ABI_VERSION;
use proxy_core::store::{Store as _, Write};
use proxy_user::maps::KernelStore;
use proxy_user::maps::segments::first_segment;
use proxy_user::programs::{Capacities, EMBEDDED, create_segments, load_packet_path};
use rustix::mm::{MapFlags, ProtFlags, mmap};

use crate::raw::{self, Elements};
use crate::scenario::{Scenario, UDP};
use crate::tables;
use crate::target::{Context, Counters, Device, Hidden, Hook, Outcome, Seen, Target, Traffic};

/// Jiffies in a second, as configured for the programs. If the kernel's clock has fewer, the programs' seconds are longer.
const HZ: u32 = 1000;
const FLOWS: u32 = 256;
const BACKENDS: u32 = 64;
const SERVICES: usize = 8;
/// Number of entries of the tables that evict entries.
const FEW: u32 = 1024;

/// Indexes of the devices by name. All instances of [`Kernel`] have the same devices.
static NETWORK: OnceLock<BTreeMap<&'static str, u32>> = OnceLock::new();

/// Creates devices and routes as in `model/route.rs`; returns the indexes of the devices.
fn network() -> BTreeMap<&'static str, u32> {
    let script = "set -e
        ip link set lo up
        ip link add up0 address 02:00:00:00:00:11 mtu 1400 type veth peer name up1
        ip link add pods0 address 02:00:00:00:00:22 mtu 1500 type veth peer name pods1
        echo 0 > /proc/sys/net/ipv6/conf/up0/accept_dad
        echo 0 > /proc/sys/net/ipv6/conf/pods0/accept_dad
        echo 1 > /proc/sys/net/ipv4/ip_forward
        echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
        for device in up1 pods1 up0 pods0; do ip link set $device up; done
        ip addr add 192.168.77.1/24 dev up0
        ip addr add 172.20.0.1/32 dev up0
        ip addr add fd77::1/64 dev up0 nodad
        ip addr add fd78::1/128 dev up0 nodad
        ip neigh add 192.168.77.2 lladdr 02:00:00:00:00:99 dev up0
        ip neigh add fd77::2 lladdr 02:00:00:00:00:99 dev up0
        ip route add default via 192.168.77.2
        ip -6 route add default via fd77::2
        ip route add blackhole 10.3.0.0/16
        ip -6 route add blackhole fd00:3::/32
        ip route add 10.244.0.0/24 dev pods0
        ip -6 route add fd00:244::/48 dev pods0
        for n in 1 2 3; do
            ip neigh add 10.244.0.$n lladdr 02:00:00:00:00:77 dev pods0
            ip neigh add fd00:244::abcd:0:77:$n lladdr 02:00:00:00:00:77 dev pods0
        done";
    let output = Command::new("sh").args(["-c", script]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let index = |name| {
        let path = Path::new("/sys/class/net").join(name).join("ifindex");
        // /sys shows the devices of the netns in which it was mounted.
        let shown = fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok());
        let name = std::ffi::CString::new(name).unwrap();
        // SAFETY: the string ends with a zero.
        let found = unsafe { libc::if_nametoindex(name.as_ptr()) };
        if found != 0 { found } else { shown.unwrap() }
    };
    ["up0", "pods0", "lo"].into_iter().map(|name| (name, index(name))).collect()
}

/// The values of an array map, mapped into this process.
struct Mapped<T: 'static>(&'static mut [T]);

impl<T: Plain> Mapped<T> {
    fn new(map: &MapData, count: u32) -> Self {
        let length = (count as usize * size_of::<T>()).next_multiple_of(4096);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of an array of `count` values of `T`, whose size is a multiple of eight; it is never unmapped.
        let elements = unsafe {
            let at = mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, map.fd().as_fd(), 0)
                .unwrap();
            std::slice::from_raw_parts_mut(at.cast::<T>(), count as usize)
        };
        Self(elements)
    }

    fn clear(&mut self) {
        // SAFETY: `T` is `Plain`: every bit pattern is a value.
        unsafe { std::ptr::write_bytes(self.0.as_mut_ptr(), 0, self.0.len()) };
    }
}

/// The programs and their maps.
pub struct Kernel {
    ebpf: Ebpf,
    store: KernelStore,
    maps: BTreeMap<&'static str, MapData>,
    flows: Mapped<FlowEntry<[u8; 4]>>,
    flows6: Mapped<FlowEntry<[u8; 16]>>,
    index: [Mapped<Bucket>; 2],
    health: Mapped<u64>,
    skips: Mapped<u64>,
    devices: BTreeMap<&'static str, u32>,
    scenario: Option<Scenario>,
    cpus: usize,
    /// The counters before the case began.
    before: Counters,
    buffer: Vec<u8>,
    /// Whether XDP runs before tc on the uplink.
    early: bool,
}

impl Kernel {
    /// Loads the programs, with maps pinned below `bpffs` under this number.
    pub fn new(bpffs: &Path, number: u64) -> Self {
        let capacities = Capacities {
            services: SERVICES as u32,
            frontends: 64,
            slots: 64,
            maglev_words: crate::host::MAGLEV_WORDS as u32,
            backends: BACKENDS,
            flows: FLOWS,
            sockets: 16,
            source_ranges: 64,
            refusals: FEW,
            connect_latency: false,
            by_memory: 1,
        };
        let pins = bpffs.join(format!("fuzz{number}")).join("ballast").join(format!("v{ABI_VERSION}"));
        fs::create_dir_all(&pins).unwrap();
        create_segments(EMBEDDED, &pins).unwrap();
        let mut loader = EbpfLoader::new();
        loader.btf(None);
        loader.override_global("LOOPBACK_DEVICE", &0u64, true);
        let all = || names::ALL.iter().chain(names::PRIVATE).copied();
        for name in all() {
            loader.map_pin_path(name, pins.join(name));
            if let Some((entries, _)) = capacities.of(name).filter(|_| !names::SEGMENTED.contains(&name)) {
                loader.map_max_entries(name, entries);
            }
        }
        for name in [names::FRAGMENTS, names::FRAGMENTS6, names::AFFINITY, names::AFFINITY6] {
            loader.map_max_entries(name, FEW);
        }
        let mut ebpf = loader.load(EMBEDDED).unwrap();
        load_packet_path(&mut ebpf).unwrap();
        let config = NodeConfig::new(HZ, FLOWS, buckets_for(FLOWS), 0x5eed);
        let mut map: aya::maps::Array<_, NodeConfig> =
            ebpf.map_mut(names::CONFIG).unwrap().try_into().unwrap();
        map.set(0, config, 0).unwrap();
        let maps: BTreeMap<_, _> =
            all().map(|name| (name, MapData::from_pin(first_segment(&pins, name)).unwrap())).collect();
        Self {
            store: KernelStore::open(&pins).unwrap(),
            flows: Mapped::new(&maps[names::FLOWS], FLOWS),
            flows6: Mapped::new(&maps[names::FLOWS6], FLOWS),
            index: [names::FLOW_INDEX, names::FLOW_INDEX6]
                .map(|name| Mapped::new(&maps[name], buckets_for(FLOWS))),
            health: Mapped::new(&maps[names::HEALTH], BACKENDS),
            skips: Mapped::new(&maps[names::SKIPS], SKIP_COUNT),
            ebpf,
            maps,
            devices: NETWORK.get_or_init(network).clone(),
            scenario: None,
            cpus: aya::util::nr_cpus().unwrap(),
            before: Counters::default(),
            buffer: vec![0; 8192],
            early: false,
        }
    }

    fn device(&self, device: Device) -> u32 {
        self.devices[match device {
            Device::Loopback => "lo",
            Device::Uplink => "up0",
            Device::Pods => "pods0",
        }]
    }

    /// Returns all elements of a table.
    fn all(&self, name: &str, key: usize, value: usize) -> Elements {
        raw::read(self.maps[name].fd().as_fd(), FEW as usize, key, value).unwrap()
    }

    fn empty(&self, name: &str, key: usize, value: usize) {
        raw::remove(self.maps[name].fd().as_fd(), &self.all(name, key, value)).unwrap();
    }

    /// Subtracts `jiffies` from the time in each value of a table, which is at `offset`.
    fn age(&self, name: &str, key: usize, value: usize, offset: usize, jiffies: u32) {
        let mut elements = self.all(name, key, value);
        for value in elements.values.chunks_mut(value) {
            let time = u32::from_ne_bytes(value[offset..offset + 4].try_into().unwrap());
            value[offset..offset + 4].copy_from_slice(&time.wrapping_sub(jiffies).to_ne_bytes());
        }
        raw::write(self.maps[name].fd().as_fd(), &elements).unwrap();
    }

    /// Returns the counters of a per-CPU array, summed over all CPUs.
    fn counts(&self, name: &str, count: usize, fields: usize) -> Vec<u64> {
        let width = fields * 8;
        let elements = raw::read(self.maps[name].fd().as_fd(), count, 4, width * self.cpus).unwrap();
        let mut sums = vec![0; count * fields];
        for (at, word) in elements.values.chunks(8).enumerate() {
            let (element, field) = (at / (fields * self.cpus), at % fields);
            sums[element * fields + field] += u64::from_ne_bytes(word.try_into().unwrap());
        }
        sums
    }

    fn counted(&self) -> Counters {
        let mut counters = Counters::default();
        let reasons = self.counts(names::REASONS, Reason::COUNT as usize, 1);
        counters.reasons.extend(Reason::ALL.iter().copied().zip(reasons).filter(|(_, count)| *count != 0));
        for (id, sums) in self.counts(names::SERVICE_STATS, SERVICES, 5).chunks(5).enumerate() {
            let traffic = Traffic(sums.try_into().unwrap());
            if traffic != Traffic::default() {
                counters.traffic.insert(id as u32, traffic);
            }
        }
        let refusals = self.all(names::REFUSALS, 8, 8);
        for (key, value) in refusals.keys.chunks(8).zip(refusals.values.chunks(8)) {
            let word = |at: usize| u32::from_ne_bytes(key[at..at + 4].try_into().unwrap());
            let count = u64::from_ne_bytes(value.try_into().unwrap());
            if let Some(reason) = Reason::from_number(word(4)) {
                counters.refusals.insert((word(0), reason), count);
            }
        }
        counters
    }

    fn write(&mut self, writes: &[Write]) {
        self.store.write(writes).unwrap();
    }
}

const fn program(hook: Hook) -> &'static str {
    match hook {
        Hook::Ingress => "tc_ingress",
        Hook::Egress => "tc_egress",
    }
}

/// Returns a `struct __sk_buff` with the device of the hook, and the device on which the packet arrived.
fn context_of(hook: Hook, context: Context, device: u32, other: u32) -> [u8; 192] {
    let came_by = match hook {
        Hook::Ingress => device,
        Hook::Egress if context.is_local_origin => 0,
        Hook::Egress => other,
    };
    let mut raw = [0; 192];
    raw[36..40].copy_from_slice(&came_by.to_ne_bytes());
    raw[40..44].copy_from_slice(&device.to_ne_bytes());
    raw
}

impl Target for Kernel {
    fn begin(&mut self, scenario: &Scenario) {
        if let Some(old) = self.scenario.take() {
            let mut writes = tables::no_node(&old);
            writes.extend(old.services.iter().flat_map(|service| tables::no_service(&old, service)));
            self.write(&writes);
        }
        self.flows.clear();
        self.flows6.clear();
        self.index.iter_mut().for_each(Mapped::clear);
        self.health.clear();
        self.skips.clear();
        self.empty(names::AFFINITY, size_of::<AffinityKey<[u8; 4]>>(), size_of::<AffinityEntry>());
        self.empty(names::AFFINITY6, size_of::<AffinityKey<[u8; 16]>>(), size_of::<AffinityEntry>());
        self.empty(names::FRAGMENTS, size_of::<FragmentKey<[u32; 1]>>(), size_of::<FragmentEntry>());
        self.empty(names::FRAGMENTS6, size_of::<FragmentKey<[u32; 4]>>(), size_of::<FragmentEntry>());
        // The number of ICMP answers of a CPU in a second is limited, and cases need more: the limit starts again.
        let answers = Elements { count: 1, keys: vec![0; 4], values: vec![0; 8 * self.cpus] };
        raw::write(self.maps[names::RATE_LIMITS].fd().as_fd(), &answers).unwrap();
        self.write(&tables::node(scenario, self.devices["up0"]));
        self.update(scenario);
        self.before = self.counted();
    }

    fn update(&mut self, scenario: &Scenario) {
        let mut writes: Vec<_> =
            scenario.services.iter().flat_map(|service| tables::service(scenario, service)).collect();
        if let Some(old) = &self.scenario {
            writes.extend(tables::gone(old, scenario));
        }
        self.write(&writes);
        self.scenario = Some(scenario.clone());
    }

    fn pause(&mut self, milliseconds: u32) {
        self.flows.0.iter_mut().for_each(|flow| age(flow, milliseconds));
        self.flows6.0.iter_mut().for_each(|flow| age(flow, milliseconds));
        for word in self.health.0.iter_mut().filter(|word| **word & HEALTH_SINCE != 0) {
            let since = (*word as u32).wrapping_sub(milliseconds);
            *word = *word & !HEALTH_TIME | u64::from(since);
        }
        for word in self.skips.0.iter_mut().filter(|word| **word & SKIP_USED != 0) {
            let since = (*word as u32).wrapping_sub(milliseconds);
            *word = *word & !SKIP_TIME | u64::from(since);
        }
        let (used, value) = (offset_of!(AffinityEntry, last_used), size_of::<AffinityEntry>());
        self.age(names::AFFINITY, size_of::<AffinityKey<[u8; 4]>>(), value, used, milliseconds);
        self.age(names::AFFINITY6, size_of::<AffinityKey<[u8; 16]>>(), value, used, milliseconds);
        let (seen, value) = (offset_of!(FragmentEntry, seen), size_of::<FragmentEntry>());
        self.age(names::FRAGMENTS, size_of::<FragmentKey<[u32; 1]>>(), value, seen, milliseconds);
        self.age(names::FRAGMENTS6, size_of::<FragmentKey<[u32; 4]>>(), value, seen, milliseconds);
    }

    fn run(&mut self, hook: Hook, packet: &[u8], context: Context) -> Result<Seen, String> {
        let (device, other) = (self.device(context.device), self.device(Device::Pods));
        if self.early
            && (hook, context.device) == (Hook::Ingress, Device::Uplink)
            && !context.is_complete
            && let Some(seen) = self.run_early(packet, device)?
        {
            return Ok(seen);
        }
        let raw = context_of(hook, context, device, other);
        let program: &SchedClassifier = self.ebpf.program(program(hook)).unwrap().try_into().unwrap();
        let fd = program.fd().unwrap().as_fd();
        let mut result = raw::test_run(fd, packet, &raw, context.is_complete, &mut self.buffer);
        let is_wrong = result.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EBADMSG));
        if is_wrong {
            // The kernel returns nothing but the error. Another run returns the result; it must not be counted.
            let first = self.counted();
            result = raw::test_run(fd, packet, &raw, false, &mut self.buffer);
            self.before.add(&self.counted(), &first);
        }
        let (verdict, length) = result.map_err(|error| format!("the kernel does not run it: {error}"))?;
        let outcome = match verdict {
            -1 => Outcome::Next,
            2 => Outcome::Drop,
            7 => Outcome::Redirect,
            other => return Err(format!("verdict {other}")),
        };
        Ok(Seen { outcome, packet: self.buffer[..length].to_vec(), is_sum_wrong: is_wrong })
    }

    fn counters(&mut self) -> Counters {
        let mut counters = Counters::default();
        counters.add(&self.counted(), &self.before);
        counters
    }

    fn hidden(&mut self, proto: u8, client: SocketAddr, frontend: SocketAddr) -> Option<Hidden> {
        fn find<A: proxy_common::Address + Into<IpAddr>>(
            flows: &[FlowEntry<A>],
            key: (u8, SocketAddr, SocketAddr),
        ) -> Option<Hidden> {
            let socket = |addr: A, port| SocketAddr::new(addr.into(), port);
            let is = |flow: &&FlowEntry<A>| {
                flow.bits() != 0
                    && key.0 == flow.proto
                    && key.1 == socket(flow.client, flow.client_port)
                    && key.2 == socket(flow.frontend, flow.frontend_port)
            };
            // The newest flow: older ones may stay while their ports are in quarantine.
            let found = flows.iter().filter(is).max_by_key(|flow| (flow.created, !is_closed(flow.bits())))?;
            Some(Hidden {
                backend: socket(found.backend, found.backend_port),
                source: socket(found.source, found.source_port),
                is_assured: found.bits() & ASSURED != 0,
            })
        }
        let key = (proto, client, frontend);
        if client.is_ipv4() { find(self.flows.0, key) } else { find(self.flows6.0, key) }
    }
}

/// Moves the times of a flow into the past.
fn age<A>(flow: &mut FlowEntry<A>, milliseconds: u32) {
    flow.last_seen = flow.last_seen.wrapping_sub(milliseconds);
    flow.created = flow.created.wrapping_sub(milliseconds);
    if flow.proto == UDP {
        flow.seq[0] = frontend_window(flow.last_seen);
    }
}
