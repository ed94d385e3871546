//! The rules by which a new connection is decided, without the maps: the programs and `ballast explain` call the
//! same ones. `docs/datapath.md` tells them in order.

use crate::Address;
use crate::affinity::AffinityEntry;
use crate::backend::{BACKEND_ACTIVE, BACKEND_IN_CLUSTER, BACKEND_IN_LOCAL, BACKEND_LOCAL, BackendEntry};
use crate::config::CONFIG_MASQUERADE_ALL;
use crate::node::{NODE_ADDR_PORTS, NodeAddr, NodeEntry};
use crate::reason::Reason;
use crate::service::{
    KIND_CLUSTER_IP, SCOPE_EXTERNAL, SERVICE_DROP_WHEN_EMPTY, SERVICE_LOCAL, SERVICE_NODE_ALLOWED,
    SERVICE_SCOPED, SERVICE_SOURCE_RANGES, ServiceEntry, ServiceKey,
};

/// Whether a client is outside of the cluster: it comes in by an uplink, and its address is none of a pod.
#[inline(always)]
pub fn is_outside<A: Address>(by_uplink: impl FnOnce() -> bool, node: &NodeEntry<A>, client: &A) -> bool {
    // In this order: to ask for the device costs more.
    !node.pods.contains(client) && by_uplink()
}

