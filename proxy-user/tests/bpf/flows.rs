//! Sequences of packets, with changes of the maps between them.

use proxy_common::config::seconds;
use proxy_common::conntrack::{
    ASSURED, FIN_BACKEND, FIN_CLIENT, RST_BACKEND, RST_CLIENT, SEEN_REPLY, SEQ_BACKEND, SEQ_CLIENT,
};
use proxy_common::flow::{STATE_SYN, STATE_USED};
use proxy_common::reason::Reason;
use proxy_common::service::ServiceEntry;
use proxy_core::store::Write;

use crate::Scenario;
use proxy_testbed::Family;
use proxy_testbed::harness::{DROP, HZ, Harness, Hook, NEXT, Service, Side};
use proxy_testbed::packet::{ACK, FIN, Packet, RST, SYN, TCP, UDP, verify};

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
    scenario("a lost forward key is repaired", lost_forward_key),
    scenario("a lost reply key is repaired after a pause", lost_reply_key),
    scenario("a key whose first bucket is full is stored in its second", first_full),
    scenario("a key whose buckets are full replaces a stale one", both_full),
    scenario("an entry that was reused is not used", reused_entry),
    scenario("a backend id that was reused for another address is not followed", reused_id),
    scenario("a backend id that was reused for another Service is not followed", reused_id_of_another),
    scenario("a services entry with another key's tag is not used", stale_tag),
    scenario("an extent of removed backends is dropped with a reason", all_gone),
    scenario("a slot index behind the array is dropped with a reason", no_slot),
];

const fn scenario(name: &'static str, test: fn(Family, &mut Harness)) -> Scenario {
    Scenario { name, flows: 64, test }
}

/// Asserts that the program at a hook rewrites `packet` to `out`.
fn expect(harness: &mut Harness, hook: Hook, packet: &Packet, out: &Packet) {
    let seen = harness.run(hook, &packet.bytes());
    assert_eq!((seen.verdict, &seen.packet), (NEXT, &out.bytes()), "{hook:?} {packet:?}\nbecomes {out:?}");
    verify(&seen.packet).unwrap();
}

/// Sends a client's packet; returns the one of `pods` that it goes to.
fn sent(harness: &mut Harness, packet: &Packet, pods: &[std::net::SocketAddr]) -> std::net::SocketAddr {
    let seen = harness.run(Hook::Ingress, &packet.bytes());
    assert_eq!(seen.verdict, NEXT);
    *pods.iter().find(|pod| packet.to(**pod).bytes() == seen.packet).expect("it went to none of the pods")
}

struct Scene {
    service: Service,
    pods: [std::net::SocketAddr; 2],
    first: Packet,
}

/// Serves a Service with two endpoints; returns them with a client's first packet.
fn scene(family: Family, proto: u8, harness: &mut Harness) -> Scene {
    let pods = [family.pod(1, 8080), family.pod(2, 8081)];
    let frontend = family.frontend(1, 80);
    let service = Service::new(7 + u32::from(proto), proto, frontend, &pods);
    harness.serve(std::slice::from_ref(&service));
    let first = Packet { flags: SYN, ..Packet::new(proto, family.client(1, 40_000), frontend) };
    Scene { service, pods, first }
}

impl Scene {
    /// Sends the first packet and the answer; returns the selected backend and the other one.
    fn establish(&self, harness: &mut Harness) -> (std::net::SocketAddr, std::net::SocketAddr) {
        let pod = sent(harness, &self.first, &self.pods);
        let answer = Packet { flags: SYN | ACK, ..self.first.to(pod).back() };
        expect(harness, Hook::Egress, &answer, &answer.from(self.service.frontend));
        let other = self.pods.into_iter().find(|other| *other != pod).unwrap();
        (pod, other)
    }

    fn with(&self, flags: u8) -> Packet {
        Packet { flags, ..self.first.clone() }
    }
}

