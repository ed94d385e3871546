//! SCTP, by packets made by hand: few kernels have its sockets.

use proxy_common::flow::{FLOW_FIN_BACKEND, FLOW_FIN_CLIENT, FLOW_REPLIED, FLOW_RESET, FLOW_USED};
use proxy_common::reason::Reason;

use crate::Scenario;
use crate::packet::{ACK, FIN, Packet, RST, SCTP, SYN};
use crate::rig::{DROP, Family, Hook, NEXT, REDIRECT, Rig, Service};

pub const SCENARIOS: [Scenario; 4] = [
    Scenario { name: "SCTP checksums are right for every length", flows: 64, test: lengths },
    Scenario { name: "an SCTP association from beginning to end", flows: 64, test: association },
    Scenario { name: "SCTP to a Service without endpoints", flows: 64, test: refused },
    Scenario { name: "SCTP in pieces", flows: 64, test: pieces },
];

fn service(family: Family) -> (Service, Packet) {
    let (client, frontend, pod) = (family.client(1, 40_001), family.frontend(1, 80), family.pod(1, 8080));
    (Service::new(7, SCTP, frontend, &[pod]), Packet { flags: SYN, ..Packet::new(SCTP, client, frontend) })
}

fn lengths(family: Family, rig: &mut Rig) {
    let (service, first) = service(family);
    rig.serve(std::slice::from_ref(&service));
    let pod = service.backends[0].1;
    for length in (0..1450).step_by(7).chain([2500]) {
        let packet = first.clone().payload(length);
        let seen = rig.run(Hook::Ingress, &packet.bytes());
        assert_eq!((seen.verdict, seen.packet), (NEXT, packet.to(pod).bytes()), "{length} bytes");
        let answer = packet.to(pod).back();
        let seen = rig.run(Hook::Egress, &answer.bytes());
        assert_eq!(
            (seen.verdict, seen.packet),
            (NEXT, answer.from(service.frontend).bytes()),
            "{length} bytes"
        );
    }
    // A wrong one stays as wrong as it was, for the endpoint to see.
    let spoiled = |packet: &Packet| {
        let mut bytes = packet.bytes();
        let at = packet.segment_at() + 8;
        bytes[at..at + 4].iter_mut().for_each(|byte| *byte ^= 0x5a);
        bytes
    };
    let packet = first.clone().payload(100);
    assert_eq!(rig.run(Hook::Ingress, &spoiled(&packet)).packet, spoiled(&packet.to(pod)));
    // The device will compute it.
    let without = Packet { is_unchecked: true, ..first };
    assert_eq!(rig.run(Hook::Ingress, &without.bytes()).packet, without.to(pod).bytes());
    assert_eq!((rig.reasons(), rig.flows(family).len()), (vec![], 1));
}

fn association(family: Family, rig: &mut Rig) {
    let (mut service, init) = service(family);
    rig.serve(std::slice::from_ref(&service));
    let pod = service.backends[0].1;
    let step = |rig: &mut Rig, hook, flags, state: u8| {
        let packet = Packet { flags, ..init.clone() };
        let (packet, becomes) = match hook {
            Hook::Ingress => (packet.clone(), packet.to(pod)),
            Hook::Egress => (packet.to(pod).back(), packet.back()),
        };
        assert_eq!(rig.run(hook, &packet.bytes()).packet, becomes.bytes());
        assert_eq!(rig.flow(family).state, FLOW_USED | state, "{hook:?} {flags}");
    };
    step(rig, Hook::Ingress, SYN, 0);
    step(rig, Hook::Egress, SYN | ACK, FLOW_REPLIED);
    // It stays with an endpoint that leaves.
    let other = family.pod(2, 8080);
    service.backends.push((7 * 16 + 1, other));
    rig.serve(std::slice::from_ref(&service));
    rig.shrink(&mut service, &[other]);
    step(rig, Hook::Ingress, ACK, FLOW_REPLIED);
    step(rig, Hook::Ingress, FIN, FLOW_REPLIED | FLOW_FIN_CLIENT);
    step(rig, Hook::Egress, FIN | ACK, FLOW_REPLIED | FLOW_FIN_CLIENT | FLOW_FIN_BACKEND);
    // And a new INIT begins another one.
    let seen = rig.run(Hook::Ingress, &init.bytes());
    assert_eq!(seen.packet, init.to(other).bytes());
    let abort = Packet { flags: RST, ..init };
    rig.run(Hook::Ingress, &abort.bytes());
    assert_eq!(rig.flow(family).state, FLOW_USED | FLOW_RESET);
}

fn refused(family: Family, rig: &mut Rig) {
    let (mut service, init) = service(family);
    service.backends.clear();
    rig.serve(&[service]);
    for length in [0, 21, 1000] {
        let packet = init.clone().payload(length);
        let seen = rig.run(Hook::Ingress, &packet.bytes());
        assert_eq!((seen.verdict, seen.packet), (REDIRECT, packet.unreachable(128)), "{length} bytes");
    }
    let abort = Packet { flags: RST, ..init };
    assert_eq!(rig.run(Hook::Ingress, &abort.bytes()).verdict, DROP, "nobody answers an ABORT");
    assert_eq!(rig.reasons(), [(Reason::NoEndpoint, 4)]);
}

fn pieces(family: Family, rig: &mut Rig) {
    let (service, init) = service(family);
    rig.serve(&[service]);
    for fragment in init.payload(1000).fragments(256, 9) {
        let seen = rig.run(Hook::Ingress, &fragment);
        assert_eq!((seen.verdict, seen.packet), (NEXT, fragment));
    }
    assert_eq!((rig.reasons(), rig.flows(family).len()), (vec![(Reason::Fragment, 4)], 0));
}
