//! Endpoints that refuse connections or do not answer them: the connection moves to another endpoint.

use proxy_common::conntrack::is_hidden;
use proxy_common::flow::FlowEntry;
use proxy_common::health::{Failure, HEALTH_ANSWERED, NO_CLIENT, has_answered};
use proxy_common::service::{SCOPE_EXTERNAL, SERVICE_EJECTS, SERVICE_SCOPED};

use super::*;
use crate::env::Health as _;
use crate::select::health;
use crate::shared::Shared as _;

/// The answer of a closed port: it acknowledges the SYN.
const REFUSAL: Shape = Shape { flags: 0x14, ..SYN };
/// The answer of an endpoint that does not know the MPTCP connection that the SYN is to join: `MP_TCPRST`.
const UNKNOWN_MPTCP: Shape = Shape { options: 1, payload: &[30, 4, 0x80, 1], ..REFUSAL };
/// The id of the second endpoint.
const SECOND: u32 = 20;

fn second<F: Net>() -> End<F> {
    (F::addr(3), 8080)
}

fn service(slot_count: u32) -> ServiceEntry {
    ServiceEntry {
        id: 1,
        slot_base: 30,
        slot_count,
        kind: KIND_CLUSTER_IP,
        flags: SERVICE_EJECTS,
        ..ServiceEntry::NONE
    }
}

/// A Service with two endpoints, whose failures are noted.
fn two_endpoints<F: Net>() -> HostMaps<F> {
    let maps = maps::<F>(BACKEND_LOCAL);
    add_endpoint(maps, SECOND, second::<F>(), PROTO_TCP);
    maps.set_slots(30, &[7, SECOND]);
    set(maps, service(2));
    maps
}

fn set<F: Net>(maps: HostMaps<F>, entry: ServiceEntry) {
    let (addr, port) = frontend::<F>();
    maps.add_service(ServiceKey::internal(addr, port, PROTO_TCP), entry);
}

/// Lets an endpoint answer a connection of a client that no test uses otherwise.
fn works<F: Net>(maps: HostMaps<F>, endpoint: u32) {
    let before = maps.health(endpoint).unwrap().load();
    maps.health(endpoint).unwrap().store(before | HEALTH_ANSWERED);
    health::answered(maps, endpoint, NO_CLIENT);
}

fn refuse<F: Net>(maps: HostMaps<F>, endpoint: u32, client: u32) -> u32 {
    maps.note_failure(endpoint, client, Failure::Refusal as u32)
}

/// A client's SYN. Returns the endpoint that gets it.
fn connect<F: Net>(maps: HostMaps<F>, device: u32, client: End<F>) -> u32 {
    let (_, skb) = run_over(Hook::Ingress, maps, device, &packet::<F>(client, frontend::<F>(), SYN));
    if skb.wire() == packet::<F>(client, backend::<F>(), SYN) {
        return 7;
    }
    assert_eq!(skb.wire(), packet::<F>(client, second::<F>(), SYN));
    SECOND
}

/// An endpoint's answer. Returns whether the client gets it; otherwise it is dropped.
fn answer<F: Net>(maps: HostMaps<F>, endpoint: u32, client: End<F>, shape: Shape) -> bool {
    let from = if endpoint == 7 { backend::<F>() } else { second::<F>() };
    let (verdict, skb) = run_over(Hook::Egress, maps, POD, &packet::<F>(from, client, shape));
    if verdict == DROP {
        return false;
    }
    assert_eq!(skb.wire(), packet::<F>(frontend::<F>(), client, shape));
    true
}

const fn other(endpoint: u32) -> u32 {
    if endpoint == 7 { SECOND } else { 7 }
}

/// Clients with different addresses.
fn clients<F: Net>() -> impl Iterator<Item = End<F>> {
    (0..100).map(|number| (F::addr(100 + number), 4000 + u16::from(number)))
}

fn a_refused_connection<F: Net>() {
    let maps = two_endpoints::<F>();
    let client = client::<F>();
    let first = connect(maps, POD, client);
    works(maps, other(first));
    assert!(!answer(maps, first, client, REFUSAL), "the other endpoint has answered lately");
    assert_eq!(maps.refusals_of(1, Reason::RefusalDropped), 1);
    assert!(maps.flows().iter().any(|flow| is_hidden(flow.bits())));
    // The client sends its SYN again.
    maps.advance(HZ);
    assert_eq!(connect(maps, POD, client), other(first));
    works(maps, first);
    assert!(answer(maps, other(first), client, REFUSAL), "one refusal of a connection is hidden");
    assert_eq!(maps.refusals_of(1, Reason::EndpointEjected), 0, "failures of one client eject no endpoint");
}

families!(a_refused_connection_moves_to_another_endpoint = a_refused_connection());

