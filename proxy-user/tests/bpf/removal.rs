//! Connections to a removed endpoint: they drain, or are reset if the removal policy is `reset`.

use std::net::SocketAddr;

use proxy_common::backend::{BACKEND_ACTIVE, BACKEND_RESET};
use proxy_common::conntrack::{RST_BACKEND, SEEN_REPLY};
use proxy_common::flow::STATE_RESET;
use proxy_common::reason::Reason;
use proxy_core::store::{Backend, Write};

use crate::Scenario;
use proxy_testbed::Family;
use proxy_testbed::harness::{DROP, Harness, Hook, NEXT, REDIRECT, Service};
use proxy_testbed::packet::{ACK, ETHERNET, Packet, RST, SYN, TCP, UDP, verify};

pub const SCENARIOS: [Scenario; 3] = [
    scenario("a segment to an endpoint that left is answered with a reset, if the policy says so", reset),
    scenario("a segment with options gets a reset, and one without an acknowledgement does not", unanswered),
    scenario("only TCP flows of the removed endpoint are marked", others),
];

const fn scenario(name: &'static str, test: fn(Family, &mut Harness)) -> Scenario {
    Scenario { name, flows: 64, test }
}

const ID: u32 = 9;
/// The acknowledgement number of the client's segments.
const EXPECTED: u32 = 0x8765_4321;

/// Establishes a connection; returns a segment of its client, and its endpoint.
fn connected(family: Family, harness: &mut Harness, service: &Service, host: u16) -> (Packet, SocketAddr) {
    let client = family.client(host, 4000);
    let syn = Packet::tcp(SYN, client, service.frontend);
    let seen = harness.run(Hook::Ingress, &syn.bytes());
    assert_eq!(seen.verdict, NEXT);
    let (_, pod) = proxy_testbed::packet::ends(&seen.packet);
    let answer = Packet { flags: SYN | ACK, seq: EXPECTED - 1, ack: syn.seq + 1, ..syn.to(pod).back() };
    assert_eq!(harness.run(Hook::Egress, &answer.bytes()).verdict, NEXT);
    let data = Packet { flags: ACK, ack: EXPECTED, ..syn };
    assert_eq!(harness.run(Hook::Ingress, &data.bytes()).verdict, NEXT);
    (data, pod)
}

fn set(harness: &mut Harness, service: &Service, pod: SocketAddr, state: u8) {
    let id = service.backends.iter().find(|(_, at)| *at == pod).unwrap().0;
    let (addr, port) = (pod.ip(), pod.port());
    let row = Backend { addr, port, proto: service.proto, state, service: service.id, flags: 0 };
    harness.write(&[Write::Backend(id, row)]);
}

fn serve(family: Family, harness: &mut Harness, pods: u16) -> Service {
    let pods: Vec<_> = (1..=pods).map(|n| family.pod(n, 8080)).collect();
    let service = Service::new(ID, TCP, family.frontend(1, 80), &pods);
    harness.serve(std::slice::from_ref(&service));
    service
}

