//! Conversations: several packets, and what happens in the maps between them.

use proxy_common::config::seconds;
use proxy_common::conntrack::{
    ASSURED, FIN_BACKEND, FIN_CLIENT, RST_BACKEND, RST_CLIENT, SEEN_REPLY, SEQ_BACKEND, SEQ_CLIENT,
};
use proxy_common::flow::{STATE_SYN, STATE_USED};
use proxy_common::reason::Reason;
use proxy_common::service::ServiceEntry;
use proxy_user::maps::Write;

use crate::Scenario;
use crate::packet::{ACK, FIN, Packet, RST, SYN, TCP, UDP, verify};
use crate::rig::{DROP, Family, HZ, Hook, NEXT, Rig, Service, Side};

pub const SCENARIOS: [Scenario; 29] = [
    scenario("TCP stays with a backend that left, UDP moves", leaving_backend),
    scenario("unanswered TCP moves", unanswered_tcp_moves),
    scenario("a SYN after both FINs begins anew", syn_after_fins),
    scenario("a SYN after a reset by the client begins anew", syn_after_clients_reset),
    scenario("a SYN after a reset by the backend begins anew", syn_after_backends_reset),
    scenario("a SYN on an established flow goes to its backend while that one serves", syn_on_established),
    scenario("a SYN on a flow whose backend left begins anew", syn_after_backend_left),
    scenario("a SYN on a flow of another Service begins anew", syn_for_another_service),
    scenario("a reset out of the window changes nothing", reset_out_of_window),
    scenario("a reset is taken back by the next segment of its sender", reset_taken_back),
    scenario("a client that does not see the answer is not assured", blind_client),
    scenario("a direct packet gets a flow of its own where its answers would be another flow's", direct_udp),
    scenario("a direct connection gets a flow of its own too", direct_tcp),
    scenario("FINs close a flow one by one", fins),
    scenario("an expired flow begins anew", expired),
    scenario("a reply to an expired flow passes", expired_reply),
    scenario("a flow that was silent for less than its timeout stays", not_expired),
    scenario("one client port to two frontends with one backend", collision),
    scenario("one client port to one frontend, by TCP and by UDP", protocols_apart),
    scenario("a lost forward key heals", lost_forward_key),
    scenario("a lost reply key heals after a pause", lost_reply_key),
    scenario("a key whose first bucket is full stands in its second", first_full),
    scenario("a key whose buckets are full takes the place of a stale one", both_full),
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
    if last.last() != Some(&(Hook::Ingress, RST)) {
        // It would take the client's reset back.
        let last_ack = scene.with(ACK);
        expect(rig, Hook::Ingress, &last_ack, &last_ack.to(pod));
    }
    expect(rig, Hook::Ingress, &scene.first, &scene.first.to(other));
    let flow = rig.flow(family);
    assert_eq!((flow.backend, flow.state & SEEN_REPLY), (other, 0));
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
    let scene = scene(family, TCP, rig);
    let (pod, _) = scene.establish(rig);
    expect(rig, Hook::Ingress, &scene.first, &scene.first.to(pod));
    // One end is done, the other is not: still the same flow.
    let fin = scene.with(FIN | ACK);
    expect(rig, Hook::Ingress, &fin, &fin.to(pod));
    expect(rig, Hook::Ingress, &scene.first, &scene.first.to(pod));
    assert_eq!(rig.stats(scene.service.id).connections, 1);
}

fn syn_after_backend_left(family: Family, rig: &mut Rig) {
    let mut scene = scene(family, TCP, rig);
    let (pod, other) = scene.establish(rig);
    let ack = scene.with(ACK);
    expect(rig, Hook::Ingress, &ack, &ack.to(pod));
    rig.shrink(&mut scene.service, &[other]);
    // The connection goes on; a new one on the same ports does not go to who is gone, once a SYN was not answered.
    expect(rig, Hook::Ingress, &ack, &ack.to(pod));
    for pod in [pod, other] {
        age(family, rig, HZ);
        expect(rig, Hook::Ingress, &scene.first, &scene.first.to(pod));
    }
    assert_eq!((rig.flow(family).backend, rig.key_count(family)), (other, 2));
}

fn syn_for_another_service(family: Family, rig: &mut Rig) {
    let scene = scene(family, TCP, rig);
    scene.establish(rig);
    let theirs = Service::new(99, TCP, scene.service.frontend, &[family.pod(7, 7070)]);
    rig.serve(std::slice::from_ref(&theirs));
    expect(rig, Hook::Ingress, &scene.first, &scene.first.to(family.pod(7, 7070)));
    assert_eq!((rig.flows(family).len(), rig.key_count(family)), (1, 2));
}

/// The connection bits of the one flow, without those of sequence numbers.
fn connection(family: Family, rig: &Rig) -> u32 {
    rig.flow(family).state & !(STATE_USED | STATE_SYN | SEQ_CLIENT | SEQ_BACKEND)
}

