//! DSR between nodes: a node encapsulates a client's packet to the node of its endpoint. That node removes the outer
//! header, translates the packet, and answers the client directly. IP in IP (RFC 2003, RFC 2473) needs no device and no
//! port of the node.
//!
//! The outer header of each packet carries the endpoint's tag ([`tunnel_tag`]): in IPv4's identification, which is unused
//! with "don't fragment" (RFC 6864), or in IPv6's flow label. The tag is all that the other node needs to take over a
//! connection in mid-flow. When the kernel segments a GSO packet, it increments IPv4's identification; the first segment
//! has the tag.

use core::ptr::read_volatile;

use proxy_common::config::{CONFIG_DSR, CONFIG_IPSEC, NodeConfig};
use proxy_common::csum::fold;
use proxy_common::flow::{DIRECTION_FORWARD, is_encapsulated, is_guess, tunnel_hops, tunnel_of};
use proxy_common::node::{Cidr, NODE_ADDR_INTERNAL, NODE_ADDR_OWN, TUNNEL_V4, TUNNEL_V6, Tunnel};
use proxy_common::prefilter::SPREAD;
use proxy_common::reason::Reason;
use proxy_common::select::{is_by_table, selector, tunnel_tag};
use proxy_common::service::ServiceEntry;
use proxy_common::{Address as _, PROTO_IPIP, PROTO_IPV6, PROTO_TCP, PROTO_UDP, V4, V6};

use super::established::longest;
use super::forward::{self, EtherType, Routing};
use super::fragment::{Fragmented, key_of};
use super::translate::{Rewrite, fold32};
use crate::context::{
    NO_HASH, PacketCtx, TUNNELLED, TUNNELLED_HOPS_SHIFT, TUNNELLED_SURE, Tuple, encapsulated,
};
use crate::env::{Counters, FlowTable, Fragments, Node, Services, Time, Words};
use crate::flow::index::NO_FLOW_GENERATION;
use crate::flow::track::{self, is_syn};
use crate::frame::{Fib, Frame, HelperFailed, Route};
use crate::header::{Header, Read};
use crate::parse::Parsed;
use crate::report;
use crate::select::lookup;
use crate::shared::opaque_to_verifier;
use crate::step::Step;

/// Returns the time to live, or hop limit, of an outer header: 64 if this node knows the connection from its SYN, else 96 and 32
/// for each time that the packet was encapsulated. Routers between two nodes do not decrement it that far (compare RFC 5082).
#[inline(always)]
const fn time_to_live(hops: u32) -> u8 {
    if hops == 0 { 64 } else { (96 + hops * 32) as u8 }
}

/// Returns what [`time_to_live`] has written.
#[inline(always)]
const fn hops_by(time_to_live: u8) -> u32 {
    (time_to_live as u32).saturating_sub(1).saturating_sub(64) / 32
}

/// One tick of this many is that of the next hook, whose neighbour code probes next hops: a route in the other family is not
/// cached, so nothing notes when the kernel has sent to its next hop.
const PROBE: u32 = 256;

/// A family of outer headers.
pub trait Outer: EtherType + Read {
    /// Whether the outer header is IPv6.
    const IS_V6: bool;
    /// Protocol number of the family's packets as a payload.
    const PROTO: u8;
    /// Length of an outer header in bytes.
    const LENGTH: u32 = size_of::<Self::OuterHeader>() as u32;
    /// The outer header, in memory order.
    type OuterHeader;
    /// Offset of the time to live, or hop limit.
    const HOPS_AT: u32;
    /// Returns the range of the sources of outer headers, if there is one.
    fn sources(config: &NodeConfig) -> &Cidr<Self::Words>;
    /// Returns the outer header for a payload of `length` bytes with the protocol number `proto` and the tag `tag`, and
    /// what the header adds to a checksum over the packet.
    fn outer_header(tunnel: &Tunnel, tag: u16, length: u32, proto: u8, hops: u8) -> (Self::OuterHeader, u64);
    /// Reads the tag from the header at `at`.
    fn tag<F: Frame>(frame: F, at: u32) -> Result<u16, HelperFailed>;
}

/// Returns `length` in network byte order, or 0 if it does not fit (a GSO packet, which the kernel will segment).
#[inline(always)]
fn length_field(length: u32) -> [u8; 2] {
    u16::try_from(length).map_or([0; 2], u16::to_be_bytes)
}

