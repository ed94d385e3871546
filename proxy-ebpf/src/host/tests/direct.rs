//! Connections directly to an endpoint, which have a flow only if their replies could be taken for those of another flow.

use proxy_common::config::CONFIG_SNAT_MOVED;
use proxy_common::conntrack::is_closed;
use proxy_common::flow::{DIRECT_ANY, STATE_DIRECT, bits_of, direct_slot};
use proxy_common::node::NODE_ADDR_INTERNAL;

use super::*;
use crate::context::{Packet, PacketCtx};
use crate::env::FlowTable as _;
use crate::shared::Shared as _;
use crate::stage::classify::{find_reply, incoming, may_be_direct};
use crate::step::{Lookup, Step};

const ACK: Shape = Shape { flags: 0x10, ..SYN };
const FIN: Shape = Shape { flags: 0x11, ..SYN };
const RST: Shape = Shape { flags: 0x04, ..SYN };

/// The flows with their states and times, to tell whether a packet has changed any.
fn all_of<F: Net>(maps: HostMaps<F>) -> Vec<(u64, u32, u32, u16)> {
    live(maps).iter().map(|flow| (flow.state, flow.created, flow.last_seen, flow.client_port)).collect()
}

/// Runs a hook, and checks that the packet passes unchanged. Returns whether it is marked as translated.
fn passes<F: Net>(
    maps: HostMaps<F>,
    hook: Hook,
    device: u32,
    src: End<F>,
    dst: End<F>,
    shape: Shape,
) -> bool {
    let bytes = packet::<F>(src, dst, shape);
    let (verdict, skb) = run_over(hook, maps, device, &bytes);
    assert_eq!((verdict, skb.wire()), (NEXT, bytes));
    skb.is_translated
}

fn the_stage_of_what_arrives<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let others = F::addr(11);
    maps.add_node_addr(others, NODE_ADDR_INTERNAL);
    let at = |src, dst| Packet { key: tcp_key::<F>(src, dst, DIRECTION_FORWARD), ..Packet::EMPTY };
    let (far, backend, client) = ((F::addr(77), 443), backend::<F>(), client::<F>().0);
    for moved in [false, true] {
        maps.edit_config(|config| config.flags = if moved { CONFIG_SNAT_MOVED } else { 0 });
        let to = |addr, port| incoming(maps, &at(backend, (addr, port)));
        assert_eq!((to(node::<F>(), 2500), to(client, 2500)), (Step::SnatReply, Step::SnatReply));
        // A port that was one for SNAT, by earlier settings.
        assert_eq!(to(node::<F>(), 4000), if moved { Step::SnatReply } else { Step::Pass });
        assert_eq!((to(client, 4000), to(others, 4000)), (Step::Pass, Step::Pass));
        assert_eq!(incoming(maps, &at(far, (node::<F>(), 2500))), Step::Pass);
    }
    let stage = |tcp_flags| may_be_direct(maps, &Packet { tcp_flags, ..at(far, backend) });
    assert_eq!([stage(0x02), stage(0x12), stage(0x10)], [Some(Lookup::Direct), None, None]);
    let mut datagram = at(far, backend);
    datagram.key.proto = PROTO_UDP;
    assert_eq!(may_be_direct(maps, &datagram), Some(Lookup::Direct));
    // Without a flow, no other program sees a packet to an endpoint, or of an endpoint.
    assert_eq!(incoming(maps, &datagram), Step::Pass);
    assert_eq!(incoming(maps, &Packet { tcp_flags: 0x02, ..at(far, backend) }), Step::Pass);
    let leaves = |src, dst| {
        let mut ctx = PacketCtx { packet: at(src, dst), ..PacketCtx::EMPTY };
        ctx.packet.key.direction = DIRECTION_REPLY;
        find_reply(maps, &mut ctx)
    };
    assert_eq!([leaves(backend, far), leaves(far, backend)], [None, None]);
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(far, frontend::<F>(), SYN));
    assert_eq!(leaves(backend, far), Some(Lookup::Reply));
    assert_eq!(incoming(maps, &Packet { tcp_flags: 0x02, ..at(far, backend) }), Step::Direct);
    assert_eq!(incoming(maps, &Packet { tcp_flags: 0x10, ..at(far, backend) }), Step::Pass);
}

families!(packet_at_ingress_is_dispatched_to_its_stage = the_stage_of_what_arrives());

