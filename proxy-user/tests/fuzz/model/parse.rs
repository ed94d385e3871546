//! Parses packets, with `etherparse` where it can.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use etherparse::{Ipv4HeaderSlice, Ipv6HeaderSlice, TcpHeaderSlice, UdpHeaderSlice};

use crate::forge::{ACK, ETHERNET, FIN, RST, SYN};
use crate::scenario::{ICMP, ICMPV6, SCTP, TCP, UDP};

/// Maximum number of extension headers that are skipped (`docs/datapath.md`).
const EXTENSIONS: usize = 6;

/// A packet with ports.
#[derive(Clone, Debug)]
pub struct Segment {
    pub src: SocketAddr,
    pub dst: SocketAddr,
    pub proto: u8,
    /// TCP flags; for SCTP, the flags that mean the same.
    pub flags: u8,
    /// Whether the TCP header has options.
    pub has_options: bool,
    /// Whether the packet is TCP, and ends with the TCP header.
    pub is_bare: bool,
    pub seq: u32,
    pub ack: u32,
    /// Offset of the transport header; `None` in a later fragment.
    pub l4: Option<usize>,
    /// Offset of the first byte behind the packet, as its header says.
    pub end: usize,
    /// Whether the packet is the first of several fragments.
    pub is_first: bool,
    /// Length of the IP packet by which its way is selected: that of the first fragment.
    pub longest: usize,
}

impl Segment {
    /// Length of the IP packet in bytes.
    pub fn length(&self) -> usize {
        self.end - ETHERNET
    }

    pub fn opens(&self) -> bool {
        self.flags & (SYN | ACK) == SYN
    }

    /// Whether the segment only acknowledges.
    pub fn is_bare_ack(&self) -> bool {
        self.is_bare && self.flags & (SYN | ACK | FIN | RST) == ACK
    }

    /// Whether a connection may begin with this segment: a SYN, or an ACK in mid-connection.
    pub fn may_begin(&self) -> bool {
        matches!(self.flags & (SYN | ACK | FIN | RST), SYN | ACK)
    }
}

/// The result of parsing a packet.
#[derive(Clone, Debug)]
pub enum Parsed {
    /// A packet that the data path does not process.
    Foreign,
    /// ICMP or ICMPv6.
    Control,
    /// TCP, UDP or SCTP that is shorter than its header says, or than it must be.
    Malformed,
    /// A first fragment with a part of the transport header, or too many extension headers. With the destination.
    Hidden(IpAddr),
    /// A later fragment; `None` if its header is not complete.
    Later(Option<Header>),
    Segment(Segment),
}

/// An IP header, at any offset.
#[derive(Clone, Debug)]
pub struct Header {
    pub src: IpAddr,
    pub dst: IpAddr,
    pub proto: u8,
    /// Offset behind all headers.
    pub l4: usize,
    /// Offset of the first byte behind the packet, as the header says; it may be beyond the end of the bytes.
    pub end: usize,
    pub id: u32,
    pub is_later: bool,
}

/// Whether a packet is IPv6; `None` if it is not IP.
pub fn is_v6(bytes: &[u8]) -> Option<bool> {
    match bytes.get(12..14)? {
        [0x08, 0x00] => Some(false),
        [0x86, 0xdd] => Some(true),
        _ => None,
    }
}

pub fn parse(bytes: &[u8]) -> Parsed {
    match is_v6(bytes) {
        Some(false) => parse_v4(bytes),
        Some(true) => parse_v6(bytes),
        None => Parsed::Foreign,
    }
}

fn parse_v4(bytes: &[u8]) -> Parsed {
    let packet = &bytes[ETHERNET..];
    match packet.get(9) {
        Some(&(TCP | UDP | SCTP)) if packet.len() >= 20 => {}
        Some(&ICMP) if packet.len() >= 20 => return Parsed::Control,
        Some(_) if packet.len() >= 20 => return Parsed::Foreign,
        _ => return Parsed::Malformed,
    }
    let Ok(header) = Ipv4HeaderSlice::from_slice(packet) else { return Parsed::Malformed };
    // The length is 0: the packet ends with the bytes (BIG TCP).
    let length = match usize::from(header.total_len()) {
        0 => packet.len(),
        length => length,
    };
    let behind = header.slice().len();
    if length < behind || length > packet.len() {
        return Parsed::Malformed;
    }
    if header.fragments_offset().value() != 0 {
        return Parsed::Later(header_at(bytes, ETHERNET));
    }
    let ends = (IpAddr::V4(header.source_addr()), IpAddr::V4(header.destination_addr()));
    let is_first = header.more_fragments();
    let all = segment(bytes, ends, header.protocol().0, ETHERNET + behind, ETHERNET + length, is_first);
    if is_first { of_fragment(all, ends.1) } else { all }
}

/// The other fragments have the rest of the transport header.
fn of_fragment(parsed: Parsed, dst: IpAddr) -> Parsed {
    if matches!(parsed, Parsed::Malformed) { Parsed::Hidden(dst) } else { parsed }
}

