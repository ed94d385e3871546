//! Flows that continue, or end, when Services change or packets are forged.

use std::net::SocketAddr;

use proxy_common::conntrack::{ASSURED, SEEN_REPLY};
use proxy_common::reason::Reason;
use proxy_core::store::{Table, Write};

use crate::Scenario;
use proxy_testbed::Family;
use proxy_testbed::harness::{DROP, HZ, Harness, Hook, NEXT, Service};
use proxy_testbed::packet::{ACK, FIN, Packet, RST, SYN, TCP, UDP};

pub const SCENARIOS: [Scenario; 6] = [
    scenario("a forged SYN ends no connection whose backend left", draining),
    scenario("a forged SYN ends no connection whose frontend is gone", frontend_gone),
    scenario("an unanswered SYN does not follow a backend that left", dead),
    scenario("a segment that begins no connection creates no flow", invalid),
    scenario("a UDP flow ends when its frontend is another Service's", reassigned),
    scenario("a backend that has just left costs no connection", just_left),
];

const fn scenario(name: &'static str, test: fn(Family, &mut Harness)) -> Scenario {
    Scenario { name, flows: 256, test }
}

const ID: u32 = 7;

fn becomes(harness: &mut Harness, packet: &Packet, pod: SocketAddr) {
    let seen = harness.run(Hook::Ingress, &packet.bytes());
    assert_eq!((seen.verdict, seen.packet), (NEXT, packet.to(pod).bytes()), "{packet:?}");
}

/// Makes the only flow look as if its last packet had passed `jiffies` ago.
fn silent(family: Family, harness: &Harness, jiffies: u32) {
    let mut flow = harness.flow(family);
    flow.last_seen = harness.now().wrapping_sub(jiffies);
    harness.change(&flow);
}

/// Establishes an assured connection to the only backend of a Service; returns a segment of it, the backend, and the Service.
fn assured(family: Family, harness: &mut Harness) -> (Packet, SocketAddr, Service) {
    let (frontend, pod) = (family.frontend(1, 80), family.pod(1, 8080));
    let service = Service::new(ID, TCP, frontend, &[pod]);
    harness.serve(std::slice::from_ref(&service));
    let syn = Packet::tcp(SYN, family.client(1, 40_000), frontend);
    becomes(harness, &syn, pod);
    let answer = Packet { flags: SYN | ACK, ..syn.to(pod).back() };
    assert_eq!(harness.run(Hook::Egress, &answer.bytes()).packet, answer.from(frontend).bytes());
    let ack = Packet { flags: ACK, ..syn };
    becomes(harness, &ack, pod);
    assert_eq!(harness.flow(family).state & (SEEN_REPLY | ASSURED), SEEN_REPLY | ASSURED);
    (ack, pod, service)
}

/// Removes the backend, and gives the frontend to another Service, whose backend is returned.
fn replace(family: Family, harness: &mut Harness, service: &Service) -> SocketAddr {
    let other = family.pod(2, 8081);
    harness.serve(&[Service::new(ID + 1, TCP, service.frontend, &[other])]);
    let (id, _) = service.backends[0];
    let table = if other.is_ipv4() { Table::Backends } else { Table::Backends6 };
    harness.write(&[Write::NoBackend(id, table)]);
    other
}

fn draining(family: Family, harness: &mut Harness) {
    let (ack, pod, service) = assured(family, harness);
    replace(family, harness, &service);
    let forged = Packet { flags: SYN, ..ack.clone() };
    for pause in [0, HZ, 10, HZ] {
        silent(family, harness, pause);
        becomes(harness, &forged, pod);
        // The backend still has the connection, and answers with a challenge ACK (RFC 5961, 4).
        let challenge = ack.to(pod).back();
        assert_eq!(
            harness.run(Hook::Egress, &challenge.bytes()).packet,
            challenge.from(service.frontend).bytes()
        );
        becomes(harness, &ack, pod);
    }
    assert_eq!((harness.flows(family).len(), harness.key_count(family)), (1, 2));
}

fn frontend_gone(family: Family, harness: &mut Harness) {
    let (ack, pod, service) = assured(family, harness);
    harness.write(&[Write::NoService(service.frontend_key())]);
    silent(family, harness, HZ);
    becomes(harness, &Packet { flags: SYN, ..ack.clone() }, pod);
    becomes(harness, &ack, pod);
    assert_eq!((harness.flows(family).len(), harness.key_count(family)), (1, 2));
}

fn dead(family: Family, harness: &mut Harness) {
    let (ack, pod, service) = assured(family, harness);
    let other = replace(family, harness, &service);
    let syn = Packet { flags: SYN, ..ack };
    silent(family, harness, HZ);
    becomes(harness, &syn, pod);
    // The client retransmits the SYN after a second.
    silent(family, harness, HZ);
    becomes(harness, &syn, other);
    assert_eq!((harness.flow(family).backend, harness.key_count(family)), (other, 2));
}

fn invalid(family: Family, harness: &mut Harness) {
    let (frontend, pod) = (family.frontend(1, 80), family.pod(1, 8080));
    harness.serve(&[Service::new(ID, TCP, frontend, &[pod])]);
    let all = [RST, RST | ACK, FIN | ACK, SYN | ACK, SYN | FIN, 0];
    for flags in all {
        let packet = Packet::tcp(flags, family.client(1, 40_000), frontend);
        assert_eq!(harness.run(Hook::Ingress, &packet.bytes()).verdict, DROP, "{flags:#x}");
    }
    assert_eq!(harness.flows(family).len(), 0);
    assert_eq!(harness.refusals(), [(ID, Reason::InvalidState, all.len() as u64)]);
    // A segment in mid-connection creates a flow, as after a restart of the machine.
    becomes(harness, &Packet::tcp(ACK, family.client(1, 40_000), frontend), pod);
}

fn reassigned(family: Family, harness: &mut Harness) {
    let (frontend, pod, theirs) = (family.frontend(1, 53), family.pod(1, 53), family.pod(2, 53));
    harness.serve(&[Service::new(ID, UDP, frontend, &[pod])]);
    let packet = Packet::udp(family.client(1, 40_000), frontend);
    becomes(harness, &packet, pod);
    silent(family, harness, HZ);
    becomes(harness, &packet, pod);
    // The first Service keeps its backend, but the frontend belongs to another Service now.
    harness.serve(&[Service::new(ID + 1, UDP, frontend, &[theirs])]);
    silent(family, harness, HZ);
    becomes(harness, &packet, theirs);
    assert_eq!((harness.flows(family).len(), harness.key_count(family)), (1, 2));
}

fn just_left(family: Family, harness: &mut Harness) {
    let (frontend, pods) = (family.frontend(1, 80), [family.pod(1, 8080), family.pod(2, 8080)]);
    let service = Service::new(ID, TCP, frontend, &pods);
    harness.serve(std::slice::from_ref(&service));
    let (id, _) = service.backends[0];
    let table = if frontend.is_ipv4() { Table::Backends } else { Table::Backends6 };
    harness.write(&[Write::NoBackend(id, table)]);
    for port in 40_000..40_200 {
        becomes(harness, &Packet::tcp(SYN, family.client(1, port), frontend), pods[1]);
    }
    assert_eq!(harness.refusals(), []);
}
