//! Calls that fail, and calls that are left to the packets.

use proxy_common::config::{
    CONFIG_POD_UDP_BY_PACKETS, CONFIG_SOCKET_DROP_FAIL, CONFIG_SOCKET_LB_HOST_ONLY, CONFIG_SOCKET_LB_OFF,
};
use proxy_common::node::Cidr;
use proxy_common::service::{
    KIND_ADDRESS, KIND_LOAD_BALANCER, KIND_NODE_PORT, KIND_UNMANAGED, SERVICE_CHANGING,
    SERVICE_CHANGING_NODE, SERVICE_DROP_WHEN_EMPTY, SERVICE_NO_SOCKETS, SERVICE_NODE_ALLOWED,
    SERVICE_SOURCE_RANGES,
};
use proxy_common::{Address as _, PROTO_ICMP};

use super::*;

fn without_endpoint<F: Net>() {
    let maps = socket_maps::<F>();
    for proto in [PROTO_TCP, PROTO_UDP] {
        add_frontend(maps, frontend::<F>(), proto, (40, &[]), CLUSTER);
    }
    for netns in [NODE, POD_A] {
        let (tcp, udp) = (socket(maps, netns, PROTO_TCP), socket(maps, netns, PROTO_UDP));
        assert_eq!(connect(maps, &tcp, frontend::<F>()), Err(ECONNREFUSED));
        assert_eq!(connect(maps, &udp, frontend::<F>()), Err(ECONNREFUSED));
        assert_eq!(send(maps, &udp, frontend::<F>()), Err(ECONNREFUSED));
    }
    assert_eq!((maps.count_of(Reason::NoEndpoint), maps.refusals_of(1, Reason::NoEndpoint)), (6, 6));
    assert_eq!(maps.take_events(), [(1, EventKind::Reason(Reason::NoEndpoint)); 6]);
    let foreign = socket(maps, FOREIGN, PROTO_TCP);
    assert_eq!(connect(maps, &foreign, frontend::<F>()), Ok(frontend::<F>()));
}

families!(call_to_a_service_without_endpoints_is_refused = without_endpoint());

/// Notes that an agent attaches programs to the devices of pods.
fn attend<F: Net>(maps: HostMaps<F>) {
    let until = maps.now().wrapping_add(15 * HZ);
    maps.edit_config(|config| config.attended_until = until);
}

fn without_endpoint_in_a_pod<F: Net>() {
    let maps = socket_maps::<F>();
    set_service_range(maps);
    attend(maps);
    for proto in [PROTO_TCP, PROTO_UDP] {
        add_frontend(maps, frontend::<F>(), proto, (40, &[]), CLUSTER);
    }
    let undefined = (F::addr(96), 81);
    maps.add_service(
        ServiceKey::internal(undefined.0, 0, 0),
        ServiceEntry { id: 0, kind: KIND_ADDRESS, ..CLUSTER },
    );
    let calls = |netns, to| {
        let [tcp, udp, connected] = [PROTO_TCP, PROTO_UDP, PROTO_UDP].map(|proto| socket(maps, netns, proto));
        [connect(maps, &tcp, to), send(maps, &udp, to), connect(maps, &connected, to)]
    };
    let refused = Err(ECONNREFUSED);
    for to in [frontend::<F>(), undefined] {
        assert_eq!(calls(POD_A, to), [refused, Ok(to), Ok(to)]);
        assert_eq!(calls(NODE, to), [refused, refused, if to == undefined { Ok(to) } else { refused }]);
    }
    assert_eq!(maps.count_of(Reason::NoEndpoint), 4, "the packet programs count a pod's packets");
    maps.edit_config(|config| config.flags |= CONFIG_SOCKET_DROP_FAIL);
    assert_eq!(calls(POD_A, frontend::<F>()), [refused; 3]);
}

families!(pods_datagrams_are_left_to_packets_while_attended = without_endpoint_in_a_pod());

fn mesh<F: Net>() {
    let maps = socket_maps::<F>();
    maps.edit_config(|config| config.mesh_ports = [0, 15_001, 4_140, 0]);
    let calls = |netns, listener| {
        let with = |proto| HostSock { listener, ..socket(maps, netns, proto) };
        let connects = |proto| connect(maps, &with(proto), frontend::<F>()) == Ok(backend::<F>());
        let sends = send(maps, &with(PROTO_UDP), frontend::<F>()) == Ok(backend::<F>());
        [connects(PROTO_TCP), connects(PROTO_UDP), sends]
    };
    for (netns, listener, is_translated) in [
        (POD_A, Some(15_001), false),
        (POD_A, Some(4_140), false),
        (POD_A, Some(8080), true),
        (POD_A, None, true),
        (NODE, Some(15_001), true),
    ] {
        assert_eq!(calls(netns, listener), [is_translated; 3], "{netns} {listener:?}");
    }
    let mut udp = socket(maps, POD_A, PROTO_UDP);
    assert_eq!(send(maps, &udp, frontend::<F>()), Ok(backend::<F>()));
    udp.listener = Some(15_001);
    assert_eq!(send(maps, &udp, frontend::<F>()), Ok(backend::<F>()), "it keeps the source of its datagrams");
    let mut udp = socket(maps, POD_A, PROTO_UDP);
    assert_eq!(connect(maps, &udp, frontend::<F>()), Ok(backend::<F>()));
    udp.state.set(CLOSE);
    udp.listener = Some(15_001);
    assert_eq!(send(maps, &udp, frontend::<F>()), Ok(frontend::<F>()), "the earlier connect says nothing");
}

