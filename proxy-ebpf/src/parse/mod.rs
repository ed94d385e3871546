//! Parsing: from bytes to a tuple. Only reads, and every read is inside the packet.

use core::mem::size_of;

use proxy_common::reason::Reason;
use proxy_common::{
    Address, Family, PROTO_ICMP, PROTO_ICMPV6, PROTO_IPIP, PROTO_IPV6, PROTO_SCTP, PROTO_TCP, PROTO_UDP, V4,
    V6,
};

use crate::context::Packet;
use crate::frame::Bounds;
use crate::header::{BROKEN, FIRST, L4_AT, LATER};
use crate::net::{
    ETHERNET, EXTENSION_HEADERS, IPV4_MORE, IPV4_OFFSET, Ipv4, Ipv6, TcpHeader, extension, sctp, udp,
};

/// Result of parsing a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// The parsed packet is in the context.
    Packet,
    /// The packet is ICMP or ICMPv6.
    Icmp,
    /// The packet contains another packet (IP in IP).
    Tunnel,
    /// The packet is foreign, and passes.
    Foreign,
    /// The packet is dropped; the reason was counted.
    Dropped,
}

/// Reason for which there is no [`Packet`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Neither TCP, UDP nor SCTP.
    NotOurs,
    /// ICMP or ICMPv6: perhaps an error about a packet of a flow.
    Control,
    /// A packet inside another packet, perhaps one that another node has encapsulated.
    Tunnel,
    /// The readable part is too short, or the packet has extension headers, is a fragment, or is SCTP: the second attempt
    /// parses it.
    Retry,
    /// The packet is parsed, and is the first of several fragments.
    First,
    /// The packet cannot be parsed, for this reason.
    Refused(Reason),
}

/// A family whose packets can be parsed.
pub trait Parse: Family {
    /// The IP header without options.
    type Header;
    /// Length of the header in bytes.
    const HEADER: usize = size_of::<Self::Header>();
    /// Parses the packet after the link-layer header into `packet`, whose content is invalid after an error other than
    /// [`Stop::First`]. Without `walk`, extension headers, fragments and SCTP are left to a second attempt: hardly any packet
    /// has extension headers, and each copy of the loop costs the verifier thousands of steps. `extensions`:
    /// [`walk_extensions`](crate::header::walk_extensions) of this packet.
    fn parse(
        bounds: Bounds,
        link: usize,
        packet: &mut Packet<Self::Words>,
        walk: bool,
        extensions: impl FnOnce(u8, u32) -> u64,
    ) -> Result<(), Stop>;
}

impl Parse for V4 {
    type Header = Ipv4;

    #[inline(always)]
    fn parse(
        bounds: Bounds,
        link: usize,
        packet: &mut Packet<[u32; 1]>,
        walk: bool,
        _extensions: impl FnOnce(u8, u32) -> u64,
    ) -> Result<(), Stop> {
        let ip: *const Ipv4 = bounds.at(link).ok_or(Stop::Retry)?;
        // SAFETY: `at` has checked that the whole header is inside the packet.
        let ip = unsafe { &*ip };
        if ip.protocol != PROTO_TCP && ip.protocol != PROTO_UDP && !(walk && ip.protocol == PROTO_SCTP) {
            return Err(match ip.protocol {
                PROTO_ICMP => Stop::Control,
                PROTO_IPIP | PROTO_IPV6 => Stop::Tunnel,
                PROTO_SCTP => Stop::Retry,
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
            return Err(Stop::Refused(Reason::Malformed));
        }
        let fragment = u16::from_be(ip.fragment) & (IPV4_MORE | IPV4_OFFSET);
        if fragment != 0 && !walk {
            return Err(Stop::Retry);
        }
        if fragment & IPV4_OFFSET != 0 {
            return Err(Stop::Refused(Reason::Fragment));
        }
        packet.key.src = [ip.src];
        packet.key.dst = [ip.dst];
        packet.key.proto = ip.protocol;
        packet.ip_check = ip.check;
        packet.l4 = (link + header) as u32;
        packet.length = length as u32;
        let is_first = fragment != 0;
        transport(bounds, packet, link + header, length - header, walk)
            .map_err(|stop| of_fragment(stop, is_first))?;
        if is_first { Err(Stop::First) } else { Ok(()) }
    }
}

impl Parse for V6 {
    type Header = Ipv6;

    #[inline(always)]
    fn parse(
        bounds: Bounds,
        link: usize,
        packet: &mut Packet<[u32; 4]>,
        walk: bool,
        extensions: impl FnOnce(u8, u32) -> u64,
    ) -> Result<(), Stop> {
        let ip: *const Ipv6 = bounds.at(link).ok_or(Stop::Retry)?;
        // SAFETY: `at` has checked that the whole header is inside the packet.
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
                    PROTO_IPIP | PROTO_IPV6 => Stop::Tunnel,
                    PROTO_SCTP => Stop::Retry,
                    proto if extension::is(proto) => Stop::Retry,
                    _ => Stop::NotOurs,
                });
            }
            if extension::is(proto) {
                (proto, l4, is_first) = behind_extensions(extensions(proto, l4 as u32))?;
            }
            match proto {
                PROTO_TCP | PROTO_UDP | PROTO_SCTP => {}
                PROTO_ICMPV6 => return Err(Stop::Control),
                // A pod may hide an encapsulated packet: the kernel removes a fragment header.
                PROTO_IPIP | PROTO_IPV6 => return Err(Stop::Tunnel),
                proto if extension::is(proto) => return Err(Stop::Refused(Reason::HiddenPorts)),
                _ => return Err(Stop::NotOurs),
            }
        }
        let headers = l4 - link;
        if length < headers || exceeds(bounds, link, length) {
            return Err(Stop::Refused(Reason::Malformed));
        }
        packet.key.src = ip.src;
        packet.key.dst = ip.dst;
        packet.key.proto = proto;
        packet.ip_check = 0;
        packet.l4 = l4 as u32;
        packet.length = length as u32;
        transport(bounds, packet, l4, length - headers, walk).map_err(|stop| of_fragment(stop, is_first))?;
        if is_first { Err(Stop::First) } else { Ok(()) }
    }
}

