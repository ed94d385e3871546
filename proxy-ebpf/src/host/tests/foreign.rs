//! Traffic other than connections to Services: connections of the node itself, and programs of another version.

use proxy_common::conntrack::{is_closed, tcp};
use proxy_common::flow::DIRECT_ANY;

use super::*;
use crate::context::Packet;
use crate::env::FlowTable as _;
use crate::host::maps::at;
use crate::shared::Shared as _;
use crate::stage::classify::{leaving, local_origin};
use crate::step::Step;

/// A connection of the node itself has the address and port of a frontend, since netfilter may assign any port.
fn a_port_that_a_frontend_has<F: Net>(shape: Shape, reply: Shape) {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (own, far) = ((node::<F>(), 3000), (F::addr(77), 443));
    let id = if shape.proto == PROTO_UDP { 8 } else { 7 };
    let entry =
        ServiceEntry { id: 1, slot_base: id, slot_count: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE };
    maps.add_service(ServiceKey::internal(own.0, own.1, shape.proto), entry);
    let passes = |hook, device, bytes: Vec<u8>| {
        let (verdict, skb) = run_over(hook, maps, device, &bytes);
        assert_eq!((verdict, skb.wire()), (NEXT, bytes));
    };
    for _ in 0..2 {
        passes(Hook::Egress, UPLINK, packet::<F>(own, far, shape));
        passes(Hook::Ingress, UPLINK, packet::<F>(far, own, reply));
    }
    let flows: Vec<_> = maps.flows().iter().filter(|flow| flow.bits() != 0).copied().collect();
    assert_eq!(flows.len(), 1);
    assert_eq!((flows[0].client, flows[0].frontend, flows[0].service), (far.0, own.0, 0));
    assert_eq!(maps.stats_of(1).packets, 0, "no Service has this traffic");
    assert_eq!(
        maps.direct_seen(DIRECT_ANY).unwrap().load(),
        0,
        "packets to endpoints are not looked up for it"
    );
    // A translated reply also has the frontend's address, but begins no flow at the next lower device.
    let client = client::<F>();
    let (_, skb) = run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, own, shape));
    assert_eq!(skb.wire(), packet::<F>(client, backend::<F>(), shape));
    let (_, skb) = run_over(Hook::Egress, maps, UPLINK, &packet::<F>(backend::<F>(), client, reply));
    assert_eq!(skb.wire(), packet::<F>(own, client, reply));
    assert!(skb.is_translated);
    // A packet with another node's address begins no flow either.
    passes(Hook::Egress, UPLINK, packet::<F>(frontend::<F>(), far, shape));
    assert_eq!(maps.flows().iter().filter(|flow| flow.bits() != 0).count(), 2);
    // The Service is removed, and the other end sends a SYN again.
    let of_the_agent = maps;
    at!(of_the_agent, services).clear();
    passes(Hook::Ingress, UPLINK, packet::<F>(far, own, Shape { flags: 2, ..shape }));
}

families!(
    the_nodes_own_connections_may_have_the_port_of_a_frontend = a_port_that_a_frontend_has(SYN, SYN_ACK),
    a_port_that_a_frontend_has(UDP, UDP)
);

/// The node's own side closes the connection, and uses the ports again.
fn ports_that_are_used_again<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (own, far) = ((node::<F>(), 3000), (F::addr(77), 443));
    let entry =
        ServiceEntry { id: 1, slot_base: 7, slot_count: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE };
    maps.add_service(ServiceKey::internal(own.0, own.1, PROTO_TCP), entry);
    let fin = Shape { flags: 0x11, ..DATA };
    for _ in 0..2 {
        for (leaves, comes) in [(SYN, SYN_ACK), (DATA, DATA), (fin, fin)] {
            for (hook, from, to, shape) in
                [(Hook::Egress, own, far, leaves), (Hook::Ingress, far, own, comes)]
            {
                let bytes = packet::<F>(from, to, shape);
                let (verdict, skb) = run_over(hook, maps, UPLINK, &bytes);
                assert_eq!((verdict, skb.wire()), (NEXT, bytes));
            }
        }
        assert!(maps.flows().iter().any(|flow| is_closed(flow.bits())));
    }
    // Now the other end is a client of the Service.
    let (_, skb) = run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(far, own, SYN));
    assert_eq!(skb.wire(), packet::<F>(far, backend::<F>(), SYN));
}

families!(ports_of_the_nodes_own_connections_are_used_again = ports_that_are_used_again());

/// Other rules begin connections by now: one of them may have the source port of a closed flow.
fn a_closed_flow_yields<F: Net>(backend_flags: u32, hook: Hook, device: u32) {
    let maps = maps::<F>(backend_flags);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, SYN));
    let flow = maps.flows().into_iter().find(|flow| flow.bits() != 0).unwrap();
    let seen = (flow.source, flow.source_port);
    let come_back = move |shape| {
        let bytes = packet::<F>(backend, seen, shape);
        let (verdict, skb) = run_over(hook, maps, device, &bytes);
        (verdict, skb.wire() == bytes)
    };
    let is_translated = |(_, is_as_it_came): (i32, bool)| !is_as_it_came;
    // Open flows stay, whatever the other rules do.
    maps.set_opens_flows(false);
    assert!(is_translated(come_back(SYN_ACK)));
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, DATA));
    assert!(is_translated(come_back(DATA)));
    let fin = Shape { flags: 0x11, ..DATA };
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, fin));
    assert!(is_translated(come_back(fin)));
    // The last segment, too: the node would answer it with a RST.
    assert!(is_translated(come_back(DATA)));
    // Another CPU has seen a segment one tick later.
    at!(maps, flows).iter_mut().find(|flow| flow.bits() != 0).unwrap().last_seen = maps.now().wrapping_add(1);
    assert!(is_translated(come_back(DATA)));
    // The flow has been closed for a while: the reply is left to the rules behind.
    maps.advance(2 * HZ);
    let last = maps.stats_of(1).reply_packets;
    assert_eq!(come_back(DATA), (NEXT, true));
    assert_eq!(maps.stats_of(1).reply_packets, last);
    // Without other rules, the reply is for the flow, as the last segments of a connection are.
    maps.set_opens_flows(true);
    assert!(is_translated(come_back(DATA)));
    assert_eq!(maps.stats_of(1).reply_packets, last + 1);
}

