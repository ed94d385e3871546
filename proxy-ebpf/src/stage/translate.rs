//! Rewrites a packet's addresses and ports, and corrects its checksums.
//!
//! Programs read packets directly, and write them by helper ([`Frame::store`]): if a program writes to packets directly,
//! the kernel gives every clone its own headers before the program's first instruction, foreign packets included
//! (`bpf_unclone_prologue`).

use proxy_common::csum::{fold, pseudo_sum, replace16, replace32, update};
use proxy_common::reason::Reason;
use proxy_common::{Address, PROTO_SCTP, PROTO_UDP, V4, V6};

use crate::context::{Packet, Tuple};
use crate::frame::{Checksum, Frame, HelperFailed};
use crate::net::{Ipv4, Ipv6, tcp, udp};
use crate::parse::Parse;

/// Whether a rewrite changes the time to live, or hop limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hop {
    /// Unchanged: the packet is not forwarded here.
    Keep,
    /// Decremented, as by a router.
    Decrement,
}

/// A family whose addresses can be rewritten.
pub trait Rewrite: Parse {
    /// Whether the sum over the whole packet (`CHECKSUM_COMPLETE`) stays the same if an address and the transport checksum
    /// change. That is not so for IPv4, whose header checksum has already compensated for the address; the checksum helper
    /// assumes IPv4 (`inet_proto_csum_replace_by_diff`).
    const COMPLETE_STAYS: bool;
    /// The part of the IP header that a rewrite replaces: from [`Rewrite::TAIL_AT`] to the end of a header without options.
    type Tail: Copy;
    /// Offset of the tail in the header.
    const TAIL_AT: usize;
    /// Returns the time to live, or hop limit.
    fn ttl(header: &Self::Header) -> u8;
    /// Returns the new tail of a header. `difference`: checksum difference of the addresses; `ttl`: the new time to live.
    fn tail(header: &Self::Header, to: &Tuple<Self::Words>, difference: u64, ttl: u8) -> Self::Tail;
    /// Writes both addresses by helper into the header at `at`, whose checksum is `check`. Returns what the change adds to
    /// a sum over the header.
    fn store_addresses<F: Frame>(
        frame: F,
        at: u32,
        check: u16,
        to: [&Self::Words; 2],
        difference: u64,
    ) -> Result<u64, HelperFailed>;
    /// Decrements the time to live of the header at `at`. Returns `false` if the time to live is exceeded; nothing is
    /// written then.
    fn decrement_ttl<F: Frame>(frame: F, at: u32) -> Result<bool, HelperFailed>;
    /// Writes the time to live of the header at `at`.
    fn set_ttl<F: Frame>(frame: F, at: u32, ttl: u8) -> Result<(), HelperFailed>;
}

/// An IPv4 header from byte 8 on.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tail4 {
    ttl: u8,
    protocol: u8,
    check: u16,
    src: u32,
    dst: u32,
}

/// An IPv6 header from byte 4 on.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tail6 {
    payload_length: u16,
    next_header: u8,
    hop_limit: u8,
    src: [u32; 4],
    dst: [u32; 4],
}

/// Returns what a change of the time to live adds to a sum over an IPv4 header.
#[inline(always)]
fn ttl_difference(protocol: u8, old: u8, new: u8) -> u64 {
    replace16(u16::from_ne_bytes([old, protocol]), u16::from_ne_bytes([new, protocol]))
}

/// Returns what a change of the hop limit adds to a sum over an IPv6 header, which has no checksum to compensate for it.
#[inline(always)]
fn hop_limit_difference(old: u8, new: u8) -> u64 {
    replace16(u16::from_ne_bytes([0, old]), u16::from_ne_bytes([0, new]))
}

impl Rewrite for V4 {
    const COMPLETE_STAYS: bool = false;
    type Tail = Tail4;
    const TAIL_AT: usize = 8;

    #[inline(always)]
    fn ttl(header: &Ipv4) -> u8 {
        header.ttl
    }

    #[inline(always)]
    fn tail(header: &Ipv4, to: &Tuple<[u32; 1]>, difference: u64, ttl: u8) -> Tail4 {
        let [src] = to.src;
        let [dst] = to.dst;
        let ttl_difference = ttl_difference(header.protocol, header.ttl, ttl);
        let check = update(header.check, difference + ttl_difference);
        Tail4 { ttl, protocol: header.protocol, check, src, dst }
    }

