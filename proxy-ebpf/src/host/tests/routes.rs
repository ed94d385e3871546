//! What the routes of a new flow decide: the source of SNAT, the device of replies, and the masquerading by netfilter.

use proxy_common::config::{CONFIG_IPSEC, CONFIG_MASQUERADE_EXTERNAL, CONFIG_POLICY_ROUTES, CONFIG_SOURCES};
use proxy_common::flow::{is_masqueraded, is_rerouted};
use proxy_common::node::DeviceSource;
use proxy_common::service::{KIND_EXTERNAL_IP, KIND_LOAD_BALANCER, SERVICE_LOCAL};

use super::*;
use crate::frame::Unreachable;

const ACK: Shape = Shape { flags: 0x10, ..SYN };
/// A device with a source address of its own.
const OVERLAY: u32 = 17;

fn of_the_device<F: Net>(shape: Shape, reply: Shape) {
    let maps = maps::<F>(0);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let own = F::addr(30);
    maps.add_node_addr(own, NODE_ADDR_OWN);
    let mut entry = NodeEntry { source: node::<F>(), source_count: 1, ..NodeEntry::UNKNOWN };
    entry.sources[0] = DeviceSource { ifindex: OVERLAY, addr: own };
    maps.set_node(entry);
    maps.edit_config(|config| config.flags |= CONFIG_SOURCES);
    for (device, expected, port) in [(OVERLAY, own, 4000), (5, node::<F>(), 4001)] {
        let client = (client.0, port);
        let by = Route { ifindex: device, ..route() };
        let request = packet::<F>(client, frontend, shape);
        let early = HostPacket::new(&request).edit(|skb| {
            (skb.ifindex, skb.ingress_ifindex) = (UPLINK, UPLINK);
            skb.routes.set_default(Some(by));
        });
        assert_eq!(run_early(maps, early.early_frame()), NEXT, "the first packet is left to tc");
        maps.advance(1);
        let (verdict, skb) =
            run_edited(Hook::Ingress, maps, UPLINK, &request, |skb| skb.routes.set_default(Some(by)));
        assert_eq!(verdict, REDIRECT);
        let flow = *live(maps).iter().find(|flow| flow.client_port == port).unwrap();
        assert_eq!(flow.source, expected);
        let source = (expected, flow.source_port);
        assert_eq!(ip(&skb), ip_packet::<F>(source, backend, Shape { ttl: shape.ttl - 1, ..shape }));
        let (verdict, skb) = run_over(Hook::Ingress, maps, device, &packet::<F>(backend, source, reply));
        assert_eq!(verdict, REDIRECT);
        assert_eq!(ip(&skb), ip_packet::<F>(frontend, client, Shape { ttl: reply.ttl - 1, ..reply }));
        // A connection that netfilter masquerades does not get the flow's port.
        let theirs = packet::<F>(source, backend, shape);
        let (_, skb) = run_over(Hook::Egress, maps, POD, &theirs);
        assert_ne!(skb.wire(), theirs, "both would have one tuple");
    }
}

families!(
    snat_uses_the_address_of_the_device_where_packets_leave = of_the_device(SYN, SYN_ACK),
    of_the_device(UDP, UDP)
);

fn replies<F: Net>(has_rules: bool) {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    if has_rules {
        maps.edit_config(|config| config.flags |= CONFIG_POLICY_ROUTES);
    }
    // (the device by which the endpoint's replies leave, whether they take another route)
    for (device, is_other, port) in [(UPLINK, false, 4000), (OVERLAY, true, 4001)] {
        let client = (client.0, port);
        maps.advance(1);
        let request = packet::<F>(client, frontend, SYN);
        run_edited(Hook::Ingress, maps, UPLINK, &request, |skb| {
            skb.routes.set_default(Some(Route { ifindex: device, ..route() }));
        });
        let flow = *live(maps).iter().find(|flow| flow.client_port == port).unwrap();
        assert_eq!(is_rerouted(flow.bits(), device), has_rules && is_other);
        // The frontend's address has its route by the uplink.
        let back = Route { ifindex: UPLINK, ..route() };
        let reply = packet::<F>(backend, client, SYN_ACK);
        for _ in 0..2 {
            maps.advance(1);
            let (verdict, skb) =
                run_edited(Hook::Egress, maps, device, &reply, |skb| skb.routes.set_default(Some(back)));
            assert_eq!(ip(&skb), ip_packet::<F>(frontend, client, SYN_ACK));
            let by = match skb.redirect {
                Some(Redirect::Neighbour(by)) => Some(by.ifindex),
                Some(Redirect::Out(ifindex)) => Some(ifindex),
                _ => None,
            };
            assert_eq!(by, (has_rules && is_other).then_some(UPLINK));
            assert_eq!(verdict == NEXT, by.is_none());
            assert!(skb.is_translated);
        }
    }
}

