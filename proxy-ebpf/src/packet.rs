//! Parsing: from bytes to a tuple. Reads only; every read is inside the packet.

use core::mem::size_of;

use proxy_common::flow::{DIRECTION_FORWARD, FlowKey};
use proxy_common::reason::Reason;
use proxy_common::{Address, Family, PROTO_ICMP, PROTO_ICMPV6, PROTO_SCTP, PROTO_TCP, PROTO_UDP, V4, V6};

use crate::net::{
    EXTENSION_HEADERS, IPV4_MORE, IPV4_OFFSET, IPV6_MORE, IPV6_OFFSET, Ipv4, Ipv6, extension, link_header,
    sctp, tcp, udp,
};

/// Where the readable part of a packet begins and ends, as addresses.
#[derive(Clone, Copy)]
pub struct Bounds {
    /// First byte: the Ethernet header, or the IP header where there is none.
    pub data: usize,
    /// One past the last byte that can be read directly.
    pub end: usize,
    /// Bytes in the whole packet, with those that cannot be read directly.
    pub frame: usize,
}

impl Bounds {
    /// The header of type `T` at `offset`, if all of it is readable.
    ///
    /// The address is computed once, checked and used: the verifier ties the check to that register.
    #[inline(always)]
    pub fn at<T>(self, offset: usize) -> Option<*const T> {
        let address = self.data + offset;
        if address + size_of::<T>() > self.end { None } else { Some(address as *const T) }
    }
}

/// A TCP, UDP or SCTP packet. Laid out as in C, since pointers to it cross functions that the verifier checks alone.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<A> {
    /// Addresses, ports and protocol; the direction is the hook's to set.
    pub key: FlowKey<A>,
    /// Offset of the transport header from the first byte of the packet; 0: it is a later fragment, and has none.
    pub l4: u32,
    /// Length of the IP packet, as its header says.
    pub length: u32,
    /// IPv4's header checksum as it stands in the packet; 0 for IPv6.
    pub ip_check: u16,
    /// TCP's flags; what comes closest for SCTP ([`sctp::flags`], not yet there when it is parsed), 0 for UDP.
    pub tcp_flags: u16,
}

/// What the act that parses a packet leaves to the others.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Left<A> {
    /// The packet.
    pub packet: Packet<A>,
    /// The hash of its key; see [`FlowKey::hash`].
    pub hash: u64,
}

/// The flow that a packet would begin.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Aim<A> {
    /// The key of its replies.
    pub reply: FlowKey<A>,
    /// Id of its backend; 0: there is none.
    pub backend_id: u32,
    /// `FLOW_*` bits of a new flow: [`FLOW_SNAT`](proxy_common::flow::FLOW_SNAT), and whose packet it is.
    pub state: u32,
    /// The hash of `reply`.
    pub reply_hash: u64,
}

/// What the acts of one packet share.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Scratch<A> {
    /// What the first one leaves.
    pub left: Left<A>,
    /// What a new flow would be.
    pub aim: Aim<A>,
    /// The part of it that a refusal quotes.
    pub quote: [u32; QUOTE / size_of::<u32>()],
}

/// Bytes of a packet that a refusal quotes in part; a power of two, and enough for IP options and the ports.
pub const QUOTE: usize = 128;

impl<A: Address> Packet<A> {
    /// A packet of which nothing is known.
    pub const EMPTY: Self = Self {
        key: FlowKey {
            src: A::ZERO,
            dst: A::ZERO,
            src_port: 0,
            dst_port: 0,
            proto: 0,
            direction: DIRECTION_FORWARD,
            reserved: 0,
        },
        l4: 0,
        length: 0,
        ip_check: 0,
        tcp_flags: 0,
    };

    /// Whether it is a fragment, and not the first.
    #[inline(always)]
    pub fn is_later(&self) -> bool {
        self.l4 == 0
    }
}

