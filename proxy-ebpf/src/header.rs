//! IP headers read by helper, wherever they stand: those that errors quote, and those of fragments. Slower than
//! [`parse`](crate::parse), which is for every packet, and free of pointers that the verifier has to follow.

use proxy_common::{Address, Family, V4, V6};

use crate::frame::Frame;
use crate::net::{EXTENSION_HEADERS, IPV4_OFFSET, IPV6_MORE, IPV6_OFFSET, Ipv4, Ipv6, extension};

/// What an IP header says, with the extension headers behind it.
#[derive(Clone, Copy)]
pub struct Header<A> {
    /// Source address.
    pub src: A,
    /// Destination address.
    pub dst: A,
    /// Offset of what follows the headers.
    pub l4: u32,
    /// One past the last byte of the packet, as its length says; it may lie beyond what is there.
    pub end: u32,
    /// IPv4's header checksum; 0 for IPv6.
    pub check: u16,
    /// Protocol of what follows.
    pub proto: u8,
    /// Identification of the packet that it is a fragment of, as it stands there; 0 for an IPv6 packet in one piece.
    pub id: u32,
    /// It is a fragment, and not the first: what follows is no transport header.
    pub is_later: bool,
}

/// A family whose headers can be read so.
pub trait Read: Family {
    /// The header at `at`; `None` if it is none, or not all there.
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

/// Extension headers that are not all there.
pub const BROKEN: u64 = u64::MAX;
/// Beside the protocol: a later fragment.
pub const LATER: u64 = 1 << 8;
/// The first fragment of several.
pub const FIRST: u64 = 1 << 9;
/// Above it: the offset of what is behind the headers.
pub const L4_AT: u32 = 16;
/// Above that: the offset of the fragment header, or 0.
const FRAGMENT_AT: u32 = 40;
/// The bits of an offset; six headers are far shorter.
const OFFSET: u64 = (1 << (FRAGMENT_AT - L4_AT)) - 1;

/// Walks over IPv6 extension headers that begin at `offset` with one of number `proto`. Gives the protocol behind them, and
/// above it the numbers that [`Read::read`] takes apart; the protocol is that of an extension header if there are too many.
#[inline(always)]
pub fn walk_extensions<F: Frame>(frame: F, proto: u8, offset: u32) -> u64 {
    walk(proto, offset, |at| {
        let mut header = [0u8; 4];
        frame.load(at, &mut header, size_of::<[u8; 4]>() as u32).ok()?;
        Some(header)
    })
}

/// [`walk_extensions`], over what `load` gives: four bytes at an offset, if they are there.
#[inline(always)]
pub fn walk(mut proto: u8, mut offset: u32, load: impl Fn(u32) -> Option<[u8; 4]>) -> u64 {
    let mut found = 0;
    let mut walked = 0;
    while walked < EXTENSION_HEADERS {
        let Some([next, length, high, low]) = load(offset) else { return BROKEN };
        if proto == extension::FRAGMENT {
            let fragment = u16::from_be_bytes([high, low]);
            let is_later = if fragment & IPV6_OFFSET != 0 { LATER } else { 0 };
            // Without more to come it is a packet in one piece (RFC 6946).
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

/// Equality word by word: the compiler would call `memcmp` for arrays, which a program does not have.
#[inline(always)]
pub fn same<A: Address>(a: &A, b: &A) -> bool {
    let (a, b) = (a.words(), b.words());
    a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3]
}
