//! Builds packets as bytes, valid ones and others.

use std::net::{IpAddr, SocketAddr};

use etherparse::checksum::Sum16BitWords;

use crate::scenario::{SCTP, TCP, UDP};

pub const ETHERNET: usize = 14;
/// Ethernet addresses of the packets that are built here: destination, then source.
pub const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 0xaa], [2, 0, 0, 0, 0, 0xbb]];

pub const FIN: u8 = 1;
pub const SYN: u8 = 2;
pub const RST: u8 = 4;
pub const ACK: u8 = 16;

/// The transport checksum of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    Right,
    Wrong,
    /// The sum of the pseudo header, as in a packet whose device will complete the checksum.
    Partial,
    Zero,
}

/// A packet to build.
#[derive(Clone, Debug)]
pub struct Forge {
    pub src: SocketAddr,
    pub dst: SocketAddr,
    pub proto: u8,
    pub flags: u8,
    /// Length of the TCP header in words; the options are the first bytes of the payload.
    pub tcp_words: u8,
    pub seq: u32,
    pub ack: u32,
    pub payload: usize,
    /// IPv4 options, in words of 32 bits.
    pub options: u8,
    /// Numbers of the IPv6 extension headers.
    pub extensions: Vec<u8>,
    /// Offset in units of eight bytes, whether more fragments follow, and the identification.
    pub fragment: Option<(u16, bool, u16)>,
    pub check: Check,
    pub ttl: u8,
    /// What is added to the length in the IP header.
    pub lie: i16,
    /// Bytes behind the packet.
    pub trailing: usize,
    /// An 802.1Q tag.
    pub tag: Option<u16>,
    /// Source and destination with which the checksum of the packet would be zero.
    pub aim: Option<(SocketAddr, SocketAddr)>,
}

impl Forge {
    pub fn new(proto: u8, src: SocketAddr, dst: SocketAddr) -> Self {
        Self {
            src,
            dst,
            proto,
            flags: SYN,
            tcp_words: 5,
            seq: 1000,
            ack: 0,
            payload: 21,
            options: 0,
            extensions: Vec::new(),
            fragment: None,
            check: Check::Right,
            ttl: 64,
            lie: 0,
            trailing: 0,
            tag: None,
            aim: None,
        }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let segment = self.segment();
        let mut bytes = MACS.concat();
        if let Some(tag) = self.tag {
            bytes.extend([0x81, 0]);
            bytes.extend(tag.to_be_bytes());
        }
        let length = |sum: usize| (sum as u16).saturating_add_signed(self.lie).to_be_bytes();
        match (self.src.ip(), self.dst.ip()) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                bytes.extend([0x08, 0x00]);
                let options = usize::from(self.options.min(10)) * 4;
                let mut header = vec![0x45 + (options / 4) as u8, 0];
                header.extend(length(20 + options + segment.len()));
                let (offset, more, id) = self.fragment.unwrap_or((0, false, 0x1234));
                header.extend(id.to_be_bytes());
                header.extend((offset & 0x1fff | if more { 0x2000 } else { 0 }).to_be_bytes());
                header.extend([self.ttl, self.proto, 0, 0]);
                header.extend(src.octets());
                header.extend(dst.octets());
                header.resize(20 + options, 1);
                let check = (!sum(&[&header])).to_be_bytes();
                header[10..12].copy_from_slice(&check);
                bytes.extend(header);
            }
            (src, dst) => {
                bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
                let mut chain: Vec<(u8, Vec<u8>)> =
                    self.extensions.iter().map(|number| (*number, extension(*number))).collect();
                if let Some((offset, more, id)) = self.fragment {
                    let mut header = vec![0, 0];
                    header.extend((offset << 3 | u16::from(more)).to_be_bytes());
                    header.extend(u32::from(id).to_be_bytes());
                    chain.push((44, header));
                }
                let between: usize = chain.iter().map(|(_, bytes)| bytes.len()).sum();
                bytes.extend(length(between + segment.len()));
                bytes.push(chain.first().map_or(self.proto, |(number, _)| *number));
                bytes.push(self.ttl);
                bytes.extend(octets(src));
                bytes.extend(octets(dst));
                for at in 0..chain.len() {
                    bytes.push(chain.get(at + 1).map_or(self.proto, |(number, _)| *number));
                    bytes.extend(&chain[at].1[1..]);
                }
            }
        }
        bytes.extend(segment);
        bytes.resize(bytes.len() + self.trailing, 0xa5);
        bytes
    }

    fn segment(&self) -> Vec<u8> {
        let payload = (0..self.payload).map(|at| at as u8);
        if self.fragment.is_some_and(|(offset, ..)| offset != 0) {
            return payload.collect();
        }
        let mut segment = [self.src.port().to_be_bytes(), self.dst.port().to_be_bytes()].concat();
        let check_at = match self.proto {
            TCP => {
                segment.extend(self.seq.to_be_bytes());
                segment.extend(self.ack.to_be_bytes());
                segment.extend([self.tcp_words << 4, self.flags, 0x20, 0, 0, 0, 0, 0]);
                16
            }
            UDP => {
                segment.extend(((8 + self.payload) as u16).to_be_bytes());
                segment.extend([0, 0]);
                6
            }
            SCTP => return self.sctp(segment),
            _ => return payload.collect(),
        };
        segment.extend(payload);
        self.take_aim(&mut segment);
        let pseudo = pseudo(self.src.ip(), self.dst.ip(), self.proto, segment.len());
        let check = match self.check {
            Check::Right => {
                let check = !sum(&[&pseudo, &segment]);
                if check == 0 && self.proto == UDP { 0xffff } else { check }
            }
            Check::Wrong => !sum(&[&pseudo, &segment]) ^ 0x0101,
            Check::Partial => sum(&[&pseudo]),
            Check::Zero => 0,
        };
        segment[check_at..check_at + 2].copy_from_slice(&check.to_be_bytes());
        segment
    }

    /// Changes the end of the payload so that the checksum becomes zero with the source and destination of `aim`.
    fn take_aim(&self, segment: &mut [u8]) {
        let Some((src, dst)) = self.aim.filter(|(src, _)| src.is_ipv4() == self.src.is_ipv4()) else {
            return;
        };
        if self.payload < 2 || !self.payload.is_multiple_of(2) {
            return;
        }
        let at = segment.len() - 2;
        segment[at..].fill(0);
        let mut there = segment.to_vec();
        there[..2].copy_from_slice(&src.port().to_be_bytes());
        there[2..4].copy_from_slice(&dst.port().to_be_bytes());
        let rest = !sum(&[&pseudo(src.ip(), dst.ip(), self.proto, there.len()), &there]);
        segment[at..].copy_from_slice(&rest.to_be_bytes());
    }

    /// Completes an SCTP segment, with the chunk that corresponds to the TCP flags.
    fn sctp(&self, mut segment: Vec<u8>) -> Vec<u8> {
        let chunk = match self.flags & (SYN | ACK | RST | FIN) {
            SYN => 1,
            flags if flags == SYN | ACK => 2,
            flags if flags & RST != 0 => 6,
            flags if flags == FIN | ACK => 8,
            FIN => 7,
            _ => 0,
        };
        segment.extend([0xde, 0xad, 0xbe, 0xef, 0, 0, 0, 0, chunk, 0]);
        segment.extend(((4 + self.payload) as u16).to_be_bytes());
        segment.extend((0..self.payload).map(|at| at as u8));
        segment.resize(segment.len().next_multiple_of(4), 0);
        let check = match self.check {
            Check::Right | Check::Partial => crc32c(&segment),
            Check::Wrong => !crc32c(&segment),
            Check::Zero => 0,
        };
        segment[8..12].copy_from_slice(&check.to_le_bytes());
        segment
    }
}