fn leaving_backend(family: Family, harness: &mut Harness) {
    for proto in [TCP, UDP] {
        let mut scene = scene(family, proto, harness);
        let (pod, other) = scene.establish(harness);
        harness.shrink(&mut scene.service, &[other]);
        let next = scene.with(ACK);
        let goes_to = if proto == TCP { pod } else { other };
        expect(harness, Hook::Ingress, &next, &next.to(goes_to));
        let answer = next.to(goes_to).back();
        expect(harness, Hook::Egress, &answer, &answer.from(scene.service.frontend));
        let connections = if proto == TCP { 1 } else { 2 };
        assert_eq!(harness.stats(scene.service.id).connections, connections);
    }
    assert_eq!((harness.flows(family).len(), harness.key_count(family)), (2, 4), "nothing is left behind");
}

fn unanswered_tcp_moves(family: Family, harness: &mut Harness) {
    let mut scene = scene(family, TCP, harness);
    let pod = sent(harness, &scene.first, &scene.pods);
    let other = scene.pods.into_iter().find(|other| *other != pod).unwrap();
    harness.shrink(&mut scene.service, &[other]);
    expect(harness, Hook::Ingress, &scene.first, &scene.first.to(other));
    assert_eq!((harness.flow(family).backend, harness.key_count(family)), (other, 2));
}

/// Asserts that a SYN of the client after `last` goes to a backend that serves, in a flow of its own.
fn begins_anew(family: Family, harness: &mut Harness, last: &[(Hook, u8)]) {
    let mut scene = scene(family, TCP, harness);
    let (pod, other) = scene.establish(harness);
    for (hook, flags) in last {
        let packet = scene.with(*flags);
        match hook {
            Hook::Egress => {
                let reply = packet.to(pod).back();
                expect(harness, Hook::Egress, &reply, &reply.from(scene.service.frontend));
            }
            Hook::Ingress => expect(harness, Hook::Ingress, &packet, &packet.to(pod)),
        }
    }
    harness.shrink(&mut scene.service, &[other]);
    if last.last() != Some(&(Hook::Ingress, RST)) {
        // The ACK would take the client's RST back.
        let last_ack = scene.with(ACK);
        expect(harness, Hook::Ingress, &last_ack, &last_ack.to(pod));
    }
    expect(harness, Hook::Ingress, &scene.first, &scene.first.to(other));
    let flow = harness.flow(family);
    assert_eq!((flow.backend, flow.state & SEEN_REPLY), (other, 0));
    assert_eq!(harness.key_count(family), 2);
    assert_eq!(harness.stats(scene.service.id).connections, 2);
}

fn syn_after_fins(family: Family, harness: &mut Harness) {
    begins_anew(family, harness, &[(Hook::Ingress, FIN | ACK), (Hook::Egress, FIN | ACK)]);
}

fn syn_after_clients_reset(family: Family, harness: &mut Harness) {
    begins_anew(family, harness, &[(Hook::Ingress, RST)]);
}

fn syn_after_backends_reset(family: Family, harness: &mut Harness) {
    begins_anew(family, harness, &[(Hook::Egress, RST | ACK)]);
}

fn syn_on_established(family: Family, harness: &mut Harness) {
    let scene = scene(family, TCP, harness);
    let (pod, _) = scene.establish(harness);
    expect(harness, Hook::Ingress, &scene.first, &scene.first.to(pod));
    // Only one side has sent FIN: the flow stays.
    let fin = scene.with(FIN | ACK);
    expect(harness, Hook::Ingress, &fin, &fin.to(pod));
    expect(harness, Hook::Ingress, &scene.first, &scene.first.to(pod));
    assert_eq!(harness.stats(scene.service.id).connections, 1);
}

fn syn_after_backend_left(family: Family, harness: &mut Harness) {
    let mut scene = scene(family, TCP, harness);
    let (pod, other) = scene.establish(harness);
    let ack = scene.with(ACK);
    expect(harness, Hook::Ingress, &ack, &ack.to(pod));
    harness.shrink(&mut scene.service, &[other]);
    // The connection drains. A new one with the same ports gets another backend once the removed one has not answered a SYN.
    expect(harness, Hook::Ingress, &ack, &ack.to(pod));
    for pod in [pod, other] {
        age(family, harness, HZ);
        expect(harness, Hook::Ingress, &scene.first, &scene.first.to(pod));
    }
    assert_eq!((harness.flow(family).backend, harness.key_count(family)), (other, 2));
}