/// Why there is no [`Packet`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Neither TCP, UDP nor SCTP.
    NotOurs,
    /// ICMP or ICMPv6: perhaps an error about a packet of ours.
    Control,
    /// The readable part ends too early, or there are extension headers to walk over, or it is a fragment, or SCTP.
    Short,
    /// It is parsed, and it is the first fragment of several.
    First,
    /// It is none that can be understood.
    Because(Reason),
}

/// A family whose packets can be parsed.
pub trait Parse: Family {
    /// The IP header without options.
    type Header;
    /// Its length.
    const HEADER: usize = size_of::<Self::Header>();
    /// Parses the packet behind the link-layer header into `packet`, which holds nothing of use after an error other
    /// than [`Stop::First`]. Without `walk`, extension headers are left to another try: hardly any packet has them, and each copy of
    /// the loop costs the verifier thousands of steps.
    fn parse(bounds: Bounds, packet: &mut Packet<Self::Words>, walk: bool) -> Result<(), Stop>;
}

impl Parse for V4 {
    type Header = Ipv4;

    #[inline(always)]
    fn parse(bounds: Bounds, packet: &mut Packet<[u32; 1]>, walk: bool) -> Result<(), Stop> {
        let link = link_header();
        let ip: *const Ipv4 = bounds.at(link).ok_or(Stop::Short)?;
        // SAFETY: `at` found the whole header inside the packet.
        let ip = unsafe { &*ip };
        if ip.protocol != PROTO_TCP && ip.protocol != PROTO_UDP && !(walk && ip.protocol == PROTO_SCTP) {
            return Err(match ip.protocol {
                PROTO_ICMP => Stop::Control,
                PROTO_SCTP => Stop::Short,
                _ => Stop::NotOurs,
            });
        }
        let header = usize::from(ip.version_length & 0xf) * 4;
        let length = ip_length(bounds, link, usize::from(u16::from_be(ip.total_length)));
        if ip.version_length >> 4 != 4
            || header < Self::HEADER
            || length < header
            || exceeds(bounds, link, length)
        {
            return Err(Stop::Because(Reason::Malformed));
        }
        let fragment = u16::from_be(ip.fragment) & (IPV4_MORE | IPV4_OFFSET);
        if fragment != 0 && !walk {
            return Err(Stop::Short);
        }
        if fragment & IPV4_OFFSET != 0 {
            return Err(Stop::Because(Reason::Fragment));
        }
        packet.key.src = [ip.src];
        packet.key.dst = [ip.dst];
        packet.key.proto = ip.protocol;
        packet.ip_check = ip.check;
        packet.l4 = (link + header) as u32;
        packet.length = length as u32;
        transport(bounds, packet, link + header, length - header, walk)?;
        if fragment == 0 { Ok(()) } else { Err(Stop::First) }
    }
}

impl Parse for V6 {
    type Header = Ipv6;

    #[inline(always)]
    fn parse(bounds: Bounds, packet: &mut Packet<[u32; 4]>, walk: bool) -> Result<(), Stop> {
        let link = link_header();
        let ip: *const Ipv6 = bounds.at(link).ok_or(Stop::Short)?;
        // SAFETY: `at` found the whole header inside the packet.
        let ip = unsafe { &*ip };
        let mut proto = ip.next_header;
        let mut l4 = link + Self::HEADER;
        let mut is_first = false;
        let length = match u16::from_be(ip.payload_length) {
            0 => ip_length(bounds, link, 0),
            payload => Self::HEADER + usize::from(payload),
        };
        if proto != PROTO_TCP && proto != PROTO_UDP {
            if !walk {
                return Err(match proto {
                    PROTO_ICMPV6 => Stop::Control,
                    PROTO_SCTP => Stop::Short,
                    proto if extension::is(proto) => Stop::Short,
                    _ => Stop::NotOurs,
                });
            }
            (proto, l4, is_first) = skip_extensions(bounds, proto, l4)?;
        }
        let headers = l4 - link;
        if length < headers || exceeds(bounds, link, length) {
            return Err(Stop::Because(Reason::Malformed));
        }
        packet.key.src = ip.src;
        packet.key.dst = ip.dst;
        packet.key.proto = proto;
        packet.ip_check = 0;
        packet.l4 = l4 as u32;
        packet.length = length as u32;
        transport(bounds, packet, l4, length - headers, walk)?;
        if is_first { Err(Stop::First) } else { Ok(()) }
    }
}