families!(pods_socket_with_mesh_listener_is_left_to_packets = mesh());

fn without_local_endpoint<F: Net>() {
    let maps = socket_maps::<F>();
    let entry = ServiceEntry { flags: SERVICE_DROP_WHEN_EMPTY, ..CLUSTER };
    for proto in [PROTO_TCP, PROTO_UDP] {
        add_frontend(maps, frontend::<F>(), proto, (40, &[]), entry);
    }
    let tcp = socket(maps, POD_A, PROTO_TCP);
    let udp = socket(maps, POD_A, PROTO_UDP);
    assert_eq!(connect(maps, &tcp, frontend::<F>()), Ok(frontend::<F>()));
    assert_eq!(send(maps, &udp, frontend::<F>()), Ok(frontend::<F>()));
    assert_eq!(maps.count_of(Reason::NoLocalEndpoint), 0, "the packet programs count the packets");
    maps.edit_config(|config| config.flags |= CONFIG_SOCKET_DROP_FAIL);
    assert_eq!(connect(maps, &tcp, frontend::<F>()), Err(ETIMEDOUT));
    assert_eq!(send(maps, &udp, frontend::<F>()), Err(ETIMEDOUT));
    assert_eq!(maps.refusals_of(1, Reason::NoLocalEndpoint), 2);
}

families!(
    call_that_kube_proxy_drops_is_left_to_the_packets_or_fails_with_socket_drop_fail =
        without_local_endpoint()
);

/// Makes three addresses, from number 96 on, Service addresses.
fn set_service_range<F: Net>(maps: HostMaps<F>) {
    let mut node = NodeEntry { source: node::<F>(), service_cidr_count: 3, ..NodeEntry::UNKNOWN };
    for (range, number) in node.service_cidrs.iter_mut().zip(96..) {
        *range = Cidr { addr: F::addr(number), mask: F::Words::ONES };
    }
    maps.set_node(node);
}

fn address_without_port<F: Net>() {
    let maps = socket_maps::<F>();
    set_service_range(maps);
    let (taken, free, unmanaged) = (F::addr(96), F::addr(97), F::addr(98));
    let mark = |addr, kind| {
        maps.add_service(ServiceKey::internal(addr, 0, 0), ServiceEntry { id: 0, kind, ..CLUSTER });
    };
    mark(taken, KIND_ADDRESS);
    mark(unmanaged, KIND_UNMANAGED);
    let tcp = socket(maps, POD_A, PROTO_TCP);
    let udp = socket(maps, POD_A, PROTO_UDP);
    assert_eq!(connect(maps, &tcp, (taken, 81)), Err(ECONNREFUSED));
    assert_eq!(send(maps, &udp, (taken, 81)), Err(ECONNREFUSED));
    assert_eq!(connect(maps, &udp, (taken, 81)), Ok((taken, 81)), "a program asks for its own address");
    udp.state.set(CLOSE);
    assert_eq!(maps.count_of(Reason::UndefinedPort), 2);
    for (socket, addr) in [(&tcp, free), (&tcp, unmanaged), (&udp, free), (&udp, unmanaged)] {
        assert_eq!(connect(maps, socket, (addr, 81)), Ok((addr, 81)));
        socket.state.set(CLOSE);
    }
    let ping = HostSock::new(POD_A, 5, PROTO_ICMP);
    assert_eq!(connect(maps, &ping, (taken, 0)), Ok((taken, 0)), "another protocol");
    let foreign = socket(maps, FOREIGN, PROTO_TCP);
    assert_eq!(connect(maps, &foreign, (taken, 81)), Ok((taken, 81)));
    let (tcp, udp) = (socket(maps, POD_A, PROTO_TCP), socket(maps, POD_A, PROTO_UDP));
    maps.edit_config(|config| config.flags |= CONFIG_SOCKET_DROP_FAIL);
    assert_eq!(connect(maps, &tcp, (free, 81)), Err(ETIMEDOUT));
    assert_eq!(connect(maps, &tcp, (unmanaged, 81)), Ok((unmanaged, 81)));
    assert_eq!(connect(maps, &udp, (taken, 81)), Err(ECONNREFUSED));
    assert_eq!((maps.count_of(Reason::UndefinedPort), maps.count_of(Reason::UnallocatedAddress)), (3, 1));
    assert_eq!(maps.refusals(), [], "no Service is known");
}

