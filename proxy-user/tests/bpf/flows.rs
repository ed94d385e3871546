//! Conversations: several packets, and what happens in the maps between them.

use proxy_common::config::seconds;
use proxy_common::flow::{FLOW_FIN_BACKEND, FLOW_FIN_CLIENT, FLOW_REPLIED, FLOW_RESET};
use proxy_common::reason::Reason;
use proxy_common::service::ServiceEntry;
use proxy_user::maps::Write;

use crate::Scenario;
use crate::packet::{ACK, FIN, Packet, RST, SYN, TCP, UDP, verify};
use crate::rig::{DROP, Family, HZ, Hook, NEXT, Rig, Service, Side};

pub const SCENARIOS: [Scenario; 22] = [
    scenario("TCP stays with a backend that left, UDP moves", leaving_backend),
    scenario("TCP that nobody answered moves", unanswered_tcp_moves),
    scenario("a SYN after both FINs begins anew", syn_after_fins),
    scenario("a SYN after a reset by the client begins anew", syn_after_clients_reset),
    scenario("a SYN after a reset by the backend begins anew", syn_after_backends_reset),
    scenario("a SYN on an established flow stays", syn_on_established),
    scenario("FINs close a flow one by one", fins),
    scenario("an expired flow begins anew", expired),
    scenario("a reply to an expired flow passes", expired_reply),
    scenario("a flow that was silent for less than its lifetime stays", not_expired),
    scenario("one client port to two frontends with one backend", collision),
    scenario("one client port to one frontend, by TCP and by UDP", protocols_apart),
    scenario("a lost forward key heals", lost_forward_key),
    scenario("a lost reply key heals after a pause", lost_reply_key),
    scenario("a key whose first bucket is full stands in its second", first_full),
    scenario("a key whose buckets are full takes a place that nobody misses", both_full),
    scenario("an entry that was reused is not believed", reused_entry),
    scenario("a backend id that was reused for another address is not followed", reused_id),
    scenario("a backend id that was reused for another Service is not followed", reused_id_of_another),
    scenario("a services entry with another key's tag is not believed", stale_tag),
    scenario("an extent of backends that are all gone drops and says so", all_gone),
    scenario("a slot beyond the array drops and says so", no_slot),
];

const fn scenario(name: &'static str, test: fn(Family, &mut Rig)) -> Scenario {
    Scenario { name, flows: 64, test }
}

/// A packet at a hook must become another one.
fn expect(rig: &mut Rig, hook: Hook, packet: &Packet, out: &Packet) {
    let seen = rig.run(hook, &packet.bytes());
    assert_eq!((seen.verdict, &seen.packet), (NEXT, &out.bytes()), "{hook:?} {packet:?}\nbecomes {out:?}");
    verify(&seen.packet).unwrap();
}

/// Sends a client's packet, and gives the one of `pods` that it went to.
fn sent(rig: &mut Rig, packet: &Packet, pods: &[std::net::SocketAddr]) -> std::net::SocketAddr {
    let seen = rig.run(Hook::Ingress, &packet.bytes());
    assert_eq!(seen.verdict, NEXT);
    *pods.iter().find(|pod| packet.to(**pod).bytes() == seen.packet).expect("it went to none of the pods")
}

struct Scene {
    service: Service,
    pods: [std::net::SocketAddr; 2],
    first: Packet,
}

/// A Service with two endpoints, and a client's first packet.
fn scene(family: Family, proto: u8, rig: &mut Rig) -> Scene {
    let pods = [family.pod(1, 8080), family.pod(2, 8081)];
    let frontend = family.frontend(1, 80);
    let service = Service::new(7 + u32::from(proto), proto, frontend, &pods);
    rig.serve(std::slice::from_ref(&service));
    let first = Packet { flags: SYN, ..Packet::new(proto, family.client(1, 40_000), frontend) };
    Scene { service, pods, first }
}