    #[inline(always)]
    fn store_addresses<F: Frame>(
        frame: F,
        at: u32,
        check: u16,
        to: [&[u32; 1]; 2],
        difference: u64,
    ) -> Result<u64, HelperFailed> {
        let [[src], [dst]] = to;
        frame.store_all(at + 12, &[*src, *dst])?;
        let new = update(check, difference);
        frame.store_all(at + 10, &new)?;
        Ok(difference + replace16(check, new))
    }

    #[inline(always)]
    fn decrement_ttl<F: Frame>(frame: F, at: u32) -> Result<bool, HelperFailed> {
        let mut word = [0u8; 4];
        frame.load(at + 8, &mut word, size_of::<[u8; 4]>() as u32)?;
        let [ttl, ..] = word;
        if ttl <= 1 {
            return Ok(false);
        }
        store_ttl(frame, at, word, ttl - 1)?;
        Ok(true)
    }

    #[inline(always)]
    fn set_ttl<F: Frame>(frame: F, at: u32, ttl: u8) -> Result<(), HelperFailed> {
        let mut word = [0u8; 4];
        frame.load(at + 8, &mut word, size_of::<[u8; 4]>() as u32)?;
        store_ttl(frame, at, word, ttl)
    }
}

impl Rewrite for V6 {
    const COMPLETE_STAYS: bool = true;
    type Tail = Tail6;
    const TAIL_AT: usize = 4;

    #[inline(always)]
    fn ttl(header: &Ipv6) -> u8 {
        header.hop_limit
    }

    #[inline(always)]
    fn tail(header: &Ipv6, to: &Tuple<[u32; 4]>, _difference: u64, ttl: u8) -> Tail6 {
        Tail6 {
            payload_length: header.payload_length,
            next_header: header.next_header,
            hop_limit: ttl,
            src: to.src,
            dst: to.dst,
        }
    }

    #[inline(always)]
    fn store_addresses<F: Frame>(
        frame: F,
        at: u32,
        _check: u16,
        to: [&[u32; 4]; 2],
        difference: u64,
    ) -> Result<u64, HelperFailed> {
        let [src, dst] = to;
        frame.store_all(at + 8, &[*src, *dst])?;
        Ok(difference)
    }

    #[inline(always)]
    fn decrement_ttl<F: Frame>(frame: F, at: u32) -> Result<bool, HelperFailed> {
        let mut ttl = 0u8;
        frame.load(at + 7, &mut ttl, 1)?;
        if ttl <= 1 {
            return Ok(false);
        }
        store_hop_limit(frame, at, ttl, ttl - 1)?;
        Ok(true)
    }

    #[inline(always)]
    fn set_ttl<F: Frame>(frame: F, at: u32, ttl: u8) -> Result<(), HelperFailed> {
        let mut old = 0u8;
        frame.load(at + 7, &mut old, 1)?;
        store_hop_limit(frame, at, old, ttl)
    }
}

/// Replaces the time to live of the IPv4 header at `at`, whose bytes from 8 on are `word`: time to live, protocol, checksum.
#[inline(always)]
fn store_ttl<F: Frame>(frame: F, at: u32, word: [u8; 4], ttl: u8) -> Result<(), HelperFailed> {
    let [old, protocol, c0, c1] = word;
    let check = update(u16::from_ne_bytes([c0, c1]), ttl_difference(protocol, old, ttl));
    let [c0, c1] = check.to_ne_bytes();
    frame.store_all(at + 8, &[ttl, protocol, c0, c1])
}

/// Replaces the hop limit of the IPv6 header at `at`.
#[inline(always)]
fn store_hop_limit<F: Frame>(frame: F, at: u32, old: u8, new: u8) -> Result<(), HelperFailed> {
    frame.store_all(at + 7, &new)?;
    frame.add_to_complete(fold32(hop_limit_difference(old, new)));
    Ok(())
}

/// Returns what the change of an address adds to a sum over it.
#[inline(always)]
pub fn address_difference<A: Address>(old: &A, new: &A) -> u64 {
    let (old, new) = (old.words(), new.words());
    let mut difference = 0;
    let mut word = 0;
    while word < size_of::<A>() / size_of::<u32>() {
        difference += replace32(old[word], new[word]);
        word += 1;
    }
    difference
}

