//! The source of a case: a string of bytes, read from the front. Behind its end, a string reads as zeros: so each string is
//! a case, and a shorter string is a simpler case.

/// A reader of bytes.
pub struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn byte(&mut self) -> u8 {
        match self.0 {
            [first, rest @ ..] => {
                self.0 = rest;
                *first
            }
            [] => 0,
        }
    }

    /// Returns one of these values, selected by the next byte.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[usize::from(self.byte()) % of.len()]
    }

    /// Returns a reader of the next `length` bytes.
    pub fn record(&mut self, length: usize) -> Bytes<'a> {
        let (record, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        Bytes(record)
    }

    pub fn is_over(&self) -> bool {
        self.0.is_empty()
    }
}

/// A xorshift generator: the same seed gives the same cases.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.number() >> 32) as usize % end
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let random = self.number().to_le_bytes();
            chunk.copy_from_slice(&random[..chunk.len()]);
        }
    }
}
