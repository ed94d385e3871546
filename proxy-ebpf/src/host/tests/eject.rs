//! Endpoints that refuse connections or do not answer them: the connection moves to another endpoint.

use proxy_common::conntrack::RST_BACKEND;
use proxy_common::health::HEALTH_ANSWERED;
use proxy_common::service::{SCOPE_EXTERNAL, SERVICE_EJECTS, SERVICE_SCOPED};

use super::*;
use crate::env::Health as _;
use crate::shared::Shared as _;

/// The answer of a closed port: it acknowledges the SYN.
const REFUSAL: Shape = Shape { flags: 0x14, ..SYN };
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
    assert!(!answer(maps, first, client, REFUSAL), "another endpoint may accept the connection");
    assert_eq!(maps.refusals_of(1, Reason::RefusalDropped), 1);
    assert!(maps.flows().iter().any(|flow| flow.bits() & RST_BACKEND != 0), "its flow is closed");
    // The client sends its SYN again.
    assert_eq!(connect(maps, POD, client), other(first));
    assert!(answer(maps, other(first), client, REFUSAL), "both have refused this client");
    assert_eq!(maps.refusals_of(1, Reason::EndpointEjected), 0, "failures of one client eject no endpoint");
}

#[test]
fn a_refused_connection_moves_to_another_endpoint() {
    a_refused_connection::<V4>();
    a_refused_connection::<V6>();
}

/// `edit` changes the Service after a client was refused: who gets the refusal?
fn refused_after<F: Net>(edit: impl Fn(HostMaps<F>)) -> bool {
    let maps = two_endpoints::<F>();
    let client = client::<F>();
    let first = connect(maps, POD, client);
    edit(maps);
    answer(maps, first, client, REFUSAL)
}

fn no_other_endpoint<F: Net>() {
    assert!(!refused_after::<F>(|_| {}));
    assert!(
        refused_after::<F>(|maps| set(maps, ServiceEntry { id: 2, ..service(2) })),
        "another Service has the frontend"
    );
    assert!(
        refused_after::<F>(|maps| set(maps, ServiceEntry { flags: 0, ..service(2) })),
        "failures do not count"
    );
    assert!(refused_after::<F>(|maps| set(maps, service(0))), "no endpoint is left");
    for only in [7, SECOND] {
        let maps = two_endpoints::<F>();
        let client = client::<F>();
        let first = connect(maps, POD, client);
        maps.set_slots(30, &[only]);
        set(maps, service(1));
        assert_eq!(answer(maps, first, client, REFUSAL), first == only, "{first} refuses, {only} is left");
    }
    // The other endpoint is ejected.
    assert!(refused_after::<F>(|maps| {
        for id in [7, SECOND] {
            maps.note_failure(id, 1000);
            assert_eq!(maps.note_failure(id, 1001), 1);
        }
    }));
}

#[test]
fn a_refusal_is_the_clients_where_no_other_endpoint_may_accept() {
    no_other_endpoint::<V4>();
    no_other_endpoint::<V6>();
}

/// Clients outside have another set of endpoints.
fn two_scopes<F: Net>() {
    for (device, is_told) in [(UPLINK, false), (POD, true)] {
        let maps = two_endpoints::<F>();
        let (addr, port) = frontend::<F>();
        let client = client::<F>();
        let key = ServiceKey { scope: SCOPE_EXTERNAL, ..ServiceKey::internal(addr, port, PROTO_TCP) };
        maps.add_service(key, service(2));
        maps.set_slots(40, &[7]);
        let inside = ServiceEntry { slot_base: 40, flags: SERVICE_EJECTS | SERVICE_SCOPED, ..service(1) };
        set(maps, inside);
        let first = connect(maps, device, client);
        assert_eq!(answer(maps, first, client, REFUSAL), is_told, "{device}");
    }
}

#[test]
fn the_other_endpoint_is_one_of_the_clients_scope() {
    two_scopes::<V4>();
    two_scopes::<V6>();
}

fn a_success<F: Net>() {
    // A SYN-ACK with ECN (ECE) is one, too.
    for shape in [SYN_ACK, Shape { flags: 0x52, ..SYN_ACK }] {
        let maps = two_endpoints::<F>();
        let client = client::<F>();
        let endpoint = connect(maps, POD, client);
        maps.note_failure(endpoint, 1000);
        assert!(answer(maps, endpoint, client, shape));
        assert_eq!(maps.health(endpoint).unwrap().load(), HEALTH_ANSWERED);
    }
}

#[test]
fn a_syn_ack_is_a_success() {
    a_success::<V4>();
    a_success::<V6>();
}

fn no_answer<F: Net>() {
    let maps = two_endpoints::<F>();
    let mut silent = clients::<F>();
    let client = silent.next().unwrap();
    let first = connect(maps, POD, client);
    maps.advance(HZ / 2);
    assert_eq!(connect(maps, POD, client), first, "the endpoint may still answer");
    maps.advance(HZ / 2 + 1);
    assert_eq!(connect(maps, POD, client), other(first));
    assert_eq!(maps.refusals_of(1, Reason::EndpointEjected), 0);
    // A second client is not answered by the same endpoint.
    let second = silent.find(|client| connect(maps, POD, *client) == first).unwrap();
    maps.advance(HZ);
    assert_eq!(connect(maps, POD, second), other(first));
    assert_eq!(maps.refusals_of(1, Reason::EndpointEjected), 1);
}

#[test]
fn an_unanswered_syn_moves_to_another_endpoint() {
    no_answer::<V4>();
    no_answer::<V6>();
}