families!(
    call_to_a_service_address_without_a_frontend_is_refused_or_passes_by_the_kind_of_address =
        address_without_port()
);

fn old_kernel<F: Net>() {
    let maps = socket_maps::<F>();
    add_frontend(maps, frontend::<F>(), PROTO_TCP, (40, &[]), CLUSTER);
    maps.set_can_set_errno(false);
    let socket = socket(maps, POD_A, PROTO_TCP);
    assert_eq!(connect(maps, &socket, frontend::<F>()), Ok(frontend::<F>()));
    assert_eq!((maps.count_of(Reason::NoEndpoint), maps.take_events().len()), (0, 0));
}

families!(refusal_is_left_to_the_packets_if_programs_cannot_choose_the_error = old_kernel());

/// Whether connects of the node, of a pod, and of a pod's UDP socket are translated, and a datagram of a pod.
fn translated<F: Net>(maps: HostMaps<F>) -> [bool; 4] {
    let connects =
        |netns, proto| connect(maps, &socket(maps, netns, proto), frontend::<F>()) == Ok(backend::<F>());
    let sends = send(maps, &socket(maps, POD_A, PROTO_UDP), frontend::<F>()) == Ok(backend::<F>());
    [connects(NODE, PROTO_TCP), connects(POD_A, PROTO_TCP), connects(POD_A, PROTO_UDP), sends]
}

fn socket_lb<F: Net>() {
    let maps = socket_maps::<F>();
    let set = |flags| maps.edit_config(|config| config.flags = flags);
    assert_eq!(translated(maps), [true; 4]);
    set(CONFIG_SOCKET_LB_HOST_ONLY);
    assert_eq!(translated(maps), [true, false, false, false]);
    set(CONFIG_SOCKET_LB_OFF);
    assert_eq!(translated(maps), [false; 4]);
}

families!(sockets_are_left_to_the_packets_by_socket_lb = socket_lb());

fn attended<F: Net>() {
    let maps = socket_maps::<F>();
    maps.edit_config(|config| config.flags = CONFIG_POD_UDP_BY_PACKETS);
    assert_eq!(translated(maps), [true; 4], "no agent attaches programs to the devices of new pods");
    attend(maps);
    assert_eq!(translated(maps), [true, true, false, true]);
    let udp = socket(maps, NODE, PROTO_UDP);
    assert_eq!(connect(maps, &udp, frontend::<F>()), Ok(backend::<F>()), "the node's own");
    maps.advance(15 * HZ - 1);
    assert_eq!(translated(maps), [true, true, false, true]);
    maps.advance(1);
    assert_eq!(translated(maps), [true; 4], "the agent has stopped");
}

families!(connected_udp_socket_of_a_pod_is_left_to_the_packets_while_an_agent_attends = attended());

/// The endpoint of a Service is also the address of another one, as with an ingress controller in the node's namespace.
fn endpoint_is_frontend<F: Net>() {
    let maps = socket_maps::<F>();
    attend(maps);
    let left = Ok(frontend::<F>());
    let calls = |netns| {
        let [tcp, udp] = [PROTO_TCP, PROTO_UDP].map(|proto| socket(maps, netns, proto));
        [connect(maps, &tcp, frontend::<F>()), send(maps, &udp, frontend::<F>())]
    };
    // Another address shares its bit.
    maps.add_frontend_bit(&backend::<F>().0, backend::<F>().1, PROTO_TCP);
    assert_eq!(calls(POD_A), [Ok(backend::<F>()); 2]);
    for proto in [PROTO_TCP, PROTO_UDP] {
        add_frontend(maps, backend::<F>(), proto, (70, &[7]), ServiceEntry { id: 2, ..CLUSTER });
    }
    assert_eq!((calls(POD_A), calls(NODE)), ([left; 2], [Ok(backend::<F>()); 2]));
    assert_eq!(maps.stats_of(1).connections, 4, "the packet programs count a pod's connections");
    maps.advance(15 * HZ);
    assert_eq!(calls(POD_A), [Ok(backend::<F>()); 2], "the agent has stopped");
}

families!(pods_calls_are_left_to_the_packets_if_the_endpoint_is_a_frontend = endpoint_is_frontend());

