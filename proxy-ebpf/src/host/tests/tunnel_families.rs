//! Packets of either family, encapsulated in either family.

use proxy_common::backend::BACKEND_TUNNEL_SHIFT;
use proxy_common::config::CONFIG_DSR;
use proxy_common::csum::fold;
use proxy_common::node::{Cidr, NODE_ADDR_INTERNAL, TUNNEL_V4, TUNNEL_V6, Tunnel};
use proxy_common::select::tunnel_tag;
use proxy_common::{Address as _, PROTO_IPIP, PROTO_IPV6};

use super::tunnel::{NUMBER, dsr_service};
use super::*;
use crate::host::skb::{RouteTo, Routes};

#[derive(Clone, Copy)]
pub(super) struct Both {
    pub v4: HostMaps<V4>,
    pub v6: HostMaps<V6>,
}

/// A family as the outer or inner one.
pub(super) trait Side: Net {
    const TUNNEL: u32;
    /// Its number as a payload.
    const PAYLOAD: u8;
    fn of(both: Both) -> HostMaps<Self>;
    /// Writes the tag into an outer header.
    fn mark(outer: &mut [u8], tag: u16);
}

impl Side for V4 {
    const TUNNEL: u32 = TUNNEL_V4;
    const PAYLOAD: u8 = PROTO_IPIP;

    fn of(both: Both) -> HostMaps<V4> {
        both.v4
    }

    fn mark(outer: &mut [u8], tag: u16) {
        outer[4..6].copy_from_slice(&tag.to_be_bytes());
        outer[10..12].fill(0);
        let check = build::checksum(&[outer]);
        outer[10..12].copy_from_slice(&check.to_be_bytes());
    }
}

impl Side for V6 {
    const TUNNEL: u32 = TUNNEL_V6;
    const PAYLOAD: u8 = PROTO_IPV6;

    fn of(both: Both) -> HostMaps<V6> {
        both.v6
    }

    fn mark(outer: &mut [u8], tag: u16) {
        outer[2..4].copy_from_slice(&tag.to_be_bytes());
    }
}

pub(super) fn other_node<F: Net>() -> F::Words {
    F::addr(8)
}

fn set_up<F: Side>(backend_flags: u32) -> HostMaps<F> {
    let maps = maps::<F>(backend_flags);
    maps.edit_config(|config| config.flags |= CONFIG_DSR);
    maps.add_node_addr(node::<F>(), NODE_ADDR_OWN | NODE_ADDR_PORTS | NODE_ADDR_INTERNAL);
    maps.add_node_addr(other_node::<F>(), NODE_ADDR_INTERNAL);
    let (addr, port) = frontend::<F>();
    let entry = dsr_service();
    for (proto, slot_base) in [(PROTO_TCP, 7), (PROTO_SCTP, 9)] {
        maps.add_service(ServiceKey::internal(addr, port, proto), ServiceEntry { slot_base, ..entry });
    }
    maps
}

/// A node of both families, whose packets to the other node are encapsulated in the family `O`.
pub(super) fn both<O: Side>(backend_flags: u32) -> Both {
    let both = Both { v4: set_up(backend_flags), v6: set_up(backend_flags) };
    let tunnel = Tunnel { addr: other_node::<O>().words(), source: node::<O>().words(), family: O::TUNNEL };
    both.v4.set_tunnel(NUMBER, tunnel);
    both.v6.set_tunnel(NUMBER, tunnel);
    both
}

/// Returns the packet with an outer header.
pub(super) fn around<O: Side, I: Side>(src: O::Words, dst: O::Words, inner: &[u8]) -> Vec<u8> {
    let (addr, port) = backend::<I>();
    let mut header = O::ip(&src, &dst, I::PAYLOAD, 64, inner.len(), 0);
    O::mark(&mut header, tunnel_tag(&addr, port));
    [header, inner.to_vec()].concat()
}

fn sent<O: Side, I: Side>() {
    let (client, frontend) = (client::<I>(), frontend::<I>());
    let both = both::<O>(NUMBER << BACKEND_TUNNEL_SHIFT);
    let maps = I::of(both);
    for shape in [SYN, DATA] {
        let bytes = packet::<I>(client, frontend, shape);
        let inner = ip_packet::<I>(client, frontend, Shape { ttl: shape.ttl - 1, ..shape });
        let expected = around::<O, I>(node::<O>(), other_node::<O>(), &inner);
        let sum = skb::sum_at(&bytes[build::ETHERNET..], 0);
        for checksum in [ChecksumState::None, ChecksumState::Complete(sum)] {
            let run = |mtu, gso_size| {
                run_edited(Hook::Ingress, maps, UPLINK, &bytes, |skb| {
                    skb.routes.set_default(Some(Route { mtu, ..route() }));
                    (skb.checksum, skb.gso_size) = (checksum, gso_size);
                })
            };
            let (verdict, skb) = run(expected.len() as u32, 0);
            assert_eq!((verdict, ip(&skb)), (REDIRECT, expected.clone()));
            assert_eq!(skb.as_slice()[12..14], (O::ETHERTYPE).to_ne_bytes());
            if let ChecksumState::Complete(sum) = skb.checksum {
                assert_eq!(fold(u64::from(sum)), fold(u64::from(skb::sum_at(&expected, 0))));
            }
            // With an MTU one byte smaller, the ICMP error contains the MTU without the outer header.
            maps.advance(1);
            let (verdict, skb) = run(expected.len() as u32 - 1, 0);
            assert_eq!((verdict, skb.redirect), (REDIRECT, Some(Redirect::Out(UPLINK))));
            let error = ip(&skb);
            let at = I::HEADER + 4;
            let mtu = u32::from_be_bytes([error[at], error[at + 1], error[at + 2], error[at + 3]]);
            assert_eq!(mtu as usize, inner.len() - 1);
            maps.advance(1);
        }
    }
}

