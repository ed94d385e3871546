//! Rewriting a packet's addresses and ports, with its checksums.

use proxy_common::csum::{fold, pseudo_sum, replace16, replace32, update};
use proxy_common::{Address, PROTO_SCTP, PROTO_UDP, V4, V6};

use crate::net::{Ipv4, Ipv6, link_header, tcp, udp};
use crate::packet::{Packet, Parse};
use crate::sctp;
use crate::skb::{HelperFailed, Skb};

/// What a packet's tuple becomes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tuple<A> {
    /// Source address.
    pub src: A,
    /// Destination address.
    pub dst: A,
    /// Source port, host byte order.
    pub src_port: u16,
    /// Destination port, host byte order.
    pub dst_port: u16,
}

/// A family whose addresses can be rewritten.
pub trait Rewrite: Parse {
    /// Whether the sum over the whole packet (`CHECKSUM_COMPLETE`) stays as it is when an address changes and
    /// the transport checksum with it. IPv4's does not, since its own header checksum has made up for the
    /// address already; the checksum helper assumes IPv4 (`inet_proto_csum_replace_by_diff`).
    const COMPLETE_STAYS: bool;
    /// Writes both addresses, and the header checksum where there is one.
    fn set_addresses(header: &mut Self::Header, to: &Tuple<Self::Words>, difference: u64);
    /// The same by helper, for the header at `at` whose checksum is `check`. Gives what it adds to a sum over the
    /// header.
    fn store_addresses(
        skb: Skb,
        at: u32,
        check: u16,
        to: [&Self::Words; 2],
        difference: u64,
    ) -> Result<u64, HelperFailed>;
}

impl Rewrite for V4 {
    const COMPLETE_STAYS: bool = false;

    #[inline(always)]
    fn set_addresses(header: &mut Ipv4, to: &Tuple<[u32; 1]>, difference: u64) {
        [header.src] = to.src;
        [header.dst] = to.dst;
        header.check = update(header.check, difference);
    }

    #[inline(always)]
    fn store_addresses(
        skb: Skb,
        at: u32,
        check: u16,
        to: [&[u32; 1]; 2],
        difference: u64,
    ) -> Result<u64, HelperFailed> {
        let [[src], [dst]] = to;
        skb.store(at + 12, &[*src, *dst])?;
        let new = update(check, difference);
        skb.store(at + 10, &new)?;
        Ok(difference + replace16(check, new))
    }
}

impl Rewrite for V6 {
    const COMPLETE_STAYS: bool = true;

    #[inline(always)]
    fn set_addresses(header: &mut Ipv6, to: &Tuple<[u32; 4]>, _difference: u64) {
        header.src = to.src;
        header.dst = to.dst;
    }

    #[inline(always)]
    fn store_addresses(
        skb: Skb,
        at: u32,
        _check: u16,
        to: [&[u32; 4]; 2],
        difference: u64,
    ) -> Result<u64, HelperFailed> {
        let [src, dst] = to;
        skb.store(at + 8, &[*src, *dst])?;
        Ok(difference)
    }
}

/// What the change of an address adds to a sum over it.
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

/// Both ports as the word that stands in the packet.
#[inline(always)]
pub fn ports(src: u16, dst: u16) -> u32 {
    let ([a, b], [c, d]) = (src.to_be_bytes(), dst.to_be_bytes());
    u32::from_ne_bytes([a, b, c, d])
}

/// Folds a difference to the 32 bits that helpers take; twice, since the first fold may carry.
#[inline(always)]
pub(crate) fn fold32(difference: u64) -> u32 {
    let folded = (difference & 0xffff_ffff) + (difference >> 32);
    ((folded & 0xffff_ffff) + (folded >> 32)) as u32
}

/// Whether `check` may be what a packet carries whose checksum is still to be made (`CHECKSUM_PARTIAL`): the sum
/// of its pseudo header. One complete checksum in 65,536 looks the same, and is treated with the same care.
#[inline(always)]
fn may_be_partial<F: Parse>(packet: &Packet<F::Words>, check: u16) -> bool {
    let key = &packet.key;
    let pseudo = fold(pseudo_sum(&key.src, &key.dst, key.proto, packet.length - F::HEADER as u32));
    check == pseudo || (check == 0 && pseudo == 0xffff)
}

