//! The rules by which a new connection is decided, without the maps: the programs and `ballast explain` call the
//! same ones. `docs/datapath.md` tells them in order.

use crate::Address;
use crate::PROTO_SCTP;
use crate::affinity::AffinityEntry;
use crate::backend::{
    BACKEND_ACTIVE, BACKEND_FREE, BACKEND_IN_CLUSTER, BACKEND_IN_LOCAL, BackendEntry, tunnel_of,
};
use crate::config::{CONFIG_DETECT_LOCAL, CONFIG_MASQUERADE_ALL};
use crate::flow::FlowKey;
use crate::node::{NODE_ADDR_INTERNAL, NODE_ADDR_OWN, NODE_ADDR_PORTS, NodeAddr, NodeEntry};
use crate::reason::Reason;
use crate::select::Algorithm;
use crate::service::{
    KIND_CLUSTER_IP, KIND_NODE_PORT, KIND_UNMANAGED, SCOPE_EXTERNAL, SERVICE_DROP_WHEN_EMPTY, SERVICE_DSR,
    SERVICE_LOCAL, SERVICE_MAGLEV_OUTSIDE, SERVICE_NODE_ALLOWED, SERVICE_SCOPED, SERVICE_SOURCE_RANGES,
    ServiceEntry, ServiceKey,
};

/// Whether a client is outside of the cluster, for the policies of a Service: its address is none of a pod, and it comes in
/// by an uplink; where the operator tells pods by their addresses (`CONFIG_DETECT_LOCAL` in `flags`), the device does not
/// count. Whether replies to it return through this node is another question: see [`source`].
#[inline(always)]
pub fn is_outside<A: Address>(by_uplink: bool, flags: u32, node: &NodeEntry<A>, client: &A) -> bool {
    (by_uplink || flags & CONFIG_DETECT_LOCAL != 0) && !node.pods.contains(client)
}

/// What a client dialled: an address of a Service itself, or a node port on an address of this node on which node
/// ports answer, and which has no other bits than those of `on`. Clients outside have an entry of their own where a policy tells them apart.
#[inline(always)]
pub fn frontend<A: Address>(
    orig_dst: ServiceKey<A>,
    outside: bool,
    on: NodeAddr,
    service: impl Fn(&ServiceKey<A>) -> Option<ServiceEntry>,
    node_addr: impl Fn(&A) -> NodeAddr,
) -> Option<ServiceEntry> {
    // With "none" as a value, since the compiler spills what it need not define, and the verifier objects.
    let service = |key: &ServiceKey<A>| service(key).unwrap_or(ServiceEntry::NONE);
    let mut key = orig_dst;
    let mut entry = service(&key);
    if entry.kind == ServiceEntry::NONE.kind {
        let bits = node_addr(&key.addr);
        if bits & NODE_ADDR_PORTS != 0 && bits & !(on | NODE_ADDR_OWN | NODE_ADDR_INTERNAL) == 0 {
            key.addr = A::ZERO;
            entry = service(&key);
        }
    }
    if outside && entry.flags & SERVICE_SCOPED != 0 {
        key.scope = SCOPE_EXTERNAL;
        entry = service(&key);
    }
    (entry.kind != ServiceEntry::NONE.kind).then_some(entry)
}

/// What happens to a packet or a call to an address in the range of Service addresses that has no frontend there. `kind`: of
/// the entry of the address itself (port 0, protocol 0), if there is one. An address that no Service has is dropped, a port
/// that its Service has not is refused (kube-proxy's nftables mode), and what Ballast leaves alone passes.
#[inline(always)]
pub fn why_nothing(kind: Option<u8>) -> Reason {
    match kind {
        Some(KIND_UNMANAGED) => Reason::UnmanagedAddress,
        Some(_) => Reason::UndefinedPort,
        None => Reason::UnallocatedAddress,
    }
}

/// What a Service without a slot does (kube-proxy contract: no-endpoint verdicts).
#[inline(always)]
pub fn no_endpoint_reason(service: &ServiceEntry) -> Reason {
    if service.flags & SERVICE_DROP_WHEN_EMPTY != 0 { Reason::NoLocalEndpoint } else { Reason::NoEndpoint }
}

/// How the connections of a client are spread: those from outside of the cluster may be spread by Maglev instead of the entry's
/// algorithm.
#[inline(always)]
pub fn algorithm(service: &ServiceEntry, outside: bool) -> u8 {
    if outside && service.flags & SERVICE_MAGLEV_OUTSIDE != 0 {
        Algorithm::Maglev as u8
    } else {
        service.algorithm
    }
}

/// Whether `src_ranges` has to be asked about the client of a packet.
#[inline(always)]
pub fn asks_source(service: &ServiceEntry) -> bool {
    service.flags & SERVICE_SOURCE_RANGES != 0
}

/// What `loadBalancerSourceRanges` means to a socket, whose address is not known when it connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketSource {
    /// It is let through.
    Allowed,
    /// It is a pod's: it is left alone, and the packet hooks decide.
    LeftToPackets,
    /// It is the node's own, and the node is not in the list.
    Refused,
}

/// See [`SocketSource`]. `of_node`: the socket is in the network namespace of the node.
#[inline(always)]
pub fn socket_source(service: &ServiceEntry, of_node: bool) -> SocketSource {
    if service.flags & SERVICE_SOURCE_RANGES == 0 {
        SocketSource::Allowed
    } else if !of_node {
        SocketSource::LeftToPackets
    } else if service.flags & SERVICE_NODE_ALLOWED != 0 {
        SocketSource::Allowed
    } else {
        SocketSource::Refused
    }
}

