//! Packets of existing flows, and flows of a frontend that the agent has given to another Service.

use proxy_common::conntrack::{FIN_BACKEND, FIN_CLIENT, RST_BACKEND, RST_CLIENT, is_closed};
use proxy_common::service::{KIND_EXTERNAL_IP, KIND_NODE_PORT, SERVICE_RECENT};

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
    assert_eq!(maps.stats_of(1).connections, 1, "the flow continues");
    sent();
    let other = give_away(maps);
    maps.advance(300);
    assert_eq!(sent(), packet::<F>(client, other, UDP));
    assert_eq!((maps.stats_of(1).connections, maps.stats_of(2).connections), (1, 1));
    assert_eq!(maps.flows().iter().filter(|flow| flow.bits() != 0).count(), 1);
}

families!(datagrams_follow_their_frontend_to_another_service = the_frontend_of_datagrams());

/// The id of the flow's endpoint has another endpoint of the Service.
fn a_reused_id<F: Net>() {
    for other in [(backend::<F>().0, 5353), (F::addr(3), backend::<F>().1)] {
        let maps = maps::<F>(BACKEND_LOCAL);
        let (client, frontend) = (client::<F>(), frontend::<F>());
        let sent = || run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, UDP)).1.wire();
        assert_eq!(sent(), packet::<F>(client, backend::<F>(), UDP));
        add_endpoint(maps, 8, other, PROTO_UDP);
        assert_eq!(sent(), packet::<F>(client, other, UDP));
    }
}

families!(udp_flow_does_not_follow_a_reused_id = a_reused_id());

/// XDP leaves the flow to the next hook, which has to notice the change, too.
fn the_frontend_after_xdp<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend) = (client::<F>(), frontend::<F>());
    let bytes = packet::<F>(client, frontend, UDP);
    run_over(Hook::Ingress, maps, UPLINK, &bytes);
    let other = give_away(maps);
    maps.advance(300);
    assert_eq!(early::run_at(maps, UPLINK, &bytes, |_| {}).0, NEXT);
    let (_, skb) = run_over(Hook::Ingress, maps, UPLINK, &bytes);
    assert_eq!(skb.wire(), packet::<F>(client, other, UDP));
}

families!(udp_flow_passed_by_xdp_follows_frontend = the_frontend_after_xdp());

/// The endpoint sends without a pause, and the client seldom.
fn the_frontend_of_a_stream<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let sent = || run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, UDP)).1.wire();
    assert_eq!(sent(), packet::<F>(client, backend, UDP));
    let other = give_away(maps);
    let answered = || run_over(Hook::Egress, maps, POD, &packet::<F>(backend, client, UDP)).1.wire();
    for _ in 0..3 {
        maps.advance(256);
        assert_eq!(answered(), packet::<F>(frontend, client, UDP));
    }
    assert_eq!(sent(), packet::<F>(client, other, UDP));
}

families!(udp_flow_follows_frontend_while_endpoint_sends = the_frontend_of_a_stream());

/// A RST with a sequence number out of the window is counted, and does not close the flow.
fn a_reset_out_of_the_window<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let counted = || maps.refusals_of(1, Reason::OutOfWindow);
    for (hook, src, dst, shape) in
        [(Hook::Ingress, client, frontend, SYN), (Hook::Egress, backend, client, SYN_ACK)]
    {
        run_over(hook, maps, POD, &packet::<F>(src, dst, shape));
    }
    run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, DATA));
    assert_eq!(counted(), 0);
    let mut reset = packet::<F>(client, frontend, Shape { flags: 4, ..SYN });
    reset[build::ETHERNET + F::HEADER + 4] = 0x40;
    run_over(Hook::Ingress, maps, POD, &reset);
    assert_eq!(counted(), 1);
    assert!(maps.flows().iter().all(|flow| flow.bits() & RST_CLIENT == 0));
    run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, Shape { flags: 4, ..SYN }));
    assert_eq!(counted(), 1);
    assert!(maps.flows().iter().any(|flow| flow.bits() & RST_CLIENT != 0));
}

families!(a_reset_out_of_the_window_is_counted = a_reset_out_of_the_window());

/// A process of the node had the connection before its address and port became a frontend.
fn older_than_the_frontend<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let frontend = frontend::<F>();
    let passes = |shape, has_connection| {
        let bytes = packet::<F>(client::<F>(), frontend, shape);
        let edit = |skb: &mut Skb| skb.has_connection = has_connection;
        let (verdict, skb) = run_edited(Hook::Ingress, maps, UPLINK, &bytes, edit);
        (verdict, skb.wire()) == (NEXT, bytes)
    };
    let end = Shape { flags: 0x11, ..DATA };
    assert!(!passes(DATA, true), "the node does not have the address");
    maps.set_config(*maps.config().unwrap());
    maps.add_node_addr(frontend.0, NODE_ADDR_OWN);
    assert!(passes(DATA, true) && passes(end, true));
    assert!(!passes(SYN, true), "a new connection is the Service's");
    assert!(!passes(DATA, true), "it has a flow");
    maps.set_config(*maps.config().unwrap());
    assert!(!passes(DATA, false), "no process has it");
}

