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
        crate::filter::hash(&self.addr, self.port, self.proto) ^ u32::from(self.scope)
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
    /// Slots in the extent; 0: nobody to send to.
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

/// With no slot, drop instead of refuse: the policy is Local and only other nodes have endpoints
/// (kube-proxy contract: no-endpoint verdicts).
pub const SERVICE_DROP_WHEN_EMPTY: u16 = 1 << 0;

/// The frontend is a cluster address.
pub const KIND_CLUSTER_IP: u8 = 1;
/// The frontend is a node port.
pub const KIND_NODE_PORT: u8 = 2;
/// The frontend is a load balancer's ingress address.
pub const KIND_LOAD_BALANCER: u8 = 3;
/// The frontend is an external address.
pub const KIND_EXTERNAL_IP: u8 = 4;
