//! Session affinity of sockets: the client is a network namespace.

use proxy_common::health::{Failure, socket_client};

use super::*;
use crate::env::Health as _;

const SECONDS: u32 = 10;

fn service() -> ServiceEntry {
    ServiceEntry { affinity_secs: SECONDS, algorithm: Algorithm::RoundRobin as u8, ..CLUSTER }
}

/// A connection from a network namespace. Returns the id of its endpoint.
fn reached<F: Net>(maps: HostMaps<F>, netns: u64) -> u32 {
    id_of::<F>(connect(maps, &socket(maps, netns, PROTO_TCP), frontend::<F>()).unwrap())
}

fn stays<F: Net>() {
    let maps = socket_maps::<F>();
    three_endpoints(maps, PROTO_TCP, service());
    let first = reached(maps, POD_A);
    let other = reached(maps, POD_B);
    assert_ne!(first, other, "the namespaces take turns");
    for _ in 0..5 {
        maps.advance(SECONDS * HZ - 1);
        assert_eq!((reached(maps, POD_A), reached(maps, POD_B)), (first, other));
    }
    assert_eq!(maps.stats_of(1).connections, 12);
}

families!(namespace_keeps_its_endpoint_within_the_timeout = stays());

fn expires<F: Net>() {
    let maps = socket_maps::<F>();
    three_endpoints(maps, PROTO_TCP, service());
    let first = reached(maps, POD_A);
    maps.advance(SECONDS * HZ);
    assert_eq!(reached(maps, POD_A), first);
    maps.advance(SECONDS * HZ + 1);
    assert_ne!(reached(maps, POD_A), first, "the next in turn");
}

families!(namespace_gets_another_endpoint_after_the_timeout = expires());

fn removed<F: Net>() {
    let maps = socket_maps::<F>();
    three_endpoints(maps, PROTO_TCP, service());
    let first = reached(maps, POD_A);
    let (addr, port) = endpoint::<F>(first as u8);
    let row = |state, flags| BackendEntry { addr, port, proto: PROTO_TCP, state, service: 1, flags };
    maps.set_backend(first, row(BACKEND_GONE, BACKEND_IN_CLUSTER));
    let second = reached(maps, POD_A);
    assert_ne!(second, first);
    maps.set_backend(first, row(BACKEND_ACTIVE, BACKEND_IN_CLUSTER));
    assert_eq!(reached(maps, POD_A), second, "it stays with its new endpoint");
}

families!(namespace_moves_when_its_endpoint_is_removed = removed());

fn datagrams<F: Net>() {
    let maps = socket_maps::<F>();
    three_endpoints(maps, PROTO_UDP, service());
    let send_from = |netns| id_of::<F>(send(maps, &socket(maps, netns, PROTO_UDP), frontend::<F>()).unwrap());
    let first = send_from(POD_A);
    assert_eq!([(); 3].map(|()| send_from(POD_A)), [first; 3]);
    assert_ne!(send_from(POD_B), first);
}

families!(datagrams_of_a_namespace_keep_the_endpoint = datagrams());

/// Both families have one table, by the id of the Service port.
fn empty<F: Net>() {
    let maps = socket_maps::<F>();
    three_endpoints(maps, PROTO_TCP, service());
    reached(maps, POD_A);
    add_frontend(maps, frontend::<F>(), PROTO_TCP, (60, &[]), service());
    let socket = socket(maps, POD_A, PROTO_TCP);
    assert_eq!(connect(maps, &socket, frontend::<F>()), Err(ECONNREFUSED));
}

families!(namespace_is_refused_if_no_endpoint_is_left = empty());

fn refused<F: Net>() {
    for (answered, refuses, moves) in [(true, true, true), (false, true, false), (true, false, false)] {
        let maps = socket_maps::<F>();
        three_endpoints(maps, PROTO_TCP, ServiceEntry { flags: SERVICE_EJECTS, ..service() });
        let first = reached(maps, POD_A);
        if answered {
            for other in THREE.into_iter().filter(|id| *id != first) {
                outcome::works(maps, other);
            }
        }
        let client = socket_client(POD_A, maps.config().unwrap().flow_seed);
        let failure = if refuses { Failure::RefusalInside } else { Failure::Silence };
        maps.note_failure(first, client, failure as u32);
        let second = reached(maps, POD_A);
        assert_eq!(second != first, moves, "{answered} {refuses}");
        assert_eq!(reached(maps, POD_A), second, "it stays with its endpoint");
    }
}

families!(affinity_moves_after_refusal_if_another_endpoint_answers = refused());
