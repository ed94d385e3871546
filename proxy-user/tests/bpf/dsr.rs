//! Packets between nodes (DSR): encapsulated where a client outside arrives, decapsulated on the node of the endpoint.

use std::net::{IpAddr, SocketAddr};

use aya::maps::{HashMap, MapData};
use proxy_common::backend::{BACKEND_ACTIVE, BACKEND_GONE, BACKEND_LOCAL, BACKEND_TUNNEL_SHIFT};
use proxy_common::config::CONFIG_DSR;
use proxy_common::conntrack::{ASSURED, FIN_BACKEND, FIN_CLIENT, SEEN_REPLY};
use proxy_common::flow::{STATE_DSR, STATE_SNAT, tunnel_of};
use proxy_common::node::{NODE_ADDR_INTERNAL, NODE_ADDR_OWN, NODE_ADDR_PORTS};
use proxy_common::reason::Reason;
use proxy_common::select::{Algorithm, tunnel_tag};
use proxy_common::service::{KIND_LOAD_BALANCER, SERVICE_DSR, ServiceEntry};
use proxy_common::{maglev, map_names as names};
use proxy_core::plan::BackendAddress;
use proxy_core::plan::maglev::{Member, length, packed, signature};
use proxy_core::store::{MaglevRow, MaglevTable, TunnelRow, Write};

use crate::Scenario;
use crate::snat::{by_gateway, forget};
use proxy_testbed::Family;
use proxy_testbed::harness::{DROP, Harness, Hook, NEXT, REDIRECT, Seen, Service};
use proxy_testbed::node::{know, node_addr, uplink};
use proxy_testbed::packet::{ACK, ETHERNET, FIN, Packet, SCTP, SYN, TCP, UDP, ends};

pub const SCENARIOS: [Scenario; 6] = [
    Scenario { name: "packets of clients outside are encapsulated", flows: 256, test: encapsulated },
    Scenario { name: "connections that need no DSR get SNAT", flows: 256, test: others },
    Scenario {
        name: "a packet that is too large for encapsulation is answered with its MTU",
        flows: 256,
        test: too_big,
    },
    Scenario { name: "encapsulated packets are taken out", flows: 256, test: taken_out },
    Scenario { name: "connections in mid-flow have a second chance", flows: 256, test: second_chance },
    Scenario {
        name: "encapsulated packets of unknown senders and for unknown endpoints are dropped",
        flows: 256,
        test: refused,
    },
];

pub const ID: u32 = 7;
/// Number of the other node in `tunnels`.
pub const NUMBER: u32 = 5;

/// Returns the address of another node.
pub fn other(family: Family) -> IpAddr {
    match family {
        Family::V4 => "10.9.0.2".parse().unwrap(),
        Family::V6 => "fd00:9::2".parse().unwrap(),
    }
}

/// Writes the `NODE_ADDR_*` bits of an address.
fn set_node_addr(harness: &Harness, addr: IpAddr, bits: u32) {
    match addr {
        IpAddr::V4(addr) => {
            let map = aya::maps::Map::HashMap(harness.map(names::NODE_ADDRS));
            let mut map: HashMap<MapData, [u8; 4], u32> = map.try_into().unwrap();
            map.insert(addr.octets(), bits, 0).unwrap();
        }
        IpAddr::V6(addr) => {
            let map = aya::maps::Map::HashMap(harness.map(names::NODE_ADDRS6));
            let mut map: HashMap<MapData, [u8; 16], u32> = map.try_into().unwrap();
            map.insert(addr.octets(), bits, 0).unwrap();
        }
    }
}

/// Sets up a node that knows another one, whose address is of the family `outer`.
pub fn begin(family: Family, outer: Family, harness: &mut Harness) {
    for known in [family, outer] {
        know(known, harness);
        set_node_addr(harness, node_addr(known), NODE_ADDR_PORTS | NODE_ADDR_OWN | NODE_ADDR_INTERNAL);
        set_node_addr(harness, other(known), NODE_ADDR_INTERNAL);
    }
    harness.configure(|config| config.flags |= CONFIG_DSR);
    let row = TunnelRow { addr: other(outer), source: node_addr(outer) };
    harness.write(&[Write::Tunnel(NUMBER, Some(row))]);
}