fn endpoint_without_route<F: Net>() {
    let mut dropped = 0;
    for client in clients::<F>().take(16) {
        let maps = maps::<F>(0);
        let (addr, port) = second::<F>();
        let row = BackendEntry { addr, port, proto: PROTO_TCP, state: BACKEND_ACTIVE, service: 1, flags: 0 };
        maps.set_backend(SECOND, row);
        maps.set_slots(30, &[7, SECOND]);
        set(maps, service(2));
        works(maps, 7);
        let send = || {
            run_edited(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend::<F>(), SYN), |skb| {
                skb.routes.add::<F::Words>(&backend::<F>().0, route());
                skb.routes.set_default(Some(Route::default()));
            })
        };
        if send().0 == DROP {
            dropped += 1;
            maps.advance(HZ);
            assert_eq!(send().0, REDIRECT, "the retransmitted SYN has the other endpoint");
        }
        assert_eq!(maps.count_of(Reason::Unreachable), 0);
    }
    assert!(dropped > 0);
}

families!(syn_to_an_endpoint_without_route_moves_to_another_endpoint = endpoint_without_route());

fn an_answer_that_is_measured<F: Net>(is_hidden: bool) {
    let maps = two_endpoints::<F>();
    maps.set_measures_latency(true);
    let client = client::<F>();
    let first = connect(maps, POD, client);
    if is_hidden {
        works(maps, other(first));
    }
    assert_ne!(answer(maps, first, client, REFUSAL), is_hidden);
    assert_eq!(maps.take_syn_answers(), [(1, first, true)]);
    maps.advance(HZ);
    let second = connect(maps, POD, client);
    assert!(answer(maps, second, client, SYN_ACK));
    assert_eq!(maps.take_syn_answers(), [(1, second, false)]);
}

#[test]
fn refusal_is_measured_once_hidden_or_not() {
    for is_hidden in [false, true] {
        an_answer_that_is_measured::<V4>(is_hidden);
        an_answer_that_is_measured::<V6>(is_hidden);
    }
}

/// `edit` changes the Service before its endpoint, whose id is passed, refuses a client; the other endpoint has answered
/// lately. Returns whether the client gets the refusal.
fn refused_after<F: Net>(edit: impl Fn(HostMaps<F>, u32)) -> bool {
    let maps = two_endpoints::<F>();
    let client = client::<F>();
    let first = connect(maps, POD, client);
    works(maps, other(first));
    edit(maps, first);
    answer(maps, first, client, REFUSAL)
}

fn no_other_endpoint<F: Net>() {
    assert!(!refused_after::<F>(|_, _| {}));
    assert!(
        refused_after::<F>(|maps, _| set(maps, ServiceEntry { id: 2, ..service(2) })),
        "another Service has the frontend"
    );
    assert!(
        refused_after::<F>(|maps, _| set(maps, ServiceEntry { flags: 0, ..service(2) })),
        "failures do not count"
    );
    assert!(refused_after::<F>(|maps, _| set(maps, service(0))), "no endpoint is left");
    for only in [7, SECOND] {
        let maps = two_endpoints::<F>();
        let client = client::<F>();
        let first = connect(maps, POD, client);
        works(maps, only);
        maps.set_slots(30, &[only]);
        set(maps, service(1));
        assert_eq!(answer(maps, first, client, REFUSAL), first == only, "{first} refuses, {only} is left");
    }
    // The other endpoint has refused a client, or this client skips it, or it has answered long ago.
    assert!(refused_after::<F>(|maps, first| {
        refuse(maps, other(first), 1000);
    }));
    let number =
        |maps: HostMaps<F>| proxy_common::health::client(&client::<F>().0, maps.config().unwrap().flow_seed);
    for failure in [Failure::Silence, Failure::Unreachable] {
        let fail = |maps: HostMaps<F>, first, client| maps.note_failure(other(first), client, failure as u32);
        assert!(refused_after::<F>(|maps, first| assert_eq!(fail(maps, first, number(maps)), 0)));
        assert!(
            !refused_after::<F>(|maps, first| assert_eq!(fail(maps, first, 1000), 0)),
            "another client's"
        );
    }
    for (age, is_refused) in [(60 * HZ - 1, false), (60 * HZ, true)] {
        let found = refused_after::<F>(|maps, first| {
            let word = maps.health(other(first)).unwrap();
            word.store(word.load() - u64::from(age));
        });
        assert_eq!(found, is_refused, "{age}");
    }
}

families!(a_refusal_is_the_clients_where_no_other_endpoint_may_accept = no_other_endpoint());

