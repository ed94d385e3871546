//! What the model takes for granted of the data path, and of the node: numbers, and what is known not to be as it should.

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
    /// UDP that is answered is more than one exchange after that.
    pub const UDP_EXCHANGE: u64 = 2_000;
    /// The port of a closed connection is in quarantine.
    pub const QUARANTINE: u64 = 66_000;
    pub const FRAGMENT: u64 = 30_000;
    /// The frontend of a UDP flow is looked up again.
    pub const FRONTEND: u64 = 256;
    /// An endpoint that two clients met failing is ejected for that time at first.
    pub const EJECTION: u64 = 1_000;
    /// After that it is tried now and then.
    pub const TRIAL: u64 = 30_000;
    /// An endpoint may take as long to answer a SYN.
    pub const SYN_ANSWERS_PER_SEC: u64 = 500;
}

/// How far a sequence number may be from the last one, in units of 64 KiB.
pub const WINDOW: i16 = 256;

/// What the kernel's routes say of the devices: see `kernel.rs`.
pub const UPLINK_MTU: usize = 1400;
pub const PODS_MTU: usize = 1500;

/// Bytes of a packet that a refusal quotes if it cannot quote all.
pub const QUOTE: usize = 128;
