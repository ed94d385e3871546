//! ICMP and ICMPv6 errors about translated packets. An error quotes the packet as the sender of the error received it: the
//! quote, and the error's own addresses, are translated back, so that path MTU discovery, traceroute and "port unreachable"
//! reach the socket that sent the packet.
//!
//! A quote may be short: a sender must include only eight bytes behind the IP header (RFC 792). Checksums are corrected by
//! the difference of the written bytes, so a checksum that was wrong stays wrong.

use proxy_common::config::{CONFIG_IPSEC, CONFIG_POLICY_ROUTES, CONFIG_VIP_ECHO};
use proxy_common::csum::{replace16, replace32, update};
use proxy_common::flow::{DIRECTION_FORWARD, DIRECTION_REPLY, FlowKey, STATE_LOCAL, STATE_SNAT, is_rerouted};
use proxy_common::prefilter::Role;
use proxy_common::reason::Reason;
use proxy_common::{Address, PROTO_ICMP, PROTO_ICMPV6, PROTO_SCTP, PROTO_TCP, PROTO_UDP, V4, V6};

use super::eject;
use super::forward::Routing;
use super::refuse::may_answer;
use super::sctp;
use super::translate::{Rewrite, address_difference, ports, udp_check};
use crate::context::{PacketCtx, Tuple};
use crate::env::{FlowTable, RateLimit, STACKS_ERRORS, Words};
use crate::flow::track::{self, Tracked};
use crate::frame::{Fib, Frame, HelperFailed};
use crate::header::{Header, Read, same};
use crate::net::{tcp, udp};
use crate::shared::opaque_to_verifier;
use crate::step::Step;

/// Bytes of an ICMP header.
const ICMP: u32 = 8;
/// Bytes of a transport header that every quote has.
const QUOTED: u32 = 8;
/// Offset of the checksum in an ICMP header.
const CHECK: u32 = 2;

/// A family whose errors can be translated.
pub trait IcmpErrors: Rewrite + Read {
    /// Protocol number of the family's errors.
    const PROTO: u8;
    /// Whether the checksum of an error covers the addresses (RFC 4443, 2.3).
    const COVERS_ADDRESSES: bool;
    /// Offset of the protocol in an IP header.
    const PROTO_AT: usize;
    /// Whether the error tells the path MTU.
    fn is_too_big(kind: u8, code: u8) -> bool;
    /// Whether a message of this type is an error that quotes a packet. Redirects are excluded.
    fn is_error(kind: u8) -> bool;
    /// Whether the error says that the destination is unreachable for every packet.
    fn is_unreachable(kind: u8, code: u8) -> bool;
}

impl IcmpErrors for V4 {
    const PROTO: u8 = PROTO_ICMP;
    const COVERS_ADDRESSES: bool = false;
    const PROTO_AT: usize = 9;

    #[inline(always)]
    fn is_too_big(kind: u8, code: u8) -> bool {
        (kind, code) == (3, 4)
    }

    #[inline(always)]
    fn is_error(kind: u8) -> bool {
        // Destination unreachable, time exceeded, parameter problem (RFC 792).
        matches!(kind, 3 | 11 | 12)
    }

    #[inline(always)]
    fn is_unreachable(kind: u8, code: u8) -> bool {
        kind == 3 && !Self::is_too_big(kind, code)
    }
}

impl IcmpErrors for V6 {
    const PROTO: u8 = PROTO_ICMPV6;
    const COVERS_ADDRESSES: bool = true;
    const PROTO_AT: usize = 6;

    #[inline(always)]
    fn is_too_big(kind: u8, _code: u8) -> bool {
        kind == 2
    }

    #[inline(always)]
    fn is_error(kind: u8) -> bool {
        // Destination unreachable, packet too big, time exceeded, parameter problem (RFC 4443).
        matches!(kind, 1..=4)
    }

    #[inline(always)]
    fn is_unreachable(kind: u8, _code: u8) -> bool {
        kind == 1
    }
}