families!(
    closed_flow_yields_to_a_connection_of_other_rules =
        a_closed_flow_yields(BACKEND_LOCAL, Hook::Egress, POD),
    a_closed_flow_yields(0, Hook::Ingress, UPLINK)
);

/// A client connects directly to an endpoint, from the source port of one of its connections through the Service.
fn direct_connections_time_out<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let sent = |dst, shape| run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, dst, shape)).1.wire();
    let is_looked_up = || maps.direct_seen(DIRECT_ANY).unwrap().load() != 0;
    sent(frontend, SYN);
    let unchanged = packet::<F>(client, backend, DATA);
    assert_eq!(sent(backend, DATA), unchanged);
    assert!(!is_looked_up());
    assert_ne!(sent(backend, SYN), packet::<F>(client, backend, SYN), "two connections have one tuple");
    assert!(is_looked_up());
    assert_ne!(sent(backend, DATA), unchanged, "the connection got another source port at its SYN");
    // No direct connection was seen for the timeout of an established connection.
    let config = maps.time().unwrap().config;
    maps.advance(config.tcp_established + 2);
    assert!(is_looked_up());
    assert_eq!(sent(backend, DATA), unchanged);
    assert!(!is_looked_up());
}

families!(
    segments_to_endpoints_are_looked_up_while_there_are_direct_connections = direct_connections_time_out()
);

/// The stage of an egress packet. A second stage after the first costs more, and the packet does not show it.
fn the_stage_of_what_leaves<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let at =
        |src: End<F>, dst: End<F>| Packet { key: tcp_key::<F>(src, dst, DIRECTION_FORWARD), ..Packet::EMPTY };
    let leaves = |packet: Packet<F::Words>, is_translated: bool| {
        let frame = HostPacket::new(&[]).edit(|skb| skb.is_translated = is_translated);
        leaving(maps, frame.frame(), &packet)
    };
    let (far, frontend, backend) = ((F::addr(77), 443), frontend::<F>(), backend::<F>());
    let (outside, forwarded) = ((node::<F>(), 4000), (node::<F>(), 2500));
    assert_eq!(leaves(at(frontend, far), false), Step::DirectFrontendSource);
    assert_eq!(leaves(at(frontend, far), true), Step::Pass);
    assert_eq!(leaves(at(outside, far), false), Step::Pass);
    assert_eq!(leaves(at(forwarded, backend), false), Step::DirectEgress);
    assert_eq!(leaves(at(forwarded, backend), true), Step::Pass);
    assert_eq!(leaves(at(outside, backend), false), Step::Pass);
    assert_eq!(leaves(at(forwarded, far), false), Step::Pass);
    assert_eq!(leaves(at((client::<F>().0, 2500), backend), false), Step::Pass);

    // The endpoint of one Service is the frontend of another.
    let entry =
        ServiceEntry { id: 1, slot_base: 7, slot_count: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE };
    maps.add_service(ServiceKey::internal(backend.0, backend.1, PROTO_TCP), entry);
    let made = |packet, is_translated| {
        let frame = HostPacket::new(&[]).edit(|skb| skb.is_translated = is_translated);
        local_origin(maps, frame.frame(), &packet)
    };
    let of_socket = |packet| {
        let frame = HostPacket::new(&[]).edit(|skb| skb.is_for_backend_of_socket = true);
        local_origin(maps, frame.frame(), &packet)
    };
    assert_eq!(of_socket(at(outside, backend)), Step::Pass, "the socket's call was translated");
    assert_eq!(of_socket(at(forwarded, backend)), Step::DirectEgress, "its replies could be mistaken");
    let without_socket = |tcp_flags, to| {
        let frame = HostPacket::new(&[]).edit(|skb| skb.has_socket = false);
        local_origin(maps, frame.frame(), &Packet { tcp_flags, ..at(outside, to) })
    };
    assert_eq!(without_socket(tcp::SYN, frontend), Step::Established);
    assert_eq!(
        without_socket(tcp::ACK, frontend),
        Step::Pass,
        "the last segment of a connection without a flow"
    );
    assert_eq!(made(at(outside, frontend), false), Step::Established);
    assert_eq!(made(at(forwarded, frontend), false), Step::Established);
    assert_eq!(made(at(outside, backend), false), Step::Established);
    assert_eq!(made(at(forwarded, backend), false), Step::Established, "a process may have any port");
    assert_eq!(made(at(forwarded, backend), true), Step::Pass, "this node has forwarded it");
    // An endpoint that is no frontend, and an address and port that share its bit.
    maps.add_backend_bit(&far.0, far.1, PROTO_TCP);
    assert_eq!(made(at(forwarded, far), false), Step::DirectEgress);
    maps.add_frontend_bit(&far.0, far.1, PROTO_TCP);
    assert_eq!(made(at(forwarded, far), false), Step::Established);
}

families!(packet_at_egress_is_dispatched_to_its_stage = the_stage_of_what_leaves());