/// Undoes [`begin`], for the next test with this harness.
pub fn end(harness: &mut Harness) {
    harness.write(&[Write::Tunnel(NUMBER, None)]);
    harness.configure(|config| config.flags &= !CONFIG_DSR);
    for family in Family::BOTH {
        set_node_addr(harness, node_addr(family), NODE_ADDR_PORTS);
    }
    forget(harness);
}

/// Serves a load balancer's address with one endpoint, which has these flags; returns both.
pub fn serve(family: Family, harness: &mut Harness, proto: u8, flags: u32) -> (SocketAddr, SocketAddr) {
    let (orig_dst, pod) = (family.frontend(3, 80), family.pod(1, 8080));
    let service = Service { flags: SERVICE_DSR, ..Service::new(ID, proto, orig_dst, &[pod]) };
    let mut writes = service.writes();
    for write in &mut writes {
        match write {
            Write::Backend(_, row) => row.flags = flags,
            Write::Service(_, entry) => *entry = ServiceEntry { kind: KIND_LOAD_BALANCER, ..*entry },
            _ => {}
        }
    }
    harness.write(&writes);
    (orig_dst, pod)
}

pub fn tag(pod: SocketAddr) -> [u8; 2] {
    match pod.ip() {
        IpAddr::V4(addr) => tunnel_tag(&addr.octets(), pod.port()),
        IpAddr::V6(addr) => tunnel_tag(&addr.octets(), pod.port()),
    }
    .to_be_bytes()
}

/// Returns the frame with its packet encapsulated in another packet from node to node.
pub fn wrapped(frame: &[u8], src: IpAddr, dst: IpAddr, tag: [u8; 2]) -> Vec<u8> {
    wrapped_with(frame, src, dst, tag, 64)
}

/// Like `wrapped`, with another time to live or hop limit.
fn wrapped_with(frame: &[u8], src: IpAddr, dst: IpAddr, [t0, t1]: [u8; 2], hops: u8) -> Vec<u8> {
    let (link, inner) = frame.split_at(ETHERNET);
    let mut bytes = link.to_vec();
    let proto = if inner[0] >> 4 == 4 { 4 } else { 41 };
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            bytes[12..14].copy_from_slice(&[0x08, 0x00]);
            let [l0, l1] = (inner.len() as u16 + 20).to_be_bytes();
            let mut header = [0x45, 0, l0, l1, t0, t1, 0x40, 0, hops, proto, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            header[12..16].copy_from_slice(&src.octets());
            header[16..].copy_from_slice(&dst.octets());
            let words = header.chunks(2).map(|pair| u64::from(u16::from_ne_bytes([pair[0], pair[1]])));
            let check = !proxy_common::csum::fold(words.sum());
            header[10..12].copy_from_slice(&check.to_ne_bytes());
            bytes.extend(header);
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            bytes[12..14].copy_from_slice(&[0x86, 0xdd]);
            let [l0, l1] = (inner.len() as u16).to_be_bytes();
            bytes.extend([0x60, 0, t0, t1, l0, l1, proto, hops]);
            bytes.extend(src.octets().iter().chain(&dst.octets()));
        }
        _ => panic!("one family"),
    }
    bytes.extend(inner);
    bytes
}

pub fn comes_in(harness: &mut Harness, bytes: &[u8]) -> Seen {
    harness.run_on(Hook::Ingress, bytes, Some(uplink()))
}