/// The stack may know more than the addresses, as the mark of a connection.
fn reply_by_the_uplink_of_the_request<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    maps.edit_config(|config| config.flags |= CONFIG_POLICY_ROUTES);
    let by_overlay = Some(Route { ifindex: OVERLAY, ..route() });
    run_edited(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, SYN), |skb| {
        skb.routes.set_default(by_overlay);
    });
    let reply = packet::<F>(backend, client, SYN_ACK);
    let (verdict, skb) =
        run_edited(Hook::Egress, maps, UPLINK, &reply, |skb| skb.routes.set_default(by_overlay));
    assert_eq!((verdict, skb.redirect), (NEXT, None));
    assert_eq!(ip(&skb), ip_packet::<F>(frontend, client, SYN_ACK));
}

families!(reply_that_leaves_by_the_uplink_of_its_request_stays_there = reply_by_the_uplink_of_the_request());

/// Returns the node's answer to a client's packet.
fn unreachable<F: Net>(code: u32, quote: &[u8]) -> Vec<u8> {
    let [kind, _] = F::UNREACHABLE;
    build::icmp::<F>(([kind, code as u8], 0), node::<F>(), client::<F>().0, (64, 0xc0), quote)
}

/// A packet that is forwarded with SNAT; the kernel has no route to the endpoint, or one that refuses.
fn unreachable_route<F: Net>(shape: Shape) {
    let maps = maps::<F>(0);
    let (client, frontend) = (client::<F>(), frontend::<F>());
    let codes = Unreachable::of::<F::Words>();
    for code in [codes.no_route, codes.by_route, codes.prohibited] {
        maps.advance(1);
        let request = packet::<F>(client, frontend, shape);
        let (verdict, skb) = run_edited(Hook::Ingress, maps, UPLINK, &request, |skb| {
            skb.routes.set_default(Some(Route { mtu: code, ..Route::default() }));
        });
        assert_eq!((verdict, skb.redirect), (REDIRECT, Some(Redirect::Out(UPLINK))));
        assert_eq!(ip(&skb), unreachable::<F>(code, &ip_packet::<F>(client, frontend, shape)));
    }
    assert_eq!((maps.count_of(Reason::Unreachable), maps.count_of(Reason::NoRoute)), (3, 0));
}

families!(client_learns_that_the_endpoint_has_no_route = unreachable_route(SYN), unreachable_route(UDP));

/// The stack routes what is forwarded with SNAT, by a mark of netfilter's. Answers to the client have no mark.
fn routes_by_mark<F: Net>() {
    let maps = maps::<F>(0);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    maps.edit_config(|config| config.flags |= CONFIG_IPSEC);
    maps.set_node(NodeEntry { source: node::<F>(), routes_by_mark: 1, ..NodeEntry::UNKNOWN });
    let (_, skb) = run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, SYN));
    assert_eq!(skb.redirect, Some(Redirect::In(1)), "the loopback device");
    let source = (node::<F>(), live(maps)[0].source_port);
    let (_, skb) = run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(backend, source, SYN_ACK));
    assert_eq!(ip(&skb)[..], ip_packet::<F>(frontend, client, Shape { ttl: SYN_ACK.ttl - 1, ..SYN_ACK }));
    assert_ne!(skb.redirect, Some(Redirect::In(1)));
}

families!(only_requests_with_snat_take_routes_by_mark = routes_by_mark());

#[test]
fn a_reply_takes_the_route_of_its_new_source() {
    for has_rules in [false, true] {
        replies::<V4>(has_rules);
        replies::<V6>(has_rules);
    }
}

