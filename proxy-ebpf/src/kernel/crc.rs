//! The checksum of SCTP (CRC-32C), in subprograms.

use proxy_common::crc32c;

/// Subprogram for [`crc32c::multiply`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn crc_times(a: u32, b: u32) -> u32 {
    crc32c::multiply(a, b)
}

/// Subprogram for [`crc32c::change`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn crc_change(difference: u32, length: u32) -> u32 {
    crc32c::change(difference, length, |a, b| crc_times(a, b))
}
