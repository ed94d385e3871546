//! For a while, new connections skip endpoints that refuse connections or do not answer them; never the last endpoint, and
//! for all clients only because of refusals of two clients.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use proxy_common::backend::BACKEND_IN_CLUSTER;
use proxy_common::health::{
    HEALTH_LEVEL, HEALTH_NEWCOMER, HEALTH_SINCE, HEALTH_TIME, SKIP_TIME, after_answer, after_reach, client,
    ejected_for, has_answered, skip_slot,
};
use proxy_common::map_names as names;
use proxy_common::reason::Reason;
use proxy_common::select::Algorithm;
use proxy_common::service::{KIND_NODE_PORT, SERVICE_EJECTS, ServiceEntry};
use proxy_core::store::{Table, Write};

use crate::Scenario;
use crate::snat::{comes_in, forget, node_port, node_port_key, sent_on};
use proxy_testbed::Family;
use proxy_testbed::harness::{DROP, HZ, Harness, Hook, NEXT, REDIRECT, Service};
use proxy_testbed::node::know;
use proxy_testbed::packet::{ACK, ETHERNET, Packet, RST, SYN, TCP, ends};

pub const SCENARIOS: [Scenario; 10] = [
    scenario("a refusal is dropped once, if another endpoint has answered lately", refused),
    scenario("a Service whose endpoints all refuse is refused at once", all_refuse),
    scenario(
        "an ICMP error about the SYN is dropped once, if another endpoint has answered lately",
        unreachable,
    ),
    scenario("an unanswered SYN goes elsewhere when it is retransmitted", silent),
    scenario("refusals of two clients eject an endpoint for all, each time for longer", ejected),
    scenario("one client ejects no endpoint for others, and a forged reset none at all", alone),
    scenario("the last endpoint is never skipped", last),
    scenario("session affinity moves for a refusal, and not for silence", affinity),
    scenario("in the middle of a connection nothing is skipped", middle),
    scenario("a newcomer gets a small share until it answers", newcomer),
];

const fn scenario(name: &'static str, test: fn(Family, &mut Harness)) -> Scenario {
    Scenario { name, flows: 1024, test }
}

const ID: u32 = 7;
/// The client's sequence number. The next number has another upper half.
const SEQ: u32 = 0x1234_ffff;

fn serve(family: Family, harness: &mut Harness, pods: u16) -> Service {
    let pods: Vec<_> = (1..=pods).map(|n| family.pod(n, 8080)).collect();
    let flags = if pods.len() > 1 { SERVICE_EJECTS } else { 0 };
    let service = Service { flags, ..Service::new(ID, TCP, family.frontend(1, 80), &pods) };
    harness.serve(std::slice::from_ref(&service));
    (0..16).for_each(|n| set_health(harness, ID * 16 + n, 0));
    let mut skips = harness.array::<u64>(names::SKIPS);
    for at in 0..skips.len() {
        if skips.get(&at, 0).unwrap() != 0 {
            skips.set(at, 0, 0).unwrap();
        }
    }
    service
}

/// Makes endpoints look as if they had answered connections a moment ago.
fn all_answer(harness: &Harness, service: &Service) {
    let word = after_answer(0, harness.now(), HZ);
    service.backends.iter().for_each(|(id, _)| set_health(harness, *id, word));
}

fn set_health(harness: &Harness, id: u32, word: u64) {
    harness.array::<u64>(names::HEALTH).set(id, word, 0).unwrap();
}

fn health(harness: &Harness, id: u32) -> u64 {
    harness.array::<u64>(names::HEALTH).get(&id, 0).unwrap()
}

/// Returns the ids of the ejected endpoints, with the remaining seconds.
fn ejections(harness: &Harness, service: &Service) -> Vec<(u32, u32)> {
    let left = |id: u32| ejected_for(health(harness, id), harness.now(), HZ).map(|left| left.div_ceil(HZ));
    service.backends.iter().filter_map(|(id, _)| Some((*id, left(*id)?))).collect()
}

