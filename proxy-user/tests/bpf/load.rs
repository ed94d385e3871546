//! Counts of open connections: what is counted and for how long, and where new connections go.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use proxy_common::backend::{BACKEND_ACTIVE, BACKEND_WEIGHT_SHIFT};
use proxy_common::config::seconds;
use proxy_common::connections;
use proxy_common::flow::{STATE_COUNTS, STATE_DIRECT};
use proxy_common::map_names::CONNECTIONS;
use proxy_common::select::Algorithm;
use proxy_common::service::ServiceEntry;
use proxy_core::store::{Backend, Write};

use crate::Scenario;
use proxy_testbed::Family;
use proxy_testbed::harness::{DROP, HZ, Harness, Hook, Service, Tracked};
use proxy_testbed::packet::{ACK, FIN, Packet, RST, SYN, TCP, UDP};

pub const SCENARIOS: [Scenario; 9] = [
    scenario("a connection counts from its SYN to its second FIN or its reset", 64, counted),
    scenario("a reset that is taken back counts again", 64, taken_back),
    scenario("an evicted flow and one that has expired do not count", 8, evicted),
    scenario("the agent subtracts expired flows from the count", 64, recounted),
    scenario("UDP counts until it expires, a direct flow never does", 64, datagrams),
    scenario("flows that began under another algorithm count as they began", 64, changed),
    scenario("new connections go to the endpoint with fewer", 1024, fewer),
    scenario("shares are the weights", 4096, weighted),
    scenario("the count is zero after a quarter of a million connections", 256, many),
];

const fn scenario(name: &'static str, flows: u32, test: fn(Family, &mut Harness)) -> Scenario {
    Scenario { name, flows, test }
}

const ID: u32 = 9;
const PODS: u16 = 2;

/// Serves a Service with endpoints of these weights.
fn serve(family: Family, harness: &mut Harness, proto: u8, algorithm: Algorithm, weights: &[u32]) -> Service {
    let pods: Vec<_> = (1..=weights.len() as u16).map(|n| family.pod(n, 8080)).collect();
    let service = Service::new(ID, proto, family.frontend(1, 80), &pods);
    harness.serve(std::slice::from_ref(&service));
    let mut slots = Vec::new();
    for ((id, at), weight) in service.backends.iter().zip(weights) {
        let flags = weight << BACKEND_WEIGHT_SHIFT;
        let (addr, port) = (at.ip(), at.port());
        let row = Backend { addr, port, proto, state: BACKEND_ACTIVE, service: ID, flags };
        harness.write(&[Write::Backend(*id, row)]);
        let times = if algorithm.repeats_slots() { *weight } else { 1 };
        slots.extend(std::iter::repeat_n(*id, times as usize));
    }
    let slot_count = slots.len() as u32;
    let entry = ServiceEntry { algorithm: algorithm as u8, slot_count, ..service.entry() };
    harness.write(&[Write::Slots(ID * 16, slots), Write::Service(service.frontend_key(), entry)]);
    service
}

/// Returns the counted open connections of each endpoint.
fn open(harness: &Harness, service: &Service) -> Vec<i64> {
    let counts = harness.array::<u64>(CONNECTIONS);
    service.backends.iter().map(|(id, _)| connections::open(counts.get(id, 0).unwrap()).into()).collect()
}

/// Returns the counted open connections of all endpoints together.
fn total(harness: &Harness, service: &Service) -> i64 {
    open(harness, service).iter().sum()
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap()
}

/// Returns a packet of the n-th client.
fn packet(service: &Service, family: Family, n: u32, flags: u8) -> Packet {
    let client = family.client((n / 1000) as u16 + 1, (n % 1000) as u16 + 20_000);
    Packet { flags, ..Packet::new(service.proto, client, service.frontend) }
}

/// Sends a packet of the n-th client; returns its endpoint, or `None` if the packet is dropped.
fn send(harness: &mut Harness, service: &Service, family: Family, n: u32, flags: u8) -> Option<SocketAddr> {
    let packet = packet(service, family, n, flags);
    let seen = harness.run(Hook::Ingress, &packet.bytes());
    let to = |pod: &&(u32, SocketAddr)| packet.to(pod.1).bytes() == seen.packet;
    let found = service.backends.iter().find(to).map(|(_, pod)| *pod);
    assert!(found.is_some() || seen.verdict == DROP, "{seen:?}, {:?}", harness.reasons());
    found
}

/// Sends an answer of the endpoint.
fn answer(harness: &mut Harness, service: &Service, family: Family, n: u32, pod: SocketAddr, flags: u8) {
    let reply = Packet { flags, ..packet(service, family, n, 0).to(pod).back() };
    let seen = harness.run(Hook::Egress, &reply.bytes());
    assert_eq!(seen.packet, reply.from(service.frontend).bytes());
}

