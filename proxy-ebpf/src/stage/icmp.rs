//! ICMP and ICMPv6 errors about translated packets. An error quotes the packet that it is about as its sender saw
//! it: the quote, and the error's own addresses, are translated back, so that path MTU discovery, traceroute and
//! "port unreachable" reach the socket that sent the packet.
//!
//! What is quoted may be short: eight bytes behind the IP header are all that a sender owes (RFC 792). The sums are
//! corrected by what is written, so they are as right as they came.

use proxy_common::csum::{replace16, replace32, update};
use proxy_common::flow::{DIRECTION_FORWARD, DIRECTION_REPLY, FlowKey, STATE_LOCAL, STATE_SNAT};
use proxy_common::prefilter::Role;
use proxy_common::reason::Reason;
use proxy_common::{Address, PROTO_ICMP, PROTO_ICMPV6, PROTO_SCTP, PROTO_TCP, PROTO_UDP, V4, V6};

use super::eject;
use super::forward::Routing;
use super::sctp;
use super::translate::{Rewrite, address_difference, ports, udp_check};
use crate::context::{PacketCtx, Tuple};
use crate::env::{FlowTable, Time, Words};
use crate::flow::track::{self, Tracked};
use crate::frame::{Fib, Frame, HelperFailed};
use crate::header::{Header, Read, same};
use crate::net::{tcp, udp};
use crate::step::Step;

/// Bytes of an ICMP header.
const ICMP: u32 = 8;
/// Bytes of a transport header that every quote has.
const QUOTED: u32 = 8;
/// Offset of the checksum in an ICMP header.
const CHECK: u32 = 2;

/// A family whose errors can be translated.
pub trait IcmpErrors: Rewrite + Read {
    /// The protocol of its errors.
    const PROTO: u8;
    /// Whether their checksum covers the addresses (RFC 4443, 2.3).
    const COVERS_ADDRESSES: bool;
    /// Whether a message of that type quotes a packet, and is no order to route otherwise.
    fn is_error(kind: u8) -> bool;
    /// Whether it says that the packet's destination cannot be reached, whatever the packet.
    fn is_unreachable(kind: u8, code: u8) -> bool;
}

impl IcmpErrors for V4 {
    const PROTO: u8 = PROTO_ICMP;
    const COVERS_ADDRESSES: bool = false;

    #[inline(always)]
    fn is_error(kind: u8) -> bool {
        // Destination unreachable, time exceeded, parameter problem (RFC 792).
        matches!(kind, 3 | 11 | 12)
    }

    #[inline(always)]
    fn is_unreachable(kind: u8, code: u8) -> bool {
        // But "fragmentation needed".
        kind == 3 && code != 4
    }
}

impl IcmpErrors for V6 {
    const PROTO: u8 = PROTO_ICMPV6;
    const COVERS_ADDRESSES: bool = true;

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
    /// Both ports of the quoted packet as they stand.
    ports: u32,
    /// Its sequence number, if it is a TCP segment that did not reach its destination.
    refused: Option<u32>,
}

impl<A: Address> Quote<A> {
    /// The key of a packet that goes the error's way.
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

/// Reads an error; `None` if the packet is none, or quotes too little.
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
    let inner = Fam::read(frame, outer.l4 + ICMP)?;
    let is_ours = matches!(inner.proto, PROTO_TCP | PROTO_UDP | PROTO_SCTP);
    // An error goes to whom the packet came from.
    if inner.is_later || !is_ours || inner.l4 + QUOTED > outer.end || !same(&inner.src, &outer.dst) {
        return None;
    }
    let mut start = [0u32; 2];
    frame.load(inner.l4, &mut start, QUOTED).ok()?;
    let [ports, seq] = start;
    let is_refused = inner.proto == PROTO_TCP && Fam::is_unreachable(kind, code);
    let refused = if is_refused { Some(u32::from_be(seq)) } else { None };
    Some(Quote { outer, inner, check: icmp[1], ports, refused })
}