fn id_of(service: &Service, pod: SocketAddr) -> u32 {
    service.backends.iter().find(|(_, at)| *at == pod).unwrap().0
}

/// Makes the last failure of an endpoint look as if it had been `jiffies` ago.
fn pass(harness: &Harness, id: u32, jiffies: u32) {
    let since = u64::from(harness.now().wrapping_sub(jiffies));
    set_health(harness, id, health(harness, id) & !HEALTH_TIME | since);
}

/// Makes the last failure of a client look as if it had been `jiffies` ago.
fn pass_skip(family: Family, harness: &Harness, id: u32, host: u16, jiffies: u32) {
    let seed = harness.configure(|_| ()).flow_seed;
    let number = match family.client(host, 0).ip() {
        IpAddr::V4(addr) => client(&addr.octets(), seed),
        IpAddr::V6(addr) => client(&addr.octets(), seed),
    };
    let (index, _) = skip_slot(number, id);
    let mut skips = harness.array::<u64>(names::SKIPS);
    let since = u64::from(harness.now().wrapping_sub(jiffies));
    let word = skips.get(&index, 0).unwrap();
    assert_ne!(word, 0, "the client has not failed");
    skips.set(index, word & !SKIP_TIME | since, 0).unwrap();
}

fn syn(family: Family, service: &Service, host: u16, port: u16) -> Packet {
    Packet { seq: SEQ, ..Packet::tcp(SYN, family.client(host, port), service.frontend) }
}

/// Makes the only flow look as if it had been silent for `jiffies`.
fn wait(family: Family, harness: &Harness, jiffies: u32) {
    let mut flow = harness.flow(family);
    flow.last_seen = harness.now().wrapping_sub(jiffies);
    harness.change(&flow);
}

/// Returns the endpoint that a SYN goes to.
fn goes_to(harness: &mut Harness, syn: &Packet) -> SocketAddr {
    let seen = harness.run(Hook::Ingress, &syn.bytes());
    assert_eq!(seen.verdict, NEXT, "{:?}", harness.reasons());
    let (_, pod) = ends(&seen.packet);
    assert_eq!(seen.packet, syn.to(pod).bytes());
    pod
}

/// Returns the answer of an endpoint to a SYN.
fn answer(syn: &Packet, pod: SocketAddr, flags: u8) -> Packet {
    Packet { flags, seq: 0, ack: syn.seq.wrapping_add(1), ..syn.to(pod).back() }
}

/// Lets an endpoint refuse a connection; returns whether the client gets the refusal.
fn refuses(harness: &mut Harness, syn: &Packet, pod: SocketAddr) -> bool {
    let reset = answer(syn, pod, RST | ACK);
    let seen = harness.run(Hook::Egress, &reset.bytes());
    if seen.verdict == DROP {
        return false;
    }
    assert_eq!((seen.verdict, seen.packet), (NEXT, reset.from(syn.dst).bytes()));
    true
}

fn accepts(harness: &mut Harness, syn: &Packet, pod: SocketAddr) {
    let accepted = answer(syn, pod, SYN | ACK);
    let seen = harness.run(Hook::Egress, &accepted.bytes());
    assert_eq!((seen.verdict, seen.packet), (NEXT, accepted.from(syn.dst).bytes()));
}

/// Lets each client connect until the endpoint has refused one of its connections and the refusal was dropped.
fn fail(
    family: Family,
    harness: &mut Harness,
    service: &Service,
    pod: SocketAddr,
    clients: &[u16],
    port: u16,
) {
    for host in clients {
        let found = (0..400).any(|n| {
            let syn = syn(family, service, *host, port + n);
            goes_to(harness, &syn) == pod && !refuses(harness, &syn, pod)
        });
        assert!(found, "client {host} never reached {pod}");
    }
}

/// Returns how many of `count` connections go to an endpoint. Their clients have met no failure.
fn share(
    family: Family,
    harness: &mut Harness,
    service: &Service,
    pod: SocketAddr,
    count: u16,
    port: u16,
) -> usize {
    (0..count)
        .filter(|n| goes_to(harness, &syn(family, service, 1000 + n % 50, port + n / 50)) == pod)
        .count()
}

