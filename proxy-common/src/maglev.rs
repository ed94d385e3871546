//! `maglev` and `maglev_index`: tables from a hash to a backend (Eisenbud et al., "Maglev", NSDI 2016, 3.4). A table is
//! self-contained: a reader that knows its first word needs nothing else that the agent may change.
//!
//! Words of a table: first the [`HEADER`] words (size and number of backends; signature; checksum), then the ids of the
//! backends, two in a word, then the entries. An entry is a position in the list of ids, in a byte for up to
//! [`MAX_BYTE_BACKENDS`] backends, else in 16 bits.

use crate::select::random_slot;

/// Number of words before the ids.
pub const HEADER: u32 = 3;
/// Maximum number of backends whose positions fit into a byte.
pub const MAX_BYTE_BACKENDS: u32 = 256;
/// Maximum number of backends of a table.
pub const MAX_BACKENDS: u32 = u16::MAX as u32;

/// Sizes of tables: the largest primes below powers of two. There are few sizes, because nearly all flows move when a set
/// of backends outgrows a size. Small sizes grow by a factor of four; for large ones, this would need too much memory.
const PRIMES: [u32; 8] = [1_021, 4_093, 16_381, 65_521, 131_071, 262_139, 524_287, 1_048_573];

/// Minimum number of entries for each backend: with fewer, more flows move when a backend is removed.
const ENTRIES_EACH: u32 = 160;

/// Returns the number of entries of a table with this many backends: the first prime with at least 160 for each, or the
/// largest prime.
pub fn size(backends: u32) -> u32 {
    let wanted = backends.saturating_mul(ENTRIES_EACH);
    let fits = PRIMES.iter().copied().find(|prime| *prime >= wanted);
    fits.unwrap_or(PRIMES[PRIMES.len() - 1])
}

/// Returns the number of words that hold the ids of this many backends.
#[inline(always)]
pub const fn id_words(backends: u32) -> u32 {
    backends.div_ceil(2)
}

/// Returns the number of entries in a word.
#[inline(always)]
pub const fn per_word(backends: u32) -> u32 {
    if backends <= MAX_BYTE_BACKENDS { 8 } else { 4 }
}

/// Returns the number of words of a whole table.
pub const fn words(size: u32, backends: u32) -> u32 {
    HEADER + id_words(backends) + size.div_ceil(per_word(backends))
}

/// Returns the first word of a table: number of entries (lower half) and of backends (upper half).
#[inline(always)]
pub const fn shape(size: u32, backends: u32) -> u64 {
    size as u64 | (backends as u64) << 32
}

/// Returns the numbers of entries and of backends from the first word of a table.
#[inline(always)]
pub const fn size_and_backends(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// Number of words (`u64`) of an element of `maglev_index`, which refer to two tables each.
pub const INDEX_WORDS: u32 = 4;
/// Number of tables of an element: number 0 is the table for new connections, and the others are the tables before it, the
/// newest first.
pub const TABLES: u32 = 2 * INDEX_WORDS;

/// Returns the index of a Service port's element in `maglev_index`. `local`: the table of the endpoints of policy Local.
#[inline(always)]
pub const fn index(service: u32, local: bool) -> u32 {
    service.wrapping_mul(2) | local as u32
}

/// Returns the word of `maglev_index` that refers to table `number` of the element `index`.
#[inline(always)]
pub const fn index_word(index: u32, number: u32) -> u32 {
    index.wrapping_mul(INDEX_WORDS).wrapping_add(number / 2)
}

/// Returns the position in `maglev` of the first word of table `number`, from the word of [`index_word`]; 0: no table.
#[inline(always)]
pub const fn base_in(word: u64, number: u32) -> u32 {
    (word >> (number % 2 * 32)) as u32
}

/// Returns a word of `maglev_index` from the positions of its two tables, the newer one first.
pub const fn index_of([newer, older]: [u32; 2]) -> u64 {
    newer as u64 | (older as u64) << 32
}

/// Returns the id of the backend of a hash; 0 if there is no table, or it is not complete. `word` reads a word of `maglev`;
/// `base` is the position of the table's first word, from `maglev_index`.
#[inline(always)]
pub fn backend(base: u32, hash: u32, word: impl Fn(u32) -> Option<u64>) -> u32 {
    let Some(first) = word(base) else { return 0 };
    let (size, backends) = size_and_backends(first);
    let entry = random_slot(hash, size);
    let ids = base.wrapping_add(HEADER);
    let table = ids.wrapping_add(id_words(backends));
    let position = if backends <= MAX_BYTE_BACKENDS {
        let Some(packed) = word(table.wrapping_add(entry / 8)) else { return 0 };
        (packed >> (entry % 8 * 8)) as u32 & 0xff
    } else {
        let Some(packed) = word(table.wrapping_add(entry / 4)) else { return 0 };
        (packed >> (entry % 4 * 16)) as u32 & 0xffff
    };
    let Some(pair) = word(ids.wrapping_add(position / 2)) else { return 0 };
    (pair >> (position % 2 * 32)) as u32
}

/// Returns the checksum by which the agent detects a table that was changed externally: a hash (FNV-1a, by words) of the
/// words after the checksum.
pub fn checksum(words: impl Iterator<Item = u64>) -> u64 {
    words.fold(0xcbf2_9ce4_8422_2325, |hash, word| {
        let hash = (hash ^ word).wrapping_mul(0x0100_0000_01b3);
        hash ^ hash >> 32
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_is_a_prime_and_gives_each_backend_its_entries() {
        for prime in PRIMES {
            assert!((2..prime).take_while(|n| n * n <= prime).all(|n| prime % n != 0), "{prime}");
        }
        assert_eq!(
            [1, 6, 7, 25, 26, 102, 103, 409].map(size),
            [1_021, 1_021, 4_093, 4_093, 16_381, 16_381, 65_521, 65_521]
        );
        assert!((1..=6_500).all(|n| size(n) >= ENTRIES_EACH * n));
        assert_eq!(size(MAX_BACKENDS), 1_048_573);
    }

    #[test]
    fn a_word_holds_eight_bytes_or_four_units_of_sixteen_bits() {
        for (backends, per_word) in [(3_u32, 8_u32), (300, 4)] {
            let size = 2 * per_word;
            let all = [shape(size, backends), 0, 0, 7 << 32 | 5, 9];
            let ids = id_words(backends);
            // Entry 0 leads to position 2, all others to position 1.
            let (unit, ones) =
                (64 / per_word, (0..per_word).fold(0_u64, |w, n| w | 1 << (n * (64 / per_word))));
            assert!(unit == 8 || unit == 16);
            let word = |at: u32| match at {
                0..=4 => Some(all[at as usize]),
                at if at < HEADER + ids => Some(0),
                at if at == HEADER + ids => Some(ones + 1),
                at if at == HEADER + ids + 1 => Some(ones),
                _ => None,
            };
            assert_eq!(backend(0, 0, word), 9);
            assert_eq!(backend(0, u32::MAX, word), 7);
            assert_eq!(backend(900, 0, word), 0, "outside of the map");
        }
    }
}
