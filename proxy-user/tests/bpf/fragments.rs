//! Fragmented packets.

use proxy_common::config::SNAT_PORTS;
use proxy_common::reason::Reason;
use proxy_common::service::{KIND_UNMANAGED, SCOPE_INTERNAL, ServiceEntry};
use proxy_core::store::{FrontendKey, Write};

use crate::Scenario;
use crate::snat::forget;
use crate::tables::proto_name;
use proxy_testbed::Family;
use proxy_testbed::harness::{DROP, Harness, Hook, NEXT, REDIRECT, Seen, Service};
use proxy_testbed::node::know;
use proxy_testbed::packet::{ACK, Packet, SYN, TCP, UDP};

pub const SCENARIOS: [Scenario; 7] = [
    Scenario { name: "all fragments go where the first one goes", flows: 256, test: together },
    Scenario { name: "fragments of two packets are kept apart", flows: 256, test: apart },
    Scenario { name: "fragments out of order", flows: 256, test: out_of_order },
    Scenario { name: "fragments that overlap, and tiny ones", flows: 256, test: overlapping },
    Scenario { name: "fragments to a Service without endpoints", flows: 256, test: refused },
    Scenario { name: "fragments of others pass", flows: 256, test: foreign },
    Scenario { name: "fragments of an endpoint that are no reply pass", flows: 256, test: no_reply },
];

const SIZE: usize = 256;

fn packet(family: Family, proto: u8) -> (Service, Packet) {
    let (client, frontend, pod) = (family.client(1, 40_001), family.frontend(1, 53), family.pod(1, 5353));
    let packet = Packet { flags: SYN, ..Packet::new(proto, client, frontend) }.payload(SIZE * 3 + 5);
    (Service::new(7, proto, frontend, &[pod]), packet)
}

fn passes(harness: &mut Harness, hook: Hook, fragment: &[u8], becomes: &[u8], what: &str) {
    let seen = harness.run(hook, fragment);
    assert_eq!(seen.verdict, NEXT, "{what}: {:?}", harness.reasons());
    assert_eq!(seen.packet, becomes, "{what}");
}

fn together(family: Family, harness: &mut Harness) {
    for proto in [TCP, UDP] {
        let (service, packet) = packet(family, proto);
        harness.serve(std::slice::from_ref(&service));
        let pod = service.backends[0].1;
        let answer = Packet { flags: SYN | ACK, ..packet.to(pod).back() };
        for (hook, sent, becomes) in
            [(Hook::Ingress, &packet, packet.to(pod)), (Hook::Egress, &answer, answer.from(service.frontend))]
        {
            let pieces: Vec<_> =
                sent.fragments(SIZE, 9).into_iter().zip(becomes.fragments(SIZE, 9)).collect();
            assert_eq!(pieces.len(), 4);
            for (at, (sent, becomes)) in pieces.iter().enumerate() {
                let what = format!("{}, {hook:?}, fragment {at}", proto_name(proto));
                passes(harness, hook, sent, becomes, &what);
            }
        }
    }
    assert_eq!(harness.reasons(), []);
    let stats = harness.stats(7);
    assert_eq!((stats.connections, stats.packets, stats.reply_packets), (2, 8, 8));
}

fn apart(family: Family, harness: &mut Harness) {
    let (service, one) = packet(family, UDP);
    let frontend = family.frontend(2, 53);
    let other = Service::new(8, UDP, frontend, &[family.pod(2, 5353)]);
    harness.serve(&[service.clone(), other.clone()]);
    let two = one.to(family.frontend(1, 53)).from(family.client(2, 40_001));
    let three = one.to(frontend);
    let pods = [service.backends[0].1, service.backends[0].1, other.backends[0].1, service.backends[0].1];
    // The later fragments of the last packet differ from those of the first in the identification only.
    let packets = [(&one, 9), (&two, 9), (&three, 9), (&one.from(family.client(1, 40_002)), 10)];
    let sent = packets.map(|(packet, id)| packet.fragments(SIZE, id));
    let mut becomes = Vec::new();
    for ((packet, id), pod) in packets.into_iter().zip(pods) {
        becomes.push(packet.to(pod).fragments(SIZE, id));
    }
    for piece in 0..4 {
        for (which, becomes) in becomes.iter().enumerate() {
            passes(
                harness,
                Hook::Ingress,
                &sent[which][piece],
                &becomes[piece],
                &format!("{which}, fragment {piece}"),
            );
        }
    }
    assert_eq!((harness.reasons(), harness.flows(family).len()), (vec![], 4));
}

