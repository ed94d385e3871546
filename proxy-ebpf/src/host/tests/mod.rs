//! Runs whole packets through the pipeline, and compares them with packets that are built from scratch.

/// A test that runs each case in both families.
macro_rules! families {
    ($name:ident = $($case:ident($($arg:expr),*)),+) => {
        #[test]
        fn $name() {
            $($case::<V4>($($arg),*);
            $case::<V6>($($arg),*);)+
        }
    };
}

/// A test that runs a case with every outer and inner family.
macro_rules! mixed {
    ($name:ident = $case:ident()) => {
        #[test]
        fn $name() {
            $case::<V4, V4>();
            $case::<V4, V6>();
            $case::<V6, V4>();
            $case::<V6, V6>();
        }
    };
}

mod build;
mod devices;
mod direct;
mod early;
mod eject;
mod established;
mod first;
mod foreign;
mod forged;
mod full;
mod hits;
mod icmp;
mod identity;
mod ipsec;
mod latency;
mod moved;
mod quotes;
mod refused;
mod reuse;
mod rewrite;
mod routes;
mod segments;
mod select;
mod simulation;
mod sockets;
mod tunnel;
mod tunnel_chain;
mod tunnel_churn;
mod tunnel_early;
mod tunnel_families;
mod tunnel_flood;

use std::vec::Vec;

use build::{DATA, End, INIT, Net, SYN, SYN_ACK, Shape, UDP, ip_packet, packet, unreachable};
use proxy_common::backend::{
    BACKEND_ACTIVE, BACKEND_GONE, BACKEND_IN_CLUSTER, BACKEND_LOCAL, BACKEND_RESET, BackendEntry,
};
use proxy_common::config::{NodeConfig, PortRange};
use proxy_common::flow::{
    DIRECTION_FORWARD, DIRECTION_REPLY, FlowEntry, FlowKey, buckets_for, buckets_of, tag,
};
use proxy_common::node::{NODE_ADDR_OWN, NODE_ADDR_PORTS, NodeEntry, mac};
use proxy_common::reason::Reason;
use proxy_common::service::{KIND_CLUSTER_IP, ServiceEntry, ServiceKey};
use proxy_common::{PROTO_SCTP, PROTO_TCP, PROTO_UDP, V4, V6};

use super::*;
use crate::env::Node as _;
use crate::frame::Route;
use crate::step::DROP;

/// Jiffies in a second.
const HZ: u32 = 250;
/// Index of the uplink.
const UPLINK: u32 = 2;
/// Index of the device of a pod.
const POD: u32 = 3;

fn client<F: Net>() -> End<F> {
    (F::addr(1), 4000)
}

fn frontend<F: Net>() -> End<F> {
    (F::addr(96), 80)
}

fn backend<F: Net>() -> End<F> {
    (F::addr(2), 8080)
}

fn node<F: Net>() -> F::Words {
    F::addr(9)
}

/// Returns the maps of a node with Service 1 (TCP, UDP and SCTP), which has one endpoint.
fn maps<F: Net>(backend_flags: u32) -> HostMaps<F> {
    let maps = HostMaps::<F>::leak();
    let mut config = NodeConfig::new(HZ, 64, buckets_for(64), 1);
    config.snat = [PortRange::new(2000, 2999), PortRange::default()];
    (config.uplinks, config.macs) = ([UPLINK, 0, 0], [mac(build::MACS[0]), 0, 0]);
    maps.set_config(config);
    maps.set_node(NodeEntry { source: node::<F>(), ..NodeEntry::UNKNOWN });
    maps.add_node_addr(node::<F>(), NODE_ADDR_OWN | NODE_ADDR_PORTS);
    let entry =
        ServiceEntry { id: 1, slot_base: 4, slot_count: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE };
    for (proto, id) in [(PROTO_TCP, 7), (PROTO_UDP, 8), (PROTO_SCTP, 9)] {
        let (addr, port) = frontend::<F>();
        let slot_base = id;
        maps.add_service(ServiceKey::internal(addr, port, proto), ServiceEntry { slot_base, ..entry });
        let (addr, port) = backend::<F>();
        let flags = backend_flags | BACKEND_IN_CLUSTER;
        maps.set_slots(slot_base, &[id]);
        maps.set_backend(id, BackendEntry { addr, port, proto, state: BACKEND_ACTIVE, service: 1, flags });
    }
    maps
}

