//! Clients outside, node ports, policies, and packets that are forwarded with an address of the node (SNAT).

use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};

use aya::maps::lpm_trie::Key;
use aya::maps::{HashMap, LpmTrie, MapData};
use proxy_common::Address;
use proxy_common::affinity::{AffinityEntry, AffinityKey};
use proxy_common::backend::{BACKEND_IN_CLUSTER, BACKEND_LOCAL};
use proxy_common::config::{CONFIG_OTHER_PROXY, CONFIG_SNAT_MOVED};
use proxy_common::config::{PortRange, SNAT_PORTS};
use proxy_common::conntrack::{ASSURED, SEEN_REPLY, SEQ_BACKEND, SEQ_CLIENT};
use proxy_common::flow::{STATE_SNAT, STATE_SYN, STATE_USED};
use proxy_common::map_names as names;
use proxy_common::node::{NODE_ADDR_OWN, NODE_ADDR_PORTS, NodeEntry};
use proxy_common::prefilter::Role;
use proxy_common::reason::Reason;
use proxy_common::service::{
    KIND_ADDRESS, KIND_NODE_PORT, SCOPE_EXTERNAL, SCOPE_INTERNAL, SERVICE_DROP_WHEN_EMPTY, SERVICE_SCOPED,
    SERVICE_SOURCE_RANGES, ServiceEntry,
};
use proxy_common::source_range::{SET_BITS, SourceRangeKey};
use proxy_core::store::{FrontendKey, Table, Write};

use crate::Scenario;
use proxy_testbed::Family;
use proxy_testbed::harness::{DROP, HZ, Harness, Hook, NEXT, REDIRECT, Seen, Service, filter};
use proxy_testbed::node::{OtherWay, know, node_addr, uplink};
use proxy_testbed::packet::{ACK, ETHERNET, FIN, Packet, RST, SCTP, SYN, TCP, UDP, correct, ends, verify};

pub const SCENARIOS: [Scenario; 16] = [
    Scenario {
        name: "a client outside reaches a backend elsewhere and back",
        flows: 256,
        test: there_and_back,
    },
    Scenario { name: "flows on source ports of the previous ranges continue", flows: 256, test: moved_ports },
    Scenario { name: "ICMP errors about forwarded packets are translated", flows: 256, test: errors },
    Scenario { name: "the client's address is kept where it can be", flows: 256, test: kept },
    Scenario { name: "a client that is its own backend gets SNAT", flows: 256, test: hairpin },
    Scenario { name: "clients outside have an entry of their own", flows: 256, test: scopes },
    Scenario { name: "source ranges", flows: 256, test: source_ranges },
    Scenario {
        name: "unused addresses are dropped and undefined ports are refused",
        flows: 256,
        test: nothing_there,
    },
    Scenario { name: "connections of another proxy pass in mid-connection", flows: 256, test: old },
    Scenario { name: "a client stays with its backend", flows: 256, test: affinity },
    Scenario { name: "source ports run out, and are shared between backends", flows: 256, test: exhausted },
    Scenario { name: "a flood of SYNs does not keep the source ports", flows: 256, test: flooded },
    Scenario {
        name: "a source port is in quarantine after both ends have closed",
        flows: 256,
        test: quarantined,
    },
    Scenario {
        name: "a source port stays in quarantine if its client connects again",
        flows: 256,
        test: quarantined_on_reuse,
    },
    Scenario { name: "time to live, size, and no route", flows: 256, test: limits },
    Scenario { name: "a changed route is used after one tick", flows: 256, test: changed },
];

const ID: u32 = 7;
const PORT: u16 = 30_080;
const GATEWAY: [u8; 6] = [2, 0, 0, 0, 0, 0x99];
pub const OWN: [u8; 6] = [2, 0, 0, 0, 0, 0x11];

fn trie<K: aya::Pod>(harness: &Harness, name: &str) -> LpmTrie<MapData, K, u32> {
    aya::maps::Map::LpmTrie(harness.map(name)).try_into().unwrap()
}