impl Scene {
    /// The first packet, and the answer; gives the backend and the other one.
    fn establish(&self, rig: &mut Rig) -> (std::net::SocketAddr, std::net::SocketAddr) {
        let pod = sent(rig, &self.first, &self.pods);
        let answer = Packet { flags: SYN | ACK, ..self.first.to(pod).back() };
        expect(rig, Hook::Egress, &answer, &answer.from(self.service.frontend));
        let other = self.pods.into_iter().find(|other| *other != pod).unwrap();
        (pod, other)
    }

    fn with(&self, flags: u8) -> Packet {
        Packet { flags, ..self.first.clone() }
    }
}

fn leaving_backend(family: Family, rig: &mut Rig) {
    for proto in [TCP, UDP] {
        let mut scene = scene(family, proto, rig);
        let (pod, other) = scene.establish(rig);
        rig.shrink(&mut scene.service, &[other]);
        let next = scene.with(ACK);
        let goes_to = if proto == TCP { pod } else { other };
        expect(rig, Hook::Ingress, &next, &next.to(goes_to));
        let answer = next.to(goes_to).back();
        expect(rig, Hook::Egress, &answer, &answer.from(scene.service.frontend));
        let connections = if proto == TCP { 1 } else { 2 };
        assert_eq!(rig.stats(scene.service.id).connections, connections);
    }
    assert_eq!((rig.flows(family).len(), rig.key_count(family)), (2, 4), "nothing is left behind");
}

fn unanswered_tcp_moves(family: Family, rig: &mut Rig) {
    let mut scene = scene(family, TCP, rig);
    let pod = sent(rig, &scene.first, &scene.pods);
    let other = scene.pods.into_iter().find(|other| *other != pod).unwrap();
    rig.shrink(&mut scene.service, &[other]);
    expect(rig, Hook::Ingress, &scene.first, &scene.first.to(other));
    assert_eq!((rig.flow(family).backend, rig.key_count(family)), (other, 2));
}

/// After `last` a SYN of the client goes to a backend that serves, in a flow of its own.
fn begins_anew(family: Family, rig: &mut Rig, last: &[(Hook, u8)]) {
    let mut scene = scene(family, TCP, rig);
    let (pod, other) = scene.establish(rig);
    for (hook, flags) in last {
        let packet = scene.with(*flags);
        match hook {
            Hook::Egress => {
                let reply = packet.to(pod).back();
                expect(rig, Hook::Egress, &reply, &reply.from(scene.service.frontend));
            }
            Hook::Ingress => expect(rig, Hook::Ingress, &packet, &packet.to(pod)),
        }
    }
    rig.shrink(&mut scene.service, &[other]);
    let last_ack = scene.with(ACK);
    expect(rig, Hook::Ingress, &last_ack, &last_ack.to(pod));
    expect(rig, Hook::Ingress, &scene.first, &scene.first.to(other));
    let flow = rig.flow(family);
    assert_eq!((flow.backend, flow.state & FLOW_REPLIED), (other, 0));
    assert_eq!(rig.key_count(family), 2);
    assert_eq!(rig.stats(scene.service.id).connections, 2);
}

fn syn_after_fins(family: Family, rig: &mut Rig) {
    begins_anew(family, rig, &[(Hook::Ingress, FIN | ACK), (Hook::Egress, FIN | ACK)]);
}

fn syn_after_clients_reset(family: Family, rig: &mut Rig) {
    begins_anew(family, rig, &[(Hook::Ingress, RST)]);
}

fn syn_after_backends_reset(family: Family, rig: &mut Rig) {
    begins_anew(family, rig, &[(Hook::Egress, RST | ACK)]);
}