fn counted(family: Family, harness: &mut Harness) {
    for algorithm in Algorithm::ALL.iter().filter(|algorithm| algorithm.is_by_load()) {
        let service = serve(family, harness, TCP, *algorithm, &[1, 1]);
        let base = 100 * *algorithm as u32;
        for (id, _) in &service.backends {
            // Without the time of an answer that was late because the machine was busy.
            harness.array::<u64>(CONNECTIONS).set(*id, 0, 0).unwrap();
        }
        let pod = send(harness, &service, family, base, SYN).unwrap();
        assert_eq!(send(harness, &service, family, base, SYN), Some(pod));
        answer(harness, &service, family, base, pod, SYN | ACK);
        send(harness, &service, family, base, ACK);
        let other = send(harness, &service, family, base + 1, SYN).unwrap();
        assert_ne!(pod, other, "the idle one of two");
        assert_eq!(open(harness, &service), [1, 1]);
        send(harness, &service, family, base, FIN | ACK);
        assert_eq!(total(harness, &service), 2, "one end is done");
        answer(harness, &service, family, base, pod, FIN | ACK);
        assert_eq!(total(harness, &service), 1);
        send(harness, &service, family, base, ACK);
        send(harness, &service, family, base + 1, RST);
        send(harness, &service, family, base + 1, RST);
        assert_eq!(open(harness, &service), [0, 0]);
        // A new connection uses the ports of a closed one.
        send(harness, &service, family, base, SYN).unwrap();
        assert_eq!(total(harness, &service), 1);
        send(harness, &service, family, base, RST);
        assert_eq!(open(harness, &service), [0, 0]);
    }
    let service = serve(family, harness, TCP, Algorithm::Random, &[1, 1]);
    send(harness, &service, family, 1, SYN);
    assert_eq!(open(harness, &service), [0, 0], "it is not needed");
}

fn taken_back(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, TCP, Algorithm::LeastConnections, &[1, 1]);
    let pod = send(harness, &service, family, 1, SYN).unwrap();
    answer(harness, &service, family, 1, pod, SYN | ACK);
    send(harness, &service, family, 1, ACK);
    for _ in 0..3 {
        send(harness, &service, family, 1, RST);
        assert_eq!(total(harness, &service), 0);
        send(harness, &service, family, 1, ACK);
        assert_eq!(total(harness, &service), 1);
    }
}

/// Makes a flow look as if it had been silent for more than `secs` seconds.
fn silence(harness: &Harness, flow: &Tracked, secs: u32) {
    let mut flow = *flow;
    flow.last_seen = harness.now().wrapping_sub((secs + 1) * HZ);
    harness.change(&flow);
}

fn evicted(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, TCP, Algorithm::LeastConnections, &[1, 1]);
    for n in 0..200 {
        send(harness, &service, family, n, SYN);
        let flows = harness.flows(family);
        assert_eq!(total(harness, &service), number(flows.len()), "after {n}");
        // Half of the flows were silent for more than a second now: a new flow evicts one of these.
        for flow in flows.iter().filter(|flow| flow.index % 2 == 0) {
            silence(harness, flow, 1);
        }
    }
    for flow in harness.flows(family) {
        silence(harness, &flow, seconds::TCP_SYN_SENT);
    }
    let reply = |flow: &Tracked| Packet { flags: ACK, ..Packet::new(TCP, flow.backend, flow.source) };
    for flow in harness.flows(family) {
        let before = total(harness, &service);
        harness.run(Hook::Egress, &reply(&flow).bytes());
        assert_eq!(total(harness, &service), before - 1, "it is found, has expired, and is removed");
    }
    assert_eq!((open(harness, &service), harness.flows(family).len()), (vec![0, 0], 0));
}

/// Returns the real number of jiffies in a second of this kernel: the agent computes jiffies from its own clock.
fn kernels_hz(harness: &Harness) -> u32 {
    let up = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic).tv_sec;
    let distance =
        |hz: &u32| harness.now().cast_signed().wrapping_sub(((up - 300) * i64::from(*hz)) as i32).abs_diff(0);
    [100, 250, 300, 1000].into_iter().min_by_key(distance).unwrap()
}

fn recounted(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, TCP, Algorithm::WeightedLeastConnections, &[1, 1]);
    for n in 0..6 {
        send(harness, &service, family, n, SYN);
    }
    let hz = kernels_hz(harness);
    let config = harness.configure(|config| config.hz = hz);
    let seen = harness.view().recount().unwrap();
    assert_eq!((seen.noted, seen.expired), (seen.flows, 0), "they were seen a moment ago");
    for flow in harness.flows(family).iter().take(2) {
        // Longer than the tolerance for the agent's clock.
        silence(harness, flow, 10 * seconds::TCP_SYN_SENT);
    }
    let seen = harness.view().recount().unwrap();
    assert_eq!((seen.noted, seen.expired), (seen.flows, 2));
    assert_eq!(total(harness, &service), 4);
    // New flows take the entries of the expired ones, which must not be subtracted again.
    for n in 100..300 {
        send(harness, &service, family, n, SYN);
        let counts = harness.flows(family).iter().filter(|flow| flow.state & STATE_COUNTS != 0).count();
        assert_eq!(total(harness, &service), number(counts), "{n}");
    }
    let wrong: BTreeMap<u32, i64> = [(service.backends[0].0, 5), (service.backends[1].0, -7)].into();
    let before = open(harness, &service);
    harness.view().correct(&wrong).unwrap();
    assert_eq!(open(harness, &service), [before[0] + 5, before[1] - 7]);
    let seen = harness.view().recount().unwrap();
    let off = |id: &u32| seen.noted[id] - seen.flows.get(id).copied().unwrap_or_default();
    assert_eq!(wrong.keys().map(off).collect::<Vec<_>>(), [5, -7]);
    harness.configure(|now| *now = config);
}