fn refused(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, 2);
    all_answer(harness, &service);
    let syn = syn(family, &service, 1, 40_000);
    let first = goes_to(harness, &syn);
    assert!(!refuses(harness, &syn, first));
    assert_eq!(harness.reasons(), [(Reason::RefusalDropped, 1)]);
    assert_eq!(harness.refusals(), [(ID, Reason::RefusalDropped, 1)]);
    let second = goes_to(harness, &syn);
    assert_ne!(first, second);
    assert_eq!(harness.flow(family).backend, second);
    // One refusal of a connection is hidden, even if the first endpoint has answered another client meanwhile.
    let word = after_answer(0, harness.now(), HZ);
    set_health(harness, id_of(&service, first), word);
    assert!(refuses(harness, &syn, second));
    assert_eq!(harness.reasons(), [(Reason::RefusalDropped, 1)]);
    set_health(harness, id_of(&service, first), 0);
    assert_eq!(harness.reasons(), [(Reason::RefusalDropped, 1)]);
    // The client connects once more, and gets the refusal at once.
    let third = goes_to(harness, &syn);
    assert!(refuses(harness, &syn, third));
    // Other clients get both endpoints.
    let pods: BTreeSet<_> =
        (0..20).map(|n| goes_to(harness, &self::syn(family, &service, 2, 41_000 + n))).collect();
    assert_eq!(pods.len(), 2);

    // With SNAT, the RST arrives on the uplink.
    harness.forget_flows();
    know(family, harness);
    let pods: Vec<_> = (11..=12).map(|n| (family.pod(n, 8080), BACKEND_IN_CLUSTER)).collect();
    let orig_dst = node_port(family, harness, TCP, &pods);
    let key = node_port_key(family, TCP);
    let entry =
        ServiceEntry { tag: key.tag(), flags: SERVICE_EJECTS, kind: KIND_NODE_PORT, ..service.entry() };
    harness.write(&[Write::Service(key, entry)]);
    let syn = Packet { seq: SEQ, ..Packet::tcp(SYN, family.client(9, 40_000), orig_dst) };
    all_answer(harness, &service);
    let mut met = Vec::new();
    for is_last in [false, true] {
        let seen = comes_in(harness, &syn);
        assert_eq!(seen.verdict, REDIRECT, "{:?}", harness.reasons());
        let (source, pod) = ends(&seen.packet);
        met.push(pod);
        let reset = answer(&syn.from(source), pod, RST | ACK);
        let seen = comes_in(harness, &reset);
        assert_eq!(seen.verdict, if is_last { REDIRECT } else { DROP }, "{met:?}: {:?}", harness.reasons());
        if is_last {
            assert_eq!(seen.packet, sent_on(&reset.from(orig_dst).to(syn.src)));
        }
    }
    assert_ne!(met[0], met[1]);
    forget(harness);
}

fn all_refuse(family: Family, harness: &mut Harness) {
    for count in [2, 3, 6] {
        let service = serve(family, harness, count);
        for n in 0..20 {
            let syn = syn(family, &service, n % 5, 40_000 + n);
            let pod = goes_to(harness, &syn);
            assert!(refuses(harness, &syn, pod));
        }
    }
    assert!(harness.reasons().iter().all(|(reason, _)| *reason == Reason::EndpointEjected));
}