/// netfilter masquerades a connection of this node to an endpoint, with a SNAT port.
fn a_masqueraded_connection<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (source, backend) = ((node::<F>(), 2500), backend::<F>());
    assert!(
        passes(maps, Hook::Egress, UPLINK, source, backend, SYN),
        "a lower device does not track it again"
    );
    assert_eq!(live(maps).len(), 1);
    maps.advance(3);
    assert!(!passes(maps, Hook::Egress, UPLINK, source, backend, ACK), "it keeps its port");
    let flow = live(maps)[0];
    assert_eq!((flow.last_seen, flow.client_port), (maps.now(), 2500));
    assert_eq!(
        maps.direct_seen(DIRECT_ANY).unwrap().load(),
        0,
        "segments that arrive are not looked up for it"
    );

    passes(maps, Hook::Ingress, UPLINK, backend, source, SYN_ACK);

    // A connection that is older than the agent is tracked from any segment but its last one.
    let older = (node::<F>(), 2600);
    passes(maps, Hook::Egress, UPLINK, older, backend, FIN);
    assert_eq!(live(maps).len(), 1);
    passes(maps, Hook::Egress, UPLINK, older, backend, ACK);
    assert_eq!(live(maps).len(), 2);
}

families!(masqueraded_connections_have_a_flow = a_masqueraded_connection());

/// The SNAT port is one that a client's flow has. The connection gets another one, and its replies are given to the device to
/// which the connection belongs.
fn a_masqueraded_connection_with_a_used_port<F: Net>() {
    let maps = maps::<F>(0);
    maps.edit_config(|config| config.snat = [PortRange::new(2500, 2501), PortRange::default()]);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, SYN));
    let used = live(maps)[0].source_port;
    let (own, other) = ((node::<F>(), used), (node::<F>(), 2500 + 2501 - used));
    let (verdict, skb) = run_over(Hook::Egress, maps, UPLINK, &packet::<F>(own, backend, SYN));
    assert_eq!((verdict, skb.wire(), skb.is_translated), (NEXT, packet::<F>(other, backend, SYN), true));
    let reply = packet::<F>(backend, other, SYN_ACK);
    let delivered = Some(Redirect::In(route().ifindex));
    for (way_back, expected) in [
        (Some(route()), delivered),
        (Some(Route { ifindex: UPLINK, ..route() }), None),
        (Some(Route { resolved: 0, ..route() }), None),
        (None, None),
    ] {
        maps.advance(1);
        let (verdict, skb) =
            run_edited(Hook::Ingress, maps, UPLINK, &reply, |skb| skb.routes.set_default(way_back));
        assert_eq!((verdict == REDIRECT, skb.redirect), (expected.is_some(), expected));
        assert_eq!(ip(&skb), ip_packet::<F>(backend, own, SYN_ACK));
    }
}

/// The SNAT ports change while flows have the old ones.
fn ports_that_were_snat_ports<F: Net>() {
    let maps = maps::<F>(0);
    let ports = |first, last| [PortRange::new(first, last), PortRange::default()];
    maps.edit_config(|config| config.snat = ports(2500, 2501));
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, SYN));
    let used = live(maps)[0].source_port;
    let (own, other) = ((node::<F>(), used), (node::<F>(), 2500 + 2501 - used));
    run_over(Hook::Egress, maps, UPLINK, &packet::<F>(own, backend, SYN));
    maps.edit_config(|config| {
        config.snat = ports(3500, 3501);
        config.flags |= CONFIG_SNAT_MOVED;
    });
    let (_, skb) = run_over(Hook::Egress, maps, UPLINK, &packet::<F>(own, backend, DATA));
    assert_eq!(skb.wire(), packet::<F>(other, backend, DATA), "the connection keeps its other port");
    // A process binds the port that the other flow has.
    let (_, skb) = run_over(Hook::Egress, maps, UPLINK, &packet::<F>(other, backend, SYN));
    assert_ne!(skb.wire(), packet::<F>(other, backend, SYN), "both would have one tuple");
    // A port without a flow is left alone.
    let free = packet::<F>((node::<F>(), 2400), backend, SYN);
    assert_eq!(run_over(Hook::Egress, maps, UPLINK, &free).1.wire(), free);
}

families!(connection_on_a_former_snat_port_keeps_apart_from_flows = ports_that_were_snat_ports());

families!(
    a_masqueraded_connection_gets_another_port_and_its_replies = a_masqueraded_connection_with_a_used_port()
);

