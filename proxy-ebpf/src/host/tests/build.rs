//! Builds packets of both families, with checksums that are computed from scratch.

use std::vec::Vec;

use proxy_common::{
    Address as _, Family, PROTO_ICMP, PROTO_ICMPV6, PROTO_SCTP, PROTO_TCP, PROTO_UDP, V4, V6,
};

use crate::pipeline::Ip;

/// Length of the Ethernet header, and so the offset of the IP header.
pub const ETHERNET: usize = 14;

/// Destination and source MAC address of all frames.
pub const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];

/// Computes the checksum of RFC 1071 over bytes.
pub fn checksum(parts: &[&[u8]]) -> u16 {
    let bytes: Vec<u8> = parts.concat();
    let mut sum = 0u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Returns the checksum of SCTP (RFC 9260, appendix A), computed bit by bit.
pub fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    !crc
}

/// What the tests need of an address family.
pub trait Net: Ip {
    const ICMP: u8;
    /// Type and code of "port unreachable".
    const UNREACHABLE: [u8; 2];
    /// Returns the test address with this number.
    fn addr(number: u8) -> Self::Words;
    fn bytes(addr: &Self::Words) -> Vec<u8>;
    /// Returns an IP header. `tos`: type of service. The IPv4 header has no identification, like that of the programs'
    /// answers.
    fn ip(src: &Self::Words, dst: &Self::Words, proto: u8, ttl: u8, length: usize, tos: u8) -> Vec<u8>;

    fn pseudo(src: &Self::Words, dst: &Self::Words, proto: u8, length: usize) -> Vec<u8> {
        let mut bytes = [Self::bytes(src), Self::bytes(dst)].concat();
        bytes.extend((length as u32).to_be_bytes());
        bytes.extend([0, 0, 0, proto]);
        bytes
    }
}

impl Net for V4 {
    const ICMP: u8 = PROTO_ICMP;
    const UNREACHABLE: [u8; 2] = [3, 3];

    fn addr(number: u8) -> [u32; 1] {
        [u32::from_ne_bytes([10, number, 0, number])]
    }

    fn bytes(addr: &[u32; 1]) -> Vec<u8> {
        addr[0].to_ne_bytes().to_vec()
    }

    fn ip(src: &[u32; 1], dst: &[u32; 1], proto: u8, ttl: u8, length: usize, tos: u8) -> Vec<u8> {
        let mut header = std::vec![0x45, tos];
        header.extend(((20 + length) as u16).to_be_bytes());
        header.extend([0, 0, 0x40, 0, ttl, proto, 0, 0]);
        header.extend(Self::bytes(src));
        header.extend(Self::bytes(dst));
        let check = checksum(&[&header]);
        header[10..12].copy_from_slice(&check.to_be_bytes());
        header
    }
}

impl Net for V6 {
    const ICMP: u8 = PROTO_ICMPV6;
    const UNREACHABLE: [u8; 2] = [1, 4];

    fn addr(number: u8) -> [u32; 4] {
        let mut bytes = [0u8; 16];
        bytes[0] = 0xfd;
        (bytes[1], bytes[9], bytes[15]) = (number, number ^ 0x5a, number);
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        [word(0), word(4), word(8), word(12)]
    }

