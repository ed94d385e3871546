//! The stages of the programs, built for this machine (`proxy_ebpf::host`). Maps and packets are in memory, and the test
//! sets the clock.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};

use ipnet::IpNet;
use proxy_common::backend::BackendEntry;
use proxy_common::config::{
    CONFIG_DETECT_LOCAL, CONFIG_DSR, CONFIG_MASQUERADE_ALL, CONFIG_OTHER_PROXY, NodeConfig, PortRange,
};
use proxy_common::conntrack::{ASSURED, is_closed, is_counted};
use proxy_common::csum::fold;
use proxy_common::flow::buckets_for;
use proxy_common::node::{Cidr, DEVICE_UPLINK, NodeEntry, TUNNEL_V4, TUNNEL_V6, Tunnel, mac};
use proxy_common::reason::Reason;
use proxy_common::service::ServiceKey;
use proxy_common::{Address, Family, V4, V6};
use proxy_core::store::Write;
use proxy_ebpf::frame::{Frame as _, PACKET_HOST, PACKET_OTHERHOST, Route};
use proxy_ebpf::host::{self, ChecksumState, HostMaps, HostPacket, Routes, Skb};
use proxy_ebpf::pipeline::Ip;
use proxy_ebpf::step::{DROP, NEXT};

use crate::forge::{ETHERNET, MACS, sum};
use crate::model::route;
use crate::scenario::Scenario;
use crate::tables;
use crate::target::{Context, Counters, Device, Hidden, Hook, Outcome, Seen, Target, Traffic};
use crate::tunnel::taken_out;

/// Jiffies in a second.
const HZ: u32 = 1000;
const FLOWS: u32 = 256;
/// Number of Service ids; no case has more.
const IDS: u32 = 64;
/// Number of words for the Maglev tables of all Services.
pub const MAGLEV_WORDS: usize = 8_192;

/// Returns the index of a device.
fn index(device: Device) -> u32 {
    match device {
        Device::Loopback => 1,
        Device::Uplink => 2,
        Device::Pods => 3,
    }
}

/// Returns an address of the maps as an `IpAddr`.
fn ip<A: Address>(addr: &A) -> IpAddr {
    ip_of(addr.words(), size_of::<A>())
}

fn ip_of(words: [u32; 4], length: usize) -> IpAddr {
    if length == size_of::<u32>() {
        return words[0].to_ne_bytes().into();
    }
    let mut octets = [0; 16];
    for (octets, word) in octets.chunks_mut(4).zip(words) {
        octets.copy_from_slice(&word.to_ne_bytes());
    }
    octets.into()
}

fn words<A: Address>(addr: IpAddr) -> A {
    A::from_words(match addr {
        IpAddr::V4(addr) => addr.octets().words(),
        IpAddr::V6(addr) => addr.octets().words(),
    })
}

fn range<A: Address>(range: IpNet) -> Cidr<A> {
    Cidr { addr: words(range.network()), mask: words(range.netmask()) }
}

/// Returns the kernel's route to an address; `None` if only a kernel knows the route.
fn route_to(to: [u32; 4], length: usize) -> Option<Route> {
    let seen = Seen { outcome: Outcome::Drop, packet: Vec::new(), is_sum_wrong: false };
    let way = route::route(ip_of(to, length), &seen)?;
    let macs = way.macs.concat();
    let word = |at: usize| u32::from_ne_bytes([macs[at], macs[at + 1], macs[at + 2], macs[at + 3]]);
    Some(Route {
        ifindex: index(way.device),
        macs: [word(0), word(4), word(8)],
        mtu: way.mtu as u32,
        resolved: 1,
        ..Route::default()
    })
}

fn is_ipv4<F: Family>() -> bool {
    size_of::<F::Words>() == size_of::<u32>()
}

/// The maps of a family, and the scenario that they were filled from.
struct Tables<F: Family> {
    maps: HostMaps<F>,
    scenario: Option<Scenario>,
}

impl<F: Ip> Tables<F> {
    fn new() -> Self {
        Self { maps: HostMaps::leak(), scenario: None }
    }