fn fins(family: Family, rig: &mut Rig) {
    let scene = scene(family, TCP, rig);
    let (pod, _) = scene.establish(rig);
    assert_eq!(connection(family, rig), SEEN_REPLY);
    let fin = scene.with(FIN | ACK);
    expect(rig, Hook::Ingress, &fin, &fin.to(pod));
    assert_eq!(connection(family, rig), SEEN_REPLY | ASSURED | FIN_CLIENT);
    let answer = fin.to(pod).back();
    expect(rig, Hook::Egress, &answer, &answer.from(scene.service.frontend));
    assert_eq!(connection(family, rig), SEEN_REPLY | ASSURED | FIN_CLIENT | FIN_BACKEND);
    let reset = scene.with(RST);
    expect(rig, Hook::Ingress, &reset, &reset.to(pod));
    assert_ne!(connection(family, rig) & RST_CLIENT, 0);
}

/// The packet with this sequence number, and with its checksum made up for that.
fn with_seq(packet: &Packet, seq: u32) -> Packet {
    Packet { seq, ..packet.clone() }
}

fn reset_out_of_window(family: Family, rig: &mut Rig) {
    let scene = scene(family, TCP, rig);
    let (pod, _) = scene.establish(rig);
    let ack = scene.with(ACK);
    expect(rig, Hook::Ingress, &ack, &ack.to(pod));
    let before = connection(family, rig);
    for flags in [RST, FIN | ACK] {
        let forged = with_seq(&scene.with(flags), 0x4000_0000);
        expect(rig, Hook::Ingress, &forged, &forged.to(pod));
        let forged = Packet { ack: 0x4000_0000, ..with_seq(&scene.with(flags).to(pod).back(), 0xc000_0000) };
        expect(rig, Hook::Egress, &forged, &forged.from(scene.service.frontend));
    }
    assert_eq!(connection(family, rig), before);
    assert_eq!(rig.reasons(), [(Reason::OutOfWindow, 4)]);
    assert_eq!(rig.stats(scene.service.id).connections, 1, "before");
    // After more silence than a reset connection is remembered, it is still there.
    age(family, rig, (seconds::TCP_CLOSE + 1) * HZ);
    expect(rig, Hook::Ingress, &ack, &ack.to(pod));
    assert_eq!(rig.stats(scene.service.id).connections, 1);
}

fn reset_taken_back(family: Family, rig: &mut Rig) {
    let scene = scene(family, TCP, rig);
    let (pod, _) = scene.establish(rig);
    let (ack, reset) = (scene.with(ACK), scene.with(RST).to(pod).back());
    expect(rig, Hook::Ingress, &ack, &ack.to(pod));
    expect(rig, Hook::Egress, &reset, &reset.from(scene.service.frontend));
    expect(rig, Hook::Ingress, &ack, &ack.to(pod));
    assert_eq!(connection(family, rig), SEEN_REPLY | ASSURED | RST_BACKEND);
    let answer = ack.to(pod).back();
    expect(rig, Hook::Egress, &answer, &answer.from(scene.service.frontend));
    assert_eq!(connection(family, rig), SEEN_REPLY | ASSURED);
}

fn blind_client(family: Family, rig: &mut Rig) {
    let scene = scene(family, TCP, rig);
    let pod = sent(rig, &scene.first, &scene.pods);
    let answer = with_seq(&Packet { flags: SYN | ACK, ..scene.first.to(pod).back() }, 0x7000_0000);
    expect(rig, Hook::Egress, &answer, &answer.from(scene.service.frontend));
    let guess = Packet { ack: 0x1000_0000, ..scene.with(ACK) };
    expect(rig, Hook::Ingress, &guess, &guess.to(pod));
    assert_eq!(connection(family, rig), SEEN_REPLY);
    let right = Packet { ack: 0x7000_0001, ..scene.with(ACK) };
    expect(rig, Hook::Ingress, &right, &right.to(pod));
    assert_eq!(connection(family, rig), SEEN_REPLY | ASSURED);
}

fn direct_udp(family: Family, rig: &mut Rig) {
    direct(family, rig, UDP);
}

fn direct_tcp(family: Family, rig: &mut Rig) {
    direct(family, rig, TCP);
}

