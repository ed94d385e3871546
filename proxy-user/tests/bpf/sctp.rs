//! SCTP, with packets that the test builds: few kernels have SCTP sockets.

use std::net::SocketAddr;

use proxy_common::backend::BACKEND_IN_CLUSTER;
use proxy_common::conntrack::{ASSURED, FIN_BACKEND, FIN_CLIENT, RST_CLIENT, SEEN_REPLY};
use proxy_common::flow::{STATE_LOCAL, STATE_SNAT, STATE_USED};
use proxy_common::prefilter::Role;
use proxy_common::reason::Reason;
use proxy_common::service::{
    SCOPE_EXTERNAL, SERVICE_DROP_WHEN_EMPTY, SERVICE_SCOPED, SERVICE_SOURCE_RANGES, ServiceEntry,
};
use proxy_core::store::{FrontendKey, Write};

use crate::Scenario;
use crate::snat::{OWN, by_gateway, forget};
use proxy_testbed::Family;
use proxy_testbed::harness::{DROP, Harness, Hook, NEXT, REDIRECT, Service, context_of, filter};
use proxy_testbed::node::{know, node_addr, send_on_as, uplink};
use proxy_testbed::packet::{ACK, FIN, Packet, RST, SCTP, SYN, TCP, ends, verify};

pub const SCENARIOS: [Scenario; 10] = [
    Scenario { name: "SCTP checksums are right for every length", flows: 64, test: lengths },
    Scenario { name: "an SCTP association from beginning to end", flows: 64, test: association },
    Scenario { name: "SCTP to a Service without endpoints", flows: 64, test: refused },
    Scenario { name: "fragments of SCTP are translated", flows: 64, test: pieces },
    Scenario { name: "SCTP of the node itself, there and back", flows: 64, test: own },
    Scenario { name: "SCTP of the node itself to other addresses passes", flows: 64, test: own_left_alone },
    Scenario { name: "SCTP of the node itself comes from inside", flows: 64, test: own_inside },
    Scenario { name: "SCTP of the node itself is refused", flows: 64, test: own_refused },
    Scenario { name: "errors about SCTP of the node itself", flows: 64, test: own_errors },
    Scenario { name: "a GSO list of SCTP of the node itself is translated", flows: 64, test: own_lists },
];

fn service(family: Family) -> (Service, Packet) {
    let (client, frontend, pod) = (family.client(1, 40_001), family.frontend(1, 80), family.pod(1, 8080));
    (Service::new(7, SCTP, frontend, &[pod]), Packet { flags: SYN, ..Packet::new(SCTP, client, frontend) })
}

fn lengths(family: Family, harness: &mut Harness) {
    let (service, first) = service(family);
    harness.serve(std::slice::from_ref(&service));
    let pod = service.backends[0].1;
    for length in (0..1450).step_by(7).chain([2500]) {
        let packet = first.clone().payload(length);
        let seen = harness.run(Hook::Ingress, &packet.bytes());
        assert_eq!((seen.verdict, seen.packet), (NEXT, packet.to(pod).bytes()), "{length} bytes");
        let answer = packet.to(pod).back();
        let seen = harness.run(Hook::Egress, &answer.bytes());
        assert_eq!(
            (seen.verdict, seen.packet),
            (NEXT, answer.from(service.frontend).bytes()),
            "{length} bytes"
        );
    }
    // A wrong checksum stays wrong, so that the endpoint notices it.
    let spoiled = |packet: &Packet| {
        let mut bytes = packet.bytes();
        let at = packet.segment_at() + 8;
        bytes[at..at + 4].iter_mut().for_each(|byte| *byte ^= 0x5a);
        bytes
    };
    let packet = first.clone().payload(100);
    assert_eq!(harness.run(Hook::Ingress, &spoiled(&packet)).packet, spoiled(&packet.to(pod)));
    // The device will compute the checksum.
    let without = Packet { is_unchecked: true, ..first };
    assert_eq!(harness.run(Hook::Ingress, &without.bytes()).packet, without.to(pod).bytes());
    assert_eq!((harness.reasons(), harness.flows(family).len()), (vec![], 1));
}