/// Adds an endpoint of Service 1 on this node.
fn add_endpoint<F: Net>(maps: HostMaps<F>, id: u32, (addr, port): End<F>, proto: u8) {
    let flags = BACKEND_LOCAL | BACKEND_IN_CLUSTER;
    maps.set_backend(id, BackendEntry { addr, port, proto, state: BACKEND_ACTIVE, service: 1, flags });
}

/// Returns the flows that are in use.
fn live<F: Net>(maps: HostMaps<F>) -> Vec<FlowEntry<F::Words>> {
    maps.flows().into_iter().filter(|flow| flow.bits() != 0).collect()
}

fn route() -> Route {
    let macs = [1u32, 2, 3].map(|word| word * 0x0101_0101);
    Route { ifindex: 5, family: 2, macs, mtu: 1500, resolved: 1, ..Route::default() }
}

/// Runs a hook with a frame that arrived on a device; 0: a process of this node sent it.
fn run_over<F: Net>(hook: Hook, maps: HostMaps<F>, device: u32, bytes: &[u8]) -> (i32, Skb) {
    run_edited(hook, maps, device, bytes, |_| {})
}

fn run_edited<F: Net>(
    hook: Hook,
    maps: HostMaps<F>,
    device: u32,
    bytes: &[u8],
    edit: impl FnOnce(&mut Skb),
) -> (i32, Skb) {
    let packet = HostPacket::new(bytes).edit(|skb| {
        (skb.ifindex, skb.ingress_ifindex) = (device.max(1), device);
        skb.routes.set_default(Some(route()));
        edit(skb);
    });
    let verdict = run(hook, maps, packet.frame());
    (verdict, packet.into_skb())
}

/// Returns the IP packet in a frame, which begins at the same offset for all devices of the tests.
fn ip(skb: &Skb) -> Vec<u8> {
    skb.wire().split_off(build::ETHERNET)
}

fn a_new_flow_and_a_known_one<F: Net>(shape: Shape, reply: Shape) {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    for round in 1..=2 {
        let (verdict, skb) =
            run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, Shape { ttl: 63, ..shape }));
        assert_eq!((verdict, skb.redirect), (NEXT, None));
        assert_eq!(skb.wire(), packet::<F>(client, backend, Shape { ttl: 63, ..shape }));
        let (verdict, skb) = run_over(Hook::Egress, maps, POD, &packet::<F>(backend, client, reply));
        assert_eq!(verdict, NEXT);
        assert_eq!(skb.wire(), packet::<F>(frontend, client, reply));
        let stats = maps.stats_of(1);
        assert_eq!((stats.connections, stats.packets, stats.reply_packets), (1, round, round));
    }
    assert_eq!(maps.flows().iter().filter(|flow| flow.bits() != 0).count(), 1);
    let keys = maps.buckets().iter().flat_map(|bucket| bucket.slots).filter(|slot| *slot != 0).count();
    assert_eq!(keys, 2);
}

families!(
    new_flows_and_known_ones_are_translated_both_ways = a_new_flow_and_a_known_one(SYN, SYN_ACK),
    a_new_flow_and_a_known_one(UDP, UDP)
);

fn tcp_key<F: Net>(src: End<F>, dst: End<F>, direction: u8) -> FlowKey<F::Words> {
    FlowKey {
        src: src.0,
        dst: dst.0,
        src_port: src.1,
        dst_port: dst.1,
        proto: PROTO_TCP,
        direction,
        reserved: 0,
    }
}

/// A flow whose two keys have the same bucket and the same tag.
fn keys_side_by_side<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (frontend, backend) = (frontend::<F>(), backend::<F>());
    let time = maps.time().unwrap();
    let hash = |src: End<F>, dst: End<F>, direction: u8| {
        let hash = time.hash(&tcp_key::<F>(src, dst, direction));
        (buckets_of(hash, time.config.flows[0].buckets)[0], tag(hash))
    };
    let is_alike = |port: &u16| {
        let client = (client::<F>().0, *port);
        hash(client, frontend, DIRECTION_FORWARD) == hash(backend, client, DIRECTION_REPLY)
    };
    let ports: Vec<u16> = (1024..=u16::MAX).filter(is_alike).take(8).collect();
    assert_eq!(ports.len(), 8, "about one port of 4,000 has such keys");
    for port in ports {
        let client = (client::<F>().0, port);
        for _ in 0..2 {
            let (_, skb) = run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, SYN));
            assert_eq!(skb.wire(), packet::<F>(client, backend, SYN));
            let (_, skb) = run_over(Hook::Egress, maps, POD, &packet::<F>(backend, client, SYN_ACK));
            assert_eq!(skb.wire(), packet::<F>(frontend, client, SYN_ACK));
        }
    }
    let keys = maps.buckets().iter().flat_map(|bucket| bucket.slots).filter(|slot| *slot != 0).count();
    assert_eq!((maps.stats_of(1).connections, keys), (8, 16));
}