fn reset(family: Family, harness: &mut Harness) {
    let mut service = serve(family, harness, 1);
    let (data, pod) = connected(family, harness, &service, 1);
    let whole = service.clone();
    harness.shrink(&mut service, &[]);
    let goes_on = |harness: &mut Harness| {
        let seen = harness.run(Hook::Ingress, &data.bytes());
        assert_eq!((seen.verdict, seen.packet), (NEXT, data.to(pod).bytes()));
    };
    goes_on(harness);
    assert_eq!(harness.view().mark_flows().unwrap(), 0, "the delay is not over");
    goes_on(harness);
    set(harness, &whole, pod, BACKEND_RESET);
    goes_on(harness);
    assert_eq!(harness.view().mark_flows().unwrap(), 1);
    assert_eq!(harness.view().mark_flows().unwrap(), 0, "it is marked");
    assert_ne!(harness.flow(family).state & STATE_RESET, 0);
    assert_eq!(harness.reasons(), []);

    // The payload does not matter: a bare ACK, up to the largest segment.
    for (count, size) in (1..).zip([0, 1, 21, 1400]) {
        let data = data.clone().payload(size);
        let seen = harness.run(Hook::Ingress, &data.bytes());
        assert_eq!(seen.verdict, REDIRECT, "{:?}", harness.reasons());
        verify(&seen.packet).unwrap();
        assert_eq!(proxy_testbed::packet::ends(&seen.packet), (service.frontend, data.src));
        let segment = &seen.packet[ETHERNET + if family == Family::V4 { 20 } else { 40 }..];
        assert_eq!((segment.len(), &segment[4..8]), (20, &EXPECTED.to_be_bytes()[..]));
        assert_eq!(segment[8..16], [0, 0, 0, 0, 0x50, RST, 0, 0]);
        assert_eq!((&seen.packet[..6], &seen.packet[6..12]), (&data.bytes()[6..12], &data.bytes()[..6]));
        assert_eq!(harness.reasons(), [(Reason::EndpointLeft, count)]);
        assert_eq!(harness.refusals(), [(ID, Reason::EndpointLeft, count)]);
        assert_ne!(harness.flow(family).state & RST_BACKEND, 0, "it is closed");
    }

    // The endpoint's segments are still translated, and the client's kernel answers with a RST.
    let back = Packet { seq: EXPECTED, ack: data.seq, ..data.to(pod).back() };
    let seen = harness.run(Hook::Egress, &back.bytes());
    assert_eq!((seen.verdict, seen.packet), (NEXT, back.from(service.frontend).bytes()));
    let last = Packet { flags: RST, ..data.clone() };
    let seen = harness.run(Hook::Ingress, &last.bytes());
    assert_eq!((seen.verdict, seen.packet), (NEXT, last.to(pod).bytes()));

    // The client connects again from the same port, but the Service has no endpoint.
    let syn = Packet { flags: SYN, seq: 77, ..data.clone() };
    let seen = harness.run(Hook::Ingress, &syn.bytes());
    assert_eq!((seen.verdict, seen.packet), (REDIRECT, syn.unreachable(usize::MAX)));
    assert!(harness.reasons().contains(&(Reason::NoEndpoint, 1)));
}

fn unanswered(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, 1);
    let (data, pod) = connected(family, harness, &service, 1);
    set(harness, &service, pod, BACKEND_RESET);
    assert_eq!(harness.view().mark_flows().unwrap(), 1);
    let with_options = match family {
        Family::V4 => data.clone().options(&[1, 1, 1, 0]),
        Family::V6 => data.clone().extension(60, &[0, 0, 1, 4, 0, 0, 0, 0]),
    };
    let seen = harness.run(Hook::Ingress, &with_options.bytes());
    assert_eq!(seen.verdict, REDIRECT);
    verify(&seen.packet).unwrap();
    assert_eq!(harness.reasons(), [(Reason::EndpointLeft, 1)]);
    let silent = Packet { flags: 0, ..data.clone() };
    assert_eq!(harness.run(Hook::Ingress, &silent.bytes()).verdict, DROP);
    assert_eq!(harness.reasons(), [(Reason::EndpointLeft, 2)]);
    // The endpoint serves again before the client sends a segment, so nothing is reset.
    set(harness, &service, pod, BACKEND_ACTIVE);
    let seen = harness.run(Hook::Ingress, &data.bytes());
    assert_eq!((seen.verdict, seen.packet), (NEXT, data.to(pod).bytes()));
    assert_ne!(harness.flow(family).state & SEEN_REPLY, 0);
}

fn others(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, 2);
    let open: Vec<_> = (1..=16).map(|host| connected(family, harness, &service, host)).collect();
    let udp = Service::new(ID + 1, UDP, family.frontend(2, 53), &[family.pod(1, 8080)]);
    harness.serve(std::slice::from_ref(&udp));
    let query = Packet::udp(family.client(1, 4000), udp.frontend);
    assert_eq!(harness.run(Hook::Ingress, &query.bytes()).verdict, NEXT);
    let gone = open[0].1;
    set(harness, &service, gone, BACKEND_RESET);
    set(harness, &udp, family.pod(1, 8080), BACKEND_RESET);
    let meant = open.iter().filter(|(_, pod)| *pod == gone).count() as u64;
    assert!((1..16).contains(&meant), "both endpoints have some: {meant}");
    assert_eq!(harness.view().mark_flows().unwrap(), meant);
    for (data, pod) in open {
        let seen = harness.run(Hook::Ingress, &data.bytes());
        assert_eq!(seen.verdict, if pod == gone { REDIRECT } else { NEXT });
    }
}
