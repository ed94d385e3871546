//! Which flows go on when Services change, or when packets are forged, and which do not.

use std::net::SocketAddr;

use proxy_common::conntrack::{ASSURED, SEEN_REPLY};
use proxy_common::reason::Reason;
use proxy_user::maps::{Table, Write};

use crate::Scenario;
use crate::packet::{ACK, FIN, Packet, RST, SYN, TCP, UDP};
use crate::rig::{DROP, Family, HZ, Hook, NEXT, Rig, Service};

pub const SCENARIOS: [Scenario; 6] = [
    scenario("a forged SYN ends no connection whose backend left", draining),
    scenario("a forged SYN ends no connection whose frontend is gone", frontend_gone),
    scenario("an unanswered SYN does not follow a backend that left", dead),
    scenario("what begins no connection opens no flow", invalid),
    scenario("a UDP flow ends when its frontend is another Service's", reassigned),
    scenario("a backend that has just left costs no connection", just_left),
];

const fn scenario(name: &'static str, test: fn(Family, &mut Rig)) -> Scenario {
    Scenario { name, flows: 256, test }
}

const ID: u32 = 7;

fn becomes(rig: &mut Rig, packet: &Packet, pod: SocketAddr) {
    let seen = rig.run(Hook::Ingress, &packet.bytes());
    assert_eq!((seen.verdict, seen.packet), (NEXT, packet.to(pod).bytes()), "{packet:?}");
}

/// Makes the one flow look as if its last packet had passed that long ago.
fn silent(family: Family, rig: &Rig, jiffies: u32) {
    let mut flow = rig.flow(family);
    flow.last_seen = rig.now().wrapping_sub(jiffies);
    rig.change(&flow);
}

/// An assured connection to the only backend of a Service; gives a segment of it, its backend, and the Service.
fn assured(family: Family, rig: &mut Rig) -> (Packet, SocketAddr, Service) {
    let (frontend, pod) = (family.frontend(1, 80), family.pod(1, 8080));
    let service = Service::new(ID, TCP, frontend, &[pod]);
    rig.serve(std::slice::from_ref(&service));
    let syn = Packet::tcp(SYN, family.client(1, 40_000), frontend);
    becomes(rig, &syn, pod);
    let answer = Packet { flags: SYN | ACK, ..syn.to(pod).back() };
    assert_eq!(rig.run(Hook::Egress, &answer.bytes()).packet, answer.from(frontend).bytes());
    let ack = Packet { flags: ACK, ..syn };
    becomes(rig, &ack, pod);
    assert_eq!(rig.flow(family).state & (SEEN_REPLY | ASSURED), SEEN_REPLY | ASSURED);
    (ack, pod, service)
}

/// The backend leaves, another one comes.
fn replace(family: Family, rig: &mut Rig, service: &Service) -> SocketAddr {
    let other = family.pod(2, 8081);
    rig.serve(&[Service::new(ID + 1, TCP, service.frontend, &[other])]);
    let (id, _) = service.backends[0];
    let table = if other.is_ipv4() { Table::Backends } else { Table::Backends6 };
    rig.write(&[Write::NoBackend(id, table)]);
    other
}

fn draining(family: Family, rig: &mut Rig) {
    let (ack, pod, service) = assured(family, rig);
    replace(family, rig, &service);
    let forged = Packet { flags: SYN, ..ack.clone() };
    for pause in [0, HZ, 10, HZ] {
        silent(family, rig, pause);
        becomes(rig, &forged, pod);
        // The backend lives, and says so (RFC 5961, 4).
        let challenge = ack.to(pod).back();
        assert_eq!(
            rig.run(Hook::Egress, &challenge.bytes()).packet,
            challenge.from(service.frontend).bytes()
        );
        becomes(rig, &ack, pod);
    }
    assert_eq!((rig.flows(family).len(), rig.key_count(family)), (1, 2));
}

fn frontend_gone(family: Family, rig: &mut Rig) {
    let (ack, pod, service) = assured(family, rig);
    rig.write(&[Write::NoService(service.frontend_key())]);
    silent(family, rig, HZ);
    becomes(rig, &Packet { flags: SYN, ..ack.clone() }, pod);
    becomes(rig, &ack, pod);
    assert_eq!((rig.flows(family).len(), rig.key_count(family)), (1, 2));
}

fn dead(family: Family, rig: &mut Rig) {
    let (ack, pod, service) = assured(family, rig);
    let other = replace(family, rig, &service);
    let syn = Packet { flags: SYN, ..ack };
    silent(family, rig, HZ);
    becomes(rig, &syn, pod);
    // The client sends it again after a second.
    silent(family, rig, HZ);
    becomes(rig, &syn, other);
    assert_eq!((rig.flow(family).backend, rig.key_count(family)), (other, 2));
}

fn invalid(family: Family, rig: &mut Rig) {
    let (frontend, pod) = (family.frontend(1, 80), family.pod(1, 8080));
    rig.serve(&[Service::new(ID, TCP, frontend, &[pod])]);
    let all = [RST, RST | ACK, FIN | ACK, SYN | ACK, SYN | FIN, 0];
    for flags in all {
        let packet = Packet::tcp(flags, family.client(1, 40_000), frontend);
        assert_eq!(rig.run(Hook::Ingress, &packet.bytes()).verdict, DROP, "{flags:#x}");
    }
    assert_eq!(rig.flows(family).len(), 0);
    assert_eq!(rig.refusals(), [(ID, Reason::InvalidState, all.len() as u64)]);
    // Out of the middle of a connection, as after a restart of the machine.
    becomes(rig, &Packet::tcp(ACK, family.client(1, 40_000), frontend), pod);
}

fn reassigned(family: Family, rig: &mut Rig) {
    let (frontend, pod, theirs) = (family.frontend(1, 53), family.pod(1, 53), family.pod(2, 53));
    rig.serve(&[Service::new(ID, UDP, frontend, &[pod])]);
    let packet = Packet::udp(family.client(1, 40_000), frontend);
    becomes(rig, &packet, pod);
    silent(family, rig, HZ);
    becomes(rig, &packet, pod);
    // The first one keeps its backend, under another frontend.
    rig.serve(&[Service::new(ID + 1, UDP, frontend, &[theirs])]);
    silent(family, rig, HZ);
    becomes(rig, &packet, theirs);
    assert_eq!((rig.flows(family).len(), rig.key_count(family)), (1, 2));
}

fn just_left(family: Family, rig: &mut Rig) {
    let (frontend, pods) = (family.frontend(1, 80), [family.pod(1, 8080), family.pod(2, 8080)]);
    let service = Service::new(ID, TCP, frontend, &pods);
    rig.serve(std::slice::from_ref(&service));
    let (id, _) = service.backends[0];
    let table = if frontend.is_ipv4() { Table::Backends } else { Table::Backends6 };
    rig.write(&[Write::NoBackend(id, table)]);
    for port in 40_000..40_200 {
        becomes(rig, &Packet::tcp(SYN, family.client(1, port), frontend), pods[1]);
    }
    assert_eq!(rig.refusals(), []);
}