/// Resets the node entries and the SNAT ports, for the next test with this harness.
pub fn forget(harness: &Harness) {
    harness.array::<NodeEntry<[u8; 4]>>(names::NODE).set(0, NodeEntry::UNKNOWN, 0).unwrap();
    harness.array::<NodeEntry<[u8; 16]>>(names::NODE6).set(0, NodeEntry::UNKNOWN, 0).unwrap();
    ports(harness, (61_000, 65_535));
}

fn ports(harness: &Harness, range: (u16, u16)) {
    harness.configure(|config| config.snat = [PortRange::new(range.0, range.1), PortRange::default()]);
}

/// Serves a node port with these endpoints, which have these flags; returns its address and port.
pub fn node_port(family: Family, harness: &mut Harness, proto: u8, pods: &[(SocketAddr, u32)]) -> SocketAddr {
    let orig_dst = SocketAddr::new(node_addr(family), PORT);
    let addrs: Vec<_> = pods.iter().map(|(pod, _)| *pod).collect();
    let service = Service::new(ID, proto, orig_dst, &addrs);
    let mut writes = service.writes();
    for write in &mut writes {
        if let Write::Backend(id, row) = write {
            let at = service.backends.iter().position(|(other, _)| other == id).unwrap();
            row.flags = pods[at].1;
        }
    }
    writes.pop();
    let key = node_port_key(family, proto);
    writes
        .push(Write::Service(key, ServiceEntry { tag: key.tag(), kind: KIND_NODE_PORT, ..service.entry() }));
    harness.write(&writes);
    orig_dst
}

/// Returns the key of the node port.
pub fn node_port_key(family: Family, proto: u8) -> FrontendKey {
    let addr = if family == Family::V4 { [0; 4].into() } else { [0; 16].into() };
    FrontendKey { addr, port: PORT, proto, scope: SCOPE_INTERNAL }
}

/// Returns the packet as it is forwarded to the gateway.
pub fn sent_on(packet: &Packet) -> Vec<u8> {
    by_gateway(packet.bytes())
}

pub fn by_gateway(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes[..6].copy_from_slice(&GATEWAY);
    bytes[6..12].copy_from_slice(&OWN);
    let ttl = ETHERNET + if bytes[ETHERNET] >> 4 == 4 { 8 } else { 7 };
    bytes[ttl] -= 1;
    correct(&mut bytes);
    bytes
}

pub fn comes_in(harness: &mut Harness, packet: &Packet) -> Seen {
    harness.run_on(Hook::Ingress, &packet.bytes(), Some(uplink()))
}

/// Runs a packet that must be forwarded; returns its new source.
fn goes_on(harness: &mut Harness, packet: &Packet, to: SocketAddr) -> SocketAddr {
    let seen = comes_in(harness, packet);
    assert_eq!(seen.verdict, REDIRECT, "{packet:?}: {:?}", harness.reasons());
    verify(&seen.packet).unwrap();
    let (source, _) = ends(&seen.packet);
    assert_eq!(seen.packet, sent_on(&packet.from(source).to(to)));
    source
}

/// Whether the port is an SNAT port of the default setting.
fn is_snat_port(port: u16) -> bool {
    SNAT_PORTS.iter().any(|range| range.contains(port))
}