/// Rewrites the packet to the tuple `to`.
///
/// Nearly every packet is rewritten in place. A program cannot ask whether a checksum is complete; but one that is
/// not is the sum of the pseudo header, and segments that the kernel will cut are marked as such. These, and
/// packets with options or extension headers, go through the kernel's helpers, which know: four calls, each as
/// dear as half a lookup.
#[inline(always)]
pub fn rewrite<F: Rewrite>(
    skb: Skb,
    packet: &Packet<F::Words>,
    to: &Tuple<F::Words>,
) -> Result<(), HelperFailed> {
    let key = &packet.key;
    let difference = address_difference(&key.src, &to.src) + address_difference(&key.dst, &to.dst);
    let link = link_header();
    if packet.l4 as usize == link + F::HEADER && skb.gso_size() == 0 {
        let written = if packet.key.proto == PROTO_UDP {
            in_place::<F, BEFORE_UDP_CHECK>(skb, link, packet, to, difference)
        } else if packet.key.proto == PROTO_SCTP {
            false
        } else {
            in_place::<F, BEFORE_TCP_CHECK>(skb, link, packet, to, difference)
        };
        if written {
            return Ok(());
        }
    }
    by_helper::<F>(skb, packet, to, difference)
}

/// Rewrites through a pointer; `false` if that cannot be done, and then nothing was written.
#[inline(always)]
fn in_place<F: Rewrite, const BETWEEN: usize>(
    skb: Skb,
    link: usize,
    packet: &Packet<F::Words>,
    to: &Tuple<F::Words>,
    difference: u64,
) -> bool {
    let Some(segment) = skb.bounds().at::<Segment<F::Header, BETWEEN>>(link) else { return false };
    // SAFETY: `at` found all of it inside the packet, and the kernel has made it writable for this program
    // (`bpf_unclone_prologue`).
    let segment = unsafe { &mut *segment.cast_mut() };
    let old = segment.check;
    if may_be_partial::<F>(packet, old) {
        return false;
    }
    let (old_ports, new_ports) = (segment.ports, ports(to.src_port, to.dst_port));
    F::set_addresses(&mut segment.ip, to, difference);
    segment.ports = new_ports;
    let check = update(old, difference + replace32(old_ports, new_ports));
    if BETWEEN == BEFORE_UDP_CHECK {
        segment.check = udp_check(old, check);
    } else {
        segment.check = check;
    }
    if !F::COMPLETE_STAYS {
        skb.add_to_complete(!fold32(difference));
    }
    true
}

/// What a UDP packet with the checksum `old` carries when it should be `new`: zero means "none" and stays; one that
/// becomes zero is sent as its complement.
#[inline(always)]
pub fn udp_check(old: u16, new: u16) -> u16 {
    match (old, new) {
        (0, _) => 0,
        (_, 0) => 0xffff,
        _ => new,
    }
}

/// Rewrites by the kernel's helpers, which know how far the checksum is.
#[inline(always)]
fn by_helper<F: Rewrite>(
    skb: Skb,
    packet: &Packet<F::Words>,
    to: &Tuple<F::Words>,
    difference: u64,
) -> Result<(), HelperFailed> {
    F::store_addresses(skb, link_header() as u32, packet.ip_check, [&to.src, &to.dst], difference)?;
    let is_sctp = packet.key.proto == PROTO_SCTP;
    if F::COMPLETE_STAYS && (packet.is_later() || is_sctp) {
        // No transport checksum makes up for the addresses.
        skb.add_to_complete(fold32(difference));
    }
    if packet.is_later() {
        return Ok(());
    }
    let (old_ports, new_ports) =
        (ports(packet.key.src_port, packet.key.dst_port), ports(to.src_port, to.dst_port));
    if is_sctp {
        let end = link_header() as u32 + packet.length;
        return sctp::change_ports(skb, packet.l4, end, old_ports, new_ports);
    }
    let (check, flags) = if packet.key.proto == PROTO_UDP {
        // A UDP checksum of zero means "none" and stays; one that becomes zero is sent as its complement.
        (packet.l4 + udp::CHECK, u64::from(aya_ebpf::bindings::BPF_F_MARK_MANGLED_0))
    } else {
        (packet.l4 + tcp::CHECK, 0)
    };
    skb.correct_pseudo(check, fold32(difference), flags)?;
    if F::COMPLETE_STAYS {
        skb.add_to_complete(fold32(difference));
    }
    if old_ports != new_ports {
        skb.correct_word(check, old_ports, new_ports, flags)?;
        skb.store(packet.l4, &new_ports)?;
    }
    Ok(())
}

/// Words of 16 bits between the ports and the checksum.
const BEFORE_TCP_CHECK: usize = 6;
/// The same for UDP.
const BEFORE_UDP_CHECK: usize = 1;

/// An IP header without options, and a transport header up to its checksum.
#[repr(C)]
struct Segment<H, const BETWEEN: usize> {
    ip: H,
    ports: u32,
    between: [u16; BETWEEN],
    check: u16,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_stand_as_on_the_wire() {
        assert_eq!(ports(0x1234, 80).to_ne_bytes(), [0x12, 0x34, 0, 80]);
    }

    #[test]
    fn the_difference_of_an_unchanged_address_is_nothing() {
        // In ones' complement all bits set is zero.
        assert_eq!(fold(address_difference(&[0x0a00_0001], &[0x0a00_0001])), 0xffff);
    }
}