/// A client connects to a frontend, and from the same port to the endpoint.
fn the_same_port_twice<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, SYN));
    let (_, skb) = run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, backend, SYN));
    let port = build::src_port::<F>(&skb.wire());
    assert_ne!(port, client.1);
    let of_flow = |port: u16| live(maps).into_iter().find(|flow| flow.source_port == port);
    assert_ne!(of_flow(port).unwrap().bits() & STATE_DIRECT, 0);
    // The time of the last direct segment is renewed.
    maps.advance(10);
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, backend, ACK));
    assert_eq!(maps.direct_seen(DIRECT_ANY).unwrap().load(), maps.now() | 1);

    let (_, skb) = run_over(Hook::Egress, maps, POD, &packet::<F>(backend, (client.0, port), SYN_ACK));
    assert_eq!(skb.wire(), packet::<F>(backend, client, SYN_ACK));
}

families!(a_second_connection_of_one_port_gets_another_one = the_same_port_twice());

/// A packet that claims to be from a source address and port of SNAT begins no flow.
fn a_forged_source<F: Net>() {
    let maps = maps::<F>(0);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, SYN));
    let flow = live(maps)[0];
    let before = all_of(maps);
    passes(maps, Hook::Ingress, UPLINK, (flow.source, flow.source_port), backend, SYN);
    assert_eq!(all_of(maps), before);
}

families!(a_packet_with_the_source_of_a_snat_flow_begins_none = a_forged_source());

/// The endpoint answers the SYN of a flow with a segment of an older, direct connection from the same port: with an ACK, which the
/// client of the flow gets, or with data, which the client of the older connection gets.
fn an_older_connection<F: Net>() {
    for (segment, is_answer) in [(ACK, true), (DATA, false)] {
        let maps = maps::<F>(BACKEND_LOCAL);
        let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
        run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, SYN));
        let (verdict, skb) = run_over(Hook::Egress, maps, POD, &packet::<F>(backend, client, segment));
        let from = if is_answer { frontend } else { backend };
        assert_eq!((verdict, ip(&skb)), (NEXT, ip_packet::<F>(from, client, segment)));
        let flows = live(maps);
        assert_eq!(flows.len(), 1, "the flow of the Service has ended");
        assert_ne!(flows[0].bits() & STATE_DIRECT, 0);
        assert_eq!((flows[0].client_port, flows[0].frontend, flows[0].service), (client.1, backend.0, 1));
        // The client resets what it takes for a connection of its SYN, and must not reset the older one.
        let (verdict, _) = run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, RST));
        assert_eq!((verdict, maps.count_of(Reason::InvalidState)), (DROP, 1));
        // The connection to the Service gets another port, and the older one keeps its own.
        let (_, skb) = run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, SYN));
        assert_ne!(skb.wire(), packet::<F>(client, backend, SYN));
        passes(maps, Hook::Ingress, UPLINK, client, backend, DATA);
        assert!(
            !passes(maps, Hook::Egress, POD, backend, client, segment),
            "a lower device does not skip it"
        );
        assert_eq!(live(maps).len(), 2);
    }
}

families!(an_older_connection_keeps_its_port = an_older_connection());

/// A connection of this node itself with the address and port of a frontend, which is closed and begins again.
fn from_a_frontend<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (own, far) = ((node::<F>(), 3000), (F::addr(77), 443));
    let entry =
        ServiceEntry { id: 1, slot_base: 7, slot_count: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE };
    maps.add_service(ServiceKey::internal(own.0, own.1, PROTO_TCP), entry);
    let sends = |shape| passes(maps, Hook::Egress, UPLINK, own, far, shape);
    let created = || live(maps)[0].created;
    sends(SYN);
    let first = created();
    maps.advance(HZ);
    sends(SYN);
    assert_eq!((created(), live(maps)[0].last_seen), (first, maps.now()), "a SYN that is sent again");
    sends(FIN);
    passes(maps, Hook::Ingress, UPLINK, far, own, FIN);
    assert!(is_closed(live(maps)[0].bits()));
    maps.advance(HZ);
    sends(ACK);
    assert_eq!(created(), first, "the last segment of a closed connection");
    sends(SYN);
    assert_eq!((created(), live(maps).len()), (maps.now(), 1), "a new connection");
}

families!(a_connection_from_a_frontends_port_begins_again_when_it_is_closed = from_a_frontend());