/// Returns an extension header of 8 bytes; an authentication header has 12. The caller replaces the first byte by the
/// number of the next header.
fn extension(number: u8) -> Vec<u8> {
    match number {
        51 => vec![0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1],
        43 => vec![0, 0, 4, 0, 0, 0, 0, 0],
        44 => vec![0, 0, 0, 0, 0, 0, 0, 7],
        // Padding (RFC 8200, 4.2).
        _ => vec![0, 0, 1, 4, 0, 0, 0, 0],
    }
}

/// Returns an ICMP message of this type and code from `src` to `dst`, which quotes these bytes.
pub fn icmp(src: IpAddr, dst: IpAddr, head: [u8; 2], rest: u32, quote: &[u8], ttl: u8) -> Vec<u8> {
    let mut bytes = MACS.concat();
    let mut message = vec![head[0], head[1], 0, 0];
    message.extend(rest.to_be_bytes());
    message.extend(quote);
    let check = if let (IpAddr::V4(src), IpAddr::V4(dst)) = (src, dst) {
        bytes.extend([0x08, 0x00]);
        let mut header = vec![0x45, 0xc0];
        header.extend(((20 + message.len()) as u16).to_be_bytes());
        header.extend([0, 0, 0x40, 0, ttl, 1, 0, 0]);
        header.extend(src.octets());
        header.extend(dst.octets());
        let check = (!sum(&[&header])).to_be_bytes();
        header[10..12].copy_from_slice(&check);
        bytes.extend(header);
        !sum(&[&message])
    } else {
        bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        bytes.extend((message.len() as u16).to_be_bytes());
        bytes.extend([58, ttl]);
        bytes.extend(octets(src));
        bytes.extend(octets(dst));
        !sum(&[&pseudo(src, dst, 58, message.len()), &message])
    };
    message[2..4].copy_from_slice(&check.to_be_bytes());
    bytes.extend(message);
    bytes
}

pub fn octets(addr: IpAddr) -> Vec<u8> {
    match addr {
        IpAddr::V4(addr) => addr.octets().to_vec(),
        IpAddr::V6(addr) => addr.octets().to_vec(),
    }
}

/// The pseudo header of a segment (RFC 9293, 3.1; RFC 8200, 8.1).
pub fn pseudo(src: IpAddr, dst: IpAddr, proto: u8, length: usize) -> Vec<u8> {
    let mut header = [octets(src), octets(dst)].concat();
    if src.is_ipv4() {
        header.extend([0, proto]);
        header.extend((length as u16).to_be_bytes());
    } else {
        header.extend((length as u32).to_be_bytes());
        header.extend([0, 0, 0, proto]);
    }
    header
}

/// Returns the ones' complement sum of the parts; each part except the last must have an even length.
pub fn sum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().fold(Sum16BitWords::new(), |words, part| words.add_slice(part));
    !words.ones_complement().to_be()
}

/// Returns the CRC-32C of an SCTP packet whose checksum field is zero, computed bit by bit (RFC 9260, appendix A).
pub fn crc32c(bytes: &[u8]) -> u32 {
    !divide(!0, bytes)
}

/// Returns the remainder of the CRC division that starts with `crc`.
pub fn divide(mut crc: u32, bytes: &[u8]) -> u32 {
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    crc
}
