//! Rewriting SCTP packets. Their checksum covers no address, and a change of ports is corrected by what the
//! difference of two CRCs is ([`proxy_common::crc32c`]).

use proxy_common::csum::replace32;

use super::translate::fold32;
use crate::frame::{Frame, HelperFailed};
use crate::net::sctp;

/// Writes new ports into a packet whose SCTP header begins at `at`, and which ends at `end`, with its checksum.
#[inline(always)]
pub fn change_ports<F: Frame>(frame: F, at: u32, end: u32, old: u32, new: u32) -> Result<(), HelperFailed> {
    if old == new {
        return Ok(());
    }
    frame.store_all(at, &new)?;
    let check = correct(frame, at, end, end, old ^ new)?;
    frame.add_to_complete(fold32(replace32(old, new) + check));
    Ok(())
}

/// Corrects the checksum of a packet whose SCTP header begins at `at`, and which ends at `end` as its header says, by
/// the difference of its ports as they stand; nothing if `there` is the end of what is there of it, and the checksum
/// behind it. Gives what that adds to a sum.
#[inline(always)]
pub fn correct<F: Frame>(
    frame: F,
    at: u32,
    end: u32,
    there: u32,
    difference: u32,
) -> Result<u64, HelperFailed> {
    let (at, length) = (at + sctp::CHECK, end.wrapping_sub(at));
    let mut old = 0u32;
    if at + size_of::<u32>() as u32 > there || frame.load(at, &mut old, size_of::<u32>() as u32).is_err() {
        return Ok(0);
    }
    // Zero: the device will compute it.
    if old == 0 {
        return Ok(0);
    }
    let new = old ^ frame.crc32c_change(u32::from_le(difference), length).to_le();
    frame.store_all(at, &new)?;
    Ok(replace32(old, new))
}
