//! `src_ranges` and `src_ranges6`: who may use a load balancer's address (`spec.loadBalancerSourceRanges`).

/// What follows the prefix length in a key (longest prefix match, `BPF_MAP_TYPE_LPM_TRIE`). The value is 1, as a
/// `u32`. The ranges of a Service port stand under its id, so the length of a prefix is [`SERVICE_BITS`] more
/// than that of the range.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SourceRangeKey<A> {
    /// Id of the Service port; compared as a whole, so its byte order does not matter.
    pub service: u32,
    /// The lowest address of the range, or the one asked about.
    pub addr: A,
}

/// Bits of [`SourceRangeKey::service`].
pub const SERVICE_BITS: u32 = 32;
