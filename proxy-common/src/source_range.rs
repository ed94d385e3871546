//! `src_ranges` and `src_ranges6`: the clients that may use a load balancer's address (`spec.loadBalancerSourceRanges`).

/// The part of a key after the prefix length (longest prefix match, `BPF_MAP_TYPE_LPM_TRIE`). The value is 1, as a `u32`. A
/// key begins with the id of a set of ranges, so its prefix length is [`SET_BITS`] more than that of the range. Frontends
/// with the same ranges share a set, which never changes.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SourceRangeKey<A> {
    /// Id of the set; compared as a whole, so its byte order does not matter.
    pub set: u32,
    /// The lowest address of the range; in a lookup, the address of the client.
    pub addr: A,
}

/// Number of bits of [`SourceRangeKey::set`].
pub const SET_BITS: u32 = 32;