/// Returns both ports as the word that is stored in the packet.
#[inline(always)]
pub fn ports(src: u16, dst: u16) -> u32 {
    let ([a, b], [c, d]) = (src.to_be_bytes(), dst.to_be_bytes());
    u32::from_ne_bytes([a, b, c, d])
}

/// Folds a difference to the 32 bits that helpers take; in two steps, since the first one may carry.
#[inline(always)]
pub fn fold32(difference: u64) -> u32 {
    let folded = (difference & 0xffff_ffff) + (difference >> 32);
    ((folded & 0xffff_ffff) + (folded >> 32)) as u32
}

/// Whether `check` may be the checksum field of a packet whose checksum is not complete (`CHECKSUM_PARTIAL`): the sum of
/// its pseudo header. One complete checksum in 65,536 has the same value, and is handled like a partial one.
#[inline(always)]
fn may_be_partial<Fam: Parse>(packet: &Packet<Fam::Words>, check: u16) -> bool {
    let key = &packet.key;
    let pseudo = fold(pseudo_sum(&key.src, &key.dst, key.proto, packet.length - Fam::HEADER as u32));
    check == pseudo || (check == 0 && pseudo == 0xffff)
}

/// Rewrites the packet to the tuple `to`.
///
/// Nearly every packet is rewritten by one store of its headers up to the transport checksum. A program cannot test whether
/// a checksum is complete, but a partial one is the sum of the pseudo header, and GSO packets are marked as such. These
/// packets, and packets with options or extension headers, are rewritten by the kernel's checksum helpers, which know the
/// state of the checksum: that takes more calls, each as expensive as half a lookup.
#[inline(always)]
pub fn rewrite<F: Frame, Fam: Rewrite>(
    frame: F,
    packet: &Packet<Fam::Words>,
    to: &Tuple<Fam::Words>,
    hop: Hop,
) -> Result<(), Reason> {
    let key = &packet.key;
    let difference = address_difference(&key.src, &to.src) + address_difference(&key.dst, &to.dst);
    let link = frame.link_header();
    if packet.l4 as usize == link + Fam::HEADER && frame.gso_size() == 0 && key.proto != PROTO_SCTP {
        let written = if key.proto == PROTO_UDP {
            at_once::<F, Fam, BEFORE_UDP_CHECK>(frame, link, packet, to, difference, hop)
        } else {
            at_once::<F, Fam, BEFORE_TCP_CHECK>(frame, link, packet, to, difference, hop)
        };
        match written {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(reason) => return Err(reason),
        }
    }
    if F::EARLY {
        // Unreachable: the caller has checked `is_plain`, and other packets pass to tc before this stage.
        return Err(Reason::RewriteFailed);
    }
    if hop == Hop::Decrement {
        match Fam::decrement_ttl(frame, link as u32) {
            Ok(true) => {}
            Ok(false) => return Err(Reason::TtlExceeded),
            Err(HelperFailed) => return Err(Reason::RewriteFailed),
        }
    }
    by_helper::<F, Fam>(frame, packet, to, difference, hop).map_err(|HelperFailed| Reason::RewriteFailed)
}

/// Number of 16-bit words between the ports and the TCP checksum.
const BEFORE_TCP_CHECK: usize = 6;
/// Number of 16-bit words between the ports and the UDP checksum.
const BEFORE_UDP_CHECK: usize = 1;

/// An IP header, or its tail, and a transport header up to its checksum.
#[repr(C)]
struct Segment<H, const BETWEEN: usize> {
    ip: H,
    ports: u32,
    between: [u16; BETWEEN],
    check: u16,
}