fn datagrams(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, UDP, Algorithm::ShortestExpectedDelay, &[1, 1]);
    for n in 0..4 {
        let pod = send(harness, &service, family, n, 0).unwrap();
        answer(harness, &service, family, n, pod, 0);
    }
    assert_eq!(open(harness, &service), [2, 2]);
    let client = packet(&service, family, 0, 0).src;
    let own = harness.flows(family).into_iter().find(|flow| flow.client == client).unwrap();
    // The same client port, directly to the endpoint.
    harness.run(Hook::Ingress, &Packet::new(UDP, client, own.backend).bytes());
    let direct = harness.flows(family).into_iter().find(|flow| flow.state & STATE_DIRECT != 0).unwrap();
    assert_eq!((direct.state & STATE_COUNTS, open(harness, &service)), (0, vec![2, 2]));
    silence(harness, &own, seconds::UDP);
    send(harness, &service, family, 0, 0).unwrap();
    assert_eq!(total(harness, &service), 4, "one has expired, and one has begun");
}

fn changed(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, TCP, Algorithm::LeastConnections, &[1, 1]);
    let pod = send(harness, &service, family, 1, SYN).unwrap();
    let service = serve(family, harness, TCP, Algorithm::RoundRobin, &[1, 1]);
    assert_eq!(send(harness, &service, family, 1, SYN), Some(pod), "it stays where it is");
    send(harness, &service, family, 2, SYN);
    assert_eq!(total(harness, &service), 1);
    let service = serve(family, harness, TCP, Algorithm::NeverQueue, &[1, 1]);
    send(harness, &service, family, 3, SYN);
    assert_eq!(total(harness, &service), 2);
    for n in [1, 2, 3] {
        send(harness, &service, family, n, RST);
    }
    assert_eq!(open(harness, &service), [0, 0]);
}

fn fewer(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, TCP, Algorithm::LeastConnections, &[1, 7, 1, 1]);
    for n in 0..400 {
        send(harness, &service, family, n, SYN);
    }
    let open_now = open(harness, &service);
    // With two random choices, no endpoint is much ahead; with one choice, the first would be ahead by 17 or more.
    assert!(open_now.iter().all(|count| count.abs_diff(100) <= 8), "{open_now:?}");
    let crowded = service.backends[PODS as usize].1;
    // All connections end, except those of one endpoint: new ones go to the others until all have the same number.
    for flow in harness.flows(family).iter().filter(|flow| flow.backend != crowded) {
        let last = Packet { flags: RST, ..Packet::new(TCP, flow.client, flow.frontend) };
        harness.run(Hook::Ingress, &last.bytes());
    }
    let held = total(harness, &service);
    for n in 500..650 {
        assert_ne!(send(harness, &service, family, n, SYN), Some(crowded), "{n}");
    }
    assert_eq!(total(harness, &service), held + 150);
}

fn weighted(family: Family, harness: &mut Harness) {
    use Algorithm::{NeverQueue, ShortestExpectedDelay, WeightedLeastConnections};
    for algorithm in [WeightedLeastConnections, ShortestExpectedDelay, NeverQueue] {
        let service = serve(family, harness, TCP, algorithm, &[1, 2, 5]);
        let base = 1000 * algorithm as u32;
        for n in base..base + 400 {
            send(harness, &service, family, n, SYN);
        }
        let counts = open(harness, &service);
        for (count, due) in counts.iter().zip([50_i64, 100, 250]) {
            assert!(count.abs_diff(due) <= 3 + due.unsigned_abs() / 10, "{algorithm:?}: {counts:?}");
        }
        for n in base..base + 400 {
            send(harness, &service, family, n, RST);
        }
        assert_eq!(total(harness, &service), 0);
    }
}

/// Together with the other family and hook, the test has a million connections.
fn many(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, TCP, Algorithm::LeastConnections, &[1, 1, 1]);
    for n in 0..250_000 {
        // Some connections end at once. Some of the others are evicted, while the table is full of closed ones.
        send(harness, &service, family, n % 60_000, SYN);
        if n % 3 != 0 {
            send(harness, &service, family, n % 60_000, RST);
        }
    }
    let counts = |flow: &Tracked| flow.state & STATE_COUNTS != 0;
    let closed = |flow: &Tracked| proxy_common::conntrack::is_closed(flow.state);
    let left = harness.flows(family).into_iter().filter(|flow| counts(flow) && !closed(flow)).count();
    assert_eq!(total(harness, &service), number(left));
    assert!((1..=256).contains(&left), "{left}");
}