fn syn_on_established(family: Family, rig: &mut Rig) {
    let mut scene = scene(family, TCP, rig);
    let (pod, other) = scene.establish(rig);
    rig.shrink(&mut scene.service, &[other]);
    expect(rig, Hook::Ingress, &scene.first, &scene.first.to(pod));
    // One end is done, the other is not: still the same flow.
    let fin = scene.with(FIN | ACK);
    expect(rig, Hook::Ingress, &fin, &fin.to(pod));
    expect(rig, Hook::Ingress, &scene.first, &scene.first.to(pod));
    assert_eq!(rig.stats(scene.service.id).connections, 1);
}

fn fins(family: Family, rig: &mut Rig) {
    let scene = scene(family, TCP, rig);
    let (pod, _) = scene.establish(rig);
    assert_eq!(rig.flow(family).state & !1, FLOW_REPLIED);
    let fin = scene.with(FIN | ACK);
    expect(rig, Hook::Ingress, &fin, &fin.to(pod));
    assert_eq!(rig.flow(family).state & !1, FLOW_REPLIED | FLOW_FIN_CLIENT);
    let answer = fin.to(pod).back();
    expect(rig, Hook::Egress, &answer, &answer.from(scene.service.frontend));
    assert_eq!(rig.flow(family).state & !1, FLOW_REPLIED | FLOW_FIN_CLIENT | FLOW_FIN_BACKEND);
    let reset = scene.with(RST);
    expect(rig, Hook::Ingress, &reset, &reset.to(pod));
    assert_ne!(rig.flow(family).state & FLOW_RESET, 0);
}

/// Makes the flow look as if its last packet had passed that long ago.
fn age(family: Family, rig: &Rig, jiffies: u32) {
    let mut flow = rig.flow(family);
    flow.last_seen = rig.now().wrapping_sub(jiffies);
    rig.change(&flow);
}

/// Hooks and TCP flags.
type Packets = &'static [(Hook, u8)];

/// For each state of a flow: its packets so far, and how many seconds it may be silent.
const LIFETIMES: [(u8, Packets, u32); 6] = [
    (TCP, &[(Hook::Ingress, SYN)], seconds::TCP_OPENING),
    (TCP, &[(Hook::Ingress, SYN), (Hook::Egress, SYN | ACK)], seconds::TCP_ESTABLISHED),
    (TCP, &[(Hook::Ingress, SYN), (Hook::Egress, SYN | ACK), (Hook::Egress, FIN)], seconds::TCP_CLOSING),
    (TCP, &[(Hook::Ingress, SYN), (Hook::Egress, RST)], seconds::TCP_CLOSED),
    (UDP, &[(Hook::Ingress, 0)], seconds::UDP_UNREPLIED),
    (UDP, &[(Hook::Ingress, 0), (Hook::Egress, 0)], seconds::UDP_REPLIED),
];

/// Runs `check` on a flow in each state, with the port of the backend that it goes to.
fn in_each_state(family: Family, rig: &mut Rig, check: fn(Family, &mut Rig, &Packet, u32)) {
    for (port, (proto, packets, lifetime)) in (40_000..).zip(LIFETIMES) {
        let (frontend, pod) = (family.frontend(1, 80), family.pod(1, 8080));
        rig.serve(&[Service::new(7, proto, frontend, &[pod])]);
        let client = family.client(1, port);
        for (hook, flags) in packets {
            let packet = Packet { flags: *flags, ..Packet::new(proto, client, frontend) };
            match hook {
                Hook::Egress => rig.run(Hook::Egress, &packet.to(pod).back().bytes()),
                Hook::Ingress => rig.run(Hook::Ingress, &packet.bytes()),
            };
        }
        let packet = Packet { flags: ACK, ..Packet::new(proto, client, frontend) };
        check(family, rig, &packet, lifetime * HZ);
        // The next state begins with an empty table.
        age(family, rig, 100_000 * HZ);
        rig.run(Hook::Egress, &packet.to(pod).back().bytes());
        assert_eq!(rig.flows(family).len(), 0);
    }
}