/// An error, and the packet that it quotes.
struct Quote<A> {
    outer: Header<A>,
    inner: Header<A>,
    /// Checksum of the error.
    check: u16,
    /// Both ports of the quoted packet, as stored in the packet.
    ports: u32,
    /// Whether the quoted packet is a TCP segment that did not reach its destination.
    is_refused: bool,
    /// Sequence number of the quoted packet, if it is a TCP segment.
    seq: u32,
}

impl<A: Address> Quote<A> {
    /// Returns the key of a packet in the error's direction, which is opposite to that of the quoted packet.
    #[inline(always)]
    fn key(&self, direction: u8) -> FlowKey<A> {
        let [a, b, c, d] = self.ports.to_ne_bytes();
        FlowKey {
            src: self.inner.dst,
            dst: self.inner.src,
            src_port: u16::from_be_bytes([c, d]),
            dst_port: u16::from_be_bytes([a, b]),
            proto: self.inner.proto,
            direction,
            reserved: 0,
        }
    }
}

/// Reads an error. Returns `None` if the packet is not an error, or quotes too little.
#[inline(always)]
fn read<F: Frame, Fam: IcmpErrors>(frame: F) -> Option<Quote<Fam::Words>> {
    let outer = Fam::read(frame, frame.link_header() as u32)?;
    if outer.proto != Fam::PROTO || outer.is_later {
        return None;
    }
    let mut icmp = [0u16; 2];
    frame.load(outer.l4, &mut icmp, size_of::<[u16; 2]>() as u32).ok()?;
    let [kind, code] = icmp[0].to_ne_bytes();
    if !Fam::is_error(kind) {
        return None;
    }
    let mut inner = Fam::read(frame, outer.l4 + ICMP)?;
    let is_ours = matches!(inner.proto, PROTO_TCP | PROTO_UDP | PROTO_SCTP);
    // An error is sent to the source of the quoted packet.
    if inner.is_later || !is_ours || inner.l4 + QUOTED > outer.end || !same(&inner.src, &outer.dst) {
        return None;
    }
    let mut start = [0u32; 2];
    frame.load(inner.l4, &mut start, QUOTED).ok()?;
    let [ports, seq] = start;
    let unknown = |number: u64| opaque_to_verifier(number, u64::from(seq));
    let is_refused = unknown(u64::from(inner.proto == PROTO_TCP && Fam::is_unreachable(kind, code))) != 0;
    inner.proto = unknown(u64::from(inner.proto)) as u8;
    Some(Quote { outer, inner, check: icmp[1], ports, is_refused, seq: u32::from_be(seq) })
}

/// Whether a packet on the loopback device is an error that this CPU may tell a client. The kernel limits no errors there (`icmpv4_xrlim_allow`).
#[inline(always)]
pub fn is_stacks_error<M, F>(maps: M, frame: F) -> bool
where
    M: RateLimit,
    M::Family: IcmpErrors,
    F: Frame,
{
    let link = frame.link_header();
    let Some(proto) = frame.bounds().at::<u8>(link + M::Family::PROTO_AT) else { return false };
    // SAFETY: `at` found the byte inside the frame.
    if unsafe { *proto } != M::Family::PROTO {
        return false;
    }
    let Some(header) = M::Family::read(frame, link as u32) else { return false };
    let mut message = [0u8; 2];
    if frame.load(header.l4, &mut message, size_of::<[u8; 2]>() as u32).is_err() {
        return false;
    }
    let [kind, code] = message;
    M::Family::is_error(kind) && (M::Family::is_too_big(kind, code) || may_answer(maps, STACKS_ERRORS))
}

/// Finds the flow of packets in the error's direction, and returns it with that direction. An incoming error may be about a
/// reply, and goes to the backend. Or it is about a packet that was forwarded under an address of this node, and arrives
/// like the reply to it.
#[inline(always)]
fn find<M: FlowTable>(maps: M, quote: &Quote<Words<M>>, incoming: bool) -> Option<(Tracked<M>, u8)> {
    let mut key = quote.key(DIRECTION_FORWARD);
    // The frontend of a direct flow is its backend.
    let is_foreign = maps.may_be(Role::Frontend, &key.dst, key.dst_port, key.proto).is_no()
        && maps.may_be(Role::Backend, &key.dst, key.dst_port, key.proto).is_no();
    if incoming
        && !is_foreign
        && let Some(flow) = track::find_called(maps, &key)
    {
        return Some((flow, DIRECTION_FORWARD));
    }
    key.direction = DIRECTION_REPLY;
    if maps.may_be(Role::Backend, &key.src, key.src_port, key.proto).is_no() {
        return None;
    }
    let flow = track::find_called(maps, &key)?;
    // An incoming error in reply direction is accepted only if the node is the client of the backend (SNAT).
    (!incoming || flow.bits() & STATE_SNAT != 0).then_some((flow, DIRECTION_REPLY))
}