/// A client speaks to a backend through a Service and, from the same port, straight: each answer comes from what was dialled.
fn direct(family: Family, rig: &mut Rig, proto: u8) {
    let (frontend, pod) = (family.frontend(1, 80), family.pod(1, 8080));
    rig.serve(&[Service::new(7, proto, frontend, &[pod])]);
    let client = family.client(1, 40_000);
    let by_service = Packet { flags: SYN, ..Packet::new(proto, client, frontend) };
    expect(rig, Hook::Ingress, &by_service, &by_service.to(pod));
    let straight = Packet { flags: SYN, ..Packet::new(proto, client, pod) };
    let seen = rig.run(Hook::Ingress, &straight.bytes());
    let flow = rig.flows(family).into_iter().find(|flow| flow.frontend == pod).expect("a flow of its own");
    assert_eq!((flow.client, flow.backend), (client, pod));
    assert_ne!(flow.source, client);
    let moved = straight.from(flow.source);
    assert_eq!((seen.verdict, seen.packet), (NEXT, moved.bytes()));
    for _ in 0..3 {
        let [answer, direct_answer] = [by_service.to(pod).back(), moved.back()];
        expect(rig, Hook::Egress, &answer, &answer.from(frontend));
        expect(rig, Hook::Egress, &direct_answer, &straight.back());
        let [next, direct_next] =
            [&by_service, &straight].map(|packet| Packet { flags: ACK, ..packet.clone() });
        expect(rig, Hook::Ingress, &next, &next.to(pod));
        expect(rig, Hook::Ingress, &direct_next, &direct_next.from(flow.source));
    }
    let stats = rig.stats(7);
    assert_eq!((stats.connections, stats.packets, stats.reply_packets), (1, 4, 3), "only the Service's");
    // The client's router tells of a reply.
    let kind = if family == Family::V4 { [3, 4] } else { [2, 0] };
    let error = |packet: &Packet| packet.error(client.ip(), kind, [0, 0, 5, 0x14], 1000);
    let seen = rig.run(Hook::Ingress, &error(&straight.back()));
    assert_eq!((seen.verdict, seen.packet), (NEXT, error(&moved.back())));
    assert_eq!(rig.reasons(), []);
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
const TIMEOUTS: [(u8, Packets, u32); 8] = [
    (TCP, &[(Hook::Ingress, SYN)], seconds::TCP_SYN_SENT),
    (TCP, &[(Hook::Ingress, SYN), (Hook::Egress, SYN | ACK)], seconds::TCP_SYN_RECV),
    (TCP, HANDSHAKE, seconds::TCP_ESTABLISHED),
    (TCP, &[HANDSHAKE[0], HANDSHAKE[1], HANDSHAKE[2], (Hook::Egress, FIN)], seconds::TCP_CLOSE_WAIT),
    (
        TCP,
        &[HANDSHAKE[0], HANDSHAKE[1], HANDSHAKE[2], (Hook::Egress, FIN), (Hook::Ingress, FIN)],
        seconds::TCP_TIME_WAIT,
    ),
    (TCP, &[(Hook::Ingress, SYN), (Hook::Egress, RST)], seconds::TCP_CLOSE),
    (UDP, &[(Hook::Ingress, 0)], seconds::UDP),
    (UDP, &[(Hook::Ingress, 0), (Hook::Egress, 0)], seconds::UDP),
];

const HANDSHAKE: Packets = &[(Hook::Ingress, SYN), (Hook::Egress, SYN | ACK), (Hook::Ingress, ACK)];

/// Runs `check` on a flow in each state, with the port of the backend that it goes to.
fn in_each_state(family: Family, rig: &mut Rig, check: fn(Family, &mut Rig, &Packet, u32)) {
    for (port, (proto, packets, timeout)) in (40_000..).zip(TIMEOUTS) {
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
        check(family, rig, &packet, timeout * HZ);
        // The next state begins with an empty table.
        age(family, rig, 100_000 * HZ);
        rig.run(Hook::Egress, &packet.to(pod).back().bytes());
        assert_eq!(rig.flows(family).len(), 0);
    }
}

fn expired(family: Family, rig: &mut Rig) {
    in_each_state(family, rig, |family, rig, packet, timeout| {
        let before = rig.stats(7).connections;
        age(family, rig, timeout + 1);
        expect(rig, Hook::Ingress, packet, &packet.to(family.pod(1, 8080)));
        assert_eq!(rig.stats(7).connections, before + 1, "{packet:?}");
        assert_eq!((connection(family, rig), rig.key_count(family)), (0, 2));
    });
}

fn expired_reply(family: Family, rig: &mut Rig) {
    in_each_state(family, rig, |family, rig, packet, timeout| {
        age(family, rig, timeout + 1);
        let reply = packet.to(family.pod(1, 8080)).back();
        expect(rig, Hook::Egress, &reply, &reply);
        assert_eq!(rig.key_count(family), 0);
        rig.run(Hook::Ingress, &packet.bytes());
    });
}

fn not_expired(family: Family, rig: &mut Rig) {
    in_each_state(family, rig, |family, rig, packet, timeout| {
        let before = rig.stats(7).connections;
        age(family, rig, timeout - 5 * HZ);
        let pod = family.pod(1, 8080);
        expect(rig, Hook::Ingress, packet, &packet.to(pod));
        age(family, rig, timeout - 5 * HZ);
        let has_reply = connection(family, rig) & SEEN_REPLY != 0;
        // A SYN is answered by SYN and ACK.
        let flags = if has_reply { packet.flags } else { SYN | ACK };
        let reply = Packet { flags, ..packet.to(pod).back() };
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
    let reply = Packet::tcp(SYN | ACK, pod, client);
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
