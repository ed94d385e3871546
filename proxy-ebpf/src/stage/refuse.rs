//! Answers to packets that cannot be forwarded: ICMP or ICMPv6 "port unreachable" if the destination has no endpoint
//! (kube-proxy contract: no-endpoint verdicts), "too big", "time exceeded" (RFC 1812, 5.3.1), or what the kernel says
//! without a route. The source of an answer is the original destination, or this node for the last two; it leaves by the device on which
//! the packet arrived.
//!
//! Most packets are quoted whole, also for a technical reason: a packet from a local virtual device may still lack its
//! transport checksum (`CHECKSUM_PARTIAL`), and the kernel may fill it in later, inside the quote. The sum over a segment
//! with a correct checksum depends on the pseudo header only. So the ICMP checksum can be computed without reading the
//! payload, for a segment that has its checksum and for one that will get it. Packets that are too long to be quoted whole,
//! SCTP packets, and UDP packets that are without a checksum or that the kernel will split are truncated, and the quote is read.

use core::ptr::read_volatile;

use proxy_common::csum::{fold, pseudo_sum, sum_words};
use proxy_common::reason::Reason;
use proxy_common::{PROTO_ICMP, PROTO_ICMPV6, PROTO_SCTP, PROTO_UDP, V4, V6};

use super::{forward, limit};
use crate::context::{Packet, PacketCtx, QUOTE};
use crate::env::{Counters, ERRORS, RateLimit, Words};
use crate::frame::{Frame, HelperFailed, Route};
use crate::net::{IPV4_MORE, udp};
use crate::parse::Parse;
use crate::report;
use crate::shared::opaque;
use crate::step::Step;

/// Bytes of an ICMP header.
const ICMP: usize = 8;
/// Time to live, or hop limit, of the answer.
pub(super) const HOPS: u8 = 64;
/// Type of service of an ICMP error: "internetwork control" (RFC 1812, 4.3.2.5).
const TOS: u8 = 0xc0;

/// Type, code and second word of an ICMP answer.
#[derive(Clone, Copy)]
pub struct Message {
    /// Type and code.
    kind: [u8; 2],
    /// The second word of the ICMP header, in network byte order.
    rest: u32,
}

/// ICMP answers that a CPU may send per second, and [`BURST`] at once: the kernel's own limits
/// (`net.ipv4.icmp_msgs_per_sec`, `net.ipv4.icmp_msgs_burst`).
const RATE: u32 = 1000;
/// See [`RATE`].
const BURST: u32 = 50;

/// Whether this CPU may send one more answer; `bucket`: [`ERRORS`] or [`ECHO_REPLIES`](crate::env::ECHO_REPLIES). As in the kernel,
/// "too big" is not limited: without this message, no large packet reaches its destination.
#[inline(always)]
pub(super) fn may_answer<M: RateLimit>(maps: M, bucket: u32) -> bool {
    let Some(time) = maps.time() else { return false };
    limit::take(maps, bucket, RATE, BURST, time)
}

/// Why a packet is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The destination has no endpoint.
    PortUnreachable,
    /// The packet is larger than the MTU of the device that would forward it.
    TooBig,
    /// The packet's time to live has expired.
    TimeExceeded,
    /// The packet has no route.
    Unreachable,
}

