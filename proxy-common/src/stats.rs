//! `service_stats`, `backend_stats`, `reasons` and `refusals`: what the programs count.

/// Value of `service_stats` (per CPU; the index is the id of the Service port).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceStats {
    /// Connections begun: connects and first messages of sockets, and new flows of packets.
    pub connections: u64,
    /// Packets translated on their way to a backend. Traffic of translated sockets passes no hook and is not here.
    pub packets: u64,
    /// Bytes of these, with their IP headers.
    pub bytes: u64,
    /// Packets translated on their way back.
    pub reply_packets: u64,
    /// Bytes of these.
    pub reply_bytes: u64,
}

/// Key of `refusals`: which Service, and why. The value is a `u64` count.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RefusalKey {
    /// Id of the Service port.
    pub service: u32,
    /// A [`Reason`](crate::reason::Reason) number.
    pub reason: u32,
}
