//! Access to the buckets of the index: the algorithms use the trait [`BucketRef`]; [`BucketAt`] implements it for a map.

use proxy_common::flow::{BUCKET_WORDS, Bucket};

use crate::shared::{Exchange, Raw};

/// A bucket of the index.
pub trait BucketRef: Copy {
    /// Returns the slot `number`, which is below [`BUCKET_WORDS`].
    fn slot(self, number: u32) -> impl Exchange<Value = u32>;
    /// Whether keys whose first bucket is this one may be in their second bucket.
    fn overflows(self) -> bool;
    /// Sets the mark that [`BucketRef::overflows`] reads, before a key is written to the second bucket.
    fn set_overflow(self);
    /// Prefetches the bucket's cache line.
    fn prefetch(self);
}

/// A bucket in a map.
#[derive(Clone, Copy)]
pub struct BucketAt(*mut Bucket);

impl BucketAt {
    /// Returns a handle for the bucket at this address.
    ///
    /// # Safety
    /// The address must be valid as long as the handle is used.
    #[inline(always)]
    pub unsafe fn new(address: *mut Bucket) -> Self {
        Self(address)
    }
}

/// Value of a bucket's last word (`overflow` and `reserved`) if keys may be in their second bucket.
const OVERFLOWS: u32 = {
    let [a, b] = 1u16.to_ne_bytes();
    u32::from_ne_bytes([a, b, 0, 0])
};

impl BucketRef for BucketAt {
    #[inline(always)]
    fn slot(self, number: u32) -> impl Exchange<Value = u32> {
        // SAFETY: the mask keeps the slot inside the bucket.
        unsafe { Raw::new(self.0.cast::<u32>().add((number & (BUCKET_WORDS - 1)) as usize)) }
    }

    #[inline(always)]
    fn overflows(self) -> bool {
        // SAFETY: inside the bucket; volatile, because other CPUs write it.
        unsafe { (&raw const (*self.0).overflow).read_volatile() != 0 }
    }

    #[inline(always)]
    fn set_overflow(self) {
        // A compare-and-exchange, because it is a full barrier: other CPUs see the mark before they see the key.
        self.slot(BUCKET_WORDS - 1).compare_exchange(0, OVERFLOWS);
    }

    #[inline(always)]
    fn prefetch(self) {
        // SAFETY: inside the bucket. BPF has no prefetch instruction; a store does not wait for the cache line, and this
        // field is always zero.
        unsafe { (&raw mut (*self.0).reserved).write_volatile(0) };
    }
}