impl Outer for V4 {
    const IS_V6: bool = false;
    const PROTO: u8 = PROTO_IPIP;
    const HOPS_AT: u32 = 8;
    type OuterHeader = [u32; 5];

    #[inline(always)]
    fn sources(config: &NodeConfig) -> &Cidr<[u32; 1]> {
        &config.dsr_sources4
    }

    #[inline(always)]
    fn outer_header(tunnel: &Tunnel, tag: u16, length: u32, proto: u8, hops: u8) -> ([u32; 5], u64) {
        let [l0, l1] = length_field(length + Self::LENGTH);
        let [t0, t1] = tag.to_be_bytes();
        let ([src, ..], [dst, ..]) = (tunnel.source, tunnel.addr);
        // 0x40: "don't fragment".
        let (first, second) = (u32::from_ne_bytes([0x45, 0, l0, l1]), u32::from_ne_bytes([t0, t1, 0x40, 0]));
        let third = u32::from_ne_bytes([hops, proto, 0, 0]);
        let sum = [first, second, third, src, dst].map(u64::from);
        let check = !fold(sum[0] + sum[1] + sum[2] + sum[3] + sum[4]);
        let [c0, c1] = check.to_ne_bytes();
        // The sum over a header with its checksum is zero.
        ([first, second, u32::from_ne_bytes([hops, proto, c0, c1]), src, dst], 0)
    }

    #[inline(always)]
    fn tag<F: Frame>(frame: F, at: u32) -> Result<u16, HelperFailed> {
        let mut id = 0u16;
        frame.load(at + 4, &mut id, size_of::<u16>() as u32)?;
        Ok(u16::from_be(id))
    }
}

/// An outer IPv6 header.
#[repr(C)]
pub struct Outer6 {
    start: [u32; 2],
    src: [u32; 4],
    dst: [u32; 4],
}

impl Outer for V6 {
    const IS_V6: bool = true;
    const PROTO: u8 = PROTO_IPV6;
    const HOPS_AT: u32 = 7;
    type OuterHeader = Outer6;

    #[inline(always)]
    fn sources(config: &NodeConfig) -> &Cidr<[u32; 4]> {
        &config.dsr_sources6
    }

    #[inline(always)]
    fn outer_header(tunnel: &Tunnel, tag: u16, length: u32, proto: u8, hops: u8) -> (Outer6, u64) {
        let [l0, l1] = length_field(length);
        let [t0, t1] = tag.to_be_bytes();
        let start = [u32::from_ne_bytes([0x60, 0, t0, t1]), u32::from_ne_bytes([l0, l1, proto, hops])];
        let sum = proxy_common::csum::sum_words(&tunnel.source) + proxy_common::csum::sum_words(&tunnel.addr);
        let [first, second] = start;
        let sum = sum + u64::from(first) + u64::from(second);
        (Outer6 { start, src: tunnel.source, dst: tunnel.addr }, sum)
    }

    #[inline(always)]
    fn tag<F: Frame>(frame: F, at: u32) -> Result<u16, HelperFailed> {
        let mut label = 0u16;
        frame.load(at + 2, &mut label, size_of::<u16>() as u32)?;
        Ok(u16::from_be(label))
    }
}

/// Encapsulates a client's packet and sends it to the node of its endpoint. `ctx.plan` holds the flow's bits and the
/// endpoint. At an early hook, `ctx.found` is the flow, and the packet is not counted yet.
#[inline(always)]
pub fn encapsulate<M: FlowTable + Counters + Routing<F, Family: Outer>, F: Frame>(
    maps: M,
    frame: F,
    ctx: &mut PacketCtx<Words<M>>,
) -> Step {
    let Some(tunnel) = maps.tunnel(tunnel_of(ctx.plan.bits)) else { return Step::DropFor(Reason::NoRoute) };
    // SAFETY: a map value of plain integers. The agent may replace it with another node at the same time: that node finds
    // no endpoint.
    let mut tunnel = unsafe { read_volatile(tunnel) };
    match tunnel.family {
        TUNNEL_V4 => encapsulate_in::<M, F, V4>(maps, frame, ctx, &mut tunnel),
        TUNNEL_V6 => encapsulate_in::<M, F, V6>(maps, frame, ctx, &mut tunnel),
        // The node has left the cluster.
        _ => Step::DropFor(Reason::NoRoute),
    }
}