fn unreachable(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, 2);
    all_answer(harness, &service);
    let syn = syn(family, &service, 1, 40_000);
    let router = family.client(200, 0).ip();
    let first = goes_to(harness, &syn);
    let (gone, too_big) = if first.is_ipv4() { ([3, 1], [3, 4]) } else { ([1, 0], [2, 0]) };
    let error =
        |syn: &Packet, pod, kind| syn.to(pod).error(router, kind, [0; 4], syn.segment_at() - ETHERNET + 8);
    // The error is of another type, or about another connection.
    let forged = Packet { seq: SEQ ^ 0x0100_0000, ..syn.clone() };
    for packet in [error(&syn, first, too_big), error(&forged, first, gone)] {
        assert_eq!(harness.run(Hook::Egress, &packet).verdict, NEXT);
    }
    assert_eq!(harness.run(Hook::Egress, &error(&syn, first, gone)).verdict, DROP);
    assert_eq!(harness.refusals(), [(ID, Reason::RefusalDropped, 1)]);
    let second = goes_to(harness, &syn);
    assert_ne!(first, second);
    let seen = harness.run(Hook::Egress, &error(&syn, second, gone));
    let expected = syn.error(router, gone, [0; 4], syn.segment_at() - ETHERNET + 8);
    assert_eq!((seen.verdict, seen.packet), (NEXT, expected));
}

fn silent(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, 2);
    let syn = syn(family, &service, 1, 40_000);
    let first = goes_to(harness, &syn);
    // The SYN is retransmitted too soon.
    assert_eq!(goes_to(harness, &syn), first);
    wait(family, harness, HZ);
    let second = goes_to(harness, &syn);
    assert_ne!(first, second);
    assert_eq!(harness.flow(family).backend, second);
    // The connection stays with an endpoint that has answered.
    accepts(harness, &syn, second);
    wait(family, harness, 3 * HZ);
    assert_eq!(goes_to(harness, &syn), second);
    assert!(has_answered(health(harness, id_of(&service, second)), harness.now(), HZ));
    // Any number of clients that are not answered eject no endpoint.
    harness.forget_flows();
    for host in 10..40 {
        let syn = self::syn(family, &service, host, 41_000);
        let met = goes_to(harness, &syn);
        wait(family, harness, HZ);
        assert_ne!(goes_to(harness, &syn), met);
        harness.forget_flows();
    }
    assert_eq!(ejections(harness, &service), []);
    let pods: BTreeSet<_> =
        (0..20).map(|n| goes_to(harness, &self::syn(family, &service, 2, 42_000 + n))).collect();
    assert_eq!(pods.len(), 2);
    assert_eq!(harness.reasons(), []);
}

fn ejected(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, 3);
    let pod = service.backends[1].1;
    let id = id_of(&service, pod);
    all_answer(harness, &service);
    for (round, port) in [(0u32, 2_000), (1, 12_000), (2, 22_000)] {
        let host = 10 * round as u16;
        fail(family, harness, &service, pod, &[host + 1, host + 2], port);
        assert!(harness.refusals().contains(&(ID, Reason::EndpointEjected, u64::from(round) + 1)));
        assert_eq!((health(harness, id) & HEALTH_LEVEL).count_ones(), round.count_ones());
        assert_eq!(ejections(harness, &service), [(id, 1 << round)]);
        pass(harness, id, (HZ << round) - HZ / 5);
        assert_eq!(share(family, harness, &service, pod, 300, port + 1_000), 0);
        pass(harness, id, HZ << round);
        // Most connections go to the other two endpoints.
        let some = share(family, harness, &service, pod, 1_000, port + 2_000);
        assert!((10..150).contains(&some), "{some} in round {round}");
    }
    // An endpoint that answers is no longer ejected.
    let found = (0..400).find_map(|n| {
        let syn = syn(family, &service, 1000, 50_000 + n);
        (goes_to(harness, &syn) == pod).then_some(syn)
    });
    accepts(harness, &found.unwrap(), pod);
    assert!(has_answered(health(harness, id), harness.now(), HZ));
    let some = share(family, harness, &service, pod, 600, 55_000);
    assert!((120..280).contains(&some), "{some}");
}