    /// Writes what both families need to know about the node: outer headers may be of the other family.
    fn begin_node(&self, scenario: &Scenario) {
        let maps = self.maps;
        maps.clear();
        let flags = if scenario.masquerade_all { CONFIG_MASQUERADE_ALL } else { 0 }
            | if scenario.other_proxy { CONFIG_OTHER_PROXY } else { 0 }
            | if scenario.knows_pods { CONFIG_DETECT_LOCAL } else { 0 }
            | if scenario.dsr.is_some() { CONFIG_DSR } else { 0 };
        maps.set_config(NodeConfig {
            flags,
            snat: scenario.snat.map(|(first, last)| PortRange::new(first, last)),
            dsr_flow_rate: u32::from(scenario.limits_flows),
            uplinks: [index(Device::Uplink), 0, 0],
            macs: [mac(MACS[0]), 0, 0],
            ..NodeConfig::new(HZ, FLOWS, buckets_for(FLOWS), 0x5eed)
        });
        maps.add_device(index(Device::Uplink), DEVICE_UPLINK);
        for write in tables::addresses(scenario) {
            match write {
                Write::NodeAddr(addr, bits) if addr.is_ipv4() == is_ipv4::<F>() => {
                    maps.add_node_addr(words(addr), bits);
                }
                Write::Tunnel(number, Some(row)) => {
                    let family = if row.addr.is_ipv4() { TUNNEL_V4 } else { TUNNEL_V6 };
                    let (addr, source) = (words(row.addr), words(row.source));
                    maps.set_tunnel(number, Tunnel { addr, source, family });
                }
                _ => {}
            }
        }
    }

    fn begin(&mut self, scenario: &Scenario) {
        let maps = self.maps;
        let mut node = NodeEntry::UNKNOWN;
        if let Some(source) = scenario.source() {
            node.source = words(source);
        }
        if scenario.knows_pods {
            node.pods = range(tables::pods(scenario.is_v6));
        }
        if scenario.knows_range {
            node.service_cidrs[0] = range(tables::range(scenario.is_v6));
            node.service_cidr_count = 1;
        }
        maps.set_node(node);
        self.write(tables::unmanaged(scenario));
        self.scenario = None;
        self.update(scenario);
    }

    fn update(&mut self, scenario: &Scenario) {
        self.write(scenario.services.iter().flat_map(|service| tables::service(scenario, service)));
        if let Some(old) = self.scenario.replace(scenario.clone()) {
            self.write(tables::gone(&old, scenario));
        }
    }

    fn write(&self, writes: impl IntoIterator<Item = Write>) {
        let maps = self.maps;
        for write in writes {
            match write {
                Write::Backend(id, row) => {
                    let (addr, port, proto, state) = (words(row.addr), row.port, row.proto, row.state);
                    let (service, flags) = (row.service, row.flags);
                    maps.set_backend(id, BackendEntry { addr, port, proto, state, service, flags });
                }
                Write::Slots(base, ids) => maps.set_slots(base, &ids),
                Write::MaglevTable(base, words) => maps.set_maglev(base, &words),
                Write::MaglevIndex(index, row) => {
                    let bases: Vec<_> = row.tables().map(|table| table.base).collect();
                    maps.set_maglev_index(index, &bases);
                }
                Write::Service(of, entry) => {
                    let (port, proto, scope) = (of.port, of.proto, of.scope);
                    maps.put_service(ServiceKey { addr: words(of.addr), port, proto, scope }, entry);
                }
                Write::PrefilterSet(word, mask) => maps.set_prefilter(word, mask),
                Write::NoBackend(id, _) => maps.set_backend(id, BackendEntry::FREE),
                Write::NoSourceRange(id, net) => maps.remove_source_range(id, range(net)),
                Write::SourceRange(id, net) => maps.add_source_range(id, range(net)),
                other => unreachable!("no case writes that: {other:?}"),
            }
        }
    }

    fn add_reasons(&self, counters: &mut Counters) {
        let counted = Reason::ALL.iter().map(|reason| (*reason, self.maps.count_of(*reason)));
        for (reason, count) in counted.filter(|(_, count)| *count != 0) {
            *counters.reasons.entry(reason).or_default() += count;
        }
    }