fn association(family: Family, harness: &mut Harness) {
    let (mut service, init) = service(family);
    harness.serve(std::slice::from_ref(&service));
    let pod = service.backends[0].1;
    let step = |harness: &mut Harness, hook, flags, state: u32| {
        let packet = Packet { flags, ..init.clone() };
        let (packet, becomes) = match hook {
            Hook::Ingress => (packet.clone(), packet.to(pod)),
            Hook::Egress => (packet.to(pod).back(), packet.back()),
        };
        assert_eq!(harness.run(hook, &packet.bytes()).packet, becomes.bytes());
        assert_eq!(harness.flow(family).state, STATE_USED | state, "{hook:?} {flags}");
    };
    step(harness, Hook::Ingress, SYN, 0);
    step(harness, Hook::Egress, SYN | ACK, SEEN_REPLY);
    // The association stays with a removed endpoint.
    let other = family.pod(2, 8080);
    service.backends.push((7 * 16 + 1, other));
    harness.serve(std::slice::from_ref(&service));
    harness.shrink(&mut service, &[other]);
    step(harness, Hook::Ingress, ACK, SEEN_REPLY | ASSURED);
    step(harness, Hook::Ingress, FIN, SEEN_REPLY | ASSURED | FIN_CLIENT);
    step(harness, Hook::Egress, FIN | ACK, SEEN_REPLY | ASSURED | FIN_CLIENT | FIN_BACKEND);
    // A new INIT begins another association.
    let seen = harness.run(Hook::Ingress, &init.bytes());
    assert_eq!(seen.packet, init.to(other).bytes());
    let abort = Packet { flags: RST, ..init };
    harness.run(Hook::Ingress, &abort.bytes());
    assert_eq!(harness.flow(family).state, STATE_USED | RST_CLIENT);
}

fn refused(family: Family, harness: &mut Harness) {
    let (mut service, init) = service(family);
    service.backends.clear();
    harness.serve(&[service]);
    for length in [0, 21, 1000] {
        let packet = init.clone().payload(length);
        let seen = harness.run(Hook::Ingress, &packet.bytes());
        assert_eq!((seen.verdict, seen.packet), (REDIRECT, packet.unreachable(128)), "{length} bytes");
    }
    let abort = Packet { flags: RST, ..init };
    assert_eq!(harness.run(Hook::Ingress, &abort.bytes()).verdict, DROP, "an ABORT has no answer");
    assert_eq!(harness.reasons(), [(Reason::NoEndpoint, 4)]);
}

fn pieces(family: Family, harness: &mut Harness) {
    let (service, init) = service(family);
    harness.serve(&[service]);
    for fragment in init.payload(1000).fragments(256, 9) {
        let seen = harness.run(Hook::Ingress, &fragment);
        assert_eq!((seen.verdict, seen.packet), (NEXT, fragment));
    }
    assert_eq!((harness.reasons(), harness.flows(family).len()), (vec![(Reason::Fragment, 4)], 0));
}

/// Serves a Service; returns it and the first packet of a process of the node to it.
fn own_service(family: Family, harness: &mut Harness) -> (Service, Packet) {
    know(family, harness);
    let (service, first) = service(family);
    harness.serve(std::slice::from_ref(&service));
    (service, first.from(SocketAddr::new(node_addr(family), 40_001)))
}

fn leaves(harness: &mut Harness, packet: &Packet) -> proxy_testbed::harness::Seen {
    harness.run_on(Hook::Egress, &packet.bytes(), Some(uplink()))
}

/// Runs a packet that must be forwarded to a backend; returns the forwarded packet.
fn goes_on(harness: &mut Harness, packet: &Packet, to: SocketAddr) -> Packet {
    let seen = leaves(harness, packet);
    assert_eq!(seen.verdict, REDIRECT, "{packet:?}: {:?}", harness.reasons());
    if !packet.is_unchecked {
        verify(&seen.packet).unwrap();
    }
    let sent = packet.from(ends(&seen.packet).0).to(to);
    assert_eq!(seen.packet, by_gateway(sent.bytes()));
    sent
}

/// Returns the packet as it is redirected to the ingress of the uplink: both link-layer addresses are the uplink's.
fn to_own_device(packet: &Packet) -> Vec<u8> {
    let mut bytes = packet.bytes();
    bytes[..6].copy_from_slice(&OWN);
    bytes[6..12].copy_from_slice(&OWN);
    bytes
}