/// A process of the node has a port of SNAT that is a frontend, and a connection to an endpoint.
fn from_a_frontend_to_an_endpoint<F: Net>() {
    for (shape, proto) in [(ACK, PROTO_TCP), (SYN, PROTO_TCP), (UDP, PROTO_UDP)] {
        let maps = maps::<F>(0);
        let own = (node::<F>(), 2500);
        let entry =
            ServiceEntry { id: 1, slot_base: 7, slot_count: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE };
        maps.add_service(ServiceKey::internal(own.0, own.1, proto), entry);
        assert!(passes(maps, Hook::Egress, UPLINK, own, backend::<F>(), shape), "protocol {proto}");
        assert_eq!(live(maps)[0].source_port, own.1);
    }
}

families!(connection_from_a_frontends_port_to_an_endpoint_keeps_it = from_a_frontend_to_an_endpoint());

/// The endpoint of a Service is a frontend of another, whose closed flow there is; other rules begin connections by now.
fn a_closed_flow_of_a_frontend<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    maps.add_node_addr(backend.0, NODE_ADDR_OWN);
    maps.add_frontend_bit(&backend.0, backend.1, PROTO_TCP);
    for (hook, src, dst, shape) in [
        (Hook::Ingress, client, frontend, SYN),
        (Hook::Egress, backend, client, SYN_ACK),
        (Hook::Ingress, client, frontend, FIN),
        (Hook::Egress, backend, client, FIN),
    ] {
        run_over(hook, maps, POD, &packet::<F>(src, dst, shape));
    }
    assert!(is_closed(bits_of(live(maps)[0].state)));
    maps.set_opens_flows(false);
    maps.advance(2 * HZ);
    let before = all_of(maps);
    passes(maps, Hook::Egress, POD, backend, client, ACK);
    assert_eq!(all_of(maps), before, "the reply is left to the other rules");
}

families!(reply_that_passes_to_other_rules_changes_no_flow = a_closed_flow_of_a_frontend());

/// Returns a source port of the client that has the mark of another one, or has another mark.
fn port_with_mark<F: Net>(of: u16, is_same: bool) -> u16 {
    let slot = |port| direct_slot(&client::<F>().0, port, PROTO_TCP);
    (5000..u16::MAX).find(|port| (slot(*port) == slot(of)) == is_same).unwrap()
}

/// The mark "the client may have a direct flow" ends after the timeout of an established connection, and not before.
fn the_mark_of_direct_connections<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, SYN));
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, backend, SYN));
    let mark = |slot| maps.direct_seen(slot).unwrap().load();
    let marks = || [mark(DIRECT_ANY), mark(direct_slot(&client.0, client.1, PROTO_TCP))];
    let seen = mark(DIRECT_ANY);
    assert_eq!(marks(), [seen; 2]);
    assert_eq!((0..=DIRECT_ANY).filter(|slot| mark(*slot) != 0).count(), 2, "one client, and all");
    let of_another = |is_same| {
        let port = port_with_mark::<F>(client.1, is_same);
        passes(maps, Hook::Ingress, UPLINK, (client.0, port), backend, DATA);
    };
    of_another(true);
    assert_eq!(marks(), [seen; 2]);
    let timeout = maps.config().unwrap().tcp_established;
    maps.advance(seen.wrapping_add(timeout).wrapping_sub(maps.now()));
    of_another(true);
    assert_eq!(marks(), [seen; 2]);
    maps.advance(1);
    of_another(false);
    assert_eq!(marks(), [seen; 2], "segments of other clients are not looked up");
    of_another(true);
    assert_eq!(marks(), [0; 2]);
}

families!(direct_connections_are_looked_up_until_their_timeout = the_mark_of_direct_connections());

/// Of two clients, only the one with a direct flow pays for it.
fn the_clients_that_are_looked_up<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, SYN));
    run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, backend, SYN));
    let stage = |port| {
        let key = tcp_key::<F>((client.0, port), backend, DIRECTION_FORWARD);
        let packet = Packet { key, tcp_flags: 0x10, ..Packet::EMPTY };
        (may_be_direct(maps, &packet), incoming(maps, &packet))
    };
    assert_eq!(stage(client.1), (Some(Lookup::Direct), Step::Direct));
    assert_eq!(stage(port_with_mark::<F>(client.1, false)), (None, Step::Pass));
    assert_eq!(stage(port_with_mark::<F>(client.1, true)), (Some(Lookup::Direct), Step::Pass));
    let marked = (1024..=u16::MAX).filter(|port| stage(*port).0.is_some()).count();
    assert!((1..200).contains(&marked), "{marked} of 64,512 ports share the mark");
}

families!(only_clients_with_a_direct_flow_are_looked_up = the_clients_that_are_looked_up());
