//! `services`, `services6` and `slots`: from a frontend to the backends that stand behind it.

use crate::Address;

/// Key of `services`: what a client dials.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServiceKey<A> {
    /// Frontend address; all zero is "any address of this node" (NodePort).
    pub addr: A,
    /// Frontend port, host byte order.
    pub port: u16,
    /// IP protocol number: 6 TCP, 17 UDP, 132 SCTP.
    pub proto: u8,
    /// [`SCOPE_INTERNAL`] or [`SCOPE_EXTERNAL`].
    pub scope: u8,
}

/// For clients inside the cluster, and for everyone where the two do not differ.
pub const SCOPE_INTERNAL: u8 = 0;
/// For clients outside, where a Service's policy makes a difference.
pub const SCOPE_EXTERNAL: u8 = 1;

impl<A: Address> ServiceKey<A> {
    /// A number that two keys hardly ever share; see [`ServiceEntry::tag`].
    #[inline(always)]
    pub fn tag(&self) -> u32 {
        crate::prefilter::hash(&self.addr, self.port, self.proto) ^ u32::from(self.scope)
    }

    /// The key of an internal frontend.
    #[inline(always)]
    pub fn internal(addr: A, port: u16, proto: u8) -> Self {
        Self { addr, port, proto, scope: SCOPE_INTERNAL }
    }
}

/// Value of `services`. Replacing it is the commit of a change: it moves readers from one complete extent of
/// slots to the next.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceEntry {
    /// [`ServiceKey::tag`] of the key it belongs to. A hash element that is replaced is reused for another key
    /// while a reader may still hold it (`kernel/bpf/hashtab.c`, `extra_elems`): the reader looks at the tag
    /// before and after it copies the rest, and looks the key up again when it is not its own.
    pub tag: u32,
    /// Id of the Service port; the index into `service_stats` and the key of `names`.
    pub id: u32,
    /// First slot of the extent in `slots`.
    pub slot_base: u32,
    /// Slots in the extent; 0: no endpoint.
    pub slot_count: u32,
    /// Seconds of session affinity by client address; 0: none.
    pub affinity_secs: u32,
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
        flags: 0,
        algorithm: 0,
        kind: 0,
    };
}

/// With no slot, drop instead of refuse: the policy is Local and only other nodes have endpoints
/// (kube-proxy contract: no-endpoint verdicts).
pub const SERVICE_DROP_WHEN_EMPTY: u16 = 1 << 0;
/// Clients outside the cluster have an entry of their own: the same key in [`SCOPE_EXTERNAL`]. It stands at the
/// internal entry.
pub const SERVICE_SCOPED: u16 = 1 << 1;
/// The extent holds the endpoints of policy Local, not those of policy Cluster.
pub const SERVICE_LOCAL: u16 = 1 << 2;
/// Only clients whose address stands in `src_ranges` under the Service's id get through
/// (`spec.loadBalancerSourceRanges`). A socket's address is not known when it connects: pods are left to the
/// packet hooks, where it is.
pub const SERVICE_SOURCE_RANGES: u16 = 1 << 3;
/// With [`SERVICE_SOURCE_RANGES`]: this node itself gets through.
pub const SERVICE_NODE_ALLOWED: u16 = 1 << 4;
/// Clients outside of the cluster are spread by Maglev, whatever the entry's algorithm says of those inside.
pub const SERVICE_MAGLEV_OUTSIDE: u16 = 1 << 5;
/// New connections skip endpoints that fail ([`health`](crate::health)): it is TCP, and there is more than one endpoint.
pub const SERVICE_EJECTS: u16 = 1 << 6;

/// Packets of clients outside to endpoints on other nodes are encapsulated, and answered by these nodes directly (DSR).
pub const SERVICE_DSR: u16 = 1 << 7;

/// The frontend is a cluster address.
pub const KIND_CLUSTER_IP: u8 = 1;
/// The frontend is a node port.
pub const KIND_NODE_PORT: u8 = 2;
/// The frontend is a load balancer's ingress address.
pub const KIND_LOAD_BALANCER: u8 = 3;
/// The frontend is an external address.
pub const KIND_EXTERNAL_IP: u8 = 4;
/// No frontend: port and protocol of the key are zero, and the entry says that the address is a live cluster
/// address. Its ports that no Service has are refused, while addresses without a Service are dropped
/// (kube-proxy's nftables mode). Its `id` is 0.
pub const KIND_ADDRESS: u8 = 5;
/// No frontend: port and protocol of the key are zero, and the entry says that Ballast leaves the address alone, although
/// it is in a range of Service addresses: another proxy serves it (`service.kubernetes.io/service-proxy-name`), or the
/// node itself owns it (`NodeLocal` `DNSCache`). Its `id` is 0.
pub const KIND_UNMANAGED: u8 = 6;