    fn counters(&self) -> Counters {
        let mut counters = Counters::default();
        for (of, count) in self.maps.refusals() {
            counters.refusals.insert((of.service, Reason::from_number(of.reason).unwrap()), count);
        }
        let mut open: Vec<i64> = (0..IDS).map(|id| self.maps.open_connections_of(id).cast_signed()).collect();
        for flow in self.maps.flows().iter().filter(|flow| is_counted(flow.bits())) {
            open[flow.backend_id as usize] -= 1;
        }
        counters.miscounted = (0..).zip(open).filter(|(_, more)| *more != 0).collect();
        for id in 0..IDS {
            let stats = self.maps.stats_of(id);
            let traffic =
                [stats.connections, stats.packets, stats.bytes, stats.reply_packets, stats.reply_bytes];
            if traffic != [0; 5] {
                counters.traffic.insert(id, Traffic(traffic));
            }
        }
        counters
    }

    fn hidden(&self, proto: u8, client: SocketAddr, frontend: SocketAddr) -> Option<Hidden> {
        let socket = |addr: &F::Words, port| SocketAddr::new(ip(addr), port);
        let now = self.maps.now();
        let flows = self.maps.flows().into_iter().filter(|flow| {
            flow.bits() != 0
                && flow.proto == proto
                && client == socket(&flow.client, flow.client_port)
                && frontend == socket(&flow.frontend, flow.frontend_port)
        });
        // The newest flow: older ones may stay while their ports are in quarantine.
        let found = flows.min_by_key(|flow| (now.wrapping_sub(flow.created), is_closed(flow.bits())))?;
        Some(Hidden {
            backend: socket(&found.backend, found.backend_port),
            source: socket(&found.source, found.source_port),
            is_assured: found.bits() & ASSURED != 0,
        })
    }
}

/// The stages, and the maps of both families.
pub struct Host {
    v4: Tables<V4>,
    v6: Tables<V6>,
    is_v6: bool,
    turn: u32,
    /// Whether XDP runs before tc on the uplink.
    early: bool,
}

/// Number of packets that the XDP stages have processed without passing them to tc.
static TAKEN: AtomicU64 = AtomicU64::new(0);

/// Returns how many packets the XDP stages have processed without passing them to tc.
pub fn taken_early() -> u64 {
    TAKEN.load(Ordering::Relaxed)
}

impl Host {
    pub fn new() -> Self {
        Self { v4: Tables::new(), v6: Tables::new(), is_v6: false, turn: 0, early: false }
    }

    /// Like `new`, with the XDP stages on the uplink.
    pub fn early() -> Self {
        Self { early: true, ..Self::new() }
    }

    fn advance(&self, jiffies: u32) {
        self.v4.maps.advance(jiffies);
        self.v6.maps.advance(jiffies);
    }

    /// Runs the XDP stages on a packet. Returns the result as a tc verdict; or if they pass the packet to tc, its bytes, which change
    /// only if the outer header was removed, and the note in front of it.
    fn run_early(&self, bytes: &[u8], edit: impl FnOnce(&mut Skb)) -> Result<Early, String> {
        let packet = HostPacket::new(bytes).edit(edit);
        let verdict = host::run_any_early(self.v4.maps, self.v6.maps, packet.early_frame());
        let note = packet.frame().note();
        let seen = seen(verdict, packet)?;
        if seen.outcome != Outcome::Next {
            TAKEN.fetch_add(1, Ordering::Relaxed);
            return Ok(Early::Done(seen));
        }
        let inner = taken_out(bytes).map(|(_, inner)| inner);
        if seen.packet == bytes && note.is_none_or(|note| note == [0; 2])
            || Some(&seen.packet) == inner.as_ref()
        {
            Ok(Early::Goes(seen.packet, note))
        } else {
            Err("XDP has changed what it leaves to tc".into())
        }
    }
}

/// The result of XDP.
enum Early {
    Done(Seen),
    Goes(Vec<u8>, Option<[u32; 2]>),
}