families!(process_connection_survives_new_frontend = older_than_the_frontend());

/// Sets the kind and the flags of the frontend.
fn set_frontend<F: Net>(maps: HostMaps<F>, proto: u8, kind: u8, flags: u16) {
    let (addr, port) = frontend::<F>();
    let entry = ServiceEntry { id: 1, slot_base: 7, slot_count: 1, kind, flags, ..ServiceEntry::NONE };
    maps.add_service(ServiceKey::internal(addr, port, proto), entry);
}

/// netfilter or a pod had the connection before its address and port became a frontend.
fn segments_to_a_recent_frontend<F: Net>() {
    let (client, frontend) = (client::<F>(), frontend::<F>());
    let passes = |device, kind, flags, shape| {
        let maps = maps::<F>(BACKEND_LOCAL);
        set_frontend(maps, PROTO_TCP, kind, flags);
        let bytes = packet::<F>(client, frontend, shape);
        let (verdict, skb) = run_over(Hook::Ingress, maps, device, &bytes);
        (verdict, skb.wire()) == (NEXT, bytes) && maps.flows().iter().all(|flow| flow.bits() == 0)
    };
    let end = Shape { flags: 0x11, ..DATA };
    for shape in [DATA, end] {
        for device in [UPLINK, POD] {
            assert!(passes(device, KIND_NODE_PORT, SERVICE_RECENT, shape));
            assert!(!passes(device, KIND_NODE_PORT, 0, shape));
        }
        assert!(passes(POD, KIND_EXTERNAL_IP, SERVICE_RECENT, shape));
        assert!(!passes(UPLINK, KIND_EXTERNAL_IP, SERVICE_RECENT, shape), "it would come back");
    }
    assert!(!passes(UPLINK, KIND_NODE_PORT, SERVICE_RECENT, SYN));
}

families!(segment_in_the_middle_passes_at_a_recent_frontend = segments_to_a_recent_frontend());

/// A UDP socket of the node was connected before its address and port became a frontend.
fn datagram_to_a_recent_frontend<F: Net>() {
    let passes = |flags, has_connection| {
        let maps = maps::<F>(BACKEND_LOCAL);
        set_frontend(maps, PROTO_UDP, KIND_NODE_PORT, flags);
        maps.add_node_addr(frontend::<F>().0, NODE_ADDR_OWN);
        let bytes = packet::<F>(client::<F>(), frontend::<F>(), UDP);
        let edit = |skb: &mut Skb| skb.has_connection = has_connection;
        let (verdict, skb) = run_edited(Hook::Ingress, maps, UPLINK, &bytes, edit);
        (verdict, skb.wire()) == (NEXT, bytes)
    };
    assert!(passes(SERVICE_RECENT, true));
    assert!(!passes(SERVICE_RECENT, false) && !passes(0, true));
}

families!(datagram_to_a_connected_socket_passes_at_a_recent_frontend = datagram_to_a_recent_frontend());

/// A reply of an endpoint on this node is translated where it leaves, also if the client has a port that SNAT may use.
fn a_client_with_a_snat_port<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = ((client::<F>().0, 2500), frontend::<F>(), backend::<F>());
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, SYN));
    let reply = packet::<F>(backend, client, SYN_ACK);
    let (verdict, skb) = run_over(Hook::Ingress, maps, POD, &reply);
    assert_eq!((verdict, skb.wire(), maps.stats_of(1).reply_packets), (NEXT, reply.clone(), 0));
    let (_, skb) = run_over(Hook::Egress, maps, UPLINK, &reply);
    assert_eq!((skb.wire(), maps.stats_of(1).reply_packets), (packet::<F>(frontend, client, SYN_ACK), 1));
}

families!(a_client_may_have_a_port_of_snat = a_client_with_a_snat_port());

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

families!(a_connection_keeps_its_endpoint = the_frontend_of_a_connection());

/// The backend closes, the client vanishes, and its port is used again before the flow expires.
fn a_port_that_is_used_again<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let fin = Shape { flags: 0x11, ..DATA };
    let handshake = [(Hook::Ingress, client, frontend, SYN), (Hook::Egress, backend, client, SYN_ACK)];
    let send = |packets: &[(Hook, End<F>, End<F>, Shape)]| {
        for (hook, src, dst, shape) in packets {
            run_over(*hook, maps, POD, &packet::<F>(*src, *dst, *shape));
        }
    };
    send(&handshake);
    send(&[(Hook::Ingress, client, frontend, DATA), (Hook::Egress, backend, client, fin)]);
    assert_eq!(live(maps)[0].bits() & (FIN_CLIENT | FIN_BACKEND), FIN_BACKEND);
    maps.advance(3000 * HZ);
    send(&handshake);
    assert_eq!(live(maps)[0].bits() & (FIN_CLIENT | FIN_BACKEND), 0);
    send(&[(Hook::Ingress, client, frontend, DATA), (Hook::Ingress, client, frontend, fin)]);
    assert!(!is_closed(live(maps)[0].bits()), "the backend may still send");
    assert_eq!(live(maps).len(), 1);
}

families!(a_connection_on_a_used_port_has_its_own_fins = a_port_that_is_used_again());
