//! The answer to a segment of a connection whose endpoint left a Service with removal policy `reset`: a TCP RST from the
//! original destination, sent out of the device on which the segment arrived. The segment is turned into the RST.
//!
//! A connection that moves to another endpoint ([`is_moving`]) is reset at both ends, and only the client's next request has the
//! sequence number that its endpoint accepts. So the request itself becomes the RST for the endpoint, and its retransmission, after
//! 200 ms or more, that for the client.

use proxy_common::conntrack::{is_moving, tcp};
use proxy_common::csum::{fold, pseudo_sum, sum_words};
use proxy_common::reason::Reason;
use proxy_common::{PROTO_TCP, V4, V6};

use super::refuse::send_back;
use crate::context::{Packet, PacketCtx};
use crate::env::{Counters, Words};
use crate::frame::{Checksum, Frame, HelperFailed};
use crate::net::{TcpHeader, tcp as tcp_check};
use crate::parse::Parse;
use crate::report;
use crate::step::Step;

/// Time to live, or hop limit, of the answer.
const HOPS: u8 = 64;
/// Bytes of a TCP header without options.
const TCP: usize = size_of::<TcpHeader>();

/// A family whose connections can be reset.
pub trait Reset: Parse {
    /// The IP header of the answer, as words.
    type IpHeader;
    /// Returns the IP header of the answer to `packet`.
    fn ip_header(packet: &Packet<Self::Words>) -> Self::IpHeader;
}

impl Reset for V4 {
    type IpHeader = [u32; 5];

    #[inline(always)]
    fn ip_header(packet: &Packet<[u32; 1]>) -> [u32; 5] {
        let [l0, l1] = ((Self::HEADER + TCP) as u16).to_be_bytes();
        let ([src], [dst]) = (packet.key.dst, packet.key.src);
        // 0x40: "don't fragment"; such a packet needs no identification (RFC 6864).
        let (start, flags) = (u32::from_ne_bytes([0x45, 0, l0, l1]), u32::from_ne_bytes([0, 0, 0x40, 0]));
        let sum = u64::from(start)
            + u64::from(flags)
            + u64::from(u32::from_ne_bytes([HOPS, PROTO_TCP, 0, 0]))
            + sum_words(&packet.key.src)
            + sum_words(&packet.key.dst);
        let [c0, c1] = (!fold(sum)).to_ne_bytes();
        [start, flags, u32::from_ne_bytes([HOPS, PROTO_TCP, c0, c1]), src, dst]
    }
}

impl Reset for V6 {
    type IpHeader = [u32; 10];

    #[inline(always)]
    fn ip_header(packet: &Packet<[u32; 4]>) -> [u32; 10] {
        let [l0, l1] = (TCP as u16).to_be_bytes();
        let ([s0, s1, s2, s3], [d0, d1, d2, d3]) = (packet.key.dst, packet.key.src);
        let start = [u32::from_ne_bytes([0x60, 0, 0, 0]), u32::from_ne_bytes([l0, l1, PROTO_TCP, HOPS])];
        [start[0], start[1], s0, s1, s2, s3, d0, d1, d2, d3]
    }
}

/// Returns the TCP header of the answer, as words in memory order. Its sequence number is the one that the client expects
/// next.
#[inline(always)]
fn tcp_header<Fam: Reset>(packet: &Packet<Fam::Words>) -> [u32; TCP / 4] {
    let ([p0, p1], [q0, q1]) = (packet.key.dst_port.to_be_bytes(), packet.key.src_port.to_be_bytes());
    let (ports, seq) = (u32::from_ne_bytes([p0, p1, q0, q1]), packet.ack.to_be());
    let flags = u32::from_ne_bytes([(TCP as u8 / 4) << 4, tcp::RST as u8, 0, 0]);
    let pseudo = pseudo_sum(&packet.key.dst, &packet.key.src, PROTO_TCP, TCP as u32);
    let [c0, c1] = (!fold(pseudo + u64::from(ports) + u64::from(seq) + u64::from(flags))).to_ne_bytes();
    [ports, seq, 0, flags, u32::from_ne_bytes([c0, c1, 0, 0])]
}