/// Returns the result of a packet.
fn seen(verdict: i32, packet: HostPacket) -> Result<Seen, String> {
    let outcome = match verdict {
        NEXT => Outcome::Next,
        DROP => Outcome::Drop,
        host::REDIRECT => Outcome::Redirect,
        other => return Err(format!("verdict {other}")),
    };
    let skb = packet.into_skb();
    let packet = skb.as_slice().to_vec();
    let is_sum_wrong = match skb.checksum {
        ChecksumState::Complete(sum) => {
            let (is, should_be) = (fold(sum.into()), complete(&packet));
            is != should_be && !matches!((is, should_be), (0, 0xffff) | (0xffff, 0))
        }
        _ => false,
    };
    Ok(Seen { outcome, packet, is_sum_wrong })
}

/// Returns the packet type of a frame, on a device whose MAC address is that of most frames (`eth_type_trans`).
fn packet_type(packet: &[u8]) -> u32 {
    const MULTICAST: u32 = 2;
    match packet {
        [first, ..] if first & 1 == 1 => MULTICAST,
        _ if packet.starts_with(&MACS[0]) => PACKET_HOST,
        _ => PACKET_OTHERHOST,
    }
}

/// Returns the sum over all bytes behind the Ethernet header, as a driver would supply it.
fn complete(packet: &[u8]) -> u16 {
    sum(&[&packet[ETHERNET..]]).to_be()
}

impl Target for Host {
    fn begin(&mut self, scenario: &Scenario) {
        self.is_v6 = scenario.is_v6;
        self.v4.begin_node(scenario);
        self.v6.begin_node(scenario);
        self.v4.maps.set_early_device(index(Device::Uplink), self.early);
        self.v6.maps.set_early_device(index(Device::Uplink), self.early);
        if scenario.is_v6 { self.v6.begin(scenario) } else { self.v4.begin(scenario) }
    }

    fn update(&mut self, scenario: &Scenario) {
        if scenario.is_v6 { self.v6.update(scenario) } else { self.v4.update(scenario) }
    }

    fn pause(&mut self, milliseconds: u32) {
        self.advance(milliseconds / (1000 / HZ));
    }

    fn run(&mut self, hook: Hook, bytes: &[u8], context: Context) -> Result<Seen, String> {
        // Packets that immediately follow each other arrive in one tick of the clock, or in two.
        self.turn += 1;
        self.advance(u32::from(self.turn.is_multiple_of(3)));
        let (hook, arrival) = match hook {
            Hook::Ingress => (host::Hook::Ingress, index(context.device)),
            Hook::Egress if context.is_local_origin => (host::Hook::Egress, 0),
            Hook::Egress => (host::Hook::Egress, index(Device::Pods)),
        };
        let edit = |skb: &mut Skb| {
            skb.ifindex = index(context.device);
            skb.packet_type = packet_type(bytes);
            // As with `BPF_PROG_TEST_RUN`.
            skb.has_socket = false;
            skb.ingress_ifindex = arrival;
            skb.routes = Routes::by(route_to);
            if context.is_complete {
                skb.checksum = ChecksumState::Complete(complete(bytes).into());
            }
        };
        let (mut came, mut note) = (bytes.to_vec(), None);
        if self.early
            && (hook, context.device) == (host::Hook::Ingress, Device::Uplink)
            && !context.is_complete
        {
            match self.run_early(bytes, edit)? {
                Early::Done(seen) => return Ok(seen),
                Early::Goes(bytes, left) => (came, note) = (bytes, left),
            }
        }
        let packet = HostPacket::new(&came).edit(edit).edit(|skb| skb.note = note);
        seen(host::run_any(hook, self.v4.maps, self.v6.maps, packet.frame()), packet)
    }

    fn counters(&mut self) -> Counters {
        let mut counters = if self.is_v6 { self.v6.counters() } else { self.v4.counters() };
        self.v4.add_reasons(&mut counters);
        self.v6.add_reasons(&mut counters);
        counters
    }

    fn hidden(&mut self, proto: u8, client: SocketAddr, frontend: SocketAddr) -> Option<Hidden> {
        if client.is_ipv6() {
            self.v6.hidden(proto, client, frontend)
        } else {
            self.v4.hidden(proto, client, frontend)
        }
    }
}
