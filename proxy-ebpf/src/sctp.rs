//! Rewriting SCTP packets. Their checksum covers no address, and a change of ports is corrected by what the
//! difference of two CRCs is ([`proxy_common::crc32c`]).

use aya_ebpf::bindings::__sk_buff;
use proxy_common::crc32c;
use proxy_common::csum::replace32;

use crate::nat::fold32;
use crate::net::sctp;
use crate::skb::{HelperFailed, Skb};

/// Writes new ports into a packet whose SCTP header begins at `at`, and which ends at `end`, with its checksum.
#[inline(always)]
pub fn change_ports(skb: Skb, at: u32, end: u32, old: u32, new: u32) -> Result<(), HelperFailed> {
    if sctp_ports(skb.raw(), at, end, old, new) == 0 { Ok(()) } else { Err(HelperFailed) }
}

/// [`change_ports`], as a function that the verifier checks once, on its own ("global"), and with a small stack.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn sctp_ports(skb: *mut __sk_buff, at: u32, end: u32, old: u32, new: u32) -> i32 {
    let skb = Skb::from_raw(skb);
    if old == new {
        return 0;
    }
    let change = skb.store(at, &new).and_then(|()| correct(skb, at, end, end, old ^ new));
    match change {
        Ok(check) => {
            skb.add_to_complete(fold32(replace32(old, new) + check));
            0
        }
        Err(HelperFailed) => 1,
    }
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