/// Translates an ICMP packet if it is an error about a packet of a flow. [`Step::Icmp`]: the error may have to be forwarded; its
/// addresses and the flow's bits are in `ctx`. [`Step::RefusedByIcmp`]: the error is about the SYN of a watched flow whose reply key is in
/// `ctx`, and the packet is unchanged. [`Step::EchoRequest`]: it is no error, and may be answered.
#[inline(always)]
pub fn translate_error<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, incoming: bool) -> Step
where
    M: FlowTable,
    M::Family: IcmpErrors,
    F: Frame,
{
    if frame.has_vlan_tag() && incoming {
        return Step::Pass;
    }
    // One `let` for each: with a tuple of both, the compiler spills an undefined value, and the verifier rejects the
    // program.
    let Some(quote) = read::<F, M::Family>(frame) else {
        let answers = maps.config().is_some_and(|config| config.flags & CONFIG_VIP_ECHO != 0);
        return if answers { Step::EchoRequest } else { Step::Pass };
    };
    let Some((flow, direction)) = find(maps, &quote, incoming) else { return Step::Pass };
    let direction = opaque_to_verifier(u64::from(direction), u64::from(quote.ports)) as u8;
    if direction == DIRECTION_REPLY && quote.is_refused && eject::is_about_syn(&flow, quote.seq) {
        (ctx.packet.key, ctx.packet.tcp_flags) = (quote.key(DIRECTION_REPLY), 0);
        return Step::RefusedByIcmp;
    }
    let to = if direction == DIRECTION_FORWARD { flow.to_backend() } else { flow.to_client() };
    let Some(to) = to else { return Step::Pass };
    // The translated address if the endpoint itself sent the error; the unchanged address if a router on the path did. Unchanged,
    // too, for a process of this node: its kernel finds the socket by the quote, and drops a source whose route does not use the
    // device on which the error arrived (`rp_filter`).
    let is_local = incoming && flow.bits() & STATE_LOCAL != 0;
    let is_endpoints = same(&quote.outer.src, &quote.inner.dst) && !is_local;
    let src = if is_endpoints { to.src } else { quote.outer.src };
    if translate::<F, M::Family>(frame, &quote, &src, &to).is_err() {
        return Step::DropFor(Reason::RewriteFailed);
    }
    if incoming && flow.bits() & (STATE_SNAT | STATE_LOCAL) != STATE_SNAT {
        return Step::Pass;
    }
    ctx.plan.bits = flow.bits();
    ctx.packet.key.src = src;
    ctx.packet.key.dst = to.dst;
    Step::Icmp
}

/// Finds the route of a translated error: of one about a packet that this node forwarded, whose time to live is decremented; or
/// of one that leaves, with the frontend's address if it is the endpoint's, if a policy or that address has another route.
#[inline(always)]
pub fn forward_error<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, incoming: bool) -> Step
where
    M: Routing<F>,
    M::Family: IcmpErrors,
    F: Frame,
{
    let flags = maps.config().map_or(0, |config| config.flags);
    // As for a reply of the flow: the stack has routed the error by the endpoint's address.
    let by_address = flags & CONFIG_POLICY_ROUTES != 0 && is_rerouted(ctx.plan.bits, frame.ifindex());
    if !incoming && !by_address && flags & CONFIG_IPSEC == 0 {
        return Step::Pass;
    }
    let to = Tuple { src: ctx.packet.key.src, dst: ctx.packet.key.dst, src_port: 0, dst_port: 0 };
    let link = frame.link_header() as u32;
    let found = maps.find_route(frame, &to, frame.length() - link, &mut ctx.route) == Fib::Found;
    if !incoming {
        let is_other = ctx.route.is_by_stack() || by_address && ctx.route.ifindex != frame.ifindex();
        return if found && is_other { Step::Forward } else { Step::Pass };
    }
    if !found {
        return Step::DropFor(Reason::NoRoute);
    }
    match <M::Family as Rewrite>::decrement_ttl(frame, link) {
        Ok(true) => Step::Forward,
        Ok(false) => Step::DropFor(Reason::TtlExceeded),
        Err(HelperFailed) => Step::DropFor(Reason::RewriteFailed),
    }
}