/// Returns why a packet has no ports that can be read: the other fragments complete the transport header of a first fragment.
#[inline(always)]
const fn of_fragment(stop: Stop, is_first: bool) -> Stop {
    match stop {
        Stop::Refused(Reason::Malformed) if is_first => Stop::Refused(Reason::HiddenPorts),
        stop => stop,
    }
}

/// Returns the length of the IP packet. A stated length of 0 means all bytes of the buffer: a packet of more than 64 KiB that
/// the kernel has not segmented yet (BIG TCP).
#[inline(always)]
fn ip_length(bounds: Bounds, link: usize, stated: usize) -> usize {
    if stated == 0 { bounds.frame.saturating_sub(link) } else { stated }
}

/// Whether the IP header states more bytes than the packet has.
#[inline(always)]
fn exceeds(bounds: Bounds, link: usize, length: usize) -> bool {
    link + length > bounds.frame
}

/// Decodes the result of [`walk_extensions`](crate::header::walk_extensions). Returns the protocol after the IPv6 extension
/// headers, its offset, and whether the packet is the first of several fragments.
#[inline(always)]
fn behind_extensions(walked: u64) -> Result<(u8, usize, bool), Stop> {
    if walked == BROKEN {
        return Err(Stop::Retry);
    }
    if walked & LATER != 0 {
        return Err(Stop::Refused(Reason::Fragment));
    }
    Ok((walked as u8, (walked >> L4_AT) as usize & L4, walked & FIRST != 0))
}

/// Mask of the offset after the headers: the verifier needs a bound. The longest headers are shorter.
const L4: usize = 0x3fff;
const _: () = assert!(ETHERNET + size_of::<Ipv6>() + EXTENSION_HEADERS * 256 * 8 <= L4);

/// Reads ports and flags; `length`: bytes after the IP headers, by the length in the IP header.
#[inline(always)]
fn transport<A: Address>(
    bounds: Bounds,
    packet: &mut Packet<A>,
    offset: usize,
    length: usize,
    walk: bool,
) -> Result<(), Stop> {
    if packet.key.proto == PROTO_TCP {
        if length < size_of::<TcpHeader>() {
            return Err(Stop::Refused(Reason::Malformed));
        }
        let header: *const TcpHeader = bounds.at(offset).ok_or(Stop::Retry)?;
        // SAFETY: `at` has checked that the whole header is inside the packet.
        let header = unsafe { &*header };
        packet.tcp_flags = (u32::from_be(header.offset_flags_window) >> 16) as u16;
        packet.seq = u32::from_be(header.seq);
        packet.ack = u32::from_be(header.ack);
        set_ports(packet, header.ports);
        return Ok(());
    }
    packet.tcp_flags = 0;
    packet.seq = 0;
    packet.ack = 0;
    if walk && packet.key.proto == PROTO_SCTP {
        if length < sctp::HEADER {
            return Err(Stop::Refused(Reason::Malformed));
        }
    } else if length < udp::HEADER {
        return Err(Stop::Refused(Reason::Malformed));
    }
    let ports: *const [u32; udp::HEADER / 4] = bounds.at(offset).ok_or(Stop::Retry)?;
    // SAFETY: `at` has checked that eight bytes are inside the packet; the ports are the first four.
    set_ports(packet, unsafe { (*ports)[0] });
    Ok(())
}

/// Sets both ports from `ports`, in network byte order.
#[inline(always)]
fn set_ports<A>(packet: &mut Packet<A>, ports: u32) {
    let [a, b, c, d] = ports.to_ne_bytes();
    packet.key.src_port = u16::from_be_bytes([a, b]);
    packet.key.dst_port = u16::from_be_bytes([c, d]);
}

#[cfg(test)]
mod tests;