/// Tells the client by ICMP why its packet cannot be forwarded.
#[inline(always)]
pub fn refuse<M, F>(maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>, refusal: Refusal) -> Step
where
    M: RateLimit + Counters,
    M::Family: Refuse,
    F: Frame,
{
    let mut message = <M::Family as Refuse>::PORT_UNREACHABLE;
    if refusal != Refusal::PortUnreachable {
        let reason = match refusal {
            Refusal::TooBig => Reason::PacketTooBig,
            Refusal::TimeExceeded => Reason::TtlExceeded,
            _ => Reason::Unreachable,
        };
        report::refused(maps, frame, ctx, 0, reason);
        if ctx.packet.is_later_fragment() {
            // The sender gets the error for the first fragment (RFC 1122, 3.2.2).
            return Step::Drop;
        }
        match refusal {
            Refusal::TooBig => message = <M::Family as Refuse>::too_big(ctx.route.mtu),
            Refusal::TimeExceeded => message = <M::Family as Refuse>::HOP_LIMIT_EXCEEDED,
            _ => message.kind[1] = ctx.route.mtu as u8,
        }
    }
    if refusal != Refusal::TooBig && !may_answer(maps, ERRORS) {
        return Step::DropFor(Reason::RejectLimited);
    }
    // A router answers with its own address (RFC 1812, 4.3.2.4).
    // A process of the node gets the answer on the uplink, where the kernel drops packets from its own address.
    let is_routers =
        matches!(refusal, Refusal::TimeExceeded | Refusal::Unreachable) && !frame.is_local_origin();
    let source = if is_routers { maps.node().map(|node| &node.source) } else { None };
    let by_stack = maps.has_ipsec_policy(&ctx.packet.back());
    match answer::<F, M::Family>(frame, ctx, message, source, by_stack) {
        Ok(verdict) => Step::Sent(verdict),
        Err(HelperFailed) => Step::DropFor(Reason::RejectFailed),
    }
}

/// A family with ICMP answers for refused packets.
pub trait Refuse: Parse {
    /// The message for a destination without an endpoint.
    const PORT_UNREACHABLE: Message;
    /// The message for a packet whose time to live has expired.
    const HOP_LIMIT_EXCEEDED: Message;
    /// Returns the message for a packet that is larger than `mtu`, the MTU of the next link.
    fn too_big(mtu: u32) -> Message;
    /// The IP and ICMP headers of an answer, in memory order.
    type Headers;
    /// Length of these headers in bytes.
    const HEADERS: usize;
    /// Bytes of the longest packet that is quoted whole, so that every link can carry the answer (RFC 1812, RFC 4443).
    const WHOLE: u32;
    /// Returns the headers of an answer to `packet` that quotes `quoted` bytes with the sum `sum`.
    fn headers(packet: &Packet<Self::Words>, quoted: u32, sum: u64, message: Message) -> Self::Headers;
    /// Returns what the packet's own IP header adds to a sum over the packet; `None` if the packet would have to be read.
    fn header_sum<F: Frame>(frame: F, packet: &Packet<Self::Words>) -> Option<u64>;
}

impl Refuse for V4 {
    type Headers = [u32; 7];
    const HEADERS: usize = 28;
    const WHOLE: u32 = 576 - 28;

    // RFC 792.
    const PORT_UNREACHABLE: Message = Message { kind: [3, 3], rest: 0 };
    const HOP_LIMIT_EXCEEDED: Message = Message { kind: [11, 0], rest: 0 };

    // RFC 1191, 4: the lower 16 bits hold the MTU.
    #[inline(always)]
    fn too_big(mtu: u32) -> Message {
        Message { kind: [3, 4], rest: (mtu & 0xffff).to_be() }
    }

    #[inline(always)]
    fn headers(packet: &Packet<[u32; 1]>, quoted: u32, sum: u64, message: Message) -> [u32; 7] {
        let [l0, l1] = (Self::HEADERS as u16 + quoted as u16).to_be_bytes();
        let ([src], [dst]) = (packet.key.dst, packet.key.src);
        let [kind, code] = message.kind;
        // 0x40: "don't fragment"; such a packet needs no identification (RFC 6864).
        let ip_sum = u64::from(u16::from_ne_bytes([0x45, TOS]))
            + u64::from(u16::from_ne_bytes([l0, l1]))
            + u64::from(u16::from_ne_bytes([0x40, 0]))
            + u64::from(u16::from_ne_bytes([HOPS, PROTO_ICMP]))
            + sum_words(&packet.key.src)
            + sum_words(&packet.key.dst);
        let [c0, c1] = (!fold(ip_sum)).to_ne_bytes();
        let icmp_sum = u64::from(u16::from_ne_bytes(message.kind)) + u64::from(message.rest) + sum;
        let [i0, i1] = (!fold(icmp_sum)).to_ne_bytes();
        [
            u32::from_ne_bytes([0x45, TOS, l0, l1]),
            u32::from_ne_bytes([0, 0, 0x40, 0]),
            u32::from_ne_bytes([HOPS, PROTO_ICMP, c0, c1]),
            src,
            dst,
            u32::from_ne_bytes([kind, code, i0, i1]),
            message.rest,
        ]
    }