#[inline(always)]
fn encapsulate_in<M: FlowTable + Counters + Routing<F, Family: Outer>, F: Frame, O: Outer>(
    maps: M,
    frame: F,
    ctx: &mut PacketCtx<Words<M>>,
    tunnel: &mut Tunnel,
) -> Step {
    let length = longest(frame, ctx) + O::LENGTH;
    let (src, dst) = (tunnel.source, tunnel.addr);
    let found = if O::IS_V6 == <M::Family as Outer>::IS_V6 {
        let tuple = Tuple {
            src: Words::<M>::from_words(src),
            dst: Words::<M>::from_words(dst),
            src_port: 0,
            dst_port: 0,
        };
        if !F::EARLY && maps.node().is_some_and(|node| node.routes_by_mark != 0) {
            ctx.route = Route::BY_STACK;
            Fib::Found
        } else {
            maps.find_route(frame, &tuple, length, &mut ctx.route)
        }
    } else if maps.config().is_some_and(|config| config.flags & CONFIG_IPSEC != 0) {
        // The policies of the other family are not at hand.
        ctx.route = Route::BY_STACK;
        Fib::Found
    } else if F::EARLY && maps.jiffies().is_multiple_of(PROBE) {
        Fib::NoRoute
    } else {
        let found =
            frame.fib_lookup(&O::Words::from_words(src), &O::Words::from_words(dst), length, &mut ctx.route);
        ctx.route.fresh = 1;
        found
    };
    if F::EARLY {
        // The next hook answers and counts what cannot be sent here.
        let can_send = found == Fib::Found && frame.can_send(&ctx.route);
        if !can_send || frame.encapsulate(O::LENGTH as u16, O::IS_V6).is_err() {
            return Step::Pass;
        }
        count_early(maps, frame, ctx);
    }
    match found {
        Fib::Found => {}
        Fib::TooBig => {
            // The MTU that is left for the packet without the outer header.
            ctx.route.mtu = ctx.route.mtu.saturating_sub(O::LENGTH);
            return Step::TooBig;
        }
        Fib::NoRoute | Fib::Unreachable => return Step::DropFor(Reason::NoRoute),
    }
    let at = frame.link_header() as u32 + if F::EARLY { O::LENGTH } else { 0 };
    match <M::Family as Rewrite>::decrement_ttl(frame, at) {
        Ok(true) => {}
        Ok(false) => return Step::TimeExceeded,
        Err(HelperFailed) => return Step::DropFor(Reason::RewriteFailed),
    }
    // After the route lookup, which uses the node's own address.
    if let Some(range) = maps.config().map(O::sources)
        && range.is_some()
    {
        tunnel.source = range.address(ctx.hash).words();
    }
    match push::<F, O, M::Family>(frame, ctx, tunnel) {
        Ok(verdict) => Step::Sent(verdict),
        Err(HelperFailed) => Step::DropFor(Reason::RewriteFailed),
    }
}

/// Whether a packet reaches its endpoint on another node without an entry in the flow table: each of the connection's packets leads
/// to the same entry of the Maglev table. Nodes that a packet reaches later, or by the second chance, need their entries.
#[inline(always)]
pub fn can_bypass<A>(ctx: &PacketCtx<A>, time: Time) -> bool {
    time.config.dsr_flow_rate != 0
        && is_encapsulated(ctx.plan.bits)
        && ctx.tunnelled == 0
        && ctx.second_chance == 0
        && ctx.frontend.affinity_secs == 0
        && is_by_table(ctx.frontend.algorithm)
}

/// Whether the planned endpoint is that of the current table. A first packet is sent to another one if that is ejected, but not the
/// packets after it.
#[inline(always)]
pub fn is_of_table<M: Services>(maps: M, ctx: &PacketCtx<Words<M>>) -> bool {
    let service = &ctx.frontend;
    maps.first_id(service, selector(service.algorithm, &ctx.packet.key, 0)) == ctx.plan.backend_id
}

/// Sends the packet to the node of the planned endpoint, without an entry in the flow table.
#[inline(always)]
pub fn bypass<M: Counters, F: Frame>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Step {
    ctx.found = NO_FLOW_GENERATION;
    if !F::EARLY {
        count_bypassed(maps, frame, ctx);
    }
    Step::Encapsulate
}