fn only_v4(_: [u32; 4], length: usize) -> Option<Route> {
    (length == 4).then(route)
}

fn only_v6(_: [u32; 4], length: usize) -> Option<Route> {
    (length == 16).then(route)
}

/// The route is one of the outer family, and is cached if that is the packet's own.
fn by_its_route<O: Side, I: Side>() {
    let maps = I::of(both::<O>(NUMBER << BACKEND_TUNNEL_SHIFT));
    let bytes = packet::<I>(client::<I>(), frontend::<I>(), SYN);
    let run = |family| {
        let (verdict, skb) =
            run_edited(Hook::Ingress, maps, UPLINK, &bytes, |skb| skb.routes = Routes::by(family));
        if verdict == REDIRECT { skb.redirect } else { None }
    };
    let (outer, other): (RouteTo, RouteTo) =
        if O::HEADER == 20 { (only_v4, only_v6) } else { (only_v6, only_v4) };
    assert_eq!(run(other), None);
    assert!(matches!(run(outer), Some(Redirect::Neighbour(_))));
    let is_cached = matches!(run(outer), Some(Redirect::Out(_)));
    assert_eq!(is_cached, O::HEADER == I::HEADER);
}

mixed!(an_encapsulated_packet_is_sent_by_the_outer_familys_route = by_its_route());

mixed!(a_packet_is_encapsulated_in_either_family = sent());

/// A later fragment from the other node, which contains what looks like a client's packet.
fn later_fragment<O: Side, I: Side>(inner: &[u8]) -> Vec<u8> {
    let (src, dst) = (other_node::<O>(), node::<O>());
    let outer = if O::HEADER == 20 {
        let mut header = O::ip(&src, &dst, I::PAYLOAD, 64, inner.len(), 0);
        header[6..8].copy_from_slice(&[0, 8]);
        O::mark(&mut header, 0);
        header
    } else {
        let header = O::ip(&src, &dst, 44, 64, 8 + inner.len(), 0);
        [header, std::vec![I::PAYLOAD, 0, 0, 64, 0, 0, 0, 1]].concat()
    };
    build::ethernet::<O>(&[outer, inner.to_vec()].concat())
}

fn arrives<O: Side, I: Side>() {
    let (client, frontend, backend) = (client::<I>(), frontend::<I>(), backend::<I>());
    let inner = ip_packet::<I>(client, frontend, SYN);
    let from = |src, dst| build::ethernet::<O>(&around::<O, I>(src, dst, &inner));
    let run = |both: Both, bytes: &[u8]| {
        let packet = HostPacket::new(bytes).edit(|skb| (skb.ifindex, skb.ingress_ifindex) = (UPLINK, UPLINK));
        let verdict = run_any(Hook::Ingress, both.v4, both.v6, packet.frame());
        (verdict, packet.into_skb())
    };
    let here = both::<O>(BACKEND_LOCAL);
    let (verdict, skb) = run(here, &from(other_node::<O>(), node::<O>()));
    assert_eq!((verdict, ip(&skb)), (NEXT, ip_packet::<I>(client, backend, SYN)));
    assert_eq!(skb.as_slice()[12..14], (I::ETHERTYPE).to_ne_bytes());
    // By a device without link-layer header.
    let outer = around::<O, I>(other_node::<O>(), node::<O>(), &inner);
    let came = HostPacket::without_link_header(&outer, u32::from(O::ETHERTYPE)).edit(|skb| {
        (skb.ifindex, skb.ingress_ifindex) = (UPLINK, UPLINK);
    });
    assert_eq!(run_any(Hook::Ingress, here.v4, here.v6, came.frame()), NEXT);
    assert_eq!(came.into_skb().as_slice(), ip_packet::<I>(client, backend, SYN));
    // To another node, from a machine that is no node, and from this node itself.
    for (src, dst) in
        [(other_node::<O>(), O::addr(77)), (O::addr(66), node::<O>()), (node::<O>(), node::<O>())]
    {
        let bytes = from(src, dst);
        let (verdict, skb) = run(both::<O>(BACKEND_LOCAL), &bytes);
        assert_eq!((verdict, skb.as_slice()), (NEXT, &bytes[..]), "the outer header stays");
    }
    // A later fragment of an outer packet, and packets of other nodes where DSR is not used.
    let bytes = later_fragment::<O, I>(&inner);
    let (verdict, skb) = run(here, &bytes);
    assert_eq!((verdict, skb.as_slice()), (NEXT, &bytes[..]));
    let off = both::<O>(BACKEND_LOCAL);
    off.v4.edit_config(|config| config.flags = 0);
    off.v6.edit_config(|config| config.flags = 0);
    let bytes = from(other_node::<O>(), node::<O>());
    let (verdict, skb) = run(off, &bytes);
    assert_eq!((verdict, skb.as_slice()), (NEXT, &bytes[..]));
    // For no Service: a CNI plugin may encapsulate, too.
    // SCTP is not sent so.
    for inner in [ip_packet::<I>(client, (frontend.0, 81), SYN), ip_packet::<I>(client, frontend, INIT)] {
        let bytes = build::ethernet::<O>(&around::<O, I>(other_node::<O>(), node::<O>(), &inner));
        let (verdict, skb) = run(here, &bytes);
        assert_eq!((verdict, skb.as_slice()), (NEXT, &bytes[..]));
    }
}