    #[inline(always)]
    fn header_sum<F: Frame>(frame: F, _packet: &Packet<[u32; 1]>) -> Option<u64> {
        let mut fragment = 0u16;
        frame.load(frame.link_header() as u32 + 6, &mut fragment, size_of::<u16>() as u32).ok()?;
        // The sum over a header with a correct checksum, options included, is zero. A fragment is excluded, since the
        // transport checksum covers the whole packet.
        if u16::from_be(fragment) & IPV4_MORE == 0 { Some(0) } else { None }
    }
}

/// IPv6 and ICMPv6 headers of an answer.
#[repr(C)]
pub struct Headers6 {
    start: [u32; 2],
    src: [u32; 4],
    dst: [u32; 4],
    icmp: [u32; ICMP / 4],
}

impl Refuse for V6 {
    type Headers = Headers6;
    const HEADERS: usize = 48;
    const WHOLE: u32 = 1280 - 48;

    // RFC 4443, 3.1.
    const PORT_UNREACHABLE: Message = Message { kind: [1, 4], rest: 0 };
    // RFC 4443, 3.3.
    const HOP_LIMIT_EXCEEDED: Message = Message { kind: [3, 0], rest: 0 };

    // RFC 4443, 3.2.
    #[inline(always)]
    fn too_big(mtu: u32) -> Message {
        Message { kind: [2, 0], rest: mtu.to_be() }
    }

    #[inline(always)]
    fn headers(packet: &Packet<[u32; 4]>, quoted: u32, sum: u64, message: Message) -> Headers6 {
        let length = ICMP as u32 + quoted;
        let [l0, l1] = (length as u16).to_be_bytes();
        let [kind, code] = message.kind;
        let sum = pseudo_sum(&packet.key.src, &packet.key.dst, PROTO_ICMPV6, length)
            + u64::from(u16::from_ne_bytes(message.kind))
            + u64::from(message.rest)
            + sum;
        let [c0, c1] = (!fold(sum)).to_ne_bytes();
        Headers6 {
            start: [u32::from_ne_bytes([0x60, 0, 0, 0]), u32::from_ne_bytes([l0, l1, PROTO_ICMPV6, HOPS])],
            src: packet.key.dst,
            dst: packet.key.src,
            icmp: [u32::from_ne_bytes([kind, code, c0, c1]), message.rest],
        }
    }

    #[inline(always)]
    fn header_sum<F: Frame>(frame: F, packet: &Packet<[u32; 4]>) -> Option<u64> {
        let link = frame.link_header();
        if packet.l4 as usize != link + Self::HEADER {
            return None;
        }
        let mut start = [0u32; 2];
        frame.load(link as u32, &mut start, size_of::<[u32; 2]>() as u32).ok()?;
        let [first, second] = start;
        Some(u64::from(first) + u64::from(second) + sum_words(&packet.key.src) + sum_words(&packet.key.dst))
    }
}

/// Returns the sum over the whole packet; `None` if the payload would have to be read.
#[inline(always)]
fn whole_sum<F: Frame, Fam: Refuse>(frame: F, packet: &Packet<Fam::Words>) -> Option<u64> {
    if packet.length > Fam::WHOLE || packet.key.proto == PROTO_SCTP {
        return None;
    }
    if packet.key.proto == PROTO_UDP {
        let mut check = 0u16;
        frame.load(packet.l4 + udp::CHECK, &mut check, size_of::<u16>() as u32).ok()?;
        // The kernel makes no room in a UDP packet that it will split (`bpf_skb_net_grow`).
        if check == 0 || frame.gso_size() != 0 {
            return None;
        }
    }
    let segment = packet.length - (packet.l4 - frame.link_header() as u32);
    let pseudo = pseudo_sum(&packet.key.src, &packet.key.dst, packet.key.proto, segment);
    Some(Fam::header_sum(frame, packet)? + u64::from(!fold(pseudo)))
}

