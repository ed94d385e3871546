//! connect(2) to addresses of Services, and what getpeername(2) returns after it.

use proxy_common::node::NODE_ADDR_LOOPBACK;
use proxy_common::service::{KIND_LOAD_BALANCER, KIND_NODE_PORT, SCOPE_EXTERNAL, SERVICE_SCOPED};
use proxy_common::{Address as _, PROTO_ICMP};

use super::*;

const NODE_PORT: u16 = 30080;

fn cluster_address<F: Net>(proto: u8, id: u32) {
    let maps = socket_maps::<F>();
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    for (number, netns) in (1..).zip([NODE, POD_A]) {
        let socket = socket(maps, netns, proto);
        assert_eq!(connect(maps, &socket, frontend), Ok(backend));
        assert_eq!((seen(maps, &socket, backend), peer_name(maps, &socket, backend)), (frontend, frontend));
        assert_eq!((maps.stats_of(1).connections, maps.connections_to(id)), (number, number));
        assert_eq!(maps.take_events(), [(1, EventKind::NewFlow { backend: id })]);
    }
    assert_eq!(maps.sockets().len(), 0, "the storage of the sockets holds the peers");
}

#[test]
fn connect_to_a_cluster_address_leads_to_the_endpoint_and_getpeername_returns_the_address() {
    for (proto, id) in [(PROTO_TCP, 7), (PROTO_UDP, 8), (PROTO_SCTP, 9)] {
        cluster_address::<V4>(proto, id);
        cluster_address::<V6>(proto, id);
    }
}

fn removed_long_ago<F: Net>() {
    let maps = socket_maps::<F>();
    let socket = socket(maps, POD_A, PROTO_TCP);
    assert_eq!(connect(maps, &socket, frontend::<F>()), Ok(backend::<F>()));
    maps.clear_prefilter();
    assert_eq!(peer_name(maps, &socket, backend::<F>()), frontend::<F>());
    assert_eq!(peer_name(maps, &socket, endpoint::<F>(77)), endpoint::<F>(77));
}

families!(getpeername_is_frontend_without_prefilter_bit = removed_long_ago());

fn other_addresses<F: Net>() {
    let maps = socket_maps::<F>();
    let (addr, port) = frontend::<F>();
    let socket = socket(maps, POD_A, PROTO_TCP);
    for other in [(F::addr(200), port), (addr, port + 1), backend::<F>()] {
        assert_eq!(connect(maps, &socket, other), Ok(other));
        assert_eq!(seen(maps, &socket, other), other);
    }
    let raw = HostSock::new(POD_A, 5, PROTO_ICMP);
    assert_eq!(connect(maps, &raw, frontend::<F>()), Ok(frontend::<F>()), "another protocol");
    assert_eq!((maps.stats_of(1).connections, maps.take_events().len()), (0, 0));
}

families!(connect_to_any_other_address_stays_as_it_is = other_addresses());

fn foreign_namespace<F: Net>() {
    let maps = socket_maps::<F>();
    for proto in [PROTO_TCP, PROTO_UDP] {
        let socket = socket(maps, FOREIGN, proto);
        assert_eq!(connect(maps, &socket, frontend::<F>()), Ok(frontend::<F>()));
        assert_eq!(seen(maps, &socket, frontend::<F>()), frontend::<F>());
    }
    assert_eq!(maps.stats_of(1).connections, 0);
}

families!(connect_of_a_namespace_that_is_no_pods_is_left_to_the_packets = foreign_namespace());

fn add_node_port<F: Net>(maps: HostMaps<F>, addrs: &[F::Words]) {
    let entry = ServiceEntry { kind: KIND_NODE_PORT, ..CLUSTER };
    add_frontend(maps, (F::Words::ZERO, NODE_PORT), PROTO_TCP, (7, &[7]), entry);
    for addr in addrs {
        maps.add_frontend_bit(addr, NODE_PORT, PROTO_TCP);
    }
}

fn node_port<F: Net>(loopback: F::Words) {
    let maps = socket_maps::<F>();
    let (own, closed, other) = (node::<F>(), F::addr(8), F::addr(77));
    maps.add_node_addr(loopback, NODE_ADDR_OWN | NODE_ADDR_PORTS | NODE_ADDR_LOOPBACK);
    maps.add_node_addr(closed, NODE_ADDR_OWN);
    add_node_port(maps, &[own, loopback, closed, other]);
    for netns in [NODE, POD_A] {
        let is_translated = |addr| {
            let socket = socket(maps, netns, PROTO_TCP);
            let to = (addr, NODE_PORT);
            let result = connect(maps, &socket, to);
            assert!(result == Ok(to) || seen(maps, &socket, backend::<F>()) == to);
            result == Ok(backend::<F>())
        };
        let found = [own, loopback, closed, other].map(is_translated);
        assert_eq!(found, [true, netns == NODE, false, false], "{netns}");
    }
}

#[test]
fn connect_to_a_node_port_is_translated_on_addresses_with_node_ports_and_on_loopback_for_the_node_only() {
    node_port::<V4>([u32::from_ne_bytes([127, 0, 0, 1])]);
    node_port::<V6>([0, 0, 0, 1u32.to_be()]);
}

