//! IP headers read by helper, wherever they stand: those that errors quote, and those of fragments. Slower than
//! [`packet`](crate::packet), which is for every packet, and free of pointers that the verifier has to follow.

use aya_ebpf::bindings::__sk_buff;
use proxy_common::{Address, Family, V4, V6};

use crate::net::{EXTENSION_HEADERS, IPV4_OFFSET, IPV6_OFFSET, Ipv4, Ipv6, extension};
use crate::skb::Skb;

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
    fn read(skb: Skb, at: u32) -> Option<Header<Self::Words>>;
}

impl Read for V4 {
    #[inline(always)]
    fn read(skb: Skb, at: u32) -> Option<Header<[u32; 1]>> {
        let mut ip = Ipv4::ZERO;
        skb.load(at, &mut ip, size_of::<Ipv4>() as u32).ok()?;
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
    fn read(skb: Skb, at: u32) -> Option<Header<[u32; 4]>> {
        let mut ip = Ipv6::ZERO;
        skb.load(at, &mut ip, size_of::<Ipv6>() as u32).ok()?;
        if ip.version_class_label.to_ne_bytes()[0] >> 4 != 6 {
            return None;
        }
        let behind = at + size_of::<Ipv6>() as u32;
        let mut found = u64::from(behind) << L4_AT | u64::from(ip.next_header);
        if extension::is(ip.next_header) {
            found = walk_extensions(skb.raw(), u32::from(ip.next_header), behind);
        }
        if found == BROKEN {
            return None;
        }
        let mut id = 0u32;
        if found >> FRAGMENT_AT != 0 {
            skb.load((found >> FRAGMENT_AT) as u32 + 4, &mut id, size_of::<u32>() as u32).ok()?;
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

/// Extension headers that are not all there, or too many.
const BROKEN: u64 = u64::MAX;
/// Beside the protocol: a later fragment.
const LATER: u64 = 1 << 8;
/// Above it: the offset of what is behind the headers.
const L4_AT: u32 = 16;
/// Above that: the offset of the fragment header, or 0.
const FRAGMENT_AT: u32 = 40;
/// The bits of an offset; six headers are far shorter.
const OFFSET: u64 = (1 << (FRAGMENT_AT - L4_AT)) - 1;

/// Walks over IPv6 extension headers. Gives the protocol behind them, and the numbers above it; a function that the
/// verifier checks once, on its own ("global").
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn walk_extensions(skb: *mut __sk_buff, proto: u32, offset: u32) -> u64 {
    let (skb, mut proto, mut offset) = (Skb::from_raw(skb), proto as u8, offset);
    let mut fragment = 0;
    let mut walked = 0;
    while walked < EXTENSION_HEADERS {
        let mut header = [0u8; 4];
        if skb.load(offset, &mut header, size_of::<[u8; 4]>() as u32).is_err() {
            return BROKEN;
        }
        let [next, length, high, low] = header;
        if proto == extension::FRAGMENT {
            fragment = offset;
        }
        let is_later = proto == extension::FRAGMENT && u16::from_be_bytes([high, low]) & IPV6_OFFSET != 0;
        offset = offset.wrapping_add(extension::length(proto, length));
        proto = next;
        if is_later || !extension::is(proto) {
            return u64::from(fragment) << FRAGMENT_AT
                | (u64::from(offset) & OFFSET) << L4_AT
                | if is_later { LATER } else { 0 }
                | u64::from(proto);
        }
        walked += 1;
    }
    BROKEN
}

/// Equality word by word: the compiler would call `memcmp` for arrays, which a program does not have.
#[inline(always)]
pub fn same<A: Address>(a: &A, b: &A) -> bool {
    let (a, b) = (a.words(), b.words());
    a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3]
}
