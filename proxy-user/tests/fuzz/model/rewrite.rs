//! The expected packet, byte by byte. Every checksum is computed over all bytes that it covers: a right one must stay
//! right, and a wrong or unfinished one must stay wrong by the same amount.

use std::net::{IpAddr, SocketAddr};

use super::parse::{Header, Segment, is_v6};
use crate::forge::{ETHERNET, crc32c, divide, octets, pseudo, sum};
use crate::scenario::{SCTP, UDP};

/// The expected bytes of a packet.
#[derive(Clone, Debug)]
pub struct Expected {
    pub bytes: Vec<u8>,
    /// Offsets of 16-bit fields in which all zeros and all ones mean the same.
    pub loose: Vec<usize>,
    /// The old Ethernet addresses, if they may stay: the kernel writes new ones once it knows the neighbour.
    pub old_macs: Option<[u8; 12]>,
    /// Whether the packet contradicts itself, so that only its length is known.
    pub is_nonsense: bool,
}

impl Expected {
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, loose: Vec::new(), old_macs: None, is_nonsense: false }
    }

    /// Moves the offsets by the length of a header that is inserted behind the Ethernet header.
    pub fn moved(mut self, by: usize) -> Self {
        self.loose.iter_mut().for_each(|at| *at += by);
        self
    }

    /// Whether `seen` is as expected.
    pub fn is(&self, seen: &[u8]) -> bool {
        let mut seen = seen.to_vec();
        if seen.len() != self.bytes.len() {
            return false;
        }
        if self.is_nonsense {
            return true;
        }
        for at in &self.loose {
            let (wanted, is) = (&self.bytes[*at..at + 2], &seen[*at..at + 2]);
            if wanted[0] == wanted[1] && is[0] == is[1] && matches!((wanted[0], is[0]), (0, 0xff) | (0xff, 0))
            {
                seen[*at..at + 2].copy_from_slice(&self.bytes[*at..at + 2]);
            }
        }
        if self.old_macs.is_some_and(|macs| seen.starts_with(&macs)) {
            seen[..12].copy_from_slice(&self.bytes[..12]);
        }
        seen == self.bytes
    }

    /// Writes the checksum at `at`. It covered the bytes `before`. `after`: the sum of the bytes that it covers now, with
    /// its own field zero.
    fn write_checksum(&mut self, at: usize, before: &[&[u8]], after: u16, is_udp: bool) {
        let was = sum(before);
        let mut check = if was == 0xffff {
            !after
        } else {
            self.loose.push(at);
            add(was, !after)
        };
        if is_udp && check == 0 {
            check = 0xffff;
        }
        self.bytes[at..at + 2].copy_from_slice(&check.to_be_bytes());
    }
}

fn add(a: u16, b: u16) -> u16 {
    let sum = u32::from(a) + u32::from(b);
    (sum as u16) + (sum >> 16) as u16
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// Writes the addresses of the IP header at `at`.
fn put_addresses(bytes: &mut [u8], at: usize, src: IpAddr, dst: IpAddr) {
    let first = at + if src.is_ipv4() { 12 } else { 8 };
    put(bytes, first, &octets(src));
    put(bytes, first + octets(src).len(), &octets(dst));
}

fn put_ports(bytes: &mut [u8], at: usize, src: u16, dst: u16) {
    put(bytes, at, &src.to_be_bytes());
    put(bytes, at + 2, &dst.to_be_bytes());
}

/// Writes the checksum of the IPv4 header at `at` of `input`, as far as the header is there.
fn write_header_checksum(out: &mut Expected, input: &[u8], at: usize, end: usize) {
    let end = end.min(input.len());
    put(&mut out.bytes, at + 10, &[0, 0]);
    let after = sum(&[&out.bytes[at..end]]);
    out.write_checksum(at + 10, &[&input[at..end]], after, false);
}

/// Returns the packet with another source and destination.
pub fn translated(input: &[u8], segment: &Segment, src: SocketAddr, dst: SocketAddr) -> Expected {
    let mut out = Expected::new(input.to_vec());
    put_addresses(&mut out.bytes, ETHERNET, src.ip(), dst.ip());
    if src.is_ipv4() {
        let end = ETHERNET + usize::from(input[ETHERNET] & 15) * 4;
        write_header_checksum(&mut out, input, ETHERNET, end);
    }
    let Some(l4) = segment.l4 else { return out };
    put_ports(&mut out.bytes, l4, src.port(), dst.port());
    let before = &input[l4..segment.end];
    if segment.proto == SCTP {
        let check = sctp(before, &out.bytes[l4..segment.end], before.len());
        put(&mut out.bytes, l4 + 8, &check);
        return out;
    }
    let at = l4 + if segment.proto == UDP { 6 } else { 16 };
    if segment.proto == UDP && input[at..at + 2] == [0, 0] {
        return out;
    }
    let length = before.len();
    put(&mut out.bytes, at, &[0, 0]);
    let after = sum(&[&pseudo(src.ip(), dst.ip(), segment.proto, length), &out.bytes[l4..segment.end]]);
    let old = pseudo(segment.src.ip(), segment.dst.ip(), segment.proto, length);
    out.write_checksum(at, &[&old, before], after, segment.proto == UDP);
    out
}

/// Returns the checksum of an SCTP packet of `length` bytes whose ports have changed. `before` and `after` are the bytes
/// that are there.
fn sctp(before: &[u8], after: &[u8], length: usize) -> [u8; 4] {
    let old: [u8; 4] = before[8..12].try_into().unwrap();
    if old == [0; 4] {
        return old;
    }
    let plain = |bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        bytes[8..12].fill(0);
        bytes
    };
    if before.len() == length && crc32c(&plain(before)).to_le_bytes() == old {
        return crc32c(&plain(after)).to_le_bytes();
    }
    // The CRCs of two packets differ by the remainder of the bits in which the packets differ.
    let mut difference: Vec<u8> = before.iter().zip(after).take(4).map(|(a, b)| a ^ b).collect();
    difference.resize(length, 0);
    (u32::from_le_bytes(old) ^ divide(0, &difference)).to_le_bytes()
}