#[inline(always)]
fn count_bypassed<M: Counters, F: Frame>(maps: M, frame: F, ctx: &PacketCtx<Words<M>>) {
    report::refused(maps, frame, ctx, ctx.service, Reason::FlowBypassed);
    report::forwarded(maps, ctx.service, ctx.packet.length);
}

/// Counts a packet that an early hook sends to the node of its endpoint, and updates its flow.
#[inline(always)]
fn count_early<M: FlowTable + Counters, F: Frame>(maps: M, frame: F, ctx: &PacketCtx<Words<M>>) {
    if ctx.found == NO_FLOW_GENERATION {
        return count_bypassed(maps, frame, ctx);
    }
    // Another CPU may have evicted the flow meanwhile.
    let Some(flow) = track::as_found(maps, ctx.found) else { return };
    report::forwarded(maps, flow.service(), ctx.packet.length);
    if !flow.touch_called(&ctx.packet, DIRECTION_FORWARD) {
        report::refusal(maps, flow.service(), Reason::OutOfWindow);
    }
}

#[inline(always)]
fn push<F: Frame, O: Outer, I: Outer>(
    frame: F,
    ctx: &PacketCtx<I::Words>,
    tunnel: &Tunnel,
) -> Result<i32, HelperFailed> {
    let tag = tunnel_tag(&ctx.plan.reply.src, ctx.plan.reply.src_port);
    let begun_here = ctx.tunnelled == 0
        && (is_syn(ctx.packet.tcp_flags) || !is_guess(ctx.packet.key.proto, ctx.plan.bits));
    let before = encapsulated(ctx.tunnelled).max(tunnel_hops(ctx.plan.bits));
    let hops = if begun_here { 0 } else { before + 1 };
    // Otherwise the verifier would walk through the rest once for each number.
    let hops = time_to_live(opaque_to_verifier(u64::from(hops), u64::from(ctx.plan.bits)) as u32);
    if !F::EARLY && frame.encapsulate(O::LENGTH as u16, O::IS_V6).is_err() {
        if ctx.tunnelled == 0 || O::IS_V6 != I::IS_V6 {
            return Err(HelperFailed);
        }
        // The packet is still marked as encapsulated: by the previous node, if that is in the same kernel, or by GRO.
        frame.encapsulate_again(O::LENGTH as u16)?;
    }
    let (header, sum) = O::outer_header(tunnel, tag, ctx.packet.length, I::PROTO, hops);
    frame.store_all(frame.link_header() as u32, &header)?;
    if O::IS_V6 {
        frame.add_to_complete(fold32(sum));
    }
    forward::send_as(frame, &ctx.route, O::ETHERTYPE)
}

/// Whether other nodes may send encapsulated packets.
#[inline(always)]
pub fn is_expected<M: Node>(maps: M) -> bool {
    maps.config().is_some_and(|config| config.flags & CONFIG_DSR != 0)
}

/// An encapsulated packet that is addressed to this node.
pub struct Arrived<A> {
    /// The outer header.
    pub header: Header<A>,
    /// The value of [`PacketCtx::tunnelled`] for the inner packet.
    tunnelled: u32,
}

/// Reads the outer header. Returns the packet's verdict if it is not for this node or is a later fragment.
///
/// Nodes send encapsulated packets through uplinks only. A pod could forge them, since the node that masquerades the pod's
/// packets makes itself the outer source.
#[inline(always)]
pub fn outer<M: Node<Family: Outer>, F: Frame>(maps: M, frame: F) -> Result<Arrived<Words<M>>, Step> {
    // The packet arrives again on the VLAN device.
    if frame.has_vlan_tag() {
        return Err(Step::Pass);
    }
    let link = frame.link_header() as u32;
    let Some(header) = <M::Family as Read>::read(frame, link) else { return Err(Step::Pass) };
    let to = maps.node_addr(&header.dst);
    let by_uplink =
        maps.config().is_some_and(|config| config.is_uplink(frame.ifindex(), |ifindex| maps.device(ifindex)));
    if !by_uplink && to & (NODE_ADDR_OWN | NODE_ADDR_INTERNAL) != 0 {
        return Err(if F::EARLY { Step::Pass } else { Step::DropFor(Reason::LocalTunnel) });
    }
    // Nodes send to an InternalIP: a pod's packet to another address of a node is not dropped by the pod's node. They add no
    // options or extension headers.
    let is_ours = to & (NODE_ADDR_OWN | NODE_ADDR_INTERNAL) == NODE_ADDR_OWN | NODE_ADDR_INTERNAL;
    if header.is_later || !is_ours || header.l4 != link + <M::Family as Outer>::LENGTH {
        return Err(Step::Pass);
    }
    let mut hops = 0u8;
    let Ok(tag) = <M::Family as Outer>::tag(frame, link) else { return Err(Step::Pass) };
    if frame.load(link + <M::Family as Outer>::HOPS_AT, &mut hops, 1).is_err() {
        return Err(Step::Pass);
    }
    let hops = hops_by(hops);
    let sure = if hops == 0 { TUNNELLED_SURE } else { 0 };
    let tunnelled = TUNNELLED | sure | hops.max(1) << TUNNELLED_HOPS_SHIFT | u32::from(tag);
    Ok(Arrived { header, tunnelled })
}