fn there_and_back(family: Family, harness: &mut Harness) {
    know(family, harness);
    for proto in [TCP, UDP, SCTP] {
        let pod = family.pod(1, 8080);
        let orig_dst = node_port(family, harness, proto, &[(pod, 0)]);
        let client = family.client(1, 40_000);
        let first = Packet { flags: SYN, ..Packet::new(proto, client, orig_dst) };
        let source = goes_on(harness, &first, pod);
        assert_eq!(source.ip(), node_addr(family));
        assert!(is_snat_port(source.port()), "{source}");
        let reply = Packet { flags: SYN | ACK, ..Packet::new(proto, pod, source) };
        // A frontend may have the same prefilter bit as the SNAT port by chance.
        harness.write(&[filter(Role::Frontend, source, proto)]);
        let seen = comes_in(harness, &reply);
        assert_eq!(seen.verdict, REDIRECT);
        assert_eq!(seen.packet, sent_on(&reply.from(orig_dst).to(client)));
        let more = Packet { flags: ACK, ..first };
        assert_eq!(goes_on(harness, &more, pod), source, "one source for one flow");
        let flow = harness.flows(family).into_iter().find(|flow| flow.proto == proto).unwrap();
        let seq = if proto == TCP { STATE_SYN | SEQ_CLIENT | SEQ_BACKEND } else { 0 };
        let assured = if proto == UDP { 0 } else { ASSURED };
        assert_eq!(flow.state, STATE_USED | STATE_SNAT | SEEN_REPLY | seq | assured);
        // A packet of another host to the SNAT port is no reply.
        let stranger = Packet::new(proto, family.pod(2, 8080), source);
        assert_eq!(comes_in(harness, &stranger).packet, stranger.bytes());
    }
    assert_eq!((harness.reasons(), harness.flows(family).len()), (vec![], 3));
    let stats = harness.stats(ID);
    assert_eq!((stats.connections, stats.packets, stats.reply_packets), (3, 6, 3));
    forget(harness);
}

/// The ranges of SNAT ports change while a flow exists.
fn moved_ports(family: Family, harness: &mut Harness) {
    know(family, harness);
    match node_addr(family) {
        IpAddr::V4(own) => node_address(harness, names::NODE_ADDRS, own.octets()),
        IpAddr::V6(own) => node_address(harness, names::NODE_ADDRS6, own.octets()),
    }
    let (pod, client) = (family.pod(1, 8080), family.client(1, 40_000));
    let orig_dst = node_port(family, harness, TCP, &[(pod, 0)]);
    let first = Packet::tcp(SYN, client, orig_dst);
    let source = goes_on(harness, &first, pod);
    harness.configure(|config| {
        config.flags |= CONFIG_SNAT_MOVED;
        config.snat = [PortRange::new(30_000, 30_100), PortRange::default()];
    });
    let reply = Packet::tcp(SYN | ACK, pod, source);
    let seen = comes_in(harness, &reply);
    assert_eq!((seen.verdict, seen.packet), (REDIRECT, sent_on(&reply.from(orig_dst).to(client))));
    assert_eq!(goes_on(harness, &Packet { flags: ACK, ..first }, pod), source);
    harness.configure(|config| config.flags &= !CONFIG_SNAT_MOVED);
    forget(harness);
}

fn node_address<A: aya::Pod>(harness: &Harness, name: &str, address: A) {
    let mut map: HashMap<_, A, u32> = aya::maps::Map::HashMap(harness.map(name)).try_into().unwrap();
    map.insert(address, NODE_ADDR_PORTS | NODE_ADDR_OWN, 0).unwrap();
}

/// Both ends, and routers on both sides, send ICMP errors.
fn errors(family: Family, harness: &mut Harness) {
    know(family, harness);
    let kind = if family == Family::V4 { [3, 4] } else { [2, 0] };
    let mtu = [0, 0, 5, 0x14];
    for proto in [TCP, UDP, SCTP] {
        let pod = family.pod(1, 8080);
        let orig_dst = node_port(family, harness, proto, &[(pod, 0)]);
        let (client, router) = (family.client(1, 40_000), family.client(200, 0).ip());
        let first = Packet { flags: SYN, ..Packet::new(proto, client, orig_dst) };
        let source = goes_on(harness, &first, pod);
        let (seen, answer) = (first.from(source).to(pod), first.back());
        for (from, becomes) in [(pod.ip(), orig_dst.ip()), (router, router)] {
            let error = |packet: &Packet, from| packet.error(from, kind, mtu, 1000);
            let forwarded = harness.run_on(Hook::Ingress, &error(&seen, from), Some(uplink()));
            assert_eq!(forwarded.verdict, REDIRECT);
            assert_eq!(forwarded.packet, by_gateway(error(&first, becomes)), "about what went to the pod");
        }
        for (from, becomes) in [(client.ip(), source.ip()), (router, router)] {
            let error = |packet: &Packet, from| packet.error(from, kind, mtu, 1000);
            let forwarded = harness.run_on(Hook::Ingress, &error(&answer, from), Some(uplink()));
            assert_eq!(forwarded.verdict, REDIRECT);
            assert_eq!(forwarded.packet, by_gateway(error(&seen.back(), becomes)), "about what the pod sent");
        }
    }
    assert_eq!(harness.reasons(), []);
    forget(harness);
}