/// The length an IP header states; 0 means "as much as there is": a segment of more than 64 KiB that the kernel
/// has not cut yet (BIG TCP).
#[inline(always)]
fn ip_length(bounds: Bounds, link: usize, stated: usize) -> usize {
    if stated == 0 { bounds.frame.saturating_sub(link) } else { stated }
}

/// Whether a header promises more bytes than came.
#[inline(always)]
fn exceeds(bounds: Bounds, link: usize, length: usize) -> bool {
    link + length > bounds.frame
}

/// Walks over IPv6 extension headers, to the protocol behind them and where it begins. Tells whether one of them
/// says that it is the first fragment of several.
#[inline(always)]
fn skip_extensions(bounds: Bounds, mut proto: u8, mut offset: usize) -> Result<(u8, usize, bool), Stop> {
    let (mut walked, mut is_first) = (0, false);
    while walked < EXTENSION_HEADERS && extension::is(proto) {
        let header: *const [u8; 4] = bounds.at(offset).ok_or(Stop::Short)?;
        // SAFETY: `at` found all four bytes inside the packet.
        let [next, length, high, low] = unsafe { *header };
        if proto == extension::FRAGMENT {
            let fragment = u16::from_be_bytes([high, low]);
            if fragment & IPV6_OFFSET != 0 {
                return Err(Stop::Because(Reason::Fragment));
            }
            // Without more to come it is a packet in one piece (RFC 6946).
            is_first = fragment & IPV6_MORE != 0;
        }
        offset += extension::length(proto, length) as usize;
        proto = next;
        walked += 1;
    }
    match proto {
        PROTO_TCP | PROTO_UDP | PROTO_SCTP => Ok((proto, offset, is_first)),
        PROTO_ICMPV6 => Err(Stop::Control),
        _ => Err(Stop::NotOurs),
    }
}

/// Reads ports and flags; `length` is what the IP header leaves for them and the payload.
#[inline(always)]
fn transport<A: Address>(
    bounds: Bounds,
    packet: &mut Packet<A>,
    offset: usize,
    length: usize,
    walk: bool,
) -> Result<(), Stop> {
    packet.tcp_flags = 0;
    if packet.key.proto == PROTO_TCP {
        if length < tcp::HEADER {
            return Err(Stop::Because(Reason::Malformed));
        }
        let header: *const [u8; tcp::HEADER] = bounds.at(offset).ok_or(Stop::Short)?;
        // SAFETY: `at` found the whole header inside the packet.
        packet.tcp_flags = u16::from(unsafe { (*header)[tcp::FLAGS] });
    } else if walk && packet.key.proto == PROTO_SCTP {
        if length < sctp::HEADER {
            return Err(Stop::Because(Reason::Malformed));
        }
    } else if length < udp::HEADER {
        return Err(Stop::Because(Reason::Malformed));
    }
    let ports: *const [u32; udp::HEADER / 4] = bounds.at(offset).ok_or(Stop::Short)?;
    // SAFETY: `at` found eight bytes inside the packet; the ports are the first four.
    let [a, b, c, d] = unsafe { (*ports)[0] }.to_ne_bytes();
    packet.key.src_port = u16::from_be_bytes([a, b]);
    packet.key.dst_port = u16::from_be_bytes([c, d]);
    Ok(())
}

#[cfg(test)]
#[path = "packet_tests.rs"]
mod tests;
