//! Rewrites SCTP packets. The SCTP checksum covers no address; after a change of ports it is corrected with the difference
//! of two CRCs ([`proxy_common::crc32c`]).

use proxy_common::csum::replace32;

use super::translate::fold32;
use crate::frame::{Frame, HelperFailed};
use crate::net::sctp;

/// Writes new ports into a packet whose SCTP header begins at `at` and which ends at `end`, and corrects its checksum.
/// `old` and `new`: both ports, as they are stored in the packet.
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

/// Corrects the checksum of an SCTP packet after a change of ports, and returns what the correction adds to a sum over the
/// packet. `at`: offset of the SCTP header; `end`: end of the packet by its IP header; `present_end`: end of the bytes that are
/// present, which may be fewer in a quote; `difference`: the old ports XOR the new ones, as stored in the packet. Writes
/// nothing if the checksum is not present.
#[inline(always)]
pub fn correct<F: Frame>(
    frame: F,
    at: u32,
    end: u32,
    present_end: u32,
    difference: u32,
) -> Result<u64, HelperFailed> {
    let (at, length) = (at + sctp::CHECK, end.wrapping_sub(at));
    let mut old = 0u32;
    if at + size_of::<u32>() as u32 > present_end
        || frame.load(at, &mut old, size_of::<u32>() as u32).is_err()
    {
        return Ok(0);
    }
    // A checksum of zero: the device will compute it.
    if old == 0 {
        return Ok(0);
    }
    let new = old ^ frame.crc32c_change(u32::from_le(difference), length).to_le();
    frame.store_all(at, &new)?;
    Ok(replace32(old, new))
}
