//! Rewriting SCTP packets. Their checksum covers no address, and a change of ports is corrected by what the
//! difference of two CRCs is ([`proxy_common::crc32c`]).

use aya_ebpf::bindings::__sk_buff;
use proxy_common::crc32c;
use proxy_common::csum::replace32;
use proxy_common::{Family, V4, V6};

use crate::nat::{Rewrite, Tuple, address_difference, fold32, ports};
use crate::net::{link_header, sctp};
use crate::packet::{Packet, Parse};
use crate::skb::{HelperFailed, Skb};

/// A family whose SCTP packets can be rewritten.
pub trait Sctp: Parse {
    /// Rewrites the packet to the tuple `to`.
    fn rewrite_sctp(
        skb: Skb,
        packet: &Packet<Self::Words>,
        to: &Tuple<Self::Words>,
    ) -> Result<(), HelperFailed>;
}

/// [`Sctp::rewrite_sctp`].
#[inline(always)]
fn rewrite<F: Rewrite>(
    skb: Skb,
    packet: &Packet<F::Words>,
    to: &Tuple<F::Words>,
) -> Result<(), HelperFailed> {
    let key = &packet.key;
    let difference = address_difference(&key.src, &to.src) + address_difference(&key.dst, &to.dst);
    let link = link_header() as u32;
    F::store_addresses(skb, link, packet.ip_check, [&to.src, &to.dst], difference)?;
    // What a sum over the whole packet changes by: IPv4's header makes up for its addresses itself.
    let mut sum = if F::COMPLETE_STAYS { difference } else { 0 };
    let (old, new) = (ports(key.src_port, key.dst_port), ports(to.src_port, to.dst_port));
    if old != new {
        skb.store(packet.l4, &new)?;
        let end = link + packet.length;
        sum += replace32(old, new) + correct(skb, packet.l4, end, end, old ^ new)?;
    }
    skb.add_to_complete(fold32(sum));
    Ok(())
}

/// Corrects the checksum of a packet whose SCTP header begins at `at`, and which ends at `end` as its header says, by
/// the difference of its ports as they stand; nothing if `there` is the end of what is there of it, and the checksum
/// behind it. Gives what that adds to a sum.
#[inline(always)]
pub fn correct(skb: Skb, at: u32, end: u32, there: u32, difference: u32) -> Result<u64, HelperFailed> {
    let (at, length) = (at + sctp::CHECK, end.wrapping_sub(at));
    let mut old = 0u32;
    if at + size_of::<u32>() as u32 > there || skb.load(at, &mut old, size_of::<u32>() as u32).is_err() {
        return Ok(0);
    }
    // Zero: the device will compute it.
    if old == 0 {
        return Ok(0);
    }
    let new = old ^ crc_change(u32::from_le(difference), length).to_le();
    skb.store(at, &new)?;
    Ok(replace32(old, new))
}

/// [`crc32c::multiply`], as a function that the verifier checks once, on its own ("global").
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn crc_times(a: u32, b: u32) -> u32 {
    crc32c::multiply(a, b)
}

/// [`crc32c::change`], likewise.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn crc_change(difference: u32, length: u32) -> u32 {
    crc32c::change(difference, length, |a, b| crc_times(a, b))
}

macro_rules! sctp {
    ($family:ty, $rewrite:ident) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $rewrite(
            skb: *mut __sk_buff,
            packet: *const Packet<<$family as Family>::Words>,
            to: *const Tuple<<$family as Family>::Words>,
        ) -> i32 {
            // SAFETY: the verifier lets callers pass memory of that size, or null.
            let (packet, to) = unsafe { (packet.as_ref(), to.as_ref()) };
            let Some(packet) = packet else { return 1 };
            let Some(to) = to else { return 1 };
            i32::from(rewrite::<$family>(Skb::from_raw(skb), packet, to).is_err())
        }

        impl Sctp for $family {
            #[inline(always)]
            fn rewrite_sctp(
                skb: Skb,
                packet: &Packet<Self::Words>,
                to: &Tuple<Self::Words>,
            ) -> Result<(), HelperFailed> {
                if $rewrite(skb.raw(), packet, to) == 0 { Ok(()) } else { Err(HelperFailed) }
            }
        }
    };
}

sctp!(V4, rewrite_sctp4);
sctp!(V6, rewrite_sctp6);