/// Removes the outer header if another node sent the packet, and the inner packet is for a Service. [`Step::Tunnelled`]: the
/// frame holds the inner packet now. All other packets pass unchanged: a CNI plugin may encapsulate packets of pods in the same
/// way, and so may a load balancer in front of the cluster encapsulate packets of clients. The stack decapsulates what is for
/// a tunnel device of the node, and the inner packet arrives there as a client's.
#[inline(always)]
pub fn decapsulate<M, N, F>(
    outer_maps: M,
    maps: N,
    frame: F,
    outer: &Arrived<Words<M>>,
    ctx: &mut PacketCtx<Words<N>>,
) -> Step
where
    M: Node,
    N: Services + Fragments + Counters,
    M::Family: Outer,
    N::Family: Outer + Fragmented,
    F: Frame,
{
    if !is_accepted(outer_maps, maps, frame, outer) {
        return Step::Pass;
    }
    if pop::<F, M::Family, N::Family>(frame, outer.header.l4).is_err() {
        return Step::DropFor(Reason::RewriteFailed);
    }
    ctx.tunnelled = outer.tunnelled;
    ctx.hash = NO_HASH;
    ctx.retried = 0;
    ctx.packet.key.direction = DIRECTION_FORWARD;
    ctx.packet.key.reserved = 0;
    Step::Tunnelled
}

/// Removes the outer header at an early hook, and notes for the next hook what it said. A packet that the early hook does not accept,
/// or whose driver has no room for a note, passes unchanged: the next hook decides about it.
#[inline(always)]
pub fn decapsulate_early<M, N, F>(outer_maps: M, maps: N, frame: F, outer: &Arrived<Words<M>>) -> Step
where
    M: Node,
    N: Services + Fragments + Counters,
    M::Family: Outer,
    N::Family: Outer + Fragmented,
    F: Frame,
{
    let Some(config) = maps.config() else { return Step::Pass };
    let mut macs = [0u32; 3];
    if !maps.is_early_device(frame.ifindex())
        || !is_accepted(outer_maps, maps, frame, outer)
        || frame.load(0, &mut macs, size_of::<[u32; 3]>() as u32).is_err()
        || frame.add_note().is_err()
        || frame.cut_head(<M::Family as Outer>::LENGTH).is_err()
    {
        return Step::Pass;
    }
    let header = forward::overwrite_link_header(frame, macs, <N::Family as EtherType>::ETHERTYPE);
    match header.and_then(|()| frame.set_note([signature(config), outer.tunnelled])) {
        Ok(()) => Step::Pass,
        Err(HelperFailed) => Step::DropFor(Reason::RewriteFailed),
    }
}

/// Returns the first word of a note: a number that other programs, and the programs of other nodes, do not know. Never 0.
#[inline(always)]
const fn signature(config: &NodeConfig) -> u32 {
    config.flow_seed.wrapping_mul(SPREAD) | 1
}

/// Returns the value of [`PacketCtx::tunnelled`] that an early hook has noted for the packet; 0: it did not arrive encapsulated, or the
/// note is not one of this node's program on this device.
#[inline(always)]
pub fn noted<M: Node, F: Frame>(maps: M, frame: F) -> u32 {
    // Hardly any packet has a note.
    let Some([first, tunnelled]) = frame.note() else { return 0 };
    let is_own = maps.config().is_some_and(|config| signature(config) == first)
        && maps.is_early_device(frame.ifindex())
        && !frame.has_vlan_tag();
    if is_own { tunnelled } else { 0 }
}

