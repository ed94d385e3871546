//! Conversion between addresses as octets, for maps that people read, and as words, for the programs' computations.

use proxy_common::affinity::AffinityKey;
use proxy_common::backend::BackendEntry;
use proxy_common::node::NodeEntry;
use proxy_common::service::ServiceKey;
use proxy_common::socket::{SocketEntry, SocketKey};
use proxy_common::source_range::SourceRangeKey;

type A4 = [u8; 4];
type A6 = [u8; 16];

/// A type whose bytes are the same with addresses as octets and as words (`proxy_common::abi` asserts it).
///
/// # Safety
/// `Octets` has the size and alignment of `Self`, and all bit patterns are valid for both.
pub unsafe trait SameBytes {
    /// The same type with addresses as octets.
    type Octets;
}

macro_rules! same_bytes {
    ($($name:ident)+) => {$(
        // SAFETY: asserted in `proxy_common::abi`.
        unsafe impl SameBytes for $name<[u32; 1]> { type Octets = $name<A4>; }
        // SAFETY: asserted in `proxy_common::abi`.
        unsafe impl SameBytes for $name<[u32; 4]> { type Octets = $name<A6>; }
    )+};
}

same_bytes! { ServiceKey BackendEntry SocketKey SocketEntry NodeEntry AffinityKey SourceRangeKey }

/// Converts a value with addresses as words to octets, for a call of the kernel.
#[inline(always)]
pub fn octets<T: SameBytes>(words: &T) -> &T::Octets {
    // SAFETY: `SameBytes` promises it.
    unsafe { &*core::ptr::from_ref(words).cast() }
}

/// Converts a value of a map to addresses as words.
#[inline(always)]
pub fn words<T: SameBytes>(octets: &T::Octets) -> &T {
    // SAFETY: `SameBytes` promises it.
    unsafe { &*core::ptr::from_ref(octets).cast() }
}