fn encapsulated(family: Family, harness: &mut Harness) {
    for outer in Family::BOTH {
        begin(family, outer, harness);
        for proto in [TCP, UDP] {
            let (orig_dst, pod) = serve(family, harness, proto, NUMBER << BACKEND_TUNNEL_SHIFT);
            let client = family.client(1, 40_000);
            let segments = if proto == TCP { vec![SYN, ACK, ACK, ACK | FIN] } else { vec![0, 0] };
            for flags in segments {
                let packet = Packet { flags, ..Packet::new(proto, client, orig_dst) };
                let seen = comes_in(harness, &packet.bytes());
                assert_eq!(seen.verdict, REDIRECT, "{packet:?}: {:?}", harness.reasons());
                let inner = by_gateway(packet.bytes());
                assert_eq!(seen.packet, wrapped(&inner, node_addr(outer), other(outer), tag(pod)));
                let flow = harness.flow(family);
                assert_eq!((flow.backend, flow.source, tunnel_of(flow.state)), (pod, client, NUMBER));
                assert_eq!(flow.state & (STATE_DSR | STATE_SNAT | ASSURED), STATE_DSR, "{:x}", flow.state);
                let replied = if flags & (ACK | SYN) == ACK { SEEN_REPLY } else { 0 };
                assert_eq!(flow.state & SEEN_REPLY, replied, "an ACK stands for an answer");
                let fins = if flags & FIN == 0 { 0 } else { FIN_CLIENT | FIN_BACKEND };
                assert_eq!(flow.state & (FIN_CLIENT | FIN_BACKEND), fins, "a FIN stands for both");
            }
            harness.forget_flows();
        }
        assert_eq!(harness.reasons(), []);
        // The node of the endpoint is no longer known.
        let (orig_dst, _) = serve(family, harness, TCP, (NUMBER + 1) << BACKEND_TUNNEL_SHIFT);
        let syn = Packet::tcp(SYN, family.client(1, 40_000), orig_dst);
        assert_eq!(comes_in(harness, &syn.bytes()).verdict, DROP);
        assert_eq!(harness.reasons(), [(Reason::NoRoute, 1)]);
        harness.forget_flows();
        harness.zero_reasons();
        end(harness);
    }
}

/// Connections that use SNAT, as without DSR.
fn others(family: Family, harness: &mut Harness) {
    begin(family, family, harness);
    let client = family.client(1, 40_000);
    let is_snat = |harness: &mut Harness, client: SocketAddr, orig_dst, pod, proto| {
        let packet = Packet { flags: SYN, ..Packet::new(proto, client, orig_dst) };
        let seen = comes_in(harness, &packet.bytes());
        assert_eq!((seen.verdict, harness.reasons()), (REDIRECT, vec![]));
        let (source, to) = ends(&seen.packet);
        assert_eq!((source.ip(), to), (node_addr(family), pod));
        harness.forget_flows();
    };
    // The endpoint's node has no number, the checksum of the protocol covers the whole packet, or the client is a node.
    let (orig_dst, pod) = serve(family, harness, TCP, 0);
    is_snat(harness, client, orig_dst, pod, TCP);
    let (orig_dst, pod) = serve(family, harness, SCTP, NUMBER << BACKEND_TUNNEL_SHIFT);
    is_snat(harness, client, orig_dst, pod, SCTP);
    let (orig_dst, pod) = serve(family, harness, TCP, NUMBER << BACKEND_TUNNEL_SHIFT);
    is_snat(harness, SocketAddr::new(other(family), 40_000), orig_dst, pod, TCP);
    end(harness);
}