fn parse_v6(bytes: &[u8]) -> Parsed {
    let packet = &bytes[ETHERNET..];
    let Some(fixed) = packet.get(..40) else { return Parsed::Malformed };
    let (mut proto, mut at, mut is_first, mut walked) = (fixed[6], 40, false, 0);
    while walked < EXTENSIONS && is_extension(proto) {
        let Some(header) = packet.get(at..at + 4) else { return Parsed::Malformed };
        if proto == 44 {
            let word = u16::from_be_bytes([header[2], header[3]]);
            if word & 0xfff8 != 0 {
                return Parsed::Later(header_at(bytes, ETHERNET));
            }
            is_first = word & 1 != 0;
        }
        at += extension_length(proto, header[1]);
        proto = header[0];
        walked += 1;
    }
    let addr = |at: usize| {
        let octets: [u8; 16] = fixed[at..at + 16].try_into().unwrap();
        IpAddr::V6(octets.into())
    };
    match proto {
        TCP | UDP | SCTP => {}
        ICMPV6 => return Parsed::Control,
        _ if is_extension(proto) => return Parsed::Hidden(addr(24)),
        _ => return Parsed::Foreign,
    }
    let length = match usize::from(u16::from_be_bytes([fixed[4], fixed[5]])) {
        0 => packet.len(),
        payload => 40 + payload,
    };
    if length < at || length > packet.len() {
        return Parsed::Malformed;
    }
    let all = segment(bytes, (addr(8), addr(24)), proto, ETHERNET + at, ETHERNET + length, is_first);
    if is_first { of_fragment(all, addr(24)) } else { all }
}

pub fn is_extension(number: u8) -> bool {
    matches!(number, 0 | 43 | 44 | 51 | 60)
}

fn extension_length(number: u8, length: u8) -> usize {
    match number {
        44 => 8,
        51 => (usize::from(length) + 2) * 4,
        _ => (usize::from(length) + 1) * 8,
    }
}

fn segment(
    bytes: &[u8],
    (src, dst): (IpAddr, IpAddr),
    proto: u8,
    l4: usize,
    end: usize,
    is_first: bool,
) -> Parsed {
    let there = &bytes[l4..end];
    let (ports, flags, (seq, ack)) = match proto {
        TCP => {
            // Options may lie beyond the end: only their length matters here.
            let Some(fixed) = there.get(..20) else { return Parsed::Malformed };
            let mut fixed = fixed.to_vec();
            let flags = fixed[13];
            fixed[12] = 0x50;
            let Ok(tcp) = TcpHeaderSlice::from_slice(&fixed) else { return Parsed::Malformed };
            (
                (tcp.source_port(), tcp.destination_port()),
                flags,
                (tcp.sequence_number(), tcp.acknowledgment_number()),
            )
        }
        UDP => {
            let Ok(udp) = UdpHeaderSlice::from_slice(there) else { return Parsed::Malformed };
            ((udp.source_port(), udp.destination_port()), 0, (0, 0))
        }
        _ => {
            let Some(start) = there.get(..16) else { return Parsed::Malformed };
            let port = |at: usize| u16::from_be_bytes([start[at], start[at + 1]]);
            ((port(0), port(2)), sctp_flags(start[12]), (0, 0))
        }
    };
    let (src, dst) = (SocketAddr::new(src, ports.0), SocketAddr::new(dst, ports.1));
    let longest = end - ETHERNET;
    Parsed::Segment(Segment {
        src,
        dst,
        proto,
        flags,
        has_options: proto == TCP && there[12] >> 4 > 5,
        is_bare: proto == TCP && there.len() == usize::from(there[12] >> 4) * 4,
        seq,
        ack,
        l4: Some(l4),
        end,
        is_first,
        longest,
    })
}

/// Returns the TCP flags that correspond to a chunk of SCTP (RFC 9260, 3.2).
fn sctp_flags(chunk: u8) -> u8 {
    match chunk {
        1 => SYN,
        2 => SYN | ACK,
        6 => RST,
        7 | 8 | 14 => FIN,
        _ => ACK,
    }
}

/// Reads the IP header at `at`, with the extension headers behind it.
pub fn header_at(bytes: &[u8], at: usize) -> Option<Header> {
    header_in(bytes, at, is_v6(bytes)?)
}

/// Like `header_at`, for a family that is already known.
pub fn header_in(bytes: &[u8], at: usize, is_v6: bool) -> Option<Header> {
    if is_v6 { header_v6(bytes, at) } else { header_v4(bytes, at) }
}

fn header_v4(bytes: &[u8], at: usize) -> Option<Header> {
    // The options may be incomplete: a quote may be truncated.
    let mut fixed = bytes.get(at..at + 20)?.to_vec();
    let words = usize::from(fixed[0] & 15);
    if fixed[0] >> 4 != 4 || words < 5 {
        return None;
    }
    fixed[0] = 0x45;
    let header = Ipv4HeaderSlice::from_slice(&fixed).ok()?;
    Some(Header {
        src: header.source_addr().into(),
        dst: header.destination_addr().into(),
        proto: header.protocol().0,
        l4: at + words * 4,
        end: at + usize::from(header.total_len()),
        id: header.identification().into(),
        is_later: header.fragments_offset().value() != 0,
    })
}

fn header_v6(bytes: &[u8], at: usize) -> Option<Header> {
    let fixed = Ipv6HeaderSlice::from_slice(bytes.get(at..)?).ok()?;
    let (mut proto, mut l4, mut id, mut is_later) = (fixed.next_header().0, at + 40, 0, false);
    let mut walked = 0;
    while is_extension(proto) && !is_later {
        if walked == EXTENSIONS {
            return None;
        }
        let header = bytes.get(l4..l4 + 4)?;
        if proto == 44 {
            id = u32::from_be_bytes(bytes.get(l4 + 4..l4 + 8)?.try_into().unwrap());
            is_later = u16::from_be_bytes([header[2], header[3]]) & 0xfff8 != 0;
        }
        l4 += extension_length(proto, header[1]);
        proto = header[0];
        walked += 1;
    }
    Some(Header {
        src: Ipv6Addr::from(fixed.source()).into(),
        dst: Ipv6Addr::from(fixed.destination()).into(),
        proto,
        l4,
        end: at + 40 + usize::from(fixed.payload_length()),
        id,
        is_later,
    })
}