fn kept(family: Family, harness: &mut Harness) {
    know(family, harness);
    let (here, elsewhere) = (family.pod(1, 8080), family.pod(2, 8080));
    let orig_dst = node_port(family, harness, TCP, &[(here, BACKEND_LOCAL)]);
    let packet = Packet::tcp(SYN, family.client(1, 40_000), orig_dst);
    // The endpoint is on this node, so its reply passes here.
    let seen = comes_in(harness, &packet);
    assert_eq!((seen.verdict, seen.packet), (NEXT, packet.to(here).bytes()));
    // The client is a pod of this node, so the reply comes back to this node.
    node_port(family, harness, TCP, &[(elsewhere, 0)]);
    let packet = packet.from(family.client(2, 40_000));
    let seen = harness.run(Hook::Ingress, &packet.bytes());
    assert_eq!((seen.verdict, seen.packet), (NEXT, packet.to(elsewhere).bytes()));
    forget(harness);
}

fn hairpin(family: Family, harness: &mut Harness) {
    know(family, harness);
    let pod = family.pod(1, 8080);
    let orig_dst = node_port(family, harness, TCP, &[(pod, BACKEND_LOCAL)]);
    let client = SocketAddr::new(pod.ip(), 40_000);
    let packet = Packet::tcp(SYN, client, orig_dst);
    let seen = harness.run_on(Hook::Ingress, &packet.bytes(), Some(uplink()));
    assert_eq!(seen.verdict, REDIRECT);
    let (source, _) = ends(&seen.packet);
    assert_eq!(source.ip(), node_addr(family), "it would drop a packet from itself");
    let reply = Packet::tcp(SYN | ACK, pod, source);
    let seen = comes_in(harness, &reply);
    assert_eq!(seen.packet, sent_on(&reply.from(orig_dst).to(client)));
    forget(harness);
}

fn scopes(family: Family, harness: &mut Harness) {
    know(family, harness);
    let orig_dst = node_port(family, harness, TCP, &[(family.pod(1, 8080), 0)]);
    let any: IpAddr = if orig_dst.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let inside = FrontendKey { addr: any, port: PORT, proto: TCP, scope: SCOPE_INTERNAL };
    let outside = FrontendKey { scope: SCOPE_EXTERNAL, ..inside };
    let base = ServiceEntry { id: ID, slot_base: ID * 16, kind: KIND_NODE_PORT, ..ServiceEntry::default() };
    harness.write(&[
        Write::Service(outside, ServiceEntry { tag: outside.tag(), flags: SERVICE_DROP_WHEN_EMPTY, ..base }),
        Write::Service(
            inside,
            ServiceEntry { tag: inside.tag(), slot_count: 1, flags: SERVICE_SCOPED, ..base },
        ),
    ]);
    let packet = Packet::tcp(SYN, family.client(1, 40_000), orig_dst);
    assert_eq!(comes_in(harness, &packet).verdict, DROP);
    assert_eq!(harness.refusals(), [(ID, Reason::NoLocalEndpoint, 1)]);
    let seen = harness.run(Hook::Ingress, &packet.bytes());
    assert_eq!((seen.verdict, seen.packet), (NEXT, packet.to(family.pod(1, 8080)).bytes()));
    forget(harness);
}