fn changing<F: Net>() {
    let maps = socket_maps::<F>();
    let set = |flags| {
        let entry = ServiceEntry { flags: SERVICE_EJECTS | flags, ..CLUSTER };
        add_frontend(maps, frontend::<F>(), PROTO_TCP, (7, &[7]), entry);
    };
    set(SERVICE_CHANGING | SERVICE_CHANGING_NODE);
    assert_eq!(translated(maps), [true; 4], "no agent attaches programs to the devices of new pods");
    attend(maps);
    assert_eq!(translated(maps), [false, false, true, true]);
    set(SERVICE_CHANGING);
    assert_eq!(translated(maps), [true, false, true, true]);
    set(0);
    assert_eq!(translated(maps), [true; 4]);
    set(SERVICE_CHANGING_NODE);
    assert_eq!(translated(maps), [false, true, true, true]);
    maps.advance(15 * HZ);
    assert_eq!(translated(maps), [true; 4], "the agent has ended");
}

families!(changing_service_leaves_sockets_to_packets = changing());

fn bound<F: Net>() {
    let maps = socket_maps::<F>();
    let connects = |netns, entry| {
        add_frontend(maps, frontend::<F>(), PROTO_TCP, (7, &[7]), entry);
        let mut socket = socket(maps, netns, PROTO_TCP);
        socket.bound_port = 40_000;
        connect(maps, &socket, frontend::<F>()) == Ok(backend::<F>())
    };
    assert!(connects(POD_A, CLUSTER), "no agent attaches programs to the devices of new pods");
    attend(maps);
    assert!(!connects(POD_A, CLUSTER));
    assert!(
        connects(POD_A, ServiceEntry { affinity_secs: 60, ..CLUSTER }),
        "packets do not share its endpoint"
    );
    assert!(connects(NODE, CLUSTER));
}

families!(bound_tcp_socket_of_a_pod_is_left_to_the_packets_while_an_agent_attends = bound());

fn source_ranges<F: Net>() {
    let maps = socket_maps::<F>();
    let address = (F::addr(120), 80);
    let set = |flags| {
        let entry = ServiceEntry { kind: KIND_LOAD_BALANCER, flags, ..CLUSTER };
        add_frontend(maps, address, PROTO_TCP, (7, &[7]), entry);
    };
    let connect_from = |netns| connect(maps, &socket(maps, netns, PROTO_TCP), address);
    set(SERVICE_SOURCE_RANGES);
    assert_eq!(connect_from(POD_A), Ok(address), "the packets have the source");
    assert_eq!(connect_from(NODE), Ok(address), "the packets are dropped");
    maps.edit_config(|config| config.flags |= CONFIG_SOCKET_DROP_FAIL);
    assert_eq!((connect_from(POD_A), connect_from(NODE)), (Ok(address), Err(ETIMEDOUT)));
    assert_eq!(maps.refusals_of(1, Reason::SourceNotAllowed), 1);
    set(SERVICE_SOURCE_RANGES | SERVICE_NODE_ALLOWED);
    assert_eq!((connect_from(POD_A), connect_from(NODE)), (Ok(address), Ok(backend::<F>())));
    set(SERVICE_NO_SOCKETS);
    assert_eq!((connect_from(POD_A), connect_from(NODE)), (Ok(address), Ok(backend::<F>())));
}

families!(
    service_with_source_ranges_leaves_pods_to_the_packets_and_refuses_a_node_that_is_not_listed =
        source_ranges()
);

fn empty_node_port<F: Net>() {
    let maps = socket_maps::<F>();
    let entry = ServiceEntry { kind: KIND_NODE_PORT, ..CLUSTER };
    add_frontend(maps, (F::Words::ZERO, 30080), PROTO_TCP, (40, &[]), entry);
    maps.add_frontend_bit(&node::<F>(), 30080, PROTO_TCP);
    let to = (node::<F>(), 30080);
    let connect_from = |netns| connect(maps, &socket(maps, netns, PROTO_TCP), to);
    assert_eq!((connect_from(NODE), connect_from(POD_A)), (Ok(to), Err(ECONNREFUSED)));
}

families!(node_port_without_endpoints_is_left_to_a_process_of_the_node = empty_node_port());

fn keeps_connection<F: Net>() {
    let maps = socket_maps::<F>();
    let other = (F::addr(97), 80);
    add_frontend(maps, other, PROTO_UDP, (40, &[]), ServiceEntry { id: 2, ..CLUSTER });
    let udp = socket(maps, POD_A, PROTO_UDP);
    assert_eq!(connect(maps, &udp, frontend::<F>()), Ok(backend::<F>()));
    assert_eq!(connect(maps, &udp, other), Err(ECONNREFUSED));
    assert_eq!(seen(maps, &udp, backend::<F>()), frontend::<F>());
}

families!(connected_socket_whose_next_connect_is_refused_keeps_its_peer = keeps_connection());
