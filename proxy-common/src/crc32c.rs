//! Incremental update of the SCTP checksum (RFC 9260, appendix A), without reading the packet again.
//!
//! A CRC is linear: the checksums of two messages of the same length differ by the CRC, without start and end values, of
//! the difference of the messages. Here only the ports differ, which are the first four bytes. The CRC of their difference
//! is shifted by the number of zero bytes that follow, which is a multiplication by a power of x. Numbers are bit-reversed,
//! as CRC-32C is sent.

/// The polynomial of CRC-32C (Castagnoli), bit-reversed, without its highest power.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// One, bit-reversed: x to the power of 0.
const ONE: u32 = 1 << 31;

/// Returns `a` times x.
const fn times_x(a: u32) -> u32 {
    a >> 1 ^ if a & 1 != 0 { POLYNOMIAL } else { 0 }
}

/// Returns `a` times `b`. There is no branch: the verifier would walk both sides of each one.
#[inline(always)]
pub const fn multiply(mut a: u32, b: u32) -> u32 {
    let mut product = 0;
    let mut bit = 0;
    while bit < u32::BITS {
        // The coefficient of x to the power of `bit`, as a mask: all bits set, or none.
        let chosen = (b << bit >> 31).wrapping_neg();
        product ^= a & chosen;
        let carry = (a & 1).wrapping_neg();
        a = a >> 1 ^ POLYNOMIAL & carry;
        bit += 1;
    }
    product
}

/// Number of bits of a length in bytes; the length of an IP packet has at most 16.
const LENGTH_BITS: usize = 16;

/// x to the power of 8, 16, 32, ...: the factors by which 1, 2, 4, ... zero bytes change a CRC.
const ZEROS: [u32; LENGTH_BITS] = {
    let mut powers = [0; LENGTH_BITS];
    let mut power = ONE;
    let mut bit = 0;
    while bit < 8 {
        power = times_x(power);
        bit += 1;
    }
    let mut at = 0;
    while at < LENGTH_BITS {
        powers[at] = power;
        power = multiply(power, power);
        at += 1;
    }
    powers
};

/// x to the power of 32.
const FOUR_BYTES: u32 = ZEROS[2];

/// Returns the difference (XOR) between the checksums of a message of `length` bytes, at least 4 and less than 65,536,
/// before and after an XOR of its first four bytes with `difference`. Both differences are in the memory order of a
/// little-endian machine. `times` multiplies as [`multiply`] does: a program passes a subprogram, which the verifier checks
/// once instead of sixteen times.
#[inline(always)]
pub fn change(difference: u32, length: u32, times: impl Fn(u32, u32) -> u32) -> u32 {
    // The CRC of four bytes is the product of their value and x to the power of 32.
    let mut crc = times(difference, FOUR_BYTES);
    let zeros = length.wrapping_sub(4);
    let mut at = 0;
    while at < LENGTH_BITS {
        if zeros >> at & 1 != 0 {
            crc = times(crc, ZEROS[at]);
        }
        at += 1;
    }
    crc
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    extern crate std;
    use std::vec;
    use std::vec::Vec;

    /// Computes the CRC bit by bit, as the standard defines it.
    fn crc(bytes: &[u8]) -> u32 {
        let mut crc = !0u32;
        for byte in bytes {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = times_x(crc);
            }
        }
        !crc
    }

    #[test]
    fn crc32c_matches_the_vectors_of_rfc_3720() {
        // RFC 3720, B.4.
        assert_eq!(crc(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc(b"123456789"), 0xe306_9283);
    }

    fn changed(bytes: &[u8], new: [u8; 4]) -> u32 {
        let old = [bytes[0], bytes[1], bytes[2], bytes[3]];
        let difference = u32::from_le_bytes(old) ^ u32::from_le_bytes(new);
        crc(bytes) ^ change(difference, bytes.len() as u32, multiply)
    }

    #[test]
    fn every_length_up_to_an_ethernet_frame_and_the_longest() {
        for length in (4..1600).chain([9000, 32_768, 65_535]) {
            let mut bytes: Vec<u8> = (0..length).map(|i: u32| (i * 7 + 3) as u8).collect();
            let new = [0x1f, 0x90, 0x00, 0x50];
            let after = changed(&bytes, new);
            bytes[..4].copy_from_slice(&new);
            assert_eq!(after, crc(&bytes), "{length} bytes");
        }
    }

    #[test]
    fn crc32c_of_an_unchanged_message_is_unchanged() {
        assert_eq!(change(0, 1480, multiply), 0);
        let bytes = vec![7; 100];
        assert_eq!(changed(&bytes, [7; 4]), crc(&bytes));
    }

    proptest! {
        #[test]
        fn incremental_crc32c_equals_the_full_one(mut bytes in prop::collection::vec(any::<u8>(), 4..300), new: [u8; 4]) {
            let after = changed(&bytes, new);
            bytes[..4].copy_from_slice(&new);
            prop_assert_eq!(after, crc(&bytes));
        }
    }
}