#[test]
fn connect_to_a_node_port_on_any_loopback_address_is_translated() {
    let maps = socket_maps::<V4>();
    let loopback = |last| [u32::from_ne_bytes([127, 0, 0, last])];
    maps.add_node_addr(loopback(1), NODE_ADDR_OWN | NODE_ADDR_PORTS | NODE_ADDR_LOOPBACK);
    add_node_port(maps, &[loopback(1)]);
    let socket = socket(maps, NODE, PROTO_TCP);
    assert_eq!(connect(maps, &socket, (loopback(9), NODE_PORT)), Ok(backend::<V4>()));
    assert_eq!(seen(maps, &socket, backend::<V4>()), (loopback(9), NODE_PORT));
}

#[test]
fn node_connect_to_zero_address_is_loopback() {
    let maps = socket_maps::<V4>();
    let (zero, loopback) = ([0], [u32::from_ne_bytes([127, 0, 0, 1])]);
    maps.add_node_addr(loopback, NODE_ADDR_OWN | NODE_ADDR_PORTS | NODE_ADDR_LOOPBACK);
    add_node_port(maps, &[loopback]);
    let of_node = socket(maps, NODE, PROTO_TCP);
    assert_eq!(connect(maps, &of_node, (zero, NODE_PORT)), Ok(backend::<V4>()));
    assert_eq!(seen(maps, &of_node, backend::<V4>()), (loopback, NODE_PORT));
    let of_pod = socket(maps, POD_A, PROTO_TCP);
    assert_eq!(connect(maps, &of_pod, (zero, NODE_PORT)), Ok((zero, NODE_PORT)), "the pod's own loopback");
}

fn load_balancer<F: Net>() {
    let maps = socket_maps::<F>();
    let address = (F::addr(120), 80);
    let entry = ServiceEntry { kind: KIND_LOAD_BALANCER, flags: SERVICE_SCOPED, ..CLUSTER };
    add_frontend(maps, address, PROTO_TCP, (7, &[7]), entry);
    // Policy Local, and no endpoint is on this node.
    let key = ServiceKey { scope: SCOPE_EXTERNAL, ..ServiceKey::internal(address.0, 80, PROTO_TCP) };
    maps.add_service(key, ServiceEntry { kind: KIND_LOAD_BALANCER, ..CLUSTER });
    for netns in [NODE, POD_A] {
        let socket = socket(maps, netns, PROTO_TCP);
        assert_eq!(connect(maps, &socket, address), Ok(backend::<F>()));
        assert_eq!(seen(maps, &socket, backend::<F>()), address);
    }
    let socket = socket(maps, FOREIGN, PROTO_TCP);
    assert_eq!(connect(maps, &socket, address), Ok(address));
}

families!(connect_to_a_load_balancer_address_gets_the_endpoints_of_clients_inside = load_balancer());

fn again<F: Net>(proto: u8) {
    let maps = socket_maps::<F>();
    let socket = socket(maps, POD_A, proto);
    let other = ((F::addr(97), 80), endpoint::<F>(30));
    maps.set_backend(
        30,
        BackendEntry {
            addr: other.1.0,
            port: other.1.1,
            proto,
            state: BACKEND_ACTIVE,
            service: 2,
            flags: BACKEND_IN_CLUSTER,
        },
    );
    add_frontend(maps, other.0, proto, (30, &[30]), ServiceEntry { id: 2, ..CLUSTER });
    for (to, backend) in [(frontend::<F>(), backend::<F>()), other, (frontend::<F>(), backend::<F>())] {
        assert_eq!(connect(maps, &socket, to), Ok(backend));
        assert_eq!(seen(maps, &socket, backend), to);
    }
    assert_eq!(seen(maps, &socket, other.1), other.1, "of the earlier connection");
    assert_eq!(connect(maps, &socket, backend::<F>()), Ok(backend::<F>()));
    assert_eq!(seen(maps, &socket, backend::<F>()), backend::<F>(), "connected directly");
}

#[test]
fn getpeername_returns_the_address_of_the_last_connect() {
    again::<V4>(PROTO_UDP);
    again::<V6>(PROTO_UDP);
    again::<V4>(PROTO_TCP);
}

fn named_again<F: Net>() {
    let maps = socket_maps::<F>();
    let socket = socket(maps, POD_A, PROTO_UDP);
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    assert_eq!(connect(maps, &socket, frontend), Ok(backend));
    assert_eq!(send(maps, &socket, frontend), Ok(backend), "the application names its peer");
    let other = (F::addr(97), 80);
    add_frontend(maps, other, PROTO_UDP, (8, &[8]), CLUSTER);
    assert_eq!(send(maps, &socket, other), Ok(other), "left to the packets");
    assert_eq!(send(maps, &socket, (F::addr(98), 80)), Ok((F::addr(98), 80)));
    assert_eq!(maps.stats_of(1).connections, 1);
}

