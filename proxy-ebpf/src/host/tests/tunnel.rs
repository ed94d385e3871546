//! Packets from node to node (DSR).

use proxy_common::backend::BACKEND_TUNNEL_SHIFT;
use proxy_common::config::CONFIG_DSR;
use proxy_common::flow::{STATE_DSR, STATE_SNAT, tunnel_of};
use proxy_common::health::{Failure, HEALTH_NEWCOMER, HEALTH_SINCE, JOIN_SECS};
use proxy_common::maglev;
use proxy_common::node::{NODE_ADDR_INTERNAL, TUNNEL_V4, Tunnel};
use proxy_common::select::{Algorithm, tunnel_tag};
use proxy_common::service::{KIND_LOAD_BALANCER, SERVICE_DSR, SERVICE_EJECTS};
use proxy_common::{PROTO_IPIP, PROTO_UDP};

use super::*;
use crate::env::Health as _;
use crate::shared::Shared as _;

/// Number of the other node in `tunnels`.
pub(super) const NUMBER: u32 = 0x5a5;

/// Returns the entry of a Service with DSR, which has one endpoint.
pub(super) fn dsr_service() -> ServiceEntry {
    ServiceEntry {
        id: 1,
        slot_base: 7,
        slot_count: 1,
        kind: KIND_LOAD_BALANCER,
        flags: SERVICE_DSR,
        ..ServiceEntry::NONE
    }
}

fn other_node() -> [u32; 1] {
    V4::addr(8)
}

/// Returns the maps of a node with a Service with DSR.
fn node_of(backend_flags: u32) -> HostMaps<V4> {
    let maps = maps::<V4>(backend_flags);
    maps.edit_config(|config| config.flags |= CONFIG_DSR);
    maps.add_node_addr(node::<V4>(), NODE_ADDR_OWN | NODE_ADDR_PORTS | NODE_ADDR_INTERNAL);
    maps.add_node_addr(other_node(), NODE_ADDR_INTERNAL);
    let words = |[word]: [u32; 1]| [word, 0, 0, 0];
    maps.set_tunnel(
        NUMBER,
        Tunnel { addr: words(other_node()), source: words(node::<V4>()), family: TUNNEL_V4 },
    );
    let entry = dsr_service();
    for (proto, slot_base) in [(PROTO_TCP, 7), (PROTO_UDP, 8)] {
        let (addr, port) = frontend::<V4>();
        maps.add_service(ServiceKey::internal(addr, port, proto), ServiceEntry { slot_base, ..entry });
    }
    maps
}

/// Returns the IP packet with an outer header.
pub(super) fn around(src: [u32; 1], dst: [u32; 1], tag: u16, inner: &[u8]) -> Vec<u8> {
    let mut header = V4::ip(&src, &dst, PROTO_IPIP, 64, inner.len(), 0);
    header[4..6].copy_from_slice(&tag.to_be_bytes());
    header[10..12].fill(0);
    let check = build::checksum(&[&header]);
    header[10..12].copy_from_slice(&check.to_be_bytes());
    [header, inner.to_vec()].concat()
}

fn tag_of((addr, port): End<V4>) -> u16 {
    tunnel_tag(&addr, port)
}

#[test]
fn packet_to_another_nodes_endpoint_is_encapsulated_with_dsr() {
    let (client, frontend, backend) = (client::<V4>(), frontend::<V4>(), backend::<V4>());
    for shape in [SYN, UDP] {
        let maps = node_of(NUMBER << BACKEND_TUNNEL_SHIFT);
        for _ in 0..2 {
            let (verdict, skb) =
                run_over(Hook::Ingress, maps, UPLINK, &packet::<V4>(client, frontend, shape));
            assert_eq!(verdict, REDIRECT);
            let inner = ip_packet::<V4>(client, frontend, Shape { ttl: shape.ttl - 1, ..shape });
            assert_eq!(ip(&skb), around(node::<V4>(), other_node(), tag_of(backend), &inner));
        }
        let flow = maps.flows().into_iter().find(|flow| flow.bits() != 0).unwrap();
        assert_eq!(flow.bits() & (STATE_DSR | STATE_SNAT), STATE_DSR);
        assert_eq!(tunnel_of(flow.bits()), NUMBER);
        assert_eq!((flow.source, flow.source_port), client, "the endpoint sees the client");
    }
    // A client on this node, and a client that is a node, get their replies through this node.
    for (client, device) in [(client, POD), ((other_node(), 4000), UPLINK)] {
        let maps = node_of(NUMBER << BACKEND_TUNNEL_SHIFT);
        run_over(Hook::Ingress, maps, device, &packet::<V4>(client, frontend, SYN));
        let flow = maps.flows().into_iter().find(|flow| flow.bits() != 0).unwrap();
        assert_eq!((flow.bits() & STATE_DSR, tunnel_of(flow.bits())), (0, 0));
    }
}

