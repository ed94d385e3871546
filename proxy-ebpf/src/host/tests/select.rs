//! Tests of the selection that packets cannot show.

use std::collections::BTreeSet;

use proxy_common::backend::BACKEND_GONE;
use proxy_common::connections::PARTS;
use proxy_common::health::{Failure, NO_CLIENT};
use proxy_common::select::{Algorithm, tunnel_tag};
use proxy_common::service::KIND_UNMANAGED;

use super::*;
use crate::context::PacketCtx;
use crate::host::maps::at;
use crate::select::{affinity, backend, health, load, lookup};

fn one_endpoint() -> ServiceEntry {
    ServiceEntry { id: 1, slot_base: 7, slot_count: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE }
}

fn selection_of_a_socket<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (addr, port) = frontend::<F>();
    let found = lookup::frontend(maps, addr, port, PROTO_TCP, false, 0).unwrap();
    assert_eq!((found.id, found.slot_base), (1, 7));
    assert!(lookup::frontend(maps, addr, port + 1, PROTO_TCP, false, 0).is_none());
    let selected = backend::select(maps, &found, 5, NO_CLIENT).unwrap();
    assert_eq!((selected.id, (selected.addr, selected.port)), (7, backend::<F>()));
    let empty = ServiceEntry { slot_count: 0, ..found };
    assert!(backend::select(maps, &empty, 5, NO_CLIENT).is_none());
    assert_eq!((backend::select_id(maps, &empty, 5, NO_CLIENT), backend::first_id(maps, &empty, 5)), (0, 0));
    // The element holds the entry of another key: the agent is replacing it.
    let entry = ServiceEntry { tag: found.tag ^ 1, ..found };
    maps.put_service(ServiceKey::internal(addr, port, PROTO_TCP), entry);
    assert!(lookup::frontend(maps, addr, port, PROTO_TCP, false, 0).is_none());
}

families!(a_socket_finds_a_frontend_and_an_endpoint = selection_of_a_socket());

fn replaced_entry<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (addr, port) = frontend::<F>();
    let unmanaged = ServiceEntry { kind: KIND_UNMANAGED, ..ServiceEntry::NONE };
    maps.add_service(ServiceKey::internal(addr, 0, 0), unmanaged);
    maps.miss_services(1);
    assert_eq!(lookup::frontend(maps, addr, port, PROTO_TCP, false, 0).map(|entry| entry.id), Some(1));
    maps.miss_services(1);
    assert_eq!(lookup::why_nothing(maps, addr), Reason::UnmanagedAddress);
}

families!(entry_that_is_replaced_during_lookup_is_found = replaced_entry());

#[test]
fn the_load_of_an_endpoint_that_left_does_not_count() {
    let maps = maps::<V4>(BACKEND_LOCAL);
    let (addr, port) = backend::<V4>();
    let row = |state| BackendEntry { addr, port, proto: PROTO_TCP, state, service: 1, flags: 0 };
    maps.set_backend(20, row(BACKEND_GONE));
    maps.set_backend(21, row(BACKEND_ACTIVE));
    maps.set_slots(20, &[20, 21]);
    let service = ServiceEntry {
        slot_base: 20,
        slot_count: 2,
        algorithm: Algorithm::LeastConnections as u8,
        ..one_endpoint()
    };
    load::begun(maps, 21);
    load::begun(maps, 21);
    load::ended(maps, 21);
    assert_eq!(maps.open_connections_of(21), 1);
    for selector in [0, u32::MAX / 4, u32::MAX / 2 + 1, u32::MAX] {
        assert_eq!(load::first_id(maps, &service, selector), 21, "{selector}");
    }
}

#[test]
fn the_health_of_an_id_beyond_the_array_is_good() {
    let maps = maps::<V4>(BACKEND_LOCAL);
    assert_eq!(health::rank(maps, u32::MAX, 5, 0), health::TAKES);
    let refusal = Failure::Refusal as u32;
    assert_eq!(health::note_failure(maps, u32::MAX, 5, refusal), 0);
    // Two clients eject an endpoint; the ejection ends with time.
    let refused = |client| health::note_failure(maps, 7, client, refusal);
    assert_eq!((refused(5), refused(6)), (0, 1));
    assert!(health::refuses(maps, 7, 9));
    maps.advance(100 * HZ);
    assert!(!health::refuses(maps, 7, 9));
    assert_eq!(health::rank(maps, 7, 5, 0), health::TAKES);
}

#[test]
fn an_endpoint_that_another_node_names_is_looked_for_in_so_many_slots() {
    let maps = maps::<V4>(BACKEND_LOCAL);
    let (addr, port) = backend::<V4>();
    let other = BackendEntry {
        addr,
        port: port + 1,
        proto: PROTO_TCP,
        state: BACKEND_ACTIVE,
        service: 1,
        flags: BACKEND_LOCAL,
    };
    maps.set_backend(20, other);
    let tag = u32::from(tunnel_tag(&addr, port));
    let found = |slots: &[u32]| {
        maps.set_slots(20, slots);
        let mut ctx = PacketCtx::<[u32; 1]>::EMPTY;
        ctx.frontend = ServiceEntry { slot_base: 20, slot_count: slots.len() as u32, ..one_endpoint() };
        ctx.tunnelled = 1 << 16 | tag;
        backend::tagged(maps, &ctx)
    };
    assert_eq!(found(&[20, 20, 7]), 7);
    assert_eq!(found(&[20; 3]), 0);
    assert_eq!(found(&[20; 200]), 0);
}