/// A sum that no packet has.
const UNKNOWN: u64 = u64::MAX;

/// Turns the packet into its own answer and sends it back. Returns the program's verdict.
#[inline(always)]
fn answer<F: Frame, Fam: Refuse>(
    frame: F,
    ctx: &mut PacketCtx<Fam::Words>,
    message: Message,
    source: Option<&Fam::Words>,
    by_stack: bool,
) -> Result<i32, HelperFailed> {
    let link = frame.link_header();
    // A number that is always defined: the compiler would keep the payload of an `Option` on the stack.
    let sum = opaque(whole_sum::<F, Fam>(frame, &ctx.packet).unwrap_or(UNKNOWN));
    if let Some(source) = source {
        ctx.packet.key.dst = *source;
    }
    if sum == UNKNOWN {
        quote_in_part::<F, Fam>(frame, ctx, message)?;
    } else {
        frame.make_room(Fam::HEADERS as u16)?;
        let headers = Fam::headers(&ctx.packet, ctx.packet.length, sum, message);
        frame.store_all(link as u32, &headers)?;
    }
    send_back(frame, by_stack)
}

/// Sends a packet that was turned into its own answer out of the device on which it arrived. Returns the program's verdict.
#[inline(always)]
pub(super) fn send_back<F: Frame>(frame: F, by_stack: bool) -> Result<i32, HelperFailed> {
    if by_stack && !frame.is_local_origin() {
        return forward::send_as(frame, &Route::BY_STACK, frame.ethertype() as u16);
    }
    if frame.link_header() != 0 {
        let mut addresses = [0u16; 6];
        frame.load(0, &mut addresses, size_of::<[u16; 6]>() as u32)?;
        let [d0, d1, d2, s0, s1, s2] = addresses;
        frame.store_all(0, &[s0, s1, s2, d0, d1, d2])?;
    }
    // A client on this node gets the answer as if it had arrived on the device.
    let (ifindex, own) = (frame.ifindex(), frame.is_local_origin());
    Ok(if own { frame.redirect_ingress(ifindex) } else { frame.redirect(ifindex) })
}

/// Builds the answer to a packet that is quoted in part.
#[inline(never)]
fn quote_in_part<F: Frame, Fam: Refuse>(
    frame: F,
    ctx: &mut PacketCtx<Fam::Words>,
    message: Message,
) -> Result<(), HelperFailed> {
    let link = frame.link_header();
    ctx.quote = [0; QUOTE / size_of::<u32>()];
    let clamped = if ctx.packet.length > QUOTE as u32 { QUOTE as u32 } else { ctx.packet.length };
    // The bound has to be part of the value: verifiers before Linux 6.4 lose the result of a comparison if the compiler
    // keeps the number on the stack. The read is volatile, so that the compiler does not know the bound already and remove
    // the mask.
    // SAFETY: reads a local variable.
    let clamped = unsafe { read_volatile(&raw const clamped) };
    let quoted = (clamped.wrapping_sub(1) & (QUOTE as u32 - 1)) + 1;
    frame.load(link as u32, &mut ctx.quote, quoted)?;
    // The rest of the buffer is zero and adds nothing to the sum.
    let sum = frame.sum_of(&ctx.quote);
    frame.replace((link + Fam::HEADERS) as u32 + quoted, ctx.packet.l4)?;
    let headers = Fam::headers(&ctx.packet, quoted, sum, message);
    frame.store_all(link as u32, &headers)?;
    frame.store((link + Fam::HEADERS) as u32, &ctx.quote, quoted)
}
