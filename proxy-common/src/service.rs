//! `services`, `services6` and `slots`: the backends of each frontend.

use crate::Address;

/// Key of `services`: a frontend and a scope.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServiceKey<A> {
    /// Frontend address; all zero means "any address of this node" (NodePort).
    pub addr: A,
    /// Frontend port, host byte order.
    pub port: u16,
    /// IP protocol number: 6 TCP, 17 UDP, 132 SCTP.
    pub proto: u8,
    /// [`SCOPE_INTERNAL`] or [`SCOPE_EXTERNAL`].
    pub scope: u8,
}

/// The entry is for clients inside the cluster, or for all clients if no policy distinguishes them.
pub const SCOPE_INTERNAL: u8 = 0;
/// The entry is for clients outside, if a policy of the Service distinguishes them.
pub const SCOPE_EXTERNAL: u8 = 1;

impl<A: Address> ServiceKey<A> {
    /// Returns a hash of the key, which two keys rarely share; see [`ServiceEntry::tag`].
    #[inline(always)]
    pub fn tag(&self) -> u32 {
        crate::prefilter::hash(&self.addr, self.port, self.proto) ^ u32::from(self.scope)
    }

    /// Returns the key of a frontend in [`SCOPE_INTERNAL`].
    #[inline(always)]
    pub fn internal(addr: A, port: u16, proto: u8) -> Self {
        Self { addr, port, proto, scope: SCOPE_INTERNAL }
    }
}

/// Value of `services`. The agent commits a change by replacing this value: readers move from one complete extent of slots
/// to the next.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceEntry {
    /// [`ServiceKey::tag`] of the entry's key. The kernel reuses a replaced hash element for another key while a reader may
    /// still hold it (`kernel/bpf/hashtab.c`, `extra_elems`). The reader therefore compares the tag before and after it
    /// copies the rest, and looks the key up again if the tag is not that of its key.
    pub tag: u32,
    /// Id of the Service port; the index into `service_stats` and the key of `names`.
    pub id: u32,
    /// First slot of the extent in `slots`.
    pub slot_base: u32,
    /// Number of slots in the extent; 0: no endpoint.
    pub slot_count: u32,
    /// Seconds of session affinity by client address; 0: none.
    pub affinity_secs: u32,
    /// With [`SERVICE_SOURCE_RANGES`]: the id of its set in `src_ranges`; 0: the empty set.
    pub ranges: u32,
    /// `SERVICE_*` bits.
    pub flags: u16,
    /// A [`select::Algorithm`](crate::select::Algorithm) number.
    pub algorithm: u8,
    /// A `KIND_*` number: where the frontend comes from.
    pub kind: u8,
}

impl ServiceEntry {
    /// No entry: its kind is none of the `KIND_*` numbers.
    pub const NONE: Self = Self {
        tag: 0,
        id: 0,
        slot_base: 0,
        slot_count: 0,
        affinity_secs: 0,
        ranges: 0,
        flags: 0,
        algorithm: 0,
        kind: 0,
    };
}

/// If there is no slot, drop instead of refuse: the policy is Local and only other nodes have endpoints (kube-proxy
/// contract: no-endpoint verdicts).
pub const SERVICE_DROP_WHEN_EMPTY: u16 = 1 << 0;
/// Clients outside the cluster have a separate entry: the same key in [`SCOPE_EXTERNAL`]. The flag is set on the internal
/// entry.
pub const SERVICE_SCOPED: u16 = 1 << 1;
/// The extent holds the endpoints of policy Local, not those of policy Cluster.
pub const SERVICE_LOCAL: u16 = 1 << 2;
/// Only clients whose address is in the set [`ServiceEntry::ranges`] are accepted (`spec.loadBalancerSourceRanges`). The
/// address of a socket is not known when it connects, so the socket hooks leave pods to the packet hooks, where it is
/// known.
pub const SERVICE_SOURCE_RANGES: u16 = 1 << 3;
/// With [`SERVICE_SOURCE_RANGES`]: this node itself is accepted.
pub const SERVICE_NODE_ALLOWED: u16 = 1 << 4;
/// Maglev selects the endpoints for clients outside of the cluster; the entry's algorithm applies to clients inside only.
pub const SERVICE_MAGLEV_OUTSIDE: u16 = 1 << 5;
/// New connections skip endpoints that fail ([`health`](crate::health)). Set for TCP only.
pub const SERVICE_EJECTS: u16 = 1 << 6;

/// Packets of clients outside to endpoints on other nodes are encapsulated, and the endpoints' nodes answer directly (DSR).
pub const SERVICE_DSR: u16 = 1 << 7;

/// The sockets of pods are not translated: the packet programs translate their packets (annotation `ballast.io/socket-lb`).
pub const SERVICE_NO_SOCKETS: u16 = 1 << 8;

/// If there is no slot, packets pass, and the node routes them (annotation `ballast.io/external-failover`, after KEP-6272). Only
/// on entries in [`SCOPE_EXTERNAL`].
pub const SERVICE_PASS_WHEN_EMPTY: u16 = 1 << 9;

/// Endpoints of a port with [`SERVICE_EJECTS`] joined or left lately. While an agent attends to devices, the sockets of pods are not
/// translated: connect(2) would return the refusal of an endpoint that has just ended, which the packet programs hide.
pub const SERVICE_CHANGING: u16 = 1 << 10;

/// As [`SERVICE_CHANGING`], for the sockets of the node itself. The agent has seen that the programs translate packets that the node
/// sends to this address, and no endpoint is a process of the node.
pub const SERVICE_CHANGING_NODE: u16 = 1 << 11;

/// Endpoints joined lately: processes that reset connections move idle ones of this entry to other endpoints until the shares are
/// even (annotation `ballast.io/rebalance`). The programs do not read it.
pub const SERVICE_REBALANCES: u16 = 1 << 12;
/// The frontend is new: a TCP segment in the middle of a connection without a flow, and a datagram to a connected socket of the
/// node, may belong to a connection that is older than the frontend, and pass. Rules of kube-proxy see only the first packet of
/// a connection.
pub const SERVICE_RECENT: u16 = 1 << 13;

/// The frontend is a cluster address.
pub const KIND_CLUSTER_IP: u8 = 1;
/// The frontend is a node port.
pub const KIND_NODE_PORT: u8 = 2;
/// The frontend is a load balancer's ingress address.
pub const KIND_LOAD_BALANCER: u8 = 3;
/// The frontend is an external address.
pub const KIND_EXTERNAL_IP: u8 = 4;
/// Not a frontend: port and protocol of the key are zero, and the entry marks the address as a cluster address in use.
/// Packets to its ports that no Service has are refused, while packets to addresses without a Service are dropped
/// (kube-proxy's nftables mode). The `id` is 0.
pub const KIND_ADDRESS: u8 = 5;
/// Not a frontend: port and protocol of the key are zero, and the entry marks the address as unmanaged, although it is in a
/// range of Service addresses: another proxy serves it (`service.kubernetes.io/service-proxy-name`), or the node itself
/// holds it (`NodeLocal` `DNSCache`). The `id` is 0.
pub const KIND_UNMANAGED: u8 = 6;
