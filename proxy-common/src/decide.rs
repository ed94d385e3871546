//! The rules for a new connection, without the maps: the programs and `ballast explain` call the same functions.
//! `docs/datapath.md` describes the rules in order.

use crate::Address;
use crate::PROTO_SCTP;
use crate::affinity::AffinityEntry;
use crate::backend::{
    BACKEND_ACTIVE, BACKEND_FREE, BACKEND_IN_CLUSTER, BACKEND_IN_LOCAL, BackendEntry, tunnel_of,
};
use crate::config::{CONFIG_DETECT_LOCAL, CONFIG_MASQUERADE_ALL, CONFIG_MASQUERADE_EXTERNAL, NodeConfig};
use crate::flow::FlowKey;
use crate::node::{NODE_ADDR_INTERNAL, NODE_ADDR_OWN, NODE_ADDR_PORTS, NodeAddr, NodeEntry};
use crate::reason::Reason;
use crate::select::Algorithm;
use crate::service::{
    KIND_CLUSTER_IP, KIND_NODE_PORT, KIND_UNMANAGED, SCOPE_EXTERNAL, SERVICE_CHANGING, SERVICE_CHANGING_NODE,
    SERVICE_DROP_WHEN_EMPTY, SERVICE_DSR, SERVICE_LOCAL, SERVICE_MAGLEV_OUTSIDE, SERVICE_NO_SOCKETS,
    SERVICE_NODE_ALLOWED, SERVICE_PASS_WHEN_EMPTY, SERVICE_SCOPED, SERVICE_SOURCE_RANGES, ServiceEntry,
    ServiceKey,
};

/// Whether a client is outside of the cluster, for the policies of a Service: its address is not a pod's, and its packet
/// arrived on an uplink. If the operator tells pods by their addresses (`CONFIG_DETECT_LOCAL` in `flags`), the device does
/// not count. Whether replies to the client return through this node is decided by [`source`].
#[inline(always)]
pub fn is_outside<A: Address>(by_uplink: bool, flags: u32, node: &NodeEntry<A>, client: &A) -> bool {
    (by_uplink || flags & CONFIG_DETECT_LOCAL != 0) && !node.pods.contains(client)
}

