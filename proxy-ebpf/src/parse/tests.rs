use super::*;
use crate::net::ETHERNET;
use proxy_common::conntrack::tcp;

extern crate std;
use std::vec::Vec;

use proptest::prelude::*;
use proxy_common::PROTO_SCTP;

fn bounds(bytes: &[u8]) -> Bounds {
    let data = bytes.as_ptr() as usize;
    Bounds { data, end: data + bytes.len(), frame: bytes.len() }
}

/// [`walk_extensions`](crate::header::walk_extensions) of a packet in a slice.
fn extensions(bytes: &[u8]) -> impl Fn(u8, u32) -> u64 + '_ {
    move |proto, offset| {
        crate::header::walk(proto, offset, |at| bytes.get(at as usize..)?.first_chunk::<4>().copied())
    }
}

/// Bytes at an address at which the IP header after an Ethernet header is aligned, as in a socket buffer.
struct Aligned(Vec<u32>, usize);

impl Aligned {
    fn new(bytes: &[u8]) -> Self {
        let mut words = std::vec![0u32; bytes.len().div_ceil(4) + 1];
        // SAFETY: the words have room for the bytes and the offset of two.
        unsafe {
            words.as_mut_ptr().cast::<u8>().add(2).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
        Self(words, bytes.len())
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: as in `new`.
        unsafe { core::slice::from_raw_parts(self.0.as_ptr().cast::<u8>().add(2), self.1) }
    }
}

fn parse4(bytes: &[u8]) -> Result<Packet<[u32; 1]>, Stop> {
    let aligned = Aligned::new(bytes);
    let mut packet = Packet::EMPTY;
    V4::parse(bounds(aligned.bytes()), ETHERNET, &mut packet, true, extensions(aligned.bytes()))
        .map(|()| packet)
}

fn parse6(bytes: &[u8]) -> Result<Packet<[u32; 4]>, Stop> {
    let aligned = Aligned::new(bytes);
    let mut packet = Packet::EMPTY;
    V6::parse(bounds(aligned.bytes()), ETHERNET, &mut packet, true, extensions(aligned.bytes()))
        .map(|()| packet)
}

const TCP_SYN: [u8; 20] = [0x9c, 0x40, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0];
const UDP: [u8; 8] = [0x9c, 0x40, 0, 53, 0, 8, 0, 0];

fn ipv4(proto: u8, options: &[u8], l4: &[u8]) -> Vec<u8> {
    let mut bytes = std::vec![0u8; ETHERNET];
    let header = 20 + options.len();
    bytes.extend([0x40 | (header / 4) as u8, 0]);
    bytes.extend(((header + l4.len()) as u16).to_be_bytes());
    bytes.extend([0, 0, 0x40, 0, 64, proto, 0xab, 0xcd, 10, 0, 0, 1, 10, 96, 0, 1]);
    bytes.extend(options);
    bytes.extend(l4);
    bytes
}

fn ipv6(first: u8, extensions: &[u8], l4: &[u8]) -> Vec<u8> {
    let mut bytes = std::vec![0u8; ETHERNET];
    bytes.extend([0x60, 0, 0, 0]);
    bytes.extend(((extensions.len() + l4.len()) as u16).to_be_bytes());
    bytes.extend([first, 64]);
    bytes.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    bytes.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
    bytes.extend(extensions);
    bytes.extend(l4);
    bytes
}

#[test]
fn a_tcp_syn_is_read() {
    let packet = parse4(&ipv4(PROTO_TCP, &[], &TCP_SYN)).unwrap();
    assert_eq!(packet.key.src[0].to_ne_bytes(), [10, 0, 0, 1]);
    assert_eq!(packet.key.dst[0].to_ne_bytes(), [10, 96, 0, 1]);
    assert_eq!((packet.key.src_port, packet.key.dst_port), (40_000, 80));
    assert_eq!((packet.key.proto, packet.tcp_flags), (PROTO_TCP, 5 << 12 | tcp::SYN));
    assert_eq!((packet.l4, packet.length), (34, 40));
    assert_eq!(packet.ip_check.to_ne_bytes(), [0xab, 0xcd]);
}

#[test]
fn options_move_the_ports() {
    let packet = parse4(&ipv4(PROTO_UDP, &[1; 40], &UDP)).unwrap();
    assert_eq!((packet.l4, packet.key.dst_port), (ETHERNET as u32 + 60, 53));
}

#[test]
fn other_protocols_are_not_ours() {
    assert_eq!(parse4(&ipv4(PROTO_ICMP, &[], &TCP_SYN)), Err(Stop::Control));
    assert_eq!(parse6(&ipv6(PROTO_ICMPV6, &[], &TCP_SYN)), Err(Stop::Control));
    for proto in [2, 47, 50] {
        assert_eq!(parse4(&ipv4(proto, &[], &TCP_SYN)), Err(Stop::NotOurs), "{proto}");
        if proto != 50 {
            assert_eq!(parse6(&ipv6(proto, &[], &TCP_SYN)), Err(Stop::NotOurs), "{proto}");
        }
    }
}

#[test]
fn sctp_waits_for_the_second_try() {
    let mut chunk = [0u8; 16];
    chunk[..4].copy_from_slice(&[0x9c, 0x40, 0, 80]);
    for (kind, flags) in
        [(1, tcp::SYN), (2, tcp::SYN | tcp::ACK), (6, tcp::RST), (7, tcp::FIN), (0, tcp::ACK)]
    {
        assert_eq!(sctp::flags(kind), flags);
    }
    // The flags of SCTP are read later, after `parse`.
    let packet = parse4(&ipv4(PROTO_SCTP, &[], &chunk)).unwrap();
    assert_eq!((packet.key.src_port, packet.key.dst_port, packet.tcp_flags), (40_000, 80, 0));
    assert!(parse6(&ipv6(PROTO_SCTP, &[], &chunk)).is_ok());
    assert_eq!(parse4(&ipv4(PROTO_SCTP, &[], &chunk[..15])), Err(Stop::Refused(Reason::Malformed)));
    let aligned = Aligned::new(&ipv4(PROTO_SCTP, &[], &chunk));
    let mut packet = Packet::EMPTY;
    assert_eq!(
        V4::parse(bounds(aligned.bytes()), ETHERNET, &mut packet, false, extensions(aligned.bytes())),
        Err(Stop::Retry)
    );
}

#[test]
fn lying_headers_are_malformed() {
    let malformed = Err(Stop::Refused(Reason::Malformed));
    let whole = ipv4(PROTO_TCP, &[], &TCP_SYN);
    let with = |offset: usize, value: u8| {
        let mut bytes = whole.clone();
        bytes[ETHERNET + offset] = value;
        parse4(&bytes)
    };
    assert_eq!(with(0, 0x44), malformed, "a header of 16 bytes");
    assert_eq!(with(0, 0x65), malformed, "another version");
    assert_eq!(with(3, 41), malformed, "more bytes than came");
    assert_eq!(with(3, 19), malformed, "fewer bytes than the header");
    assert_eq!(with(3, 39), malformed, "fewer bytes than a TCP header");
    assert_eq!(parse4(&ipv4(PROTO_UDP, &[], &UDP[..7])), malformed);
    assert_eq!(parse6(&ipv6(PROTO_UDP, &[], &UDP[..7])), Err(Stop::Refused(Reason::Malformed)));
}

#[test]
fn the_end_of_the_readable_part_is_short() {
    for length in 0..ETHERNET + 20 {
        assert_eq!(parse4(&ipv4(PROTO_TCP, &[], &TCP_SYN)[..length]), Err(Stop::Retry), "{length}");
    }
    let aligned = Aligned::new(&ipv4(PROTO_TCP, &[], &TCP_SYN));
    let mut partly = bounds(aligned.bytes());
    partly.end -= 10;
    let mut packet = Packet::EMPTY;
    assert_eq!(V4::parse(partly, ETHERNET, &mut packet, true, extensions(aligned.bytes())), Err(Stop::Retry));
}

#[test]
fn a_first_fragment_has_ports_and_a_later_one_has_not() {
    let mut bytes = ipv4(PROTO_UDP, &[], &UDP);
    bytes[ETHERNET + 6] = 0x20;
    let parse = |bytes: &[u8], walk| {
        let aligned = Aligned::new(bytes);
        let mut packet = Packet::EMPTY;
        let result =
            V4::parse(bounds(aligned.bytes()), ETHERNET, &mut packet, walk, extensions(aligned.bytes()));
        (result, packet.key.dst_port)
    };
    assert_eq!(parse(&bytes, false).0, Err(Stop::Retry), "the first try leaves fragments alone");
    assert_eq!(parse(&bytes, true), (Err(Stop::First), 53));
    bytes[ETHERNET + 7] = 1;
    assert_eq!(parse4(&bytes), Err(Stop::Refused(Reason::Fragment)));
    let fragment = |offset: u8| [PROTO_UDP, 0, 0, offset | 1, 0, 0, 0, 7];
    assert_eq!(parse6(&ipv6(extension::FRAGMENT, &fragment(0), &UDP)), Err(Stop::First));
    let whole = [PROTO_UDP, 0, 0, 0, 0, 0, 0, 7];
    assert!(parse6(&ipv6(extension::FRAGMENT, &whole, &UDP)).is_ok(), "one piece (RFC 6946)");
    assert_eq!(parse6(&ipv6(extension::FRAGMENT, &fragment(8), &UDP)), Err(Stop::Refused(Reason::Fragment)));
}

#[test]
fn first_fragment_with_half_a_header_hides_its_ports() {
    for (proto, length) in [(PROTO_TCP, 8), (PROTO_TCP, 19), (PROTO_UDP, 7), (PROTO_SCTP, 11)] {
        let part = &TCP_SYN[..length];
        let mut bytes = ipv4(proto, &[], part);
        assert_eq!(parse4(&bytes), Err(Stop::Refused(Reason::Malformed)), "{proto}");
        bytes[ETHERNET + 6] = 0x20;
        assert_eq!(parse4(&bytes), Err(Stop::Refused(Reason::HiddenPorts)), "{proto}");
        let bytes = ipv6(extension::FRAGMENT, &[proto, 0, 0, 1, 0, 0, 0, 7], part);
        assert_eq!(parse6(&bytes), Err(Stop::Refused(Reason::HiddenPorts)), "{proto}");
    }
}

#[test]
fn seventh_extension_header_hides_the_ports() {
    for (count, parsed) in [(6, Ok(())), (7, Err(Stop::Refused(Reason::HiddenPorts)))] {
        let mut headers = Vec::new();
        for left in (0..count).rev() {
            let next = if left == 0 { PROTO_TCP } else { extension::DESTINATION };
            headers.extend([next, 0, 0, 0, 0, 0, 0, 0]);
        }
        assert_eq!(parse6(&ipv6(extension::DESTINATION, &headers, &TCP_SYN)).map(drop), parsed);
    }
}

#[test]
fn extension_headers_are_walked() {
    let mut headers = Vec::new();
    headers.extend([extension::ROUTING, 0, 0, 0, 0, 0, 0, 0]);
    headers.extend([extension::AUTHENTICATION, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    headers.extend([PROTO_TCP, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    headers.extend([0; 12]);
    let packet = parse6(&ipv6(extension::HOP_BY_HOP, &headers, &TCP_SYN));
    // The authentication header counts in words of four bytes, less two: (4 + 2) * 4 = 24 bytes.
    let expected = ETHERNET + 40 + 8 + 16 + 24;
    assert_eq!(packet.map(|p| (p.l4, p.key.dst_port)), Ok((expected as u32, 80)));
}

#[test]
fn extension_headers_wait_for_the_second_try() {
    let aligned = Aligned::new(&ipv6(extension::ROUTING, &[PROTO_UDP, 0, 0, 0, 0, 0, 0, 0], &UDP));
    let mut packet = Packet::EMPTY;
    assert_eq!(
        V6::parse(bounds(aligned.bytes()), ETHERNET, &mut packet, false, extensions(aligned.bytes())),
        Err(Stop::Retry)
    );
    assert_eq!(
        V6::parse(bounds(aligned.bytes()), ETHERNET, &mut packet, true, extensions(aligned.bytes())),
        Ok(())
    );
    let aligned = Aligned::new(&ipv6(59, &[], &UDP));
    assert_eq!(
        V6::parse(bounds(aligned.bytes()), ETHERNET, &mut packet, false, extensions(aligned.bytes())),
        Err(Stop::NotOurs)
    );
}

#[test]
fn a_stated_length_of_zero_is_a_segment_not_cut_yet() {
    let mut bytes = ipv4(PROTO_TCP, &[], &TCP_SYN);
    bytes[ETHERNET + 2..ETHERNET + 4].fill(0);
    assert_eq!(parse4(&bytes).map(|p| p.length), Ok(40));
    let mut bytes = ipv6(PROTO_TCP, &[], &TCP_SYN);
    bytes[ETHERNET + 4..ETHERNET + 6].fill(0);
    assert_eq!(parse6(&bytes).map(|p| p.length), Ok(60));
}

proptest! {
    #[test]
    fn whatever_is_read_is_inside(mut bytes in prop::collection::vec(any::<u8>(), 0..200), version: bool) {
        if let Some(first) = bytes.get_mut(ETHERNET) {
            *first = if version { 0x45 } else { 0x60 };
        }
        if let Some(proto) = bytes.get_mut(ETHERNET + if version { 9 } else { 6 }) {
            *proto = [PROTO_TCP, PROTO_UDP, 0, 43, 44, 51, 60][usize::from(*proto) % 7];
        }
        if let Ok(packet) = parse4(&bytes) {
            prop_assert!(packet.l4 as usize + 8 <= bytes.len());
            prop_assert!(ETHERNET + packet.length as usize <= bytes.len());
        }
        if let Ok(packet) = parse6(&bytes) {
            prop_assert!(packet.l4 as usize + 8 <= bytes.len());
            prop_assert!(ETHERNET + packet.length as usize <= bytes.len());
        }
    }
}
