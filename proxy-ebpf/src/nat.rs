//! Rewriting a packet's addresses and ports, with its checksums.

use proxy_common::csum::{replace32, update};
use proxy_common::{Address, PROTO_UDP, V4, V6};

use crate::net::{ETHERNET, tcp, udp};
use crate::packet::{Packet, Parse};
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
    /// Writes both addresses and the word of both ports, and the header checksum where there is one.
    ///
    /// In most packets they stand side by side, and each call of a helper costs as much as a lookup in an array.
    fn store_tuple(
        skb: Skb,
        packet: &Packet<Self::Words>,
        to: &Tuple<Self::Words>,
        difference: u64,
    ) -> Result<(), HelperFailed>;
}

impl Rewrite for V4 {
    const COMPLETE_STAYS: bool = false;

    #[inline(always)]
    fn store_tuple(
        skb: Skb,
        packet: &Packet<[u32; 1]>,
        to: &Tuple<[u32; 1]>,
        difference: u64,
    ) -> Result<(), HelperFailed> {
        let ([src], [dst]) = (to.src, to.dst);
        let (check, ports) = (update(packet.ip_check, difference), ports(to.src_port, to.dst_port));
        if packet.l4 as usize == ETHERNET + Self::HEADER {
            return skb.store(ETHERNET as u32 + 10, &SideBySide4 { check, src, dst, ports });
        }
        skb.store(ETHERNET as u32 + 12, &[src, dst])?;
        skb.store(ETHERNET as u32 + 10, &check)?;
        skb.store(packet.l4, &ports)
    }
}

/// What is rewritten of an IPv4 packet without options.
#[repr(C, packed(2))]
struct SideBySide4 {
    check: u16,
    src: u32,
    dst: u32,
    ports: u32,
}

impl Rewrite for V6 {
    const COMPLETE_STAYS: bool = true;

    #[inline(always)]
    fn store_tuple(
        skb: Skb,
        packet: &Packet<[u32; 4]>,
        to: &Tuple<[u32; 4]>,
        _difference: u64,
    ) -> Result<(), HelperFailed> {
        let ports = ports(to.src_port, to.dst_port);
        if packet.l4 as usize == ETHERNET + Self::HEADER {
            return skb.store(ETHERNET as u32 + 8, &SideBySide6 { src: to.src, dst: to.dst, ports });
        }
        skb.store(ETHERNET as u32 + 8, &[to.src, to.dst])?;
        skb.store(packet.l4, &ports)
    }
}

/// What is rewritten of an IPv6 packet without extension headers.
#[repr(C)]
struct SideBySide6 {
    src: [u32; 4],
    dst: [u32; 4],
    ports: u32,
}

/// What the change of the addresses adds to a sum over them.
#[inline(always)]
fn address_difference<A: Address>(packet: &Packet<A>, to: &Tuple<A>) -> u64 {
    let (old_src, new_src) = (packet.key.src.words(), to.src.words());
    let (old_dst, new_dst) = (packet.key.dst.words(), to.dst.words());
    let mut difference = 0;
    let mut word = 0;
    while word < size_of::<A>() / size_of::<u32>() {
        difference += replace32(old_src[word], new_src[word]) + replace32(old_dst[word], new_dst[word]);
        word += 1;
    }
    difference
}

/// Both ports as the word that stands in the packet.
#[inline(always)]
fn ports(src: u16, dst: u16) -> u32 {
    let ([a, b], [c, d]) = (src.to_be_bytes(), dst.to_be_bytes());
    u32::from_ne_bytes([a, b, c, d])
}

/// Rewrites the packet to the tuple `to`.
#[inline(always)]
pub fn rewrite<F: Rewrite>(
    skb: Skb,
    packet: &Packet<F::Words>,
    to: &Tuple<F::Words>,
) -> Result<(), HelperFailed> {
    let difference = address_difference(packet, to);
    // Folded to 32 bits: twice, since the first fold may carry.
    let folded = (difference & 0xffff_ffff) + (difference >> 32);
    let folded = ((folded & 0xffff_ffff) + (folded >> 32)) as u32;
    let (check, flags) = if packet.key.proto == PROTO_UDP {
        // A UDP checksum of zero means "none" and stays; one that becomes zero is sent as its complement.
        (packet.l4 + udp::CHECK, u64::from(aya_ebpf::bindings::BPF_F_MARK_MANGLED_0))
    } else {
        (packet.l4 + tcp::CHECK, 0)
    };
    let (old_ports, new_ports) =
        (ports(packet.key.src_port, packet.key.dst_port), ports(to.src_port, to.dst_port));
    F::store_tuple(skb, packet, to, difference)?;
    skb.correct_pseudo(check, folded, flags)?;
    if F::COMPLETE_STAYS {
        skb.add_to_complete(folded);
    }
    if old_ports != new_ports {
        skb.correct_word(check, old_ports, new_ports, flags)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proxy_common::csum::fold;

    #[test]
    fn ports_stand_as_on_the_wire() {
        assert_eq!(ports(0x1234, 80).to_ne_bytes(), [0x12, 0x34, 0, 80]);
    }

    #[test]
    fn the_difference_of_an_unchanged_tuple_is_nothing() {
        let mut packet = Packet::<[u32; 1]>::EMPTY;
        packet.key.src = [0x0a00_0001];
        packet.key.dst = [0x0a60_0001];
        let same = Tuple { src: packet.key.src, dst: packet.key.dst, src_port: 1, dst_port: 2 };
        // In ones' complement all bits set is zero.
        assert_eq!(fold(address_difference(&packet, &same)), 0xffff);
    }
}