/// Rewrites the packet by one store. Returns `false` if that is not possible; nothing is written then.
#[inline(always)]
fn at_once<F: Frame, Fam: Rewrite, const BETWEEN: usize>(
    frame: F,
    link: usize,
    packet: &Packet<Fam::Words>,
    to: &Tuple<Fam::Words>,
    difference: u64,
    hop: Hop,
) -> Result<bool, Reason> {
    let Some(segment) = frame.bounds().at::<Segment<Fam::Header, BETWEEN>>(link) else { return Ok(false) };
    // SAFETY: `at` has checked that the whole segment header is inside the packet.
    let segment = unsafe { &*segment };
    let old = segment.check;
    if may_be_partial::<Fam>(packet, old) {
        return Ok(false);
    }
    let mut ttl = Fam::ttl(&segment.ip);
    if hop == Hop::Decrement {
        if ttl <= 1 {
            return Err(Reason::TtlExceeded);
        }
        ttl -= 1;
    }
    let new_ports = ports(to.src_port, to.dst_port);
    let ports_difference = replace32(segment.ports, new_ports);
    let check = update(old, difference + ports_difference);
    let new = Segment::<Fam::Tail, BETWEEN> {
        ip: Fam::tail(&segment.ip, to, difference, ttl),
        ports: new_ports,
        between: segment.between,
        check: if BETWEEN == BEFORE_UDP_CHECK { udp_check(old, check) } else { check },
    };
    // The length excludes the padding behind the checksum.
    let length = size_of::<Fam::Tail>() + size_of::<u32>() + (BETWEEN + 1) * size_of::<u16>();
    if frame.overwrite((link + Fam::TAIL_AT) as u32, &new, length as u32).is_err() {
        return Err(Reason::RewriteFailed);
    }
    // Corrects the sum over the whole packet (`CHECKSUM_COMPLETE`).
    if BETWEEN == BEFORE_UDP_CHECK && old == 0 {
        // No transport checksum compensates for the changes.
        let addresses = if Fam::COMPLETE_STAYS { difference } else { 0 };
        frame.add_to_complete(fold32(addresses + ports_difference));
    } else if !Fam::COMPLETE_STAYS {
        frame.add_to_complete(!fold32(difference));
    }
    if Fam::COMPLETE_STAYS && hop == Hop::Decrement {
        frame.add_to_complete(fold32(hop_limit_difference(ttl + 1, ttl)));
    }
    Ok(true)
}

/// Returns the checksum field of a UDP packet that had the checksum `old` and should have `new`: zero means "none" and
/// stays; a checksum that becomes zero is sent as its complement.
#[inline(always)]
pub fn udp_check(old: u16, new: u16) -> u16 {
    match (old, new) {
        (0, _) => 0,
        (_, 0) => 0xffff,
        _ => new,
    }
}

/// Rewrites the packet by the kernel's helpers, which know the state of the checksum.
#[inline(always)]
fn by_helper<F: Frame, Fam: Rewrite>(
    frame: F,
    packet: &Packet<Fam::Words>,
    to: &Tuple<Fam::Words>,
    difference: u64,
    hop: Hop,
) -> Result<(), HelperFailed> {
    let link = frame.link_header() as u32;
    let mut check = packet.ip_check;
    if hop == Hop::Decrement && !Fam::COMPLETE_STAYS {
        // The header checksum has been updated for the new time to live.
        frame.load(link + IPV4_CHECK, &mut check, size_of::<u16>() as u32)?;
    }
    Fam::store_addresses(frame, link, check, [&to.src, &to.dst], difference)?;
    let is_sctp = packet.key.proto == PROTO_SCTP;
    if Fam::COMPLETE_STAYS && (packet.is_later_fragment() || is_sctp) {
        // No transport checksum compensates for the addresses.
        frame.add_to_complete(fold32(difference));
    }
    if packet.is_later_fragment() {
        return Ok(());
    }
    let (old_ports, new_ports) =
        (ports(packet.key.src_port, packet.key.dst_port), ports(to.src_port, to.dst_port));
    if is_sctp {
        return frame.change_sctp_ports(packet.l4, link + packet.length, old_ports, new_ports);
    }
    let (check, kind) = if packet.key.proto == PROTO_UDP {
        (packet.l4 + udp::CHECK, Checksum::Optional)
    } else {
        (packet.l4 + tcp::CHECK, Checksum::Always)
    };
    frame.correct_pseudo(check, fold32(difference), kind)?;
    if Fam::COMPLETE_STAYS {
        frame.add_to_complete(fold32(difference));
    }
    if old_ports != new_ports {
        frame.correct_word(check, old_ports, new_ports, kind)?;
        frame.store_all(packet.l4, &new_ports)?;
        if kind == Checksum::Optional {
            let mut written = 0u16;
            frame.load(check, &mut written, size_of::<u16>() as u32)?;
            if written == 0 {
                frame.add_to_complete(fold32(replace32(old_ports, new_ports)));
            }
        }
    }
    Ok(())
}

/// Offset of the checksum in an IPv4 header.
const IPV4_CHECK: u32 = 10;

pub mod plain;
#[cfg(test)]
mod tests;