/// A pod's node does not know that another address of this node is one, and masquerades what the pod sends there.
#[test]
fn encapsulated_packet_to_an_address_that_is_no_internal_ip_passes() {
    let maps = node_of(BACKEND_LOCAL);
    let (own, inner) = (V4::addr(31), ip_packet::<V4>(client::<V4>(), frontend::<V4>(), SYN));
    maps.add_node_addr(own, NODE_ADDR_OWN | NODE_ADDR_PORTS);
    let came = build::ethernet::<V4>(&around(other_node(), own, tag_of(backend::<V4>()), &inner));
    let frame = HostPacket::new(&came).edit(|skb| (skb.ifindex, skb.ingress_ifindex) = (UPLINK, UPLINK));
    assert_eq!(run_any(Hook::Ingress, maps, HostMaps::<V6>::leak(), frame.frame()), NEXT);
    assert_eq!(frame.into_skb().wire(), came);
}

#[test]
fn decapsulated_packet_is_translated_and_answered_by_this_node() {
    let (client, frontend, backend) = (client::<V4>(), frontend::<V4>(), backend::<V4>());
    let other = HostMaps::<V6>::leak();
    for (shape, reply) in [(SYN, SYN_ACK), (UDP, UDP)] {
        let maps = node_of(BACKEND_LOCAL);
        let inner = ip_packet::<V4>(client, frontend, shape);
        let came = build::ethernet::<V4>(&around(other_node(), node::<V4>(), tag_of(backend), &inner));
        for round in 1..=2 {
            let frame = HostPacket::new(&came).edit(|skb| {
                (skb.ifindex, skb.ingress_ifindex) = (UPLINK, UPLINK);
            });
            assert_eq!(run_any(Hook::Ingress, maps, other, frame.frame()), NEXT);
            assert_eq!(ip(&frame.into_skb()), ip_packet::<V4>(client, backend, shape));
            let (verdict, skb) = run_over(Hook::Egress, maps, POD, &packet::<V4>(backend, client, reply));
            assert_eq!((verdict, ip(&skb)), (NEXT, ip_packet::<V4>(frontend, client, reply)));
            assert_eq!((maps.stats_of(1).packets, maps.stats_of(1).reply_packets), (round, round));
        }
        let flow = maps.flows().into_iter().find(|flow| flow.bits() != 0).unwrap();
        assert_eq!((flow.bits() & (STATE_DSR | STATE_SNAT), tunnel_of(flow.bits())), (STATE_DSR, 0));
    }
}

/// A load balancer in front of the cluster may send IP in IP, which a tunnel device of the node decapsulates.
#[test]
fn a_packet_that_no_node_has_encapsulated_passes_unchanged_and_is_counted() {
    let (client, frontend, backend) = (client::<V4>(), frontend::<V4>(), backend::<V4>());
    let (maps, other) = (node_of(BACKEND_LOCAL), HostMaps::<V6>::leak());
    let inner = ip_packet::<V4>(client, frontend, SYN);
    // Another machine, and this node itself.
    for (source, count) in [(V4::addr(66), 1), (node::<V4>(), 2)] {
        let came = build::ethernet::<V4>(&around(source, node::<V4>(), tag_of(backend), &inner));
        let frame = HostPacket::new(&came).edit(|skb| skb.ifindex = UPLINK);
        assert_eq!(run_any(Hook::Ingress, maps, other, frame.frame()), NEXT);
        assert_eq!(frame.into_skb().as_slice(), came);
        assert_eq!(maps.count_of(Reason::ForeignTunnel), count);
    }
    assert!(live(maps).is_empty());
}

#[test]
fn a_packet_that_cannot_be_encapsulated_is_dropped_and_counted() {
    let (client, frontend) = (client::<V4>(), frontend::<V4>());
    let maps = node_of(NUMBER << BACKEND_TUNNEL_SHIFT);
    let run = |shape, edit: fn(&mut Skb)| {
        run_edited(Hook::Ingress, maps, UPLINK, &packet::<V4>(client, frontend, shape), edit).0
    };
    let counts = || [Reason::NoRoute, Reason::TtlExceeded].map(|reason| maps.count_of(reason));
    assert_eq!((run(SYN, |skb| skb.routes.set_default(None)), counts()), (DROP, [1, 0]));
    assert_eq!((run(Shape { ttl: 1, ..SYN }, |_| {}), counts()), (REDIRECT, [1, 1]), "an answer");
    assert_eq!((run(SYN, |_| {}), counts()), (REDIRECT, [1, 1]));
    // The other node has left the cluster.
    maps.set_tunnel(NUMBER, Tunnel::default());
    assert_eq!((run(SYN, |_| {}), counts()), (DROP, [2, 1]));
}