/// Returns the frontend of an original destination: an address of a Service, or a node port on an address of this node. Node
/// ports answer on addresses with `NODE_ADDR_PORTS` and no bits besides `on`, `NODE_ADDR_OWN` and `NODE_ADDR_INTERNAL`.
/// Clients outside have an entry of their own if a policy distinguishes them.
#[inline(always)]
pub fn frontend<A: Address>(
    orig_dst: ServiceKey<A>,
    outside: bool,
    on: NodeAddr,
    service: impl Fn(&ServiceKey<A>) -> Option<ServiceEntry>,
    node_addr: impl Fn(&A) -> NodeAddr,
) -> Option<ServiceEntry> {
    // A value for "none" instead of an `Option`: the compiler would spill an undefined value, and the verifier rejects the
    // program.
    let service = |key: &ServiceKey<A>| service(key).unwrap_or(ServiceEntry::NONE);
    let mut key = orig_dst;
    // The address zero is the loopback address of the client's own network; node ports are stored under it.
    let [a, b, c, d] = key.addr.words();
    let mut entry = if a | b | c | d == 0 { ServiceEntry::NONE } else { service(&key) };
    if entry.kind == ServiceEntry::NONE.kind {
        let bits = node_addr(&host_address(&key.addr));
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

/// Returns 127.0.0.1 for 0.0.0.0; any other address as it is.
#[inline(always)]
pub fn loopback_of_zero<A: Address>(addr: &A) -> A {
    let [first, ..] = addr.words();
    let is_zero = size_of::<A>() == size_of::<u32>() && first == 0;
    if is_zero { A::from_words([u32::from_ne_bytes([127, 0, 0, 1]), 0, 0, 0]) } else { *addr }
}

/// Returns the address in `node_addrs` that stands for an address of the node: 127.0.0.1 for all of 127.0.0.0/8, which the
/// kernel has as one local route.
#[inline(always)]
pub fn host_address<A: Address>(addr: &A) -> A {
    let [first, ..] = addr.words();
    let is_loopback = size_of::<A>() == size_of::<u32>() && u32::from_be(first) >> 24 == 127;
    if is_loopback { A::from_words([u32::from_ne_bytes([127, 0, 0, 1]), 0, 0, 0]) } else { *addr }
}

/// Returns why a packet or call to an address in the range of Service addresses has no frontend there. `kind`: of the entry
/// of the address itself (port 0, protocol 0), if there is one. An address that no Service has is dropped, a port that its
/// Service does not have is refused (kube-proxy's nftables mode), and an unmanaged address passes.
#[inline(always)]
pub fn why_nothing(kind: Option<u8>) -> Reason {
    match kind {
        Some(KIND_UNMANAGED) => Reason::UnmanagedAddress,
        Some(_) => Reason::UndefinedPort,
        None => Reason::UnallocatedAddress,
    }
}

/// Returns the reason for a Service without a slot (kube-proxy contract: no-endpoint verdicts).
#[inline(always)]
pub fn no_endpoint_reason(service: &ServiceEntry) -> Reason {
    if service.flags & SERVICE_PASS_WHEN_EMPTY != 0 {
        Reason::PassedOn
    } else if service.flags & SERVICE_DROP_WHEN_EMPTY != 0 {
        Reason::NoLocalEndpoint
    } else {
        Reason::NoEndpoint
    }
}

/// Returns the number of the algorithm for a client's connections: those from outside of the cluster may use Maglev instead
/// of the entry's algorithm.
#[inline(always)]
pub fn algorithm(service: &ServiceEntry, outside: bool) -> u8 {
    if outside && service.flags & SERVICE_MAGLEV_OUTSIDE != 0 {
        Algorithm::Maglev as u8
    } else {
        service.algorithm
    }
}

/// Whether `src_ranges` has to be looked up for the client of a packet.
#[inline(always)]
pub fn has_source_ranges(service: &ServiceEntry) -> bool {
    service.flags & SERVICE_SOURCE_RANGES != 0
}

/// The effect of `loadBalancerSourceRanges` on a socket, whose address is not known when it connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketSource {
    /// The socket is allowed.
    Allowed,
    /// The call is not translated: the packets are left to the packet hooks; the node's own, for a node port without endpoints, to
    /// the process that listens there. Such a process may be the endpoint that is not ready yet, and its readiness probe comes from
    /// the node.
    LeftToPackets,
    /// The socket is the node's own, and the node is not in the list.
    Refused,
}

/// Returns what the Service's source ranges, its setting for sockets and changes of its endpoints mean for a socket. `of_node`: the
/// socket is in the network namespace of the node; `is_attended`: see [`is_attended`].
#[inline(always)]
pub fn socket_source(
    service: &ServiceEntry,
    of_node: bool,
    is_attended: impl FnOnce() -> bool,
) -> SocketSource {
    let (changing, is_left) = if of_node {
        (SERVICE_CHANGING_NODE, service.kind == KIND_NODE_PORT && service.slot_count == 0)
    } else {
        (SERVICE_CHANGING, service.flags & (SERVICE_SOURCE_RANGES | SERVICE_NO_SOCKETS) != 0)
    };
    if is_left || service.flags & changing != 0 && is_attended() {
        SocketSource::LeftToPackets
    } else if service.flags & SERVICE_SOURCE_RANGES == 0 || service.flags & SERVICE_NODE_ALLOWED != 0 {
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

/// Whether the backend is an endpoint of the Service, or a removed one whose id is not free yet.
#[inline(always)]
pub fn is_of<A: Address>(backend: &BackendEntry<A>, service: &ServiceEntry) -> bool {
    backend.state != BACKEND_FREE && backend.service == service.id
}

/// Whether a client came back before its session affinity expired. `now`: the low half of jiffies; `hz`: jiffies per
/// second.
#[inline(always)]
pub fn is_in_time(entry: &AffinityEntry, service: &ServiceEntry, now: u32, hz: u32) -> bool {
    let silent = now.wrapping_sub(entry.last_used);
    // Another CPU may have updated `last_used` just after the clock was read.
    silent <= service.affinity_secs.wrapping_mul(hz) || silent.wrapping_neg() <= hz
}

/// Whether session affinity may keep this backend: it serves, and is in the extents of the entry's policy.
#[inline(always)]
pub fn may_stay<A: Address>(backend: &BackendEntry<A>, service: &ServiceEntry) -> bool {
    let wanted = if service.flags & SERVICE_LOCAL != 0 { BACKEND_IN_LOCAL } else { BACKEND_IN_CLUSTER };
    serves(backend, service) && backend.flags & wanted != 0
}

/// The source address that the backend of a packet sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The client's own address: replies return through this node.
    Kept,
    /// This node's address: the backend is the client itself, and would answer itself.
    Hairpin,
    /// This node's address: neither the backend nor the client is behind a device of this node, so the backend would answer
    /// the client directly.
    Remote,
    /// This node's address, for every packet to a cluster address whose backend is on another node (`masqueradeAll`).
    All,
    /// This node's address: the client is a process of the node, and only the SNAT port identifies the replies.
    Local,
}

impl Source {
    /// Whether the source is an address of this node (SNAT).
    #[inline(always)]
    pub const fn is_nodes(self) -> bool {
        !matches!(self, Self::Kept)
    }
}

/// The path of a packet, by which [`source`] decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// The client is a process of this node.
    pub from_node: bool,
    /// The packet arrived on an uplink.
    pub by_uplink: bool,
    /// The backend is on this node.
    pub backend_is_local: bool,
}

/// Returns the [`Source`] of a new connection. `config`: the `CONFIG_*` bits.
///
/// A reply certainly returns through this node if its backend is on this node, or if its client is behind a local device;
/// in all other cases the backend sees an address of this node, as with kube-proxy's masquerading. A backend on this node
/// sees the client's address also with `masqueradeAll`: its packets go up the stack, whose FORWARD chain holds the policies
/// of client and backend.
#[inline(always)]
pub fn source<A: Address>(
    service: &ServiceEntry,
    client: &A,
    backend: &A,
    path: Path,
    config: u32,
) -> Source {
    let (b, c) = (backend.words(), client.words());
    // Word by word: a BPF program has no `memcmp`.
    if path.from_node {
        Source::Local
    } else if b[0] == c[0] && b[1] == c[1] && b[2] == c[2] && b[3] == c[3] {
        Source::Hairpin
    } else if path.backend_is_local {
        Source::Kept
    } else if path.by_uplink {
        Source::Remote
    } else if service.kind == KIND_CLUSTER_IP && config & CONFIG_MASQUERADE_ALL != 0 {
        Source::All
    } else {
        Source::Kept
    }
}

/// Whether netfilter masquerades a connection whose [`Source`] is [`Source::Kept`], as kube-proxy does for clients outside.
/// `config`: the `CONFIG_*` bits; `outside`: the result of [`is_outside`]. `externalTrafficPolicy: Local` keeps the client's
/// address (`internalTrafficPolicy` does not), and so does DSR: the endpoints of a Service see the same address, whichever
/// node they are on.
#[inline(always)]
pub const fn netfilter_masquerades(
    service: &ServiceEntry,
    by_uplink: bool,
    outside: bool,
    config: u32,
) -> bool {
    let keeps = if service.kind == KIND_CLUSTER_IP { SERVICE_DSR } else { SERVICE_LOCAL | SERVICE_DSR };
    let keeps = service.flags & keeps != 0;
    config & CONFIG_MASQUERADE_EXTERNAL != 0 && by_uplink && outside && !keeps
}

/// Returns the index in `tunnels` of the node to which a client's packet is encapsulated, so that the other node answers
/// the client directly (DSR); 0 if the packet is not encapsulated, and [`Source`] applies.
///
/// `backend`: the flags of the backend. `outside`: the result of [`is_outside`]. `node_addr` returns the `NODE_ADDR_*` bits
/// of an address. SCTP is excluded: its checksum covers segments that are not cut yet. Clients that are nodes are excluded,
/// since the other node would send them their own packets; so are node ports at addresses that are no `InternalIP`, since
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

/// Seconds for which an agent that looks at all devices every ten seconds is taken to be there.
pub const ATTENDS_SECS: u32 = 15;

/// Whether an agent attaches programs to new devices: without it, the packets of a pod that has just started are not translated.
#[inline(always)]
pub fn is_attended(config: &NodeConfig, now: u32) -> bool {
    let left = config.attended_until.wrapping_sub(now);
    // An agent writes at most ATTENDS_SECS: what it left behind when it ended must not be valid again after 2^31 ticks.
    config.attended_until != 0 && left != 0 && left <= (ATTENDS_SECS + 1) * config.hz
}

/// Whether no client can have this address: a packet with this source is a martian (`net/ipv4/route.c`,
/// `ip_route_input_slow`; `net/ipv6/ip6_input.c`, `ip6_rcv_core`).
#[inline(always)]
pub fn is_martian<A: Address>(source: &A) -> bool {
    let [a, b, c, d] = source.words().map(u32::from_be);
    if size_of::<A>() == size_of::<u32>() {
        let first = a >> 24;
        // Unspecified, loopback, multicast and broadcast. Class E (240.0.0.0/4) is in use, as are other addresses of 0.0.0.0/8.
        a == 0 || first == 127 || first >> 4 == 14 || a == u32::MAX
    } else {
        let is_low = a == 0 && b == 0;
        // Multicast; unspecified (`::`) and loopback (`::1`); IPv4-mapped (`::ffff:0:0/96`).
        a >> 24 == 0xff || is_low && (c == 0 || c == 0xffff) && (c != 0 || d <= 1)
    }
}

/// Whether an address is valid on its link only (`fe80::/10`): the kernel forwards no packet with this source
/// (`net/ipv6/ip6_output.c`, `ip6_forward`). IPv4 packets from 169.254.0.0/16 are forwarded.
#[inline(always)]
pub fn is_link_local<A: Address>(source: &A) -> bool {
    size_of::<A>() > size_of::<u32>() && u32::from_be(source.words()[0]) >> 22 == 0xfe80 >> 6
}

#[cfg(test)]
mod tests;