fn syn_for_another_service(family: Family, harness: &mut Harness) {
    let scene = scene(family, TCP, harness);
    scene.establish(harness);
    let theirs = Service::new(99, TCP, scene.service.frontend, &[family.pod(7, 7070)]);
    harness.serve(std::slice::from_ref(&theirs));
    expect(harness, Hook::Ingress, &scene.first, &scene.first.to(family.pod(7, 7070)));
    assert_eq!((harness.flows(family).len(), harness.key_count(family)), (1, 2));
}

/// Returns the connection bits of the only flow, without the bits of sequence numbers.
fn connection(family: Family, harness: &Harness) -> u32 {
    harness.flow(family).state & !(STATE_USED | STATE_SYN | SEQ_CLIENT | SEQ_BACKEND)
}

fn fins(family: Family, harness: &mut Harness) {
    let scene = scene(family, TCP, harness);
    let (pod, _) = scene.establish(harness);
    assert_eq!(connection(family, harness), SEEN_REPLY);
    let fin = scene.with(FIN | ACK);
    expect(harness, Hook::Ingress, &fin, &fin.to(pod));
    assert_eq!(connection(family, harness), SEEN_REPLY | ASSURED | FIN_CLIENT);
    let answer = fin.to(pod).back();
    expect(harness, Hook::Egress, &answer, &answer.from(scene.service.frontend));
    assert_eq!(connection(family, harness), SEEN_REPLY | ASSURED | FIN_CLIENT | FIN_BACKEND);
    let reset = scene.with(RST);
    expect(harness, Hook::Ingress, &reset, &reset.to(pod));
    assert_ne!(connection(family, harness) & RST_CLIENT, 0);
}

/// Returns the packet with this sequence number.
fn with_seq(packet: &Packet, seq: u32) -> Packet {
    Packet { seq, ..packet.clone() }
}

fn reset_out_of_window(family: Family, harness: &mut Harness) {
    let scene = scene(family, TCP, harness);
    let (pod, _) = scene.establish(harness);
    let ack = scene.with(ACK);
    expect(harness, Hook::Ingress, &ack, &ack.to(pod));
    let before = connection(family, harness);
    for flags in [RST, FIN | ACK] {
        let forged = with_seq(&scene.with(flags), 0x4000_0000);
        expect(harness, Hook::Ingress, &forged, &forged.to(pod));
        let forged = Packet { ack: 0x4000_0000, ..with_seq(&scene.with(flags).to(pod).back(), 0xc000_0000) };
        expect(harness, Hook::Egress, &forged, &forged.from(scene.service.frontend));
    }
    assert_eq!(connection(family, harness), before);
    assert_eq!(harness.reasons(), [(Reason::OutOfWindow, 4)]);
    assert_eq!(harness.stats(scene.service.id).connections, 1, "before");
    // The flow is still there after a silence that is longer than the timeout of a reset connection.
    age(family, harness, (seconds::TCP_CLOSE + 1) * HZ);
    expect(harness, Hook::Ingress, &ack, &ack.to(pod));
    assert_eq!(harness.stats(scene.service.id).connections, 1);
}

fn reset_taken_back(family: Family, harness: &mut Harness) {
    let scene = scene(family, TCP, harness);
    let (pod, _) = scene.establish(harness);
    let (ack, reset) = (scene.with(ACK), scene.with(RST).to(pod).back());
    expect(harness, Hook::Ingress, &ack, &ack.to(pod));
    expect(harness, Hook::Egress, &reset, &reset.from(scene.service.frontend));
    expect(harness, Hook::Ingress, &ack, &ack.to(pod));
    assert_eq!(connection(family, harness), SEEN_REPLY | ASSURED | RST_BACKEND);
    let answer = ack.to(pod).back();
    expect(harness, Hook::Egress, &answer, &answer.from(scene.service.frontend));
    assert_eq!(connection(family, harness), SEEN_REPLY | ASSURED);
}

