//! `affinity`, `affinity6` and `affinity_netns`: the backend that each client keeps (`sessionAffinity: ClientIP`).

/// Key of `affinity` and `affinity6`: a client of the packet path.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AffinityKey<A> {
    /// Address of the client.
    pub client: A,
    /// Id of the Service port. All frontends of a Service port share the entries of their clients.
    pub service: u32,
}

/// Key of `affinity_netns`: a client of the socket path. The client is a network namespace, because a socket has no
/// source address yet when it connects, and all sockets of a pod share one namespace.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NetnsAffinityKey {
    /// Cookie of the network namespace.
    pub netns: u64,
    /// Id of the Service port.
    pub service: u32,
    /// Zero.
    pub reserved: u32,
}

/// Value of `affinity`, `affinity6` and `affinity_netns`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AffinityEntry {
    /// Id of the backend.
    pub backend_id: u32,
    /// Low 32 bits of jiffies when the client's last connection began.
    pub last_used: u32,
}