fn too_big(family: Family, harness: &mut Harness) {
    for (outer, header) in [(Family::V4, 20), (Family::V6, 40)] {
        begin(family, outer, harness);
        let (orig_dst, _) = serve(family, harness, UDP, NUMBER << BACKEND_TUNNEL_SHIFT);
        let packet = Packet::udp(family.client(1, 40_000), orig_dst);
        let headers = if family == Family::V4 { 28 } else { 48 };
        // The MTU of the uplink is 1,400 bytes.
        let longest = 1_400 - header - headers;
        assert_eq!(
            comes_in(harness, &packet.clone().payload(longest).bytes()).packet.len(),
            1_400 + ETHERNET
        );
        let seen = comes_in(harness, &packet.payload(longest + 1).bytes());
        assert_eq!(seen.verdict, REDIRECT);
        let mtu = if family == Family::V4 {
            let icmp = &seen.packet[ETHERNET + 20..];
            u32::from(u16::from_be_bytes([icmp[6], icmp[7]]))
        } else {
            let icmp = &seen.packet[ETHERNET + 40..];
            u32::from_be_bytes([icmp[4], icmp[5], icmp[6], icmp[7]])
        };
        assert_eq!(mtu as usize, 1_400 - header, "what is left for the packet");
        assert_eq!(harness.reasons(), [(Reason::PacketTooBig, 1)]);
        harness.forget_flows();
        harness.zero_reasons();
        end(harness);
    }
}

fn taken_out(family: Family, harness: &mut Harness) {
    for outer in Family::BOTH {
        begin(family, outer, harness);
        for proto in [TCP, UDP] {
            let (orig_dst, pod) = serve(family, harness, proto, BACKEND_LOCAL);
            let client = family.client(1, 40_000);
            // Packets in mid-connection are translated, too: each packet carries all that is needed.
            for flags in if proto == TCP { vec![ACK, SYN, ACK] } else { vec![0, 0] } {
                let packet = Packet { flags, ..Packet::new(proto, client, orig_dst) };
                let bytes = wrapped(&packet.bytes(), other(outer), node_addr(outer), tag(pod));
                let seen = comes_in(harness, &bytes);
                assert_eq!((seen.verdict, harness.reasons()), (NEXT, vec![]), "{packet:?}");
                assert_eq!(seen.packet[12..], packet.to(pod).bytes()[12..]);
                let flow = harness.flow(family);
                assert_eq!((flow.backend, flow.source, tunnel_of(flow.state)), (pod, client, 0));
                assert_eq!(flow.state & (STATE_DSR | STATE_SNAT), STATE_DSR);
            }
            let reply = Packet { flags: ACK, ..Packet::new(proto, pod, client) };
            let seen = harness.run(Hook::Egress, &reply.bytes());
            assert_eq!(seen.packet, reply.from(orig_dst).bytes(), "straight to the client");
            harness.forget_flows();
        }
        end(harness);
    }
}

