//! `service_stats`, `backend_stats`, `reasons` and `refusals`: the counters of the programs.

/// Value of `service_stats` (per CPU; the index is the id of the Service port).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceStats {
    /// New connections: connects and first messages of sockets, and new flows of the packet path.
    pub connections: u64,
    /// Packets translated on their way to a backend. Traffic of translated sockets passes no hook and is not counted.
    pub packets: u64,
    /// Bytes of these packets, with their IP headers.
    pub bytes: u64,
    /// Reply packets that were translated on their way back.
    pub reply_packets: u64,
    /// Bytes of these reply packets.
    pub reply_bytes: u64,
}

/// Key of `refusals`: a Service port and a reason. The value is a `u64` count.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RefusalKey {
    /// Id of the Service port.
    pub service: u32,
    /// A [`Reason`](crate::reason::Reason) number.
    pub reason: u32,
}
