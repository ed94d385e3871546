//! Answers to packets that are not forwarded: ICMP errors, built from scratch.

use std::net::IpAddr;

use super::parse::Segment;
use super::rewrite::Expected;
use super::rules;
use crate::forge::{ETHERNET, icmp, pseudo, sum};
use crate::scenario::{SCTP, UDP};

/// The message to the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    PortUnreachable,
    TooBig(usize),
    /// From this node, which has this address.
    TimeExceeded(IpAddr),
    /// The same, with the code that the route gives.
    Unreachable(IpAddr, u8),
}

/// Returns the answer to a packet, sent from the address that the packet was sent to, or from this node.
pub fn answer(input: &[u8], segment: &Segment, message: Message) -> Expected {
    let (orig_dst, dst) = (segment.dst.ip(), segment.src.ip());
    let src = match message {
        Message::TimeExceeded(node) | Message::Unreachable(node, _) => node,
        _ => orig_dst,
    };
    let (head, rest) = match (message, src) {
        (Message::PortUnreachable, IpAddr::V4(_)) => ([3, 3], 0),
        (Message::PortUnreachable, IpAddr::V6(_)) => ([1, 4], 0),
        (Message::TooBig(mtu), IpAddr::V4(_)) => ([3, 4], mtu as u32),
        (Message::TooBig(mtu), IpAddr::V6(_)) => ([2, 0], mtu as u32),
        (Message::TimeExceeded(_), IpAddr::V4(_)) => ([11, 0], 0),
        (Message::TimeExceeded(_), IpAddr::V6(_)) => ([3, 0], 0),
        (Message::Unreachable(_, code), IpAddr::V4(_)) => ([3, code], 0),
        (Message::Unreachable(_, code), IpAddr::V6(_)) => ([1, code], 0),
    };
    let is_whole = is_quoted_whole(input, segment);
    let quoted = if is_whole { segment.length() } else { segment.length().min(rules::QUOTE) };
    let quote = &input[ETHERNET..ETHERNET + quoted];
    let mut bytes = icmp(src, dst, head, rest, quote, 64);
    let message = bytes.len() - quoted - 8;
    bytes[..6].copy_from_slice(&input[6..12]);
    bytes[6..12].copy_from_slice(&input[..6]);
    if is_whole {
        // Bytes behind the packet stay.
        bytes.extend(&input[segment.end..]);
    }
    let mut expected = Expected::new(bytes);
    if is_whole {
        by_what_it_should_be(input, segment, message + 2, &mut expected);
    }
    expected
}

/// Whether a packet is quoted whole: only if its checksums give the sum over its bytes, which then need not be read.
fn is_quoted_whole(input: &[u8], segment: &Segment) -> bool {
    let l4 = segment.l4.unwrap_or_default();
    let is_unchecked = segment.proto == UDP && input[l4 + 6..l4 + 8] == [0, 0];
    let is_v4 = segment.src.is_ipv4();
    let most = if is_v4 { 576 - 28 } else { 1280 - 48 };
    let is_plain = if is_v4 { !segment.is_first } else { l4 == ETHERNET + 40 };
    segment.length() <= most && segment.proto != SCTP && !is_unchecked && is_plain
}

/// Sets the checksum of an answer that quotes a whole packet. It assumes that the packet's own checksums are right, since a
/// device will complete unfinished ones. If they are wrong, the checksum of the answer is as wrong.
fn by_what_it_should_be(input: &[u8], segment: &Segment, at: usize, expected: &mut Expected) {
    let l4 = segment.l4.unwrap_or_default();
    let header = sum(&[&input[ETHERNET..l4]]);
    let there = &input[l4..segment.end];
    let transport = sum(&[&pseudo(segment.src.ip(), segment.dst.ip(), segment.proto, there.len()), there]);
    // All fields of the IPv6 header are known.
    let header = if segment.src.is_ipv4() { header } else { 0xffff };
    if (header, transport) == (0xffff, 0xffff) {
        return;
    }
    let check = u16::from_be_bytes([expected.bytes[at], expected.bytes[at + 1]]);
    // Ones' complement: the checksum is inverted, so adding the excess takes it out of the sum.
    let wrong = sum(&[&check.to_be_bytes(), &header.to_be_bytes(), &transport.to_be_bytes()]);
    expected.bytes[at..at + 2].copy_from_slice(&wrong.to_be_bytes());
    expected.loose.push(at);
}