/// Resets the connection of a segment at its client. A segment without ACK gets no RST, since the numbers of the RST would
/// have to be computed from the length of the payload; every segment but the first of a connection has ACK.
#[inline(always)]
pub fn reset<M: Counters<Family: Reset>, F: Frame>(maps: M, frame: F, ctx: &PacketCtx<Words<M>>) -> Step {
    let reason = if is_moving(ctx.plan.bits) { Reason::Rebalanced } else { Reason::EndpointLeft };
    report::refused(maps, frame, ctx, ctx.service, reason);
    let packet = &ctx.packet;
    if packet.tcp_flags & tcp::ACK == 0 || packet.is_later_fragment() {
        return Step::Drop;
    }
    let by_stack = maps.has_ipsec_policy(&packet.back());
    match answer::<F, M::Family>(frame, packet, by_stack) {
        Ok(verdict) => Step::Sent(verdict),
        Err(HelperFailed) => Step::DropFor(Reason::RejectFailed),
    }
}

/// Turns a client's request on a connection that moves into a RST for its endpoint. The RST continues the flow, and closes it.
#[inline(always)]
pub fn end_at_backend<M: Counters, F: Frame>(_maps: M, frame: F, ctx: &mut PacketCtx<Words<M>>) -> Step {
    let (mut old, at) = (0u32, ctx.packet.l4 + FLAGS);
    if frame.load(at, &mut old, size_of::<u32>() as u32).is_err() {
        return Step::DropFor(Reason::RewriteFailed);
    }
    let [offset, _, w0, w1] = old.to_ne_bytes();
    let flags = tcp::RST | tcp::ACK;
    let new = u32::from_ne_bytes([offset, flags as u8, w0, w1]);
    let corrected = frame.correct_word(ctx.packet.l4 + tcp_check::CHECK, old, new, Checksum::Always);
    if corrected.and_then(|()| frame.store_all(at, &new)).is_err() {
        return Step::DropFor(Reason::RewriteFailed);
    }
    ctx.packet.tcp_flags = ctx.packet.tcp_flags & !0xff | flags;
    Step::Continue
}

/// Offset of the word with the flags in a TCP header.
const FLAGS: u32 = 12;

/// Turns the segment into its own answer and sends it back. Returns the program's verdict.
#[inline(always)]
fn answer<F: Frame, Fam: Reset>(
    frame: F,
    packet: &Packet<Fam::Words>,
    by_stack: bool,
) -> Result<i32, HelperFailed> {
    let link = frame.link_header();
    let l4 = link + Fam::HEADER;
    frame.replace((l4 + TCP) as u32, packet.l4)?;
    frame.store_all(link as u32, &Fam::ip_header(packet))?;
    frame.store_all(l4 as u32, &tcp_header::<Fam>(packet))?;
    send_back(frame, by_stack)
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    fn packet<A: proxy_common::Address>(src: A, dst: A, ports: [u16; 2], ack: u32) -> Packet<A> {
        let mut packet = Packet::EMPTY;
        (packet.key.src, packet.key.dst) = (src, dst);
        [packet.key.src_port, packet.key.dst_port] = ports;
        (packet.ack, packet.tcp_flags) = (ack, tcp::ACK);
        packet
    }

    fn bytes(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    /// The sum over a segment with its pseudo header, from scratch.
    fn sum(ip: &[u8], segment: &[u8]) -> u16 {
        let pairs = |bytes: &[u8]| -> u64 {
            bytes.chunks(2).map(|pair| u64::from(u16::from_be_bytes([pair[0], pair[1]]))).sum()
        };
        let addresses = if ip[0] >> 4 == 4 { &ip[12..20] } else { &ip[8..40] };
        fold(pairs(addresses) + u64::from(PROTO_TCP) + segment.len() as u64 + pairs(segment))
    }

    fn is_right(ip: &[u8], segment: &[u8]) -> bool {
        sum(ip, segment) == 0xffff
    }

    proptest! {
        #[test]
        fn the_checksum_is_right(
            src: [u32; 4], dst: [u32; 4], ports: [u16; 2], ack: u32,
        ) {
            let four = packet([src[0]], [dst[0]], ports, ack);
            let (ip, segment) = (bytes(&V4::ip_header(&four)), bytes(&tcp_header::<V4>(&four)));
            prop_assert!(is_right(&ip, &segment), "{ip:?} {segment:?}");
            let words = ip.chunks(2).map(|pair| u64::from(u16::from_be_bytes([pair[0], pair[1]])));
            prop_assert_eq!(fold(words.sum()), 0xffff);
            let six = packet(src, dst, ports, ack);
            let (ip, segment) = (bytes(&V6::ip_header(&six)), bytes(&tcp_header::<V6>(&six)));
            prop_assert!(is_right(&ip, &segment), "{ip:?} {segment:?}");
            prop_assert_eq!(segment[4..8].to_vec(), ack.to_be_bytes().to_vec());
            prop_assert_eq!(segment[13], 4);
            prop_assert_eq!(segment[..2].to_vec(), ports[1].to_be_bytes().to_vec());
        }
    }
}