fn blind_client(family: Family, harness: &mut Harness) {
    let scene = scene(family, TCP, harness);
    let pod = sent(harness, &scene.first, &scene.pods);
    let answer = with_seq(&Packet { flags: SYN | ACK, ..scene.first.to(pod).back() }, 0x7000_0000);
    expect(harness, Hook::Egress, &answer, &answer.from(scene.service.frontend));
    let guess = Packet { ack: 0x1000_0000, ..scene.with(ACK) };
    expect(harness, Hook::Ingress, &guess, &guess.to(pod));
    assert_eq!(connection(family, harness), SEEN_REPLY);
    let right = Packet { ack: 0x7000_0001, ..scene.with(ACK) };
    expect(harness, Hook::Ingress, &right, &right.to(pod));
    assert_eq!(connection(family, harness), SEEN_REPLY | ASSURED);
}

fn direct_udp(family: Family, harness: &mut Harness) {
    direct(family, harness, UDP);
}

fn direct_tcp(family: Family, harness: &mut Harness) {
    direct(family, harness, TCP);
}

/// From one port, a client connects to a backend by a Service and directly. Each answer must come from the original
/// destination.
fn direct(family: Family, harness: &mut Harness, proto: u8) {
    let (frontend, pod) = (family.frontend(1, 80), family.pod(1, 8080));
    harness.serve(&[Service::new(7, proto, frontend, &[pod])]);
    let client = family.client(1, 40_000);
    let by_service = Packet { flags: SYN, ..Packet::new(proto, client, frontend) };
    expect(harness, Hook::Ingress, &by_service, &by_service.to(pod));
    let straight = Packet { flags: SYN, ..Packet::new(proto, client, pod) };
    let seen = harness.run(Hook::Ingress, &straight.bytes());
    let flow =
        harness.flows(family).into_iter().find(|flow| flow.frontend == pod).expect("a flow of its own");
    assert_eq!((flow.client, flow.backend), (client, pod));
    assert_ne!(flow.source, client);
    let moved = straight.from(flow.source);
    assert_eq!((seen.verdict, seen.packet), (NEXT, moved.bytes()));
    for _ in 0..3 {
        let [answer, direct_answer] = [by_service.to(pod).back(), moved.back()];
        expect(harness, Hook::Egress, &answer, &answer.from(frontend));
        expect(harness, Hook::Egress, &direct_answer, &straight.back());
        let [next, direct_next] =
            [&by_service, &straight].map(|packet| Packet { flags: ACK, ..packet.clone() });
        expect(harness, Hook::Ingress, &next, &next.to(pod));
        expect(harness, Hook::Ingress, &direct_next, &direct_next.from(flow.source));
    }
    let stats = harness.stats(7);
    assert_eq!((stats.connections, stats.packets, stats.reply_packets), (1, 4, 3), "only the Service's");
    // An ICMP error is sent about a reply.
    let kind = if family == Family::V4 { [3, 4] } else { [2, 0] };
    let error = |packet: &Packet| packet.error(client.ip(), kind, [0, 0, 5, 0x14], 1000);
    let seen = harness.run(Hook::Ingress, &error(&straight.back()));
    assert_eq!((seen.verdict, seen.packet), (NEXT, error(&moved.back())));
    assert_eq!(harness.reasons(), []);
}

/// Makes the flow look as if its last packet had passed `jiffies` ago.
fn age(family: Family, harness: &Harness, jiffies: u32) {
    let mut flow = harness.flow(family);
    flow.last_seen = harness.now().wrapping_sub(jiffies);
    harness.change(&flow);
}

/// Hooks and TCP flags.
type Packets = &'static [(Hook, u8)];

/// For each state of a flow: the protocol, the packets so far, and the timeout in seconds.
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

/// Runs `check` on a flow in each state, with a packet of its client and its timeout in jiffies.
fn in_each_state(family: Family, harness: &mut Harness, check: fn(Family, &mut Harness, &Packet, u32)) {
    for (port, (proto, packets, timeout)) in (40_000..).zip(TIMEOUTS) {
        let (frontend, pod) = (family.frontend(1, 80), family.pod(1, 8080));
        harness.serve(&[Service::new(7, proto, frontend, &[pod])]);
        let client = family.client(1, port);
        for (hook, flags) in packets {
            let packet = Packet { flags: *flags, ..Packet::new(proto, client, frontend) };
            match hook {
                Hook::Egress => harness.run(Hook::Egress, &packet.to(pod).back().bytes()),
                Hook::Ingress => harness.run(Hook::Ingress, &packet.bytes()),
            };
        }
        let packet = Packet { flags: ACK, ..Packet::new(proto, client, frontend) };
        check(family, harness, &packet, timeout * HZ);
        // The flow expires, so that the next state begins with an empty table.
        age(family, harness, 100_000 * HZ);
        harness.run(Hook::Egress, &packet.to(pod).back().bytes());
        assert_eq!(harness.flows(family).len(), 0);
    }
}