fn own(family: Family, harness: &mut Harness) {
    let (service, init) = own_service(family, harness);
    let pod = service.backends[0].1;
    let sent = goes_on(harness, &init, pod);
    assert_eq!(sent.src.ip(), node_addr(family));
    assert!((61_000..=65_535).contains(&sent.src.port()), "{}", sent.src);
    assert_eq!(harness.flow(family).state, STATE_USED | STATE_SNAT | STATE_LOCAL);
    // The reply goes up the stack on the device that leads to the Service's address, its new source (`rp_filter`).
    let answer = Packet { flags: SYN | ACK, ..sent.back() };
    let becomes = Packet { flags: SYN | ACK, ..init.back() };
    let seen = harness.run_on(Hook::Ingress, &answer.bytes(), Some(uplink()));
    assert_eq!((seen.verdict, seen.packet), (NEXT, becomes.bytes()));
    assert_eq!(harness.flow(family).state, STATE_USED | STATE_SNAT | STATE_LOCAL | SEEN_REPLY);
    let seen = harness.run(Hook::Ingress, &answer.bytes());
    assert_eq!((seen.verdict, seen.packet), (REDIRECT, to_own_device(&becomes)));
    // The cached route still leads the next packets out of the uplink.
    for length in [0, 21, 1000] {
        let data = Packet { flags: ACK, ..init.clone() }.payload(length);
        let sent = goes_on(harness, &data, pod);
        // A frontend may have the same prefilter bit as the SNAT port by chance.
        harness.write(&[filter(Role::Frontend, sent.src, SCTP)]);
        let seen = harness.run_on(Hook::Ingress, &sent.back().bytes(), Some(uplink()));
        assert_eq!((seen.verdict, seen.packet), (NEXT, data.back().bytes()));
    }
    // The device will compute the checksum.
    goes_on(harness, &Packet { is_unchecked: true, flags: ACK, ..init }, pod);
    assert_eq!((harness.reasons(), harness.flows(family).len()), (vec![], 1));
    let stats = harness.stats(7);
    assert_eq!((stats.connections, stats.packets, stats.reply_packets), (1, 5, 5));
    forget(harness);
}

fn own_left_alone(family: Family, harness: &mut Harness) {
    let (service, init) = own_service(family, harness);
    let pod = service.backends[0].1;
    harness.serve(&[Service::new(8, TCP, service.frontend, &[pod])]);
    let own = node_addr(family);
    // The packet arrived on a device, where the ingress program has processed it.
    let mut context = context_of(Hook::Egress, uplink());
    context[36..40].copy_from_slice(&uplink().to_ne_bytes());
    let seen = harness.run_with(Hook::Egress, &init.bytes(), &context);
    assert_eq!((seen.verdict, seen.packet), (NEXT, init.bytes()));
    for packet in [
        init.to(pod),
        init.to(family.client(1, 80)),
        // The prefilter bit is set, but there is no entry.
        init.to(family.client(2, 80)),
    ] {
        harness.write(&[filter(Role::Frontend, family.client(2, 80), SCTP)]);
        let seen = leaves(harness, &packet);
        assert_eq!((seen.verdict, seen.packet), (NEXT, packet.bytes()), "{packet:?}");
    }
    // A forwarded packet also passes the hook of another device; its endpoint may be another Service's frontend.
    harness.write(&[filter(Role::Frontend, pod, SCTP)]);
    let forwarded = init.to(pod).from(SocketAddr::new(own, 61_007));
    let seen = leaves(harness, &forwarded);
    assert_eq!((seen.verdict, seen.packet), (NEXT, forwarded.bytes()));
    // A server of the node answers; a backend has the node's address.
    let server = SocketAddr::new(own, 8080);
    harness.serve(&[Service::new(9, SCTP, family.frontend(2, 80), &[server])]);
    let asked = Packet { flags: SYN, ..Packet::new(SCTP, family.client(1, 9), family.frontend(2, 80)) };
    assert_eq!(harness.run(Hook::Ingress, &asked.bytes()).packet, asked.to(server).bytes());
    let answer = Packet { flags: SYN | ACK, ..asked.to(server).back() };
    let seen = leaves(harness, &answer);
    assert_eq!((seen.verdict, seen.packet), (NEXT, answer.from(asked.dst).bytes()));
    // The server is also a client, with the same port.
    goes_on(harness, &init.from(server), pod);
    assert_eq!(harness.reasons(), []);
    forget(harness);
}

fn own_inside(family: Family, harness: &mut Harness) {
    let (service, init) = own_service(family, harness);
    let pod = service.backends[0].1;
    let key = service.frontend_key();
    let outside = FrontendKey { scope: SCOPE_EXTERNAL, ..key };
    let empty = ServiceEntry { slot_count: 0, flags: SERVICE_DROP_WHEN_EMPTY, ..service.entry() };
    harness.write(&[
        Write::Service(outside, ServiceEntry { tag: outside.tag(), ..empty }),
        Write::Service(key, ServiceEntry { flags: SERVICE_SCOPED, affinity_secs: 10, ..service.entry() }),
    ]);
    // The device is an uplink; clients behind it are outside, but the node itself is not.
    let client = init.from(family.client(1, 40_001));
    assert_eq!(harness.run_on(Hook::Ingress, &client.bytes(), Some(uplink())).verdict, DROP);
    goes_on(harness, &init, pod);
    // The node keeps its endpoint (session affinity).
    let pods: Vec<_> = (1..=8).map(|host| family.pod(host, 8080)).collect();
    let more = Service::new(7, SCTP, service.frontend, &pods);
    let mut writes = more.writes();
    for write in &mut writes {
        if let Write::Backend(_, row) = write {
            row.flags = BACKEND_IN_CLUSTER;
        }
    }
    writes.push(Write::Service(key, ServiceEntry { affinity_secs: 10, ..more.entry() }));
    harness.write(&writes);
    let first = ends(&leaves(harness, &init.from(SocketAddr::new(node_addr(family), 2000))).packet).1;
    for port in 2001..2020 {
        goes_on(harness, &init.from(SocketAddr::new(node_addr(family), port)), first);
    }
    // The source ranges are compared with the node's own address.
    let entry = ServiceEntry { flags: SERVICE_SOURCE_RANGES, ..more.entry() };
    harness.write(&[Write::Service(key, entry)]);
    assert_eq!(leaves(harness, &init.from(SocketAddr::new(node_addr(family), 3000))).verdict, DROP);
    assert_eq!(harness.refusals(), [(7, Reason::NoLocalEndpoint, 1), (7, Reason::SourceNotAllowed, 1)]);
    forget(harness);
}