/// Rewrites the error, which gets the source `src`, and its quote. A packet in the error's direction becomes `to`.
#[inline(always)]
fn translate<F: Frame, Fam: IcmpErrors>(
    frame: F,
    quote: &Quote<Fam::Words>,
    src: &Fam::Words,
    to: &Tuple<Fam::Words>,
) -> Result<(), HelperFailed> {
    let (outer, inner) = (&quote.outer, &quote.inner);
    let addresses = address_difference(&outer.src, src) + address_difference(&outer.dst, &to.dst);
    Fam::store_addresses(frame, frame.link_header() as u32, outer.check, [src, &to.dst], addresses)?;
    let mut sum = if Fam::COVERS_ADDRESSES { addresses } else { 0 };
    // The quoted packet has the opposite direction.
    let addresses = address_difference(&inner.src, &to.dst) + address_difference(&inner.dst, &to.src);
    sum += Fam::store_addresses(frame, outer.l4 + ICMP, inner.check, [&to.dst, &to.src], addresses)?;
    let new_ports = ports(to.dst_port, to.src_port);
    frame.store_all(inner.l4, &new_ports)?;
    let difference = replace32(quote.ports, new_ports);
    sum += difference;
    sum += if inner.proto == PROTO_SCTP {
        sctp::correct(frame, inner.l4, inner.end, outer.end, quote.ports ^ new_ports)?
    } else {
        transport_check(frame, outer, inner, addresses + difference)?
    };
    // The sum over the whole packet (`CHECKSUM_COMPLETE`) stays: each checksum compensates for the bytes that it covers.
    frame.store_all(outer.l4 + CHECK, &update(quote.check, sum))
}

/// Corrects the transport checksum of the quoted packet if the quote includes it. Returns what the correction adds to a
/// sum.
#[inline(always)]
fn transport_check<F: Frame, A>(
    frame: F,
    outer: &Header<A>,
    inner: &Header<A>,
    difference: u64,
) -> Result<u64, HelperFailed> {
    let at = inner.l4 + if inner.proto == PROTO_UDP { udp::CHECK } else { tcp::CHECK };
    let mut old = 0u16;
    let size = size_of::<u16>() as u32;
    if at + size > outer.end || frame.load(at, &mut old, size).is_err() {
        return Ok(0);
    }
    let new = update(old, difference);
    let new = if inner.proto == PROTO_UDP { udp_check(old, new) } else { new };
    frame.store_all(at, &new)?;
    Ok(replace16(old, new))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_that_its_receiver_does_not_get_there() {
        for kind in 0..=u8::MAX {
            for code in 0..=u8::MAX {
                assert_eq!(V4::is_too_big(kind, code), (kind, code) == (3, 4), "{kind} {code}");
                assert_eq!(V6::is_too_big(kind, code), kind == 2, "{kind} {code}");
                // RFC 792: type 3, whose code 4 asks for smaller packets. RFC 4443: type 1.
                let v4 = (kind, code) != (3, 4) && kind == 3;
                assert_eq!(V4::is_unreachable(kind, code), v4, "{kind} {code}");
                assert_eq!(V6::is_unreachable(kind, code), kind == 1, "{kind} {code}");
            }
            assert_eq!(V4::is_error(kind), [3, 11, 12].contains(&kind), "{kind}");
            assert_eq!(V6::is_error(kind), [1, 2, 3, 4].contains(&kind), "{kind}");
        }
    }
}