families!(
    send_of_a_connected_socket_to_its_own_peer_is_translated_and_to_another_service_is_left_to_the_packets =
        named_again()
);

/// An IPv6 socket that is connected to an IPv4 address passes the hook of sendmsg(2) with its peer's address if it sends without an
/// address.
fn sends_to_its_peer<F: Net>() {
    for has_memory in [true, false] {
        let maps = socket_maps::<F>();
        let socket = HostSock { has_memory, ..socket(maps, POD_A, PROTO_UDP) };
        let backend = backend::<F>();
        for to in [frontend::<F>(), backend, frontend::<F>(), backend] {
            assert_eq!(connect(maps, &socket, to), Ok(backend));
            for _ in 0..2 {
                assert_eq!(send(maps, &socket, backend), Ok(backend));
                assert_eq!((seen(maps, &socket, backend), peer_name(maps, &socket, backend)), (to, to));
            }
        }
    }
}

families!(connected_socket_sending_to_peer_sees_connected_address = sends_to_its_peer());

fn without_memory<F: Net>() {
    let maps = socket_maps::<F>();
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    let make = || HostSock { has_memory: false, ..socket(maps, POD_A, PROTO_UDP) };
    let first = make();
    assert_eq!(connect(maps, &first, frontend), Ok(backend));
    assert_eq!((seen(maps, &first, backend), maps.sockets().len()), (frontend, 1));
    let other = make();
    assert_eq!(seen(maps, &other, backend), backend, "another socket's entry");
    maps.set_socket_entries(1);
    assert_eq!(connect(maps, &other, frontend), Ok(backend));
    assert_eq!((seen(maps, &other, backend), maps.count_of(Reason::SocketTableFull)), (backend, 1));
    assert_eq!(connect(maps, &first, backend), Ok(backend));
    assert_eq!((seen(maps, &first, backend), maps.sockets().len()), (backend, 0));
}

families!(connect_without_memory_for_storage_stores_the_peer_in_the_sockets_map = without_memory());

fn counted<F: Net>() {
    let entry = ServiceEntry { algorithm: Algorithm::LeastConnections as u8, ..CLUSTER };
    let maps = socket_maps::<F>();
    add_frontend(maps, frontend::<F>(), PROTO_TCP, (7, &[7]), entry);
    let open = || maps.open_connections_of(7);
    let [one, two] = [(); 2].map(|()| socket(maps, POD_A, PROTO_TCP));
    assert_eq!(connect(maps, &one, frontend::<F>()), Ok(backend::<F>()));
    assert_eq!(connect(maps, &two, frontend::<F>()), Ok(backend::<F>()));
    assert_eq!(open(), 2);
    assert_eq!((release::released(maps, &one), open()), (1, 1));
    assert_eq!((release::released(maps, &one), open()), (1, 1), "it is counted once");
    // A connect that has failed after its hook, and is tried again.
    assert_eq!(connect(maps, &two, frontend::<F>()), Ok(backend::<F>()));
    assert_eq!(open(), 1);
    assert_eq!(connect(maps, &two, backend::<F>()), Ok(backend::<F>()));
    assert_eq!(open(), 0, "connected directly");
    assert_eq!((release::released(maps, &two), open()), (1, 0));
    let never_connected = socket(maps, POD_A, PROTO_TCP);
    assert_eq!((release::released(maps, &never_connected), open()), (1, 0));
}

fn counted_until_connect<F: Net>() {
    let entry = ServiceEntry { algorithm: Algorithm::LeastConnections as u8, ..CLUSTER };
    let other = (F::addr(200), 80);
    for proto in [PROTO_TCP, PROTO_UDP] {
        let maps = socket_maps::<F>();
        add_frontend(maps, frontend::<F>(), proto, (8, &[8]), entry);
        let socket = socket(maps, POD_A, proto);
        assert_eq!(connect(maps, &socket, frontend::<F>()), Ok(backend::<F>()));
        assert_eq!(connect(maps, &socket, other), Ok(other));
        assert_eq!(maps.open_connections_of(8), 0);
        assert_eq!(send(maps, &socket, frontend::<F>()), Ok(frontend::<F>()), "left to the packets");
    }
}

families!(open_connection_is_counted_until_a_connect_to_any_other_address = counted_until_connect());

families!(open_connection_is_counted_until_close_or_the_next_connect = counted());

fn takes_turns<F: Net>() {
    let maps = socket_maps::<F>();
    let entry = ServiceEntry { algorithm: Algorithm::RoundRobin as u8, ..CLUSTER };
    three_endpoints(maps, PROTO_TCP, entry);
    let next = |_| id_of::<F>(connect(maps, &socket(maps, POD_A, PROTO_TCP), frontend::<F>()).unwrap());
    let first: Vec<u32> = (0..3).map(next).collect();
    let second: Vec<u32> = (0..3).map(next).collect();
    let mut sorted = first.clone();
    sorted.sort_unstable();
    assert_eq!((sorted, second), (THREE.to_vec(), first));
}

families!(connections_of_a_round_robin_service_take_turns = takes_turns());