fn expired(family: Family, harness: &mut Harness) {
    in_each_state(family, harness, |family, harness, packet, timeout| {
        let before = harness.stats(7).connections;
        age(family, harness, timeout + 1);
        expect(harness, Hook::Ingress, packet, &packet.to(family.pod(1, 8080)));
        assert_eq!(harness.stats(7).connections, before + 1, "{packet:?}");
        assert_eq!((connection(family, harness), harness.key_count(family)), (0, 2));
    });
}

fn expired_reply(family: Family, harness: &mut Harness) {
    in_each_state(family, harness, |family, harness, packet, timeout| {
        age(family, harness, timeout + 1);
        let reply = packet.to(family.pod(1, 8080)).back();
        expect(harness, Hook::Egress, &reply, &reply);
        assert_eq!(harness.key_count(family), 0);
        harness.run(Hook::Ingress, &packet.bytes());
    });
}

fn not_expired(family: Family, harness: &mut Harness) {
    in_each_state(family, harness, |family, harness, packet, timeout| {
        let before = harness.stats(7).connections;
        age(family, harness, timeout - 5 * HZ);
        let pod = family.pod(1, 8080);
        expect(harness, Hook::Ingress, packet, &packet.to(pod));
        age(family, harness, timeout - 5 * HZ);
        let has_reply = connection(family, harness) & SEEN_REPLY != 0;
        // The answer to a SYN is a SYN-ACK.
        let flags = if has_reply { packet.flags } else { SYN | ACK };
        let reply = Packet { flags, ..packet.to(pod).back() };
        expect(harness, Hook::Egress, &reply, &reply.from(family.frontend(1, 80)));
        assert_eq!(harness.stats(7).connections, before);
    });
}

fn collision(family: Family, harness: &mut Harness) {
    for proto in [TCP, UDP] {
        let pod = family.pod(1, 8080);
        let services = [1, 2].map(|n| Service::new(u32::from(n) + 16, proto, family.frontend(n, 80), &[pod]));
        harness.serve(&services);
        let client = family.client(1, 40_000);
        let [first, second] =
            [1, 2].map(|n| Packet { flags: SYN, ..Packet::new(proto, client, family.frontend(n, 80)) });
        expect(harness, Hook::Ingress, &first, &first.to(pod));
        let seen = harness.run(Hook::Ingress, &second.bytes());
        let flow = *harness
            .flows(family)
            .iter()
            .find(|flow| flow.frontend == second.dst && flow.proto == proto)
            .unwrap();
        assert_ne!(flow.source.port(), client.port(), "both flows would look the same to the backend");
        assert!(flow.source.port() >= 1024 && flow.source.ip() == client.ip());
        let moved = second.from(flow.source).to(pod);
        assert_eq!(seen.packet, moved.bytes());
        expect(
            harness,
            Hook::Ingress,
            &Packet { flags: ACK, ..second.clone() },
            &Packet { flags: ACK, ..moved.clone() },
        );
        let answers = [first.to(pod).back(), moved.back()];
        expect(harness, Hook::Egress, &answers[0], &first.back());
        expect(harness, Hook::Egress, &answers[1], &second.back());
    }
}

fn protocols_apart(family: Family, harness: &mut Harness) {
    let (frontend, pods) = (family.frontend(1, 53), [family.pod(1, 53), family.pod(2, 5353)]);
    harness.serve(&[Service::new(7, TCP, frontend, &pods[..1]), Service::new(8, UDP, frontend, &pods[1..])]);
    let client = family.client(1, 40_000);
    for (proto, pod) in [(TCP, pods[0]), (UDP, pods[1])] {
        let packet = Packet { flags: SYN, ..Packet::new(proto, client, frontend) };
        expect(harness, Hook::Ingress, &packet, &packet.to(pod));
        let reply = packet.to(pod).back();
        expect(harness, Hook::Egress, &reply, &reply.from(frontend));
    }
    assert_eq!(harness.flows(family).len(), 2);
}