mixed!(a_packet_arrives_encapsulated_in_either_family = arrives());

fn range<F: Side>() -> Cidr<F::Words> {
    // Only the last word of an address has bits of the hash.
    let [a, b, c, d] = F::addr(0).words();
    let mask = if F::HEADER == 20 { [0x00ff_ffffu32.to_le(), 0, 0, 0] } else { [!0, !0, !0, 0] };
    Cidr {
        addr: F::Words::from_words([a & mask[0], b & mask[1], c & mask[2], d & mask[3]]),
        mask: F::Words::from_words(mask),
    }
}

fn of_a_range<O: Side, I: Side>() {
    let set = |both: Both| {
        let set = |config: &mut NodeConfig| {
            (config.dsr_sources4, config.dsr_sources6) = (range::<V4>(), range::<V6>());
        };
        both.v4.edit_config(set);
        both.v6.edit_config(set);
        both
    };
    let (first, second) = (set(both::<O>(NUMBER << BACKEND_TUNNEL_SHIFT)), set(both::<O>(BACKEND_LOCAL)));
    let sources = [1000, 2000, 3000, 4000].map(|port| {
        let client = (client::<I>().0, port);
        let send = |shape| {
            let bytes = packet::<I>(client, frontend::<I>(), shape);
            let (verdict, skb) = run_over(Hook::Ingress, I::of(first), UPLINK, &bytes);
            assert_eq!(verdict, REDIRECT);
            skb
        };
        let outer = ip(&send(SYN));
        let at = if O::HEADER == 20 { 12 } else { 8 };
        let source = |outer: &[u8]| outer[at..at + size_of::<O::Words>()].to_vec();
        assert_eq!(source(&ip(&send(DATA))), source(&outer), "one address for a flow");
        if O::HEADER == 20 {
            assert_eq!(build::checksum(&[&outer[..20]]), 0);
        }
        let mut words = [0; 4];
        for (word, bytes) in words.iter_mut().zip(source(&outer).chunks(4)) {
            *word = u32::from_ne_bytes(bytes.try_into().unwrap());
        }
        let source = O::Words::from_words(words);
        assert!(range::<O>().contains(&source));
        // The second node takes the packet out, as from an address of a node.
        let bytes = build::ethernet::<O>(&around::<O, I>(source, node::<O>(), &outer[O::HEADER..]));
        let frame = HostPacket::new(&bytes).edit(|skb| skb.ifindex = UPLINK);
        assert_eq!(run_any(Hook::Ingress, second.v4, second.v6, frame.frame()), NEXT);
        let inner = ip_packet::<I>(client, backend::<I>(), Shape { ttl: SYN.ttl - 1, ..SYN });
        assert_eq!(ip(&frame.into_skb()), inner);
        source
    });
    let different: std::collections::BTreeSet<_> = sources.iter().collect();
    assert!(different.len() > 1);
    // An address of this node is not another node's, also in the range.
    let own = range::<O>().address(0x0700_0000);
    O::of(second).add_node_addr(own, NODE_ADDR_OWN);
    let inner = ip_packet::<I>(client::<I>(), frontend::<I>(), SYN);
    let bytes = build::ethernet::<O>(&around::<O, I>(own, node::<O>(), &inner));
    let frame = HostPacket::new(&bytes).edit(|skb| skb.ifindex = UPLINK);
    assert_eq!(run_any(Hook::Ingress, second.v4, second.v6, frame.frame()), NEXT);
    assert_eq!(frame.into_skb().as_slice(), bytes);
    assert_eq!(I::of(second).count_of(Reason::ForeignTunnel), 1);
}

mixed!(outer_source_is_one_of_the_range_for_each_flow = of_a_range());