fn source_ranges(family: Family, harness: &mut Harness) {
    know(family, harness);
    let (frontend, pod) = (family.frontend(1, 80), family.pod(1, 8080));
    let mut service = Service::new(ID, TCP, frontend, &[pod]);
    service.flags = SERVICE_SOURCE_RANGES;
    harness.serve(&[service]);
    let allowed = family.client(1, 40_000);
    let other = ID + 1;
    match allowed.ip() {
        IpAddr::V4(ip) => {
            let key = |set, addr| Key::new(SET_BITS + 32, SourceRangeKey { set, addr });
            let mut map = trie(harness, names::SRC_RANGES);
            map.insert(&key(ID, ip.octets()), 1, 0).unwrap();
            map.insert(&Key::new(SET_BITS, SourceRangeKey { set: other, addr: [0; 4] }), 1, 0).unwrap();
        }
        IpAddr::V6(ip) => {
            let key = |set, addr| Key::new(SET_BITS + 128, SourceRangeKey { set, addr });
            let mut map = trie(harness, names::SRC_RANGES6);
            map.insert(&key(ID, ip.octets()), 1, 0).unwrap();
            map.insert(&Key::new(SET_BITS, SourceRangeKey { set: other, addr: [0; 16] }), 1, 0).unwrap();
        }
    }
    let packet = Packet::tcp(SYN, allowed, frontend);
    assert_eq!(harness.run(Hook::Ingress, &packet.bytes()).packet, packet.to(pod).bytes());
    let refused = packet.from(family.client(2, 40_000));
    assert_eq!(
        harness.run(Hook::Ingress, &refused.bytes()).verdict,
        DROP,
        "the range of another set does not count"
    );
    assert_eq!(harness.refusals(), [(ID, Reason::SourceNotAllowed, 1)]);
    forget(harness);
}

fn nothing_there(family: Family, harness: &mut Harness) {
    know(family, harness);
    let frontend = family.frontend(1, 80);
    harness.serve(&[Service::new(ID, TCP, frontend, &[family.pod(1, 8080)])]);
    let key = FrontendKey { addr: frontend.ip(), port: 0, proto: 0, scope: SCOPE_INTERNAL };
    let entry = ServiceEntry { tag: key.tag(), kind: KIND_ADDRESS, ..ServiceEntry::default() };
    harness.write(&[Write::Service(key, entry)]);
    let packet = Packet::tcp(SYN, family.client(1, 40_000), family.frontend(1, 81));
    let seen = harness.run(Hook::Ingress, &packet.bytes());
    assert_eq!((seen.verdict, seen.packet), (REDIRECT, packet.unreachable(usize::MAX)));
    assert_eq!(harness.run(Hook::Ingress, &packet.to(family.frontend(2, 80)).bytes()).verdict, DROP);
    assert_eq!(harness.reasons(), [(Reason::UnallocatedAddress, 1), (Reason::UndefinedPort, 1)]);
    harness.write(&[Write::NoService(key)]);
    forget(harness);
}

/// Without the setting, a packet in mid-connection creates a flow, as after a restart of the machine. With it, the packet
/// is left to netfilter, unless its flow is known.
fn old(family: Family, harness: &mut Harness) {
    know(family, harness);
    let (frontend, pod) = (family.frontend(1, 80), family.pod(1, 8080));
    harness.serve(&[Service::new(ID, TCP, frontend, &[pod])]);
    let middle = Packet::tcp(ACK, family.client(1, 40_000), frontend);
    let seen = harness.run(Hook::Ingress, &middle.bytes());
    assert_eq!((seen.verdict, ends(&seen.packet).1), (NEXT, pod));

    let flags = harness.configure(|config| config.flags |= CONFIG_OTHER_PROXY).flags;
    let unknown = Packet::tcp(ACK, family.client(1, 40_001), frontend);
    let seen = harness.run(Hook::Ingress, &unknown.bytes());
    assert_eq!((seen.verdict, ends(&seen.packet).1), (NEXT, frontend), "it is translated");
    let nowhere = unknown.to(family.frontend(1, 81));
    assert_eq!(harness.run(Hook::Ingress, &nowhere.bytes()).verdict, NEXT, "it is refused");
    let seen = harness.run(Hook::Ingress, &middle.bytes());
    assert_eq!(ends(&seen.packet).1, pod, "a known flow is left");
    let begins = Packet::tcp(SYN, family.client(1, 40_002), frontend);
    let seen = harness.run(Hook::Ingress, &begins.bytes());
    assert_eq!(ends(&seen.packet).1, pod, "a new connection is left");
    let message = Packet::udp(family.client(1, 40_003), frontend);
    harness.serve(&[Service::new(ID + 1, UDP, frontend, &[pod])]);
    assert_eq!(ends(&harness.run(Hook::Ingress, &message.bytes()).packet).1, pod, "UDP begins nothing");
    harness.configure(|config| config.flags = flags);
    forget(harness);
}