families!(forward_and_reply_key_of_one_flow_do_not_conflict = keys_side_by_side());

/// A packet whose checksum is still to be computed, a packet that is only partly readable, and a GSO packet.
fn whatever_the_buffer_is_like<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, SYN));
    let whole = packet::<F>(client, frontend, DATA);
    let expected = packet::<F>(client, backend, DATA);
    let start = build::ETHERNET + F::HEADER;

    let (verdict, skb) = run_edited(Hook::Ingress, maps, POD, &whole, |skb| skb.linear = build::ETHERNET);
    assert_eq!((verdict, skb.wire()), (NEXT, expected.clone()));

    for gso_size in [0, 1] {
        let mut partial = whole.clone();
        let pseudo = F::pseudo(&client.0, &frontend.0, PROTO_TCP, whole.len() - start);
        let pseudo = !build::checksum(&[&pseudo]);
        partial[start + 16..start + 18].copy_from_slice(&pseudo.to_be_bytes());
        let (verdict, skb) = run_edited(Hook::Ingress, maps, POD, &partial, |skb| {
            skb.checksum = ChecksumState::Partial { start, offset: 16 };
            skb.gso_size = gso_size;
        });
        assert_eq!((verdict, skb.wire()), (NEXT, expected.clone()));
    }

    let sum = skb::sum_at(&whole[build::ETHERNET..], 0);
    for linear in [whole.len(), 0] {
        let (_, skb) = run_edited(Hook::Ingress, maps, POD, &whole, |skb| {
            skb.checksum = ChecksumState::Complete(sum);
            skb.linear = linear;
            skb.gso_size = u32::from(linear == 0);
        });
        let expected = proxy_common::csum::fold(u64::from(skb::sum_at(&ip(&skb), 0)));
        let ChecksumState::Complete(sum) = skb.checksum else { panic!("the sum is gone") };
        assert_eq!(proxy_common::csum::fold(u64::from(sum)), expected, "{linear}");
    }
}

families!(checksums_are_right_whatever_the_buffer_is_like = whatever_the_buffer_is_like());

fn a_refusal<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend) = (client::<F>(), frontend::<F>());
    let entry = ServiceEntry { id: 1, kind: KIND_CLUSTER_IP, ..ServiceEntry::NONE };
    maps.add_service(ServiceKey::internal(frontend.0, frontend.1, PROTO_TCP), entry);
    let refused = packet::<F>(client, frontend, SYN);
    let (verdict, skb) = run_over(Hook::Ingress, maps, POD, &refused);
    assert_eq!((verdict, skb.redirect), (REDIRECT, Some(Redirect::Out(POD))));
    let quote = &refused[build::ETHERNET..];
    let expected = unreachable::<F>(frontend.0, client.0, (64, 0xc0), quote);
    assert_eq!(ip(&skb), expected[build::ETHERNET..]);
    assert_eq!((&skb.as_slice()[..6], &skb.as_slice()[6..12]), (&refused[6..12], &refused[..6]));
    assert_eq!((maps.count_of(Reason::NoEndpoint), maps.refusals_of(1, Reason::NoEndpoint)), (1, 1));
    assert_eq!(maps.take_events().len(), 1);
}

families!(client_of_a_service_without_endpoints_is_refused = a_refusal());

