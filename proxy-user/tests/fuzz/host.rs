//! The stages of the programs, built for this machine (`proxy_ebpf::host`): maps and packets are memory, and the clock is ours.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use proxy_common::backend::BackendEntry;
use proxy_common::config::{
    CONFIG_DETECT_LOCAL, CONFIG_MASQUERADE_ALL, CONFIG_OTHER_PROXY, NodeConfig, PortRange,
};
use proxy_common::conntrack::{ASSURED, is_closed, is_counted};
use proxy_common::csum::fold;
use proxy_common::flow::buckets_for;
use proxy_common::node::{Cidr, DEVICE_UPLINK, NODE_ADDR_OWN, NODE_ADDR_PORTS, NodeEntry};
use proxy_common::reason::Reason;
use proxy_common::service::ServiceKey;
use proxy_common::{Address, Family, V4, V6};
use proxy_ebpf::frame::Route;
use proxy_ebpf::host::{self, ChecksumState, HostMaps, HostPacket, Routes};
use proxy_ebpf::net::ETHERTYPE_IPV6;
use proxy_ebpf::pipeline::Ip;
use proxy_ebpf::step::{DROP, NEXT};
use proxy_user::maps::Write;

use crate::forge::{ETHERNET, sum};
use crate::model::route;
use crate::scenario::Scenario;
use crate::tables;
use crate::target::{Context, Counters, Device, Hidden, Hook, Outcome, Seen, Target, Traffic};

/// Jiffies in a second.
const HZ: u32 = 1000;
const FLOWS: u32 = 256;
/// Ids of Services: no case has more.
const IDS: u32 = 64;
/// Room for the tables of all Services.
pub const MAGLEV_WORDS: usize = 8_192;

/// Indexes of devices.
fn index(device: Device) -> u32 {
    match device {
        Device::Loopback => 1,
        Device::Uplink => 2,
        Device::Pods => 3,
    }
}

/// An address of words as others write it.
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

/// The kernel's route to an address. Where the kernel has its own ideas, there is none here.
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

/// The maps of a family, and what they were filled from.
struct Tables<F: Family> {
    maps: HostMaps<F>,
    scenario: Option<Scenario>,
    turn: u32,
}

impl<F: Ip> Tables<F> {
    fn new() -> Self {
        Self { maps: HostMaps::leak(), scenario: None, turn: 0 }
    }

    fn begin(&mut self, scenario: &Scenario) {
        let maps = self.maps;
        maps.clear();
        let flags = if scenario.masquerade_all { CONFIG_MASQUERADE_ALL } else { 0 }
            | if scenario.leave_old { CONFIG_OTHER_PROXY } else { 0 }
            | if scenario.knows_pods { CONFIG_DETECT_LOCAL } else { 0 };
        maps.set_config(NodeConfig {
            flags,
            snat: scenario.snat.map(|(first, last)| PortRange::new(first, last)),
            uplinks: [index(Device::Uplink), 0, 0],
            ..NodeConfig::new(HZ, FLOWS, buckets_for(FLOWS), 0x5eed)
        });
        maps.add_device(index(Device::Uplink), DEVICE_UPLINK);
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
        for addr in scenario.node_addresses() {
            maps.add_node_addr(words(addr), NODE_ADDR_PORTS | NODE_ADDR_OWN);
        }
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
                    maps.set_maglev_index(index, row.current.base, row.previous.base);
                }
                Write::Service(of, entry) => {
                    let (port, proto, scope) = (of.port, of.proto, of.scope);
                    maps.put_service(ServiceKey { addr: words(of.addr), port, proto, scope }, entry);
                }
                Write::FilterSet(word, mask) => maps.set_prefilter(word, mask),
                Write::NoBackend(id, _) => maps.set_backend(id, BackendEntry::FREE),
                Write::NoSourceRange(id, net) => maps.remove_source_range(id, range(net)),
                Write::SourceRange(id, net) => maps.add_source_range(id, range(net)),
                other => unreachable!("no case writes that: {other:?}"),
            }
        }
    }

    /// Packets that follow each other at once are in one tick of the clock, or in two.
    fn run(&mut self, hook: host::Hook, packet: &HostPacket) -> i32 {
        self.turn += 1;
        self.maps.advance(u32::from(self.turn.is_multiple_of(3)));
        host::run(hook, self.maps, packet.frame())
    }

    fn counters(&self) -> Counters {
        let mut counters = Counters::default();
        let counted = Reason::ALL.iter().map(|reason| (*reason, self.maps.count_of(*reason)));
        counters.reasons.extend(counted.filter(|(_, count)| *count != 0));
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
        // The newest, where the ports of older ones are in quarantine.
        let found = flows.min_by_key(|flow| (now.wrapping_sub(flow.created), is_closed(flow.bits())))?;
        Some(Hidden {
            backend: socket(&found.backend, found.backend_port),
            source: socket(&found.source, found.source_port),
            is_assured: found.bits() & ASSURED != 0,
        })
    }
}

/// The stages, and both families' maps.
pub struct Host {
    v4: Tables<V4>,
    v6: Tables<V6>,
    is_v6: bool,
}

impl Host {
    pub fn new() -> Self {
        Self { v4: Tables::new(), v6: Tables::new(), is_v6: false }
    }
}

/// The sum over all behind the Ethernet header, as a driver would supply it.
fn complete(packet: &[u8]) -> u16 {
    sum(&[&packet[ETHERNET..]]).to_be()
}

impl Target for Host {
    fn begin(&mut self, scenario: &Scenario) {
        self.is_v6 = scenario.is_v6;
        if scenario.is_v6 { self.v6.begin(scenario) } else { self.v4.begin(scenario) }
    }

    fn update(&mut self, scenario: &Scenario) {
        if scenario.is_v6 { self.v6.update(scenario) } else { self.v4.update(scenario) }
    }

    fn pause(&mut self, milliseconds: u32) {
        let jiffies = milliseconds / (1000 / HZ);
        if self.is_v6 { self.v6.maps.advance(jiffies) } else { self.v4.maps.advance(jiffies) }
    }

    fn run(&mut self, hook: Hook, bytes: &[u8], context: Context) -> Result<Seen, String> {
        let (hook, is_local_origin) = match hook {
            Hook::Ingress => (host::Hook::Ingress, false),
            Hook::Egress => (host::Hook::Egress, context.is_local_origin),
        };
        let packet = HostPacket::new(bytes).edit(|skb| {
            skb.ifindex = index(context.device);
            skb.ingress_ifindex = if is_local_origin { 0 } else { index(Device::Pods) };
            skb.routes = Routes::by(route_to);
            if context.is_complete {
                skb.checksum = ChecksumState::Complete(complete(bytes).into());
            }
        });
        let is_v6 = bytes[12..14] == (ETHERTYPE_IPV6 as u16).to_ne_bytes();
        let is_ip = is_v6 || bytes[12..14] == [0x08, 0x00];
        let verdict = match is_ip {
            false => NEXT,
            true if is_v6 => self.v6.run(hook, &packet),
            true => self.v4.run(hook, &packet),
        };
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

    fn has_tunnels(&self) -> bool {
        // The kernel's programs for outer headers are not among the stages.
        false
    }

    fn counters(&mut self) -> Counters {
        if self.is_v6 { self.v6.counters() } else { self.v4.counters() }
    }

    fn hidden(&mut self, proto: u8, client: SocketAddr, frontend: SocketAddr) -> Option<Hidden> {
        if client.is_ipv6() {
            self.v6.hidden(proto, client, frontend)
        } else {
            self.v4.hidden(proto, client, frontend)
        }
    }
}