fn affinity(family: Family, harness: &mut Harness) {
    know(family, harness);
    let pods: Vec<_> = (1..=8).map(|n| (family.pod(n, 8080), BACKEND_IN_CLUSTER | BACKEND_LOCAL)).collect();
    let orig_dst = node_port(family, harness, TCP, &pods);
    let any: IpAddr = if orig_dst.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let key = FrontendKey { addr: any, port: PORT, proto: TCP, scope: SCOPE_INTERNAL };
    let entry = ServiceEntry {
        tag: key.tag(),
        id: ID,
        slot_base: ID * 16,
        slot_count: 8,
        affinity_secs: 10,
        kind: KIND_NODE_PORT,
        ..ServiceEntry::default()
    };
    harness.write(&[Write::Service(key, entry)]);
    let mut port = 2000;
    let mut connect = |harness: &mut Harness| {
        port += 1;
        let seen = comes_in(harness, &Packet::tcp(SYN, family.client(1, port), orig_dst));
        assert_eq!(seen.verdict, NEXT);
        ends(&seen.packet).1
    };
    let first = connect(harness);
    assert!((0..30).all(|_| connect(harness) == first), "seven of eight would go elsewhere");
    // The endpoint is removed: the client gets another one, and keeps it.
    let at = pods.iter().position(|(pod, _)| *pod == first).unwrap();
    let id = ID * 16 + at as u32;
    let table = if orig_dst.is_ipv4() { Table::Backends } else { Table::Backends6 };
    harness.write(&[Write::NoBackend(id, table)]);
    let second = connect(harness);
    assert_ne!(second, first);
    assert!((0..30).all(|_| connect(harness) == second));
    // The client returns after the timeout of an affinity with a third endpoint.
    let third = pods.iter().position(|(pod, _)| *pod != first && *pod != second).unwrap();
    for (age, expected) in [(9 * HZ, pods[third].0), (10 * HZ + HZ / 10, second)] {
        let last_used = harness.now().wrapping_sub(age);
        let entry = AffinityEntry { backend_id: ID * 16 + third as u32, last_used };
        match family.client(1, 0).ip() {
            IpAddr::V4(ip) => write_affinity(harness, names::AFFINITY, ip.octets(), entry),
            IpAddr::V6(ip) => write_affinity(harness, names::AFFINITY6, ip.octets(), entry),
        }
        assert_eq!(connect(harness), expected, "{age}");
    }
    forget(harness);
}

/// Sets when the client last used its affinity.
fn write_affinity<A: Address>(harness: &Harness, name: &str, client: A, entry: AffinityEntry) {
    let map = aya::maps::Map::HashMap(harness.map(name));
    let mut map: HashMap<_, AffinityKey<A>, AffinityEntry> = map.try_into().unwrap();
    let key = AffinityKey { client, service: ID };
    map.insert(key, entry, 0).unwrap();
}

/// Establishes a connection; returns its source after SNAT.
fn established(harness: &mut Harness, syn: &Packet, pod: SocketAddr) -> SocketAddr {
    let source = goes_on(harness, syn, pod);
    comes_in(harness, &Packet { seq: 100, ack: syn.seq + 1, ..Packet::tcp(SYN | ACK, pod, source) });
    let last = Packet { flags: ACK, seq: syn.seq + 1, ack: 101, ..syn.clone() };
    assert_eq!(goes_on(harness, &last, pod), source);
    source
}

