//! Unconnected UDP sockets: messages to several Services, and the source that the application sees.

use proxy_common::socket::{SOCKET_PEERS, USED_WITHIN};

use super::*;

/// Adds a Service with the endpoint of another Service as its only endpoint; returns its address.
fn service<F: Net>(maps: HostMaps<F>, number: u8, backend: u32) -> End<F> {
    let frontend = (F::addr(number), 53);
    let entry = ServiceEntry { id: 1, ..CLUSTER };
    add_frontend(maps, frontend, PROTO_UDP, (100 + u32::from(number % 28), &[backend]), entry);
    frontend
}

fn several_services<F: Net>() {
    let maps = socket_maps::<F>();
    three_endpoints(maps, PROTO_UDP, CLUSTER);
    let services: [End<F>; 3] = [100, 101, 102].map(|number| service(maps, number, u32::from(number) - 80));
    let socket = socket(maps, POD_A, PROTO_UDP);
    for _ in 0..2 {
        for (to, id) in services.iter().zip(THREE) {
            let backend = endpoint::<F>(id as u8);
            assert_eq!(send(maps, &socket, *to), Ok(backend));
            assert_eq!(seen(maps, &socket, backend), *to);
        }
    }
    for (to, id) in services.iter().zip(THREE) {
        assert_eq!(seen(maps, &socket, endpoint::<F>(id as u8)), *to, "in any order");
    }
    assert_eq!(seen(maps, &socket, backend::<F>()), backend::<F>(), "an endpoint without a message");
    let other = self::socket(maps, POD_A, PROTO_UDP);
    assert_eq!(seen(maps, &other, endpoint::<F>(20)), endpoint::<F>(20), "another socket");
    assert_eq!((maps.stats_of(1).connections, maps.sockets().len()), (3, 0));
}

families!(socket_that_sends_to_several_services_sees_the_address_of_each = several_services());

fn keeps_endpoint<F: Net>(peers: usize) {
    let maps = socket_maps::<F>();
    three_endpoints(maps, PROTO_UDP, ServiceEntry { algorithm: Algorithm::RoundRobin as u8, ..CLUSTER });
    let socket = socket(maps, POD_A, PROTO_UDP);
    for number in 0..peers {
        send(maps, &socket, service(maps, 100 + number as u8, 8)).unwrap();
    }
    let to = frontend::<F>();
    let backend = send(maps, &socket, to).unwrap();
    for _ in 0..3 {
        assert_eq!(send(maps, &socket, to), Ok(backend));
        assert_eq!(seen(maps, &socket, backend), to);
    }
    let (addr, port) = backend;
    let row = |state, service| BackendEntry {
        addr,
        port,
        proto: PROTO_UDP,
        state,
        service,
        flags: BACKEND_LOCAL | BACKEND_IN_CLUSTER,
    };
    // The endpoint is removed, or its id has another Service's endpoint.
    for (state, service) in [(BACKEND_GONE, 1), (BACKEND_ACTIVE, 2)] {
        let before = send(maps, &socket, to).unwrap();
        maps.set_backend(id_of::<F>(backend), row(state, service));
        let next = send(maps, &socket, to).unwrap();
        assert_eq!((next == before, next == backend), (before != backend, false));
        assert_eq!((seen(maps, &socket, next), send(maps, &socket, to)), (to, Ok(next)));
    }
    // An id that an endpoint with another port or another address has got.
    for change in [|(addr, _): End<F>| (addr, 9090), |(_, port)| (F::addr(33), port)] {
        let next = send(maps, &socket, to).unwrap();
        let (addr, port) = change(next);
        maps.set_backend(id_of::<F>(next), BackendEntry { addr, port, ..row(BACKEND_ACTIVE, 1) });
        let moved = send(maps, &socket, to).unwrap();
        assert!(moved != next && seen(maps, &socket, moved) == to);
        let (addr, port) = next;
        maps.set_backend(id_of::<F>(next), BackendEntry { addr, port, ..row(BACKEND_ACTIVE, 1) });
    }
    // No endpoint is left: the known one is not used although its row is still there.
    add_frontend(maps, to, PROTO_UDP, (60, &[]), CLUSTER);
    assert_eq!(send(maps, &socket, to), Err(ECONNREFUSED));
}

#[test]
fn socket_keeps_its_endpoint_of_a_service_while_it_serves() {
    for peers in [0, SOCKET_PEERS] {
        keeps_endpoint::<V4>(peers);
        keeps_endpoint::<V6>(peers);
    }
}

