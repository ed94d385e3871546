//! Reads IP headers with a helper, at any offset: headers that ICMP errors quote, and headers of fragments. Slower than
//! [`parse`](crate::parse), which handles every packet, but free of pointers that the verifier has to follow.

use proxy_common::{Address, Family, V4, V6};

use crate::frame::Frame;
use crate::net::{EXTENSION_HEADERS, IPV4_OFFSET, IPV6_MORE, IPV6_OFFSET, Ipv4, Ipv6, extension};

/// Fields of an IP header and of the extension headers after it.
#[derive(Clone, Copy)]
pub struct Header<A> {
    /// Source address.
    pub src: A,
    /// Destination address.
    pub dst: A,
    /// Offset of the first byte after the headers.
    pub l4: u32,
    /// Offset after the last byte of the packet, by the length in its header; it may be beyond the end of the buffer.
    pub end: u32,
    /// IPv4 header checksum, in network byte order; 0 for IPv6.
    pub check: u16,
    /// Protocol after the headers.
    pub proto: u8,
    /// Identification of the fragmented packet, in network byte order; 0 for an IPv6 packet without a fragment header.
    pub id: u32,
    /// Whether the packet is a fragment other than the first, without a transport header.
    pub is_later: bool,
}

/// An address family whose headers can be read with a helper.
pub trait Read: Family {
    /// Reads the header at offset `at`; `None` if it is invalid or incomplete.
    fn read<F: Frame>(frame: F, at: u32) -> Option<Header<Self::Words>>;
}

impl Read for V4 {
    #[inline(always)]
    fn read<F: Frame>(frame: F, at: u32) -> Option<Header<[u32; 1]>> {
        let mut ip = Ipv4::ZERO;
        frame.load(at, &mut ip, size_of::<Ipv4>() as u32).ok()?;
        let length = u32::from(ip.version_length & 0xf) * 4;
        if ip.version_length >> 4 != 4 || length < size_of::<Ipv4>() as u32 {
            return None;
        }
        Some(Header {
            src: [ip.src],
            dst: [ip.dst],
            l4: at + length,
            end: at + u32::from(u16::from_be(ip.total_length)),
            check: ip.check,
            proto: ip.protocol,
            id: u32::from(ip.id),
            is_later: u16::from_be(ip.fragment) & IPV4_OFFSET != 0,
        })
    }
}

impl Read for V6 {
    #[inline(always)]
    fn read<F: Frame>(frame: F, at: u32) -> Option<Header<[u32; 4]>> {
        let mut ip = Ipv6::ZERO;
        frame.load(at, &mut ip, size_of::<Ipv6>() as u32).ok()?;
        if ip.version_class_label.to_ne_bytes()[0] >> 4 != 6 {
            return None;
        }
        let behind = at + size_of::<Ipv6>() as u32;
        let mut found = u64::from(behind) << L4_AT | u64::from(ip.next_header);
        if extension::is(ip.next_header) {
            found = frame.walk_extensions(ip.next_header, behind);
        }
        if found == BROKEN {
            return None;
        }
        let mut id = 0u32;
        if found >> FRAGMENT_AT != 0 {
            frame.load((found >> FRAGMENT_AT) as u32 + 4, &mut id, size_of::<u32>() as u32).ok()?;
        }
        Some(Header {
            src: ip.src,
            dst: ip.dst,
            l4: (found >> L4_AT & OFFSET) as u32,
            end: behind + u32::from(u16::from_be(ip.payload_length)),
            check: 0,
            proto: found as u8,
            id,
            is_later: found & LATER != 0,
        })
    }
}

/// Result of [`walk`] if the extension headers are not complete.
pub const BROKEN: u64 = u64::MAX;
/// Bit of the result: a later fragment.
pub const LATER: u64 = 1 << 8;
/// Bit of the result: the first of several fragments.
pub const FIRST: u64 = 1 << 9;
/// Lowest bit in the result of the offset after the headers.
pub const L4_AT: u32 = 16;
/// Lowest bit in the result of the offset of the fragment header; the offset is 0 without such a header.
const FRAGMENT_AT: u32 = 40;
/// Mask of an offset; six headers are far shorter.
const OFFSET: u64 = (1 << (FRAGMENT_AT - L4_AT)) - 1;

/// Walks over the IPv6 extension headers at `offset`, the first of which has the number `proto`. Returns the protocol after
/// them in the low byte, and above it [`LATER`], [`FIRST`] and the offsets; or [`BROKEN`]. The protocol is that of an
/// extension header if there are too many.
#[inline(always)]
pub fn walk_extensions<F: Frame>(frame: F, proto: u8, offset: u32) -> u64 {
    walk(proto, offset, |at| {
        let mut header = [0u8; 4];
        frame.load(at, &mut header, size_of::<[u8; 4]>() as u32).ok()?;
        Some(header)
    })
}

/// [`walk_extensions`] for any source: `load` returns the four bytes at an offset, or `None` beyond the end.
#[inline(always)]
pub fn walk(mut proto: u8, mut offset: u32, load: impl Fn(u32) -> Option<[u8; 4]>) -> u64 {
    let mut found = 0;
    let mut walked = 0;
    while walked < EXTENSION_HEADERS {
        let Some([next, length, high, low]) = load(offset) else { return BROKEN };
        if proto == extension::FRAGMENT {
            let fragment = u16::from_be_bytes([high, low]);
            let is_later = if fragment & IPV6_OFFSET != 0 { LATER } else { 0 };
            // Without "more fragments", the packet is unfragmented (RFC 6946).
            let is_first = if is_later == 0 && fragment & IPV6_MORE != 0 { FIRST } else { 0 };
            found = u64::from(offset) << FRAGMENT_AT | is_later | is_first;
        }
        offset = offset.wrapping_add(extension::length(proto, length));
        proto = next;
        walked += 1;
        if found & LATER != 0 || !extension::is(proto) {
            break;
        }
    }
    found | (u64::from(offset) & OFFSET) << L4_AT | u64::from(proto)
}

/// Compares two addresses word by word: for arrays, the compiler would call `memcmp`, which BPF programs do not have.
#[inline(always)]
pub fn same<A: Address>(a: &A, b: &A) -> bool {
    let (a, b) = (a.words(), b.words());
    a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3]
}