/// Runs the ingress hook over a packet that the other node has encapsulated; `hops`: the outer time to live.
fn arrives(maps: HostMaps<V4>, hops: u8, tag: u16, inner: &[u8]) -> (i32, Skb) {
    let mut outer = around(other_node(), node::<V4>(), tag, inner);
    outer[8] = hops;
    outer[10..12].fill(0);
    let check = build::checksum(&[&outer[..20]]);
    outer[10..12].copy_from_slice(&check.to_be_bytes());
    let packet = HostPacket::new(&build::ethernet::<V4>(&outer)).edit(|skb| {
        (skb.ifindex, skb.ingress_ifindex) = (UPLINK, UPLINK);
        skb.routes.set_default(Some(route()));
    });
    let verdict = run_any(Hook::Ingress, maps, HostMaps::<V6>::leak(), packet.frame());
    (verdict, packet.into_skb())
}

#[test]
fn a_packet_is_encapsulated_four_times_at_most() {
    let (client, frontend, backend) = (client::<V4>(), frontend::<V4>(), backend::<V4>());
    let maps = node_of(NUMBER << BACKEND_TUNNEL_SHIFT);
    run_over(Hook::Ingress, maps, UPLINK, &packet::<V4>(client, frontend, SYN));
    let inner = ip_packet::<V4>(client, frontend, DATA);
    // The flow's endpoint is on another node: the outer time to live tells the next node how often it was encapsulated.
    for (hops, next) in [(64, 160), (61, 160), (128, 160), (97, 160), (130, 192), (190, 224)] {
        let (verdict, skb) = arrives(maps, hops, tag_of(backend), &inner);
        assert_eq!((verdict, ip(&skb)[8], ip(&skb)[9]), (REDIRECT, next, PROTO_IPIP), "{hops}");
    }
    let (verdict, _) = arrives(maps, 220, tag_of(backend), &inner);
    assert_eq!((verdict, maps.count_of(Reason::TunnelNoEndpoint)), (DROP, 1));
    assert!(maps.flows().iter().all(|flow| flow.bits() == 0), "the flow has ended");

    // A flow to a local endpoint stays, however often its packets were encapsulated.
    let maps = node_of(BACKEND_LOCAL);
    for hops in [60, 250, 250] {
        let (verdict, skb) = arrives(maps, hops, tag_of(backend), &inner);
        assert_eq!((verdict, ip(&skb)), (NEXT, ip_packet::<V4>(client, backend, DATA)));
    }
    assert_eq!(maps.stats_of(1).connections, 1);
}

/// Writes a Maglev table whose entries all are one endpoint.
pub(super) fn write_table(maps: HostMaps<V4>, base: u32, id: u32) {
    maps.set_maglev(base, &[maglev::shape(8, 1), 0, 0, u64::from(id), 0]);
}

#[test]
fn a_connection_of_another_node_has_a_second_chance() {
    let maps = node_of(BACKEND_LOCAL);
    let ((addr, port), other) = (frontend::<V4>(), V4::addr(3));
    add_endpoint(maps, 20, (other, 8080), PROTO_TCP);
    write_table(maps, 8, 7);
    write_table(maps, 16, 20);
    maps.set_maglev_index(maglev::index(1, false), &[8, 16]);
    let entry = ServiceEntry { algorithm: Algorithm::Maglev as u8, ..dsr_service() };
    maps.add_service(ServiceKey::internal(addr, port, PROTO_TCP), entry);
    for (client_port, shape, endpoint, counted) in
        [(4000, SYN, backend::<V4>(), 0), (4001, DATA, (other, 8080), 1), (4001, DATA, (other, 8080), 1)]
    {
        let client = (client::<V4>().0, client_port);
        let (_, skb) = run_over(Hook::Ingress, maps, UPLINK, &packet::<V4>(client, (addr, port), shape));
        assert_eq!(skb.wire(), packet::<V4>(client, endpoint, shape));
        assert_eq!(maps.refusals_of(1, Reason::SecondChance), counted);
    }
}