fn out_of_order(family: Family, harness: &mut Harness) {
    let (service, packet) = packet(family, UDP);
    harness.serve(std::slice::from_ref(&service));
    let (sent, becomes) = (packet.fragments(SIZE, 9), packet.to(service.backends[0].1).fragments(SIZE, 9));
    // The maps do not hold the range of Service addresses yet.
    passes(harness, Hook::Ingress, &sent[2], &sent[2], "a later fragment to an address");
    assert_eq!(harness.reasons(), [(Reason::Fragment, 1)]);
    know(family, harness);
    assert_eq!(harness.run(Hook::Ingress, &sent[2]), Seen { verdict: DROP, packet: sent[2].clone() });
    assert_eq!(harness.reasons(), [(Reason::Fragment, 1), (Reason::FragmentWithoutFirst, 1)]);
    // Another proxy serves an unmanaged address.
    let addr = family.frontend(3, 53).ip();
    let key = FrontendKey { addr, port: 0, proto: 0, scope: SCOPE_INTERNAL };
    let entry = ServiceEntry { tag: key.tag(), kind: KIND_UNMANAGED, ..ServiceEntry::default() };
    harness.write(&[Write::Service(key, entry)]);
    for (at, piece) in packet.to(family.frontend(3, 53)).fragments(SIZE, 9).iter().enumerate() {
        passes(harness, Hook::Ingress, piece, piece, &format!("fragment {at} to an unmanaged address"));
    }
    for at in [0, 3, 1, 2, 2] {
        passes(harness, Hook::Ingress, &sent[at], &becomes[at], &format!("fragment {at}"));
    }
    assert_eq!(harness.flows(family).len(), 1);
    forget(harness);
}

/// The attacks of RFC 1858 and RFC 3128: later fragments that would overwrite the ports or the flags. They follow the first
/// fragment, whatever they contain; the receiver judges them.
fn overlapping(family: Family, harness: &mut Harness) {
    let (service, packet) = packet(family, TCP);
    harness.serve(std::slice::from_ref(&service));
    let pod = service.backends[0].1;
    let (sent, becomes) = (packet.fragments(SIZE, 9), packet.to(pod).fragments(SIZE, 9));
    passes(harness, Hook::Ingress, &sent[0], &becomes[0], "the first");
    let at = |fragments: &[Vec<u8>], offset: u16| Packet::moved(&fragments[1], offset);
    for offset in [1, 2, 8, 0x1ffe] {
        let what = format!("a fragment at {}", offset * 8);
        passes(harness, Hook::Ingress, &at(&sent, offset), &at(&becomes, offset), &what);
    }
    assert_eq!((harness.reasons(), harness.flow(family).backend), (vec![], pod));
    // A first fragment without the whole TCP header passes unchanged, and so do the later ones.
    let tiny = packet.fragments(8, 10);
    passes(harness, Hook::Ingress, &tiny[0], &tiny[0], "a tiny one");
    passes(harness, Hook::Ingress, &tiny[1], &tiny[1], "what follows it");
    // The address is neither this node's nor in a range of Services: no process here can receive it.
    assert_eq!(harness.reasons(), [(Reason::Fragment, 1)]);
    let udp = Service::new(8, UDP, family.frontend(1, 53), &[pod]);
    harness.serve(&[udp]);
    let packet = Packet::udp(packet.src, packet.dst).payload(64);
    let (sent, becomes) = (packet.fragments(8, 11), packet.to(pod).fragments(8, 11));
    for (sent, becomes) in sent.iter().zip(&becomes) {
        passes(harness, Hook::Ingress, sent, becomes, "eight bytes hold a UDP header");
    }
}

fn refused(family: Family, harness: &mut Harness) {
    let (mut service, packet) = packet(family, UDP);
    service.backends.clear();
    harness.serve(&[service]);
    let sent = packet.fragments(SIZE, 9);
    let seen = harness.run(Hook::Ingress, &sent[0]);
    assert_eq!((seen.verdict, seen.packet), (REDIRECT, packet.unreachable_for(&sent[0], 128)));
    for later in &sent[1..] {
        assert_eq!(harness.run(Hook::Ingress, later).verdict, DROP, "one answer is enough");
    }
    // A short fragment is not quoted whole, either: its checksum covers the whole packet.
    let short = packet.fragments(64, 10);
    let seen = harness.run(Hook::Ingress, &short[0]);
    assert_eq!((seen.verdict, seen.packet), (REDIRECT, packet.unreachable_for(&short[0], 128)));
    assert_eq!(harness.reasons(), [(Reason::NoEndpoint, 2), (Reason::FragmentWithoutFirst, 3)]);
    assert_eq!(harness.flows(family).len(), 0);
}

/// An endpoint sends to a port that may be an SNAT port, like a DNS server that a process of the node asks directly.
fn no_reply(family: Family, harness: &mut Harness) {
    let (service, _) = packet(family, UDP);
    harness.serve(std::slice::from_ref(&service));
    let sent = Packet::udp(service.backends[0].1, family.client(3, SNAT_PORTS[1].first)).payload(SIZE * 3);
    for fragment in sent.fragments(SIZE, 12) {
        passes(harness, Hook::Ingress, &fragment, &fragment, "as it came");
    }
    assert_eq!(harness.reasons(), []);
}

fn foreign(family: Family, harness: &mut Harness) {
    let (service, packet) = packet(family, UDP);
    harness.serve(&[service]);
    for (which, packet) in
        [packet.to(family.client(9, 53)), packet.to(family.frontend(1, 54)), packet.back()].iter().enumerate()
    {
        for hook in [Hook::Ingress, Hook::Egress] {
            for (at, fragment) in packet.fragments(SIZE, 9).iter().enumerate() {
                passes(harness, hook, fragment, fragment, &format!("{which}, {hook:?}, fragment {at}"));
            }
        }
    }
    assert_eq!(harness.reasons(), [(Reason::Fragment, 9)]);
}