fn shared_endpoint<F: Net>(peers: usize) {
    let maps = socket_maps::<F>();
    let socket = socket(maps, POD_A, PROTO_UDP);
    for number in 0..peers {
        add_endpoint(maps, 30, endpoint::<F>(30), PROTO_UDP);
        send(maps, &socket, service(maps, 100 + number as u8, 30)).unwrap();
    }
    let [one, two]: [End<F>; 2] = [120, 121].map(|number| service(maps, number, 8));
    let backend = backend::<F>();
    for to in [one, two, one, one, two] {
        assert_eq!(send(maps, &socket, to), Ok(backend));
        assert_eq!(seen(maps, &socket, backend), to);
    }
    // Directly to the endpoint, and to a Service again.
    for to in [backend, one, backend, two, two] {
        assert_eq!(send(maps, &socket, to), Ok(backend));
        assert_eq!(seen(maps, &socket, backend), to);
    }
    assert_eq!(maps.stats_of(1).connections, peers as u64 + 2);
}

#[test]
fn socket_sees_the_address_to_which_it_has_sent_last_if_services_share_an_endpoint() {
    // Both peers in the storage of the socket, one of them, and none.
    for peers in [0, SOCKET_PEERS - 1, SOCKET_PEERS] {
        shared_endpoint::<V4>(peers);
        shared_endpoint::<V6>(peers);
    }
}

fn many_services<F: Net>() {
    let maps = socket_maps::<F>();
    for id in 40..50 {
        add_endpoint(maps, id, endpoint::<F>(id as u8), PROTO_UDP);
    }
    let services: Vec<End<F>> = (0..10).map(|n: u8| service(maps, 100 + n, 40 + u32::from(n))).collect();
    let socket = socket(maps, POD_A, PROTO_UDP);
    for _ in 0..3 {
        for (to, id) in services.iter().zip(40..) {
            assert_eq!(send(maps, &socket, *to), Ok(endpoint::<F>(id)));
        }
        for (to, id) in services.iter().zip(40..) {
            assert_eq!(seen(maps, &socket, endpoint::<F>(id)), *to);
        }
    }
    // An entry for each direction.
    assert_eq!(maps.sockets().len(), 2 * (services.len() - SOCKET_PEERS));
    assert_eq!(maps.stats_of(1).connections, services.len() as u64);
    // A place in the storage is used again if its endpoint is removed, or if the id has another endpoint.
    let (flags, proto) = (BACKEND_LOCAL, PROTO_UDP);
    for (step, (state, service_id, other)) in (0..).zip([
        (BACKEND_GONE, 1, None),
        (BACKEND_ACTIVE, 2, None),
        (BACKEND_ACTIVE, 1, Some((endpoint::<F>(43).0, 9090))),
        (BACKEND_ACTIVE, 1, Some((F::addr(60), endpoint::<F>(44).1))),
    ]) {
        let (id, next) = (41 + step, 51 + step);
        let known = endpoint::<F>(id);
        let (addr, port) = other.unwrap_or(known);
        let row = BackendEntry { addr, port, proto, state, service: service_id, flags };
        maps.set_backend(u32::from(id), row);
        add_endpoint(maps, u32::from(next), endpoint::<F>(next), proto);
        let new = service(maps, 115 + step, u32::from(next));
        assert_eq!(send(maps, &socket, new), Ok(endpoint::<F>(next)));
        assert_eq!((seen(maps, &socket, endpoint::<F>(next)), maps.sockets().len()), (new, 4), "{step}");
        assert_eq!(seen(maps, &socket, known), known, "its place has another Service");
    }
}

families!(socket_with_more_services_than_its_storage_holds_uses_the_sockets_map = many_services());

fn used<F: Net>() {
    let maps = socket_maps::<F>();
    let socket = HostSock { has_memory: false, ..socket(maps, POD_A, PROTO_UDP) };
    send(maps, &socket, frontend::<F>()).unwrap();
    let begun = maps.now();
    let used = || maps.sockets().iter().map(|entry| entry.last_used.wrapping_sub(begun)).collect::<Vec<_>>();
    maps.advance(USED_WITHIN);
    send(maps, &socket, frontend::<F>()).unwrap();
    assert_eq!(used(), [0, 0]);
    maps.advance(1);
    send(maps, &socket, frontend::<F>()).unwrap();
    assert_eq!(used(), [USED_WITHIN + 1; 2], "both directions");
    maps.advance(USED_WITHIN + 1);
    seen(maps, &socket, backend::<F>());
    let mut ages = used();
    ages.sort_unstable();
    assert_eq!(ages, [USED_WITHIN + 1, 2 * USED_WITHIN + 2], "one direction");
}

families!(use_of_an_entry_of_the_sockets_map_is_noted_after_a_while = used());

fn full_map<F: Net>() {
    let maps = socket_maps::<F>();
    maps.set_socket_entries(0);
    let socket = HostSock { has_memory: false, ..socket(maps, POD_A, PROTO_UDP) };
    assert_eq!(send(maps, &socket, frontend::<F>()), Ok(backend::<F>()));
    assert_eq!(maps.count_of(Reason::SocketTableFull), 2, "an entry for each direction");
    assert_eq!(seen(maps, &socket, backend::<F>()), backend::<F>());
}

families!(message_is_translated_and_counted_if_no_entry_is_left_for_the_source = full_map());