/// The flow of packets that go the error's way. One that comes in may be about a reply, and goes to the backend; or about a
/// packet that was forwarded under an address of this node, and comes in as its reply would.
#[inline(always)]
fn find<M: FlowTable>(
    maps: M,
    quote: &Quote<Words<M>>,
    incoming: bool,
    time: Time,
) -> Option<(Tracked<M>, u8)> {
    let mut key = quote.key(DIRECTION_FORWARD);
    // The frontend of a direct flow is its backend.
    let may_be_reply = maps.may_be(Role::Frontend, &key.dst, key.dst_port, key.proto)
        || maps.may_be(Role::Backend, &key.dst, key.dst_port, key.proto);
    if incoming
        && may_be_reply
        && let Some(flow) = track::find_called(maps, &key, time)
    {
        return Some((flow, DIRECTION_FORWARD));
    }
    key.direction = DIRECTION_REPLY;
    if !maps.may_be(Role::Backend, &key.src, key.src_port, key.proto) {
        return None;
    }
    let flow = track::find_called(maps, &key, time)?;
    // What comes in as a reply does so only where the node is the client of its backend.
    (!incoming || flow.bits() & STATE_SNAT != 0).then_some((flow, DIRECTION_REPLY))
}

/// Translates an ICMP packet if it is an error about a packet of a flow. [`Step::Icmp`]: it is to be forwarded, and its
/// addresses are in `ctx`. [`Step::Unreachable`]: it is about the SYN of a flow whose reply key is in `ctx`, and nothing has
/// changed.
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
    // One after the other: of both at once the compiler spills what it need not define, and the verifier objects.
    let Some(quote) = read::<F, M::Family>(frame) else { return Step::Pass };
    let Some(time) = maps.time() else { return Step::Pass };
    let Some((flow, direction)) = find(maps, &quote, incoming, time) else { return Step::Pass };
    if direction == DIRECTION_REPLY
        && let Some(seq) = quote.refused
        && eject::is_about_syn(&flow, seq)
    {
        ctx.packet.key = quote.key(DIRECTION_REPLY);
        return Step::Unreachable;
    }
    let to = if direction == DIRECTION_FORWARD { flow.to_backend() } else { flow.to_client() };
    let Some(to) = to else { return Step::Pass };
    if translate::<F, M::Family>(frame, &quote, &to).is_err() {
        return Step::DropFor(Reason::RewriteFailed);
    }
    if !incoming || flow.bits() & (STATE_SNAT | STATE_LOCAL) != STATE_SNAT {
        return Step::Pass;
    }
    ctx.packet.key.src = sender(&quote, &to);
    ctx.packet.key.dst = to.dst;
    Step::Icmp
}

/// Finds the route of a translated error about a packet that was forwarded from here.
#[inline(always)]
pub fn forward_error<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Step
where
    M: Routing<F>,
    M::Family: IcmpErrors,
    F: Frame,
{
    let to = Tuple { src: ctx.packet.key.src, dst: ctx.packet.key.dst, src_port: 0, dst_port: 0 };
    let link = frame.link_header() as u32;
    if maps.find_route(frame, &to, frame.length() - link, &mut ctx.route) != Fib::Found {
        return Step::DropFor(Reason::NoRoute);
    }
    match <M::Family as Rewrite>::decrement_ttl(frame, link) {
        Ok(true) => Step::Forward,
        Ok(false) => Step::DropFor(Reason::TtlExceeded),
        Err(HelperFailed) => Step::DropFor(Reason::RewriteFailed),
    }
}

/// Whom the error is from: what the quoted packet's end says of itself; what a router on the way says stays its own.
#[inline(always)]
fn sender<A: Address>(quote: &Quote<A>, to: &Tuple<A>) -> A {
    if same(&quote.outer.src, &quote.inner.dst) { to.src } else { quote.outer.src }
}

/// Writes the error about a packet which, the error's way, becomes `to`.
#[inline(always)]
fn translate<F: Frame, Fam: IcmpErrors>(
    frame: F,
    quote: &Quote<Fam::Words>,
    to: &Tuple<Fam::Words>,
) -> Result<(), HelperFailed> {
    let (outer, inner) = (&quote.outer, &quote.inner);
    let src = sender(quote, to);
    let addresses = address_difference(&outer.src, &src) + address_difference(&outer.dst, &to.dst);
    Fam::store_addresses(frame, frame.link_header() as u32, outer.check, [&src, &to.dst], addresses)?;
    let mut sum = if Fam::COVERS_ADDRESSES { addresses } else { 0 };
    // The quoted packet went the other way.
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
    // A sum over the whole packet that a driver made stays: each checksum makes up for what it covers.
    frame.store_all(outer.l4 + CHECK, &update(quote.check, sum))
}

/// Corrects the quoted transport checksum if it is quoted, and gives what that adds to a sum.
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