/// What a client dialled: an address of a Service itself, or a node port on an address of this node on which node
/// ports answer, and which has no other bits than those of `on`. Clients outside have an entry of their own where a policy tells them apart.
#[inline(always)]
pub fn frontend<A: Address>(
    dialled: ServiceKey<A>,
    outside: bool,
    on: NodeAddr,
    service: impl Fn(&ServiceKey<A>) -> Option<ServiceEntry>,
    node_addr: impl Fn(&A) -> NodeAddr,
) -> Option<ServiceEntry> {
    // With "none" as a value, since the compiler spills what it need not define, and the verifier objects.
    let service = |key: &ServiceKey<A>| service(key).unwrap_or(ServiceEntry::NONE);
    let mut key = dialled;
    let mut entry = service(&key);
    if entry.kind == ServiceEntry::NONE.kind {
        let bits = node_addr(&key.addr);
        if bits & NODE_ADDR_PORTS != 0 && bits & !on == 0 {
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

/// Why nothing is behind an address in the range of Service addresses: no Service has the address, or its Service
/// has no such port (kube-proxy's nftables mode).
#[inline(always)]
pub fn why_nothing(address_is_a_services: bool) -> Reason {
    if address_is_a_services { Reason::UndefinedPort } else { Reason::UnallocatedAddress }
}

/// What a Service without a slot does (kube-proxy contract: no-endpoint verdicts).
#[inline(always)]
pub fn nobody(service: &ServiceEntry) -> Reason {
    if service.flags & SERVICE_DROP_WHEN_EMPTY != 0 { Reason::NoLocalEndpoint } else { Reason::NoEndpoint }
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
    /// The client's own: replies come back through here.
    Kept,
    /// This node's: the backend is the client itself, and would answer itself.
    Hairpin,
    /// This node's: the backend is on another node, which would answer a client outside directly.
    Remote,
    /// This node's: every packet to a cluster address has it (`masqueradeAll`).
    All,
    /// This node's: the client is a process of the node, and only by its port is a reply known to be ours.
    Own,
}

impl Source {
    /// Whether it is an address of this node (SNAT).
    #[inline(always)]
    pub const fn is_nodes(self) -> bool {
        !matches!(self, Self::Kept)
    }
}

/// See [`Source`]. `config`: the `CONFIG_*` bits.
#[inline(always)]
pub fn source<A: Address>(
    service: &ServiceEntry,
    client: &A,
    outside: bool,
    backend: &A,
    backend_flags: u32,
    config: u32,
) -> Source {
    let (b, c) = (backend.words(), client.words());
    // Word by word: a program has no `memcmp`.
    if b[0] == c[0] && b[1] == c[1] && b[2] == c[2] && b[3] == c[3] {
        Source::Hairpin
    } else if outside && backend_flags & BACKEND_LOCAL == 0 {
        Source::Remote
    } else if service.kind == KIND_CLUSTER_IP && config & CONFIG_MASQUERADE_ALL != 0 {
        Source::All
    } else {
        Source::Kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{Cidr, NODE_ADDR_LOOPBACK, NODE_ADDR_PORTS};
    use crate::service::{KIND_NODE_PORT, SCOPE_INTERNAL};

    type A4 = [u8; 4];
    const CLIENT: A4 = [192, 0, 2, 9];
    const POD: A4 = [10, 244, 0, 7];
    const NODE: A4 = [192, 0, 2, 1];

    fn entry(id: u32, kind: u8, flags: u16) -> ServiceEntry {
        ServiceEntry { id, flags, kind, ..ServiceEntry::default() }
    }

    fn backend(state: u8, service: u32, flags: u32) -> BackendEntry<A4> {
        BackendEntry { addr: POD, port: 80, proto: 6, state, service, flags }
    }

    #[test]
    fn outside_is_who_comes_by_an_uplink_and_has_no_pods_address() {
        let pods = Cidr { addr: [10, 244, 0, 0], mask: [255, 255, 0, 0] };
        let node = NodeEntry { pods, ..NodeEntry::UNKNOWN };
        assert!(is_outside(|| true, &node, &CLIENT));
        assert!(!is_outside(|| true, &node, &POD));
        assert!(!is_outside(|| false, &node, &CLIENT));
        assert!(is_outside(|| true, &NodeEntry::UNKNOWN, &POD));
    }

    #[test]
    fn an_address_comes_before_a_node_port_and_a_scope_of_its_own_before_the_common_one() {
        let on = |node: NodeAddr| move |addr: &A4| if *addr == NODE { node } else { 0 };
        let services = |key: &ServiceKey<A4>| match (key.addr, key.port, key.scope) {
            ([0, 0, 0, 0], 30080 | 30081, SCOPE_INTERNAL) => Some(entry(1, KIND_NODE_PORT, SERVICE_SCOPED)),
            ([0, 0, 0, 0], 30080, SCOPE_EXTERNAL) => Some(entry(2, KIND_NODE_PORT, SERVICE_LOCAL)),
            (NODE, 30081, SCOPE_INTERNAL) => Some(entry(3, KIND_CLUSTER_IP, 0)),
            _ => None,
        };
        let find = |port, outside, node: NodeAddr, asked| {
            let key = ServiceKey::internal(NODE, port, 6);
            frontend(key, outside, asked, services, on(node)).map(|entry| entry.id)
        };
        assert_eq!(find(30080, false, NODE_ADDR_PORTS, NODE_ADDR_PORTS), Some(1));
        assert_eq!(find(30080, true, NODE_ADDR_PORTS, NODE_ADDR_PORTS), Some(2));
        assert_eq!(find(30080, true, NODE_ADDR_LOOPBACK, NODE_ADDR_PORTS), None);
        assert_eq!(find(30080, false, 0, NODE_ADDR_PORTS), None);
        let loopback = NODE_ADDR_PORTS | NODE_ADDR_LOOPBACK;
        assert_eq!(find(30080, false, loopback, NODE_ADDR_PORTS), None);
        assert_eq!(find(30080, false, loopback, loopback), Some(1));
        assert_eq!(find(30081, true, NODE_ADDR_PORTS, NODE_ADDR_PORTS), Some(3));
        assert_eq!(find(30082, true, NODE_ADDR_PORTS, NODE_ADDR_PORTS), None);
    }

    #[test]
    fn source_ranges_mean_something_else_to_each_kind_of_socket() {
        let open = entry(1, KIND_NODE_PORT, 0);
        let closed = entry(1, KIND_NODE_PORT, SERVICE_SOURCE_RANGES);
        let node = entry(1, KIND_NODE_PORT, SERVICE_SOURCE_RANGES | SERVICE_NODE_ALLOWED);
        assert!(!asks_source(&open) && asks_source(&closed) && asks_source(&node));
        for of_node in [false, true] {
            assert_eq!(socket_source(&open, of_node), SocketSource::Allowed);
        }
        assert_eq!(socket_source(&closed, true), SocketSource::Refused);
        assert_eq!(socket_source(&node, true), SocketSource::Allowed);
        assert_eq!(socket_source(&closed, false), SocketSource::LeftToPackets);
        assert_eq!(socket_source(&node, false), SocketSource::LeftToPackets);
    }

    #[test]
    fn a_client_stays_for_so_many_seconds_with_a_backend_of_the_policy() {
        let service = ServiceEntry { affinity_secs: 10, ..entry(1, KIND_CLUSTER_IP, 0) };
        let used = AffinityEntry { backend_id: 5, last_used: u32::MAX - 100 };
        let at = |later: u32| is_in_time(&used, &service, used.last_used.wrapping_add(later), 100);
        assert!(at(0) && at(1000) && !at(1001) && at(0u32.wrapping_sub(1)) && !at(0u32.wrapping_sub(101)));
        let local = entry(1, KIND_CLUSTER_IP, SERVICE_LOCAL);
        assert!(may_stay(&backend(BACKEND_ACTIVE, 1, BACKEND_IN_CLUSTER), &service));
        assert!(!may_stay(&backend(BACKEND_ACTIVE, 1, BACKEND_IN_CLUSTER), &local));
        assert!(may_stay(&backend(BACKEND_ACTIVE, 1, BACKEND_IN_LOCAL), &local));
        assert!(!may_stay(&backend(BACKEND_ACTIVE, 2, BACKEND_IN_CLUSTER), &service));
        assert!(!may_stay(&backend(crate::backend::BACKEND_GONE, 1, BACKEND_IN_CLUSTER), &service));
    }

    #[test]
    fn the_clients_address_is_kept_wherever_the_reply_comes_back() {
        let (cluster, port) = (entry(1, KIND_CLUSTER_IP, 0), entry(1, KIND_NODE_PORT, 0));
        let all = CONFIG_MASQUERADE_ALL;
        let of = |service: &ServiceEntry, client, outside, flags, config| {
            source(service, &client, outside, &POD, flags, config)
        };
        assert_eq!(of(&port, CLIENT, true, BACKEND_LOCAL, all), Source::Kept);
        assert_eq!(of(&port, CLIENT, true, 0, 0), Source::Remote);
        assert_eq!(of(&port, CLIENT, false, 0, 0), Source::Kept);
        assert_eq!(of(&port, POD, false, BACKEND_LOCAL, 0), Source::Hairpin);
        assert_eq!(of(&cluster, CLIENT, false, 0, 0), Source::Kept);
        assert_eq!(of(&cluster, CLIENT, false, BACKEND_LOCAL, all), Source::All);
        assert_eq!(of(&cluster, CLIENT, true, BACKEND_LOCAL, 0), Source::Kept);
        assert!(Source::Remote.is_nodes() && !Source::Kept.is_nodes());
    }

    #[test]
    fn nobody_and_nothing_have_reasons() {
        assert_eq!(nobody(&entry(1, KIND_CLUSTER_IP, 0)), Reason::NoEndpoint);
        assert_eq!(nobody(&entry(1, KIND_CLUSTER_IP, SERVICE_DROP_WHEN_EMPTY)), Reason::NoLocalEndpoint);
        assert_eq!(why_nothing(true), Reason::UndefinedPort);
        assert_eq!(why_nothing(false), Reason::UnallocatedAddress);
    }
}