/// The current table leads to a newcomer, the previous one to another endpoint; the address then moves to a node without
/// flows.
#[test]
fn a_connection_past_a_newcomer_survives_a_move() {
    const OTHER: u32 = 20;
    const THIRD: u32 = 21;
    let other = (V4::addr(3), 8080);
    let node = || {
        let maps = node_of(BACKEND_LOCAL);
        add_endpoint(maps, OTHER, other, PROTO_TCP);
        add_endpoint(maps, THIRD, (V4::addr(4), 8080), PROTO_TCP);
        maps.set_slots(30, &[7, OTHER, THIRD]);
        write_table(maps, 8, 7);
        write_table(maps, 16, OTHER);
        maps.set_maglev_index(maglev::index(1, false), &[8, 16]);
        let (addr, port) = frontend::<V4>();
        let entry = ServiceEntry {
            algorithm: Algorithm::Maglev as u8,
            slot_base: 30,
            slot_count: 3,
            flags: SERVICE_DSR | SERVICE_EJECTS,
            ..dsr_service()
        };
        maps.add_service(ServiceKey::internal(addr, port, PROTO_TCP), entry);
        maps
    };
    let (first, second) = (node(), node());
    let goes_to = |maps, client_port, shape| {
        let client = (client::<V4>().0, client_port);
        let (_, skb) = run_over(Hook::Ingress, maps, UPLINK, &packet::<V4>(client, frontend::<V4>(), shape));
        let mut ends = [backend::<V4>(), other, (V4::addr(4), 8080)].into_iter();
        ends.find(|end| skb.wire() == packet::<V4>(client, *end, shape)).unwrap()
    };
    // An endpoint on trial, one that joined less than `JOIN_SECS` ago, and one that is ejected.
    let joined = first.time().unwrap().now.wrapping_sub(JOIN_SECS * HZ);
    let on_trial = HEALTH_NEWCOMER | HEALTH_SINCE | u64::from(joined);
    for (word, is_ejected) in [(on_trial, false), (HEALTH_NEWCOMER, false), (on_trial, true)] {
        let mut past = 0;
        for client_port in 4000..4200 {
            first.health(7).unwrap().store(word);
            if is_ejected {
                let refused = |client| first.note_failure(7, client, Failure::Refusal as u32);
                assert_eq!((refused(5), refused(6)), (0, 1));
            }
            let endpoint = goes_to(first, client_port, SYN);
            if endpoint != backend::<V4>() {
                past += 1;
                assert_eq!(goes_to(second, client_port, DATA), endpoint, "{client_port}");
            }
            // The flow tables begin empty again.
            for maps in [first, second] {
                maps.set_config(*maps.config().unwrap());
            }
        }
        let takes_some = word == on_trial && !is_ejected;
        assert!(if takes_some { (140..200).contains(&past) } else { past == 200 }, "{past}");
    }
}

#[test]
fn connection_past_newcomer_avoids_terminating_endpoint() {
    const LEAVING: u32 = 20;
    let maps = maps::<V4>(BACKEND_LOCAL);
    let (leaving, third) = ((V4::addr(3), 8080), (V4::addr(4), 8080));
    add_endpoint(maps, 21, third, PROTO_TCP);
    maps.set_slots(30, &[7, 21]);
    write_table(maps, 8, 7);
    write_table(maps, 16, LEAVING);
    maps.set_maglev_index(maglev::index(1, false), &[8, 16]);
    let (addr, port) = frontend::<V4>();
    let entry = ServiceEntry {
        id: 1,
        kind: KIND_CLUSTER_IP,
        algorithm: Algorithm::Maglev as u8,
        slot_base: 30,
        slot_count: 2,
        flags: SERVICE_EJECTS,
        ..ServiceEntry::NONE
    };
    maps.add_service(ServiceKey::internal(addr, port, PROTO_TCP), entry);
    let reached = |flags, client_port| {
        let (addr, port) = leaving;
        let row = BackendEntry { addr, port, proto: PROTO_TCP, state: BACKEND_ACTIVE, service: 1, flags };
        maps.set_backend(LEAVING, row);
        maps.health(7).unwrap().store(HEALTH_NEWCOMER);
        let client = (client::<V4>().0, client_port);
        let (_, skb) = run_over(Hook::Ingress, maps, POD, &packet::<V4>(client, frontend::<V4>(), SYN));
        maps.set_config(*maps.config().unwrap());
        skb.wire() == packet::<V4>(client, leaving, SYN)
    };
    assert!((4000..4050).all(|port| reached(BACKEND_LOCAL | BACKEND_IN_CLUSTER, port)), "it has only moved");
    assert!(!(4000..4050).any(|port| reached(BACKEND_LOCAL, port)));
}

#[test]
fn packet_encapsulated_in_a_vlan_passes_to_the_vlans_device() {
    let (v4, v6) = (node_of(BACKEND_LOCAL), maps::<V6>(0));
    let inner = ip_packet::<V4>(client::<V4>(), frontend::<V4>(), SYN);
    let outer = around(other_node(), node::<V4>(), tag_of(backend::<V4>()), &inner);
    let bytes = build::ethernet::<V4>(&outer);
    for (vlan_tag, passes_as_it_came) in [(Some(0x2005), true), (None, false)] {
        let came = HostPacket::new(&bytes).edit(|skb| {
            (skb.ifindex, skb.ingress_ifindex, skb.vlan_tag) = (UPLINK, UPLINK, vlan_tag);
        });
        assert_eq!(run_any(Hook::Ingress, v4, v6, came.frame()), NEXT);
        assert_eq!(came.into_skb().as_slice() == bytes, passes_as_it_came);
    }
}
