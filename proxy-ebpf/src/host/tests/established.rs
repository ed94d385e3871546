//! Flows of a frontend that the agent has given to another Service.

use proxy_common::conntrack::RST_BACKEND;

use super::*;

/// The id of the other Service's endpoint.
const OTHER: u32 = 20;

/// Gives the frontend to another Service, which has another endpoint.
fn give_away<F: Net>(maps: HostMaps<F>) -> End<F> {
    let ((addr, port), other) = (frontend::<F>(), (F::addr(3), 8080));
    let flags = BACKEND_LOCAL | BACKEND_IN_CLUSTER;
    let row = BackendEntry {
        addr: other.0,
        port: other.1,
        proto: PROTO_UDP,
        state: BACKEND_ACTIVE,
        service: 2,
        flags,
    };
    maps.set_backend(OTHER, row);
    maps.set_slots(30, &[OTHER]);
    let entry =
        ServiceEntry { id: 2, slot_base: 30, slot_count: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE };
    maps.add_service(ServiceKey::internal(addr, port, PROTO_UDP), entry);
    other
}

/// Datagrams open no connection, so their frontend is looked up now and then.
fn the_frontend_of_datagrams<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let sent = || run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, UDP)).1.wire();
    for _ in 0..3 {
        assert_eq!(sent(), packet::<F>(client, backend, UDP));
        maps.advance(300);
    }
    assert_eq!(maps.stats_of(1).connections, 1, "the flow goes on");
    sent();
    let other = give_away(maps);
    maps.advance(300);
    assert_eq!(sent(), packet::<F>(client, other, UDP));
    assert_eq!((maps.stats_of(1).connections, maps.stats_of(2).connections), (1, 1));
    assert_eq!(maps.flows().iter().filter(|flow| flow.bits() != 0).count(), 1);
}

#[test]
fn datagrams_follow_their_frontend_to_another_service() {
    the_frontend_of_datagrams::<V4>();
    the_frontend_of_datagrams::<V6>();
}

/// A connection keeps its endpoint while it lasts.
fn the_frontend_of_a_connection<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, SYN));
    let (addr, port) = frontend;
    let entry =
        ServiceEntry { id: 2, slot_base: 7, slot_count: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE };
    maps.add_service(ServiceKey::internal(addr, port, PROTO_TCP), entry);
    maps.advance(300);
    let (_, skb) = run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, DATA));
    assert_eq!(skb.wire(), packet::<F>(client, backend, DATA));
    assert_eq!((maps.stats_of(1).connections, maps.stats_of(2).connections), (1, 0));
    assert!(maps.flows().iter().all(|flow| flow.bits() & RST_BACKEND == 0));
}

#[test]
fn a_connection_keeps_its_endpoint() {
    the_frontend_of_a_connection::<V4>();
    the_frontend_of_a_connection::<V6>();
}