fn exhausted(family: Family, harness: &mut Harness) {
    know(family, harness);
    let (pod, other) = (family.pod(1, 8080), family.pod(2, 8080));
    let orig_dst = node_port(family, harness, TCP, &[(pod, 0)]);
    ports(harness, (61_000, 61_001));
    let packet = |n| Packet::tcp(SYN, family.client(n, 40_000), orig_dst);
    let sources = [1, 2].map(|n| established(harness, &packet(n), pod));
    assert_ne!(sources[0], sources[1]);
    assert_eq!(comes_in(harness, &packet(3)).verdict, DROP);
    assert_eq!(harness.refusals(), [(ID, Reason::SnatPortsExhausted, 1)]);
    // Another backend has its own SNAT ports.
    node_port(family, harness, TCP, &[(other, 0)]);
    assert!(sources.contains(&goes_on(harness, &packet(4), other)));
    forget(harness);
}

/// Forged SYNs do not keep the SNAT ports from other clients, and take none from an established connection.
fn flooded(family: Family, harness: &mut Harness) {
    know(family, harness);
    let pod = family.pod(1, 8080);
    let orig_dst = node_port(family, harness, TCP, &[(pod, 0)]);
    ports(harness, (61_000, 61_003));
    let packet = |n| Packet::tcp(SYN, family.client(n, 40_000), orig_dst);
    let own = established(harness, &packet(1), pod);
    for n in 2..40 {
        assert_ne!(goes_on(harness, &packet(n), pod), own, "{n}");
    }
    let last = established(harness, &packet(40), pod);
    for n in 41..80 {
        assert!(![own, last].contains(&goes_on(harness, &packet(n), pod)), "{n}");
    }
    assert_eq!(harness.refusals(), []);
    forget(harness);
}

/// Closes a connection, first by its backend, then by its client. Returns its source, whose port is in quarantine then.
fn closed(harness: &mut Harness, first: Packet, pod: SocketAddr) -> SocketAddr {
    let source = goes_on(harness, &first, pod);
    for flags in [SYN | ACK, FIN | ACK] {
        comes_in(harness, &Packet::tcp(flags, pod, source));
    }
    let last = Packet { flags: FIN | ACK, ..first };
    assert_eq!(goes_on(harness, &last, pod), source);
    source
}

/// A backend that closed first is in `TIME_WAIT`: it would not accept another client's SYN from the same port as new.
fn quarantined(family: Family, harness: &mut Harness) {
    know(family, harness);
    let pod = family.pod(1, 8080);
    let orig_dst = node_port(family, harness, TCP, &[(pod, 0)]);
    ports(harness, (61_000, 61_001));
    // All clients have the same port, so the first choice of the SNAT port is the same, too.
    let syn = |n| Packet::tcp(SYN, family.client(n, 40_000), orig_dst);
    let first = closed(harness, syn(1), pod);
    let second = goes_on(harness, &syn(2), pod);
    assert_ne!(second, first, "the port is in quarantine");
    // If no other port is left, a port in quarantine is used.
    assert_eq!(goes_on(harness, &syn(3), pod), first);
    // The port of a reset connection is not in quarantine.
    comes_in(harness, &Packet::tcp(RST | ACK, pod, first));
    assert_eq!(goes_on(harness, &syn(4), pod), first);
    assert_eq!(harness.refusals(), []);
    forget(harness);
}

/// The client of the closed connection may use its own port again, before and after its flow has expired. The SNAT port
/// towards the backend stays in quarantine, for this client and for the next one.
fn quarantined_on_reuse(family: Family, harness: &mut Harness) {
    know(family, harness);
    ports(harness, (61_000, 61_001));
    for (is_expired, pod) in [(false, family.pod(1, 8080)), (true, family.pod(1, 8081))] {
        let orig_dst = node_port(family, harness, TCP, &[(pod, 0)]);
        let syn = |n| Packet::tcp(SYN, family.client(n, 40_000), orig_dst);
        let first = closed(harness, syn(1), pod);
        let lifetime =
            harness.configure(|config| config.tcp_time_wait *= u32::from(!is_expired)).tcp_time_wait;
        // Some jiffies pass, for the timeout of zero.
        std::thread::sleep(std::time::Duration::from_millis(30));
        for client in [1, 2] {
            let second = goes_on(harness, &syn(client), pod);
            assert_ne!(second, first, "the port is in quarantine, client {client}, expired: {is_expired}");
            // The port of this reset connection is not in quarantine, so it is free for the next client.
            comes_in(harness, &Packet::tcp(RST | ACK, pod, second));
        }
        harness.configure(|config| config.tcp_time_wait = lifetime);
    }
    assert_eq!(harness.refusals(), []);
    forget(harness);
}

