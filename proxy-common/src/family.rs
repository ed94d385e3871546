//! The two address families as traits, so that all code above the IP header is written once.

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::V4 {}
    impl Sealed for super::V6 {}
    impl Sealed for [u8; 4] {}
    impl Sealed for [u8; 16] {}
    impl Sealed for [u32; 1] {}
    impl Sealed for [u32; 4] {}
}

/// An IP address in network byte order: as octets, `[u8; 4]` or `[u8; 16]`, or as the same bytes in aligned words. Programs
/// compute with words, because BPF loads and stores an octet array byte by byte.
pub trait Address: sealed::Sealed + Copy + Clone + Eq + Ord + core::fmt::Debug + 'static {
    /// Padding of a [`SocketKey`](crate::socket::SocketKey) to a multiple of eight bytes.
    type SocketKeyFill: Copy + Clone + Eq + Ord + Default + core::fmt::Debug + 'static;
    /// The all-zero address.
    const ZERO: Self;
    /// The address with all bits set.
    const ONES: Self;
    /// Returns the address as 32-bit words in memory order; unused words are zero.
    fn words(&self) -> [u32; 4];
    /// Returns the address with these words; unused words are ignored.
    fn from_words(words: [u32; 4]) -> Self;
}

impl Address for [u8; 4] {
    type SocketKeyFill = [u8; 0];
    const ZERO: Self = [0; 4];
    const ONES: Self = [!0; 4];

    #[inline(always)]
    fn words(&self) -> [u32; 4] {
        [u32::from_ne_bytes(*self), 0, 0, 0]
    }

    #[inline(always)]
    fn from_words([word, ..]: [u32; 4]) -> Self {
        word.to_ne_bytes()
    }
}

impl Address for [u32; 1] {
    type SocketKeyFill = [u8; 0];
    const ZERO: Self = [0; 1];
    const ONES: Self = [!0; 1];

    #[inline(always)]
    fn words(&self) -> [u32; 4] {
        [self[0], 0, 0, 0]
    }

    #[inline(always)]
    fn from_words([word, ..]: [u32; 4]) -> Self {
        [word]
    }
}

impl Address for [u32; 4] {
    type SocketKeyFill = [u8; 4];
    const ZERO: Self = [0; 4];
    const ONES: Self = [!0; 4];

    #[inline(always)]
    fn words(&self) -> [u32; 4] {
        *self
    }

    #[inline(always)]
    fn from_words(words: [u32; 4]) -> Self {
        words
    }
}

impl Address for [u8; 16] {
    type SocketKeyFill = [u8; 4];
    const ZERO: Self = [0; 16];
    const ONES: Self = [!0; 16];

    #[inline(always)]
    fn words(&self) -> [u32; 4] {
        [0, 4, 8, 12].map(|at| u32::from_ne_bytes([self[at], self[at + 1], self[at + 2], self[at + 3]]))
    }

    #[inline(always)]
    fn from_words(words: [u32; 4]) -> Self {
        core::array::from_fn(|at| words[at / 4].to_ne_bytes()[at % 4])
    }
}

/// IPv4 or IPv6.
pub trait Family: sealed::Sealed + Copy + 'static {
    /// The family's address in octets, as the maps hold it.
    type Addr: Address;
    /// The family's address with the same bytes in aligned words.
    type Words: Address;
    /// The family's name in text.
    const NAME: &'static str;
    /// Index of the family in arrays that hold one element for each family.
    const INDEX: u32;
}

/// IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct V4;

/// IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct V6;

impl Family for V4 {
    type Addr = [u8; 4];
    type Words = [u32; 1];
    const NAME: &'static str = "IPv4";
    const INDEX: u32 = 0;
}

impl Family for V6 {
    type Addr = [u8; 16];
    type Words = [u32; 4];
    const NAME: &'static str = "IPv6";
    const INDEX: u32 = 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_the_same_as_bytes_and_as_words() {
        let long: [u8; 16] = core::array::from_fn(|at| at as u8 * 7 + 1);
        assert_eq!(<[u8; 16]>::from_words(long.words()), long);
        assert_eq!(<[u32; 4]>::from_words(long.words()).words(), long.words());
        let short = [10u8, 1, 2, 3];
        assert_eq!(<[u8; 4]>::from_words(short.words()), short);
        assert_eq!(<[u32; 1]>::from_words(short.words()).words(), short.words());
    }
}