/// A connection to a removed endpoint, with the removal policy `reset`.
fn a_reset<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, SYN));
    run_over(Hook::Egress, maps, POD, &packet::<F>(backend, client, SYN_ACK));
    let data = packet::<F>(client, frontend, DATA);
    let translated = |maps| {
        let (verdict, skb) = run_over(Hook::Ingress, maps, POD, &data);
        assert_eq!((verdict, skb.wire()), (NEXT, packet::<F>(client, backend, DATA)));
    };
    translated(maps);
    let (addr, port) = backend;
    let row = |state| BackendEntry {
        addr,
        port,
        proto: PROTO_TCP,
        state,
        service: 1,
        flags: BACKEND_LOCAL | BACKEND_IN_CLUSTER,
    };
    maps.set_backend(7, row(BACKEND_GONE));
    translated(maps);
    maps.set_backend(7, row(BACKEND_RESET));
    translated(maps);
    maps.mark_flows();
    // Connections to an endpoint that serves again are not reset.
    maps.set_backend(7, row(BACKEND_ACTIVE));
    translated(maps);
    // The endpoint leaves again: its connections are reset after the delay only.
    maps.set_backend(7, row(BACKEND_GONE));
    translated(maps);
    maps.set_backend(7, row(BACKEND_RESET));
    maps.mark_flows();

    let start = build::ETHERNET + F::HEADER;
    let mut partial = data.clone();
    let pseudo = F::pseudo(&client.0, &frontend.0, PROTO_TCP, data.len() - start);
    let pseudo = !build::checksum(&[&pseudo]);
    partial[start + 16..start + 18].copy_from_slice(&pseudo.to_be_bytes());
    let unfinished = ChecksumState::Partial { start, offset: 16 };
    for (bytes, checksum) in [(&data, ChecksumState::None), (&partial, unfinished)] {
        let before = maps.count_of(Reason::EndpointLeft);
        let (verdict, skb) = run_edited(Hook::Ingress, maps, POD, bytes, |skb| skb.checksum = checksum);
        assert_eq!((verdict, skb.redirect), (REDIRECT, Some(Redirect::Out(POD))));
        let answer = skb.wire();
        assert_eq!((&answer[..6], &answer[6..12]), (&data[6..12], &data[..6]));
        let (ip, segment) = (&answer[build::ETHERNET..start], &answer[start..]);
        assert_eq!(ip, F::ip(&frontend.0, &client.0, PROTO_TCP, 64, 20, 0));
        assert_eq!(segment.len(), 20);
        assert_eq!(segment[..4], [frontend.1.to_be_bytes(), client.1.to_be_bytes()].concat());
        // The sequence number of the RST is the one that the client has acknowledged, and expects next.
        assert_eq!(
            (&segment[4..8], &segment[8..14]),
            (&data[start + 8..start + 12], &[0, 0, 0, 0, 0x50, 4][..])
        );
        let pseudo = F::pseudo(&frontend.0, &client.0, PROTO_TCP, 20);
        assert_eq!(build::checksum(&[&pseudo, segment]), 0);
        assert_eq!(maps.count_of(Reason::EndpointLeft), before + 1);
    }
    assert_eq!(maps.refusals_of(1, Reason::EndpointLeft), 2);

    // The endpoint may continue to send, and is informed of the end by the client's own RST.
    let (verdict, skb) = run_over(Hook::Egress, maps, POD, &packet::<F>(backend, client, DATA));
    assert_eq!((verdict, skb.wire()), (NEXT, packet::<F>(frontend, client, DATA)));
    let reset = Shape { flags: 4, ..SYN };
    let (verdict, skb) = run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, reset));
    assert_eq!((verdict, skb.wire()), (NEXT, packet::<F>(client, backend, reset)));
    // The client opens a new connection from the same port, with another endpoint.
    let other = (F::addr(3), 8080);
    maps.set_backend(9, BackendEntry { addr: other.0, port: other.1, ..row(BACKEND_ACTIVE) });
    maps.set_slots(7, &[9]);
    let (verdict, skb) = run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, SYN));
    assert_eq!((verdict, skb.wire()), (NEXT, packet::<F>(client, other, SYN)));
    assert_eq!(maps.count_of(Reason::EndpointLeft), 2);
}

families!(client_of_a_removed_endpoint_is_reset_with_removal_policy_reset = a_reset());

fn an_icmp_error<F: Net>() {
    let maps = maps::<F>(BACKEND_LOCAL);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    run_over(Hook::Ingress, maps, POD, &packet::<F>(client, frontend, UDP));
    let sent = |to| ip_packet::<F>(client, to, UDP);
    let error = unreachable::<F>(backend.0, client.0, (64, 0), &sent(backend));
    let (verdict, skb) = run_over(Hook::Egress, maps, POD, &error);
    assert_eq!((verdict, skb.redirect), (NEXT, None));
    assert_eq!(skb.wire(), unreachable::<F>(frontend.0, client.0, (64, 0), &sent(frontend)));
}

families!(an_error_quotes_what_its_receiver_has_sent = an_icmp_error());