fn limits(family: Family, harness: &mut Harness) {
    know(family, harness);
    let pod = family.pod(1, 8080);
    let orig_dst = node_port(family, harness, UDP, &[(pod, 0)]);
    let packet = Packet::udp(family.client(1, 40_000), orig_dst);
    goes_on(harness, &packet, pod);
    let mut old = packet.bytes();
    old[ETHERNET + if orig_dst.is_ipv4() { 8 } else { 7 }] = 1;
    correct(&mut old);
    let seen = harness.run_on(Hook::Ingress, &old, Some(uplink()));
    assert_eq!(seen.verdict, REDIRECT);
    verify(&seen.packet).unwrap();
    let (at, kind) = if orig_dst.is_ipv4() { (ETHERNET + 20, [11, 0]) } else { (ETHERNET + 40, [3, 0]) };
    assert_eq!(seen.packet[at..at + 2], kind);
    let mut big = packet.payload(1500).bytes();
    if orig_dst.is_ipv4() {
        // The stack cuts the packet, which it gets on the loopback device.
        let seen = harness.run_on(Hook::Ingress, &big, Some(uplink()));
        assert_eq!((seen.verdict, &seen.packet[..12]), (REDIRECT, &[0; 12][..]));
        verify(&seen.packet).unwrap();
        // "Don't fragment".
        big[ETHERNET + 6] |= 0x40;
        correct(&mut big);
    }
    let seen = harness.run_on(Hook::Ingress, &big, Some(uplink()));
    assert_eq!(seen.verdict, REDIRECT);
    verify(&seen.packet).unwrap();
    let (icmp, mtu) = if orig_dst.is_ipv4() {
        let icmp = &seen.packet[ETHERNET + 20..];
        (&icmp[..2], u32::from(u16::from_be_bytes([icmp[6], icmp[7]])))
    } else {
        let icmp = &seen.packet[ETHERNET + 40..];
        (&icmp[..2], u32::from_be_bytes([icmp[4], icmp[5], icmp[6], icmp[7]]))
    };
    let kind = if orig_dst.is_ipv4() { [3, 4] } else { [2, 0] };
    assert_eq!((icmp, mtu), (&kind[..], 1400));
    let nowhere = match family {
        Family::V4 => "10.3.0.1:8080".parse().unwrap(),
        Family::V6 => "[fd00:3::1]:8080".parse().unwrap(),
    };
    node_port(family, harness, TCP, &[(nowhere, 0)]);
    assert_eq!(comes_in(harness, &Packet::tcp(SYN, family.client(1, 40_001), orig_dst)).verdict, DROP);
    let counted = [(Reason::NoRoute, 1), (Reason::TtlExceeded, 1), (Reason::PacketTooBig, 1)];
    assert_eq!(harness.reasons(), counted);
    forget(harness);
}

/// A route is cached for one tick, and no longer.
fn changed(family: Family, harness: &mut Harness) {
    // All tests use the same routes of the kernel, which this one changes.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    know(family, harness);
    let pod = family.pod(9, 8080);
    let orig_dst = node_port(family, harness, UDP, &[(pod, 0)]);
    let packet = Packet::new(UDP, family.client(1, 40_000), orig_dst);
    for _ in 0..3 {
        assert_eq!(goes_on(harness, &packet, pod).ip(), node_addr(family));
    }
    let elsewhere = OtherWay::of(pod.ip());
    // Two ticks at the lowest frequency of a kernel's clock (100 Hz).
    std::thread::sleep(std::time::Duration::from_millis(20));
    let seen = comes_in(harness, &packet);
    assert_eq!((seen.verdict, &seen.packet[..6]), (REDIRECT, &OtherWay::MAC[..]));
    drop(elsewhere);
    std::thread::sleep(std::time::Duration::from_millis(20));
    goes_on(harness, &packet, pod);
    assert_eq!(harness.reasons(), []);
    forget(harness);
}
