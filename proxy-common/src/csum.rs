//! Internet checksums (RFC 1071), updated without reading the packet again (RFC 1624).
//!
//! Words are in memory order: the ones' complement sum does not depend on the byte order as long as all words have the same
//! one.

use crate::Address;

/// Returns the value to add to an unfolded sum if `new` replaces `old`.
#[inline(always)]
pub fn replace32(old: u32, new: u32) -> u64 {
    u64::from(!old) + u64::from(new)
}

/// As [`replace32`], for 16 bits.
#[inline(always)]
pub fn replace16(old: u16, new: u16) -> u64 {
    u64::from(!old) + u64::from(new)
}

/// Folds an unfolded sum of less than 2^48 to 16 bits.
#[inline(always)]
pub fn fold(sum: u64) -> u16 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

/// Returns the checksum `check` after a change that adds `difference` (RFC 1624, equation 3).
#[inline(always)]
pub fn update(check: u16, difference: u64) -> u16 {
    !fold(u64::from(!check) + difference)
}

/// Returns the unfolded sum of the pseudo header (RFC 9293, 3.1; RFC 8200, 8.1) of a transport segment of `length` bytes.
#[inline(always)]
pub fn pseudo_sum<A: Address>(src: &A, dst: &A, proto: u8, length: u32) -> u64 {
    sum_words(src)
        + sum_words(dst)
        + u64::from(u16::from_ne_bytes([0, proto]))
        + u64::from((length as u16).to_be())
}

/// Returns the unfolded sum of an address.
#[inline(always)]
pub fn sum_words<A: Address>(addr: &A) -> u64 {
    let [a, b, c, d] = addr.words();
    u64::from(a) + u64::from(b) + u64::from(c) + u64::from(d)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn whole(words: &[u16]) -> u16 {
        !fold(words.iter().map(|w| u64::from(*w)).sum())
    }

    proptest! {
        #[test]
        fn an_update_equals_a_full_sum(mut words in prop::collection::vec(any::<u16>(), 2..40), at: prop::sample::Index, new: u16) {
            // A sum of zero words only has two representations; a header never consists of zeros only.
            words.push(0x4500);
            let at = at.index(words.len() - 1);
            let before = whole(&words);
            let difference = replace16(words[at], new);
            words[at] = new;
            prop_assert_eq!(update(before, difference), whole(&words));
        }

        #[test]
        fn update_by_two_halves_equals_update_by_a_word(old: u32, new: u32, check: u16) {
            let halves = |v: u32| [(v >> 16) as u16, v as u16];
            let [(o1, n1), (o2, n2)] = [(halves(old)[0], halves(new)[0]), (halves(old)[1], halves(new)[1])];
            let by_word = update(check, replace32(old, new));
            let by_half = update(check, replace16(o1, n1) + replace16(o2, n2));
            prop_assert_eq!(by_word, by_half);
        }
    }
}