fn snat_there_and_back<F: Net>(shape: Shape, reply: Shape) {
    let maps = maps::<F>(0);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    for _ in 0..2 {
        let (verdict, skb) = run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, shape));
        assert_eq!(verdict, REDIRECT);
        let port = maps.flows().iter().find(|flow| flow.bits() != 0).unwrap().source_port;
        assert!((2000..3000).contains(&port));
        let source = (node::<F>(), port);
        assert_eq!(ip(&skb), ip_packet::<F>(source, backend, Shape { ttl: shape.ttl - 1, ..shape }));
        let (verdict, skb) = run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(backend, source, reply));
        assert_eq!(verdict, REDIRECT);
        assert_eq!(ip(&skb), ip_packet::<F>(frontend, client, Shape { ttl: reply.ttl - 1, ..reply }));
        let macs = route().macs.map(u32::to_ne_bytes).concat();
        assert_eq!(skb.as_slice()[..12], macs);
        maps.advance(1);
    }
    // If a packet is too long for the route, the client gets an error.
    let short = Route { mtu: 30, ..route() };
    let (verdict, skb) =
        run_edited(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, shape), |skb| {
            skb.routes.add(&backend.0, short);
        });
    assert_eq!((verdict, skb.redirect), (REDIRECT, Some(Redirect::Out(UPLINK))));
    assert_eq!(maps.count_of(Reason::PacketTooBig), 1);
    let (verdict, _) = run_edited(Hook::Ingress, maps, UPLINK, &packet::<F>(backend, client, reply), |skb| {
        skb.routes.set_default(None);
    });
    assert_eq!(verdict, NEXT, "it is no flow's");
    maps.advance(1);
    let (verdict, _) =
        run_edited(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, shape), |skb| {
            skb.routes.set_default(None);
        });
    assert_eq!((verdict, maps.count_of(Reason::NoRoute)), (DROP, 1));
}

families!(
    forwarded_packets_come_back_under_the_nodes_address = snat_there_and_back(SYN, SYN_ACK),
    snat_there_and_back(UDP, UDP)
);

#[test]
fn packets_pass_unchanged_with_cleared_maps() {
    let (v4, v6) = (maps::<V4>(0), maps::<V6>(0));
    v4.clear();
    let bytes = packet::<V4>(client::<V4>(), frontend::<V4>(), SYN);
    let frame = HostPacket::new(&bytes);
    assert_eq!(run_any(Hook::Ingress, v4, v6, frame.frame()), NEXT);
    assert_eq!(frame.into_skb().wire(), bytes);
}

/// A packet that netfilter masquerades leaves with the source address and port of a flow with SNAT; so does the flow's own
/// packet.
fn a_port_that_two_have<F: Net>(shape: Shape, reply: Shape) {
    let maps = maps::<F>(0);
    let (client, frontend, backend) = (client::<F>(), frontend::<F>(), backend::<F>());
    let (verdict, skb) = run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(client, frontend, shape));
    assert_eq!(verdict, REDIRECT);
    assert!(skb.is_translated, "the hook of the next device would not know");
    let ours = (node::<F>(), maps.flows().iter().find(|flow| flow.bits() != 0).unwrap().source_port);
    let leaving = packet::<F>(ours, backend, shape);
    // Also if the endpoint is a frontend itself, and if the client is a process of the node.
    maps.add_frontend_bit(&backend.0, backend.1, shape.proto);
    for device in [UPLINK, 0] {
        let own = run_edited(Hook::Egress, maps, device, &leaving, |skb| skb.is_translated = true);
        assert_eq!((own.0, own.1.wire()), (NEXT, leaving.clone()));
    }
    for _ in 0..2 {
        let (verdict, skb) = run_over(Hook::Egress, maps, POD, &leaving);
        let flows = maps.flows();
        let direct = flows.iter().find(|flow| flow.bits() != 0 && flow.client_port == ours.1).unwrap();
        let theirs = (node::<F>(), direct.source_port);
        assert_ne!(theirs, ours);
        assert_eq!((verdict, skb.wire()), (NEXT, packet::<F>(theirs, backend, shape)));
        assert!(skb.is_translated);
        // The reply arrives on the device that leads to the endpoint.
        let (verdict, skb) =
            run_over(Hook::Ingress, maps, route().ifindex, &packet::<F>(backend, theirs, reply));
        assert_eq!((verdict, skb.wire()), (NEXT, packet::<F>(backend, ours, reply)));
    }
    let (verdict, _) = run_over(Hook::Ingress, maps, UPLINK, &packet::<F>(backend, ours, reply));
    assert_eq!(verdict, REDIRECT, "the flow's own reply");
    assert_eq!(maps.stats_of(1).reply_packets, 1);
}

families!(
    connection_of_netfilter_gets_another_port_than_an_existing_flow = a_port_that_two_have(SYN, SYN_ACK),
    a_port_that_two_have(UDP, UDP)
);
