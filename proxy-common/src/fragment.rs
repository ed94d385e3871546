//! `fragments`, `fragments6`: the ports of fragmented packets.

/// Key of `fragments` and `fragments6` (LRU): the packet to which a fragment belongs, as it arrives.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FragmentKey<A> {
    /// Source address.
    pub src: A,
    /// Destination address.
    pub dst: A,
    /// The packet's identification, as in the header.
    pub id: u32,
    /// IPv4: the protocol, which is part of the identification (RFC 791); IPv6: 0 (RFC 8200, 4.5).
    pub proto: u32,
}

/// Value of `fragments` and `fragments6`: what the first fragment tells about the later ones.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FragmentEntry {
    /// Source port, host byte order.
    pub src_port: u16,
    /// Destination port, host byte order.
    pub dst_port: u16,
    /// IP protocol number.
    pub proto: u16,
    /// Length of the first fragment's IP packet in bytes: no later fragment is longer.
    pub length: u16,
    /// Low 32 bits of jiffies when the first fragment passed.
    pub seen: u32,
}

/// Seconds within which later fragments are accepted: as long as a receiver waits for them (`net.ipv4.ipfrag_time`).
pub const FRAGMENT_SECS: u32 = 30;