/// Returns the packet as it leaves by a device: with the TTL decremented, and with the Ethernet header of the device.
pub fn sent(mut out: Expected, macs: [[u8; 6]; 2]) -> Expected {
    let input = out.bytes.clone();
    out.old_macs = input[..12].try_into().ok();
    put(&mut out.bytes, 0, &macs.concat());
    if is_v6(&input) == Some(true) {
        out.bytes[ETHERNET + 7] -= 1;
    } else {
        out.bytes[ETHERNET + 8] -= 1;
        let end = ETHERNET + usize::from(input[ETHERNET] & 15) * 4;
        write_header_checksum(&mut out, &input, ETHERNET, end);
    }
    out
}

/// Returns the translated error about a packet. The error comes from `src`; the packet that it quotes went from `quoted[0]`
/// to `quoted[1]`.
pub fn error(input: &[u8], outer: &Header, inner: &Header, src: IpAddr, quoted: [SocketAddr; 2]) -> Expected {
    let mut out = Expected::new(input.to_vec());
    let [from, to] = quoted;
    let there = outer.end.min(input.len());
    let quote = outer.l4 + 8;
    put_addresses(&mut out.bytes, ETHERNET, src, from.ip());
    put_addresses(&mut out.bytes, quote, from.ip(), to.ip());
    put_ports(&mut out.bytes, inner.l4, from.port(), to.port());
    if src.is_ipv4() {
        write_header_checksum(&mut out, input, ETHERNET, outer.l4);
        write_header_checksum(&mut out, input, quote, inner.l4);
    }
    let (before, length) = (&input[inner.l4..there], inner.end.saturating_sub(inner.l4));
    if inner.proto == SCTP {
        // The length ends before the checksum field, so it is not defined what the checksum covers.
        out.is_nonsense = length < 12;
        if before.len() >= 12 && length >= 12 {
            let check = sctp(before, &out.bytes[inner.l4..there], length);
            put(&mut out.bytes, inner.l4 + 8, &check);
        }
    } else {
        let at = if inner.proto == UDP { 6 } else { 16 };
        if before.len() >= at + 2 && !(inner.proto == UDP && before[at..at + 2] == [0, 0]) {
            let at = inner.l4 + at;
            put(&mut out.bytes, at, &[0, 0]);
            let after = [&pseudo(from.ip(), to.ip(), inner.proto, length)[..], &out.bytes[inner.l4..there]];
            let (after, old) = (sum(&after), pseudo(inner.src, inner.dst, inner.proto, length));
            out.write_checksum(at, &[&old, before], after, inner.proto == UDP);
            out.loose.push(at);
        }
    }
    let at = outer.l4 + 2;
    put(&mut out.bytes, at, &[0, 0]);
    let length = outer.end - outer.l4;
    let (old, new) = if src.is_ipv4() {
        (Vec::new(), Vec::new())
    } else {
        (pseudo(outer.src, outer.dst, 58, length), pseudo(src, from.ip(), 58, length))
    };
    let after = sum(&[&new, &out.bytes[outer.l4..there]]);
    out.write_checksum(at, &[&old, &input[outer.l4..there]], after, false);
    out.loose.push(at);
    out
}
