//! Assumptions of the model about the data path and the node: numbers, and known defects.

/// Milliseconds for which a flow may be silent (`docs/datapath.md`; the names are those of `nf_conntrack`'s sysctls).
pub mod timeout {
    pub const TCP_SYN_SENT: u64 = 60_000;
    pub const TCP_SYN_RECV: u64 = 60_000;
    pub const TCP_ESTABLISHED: u64 = 86_400_000;
    pub const TCP_CLOSE_WAIT: u64 = 3_600_000;
    pub const TCP_TIME_WAIT: u64 = 120_000;
    pub const TCP_CLOSE: u64 = 120_000;
    pub const UDP: u64 = 30_000;
    pub const UDP_STREAM: u64 = 120_000;
    /// After this time, UDP that is answered counts as more than one exchange.
    pub const UDP_EXCHANGE: u64 = 2_000;
    /// How long the port of a closed connection is in quarantine.
    pub const QUARANTINE: u64 = 66_000;
    /// After this silence, a half-closed connection may be evicted.
    pub const HALF_CLOSED: u64 = 60_000;
    pub const FRAGMENT: u64 = 30_000;
    /// After this time, the frontend of a UDP flow is looked up again.
    pub const FRONTEND: u64 = 256;
    /// Duration of the first ejection of an endpoint that has refused two clients, and of the first skip of a client.
    pub const EJECTION: u64 = 1_000;
    /// How long an endpoint is tried now and then after an ejection.
    pub const TRIAL: u64 = 30_000;
    /// How long an answer shows that an endpoint works.
    pub const ANSWER: u64 = 60_000;
    /// In this time after an answer, the time of the next one is not noted.
    pub const ANSWER_NOTED: u64 = 1_000;
    /// How long an endpoint may take to answer a SYN.
    pub const SYN_ANSWER: u64 = 500;
}

/// Maximum distance of a sequence number from the last one, in units of 64 KiB.
pub const WINDOW: i16 = 256;

/// MTU of the devices in the kernel's routes: see `kernel.rs`.
pub const UPLINK_MTU: usize = 1400;
pub const PODS_MTU: usize = 1500;

/// Bytes of a packet that a refusal quotes if it cannot quote the whole packet.
pub const QUOTE: usize = 128;