fn alone(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, 2);
    let pod = service.backends[0].1;
    let id = id_of(&service, pod);
    // RSTs that acknowledge another SYN, or nothing.
    for n in 0..40 {
        let syn = syn(family, &service, n % 4, 2_000 + n);
        let to = goes_to(harness, &syn);
        let forged = Packet { ack: SEQ.wrapping_add(0x10_0000), ..answer(&syn, to, RST | ACK) };
        let bare = answer(&syn, to, RST);
        for packet in [forged, bare] {
            assert_eq!(harness.run(Hook::Egress, &packet.bytes()).verdict, NEXT);
        }
    }
    assert_eq!(service.backends.iter().map(|(id, _)| health(harness, *id)).sum::<u64>(), 0);
    for n in 0..200 {
        let syn = syn(family, &service, 1, 10_000 + n);
        pass(harness, id, HZ);
        if goes_to(harness, &syn) == pod {
            refuses(harness, &syn, pod);
        }
    }
    assert!(harness.refusals().iter().all(|(_, reason, _)| *reason != Reason::EndpointEjected));
    assert_eq!(ejections(harness, &service).len(), 0);
    // Other clients still get the endpoint.
    let some = share(family, harness, &service, pod, 400, 20_000);
    assert!((130..270).contains(&some), "{some}");
    // The client itself skips the endpoint for longer each time.
    let mut port = 25_000;
    pass_skip(family, harness, id, 1, 100 * HZ);
    for seconds in [2, 8, 32, 64] {
        let failed = (0..400).any(|_| {
            port += 1;
            let syn = syn(family, &service, 1, port);
            let met = goes_to(harness, &syn) == pod;
            if met {
                refuses(harness, &syn, pod);
            }
            met
        });
        assert!(failed, "the client never met it in round {seconds}");
        pass_skip(family, harness, id, 1, seconds * HZ - HZ / 5);
        let met = (0..40).any(|n| goes_to(harness, &syn(family, &service, 1, port + 1 + n)) == pod);
        assert!(!met, "round {seconds}");
        port += 40;
        pass_skip(family, harness, id, 1, seconds * HZ);
    }
}

fn last(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, 1);
    let lonely = syn(family, &service, 1, 40_000);
    let pod = goes_to(harness, &lonely);
    assert!(refuses(harness, &lonely, pod));
    assert_eq!(health(harness, id_of(&service, pod)), 0);
    let service = serve(family, harness, 3);
    for (pod, port) in service.backends.iter().map(|(_, pod)| *pod).zip([2_000, 4_000, 6_000]) {
        fail_whatever(family, harness, &service, pod, port);
    }
    assert_eq!(ejections(harness, &service).len(), 3);
    let pods: BTreeSet<_> =
        (0..60).map(|n| goes_to(harness, &syn(family, &service, 1000 + n, 9_000))).collect();
    assert_eq!(pods.len(), 3);
    let syn = syn(family, &service, 2000, 9_000);
    let pod = goes_to(harness, &syn);
    assert!(refuses(harness, &syn, pod), "no endpoint could take it");
}

/// Lets connections of two clients to an endpoint fail, even if no other endpoint is left for them.
fn fail_whatever(family: Family, harness: &mut Harness, service: &Service, pod: SocketAddr, port: u16) {
    for host in [10 * port, 10 * port + 1] {
        let syn =
            (0..400).map(|n| syn(family, service, host, port + n)).find(|syn| goes_to(harness, syn) == pod);
        refuses(harness, &syn.unwrap(), pod);
    }
}