fn expired(family: Family, rig: &mut Rig) {
    in_each_state(family, rig, |family, rig, packet, lifetime| {
        let before = rig.stats(7).connections;
        age(family, rig, lifetime + 1);
        expect(rig, Hook::Ingress, packet, &packet.to(family.pod(1, 8080)));
        assert_eq!(rig.stats(7).connections, before + 1, "{packet:?}");
        assert_eq!((rig.flow(family).state, rig.key_count(family)), (1, 2));
    });
}

fn expired_reply(family: Family, rig: &mut Rig) {
    in_each_state(family, rig, |family, rig, packet, lifetime| {
        age(family, rig, lifetime + 1);
        let reply = packet.to(family.pod(1, 8080)).back();
        expect(rig, Hook::Egress, &reply, &reply);
        assert_eq!(rig.key_count(family), 0);
        rig.run(Hook::Ingress, &packet.bytes());
    });
}

fn not_expired(family: Family, rig: &mut Rig) {
    in_each_state(family, rig, |family, rig, packet, lifetime| {
        let before = rig.stats(7).connections;
        age(family, rig, lifetime - 5 * HZ);
        let pod = family.pod(1, 8080);
        expect(rig, Hook::Ingress, packet, &packet.to(pod));
        age(family, rig, lifetime - 5 * HZ);
        let reply = packet.to(pod).back();
        expect(rig, Hook::Egress, &reply, &reply.from(family.frontend(1, 80)));
        assert_eq!(rig.stats(7).connections, before);
    });
}

fn collision(family: Family, rig: &mut Rig) {
    for proto in [TCP, UDP] {
        let pod = family.pod(1, 8080);
        let services = [1, 2].map(|n| Service::new(u32::from(n) + 16, proto, family.frontend(n, 80), &[pod]));
        rig.serve(&services);
        let client = family.client(1, 40_000);
        let [first, second] =
            [1, 2].map(|n| Packet { flags: SYN, ..Packet::new(proto, client, family.frontend(n, 80)) });
        expect(rig, Hook::Ingress, &first, &first.to(pod));
        let seen = rig.run(Hook::Ingress, &second.bytes());
        let flow = *rig
            .flows(family)
            .iter()
            .find(|flow| flow.frontend == second.dst && flow.proto == proto)
            .unwrap();
        assert_ne!(flow.source.port(), client.port(), "both flows would look the same to the backend");
        assert!(flow.source.port() >= 1024 && flow.source.ip() == client.ip());
        let moved = second.from(flow.source).to(pod);
        assert_eq!(seen.packet, moved.bytes());
        expect(
            rig,
            Hook::Ingress,
            &Packet { flags: ACK, ..second.clone() },
            &Packet { flags: ACK, ..moved.clone() },
        );
        let answers = [first.to(pod).back(), moved.back()];
        expect(rig, Hook::Egress, &answers[0], &first.back());
        expect(rig, Hook::Egress, &answers[1], &second.back());
    }
}

fn protocols_apart(family: Family, rig: &mut Rig) {
    let (frontend, pods) = (family.frontend(1, 53), [family.pod(1, 53), family.pod(2, 5353)]);
    rig.serve(&[Service::new(7, TCP, frontend, &pods[..1]), Service::new(8, UDP, frontend, &pods[1..])]);
    let client = family.client(1, 40_000);
    for (proto, pod) in [(TCP, pods[0]), (UDP, pods[1])] {
        let packet = Packet { flags: SYN, ..Packet::new(proto, client, frontend) };
        expect(rig, Hook::Ingress, &packet, &packet.to(pod));
        let reply = packet.to(pod).back();
        expect(rig, Hook::Egress, &reply, &reply.from(frontend));
    }
    assert_eq!(rig.flows(family).len(), 2);
}

