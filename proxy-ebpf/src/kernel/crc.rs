//! The checksum of SCTP, by BPF-to-BPF calls.

use proxy_common::crc32c;

/// [`crc32c::multiply`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn crc_times(a: u32, b: u32) -> u32 {
    crc32c::multiply(a, b)
}

/// [`crc32c::change`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn crc_change(difference: u32, length: u32) -> u32 {
    crc32c::change(difference, length, |a, b| crc_times(a, b))
}