/// The current Maglev table leads to endpoint 1, the previous one to endpoint 2.
fn second_chance(family: Family, harness: &mut Harness) {
    let outer = family;
    begin(family, outer, harness);
    let (own, node, client) = (node_addr(outer), other(outer), family.client(1, 40_000));
    let (orig_dst, pods) = (family.frontend(3, 80), [family.pod(1, 8080), family.pod(2, 8080)]);
    let ack = Packet { flags: ACK, ..Packet::tcp(SYN, client, orig_dst) };
    let syn = Packet::tcp(SYN, client, orig_dst);
    let here = (BACKEND_LOCAL, BACKEND_ACTIVE);
    let elsewhere = (NUMBER << BACKEND_TUNNEL_SHIFT, BACKEND_ACTIVE);
    let sent = |packet: &Packet, pod, hops| wrapped_with(&packet.bytes(), node, own, tag(pod), hops);
    let goes_on = |bytes: Vec<u8>, hops| wrapped_with(&by_gateway(bytes), own, node, tag(pods[1]), hops);

    // The new endpoint is here, the old one on the other node. A SYN goes to the new one, whether it arrives encapsulated or not.
    old_and_new(harness, orig_dst, pods, [here, elsewhere]);
    for bytes in [syn.bytes(), sent(&syn, pods[0], 60)] {
        let seen = comes_in(harness, &bytes);
        assert_eq!((seen.verdict, ends(&seen.packet).1), (NEXT, pods[0]));
        harness.forget_flows();
    }
    // A segment in mid-connection follows its flow, if this node has one.
    assert_eq!(comes_in(harness, &syn.bytes()).verdict, NEXT);
    assert_eq!(ends(&comes_in(harness, &ack.bytes()).packet).1, pods[0]);
    harness.forget_flows();
    // Without a flow, the segment goes to the node of the old endpoint; the TTL tells how often it was encapsulated.
    for (connections, bytes, hops) in [(1, ack.bytes(), 128), (2, sent(&ack, pods[0], 127), 160)] {
        for _ in 0..2 {
            let seen = comes_in(harness, &bytes);
            let counted = vec![(Reason::SecondChance, connections)];
            assert_eq!((seen.verdict, harness.reasons()), (REDIRECT, counted), "once for each connection");
            assert_eq!(seen.packet, goes_on(ack.bytes(), hops));
        }
        assert_eq!(tunnel_of(harness.flow(family).state), NUMBER);
        harness.forget_flows();
    }
    // A packet that was encapsulated four times, or is of a connection that its first node knows, goes to no further node, even if
    // a flow leads to another node.
    for (has_flow, hops) in [(false, 220), (true, 220), (false, 60)] {
        if has_flow {
            assert_eq!(comes_in(harness, &ack.bytes()).verdict, REDIRECT);
        }
        let seen = comes_in(harness, &sent(&ack, pods[0], hops));
        assert_eq!((seen.verdict, ends(&seen.packet).1), (NEXT, pods[0]));
        harness.forget_flows();
    }
    assert_eq!(harness.reasons(), [(Reason::SecondChance, 3)]);
    harness.zero_reasons();
    // The old endpoint is here and was removed from the Service: it keeps its connections, but gets no new ones.
    old_and_new(harness, orig_dst, pods, [elsewhere, (BACKEND_LOCAL, BACKEND_GONE)]);
    for hops in [60, 220] {
        let seen = comes_in(harness, &sent(&ack, pods[1], hops));
        assert_eq!((seen.verdict, ends(&seen.packet).1), (NEXT, pods[1]));
        harness.forget_flows();
    }
    // The first node has followed a flow of its own to the old endpoint: the current one has its chance before it.
    let seen = comes_in(harness, &sent(&ack, pods[1], 127));
    let current = wrapped_with(&by_gateway(ack.bytes()), own, node, tag(pods[0]), 160);
    assert_eq!((seen.verdict, seen.packet), (REDIRECT, current));
    harness.forget_flows();
    harness.zero_reasons();
    assert_eq!(comes_in(harness, &sent(&syn, pods[1], 60)).verdict, DROP);
    assert_eq!(harness.reasons(), [(Reason::TunnelNoEndpoint, 1)]);
    harness.zero_reasons();
    // The drain period is over.
    old_and_new(harness, orig_dst, pods, [here, elsewhere]);
    let table = MaglevTable { base: 1, words: length(1), signature: 0 };
    harness.write(&[Write::MaglevIndex(maglev::index(ID, false), table.into())]);
    assert_eq!(ends(&comes_in(harness, &ack.bytes()).packet).1, pods[0]);
    harness.forget_flows();
    end(harness);
}

/// Serves a Service with the algorithm Maglev. The two endpoints have these flags and states; the current table leads to
/// the first one, the previous table to the second.
fn old_and_new(harness: &mut Harness, orig_dst: SocketAddr, pods: [SocketAddr; 2], facts: [(u32, u8); 2]) {
    let service = Service { flags: SERVICE_DSR, ..Service::new(ID, TCP, orig_dst, &pods) };
    let mut facts = facts.into_iter();
    let mut writes = service.writes();
    for write in &mut writes {
        match write {
            Write::Backend(_, row) => (row.flags, row.state) = facts.next().unwrap(),
            Write::Service(_, entry) => {
                *entry =
                    ServiceEntry { kind: KIND_LOAD_BALANCER, algorithm: Algorithm::Maglev as u8, ..*entry };
            }
            _ => {}
        }
    }
    let mut tables = [MaglevTable::default(); 2];
    for ((table, (id, at)), base) in tables.iter_mut().zip(&service.backends).zip([1, 100]) {
        let at = BackendAddress { address: at.ip(), port: at.port() };
        let members = [Member { at, weight: 1, id: *id }];
        *table = MaglevTable { base, words: length(1), signature: signature(&members) };
        writes.push(Write::MaglevTable(base, packed(&members)));
    }
    let [current, previous] = tables;
    writes
        .push(Write::MaglevIndex(maglev::index(ID, false), MaglevRow { current, previous: vec![previous] }));
    harness.write(&writes);
}