fn affinity(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, 4);
    let rows = service.writes().into_iter().filter_map(|write| match write {
        Write::Backend(id, row) => {
            Some(Write::Backend(id, proxy_core::store::Backend { flags: BACKEND_IN_CLUSTER, ..row }))
        }
        _ => None,
    });
    let mut writes: Vec<_> = rows.collect();
    writes
        .push(Write::Service(service.frontend_key(), ServiceEntry { affinity_secs: 600, ..service.entry() }));
    harness.write(&writes);
    let host = 77 + u16::from(family == Family::V6) + 2 * harness.taken.min(1) as u16;
    let connect = |harness: &mut Harness, port| goes_to(harness, &syn(family, &service, host, port));
    let first = connect(harness, 2_000);
    assert!((2_001..2_020).all(|port| connect(harness, port) == first));
    // The endpoint does not answer: the client stays, as with kube-proxy.
    harness.forget_flows();
    for _ in 0..3 {
        assert_eq!(connect(harness, 2_030), first);
        wait(family, harness, HZ);
    }
    assert_eq!(connect(harness, 2_030), first);
    harness.forget_flows();
    // It refuses a connection, but no other endpoint is known to work.
    let refused = syn(family, &service, host, 2_020);
    assert_eq!(goes_to(harness, &refused), first);
    assert!(refuses(harness, &refused, first));
    assert!((2_021..2_025).all(|port| connect(harness, port) == first));
    harness.forget_flows();
    all_answer(harness, &service);
    assert_eq!(goes_to(harness, &refused), first);
    assert!(!refuses(harness, &refused, first));
    let second = goes_to(harness, &refused);
    assert_ne!(first, second);
    assert!((3_000..3_020).all(|port| connect(harness, port) == second));
    // The first endpoint answers again, but the client stays with the second one.
    all_answer(harness, &service);
    assert!((4_000..4_020).all(|port| connect(harness, port) == second));
}

fn middle(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, 2);
    let entry = ServiceEntry { algorithm: Algorithm::SourceHash as u8, ..service.entry() };
    harness.write(&[Write::Service(service.frontend_key(), entry)]);
    let begin = syn(family, &service, 1, 40_000);
    let pod = goes_to(harness, &begin);
    for host in 2..400 {
        let syn = syn(family, &service, host, 2_000);
        if goes_to(harness, &syn) == pod {
            refuses(harness, &syn, pod);
        }
    }
    assert_eq!(ejections(harness, &service).len(), 1);
    let ack = Packet { flags: ACK, ..begin.clone() };
    assert_eq!(goes_to(harness, &ack), pod, "the flow");
    harness.forget_flows();
    assert_eq!(goes_to(harness, &ack), pod, "a connection whose flow is lost");
    harness.forget_flows();
    assert_ne!(goes_to(harness, &begin), pod, "a new one");
}

fn newcomer(family: Family, harness: &mut Harness) {
    let service = serve(family, harness, 2);
    let (old, new) = (service.backends[0].0, service.backends[1]);
    let table = if new.1.is_ipv4() { Table::Backends } else { Table::Backends6 };
    // No other endpoint has answered so far, so the endpoint is no newcomer.
    harness.write(&[Write::ResetHealth(new.0, table, [old].into())]);
    assert_eq!(health(harness, new.0), 0);
    set_health(harness, old, after_answer(0, harness.now(), HZ));
    harness.write(&[Write::ResetHealth(new.0, table, [old].into())]);
    assert_eq!(health(harness, new.0), HEALTH_NEWCOMER);
    assert_eq!(share(family, harness, &service, new.1, 400, 900), 0, "it has just joined");
    pass(harness, new.0, 3 * HZ);
    let some = share(family, harness, &service, new.1, 1_000, 2_000);
    assert!((20..200).contains(&some), "{some}");
    assert_eq!(ejections(harness, &service).len(), 0);
    pass(harness, new.0, 32 * HZ);
    let some = share(family, harness, &service, new.1, 400, 3_000);
    assert!((120..280).contains(&some), "{some}");
    // An endpoint that a socket of a pod has reached makes newcomers, too, but that is all.
    set_health(harness, old, after_reach(0));
    assert!(!has_answered(health(harness, old), harness.now(), HZ));
    harness.write(&[Write::ResetHealth(new.0, table, [old].into())]);
    assert_eq!(health(harness, new.0), HEALTH_NEWCOMER);
    goes_to(harness, &syn(family, &service, 1, 49_000));
    set_health(harness, new.0, HEALTH_NEWCOMER | HEALTH_SINCE);
    pass(harness, new.0, 3 * HZ);
    let found = (0..400).find_map(|n| {
        let syn = syn(family, &service, 1, 50_000 + n);
        (goes_to(harness, &syn) == new.1).then_some(syn)
    });
    accepts(harness, &found.unwrap(), new.1);
    let some = share(family, harness, &service, new.1, 400, 4_000);
    assert!((120..280).contains(&some), "{some}");
}