fn marks<F: Net>() {
    /// Not the default.
    const MARK: u32 = 1 << 20;
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    maps.edit_config(|config| {
        config.flags |= CONFIG_MASQUERADE_EXTERNAL;
        config.masquerade_mark = MARK;
    });
    let fragment = Shape { payload: b"more than eight bytes", ..UDP };
    // (the device of the client, the kind, the policy, whether netfilter has to masquerade)
    for (device, kind, flags, is_marked, port) in [
        (UPLINK, KIND_CLUSTER_IP, 0, true, 4000),
        (POD, KIND_CLUSTER_IP, 0, false, 4001),
        (UPLINK, KIND_LOAD_BALANCER, SERVICE_LOCAL, false, 4002),
        (UPLINK, KIND_CLUSTER_IP, SERVICE_LOCAL, true, 4003),
    ] {
        let client = (client.0, port);
        for (proto, slot_base) in [(PROTO_TCP, 7), (PROTO_UDP, 8), (PROTO_SCTP, 9)] {
            let key = ServiceKey::internal(frontend.0, frontend.1, proto);
            let entry = ServiceEntry { id: 1, slot_base, slot_count: 1, kind, flags, ..ServiceEntry::NONE };
            maps.add_service(key, entry);
        }
        // The fragments begin another flow.
        let other = (client.0, port + 100);
        let packets = |to| {
            let whole = [SYN, ACK, UDP, UDP, INIT].map(|shape| packet::<F>(client, to, shape));
            let parts = rewrite::fragments::<F>(other, to, fragment).map(|part| build::ethernet::<F>(&part));
            whole.into_iter().chain(parts).collect::<Vec<_>>()
        };
        for (sent, expected) in packets(frontend).iter().zip(packets(backend)) {
            let (verdict, skb) = run_over(Hook::Ingress, maps, device, sent);
            assert_eq!((verdict, skb.wire()), (NEXT, expected), "the client's address");
            assert_eq!(skb.mark, if is_marked { MARK } else { 0 });
        }
        let flows = live(maps);
        let of_these = |port| flows.iter().filter(move |flow| flow.client_port == port);
        assert_eq!((of_these(client.1).count(), of_these(other.1).count()), (3, 1));
        assert!(
            [client.1, other.1]
                .into_iter()
                .flat_map(of_these)
                .all(|flow| is_masqueraded(flow.bits()) == is_marked)
        );
    }
}

families!(packets_of_clients_outside_are_marked_for_netfilter = marks());

/// A packet without "don't fragment" that is too long for the next link.
#[test]
fn the_stack_cuts_what_may_be_cut() {
    let maps = maps::<V4>(0);
    let (client, frontend) = (client::<V4>(), frontend::<V4>());
    for (fragment, is_cut) in [(0u16, true), (0x4000, false)] {
        let mut bytes = packet::<V4>(client, frontend, UDP);
        let at = build::ETHERNET + 6;
        bytes[at..at + 2].copy_from_slice(&fragment.to_be_bytes());
        let check = build::ETHERNET + 10;
        bytes[check..check + 2].fill(0);
        let sum = build::checksum(&[&bytes[build::ETHERNET..build::ETHERNET + 20]]);
        bytes[check..check + 2].copy_from_slice(&sum.to_be_bytes());
        maps.advance(1);
        let (_, skb) = run_edited(Hook::Ingress, maps, UPLINK, &bytes, |skb| {
            skb.routes.set_default(Some(Route { mtu: 20, ..route() }));
        });
        assert_eq!(skb.redirect == Some(Redirect::In(1)), is_cut);
        assert_eq!(maps.count_of(Reason::PacketTooBig), u64::from(!is_cut));
    }
}

/// A datagram in two fragments, of which only the first is too long for the next link.
#[test]
fn all_fragments_of_a_datagram_are_cut_by_the_stack() {
    let maps = maps::<V4>(0);
    let shape = Shape { payload: &[7; 20], ..UDP };
    let [first, later] = rewrite::fragments::<V4>(client::<V4>(), frontend::<V4>(), shape);
    let mtu = later.len() as u32 + 1;
    assert!(first.len() as u32 > mtu);
    for part in [first, later] {
        let (_, skb) = run_edited(Hook::Ingress, maps, UPLINK, &build::ethernet::<V4>(&part), |skb| {
            skb.routes.set_default(Some(Route { mtu, ..route() }));
        });
        assert_eq!(skb.redirect, Some(Redirect::In(1)));
    }
}

/// The node of the endpoint also serves the frontends at this node's address.
fn ports_that_are_frontends<F: Net>() {
    let maps = maps::<F>(0);
    let entry =
        ServiceEntry { id: 1, slot_base: 7, slot_count: 1, kind: KIND_EXTERNAL_IP, ..ServiceEntry::NONE };
    for port in (2000..3000).step_by(2) {
        maps.add_service(ServiceKey::internal(node::<F>(), port, PROTO_TCP), entry);
    }
    for port in 4000..4040 {
        run_over(Hook::Ingress, maps, UPLINK, &packet::<F>((client::<F>().0, port), frontend::<F>(), SYN));
    }
    let flows = live(maps);
    assert_eq!(flows.len(), 40);
    assert!(flows.iter().all(|flow| flow.source == node::<F>() && flow.source_port % 2 == 1), "{flows:?}");
}

families!(source_of_snat_is_no_frontend = ports_that_are_frontends());
