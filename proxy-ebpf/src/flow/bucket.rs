//! Access to the buckets of the index: [`BucketRef`] says what the algorithms ask of them, [`BucketAt`] is that of a map.

use proxy_common::flow::{BUCKET_WORDS, Bucket};

use crate::shared::{Exchange, Raw};

/// A bucket of the index.
pub trait BucketRef: Copy {
    /// The slot of that number, below [`BUCKET_WORDS`].
    fn slot(self, number: u32) -> impl Exchange<Value = u32>;
    /// Whether keys that have this bucket first may stand in their second one.
    fn overflows(self) -> bool;
    /// Says so, before anything stands there.
    fn set_overflow(self);
    /// Asks for the bucket's cache line.
    fn prefetch(self);
}

/// A bucket in a map.
#[derive(Clone, Copy)]
pub struct BucketAt(*mut Bucket);

impl BucketAt {
    /// The bucket at this address.
    ///
    /// # Safety
    /// The address is valid as long as the handle is used.
    #[inline(always)]
    pub unsafe fn new(address: *mut Bucket) -> Self {
        Self(address)
    }
}

/// The last word of a bucket whose keys may stand in their second one.
const OVERFLOWS: u32 = {
    let [a, b] = 1u16.to_ne_bytes();
    u32::from_ne_bytes([a, b, 0, 0])
};

impl BucketRef for BucketAt {
    #[inline(always)]
    fn slot(self, number: u32) -> impl Exchange<Value = u32> {
        // SAFETY: the mask keeps it inside the bucket.
        unsafe { Raw::new(self.0.cast::<u32>().add((number & (BUCKET_WORDS - 1)) as usize)) }
    }

    #[inline(always)]
    fn overflows(self) -> bool {
        // SAFETY: inside the bucket; volatile, because other CPUs write it.
        unsafe { (&raw const (*self.0).overflow).read_volatile() != 0 }
    }

    #[inline(always)]
    fn set_overflow(self) {
        // An exchange, so that it is seen before what follows.
        self.slot(BUCKET_WORDS - 1).compare_exchange(0, OVERFLOWS);
    }

    #[inline(always)]
    fn prefetch(self) {
        // SAFETY: inside the bucket. Programs have no instruction for that; but a store does not wait, and this byte is always zero.
        unsafe { (&raw mut (*self.0).reserved).write_volatile(0) };
    }
}