/// Whether another node sent the encapsulated packet, and the inner packet is for a Service. Counts a packet of another sender.
#[inline(always)]
fn is_accepted<M, N, F>(outer_maps: M, maps: N, frame: F, outer: &Arrived<Words<M>>) -> bool
where
    M: Node,
    M::Family: Outer,
    N: Services + Fragments + Counters,
    N::Family: Outer + Fragmented,
    F: Frame,
{
    let header = &outer.header;
    let Some(inner) = <N::Family as Read>::read(frame, header.l4) else { return false };
    if !is_ours(maps, frame, &inner) {
        return false;
    }
    let from = outer_maps.node_addr(&header.src) & (NODE_ADDR_INTERNAL | NODE_ADDR_OWN);
    let range = outer_maps.config().map(<M::Family as Outer>::sources);
    // Without a range, only the address zero is in it.
    let is_nodes = from == NODE_ADDR_INTERNAL
        || from == 0 && range.is_some_and(|range| range.is_some() && range.contains(&header.src));
    if !is_nodes && !F::EARLY {
        report::reason(maps, Reason::ForeignTunnel);
    }
    is_nodes
}

/// Removes the outer header, which ends at `end`.
#[inline(always)]
fn pop<F: Frame, O: Outer, I: Outer>(frame: F, end: u32) -> Result<(), HelperFailed> {
    let link = frame.link_header() as u32;
    let is_mixed = O::IS_V6 != I::IS_V6;
    frame.decapsulate((end - link) as u16, is_mixed, I::IS_V6)?;
    if is_mixed && link != 0 {
        // The kernel uses its metadata of the packet; other readers use the link-layer header.
        frame.store_all(link - size_of::<u16>() as u32, &I::ETHERTYPE)?;
    }
    Ok(())
}

/// Whether an inner packet is a client's packet to a Service.
#[inline(always)]
fn is_ours<N: Services + Fragments<Family: Outer + Fragmented>, F: Frame>(
    maps: N,
    frame: F,
    inner: &Header<Words<N>>,
) -> bool {
    if inner.is_later {
        // The first fragment arrived here before.
        return !F::EARLY && maps.fragment(&key_of::<N::Family>(inner)).is_some();
    }
    let mut ports = [0u16; 2];
    let is_loaded = frame.load(inner.l4, &mut ports, size_of::<[u16; 2]>() as u32).is_ok();
    if !is_loaded || !matches!(inner.proto, PROTO_TCP | PROTO_UDP) {
        return false;
    }
    let [_, port] = ports;
    let entry = lookup::tunnelled_frontend(maps, inner.dst, u16::from_be(port), inner.proto);
    entry.kind != ServiceEntry::NONE.kind
}

/// Returns the first stage of a packet that arrived encapsulated, once the inner packet is parsed.
#[inline(always)]
pub fn tunnelled(parsed: Parsed) -> Step {
    match parsed {
        Parsed::Packet => Step::Established,
        // The reason is counted already. The packet must not pass: its destination is not an address of this node.
        _ => Step::Drop,
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;
    use proxy_common::node::TUNNEL_V4;

    #[test]
    fn the_outer_ipv4_header_has_its_lengths_tag_and_checksum() {
        let addr = |last| [u32::from_ne_bytes([10, 200, 255, last]), 0, 0, 0];
        let tunnel = Tunnel { addr: addr(2), source: addr(1), family: TUNNEL_V4 };
        for (length, total) in [(40, 60), (1500, 1520), (65_515, 65_535), (65_516, 0), (70_000, 0)] {
            let (header, added) = V4::outer_header(&tunnel, 0xfedc, length, PROTO_IPIP, 64);
            let bytes: Vec<u8> = header.iter().flat_map(|word| word.to_ne_bytes()).collect();
            let word = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
            assert_eq!((bytes[0], word(2), word(4), word(6)), (0x45, total, 0xfedc, 0x4000));
            assert_eq!((bytes[8], bytes[9]), (64, PROTO_IPIP));
            assert_eq!((&bytes[12..16], &bytes[16..]), (&[10, 200, 255, 1][..], &[10, 200, 255, 2][..]));
            // RFC 1071: the sum over a header with its checksum is all ones, and adds nothing.
            let mut sum: u32 = (0..20).step_by(2).map(|at| u32::from(word(at))).sum();
            while sum > 0xffff {
                sum = (sum & 0xffff) + (sum >> 16);
            }
            assert_eq!((sum, added), (0xffff, 0), "{length}");
        }
    }
}