/// Clients outside have another set of endpoints.
fn two_scopes<F: Net>() {
    for (device, is_refused) in [(UPLINK, false), (POD, true)] {
        let maps = two_endpoints::<F>();
        let (addr, port) = frontend::<F>();
        let client = client::<F>();
        let key = ServiceKey { scope: SCOPE_EXTERNAL, ..ServiceKey::internal(addr, port, PROTO_TCP) };
        maps.add_service(key, service(2));
        maps.set_slots(40, &[7]);
        let inside = ServiceEntry { slot_base: 40, flags: SERVICE_EJECTS | SERVICE_SCOPED, ..service(1) };
        set(maps, inside);
        let first = connect(maps, device, client);
        works(maps, other(first));
        assert_eq!(answer(maps, first, client, REFUSAL), is_refused, "{device}");
    }
}

families!(the_other_endpoint_is_one_of_the_clients_scope = two_scopes());

fn a_success<F: Net>() {
    // A SYN-ACK with ECN (ECE) is one, too.
    for shape in [SYN_ACK, Shape { flags: 0x52, ..SYN_ACK }] {
        let maps = two_endpoints::<F>();
        let client = client::<F>();
        let endpoint = connect(maps, POD, client);
        refuse(maps, endpoint, 1000);
        assert!(health::refuses(maps, endpoint, 1000));
        assert!(answer(maps, endpoint, client, shape));
        assert!(has_answered(maps.health(endpoint).unwrap().load(), maps.now(), HZ));
        assert!(!health::refuses(maps, endpoint, 1000));
    }
}

families!(a_syn_ack_is_a_success = a_success());

fn a_success_after_silence<F: Net>() {
    let maps = two_endpoints::<F>();
    let (ip, _) = client::<F>();
    let number = proxy_common::health::client(&ip, maps.config().unwrap().flow_seed);
    let mut ports = 5000..;
    let mut is_skipped_after = |wait: u32| {
        maps.note_failure(7, number, Failure::Silence as u32);
        maps.advance(wait);
        let mut endpoints = (0..20).map(|_| connect(maps, POD, (ip, ports.next().unwrap())));
        !endpoints.any(|endpoint| endpoint == 7)
    };
    assert!(is_skipped_after(HZ) && !is_skipped_after(2 * HZ));
    assert!(is_skipped_after(7 * HZ), "it has failed twice in a row");
    maps.advance(HZ);
    let port = (6000..6100).find(|port| connect(maps, POD, (ip, *port)) == 7).unwrap();
    assert!(answer(maps, 7, (ip, port), SYN_ACK));
    assert!(!is_skipped_after(2 * HZ), "an answer came in between");
}

families!(skips_of_a_client_are_short_again_after_an_answer = a_success_after_silence());

fn one_endpoint<F: Net>() {
    let maps = two_endpoints::<F>();
    maps.set_slots(30, &[7]);
    set(maps, service(1));
    let client = client::<F>();
    assert_eq!(connect(maps, POD, client), 7);
    let flow = || maps.flows().iter().map(FlowEntry::bits).collect::<Vec<_>>();
    let before = flow();
    maps.advance(HZ);
    assert_eq!(connect(maps, POD, client), 7);
    assert_eq!((before, maps.health(7).unwrap().load()), (flow(), 0), "the flow continues");
    assert!(answer(maps, 7, client, SYN_ACK));
    assert!(has_answered(maps.health(7).unwrap().load(), maps.now(), HZ));
}

families!(only_endpoint_answer_counts_and_silence_does_not = one_endpoint());

fn a_reset_with_options<F: Net>() {
    let maps = two_endpoints::<F>();
    for client in clients::<F>().take(4) {
        let endpoint = connect(maps, POD, client);
        works(maps, other(endpoint));
        assert!(answer(maps, endpoint, client, UNKNOWN_MPTCP), "hidden");
        assert!(!health::refuses(maps, endpoint, 1000), "counts");
    }
    assert_eq!(maps.refusals_of(1, Reason::EndpointEjected), 0);
}

families!(a_reset_with_options_is_no_refusal_of_the_endpoint = a_reset_with_options());

fn no_answer<F: Net>() {
    let maps = two_endpoints::<F>();
    let mut silent = clients::<F>();
    let client = silent.next().unwrap();
    let first = connect(maps, POD, client);
    maps.advance(HZ / 2);
    assert_eq!(connect(maps, POD, client), first, "the endpoint may still answer");
    maps.advance(HZ / 2 + 1);
    assert_eq!(connect(maps, POD, client), other(first));
    // Clients that are not answered by the endpoint skip it, and no other client does.
    for client in silent.by_ref().filter(|client| connect(maps, POD, *client) == first).take(5) {
        maps.advance(HZ);
        assert_eq!(connect(maps, POD, client), other(first));
    }
    assert_eq!(maps.count_of(Reason::EndpointEjected), 0);
    assert!(silent.any(|client| connect(maps, POD, client) == first));
}

families!(an_unanswered_syn_moves_to_another_endpoint = no_answer());