fn own_refused(family: Family, harness: &mut Harness) {
    let (mut service, init) = own_service(family, harness);
    let elsewhere = init.to(family.frontend(3, 80));
    let nowhere = init.from(SocketAddr::new(node_addr(family), 2000));
    // The node has no address for SNAT.
    let nothing = if init.src.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    send_on_as(nothing, harness);
    assert_eq!(leaves(harness, &nowhere).verdict, DROP);
    know(family, harness);
    // The endpoint's answer would take the loopback device.
    harness.serve(&[Service::new(7, SCTP, service.frontend, &[SocketAddr::new(node_addr(family), 8080)])]);
    let seen = leaves(harness, &nowhere);
    assert_eq!((seen.verdict, seen.packet), (REDIRECT, nowhere.unreachable(128)), "a process of this node");
    service.backends.clear();
    harness.serve(std::slice::from_ref(&service));
    for length in [0, 21, 1000] {
        let packet = init.clone().payload(length);
        let seen = leaves(harness, &packet);
        assert_eq!((seen.verdict, seen.packet), (REDIRECT, packet.unreachable(128)), "{length} bytes");
    }
    let abort = Packet { flags: RST, ..init };
    assert_eq!(leaves(harness, &abort).verdict, DROP, "an ABORT has no answer");
    assert_eq!(leaves(harness, &elsewhere).verdict, DROP, "an address without a Service");
    let counted = [
        (Reason::NoRoute, 1),
        (Reason::OwnEndpoint, 1),
        (Reason::NoEndpoint, 4),
        (Reason::UnallocatedAddress, 1),
    ];
    let mut seen = harness.reasons();
    seen.sort_by_key(|(reason, _)| counted.iter().position(|(other, _)| other == reason));
    assert_eq!(seen, counted);
    forget(harness);
}

fn own_errors(family: Family, harness: &mut Harness) {
    let (service, init) = own_service(family, harness);
    let pod = service.backends[0].1;
    let router = family.client(200, 0).ip();
    let sent = goes_on(harness, &init, pod);
    let kind = if family == Family::V4 { [3, 4] } else { [2, 0] };
    for from in [pod.ip(), router] {
        let error = |packet: &Packet, from| packet.error(from, kind, [0, 0, 5, 0x14], 1000);
        let seen = harness.run_on(Hook::Ingress, &error(&sent, from), Some(uplink()));
        assert_eq!((seen.verdict, seen.packet), (NEXT, error(&init, from)));
    }
    // The packet is larger than the MTU of the next device, and must not be fragmented.
    let big = Packet { flags: ACK, fragment: 0x4000, ..init }.payload(1500);
    let seen = leaves(harness, &big);
    let mtu = [0, 0, 5, 0x78];
    let mut expected = big.error(big.dst.ip(), kind, mtu, 128);
    expected[..12].rotate_left(6);
    assert_eq!((seen.verdict, seen.packet), (REDIRECT, expected));
    assert_eq!(harness.reasons(), [(Reason::PacketTooBig, 1)]);
    forget(harness);
}

/// The kernel hands over a list of packets behind one header (GSO), and splits it only when the packets leave.
fn own_lists(family: Family, harness: &mut Harness) {
    let (service, init) = own_service(family, harness);
    let pod = service.backends[0].1;
    goes_on(harness, &init, pod);
    let list = Packet { flags: ACK, is_unchecked: true, ..init }.payload(2500);
    let mut context = context_of(Hook::Egress, uplink());
    context[176..180].copy_from_slice(&u32::from(u16::MAX).to_ne_bytes());
    let seen = harness.run_with(Hook::Egress, &list.bytes(), &context);
    let source = ends(&seen.packet).0;
    assert_eq!((seen.verdict, seen.packet), (REDIRECT, by_gateway(list.from(source).to(pod).bytes())));
    assert_eq!(harness.reasons(), []);
    forget(harness);
}