fn refused(family: Family, harness: &mut Harness) {
    begin(family, family, harness);
    let (orig_dst, pod) = serve(family, harness, TCP, BACKEND_LOCAL);
    let (own, node) = (node_addr(family), other(family));
    assert_eq!(Family::of(own), family);
    let stranger = family.client(9, 0).ip();
    let syn = Packet::tcp(SYN, family.client(1, 40_000), orig_dst);
    let sent = |src, packet: &Packet, tag| wrapped(&packet.bytes(), src, own, tag);
    // The sender is not a node, or it is this node.
    for src in [stranger, own] {
        let bytes = sent(src, &syn, tag(pod));
        assert_eq!(comes_in(harness, &bytes), Seen { verdict: NEXT, packet: bytes });
    }
    assert_eq!(harness.reasons(), [(Reason::ForeignTunnel, 2)]);
    // The tag matches no endpoint, or an endpoint on another node.
    let [first, second] = tag(pod);
    assert_eq!(comes_in(harness, &sent(node, &syn, [first, !second])).verdict, DROP);
    serve(family, harness, TCP, NUMBER << BACKEND_TUNNEL_SHIFT);
    assert_eq!(comes_in(harness, &sent(node, &syn, tag(pod))).verdict, DROP);
    assert_eq!(harness.reasons(), [(Reason::ForeignTunnel, 2), (Reason::TunnelNoEndpoint, 2)]);
    assert!(harness.flows(family).is_empty());
    serve(family, harness, TCP, BACKEND_LOCAL);
    // A packet to no Service passes from every sender: it may be from a CNI plugin's tunnel.
    for src in [stranger, node] {
        let bytes = sent(src, &syn.to(family.pod(3, 80)), tag(pod));
        assert_eq!(comes_in(harness, &bytes), Seen { verdict: NEXT, packet: bytes });
    }
    // All encapsulated packets pass if no Service has or had DSR.
    harness.configure(|config| config.flags &= !CONFIG_DSR);
    let bytes = sent(node, &syn, tag(pod));
    assert_eq!(comes_in(harness, &bytes), Seen { verdict: NEXT, packet: bytes });
    // A packet whose flow leads to another node is sent there only once.
    harness.configure(|config| config.flags |= CONFIG_DSR);
    serve(family, harness, TCP, NUMBER << BACKEND_TUNNEL_SHIFT);
    assert_eq!(comes_in(harness, &syn.bytes()).verdict, REDIRECT);
    serve(family, harness, TCP, BACKEND_LOCAL);
    let ack = Packet { flags: ACK, ..syn };
    assert_eq!(comes_in(harness, &sent(node, &ack, tag(pod))).verdict, REDIRECT);
    let seen = comes_in(harness, &wrapped_with(&ack.bytes(), node, own, tag(pod), 255));
    assert_eq!((seen.verdict, ends(&seen.packet).1), (NEXT, pod));
    // Such a packet leaves no state for the next one: fragments of foreign packets are not remembered.
    harness.zero_reasons();
    let others =
        Packet::udp(family.client(1, 40_000), SocketAddr::new(stranger, 53)).payload(64).fragments(48, 9);
    for number in 1..=4 {
        comes_in(harness, &wrapped_with(&ack.bytes(), node, own, tag(pod), 255));
        for fragment in &others {
            assert_eq!(comes_in(harness, fragment), Seen { verdict: NEXT, packet: fragment.clone() });
        }
        assert_eq!(harness.reasons(), [(Reason::Fragment, number * (others.len() as u64 - 1))]);
    }
    harness.zero_reasons();
    end(harness);
}