fn direct<F: Net>(has_memory: bool) {
    let maps = socket_maps::<F>();
    let socket = HostSock { has_memory, ..socket(maps, POD_A, PROTO_UDP) };
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    for to in [backend, frontend, backend, frontend, frontend] {
        assert_eq!(send(maps, &socket, to), Ok(backend));
        assert_eq!(seen(maps, &socket, backend), to);
    }
    assert_eq!(maps.stats_of(1).connections, 1);
}

#[test]
fn socket_that_sends_directly_to_the_endpoint_sees_the_endpoint() {
    for has_memory in [true, false] {
        direct::<V4>(has_memory);
        direct::<V6>(has_memory);
    }
}

fn connects_to_endpoint<F: Net>(has_memory: bool) {
    let maps = socket_maps::<F>();
    let socket = HostSock { has_memory, ..socket(maps, POD_A, PROTO_UDP) };
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    assert_eq!(send(maps, &socket, frontend), Ok(backend));
    assert_eq!(connect(maps, &socket, backend), Ok(backend));
    assert_eq!((seen(maps, &socket, backend), peer_name(maps, &socket, backend)), (backend, backend));
}

#[test]
fn connect_to_endpoint_after_service_message_shows_endpoint() {
    for has_memory in [true, false] {
        connects_to_endpoint::<V4>(has_memory);
        connects_to_endpoint::<V6>(has_memory);
    }
}

fn removed_endpoint<F: Net>(has_memory: bool) {
    let maps = socket_maps::<F>();
    let socket = HostSock { has_memory, ..socket(maps, POD_A, PROTO_UDP) };
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    assert_eq!(send(maps, &socket, frontend), Ok(backend));
    let (addr, port) = backend;
    let row = BackendEntry {
        addr,
        port,
        proto: PROTO_UDP,
        state: BACKEND_GONE,
        service: 1,
        flags: BACKEND_LOCAL | BACKEND_IN_CLUSTER,
    };
    maps.set_backend(8, row);
    assert_eq!(seen(maps, &socket, backend), frontend, "the last answers of the endpoint");
    let moved = BackendEntry { addr: F::addr(60), ..row };
    for row in
        [BackendEntry::FREE, BackendEntry { service: 2, ..row }, BackendEntry { port: 1, ..row }, moved]
    {
        maps.set_backend(8, row);
        assert_eq!(seen(maps, &socket, backend), backend, "another pod may have the address");
    }
}

#[test]
fn message_of_removed_endpoint_shows_service_until_id_is_free() {
    for has_memory in [true, false] {
        removed_endpoint::<V4>(has_memory);
        removed_endpoint::<V6>(has_memory);
    }
}

fn disconnected<F: Net>() {
    let maps = socket_maps::<F>();
    let entry = ServiceEntry { algorithm: Algorithm::LeastConnections as u8, ..CLUSTER };
    add_frontend(maps, frontend::<F>(), PROTO_UDP, (8, &[8]), entry);
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    for to in [backend, frontend] {
        let socket = socket(maps, POD_A, PROTO_UDP);
        assert_eq!(connect(maps, &socket, frontend), Ok(backend));
        assert_eq!((seen(maps, &socket, backend), maps.open_connections_of(8)), (frontend, 1));
        // No hook sees `connect(AF_UNSPEC)`.
        socket.state.set(CLOSE);
        assert_eq!(send(maps, &socket, to), Ok(backend));
        assert_eq!((seen(maps, &socket, backend), maps.open_connections_of(8)), (to, 0));
    }
}

families!(socket_that_was_disconnected_sees_the_address_to_which_it_sends = disconnected());

fn foreign<F: Net>() {
    let maps = socket_maps::<F>();
    let socket = socket(maps, FOREIGN, PROTO_UDP);
    assert_eq!(send(maps, &socket, frontend::<F>()), Ok(frontend::<F>()));
    assert_eq!(seen(maps, &socket, frontend::<F>()), frontend::<F>());
    assert_eq!(maps.stats_of(1).connections, 0);
}

families!(message_of_a_namespace_that_is_no_pods_is_left_to_the_packets = foreign());

#[test]
fn ipv6_socket_keeps_its_peers_of_both_families_apart() {
    let (v4, v6) = (socket_maps::<V4>(), socket_maps::<V6>());
    let socket = socket(v4, NODE, PROTO_UDP);
    for _ in 0..2 {
        assert_eq!(send(v4, &socket, frontend::<V4>()), Ok(backend::<V4>()));
        assert_eq!(send(v6, &socket, frontend::<V6>()), Ok(backend::<V6>()));
        assert_eq!(seen(v4, &socket, backend::<V4>()), frontend::<V4>());
        assert_eq!(seen(v6, &socket, backend::<V6>()), frontend::<V6>());
    }
    assert_eq!((v4.stats_of(1).connections, v6.stats_of(1).connections), (1, 1));
}