/// Whether new connections of the Service may go to this backend.
#[inline(always)]
pub fn serves<A: Address>(backend: &BackendEntry<A>, service: &ServiceEntry) -> bool {
    backend.state == BACKEND_ACTIVE && backend.service == service.id
}

/// Whether the backend is an endpoint of the Service, or was until its id is free again.
#[inline(always)]
pub fn is_of<A: Address>(backend: &BackendEntry<A>, service: &ServiceEntry) -> bool {
    backend.state != BACKEND_FREE && backend.service == service.id
}

/// Whether a client that stays with a backend came back in time; `now` is the low half of jiffies, of which there are
/// `hz` in a second.
#[inline(always)]
pub fn is_in_time(entry: &AffinityEntry, service: &ServiceEntry, now: u32, hz: u32) -> bool {
    let silent = now.wrapping_sub(entry.last_used);
    // Another CPU may have used it a moment after the clock was read.
    silent <= service.affinity_secs.wrapping_mul(hz) || silent.wrapping_neg() <= hz
}

/// Whether the client may stay with this backend: it serves, and stands in the extents of the entry's policy.
#[inline(always)]
pub fn may_stay<A: Address>(backend: &BackendEntry<A>, service: &ServiceEntry) -> bool {
    let wanted = if service.flags & SERVICE_LOCAL != 0 { BACKEND_IN_LOCAL } else { BACKEND_IN_CLUSTER };
    serves(backend, service) && backend.flags & wanted != 0
}

/// Which address the backend of a packet sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The client's own: replies return through this node.
    Kept,
    /// This node's: the backend is the client itself, and would answer itself.
    Hairpin,
    /// This node's: neither the backend nor the client is behind a device of this node, so the backend would answer the
    /// client directly.
    Remote,
    /// This node's: every packet to a cluster address has it (`masqueradeAll`).
    All,
    /// This node's: the client is a process of the node, and only by its port is a reply known to be ours.
    Local,
}

impl Source {
    /// Whether it is an address of this node (SNAT).
    #[inline(always)]
    pub const fn is_nodes(self) -> bool {
        !matches!(self, Self::Kept)
    }
}

/// What [`source`] goes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// The client is a process of this node.
    pub from_node: bool,
    /// The packet came in by a device that leads to other machines.
    pub by_uplink: bool,
    /// The backend is on this node.
    pub backend_is_local: bool,
}

/// See [`Source`]. `config`: the `CONFIG_*` bits; `is_own`: whether an address is one of this node's own.
///
/// A reply surely returns through this node if its backend is here, or if its client is behind a device of this node; in
/// all other cases the backend sees an address of this node, as with kube-proxy's masquerading. A backend that has the
/// node's own address never sees it as a client's: a packet to itself would not leave the node (`masqueradeAll` with a
/// backend in the node's network).
#[inline(always)]
pub fn source<A: Address>(
    service: &ServiceEntry,
    client: &A,
    backend: &A,
    path: Path,
    config: u32,
    is_own: impl FnOnce(&A) -> bool,
) -> Source {
    let (b, c) = (backend.words(), client.words());
    // Word by word: a program has no `memcmp`.
    if path.from_node {
        Source::Local
    } else if b[0] == c[0] && b[1] == c[1] && b[2] == c[2] && b[3] == c[3] {
        Source::Hairpin
    } else if path.by_uplink && !path.backend_is_local {
        Source::Remote
    } else if service.kind == KIND_CLUSTER_IP && config & CONFIG_MASQUERADE_ALL != 0 && !is_own(backend) {
        Source::All
    } else {
        Source::Kept
    }
}

/// The number in `tunnels` of the node that a client's packet is encapsulated to, so that it answers the client directly (DSR);
/// 0: the packet is not, and takes the way of [`Source`].
///
/// `backend`: the flags of the backend. `proto`: TCP or UDP; checksums of SCTP cover more than segments that are yet to be cut
/// have. `outside`: the result of [`is_outside`]. `node_addr` gives the `NODE_ADDR_*` bits of an address. Clients that are nodes are
/// excluded, since the other node would send them their own packets; so are node ports at addresses that are no `InternalIP`, since
/// the other node does not know them.
#[inline(always)]
pub fn tunnel<A: Address>(
    service: &ServiceEntry,
    source: Source,
    backend: u32,
    key: &FlowKey<A>,
    outside: bool,
    node_addr: impl Fn(&A) -> NodeAddr,
) -> u32 {
    let number = tunnel_of(backend);
    let is_wanted = service.flags & SERVICE_DSR != 0
        && matches!(source, Source::Remote)
        && outside
        && number != 0
        && key.proto != PROTO_SCTP;
    if !is_wanted || node_addr(&key.src) & (NODE_ADDR_INTERNAL | NODE_ADDR_OWN) != 0 {
        return 0;
    }
    if service.kind == KIND_NODE_PORT && node_addr(&key.dst) & NODE_ADDR_INTERNAL == 0 {
        return 0;
    }
    number
}

/// Whether no client can have this address: a packet with it as its source is a martian
/// (`net/ipv4/route.c`, `ip_route_input_slow`; `net/ipv6/ip6_input.c`, `ip6_rcv_core`).
#[inline(always)]
pub fn is_martian<A: Address>(source: &A) -> bool {
    let [a, b, c, d] = source.words().map(u32::from_be);
    if size_of::<A>() == size_of::<u32>() {
        let first = a >> 24;
        // "This network", loopback, multicast, reserved and broadcast.
        first == 0 || first == 127 || first >= 224
    } else {
        let is_low = a == 0 && b == 0;
        // Multicast; unspecified, loopback and what else begins with 96 zeros; IPv4 addresses.
        a >> 24 == 0xff || is_low && (c == 0 || c == 0xffff) && (c != 0 || d <= 1)
    }
}

#[cfg(test)]
mod tests;