/// A flow with one possible backend, established.
fn one_flow(family: Family, rig: &mut Rig) -> (Packet, Packet) {
    let (frontend, pod) = (family.frontend(1, 80), family.pod(1, 8080));
    rig.serve(&[Service::new(7, TCP, frontend, &[pod])]);
    let client = family.client(1, 40_000);
    let syn = Packet::tcp(SYN, client, frontend);
    rig.run(Hook::Ingress, &syn.bytes());
    let reply = Packet::tcp(ACK, pod, client);
    expect(rig, Hook::Egress, &reply, &reply.from(frontend));
    (Packet::tcp(ACK, client, frontend), reply)
}

fn lost_forward_key(family: Family, rig: &mut Rig) {
    let (packet, reply) = one_flow(family, rig);
    let flow = rig.flow(family);
    rig.lose(&flow, Side::Forward);
    expect(rig, Hook::Ingress, &packet, &packet.to(reply.src));
    assert_eq!(rig.leads_to(&flow, Side::Forward), Some(flow.index), "it is the same flow");
    expect(rig, Hook::Egress, &reply, &reply.from(packet.dst));
    assert_eq!((rig.flows(family).len(), rig.key_count(family)), (1, 2));
    assert_eq!(rig.stats(7).connections, 1);
}

fn lost_reply_key(family: Family, rig: &mut Rig) {
    let (packet, reply) = one_flow(family, rig);
    let flow = rig.flow(family);
    rig.lose(&flow, Side::Reply);
    expect(rig, Hook::Egress, &reply, &reply);
    age(family, rig, HZ + HZ / 10);
    expect(rig, Hook::Ingress, &packet, &packet.to(reply.src));
    expect(rig, Hook::Egress, &reply, &reply.from(packet.dst));
    // A segment that opens a connection comes again.
    for side in [Side::Reply, Side::Forward] {
        rig.lose(&rig.flow(family), side);
        age(family, rig, HZ + HZ / 10);
        let syn = Packet { flags: SYN, ..packet.clone() };
        expect(rig, Hook::Ingress, &syn, &syn.to(reply.src));
        expect(rig, Hook::Egress, &reply, &reply.from(packet.dst));
        assert_eq!((rig.flows(family).len(), rig.key_count(family)), (1, 2));
    }
    assert_eq!(rig.stats(7).connections, 1);
    assert_eq!(rig.reasons(), []);
}

fn first_full(family: Family, rig: &mut Rig) {
    crowded(family, rig, &[0], 1);
}

fn both_full(family: Family, rig: &mut Rig) {
    crowded(family, rig, &[0, 1], 0);
}

/// A flow begins, and is found, with these of its keys' buckets full; its keys stand in the one that is expected.
fn crowded(family: Family, rig: &mut Rig, full: &[usize], expected: usize) {
    let scene = scene(family, TCP, rig);
    let (pod, _) = scene.establish(rig);
    let flow = rig.flow(family);
    rig.forget_flows();
    let mut service = scene.service.clone();
    rig.shrink(&mut service, &[pod]);
    for side in [Side::Forward, Side::Reply] {
        for which in full {
            rig.crowd(&flow, side, *which);
        }
    }
    scene.establish(rig);
    let next = scene.with(ACK);
    expect(rig, Hook::Ingress, &next, &next.to(pod));
    let begun = rig.flow(family);
    for side in [Side::Forward, Side::Reply] {
        assert_eq!(rig.stands_in(&begun, side), Some(expected), "{side:?}");
        assert_eq!(rig.leads_to(&begun, side), Some(begun.index));
    }
    assert_eq!(rig.stats(scene.service.id).connections, 2);
}

fn reused_entry(family: Family, rig: &mut Rig) {
    let (packet, reply) = one_flow(family, rig);
    let mut flow = rig.flow(family);
    // As if another client had the entry now, and the keys of the first had stayed.
    flow.generation += 1;
    flow.client.set_port(40_001);
    flow.source.set_port(40_001);
    rig.change(&flow);
    expect(rig, Hook::Egress, &reply, &reply);
    expect(rig, Hook::Ingress, &packet, &packet.to(reply.src));
    assert_eq!(rig.stats(7).connections, 2, "a new flow");
    expect(rig, Hook::Egress, &reply, &reply.from(packet.dst));
}