/// Establishes a flow that has one possible backend; returns a packet of its client, and a reply.
fn one_flow(family: Family, harness: &mut Harness) -> (Packet, Packet) {
    let (frontend, pod) = (family.frontend(1, 80), family.pod(1, 8080));
    harness.serve(&[Service::new(7, TCP, frontend, &[pod])]);
    let client = family.client(1, 40_000);
    let syn = Packet::tcp(SYN, client, frontend);
    harness.run(Hook::Ingress, &syn.bytes());
    let reply = Packet::tcp(SYN | ACK, pod, client);
    expect(harness, Hook::Egress, &reply, &reply.from(frontend));
    (Packet::tcp(ACK, client, frontend), reply)
}

fn lost_forward_key(family: Family, harness: &mut Harness) {
    let (packet, reply) = one_flow(family, harness);
    let flow = harness.flow(family);
    harness.lose(&flow, Side::Forward);
    expect(harness, Hook::Ingress, &packet, &packet.to(reply.src));
    assert_eq!(harness.leads_to(&flow, Side::Forward), Some(flow.index), "it is the same flow");
    expect(harness, Hook::Egress, &reply, &reply.from(packet.dst));
    assert_eq!((harness.flows(family).len(), harness.key_count(family)), (1, 2));
    assert_eq!(harness.stats(7).connections, 1);
}

fn lost_reply_key(family: Family, harness: &mut Harness) {
    let (packet, reply) = one_flow(family, harness);
    let flow = harness.flow(family);
    harness.lose(&flow, Side::Reply);
    expect(harness, Hook::Egress, &reply, &reply);
    age(family, harness, HZ + HZ / 10);
    expect(harness, Hook::Ingress, &packet, &packet.to(reply.src));
    expect(harness, Hook::Egress, &reply, &reply.from(packet.dst));
    // The client retransmits its SYN.
    for side in [Side::Reply, Side::Forward] {
        harness.lose(&harness.flow(family), side);
        age(family, harness, HZ + HZ / 10);
        let syn = Packet { flags: SYN, ..packet.clone() };
        expect(harness, Hook::Ingress, &syn, &syn.to(reply.src));
        expect(harness, Hook::Egress, &reply, &reply.from(packet.dst));
        assert_eq!((harness.flows(family).len(), harness.key_count(family)), (1, 2));
    }
    assert_eq!(harness.stats(7).connections, 1);
    assert_eq!(harness.reasons(), []);
}

fn first_full(family: Family, harness: &mut Harness) {
    crowded(family, harness, &[0], 1);
}

fn both_full(family: Family, harness: &mut Harness) {
    crowded(family, harness, &[0, 1], 0);
}

/// Asserts that a flow is created and found if the possible buckets `full` of its keys are full, and which bucket holds the keys.
fn crowded(family: Family, harness: &mut Harness, full: &[usize], expected: usize) {
    let scene = scene(family, TCP, harness);
    let (pod, _) = scene.establish(harness);
    let flow = harness.flow(family);
    harness.forget_flows();
    let mut service = scene.service.clone();
    harness.shrink(&mut service, &[pod]);
    for side in [Side::Forward, Side::Reply] {
        for which in full {
            harness.crowd(&flow, side, *which);
        }
    }
    scene.establish(harness);
    let next = scene.with(ACK);
    expect(harness, Hook::Ingress, &next, &next.to(pod));
    let begun = harness.flow(family);
    for side in [Side::Forward, Side::Reply] {
        assert_eq!(harness.stands_in(&begun, side), Some(expected), "{side:?}");
        assert_eq!(harness.leads_to(&begun, side), Some(begun.index));
    }
    assert_eq!(harness.stats(scene.service.id).connections, 2);
}

