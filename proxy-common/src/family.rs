//! The two address families, so that everything above a header is written once.

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::V4 {}
    impl Sealed for super::V6 {}
    impl Sealed for [u8; 4] {}
    impl Sealed for [u8; 16] {}
    impl Sealed for [u32; 1] {}
    impl Sealed for [u32; 4] {}
}

/// An IP address as octets on the wire, `[u8; 4]` or `[u8; 16]`; or the same bytes as aligned words, with which
/// programs compute: on BPF an octet array is loaded and kept byte by byte.
pub trait Address: sealed::Sealed + Copy + Clone + Eq + Ord + core::fmt::Debug + 'static {
    /// Fills a [`SocketKey`](crate::socket::SocketKey) up to a multiple of eight bytes.
    type SocketKeyFill: Copy + Clone + Eq + Ord + Default + core::fmt::Debug + 'static;
    /// The all-zero address.
    const ZERO: Self;
    /// The address of all bits set.
    const ONES: Self;
    /// The address as 32-bit words in memory order, the unused ones zero.
    fn words(&self) -> [u32; 4];
    /// The address of these words; the unused ones do not count.
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
    /// The family's address, as maps hold it.
    type Addr: Address;
    /// The same bytes as aligned words.
    type Words: Address;
    /// How people write it.
    const NAME: &'static str;
    /// Index of the family in arrays that hold one element for each.
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