#[test]
fn affinity_write_error_is_reported() {
    let maps = maps::<V4>(BACKEND_LOCAL);
    let time = maps.time().unwrap();
    assert!(!affinity::write(None, 7, time, |_| Err(-12)));
    assert!(affinity::write(None, 7, time, |_| Ok(())));
}

/// Nothing is kept: the table of affinities is full.
fn affinity_lost<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let other = F::addr(3);
    add_endpoint(maps, 20, (other, 8080), PROTO_TCP);
    maps.set_slots(30, &[7, 20]);
    let (addr, port) = frontend::<F>();
    let entry = ServiceEntry { affinity_secs: 10, slot_base: 30, slot_count: 2, ..one_endpoint() };
    maps.add_service(ServiceKey::internal(addr, port, PROTO_TCP), entry);
    // The begin of a span.
    maps.advance(10 * HZ - maps.time().unwrap().now % (10 * HZ));
    let mut first = BTreeSet::new();
    for number in 100..120 {
        let mut seen = BTreeSet::new();
        for client_port in 1..=30 {
            at!(maps, affinity).clear();
            let client = (F::addr(number), client_port);
            let (_, skb) = run_over(Hook::Ingress, maps, POD, &packet::<F>(client, (addr, port), SYN));
            seen.insert(skb.wire() == packet::<F>(client, (other, 8080), SYN));
            // After a time that the affinity lasts, a client may get another endpoint.
            if client_port == 15 {
                assert_eq!(seen.len(), 1, "client {number}");
                maps.advance(10 * HZ);
                first.append(&mut seen);
            }
        }
        assert_eq!(seen.len(), 1, "client {number}");
    }
    assert_eq!(first.len(), 2, "all clients have one endpoint");
}

families!(client_without_affinity_entry_stays = affinity_lost());

/// Open connections are counted from the first packet on, however it is forwarded.
#[test]
fn open_connection_is_counted_if_the_algorithm_needs_it() {
    for (algorithm, open) in [(Algorithm::LeastConnections, 1), (Algorithm::Random, 0)] {
        for flags in [0, BACKEND_LOCAL] {
            let maps = maps::<V4>(flags);
            let (addr, port) = frontend::<V4>();
            let entry = ServiceEntry { algorithm: algorithm as u8, ..one_endpoint() };
            maps.add_service(ServiceKey::internal(addr, port, PROTO_TCP), entry);
            run_over(Hook::Ingress, maps, UPLINK, &packet::<V4>(client::<V4>(), (addr, port), SYN));
            assert_eq!(maps.stats_of(1).connections, 1);
            assert_eq!(maps.open_connections_of(7), open, "{}", algorithm.label());
        }
    }
}

/// Answers to the first packet of a flow tell the time, and other packets do not.
fn timed<F: Net>(first: Shape, answer: Shape) {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), (frontend::<F>().0, 99), backend::<F>());
    let entry = ServiceEntry { algorithm: Algorithm::Latency as u8, ..one_endpoint() };
    maps.add_service(ServiceKey::internal(frontend.0, frontend.1, first.proto), entry);
    let (addr, port) = backend;
    let (proto, state, flags) = (first.proto, BACKEND_ACTIVE, BACKEND_LOCAL);
    maps.set_backend(7, BackendEntry { addr, port, proto, state, service: 1, flags });
    let noted = || maps.answer_time_of(7);
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, first));
    maps.advance(4);
    run_over(Hook::Egress, maps, POD, &packet::<F>(backend, client, answer));
    assert_eq!(noted(), 4 * PARTS / 8);
    maps.advance(40);
    run_over(Hook::Egress, maps, POD, &packet::<F>(backend, client, answer));
    assert_eq!((noted(), maps.open_connections_of(7)), (4 * PARTS / 8, 1));
    if first.proto == PROTO_TCP {
        // A refusal is no answer that connections are to wait for.
        let other = (client.0, client.1 + 1);
        run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(other, frontend, first));
        maps.advance(40);
        run_over(Hook::Egress, maps, POD, &packet::<F>(backend, other, Shape { flags: 0x14, ..answer }));
        assert_eq!((noted(), maps.open_connections_of(7)), (4 * PARTS / 8, 1));
    }
}

#[test]
fn time_to_the_first_answer_of_a_flow_is_noted_once() {
    for (first, answer) in [(SYN, SYN_ACK), (UDP, UDP)] {
        timed::<V4>(first, answer);
        timed::<V6>(first, answer);
    }
}