fn reused_id(family: Family, rig: &mut Rig) {
    let (frontend, old, new) = (family.frontend(1, 53), family.pod(1, 53), family.pod(2, 53));
    rig.serve(&[Service::new(7, UDP, frontend, &[old])]);
    let packet = Packet::udp(family.client(1, 40_000), frontend);
    expect(rig, Hook::Ingress, &packet, &packet.to(old));
    let reply = packet.to(old).back();
    expect(rig, Hook::Egress, &reply, &reply.from(frontend));
    rig.serve(&[Service::new(7, UDP, frontend, &[new])]);
    expect(rig, Hook::Ingress, &packet, &packet.to(new));
    assert_eq!(rig.key_count(family), 2);
}

fn reused_id_of_another(family: Family, rig: &mut Rig) {
    let (frontend, old, new) = (family.frontend(1, 53), family.pod(1, 53), family.pod(2, 53));
    let mut service = Service::new(7, UDP, frontend, &[old]);
    rig.serve(std::slice::from_ref(&service));
    let packet = Packet::udp(family.client(1, 40_000), frontend);
    expect(rig, Hook::Ingress, &packet, &packet.to(old));
    // The same address and port, and the same id; but of another Service.
    let id = service.backends[0].0;
    let theirs = Service { backends: vec![(id, old)], ..Service::new(8, UDP, family.frontend(2, 53), &[]) };
    service.backends = vec![(id + 1, new)];
    rig.serve(&[theirs, service]);
    expect(rig, Hook::Ingress, &packet, &packet.to(new));
}

fn stale_tag(family: Family, rig: &mut Rig) {
    let service = Service::new(7, TCP, family.frontend(1, 80), &[family.pod(1, 8080)]);
    rig.serve(std::slice::from_ref(&service));
    let entry = ServiceEntry { tag: service.entry().tag ^ 1, ..service.entry() };
    rig.write(&[Write::Service(service.frontend_key(), entry)]);
    let packet = Packet::tcp(SYN, family.client(1, 40_000), service.frontend);
    expect(rig, Hook::Ingress, &packet, &packet);
    assert_eq!(rig.flows(family).len(), 0);
}

fn all_gone(family: Family, rig: &mut Rig) {
    let pods = [family.pod(1, 8080), family.pod(2, 8080)];
    let mut service = Service::new(7, TCP, family.frontend(1, 80), &pods);
    rig.serve(std::slice::from_ref(&service));
    let entry = service.entry();
    rig.shrink(&mut service, &[]);
    rig.write(&[
        Write::Service(service.frontend_key(), entry),
        Write::Slots(7 * 16, vec![7 * 16, 7 * 16 + 1]),
    ]);
    drops(family, rig, &service);
}

fn no_slot(family: Family, rig: &mut Rig) {
    let service = Service::new(7, TCP, family.frontend(1, 80), &[family.pod(1, 8080)]);
    rig.serve(std::slice::from_ref(&service));
    let entry = ServiceEntry { slot_base: u32::MAX - 1, ..service.entry() };
    rig.write(&[Write::Service(service.frontend_key(), entry)]);
    drops(family, rig, &service);
}

fn drops(family: Family, rig: &mut Rig, service: &Service) {
    let packet = Packet::tcp(SYN, family.client(1, 40_000), service.frontend);
    let seen = rig.run(Hook::Ingress, &packet.bytes());
    assert_eq!((seen.verdict, seen.packet), (DROP, packet.bytes()));
    assert_eq!(rig.refusals(), [(7, Reason::MapInconsistent, 1)]);
    assert_eq!((rig.flows(family).len(), rig.key_count(family)), (0, 0));
}