    fn bytes(addr: &[u32; 4]) -> Vec<u8> {
        addr.words().iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn ip(src: &[u32; 4], dst: &[u32; 4], proto: u8, ttl: u8, length: usize, _tos: u8) -> Vec<u8> {
        let mut header = std::vec![0x60, 0, 0, 0];
        header.extend((length as u16).to_be_bytes());
        header.extend([proto, ttl]);
        header.extend(Self::bytes(src));
        header.extend(Self::bytes(dst));
        header
    }
}

/// An address and a port.
pub type End<F> = (<F as Family>::Words, u16);

/// Properties of a transport segment.
#[derive(Clone, Copy)]
pub struct Shape {
    pub proto: u8,
    pub flags: u8,
    /// Words of the payload that are TCP options.
    pub options: u8,
    pub ttl: u8,
    pub payload: &'static [u8],
}

pub const SYN: Shape = Shape { proto: PROTO_TCP, flags: 2, options: 0, ttl: 64, payload: b"" };
pub const SYN_ACK: Shape = Shape { flags: 0x12, ..SYN };
pub const DATA: Shape = Shape { flags: 0x18, payload: b"odd", ..SYN };
/// An INIT chunk.
pub const INIT: Shape =
    Shape { proto: PROTO_SCTP, flags: 1, options: 0, ttl: 64, payload: b"16 bytes of INIT" };
pub const UDP: Shape = Shape { proto: PROTO_UDP, flags: 0, options: 0, ttl: 64, payload: b"query" };

/// Returns a transport segment, with its checksum.
pub fn segment<F: Net>(src: End<F>, dst: End<F>, shape: Shape) -> Vec<u8> {
    let mut l4 = [src.1.to_be_bytes(), dst.1.to_be_bytes()].concat();
    if shape.proto == PROTO_SCTP {
        // A verification tag, the checksum, and one chunk.
        l4.extend([0, 0, 0, 7, 0, 0, 0, 0, shape.flags, 0, 0, 4 + shape.payload.len() as u8]);
        l4.extend(shape.payload);
        let check = crc32c(&l4).to_le_bytes();
        l4[8..12].copy_from_slice(&check);
        return l4;
    }
    let at = if shape.proto == PROTO_UDP {
        l4.extend(((8 + shape.payload.len()) as u16).to_be_bytes());
        l4.extend([0, 0]);
        6
    } else {
        l4.extend([0, 1, 0, 0, 0, 2, 0, 0, 0x50 + (shape.options << 4), shape.flags, 0xff, 0, 0, 0, 0, 0]);
        16
    };
    l4.extend(shape.payload);
    let pseudo = F::pseudo(&src.0, &dst.0, shape.proto, l4.len());
    let check = match checksum(&[&pseudo, &l4]) {
        0 if shape.proto == PROTO_UDP => 0xffff,
        check => check,
    };
    l4[at..at + 2].copy_from_slice(&check.to_be_bytes());
    l4
}

/// Returns a frame: the IP packet after the Ethernet header that all packets of the tests have.
pub fn ethernet<F: Net>(ip: &[u8]) -> Vec<u8> {
    let mut frame = MACS.concat();
    frame.extend((F::ETHERTYPE).to_ne_bytes());
    frame.extend(ip);
    frame
}

/// Returns a packet from one end to another, without its Ethernet header.
pub fn ip_packet<F: Net>(src: End<F>, dst: End<F>, shape: Shape) -> Vec<u8> {
    let l4 = segment::<F>(src, dst, shape);
    [F::ip(&src.0, &dst.0, shape.proto, shape.ttl, l4.len(), 0), l4].concat()
}

/// Returns a packet from one end to another, with its Ethernet header.
pub fn packet<F: Net>(src: End<F>, dst: End<F>, shape: Shape) -> Vec<u8> {
    ethernet::<F>(&ip_packet::<F>(src, dst, shape))
}

/// Returns the source port of a packet.
pub fn src_port<F: Net>(bytes: &[u8]) -> u16 {
    let start = ETHERNET + F::HEADER;
    u16::from_be_bytes([bytes[start], bytes[start + 1]])
}

/// Returns an ICMP packet that quotes another one, without its Ethernet header. `kind`: type and code; `rest`: the second word
/// of the ICMP header.
pub fn icmp<F: Net>(
    (kind, rest): ([u8; 2], u32),
    src: F::Words,
    dst: F::Words,
    (ttl, tos): (u8, u8),
    quote: &[u8],
) -> Vec<u8> {
    let mut icmp = [&kind[..], &[0; 2], &rest.to_be_bytes(), quote].concat();
    let pseudo =
        if F::ICMP == PROTO_ICMPV6 { F::pseudo(&src, &dst, F::ICMP, icmp.len()) } else { Vec::new() };
    let check = checksum(&[&pseudo, &icmp]);
    icmp[2..4].copy_from_slice(&check.to_be_bytes());
    [F::ip(&src, &dst, F::ICMP, ttl, icmp.len(), tos), icmp].concat()
}

/// Returns an ICMP error "port unreachable" that quotes a packet.
pub fn unreachable<F: Net>(src: F::Words, dst: F::Words, hops_and_tos: (u8, u8), quote: &[u8]) -> Vec<u8> {
    ethernet::<F>(&icmp::<F>((F::UNREACHABLE, 0), src, dst, hops_and_tos, quote))
}