fn reused_entry(family: Family, harness: &mut Harness) {
    let (packet, reply) = one_flow(family, harness);
    let mut flow = harness.flow(family);
    // As if another client's flow had the entry now, and the keys of the first flow were still in the index.
    flow.generation += 1;
    flow.client.set_port(40_001);
    flow.source.set_port(40_001);
    harness.change(&flow);
    expect(harness, Hook::Egress, &reply, &reply);
    expect(harness, Hook::Ingress, &packet, &packet.to(reply.src));
    assert_eq!(harness.stats(7).connections, 2, "a new flow");
    expect(harness, Hook::Egress, &reply, &reply.from(packet.dst));
}

fn reused_id(family: Family, harness: &mut Harness) {
    let (frontend, old, new) = (family.frontend(1, 53), family.pod(1, 53), family.pod(2, 53));
    harness.serve(&[Service::new(7, UDP, frontend, &[old])]);
    let packet = Packet::udp(family.client(1, 40_000), frontend);
    expect(harness, Hook::Ingress, &packet, &packet.to(old));
    let reply = packet.to(old).back();
    expect(harness, Hook::Egress, &reply, &reply.from(frontend));
    harness.serve(&[Service::new(7, UDP, frontend, &[new])]);
    expect(harness, Hook::Ingress, &packet, &packet.to(new));
    assert_eq!(harness.key_count(family), 2);
}

fn reused_id_of_another(family: Family, harness: &mut Harness) {
    let (frontend, old, new) = (family.frontend(1, 53), family.pod(1, 53), family.pod(2, 53));
    let mut service = Service::new(7, UDP, frontend, &[old]);
    harness.serve(std::slice::from_ref(&service));
    let packet = Packet::udp(family.client(1, 40_000), frontend);
    expect(harness, Hook::Ingress, &packet, &packet.to(old));
    // The same address, port and id, but of another Service.
    let id = service.backends[0].0;
    let theirs = Service { backends: vec![(id, old)], ..Service::new(8, UDP, family.frontend(2, 53), &[]) };
    service.backends = vec![(id + 1, new)];
    harness.serve(&[theirs, service]);
    expect(harness, Hook::Ingress, &packet, &packet.to(new));
}

fn stale_tag(family: Family, harness: &mut Harness) {
    let service = Service::new(7, TCP, family.frontend(1, 80), &[family.pod(1, 8080)]);
    harness.serve(std::slice::from_ref(&service));
    let entry = ServiceEntry { tag: service.entry().tag ^ 1, ..service.entry() };
    harness.write(&[Write::Service(service.frontend_key(), entry)]);
    let packet = Packet::tcp(SYN, family.client(1, 40_000), service.frontend);
    expect(harness, Hook::Ingress, &packet, &packet);
    assert_eq!(harness.flows(family).len(), 0);
}

fn all_gone(family: Family, harness: &mut Harness) {
    let pods = [family.pod(1, 8080), family.pod(2, 8080)];
    let mut service = Service::new(7, TCP, family.frontend(1, 80), &pods);
    harness.serve(std::slice::from_ref(&service));
    let entry = service.entry();
    harness.shrink(&mut service, &[]);
    harness.write(&[
        Write::Service(service.frontend_key(), entry),
        Write::Slots(7 * 16, vec![7 * 16, 7 * 16 + 1]),
    ]);
    drops(family, harness, &service);
}

fn no_slot(family: Family, harness: &mut Harness) {
    let service = Service::new(7, TCP, family.frontend(1, 80), &[family.pod(1, 8080)]);
    harness.serve(std::slice::from_ref(&service));
    let entry = ServiceEntry { slot_base: u32::MAX - 1, ..service.entry() };
    harness.write(&[Write::Service(service.frontend_key(), entry)]);
    drops(family, harness, &service);
}

fn drops(family: Family, harness: &mut Harness, service: &Service) {
    let packet = Packet::tcp(SYN, family.client(1, 40_000), service.frontend);
    let seen = harness.run(Hook::Ingress, &packet.bytes());
    assert_eq!((seen.verdict, seen.packet), (DROP, packet.bytes()));
    assert_eq!(harness.refusals(), [(7, Reason::MapInconsistent, 1)]);
    assert_eq!((harness.flows(family).len(), harness.key_count(family)), (0, 0));
}
