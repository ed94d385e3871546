//! What both address families ask of the maps, written once.

use aya_ebpf::btf_maps::lpm_trie::Key;
use proxy_common::Family;
use proxy_common::affinity::{AffinityEntry, AffinityKey};
use proxy_common::backend::BackendEntry;
use proxy_common::flow::{Bucket, Flow};
use proxy_common::fragment::{FragmentEntry, FragmentKey};
use proxy_common::node::{NodeAddr, NodeEntry};
use proxy_common::service::{ServiceEntry, ServiceKey};
use proxy_common::socket::{SocketEntry, SocketKey};
use proxy_common::source_range::{SERVICE_BITS, SourceRangeKey};

use super::recast::{octets, words};
use super::{
    AFFINITY, AFFINITY6, BACKENDS, BACKENDS6, FLOW_INDEX, FLOW_INDEX6, FLOWS, FLOWS6, FRAGMENTS, FRAGMENTS6,
    NODE, NODE_ADDRS, NODE_ADDRS6, NODE6, SCRATCH, SCRATCH6, SERVICES, SERVICES6, SOCKETS, SOCKETS6,
    SRC_RANGES, SRC_RANGES6, WAYS, WAYS6,
};
use crate::packet::Scratch;
use crate::route::Hop;

/// The tables of one address family.
pub trait Tables: Family {
    /// What stands behind a frontend.
    fn service(key: &ServiceKey<Self::Words>) -> Option<&'static ServiceEntry>;
    /// The backend of that id.
    fn backend(id: u32) -> Option<&'static BackendEntry<Self::Words>>;
    /// A bucket of the flows' index.
    fn bucket(number: u32) -> Option<*mut Bucket>;
    /// The state of a flow.
    fn flow(index: u32) -> Option<*mut Flow<Self::Words>>;
    /// Where one act leaves the packet that it parsed to the next one. A packet is done before another begins on the
    /// same CPU.
    fn scratch() -> Option<*mut Scratch<Self::Words>>;
    /// A place where this CPU remembers a way.
    fn way(number: u32) -> Option<*mut Hop<Self::Words>>;
    /// What the agent says of this node.
    fn node() -> Option<&'static NodeEntry<Self::Words>>;
    /// What an address is to this node; 0: none of its own.
    fn node_addr(addr: &Self::Words) -> NodeAddr;
    /// The backend that a client of the packet path stays with.
    fn affinity(key: &AffinityKey<Self::Words>) -> Option<*mut AffinityEntry>;
    /// Remembers it.
    fn put_affinity(key: &AffinityKey<Self::Words>, value: &AffinityEntry) -> Result<(), i32>;
    /// Whether a Service lets a client through.
    fn lets_in(service: u32, client: &Self::Words) -> bool;
    /// What a socket dialled, or where it went.
    fn socket(key: &SocketKey<Self::Words>) -> Option<&'static SocketEntry<Self::Words>>;
    /// Remembers it.
    fn put_socket(key: &SocketKey<Self::Words>, value: &SocketEntry<Self::Words>) -> Result<(), i32>;
    /// What the first fragment of a packet said.
    fn fragment(key: &FragmentKey<Self::Words>) -> Option<&'static FragmentEntry>;
    /// Keeps it.
    fn put_fragment(key: &FragmentKey<Self::Words>, value: &FragmentEntry) -> Result<(), i32>;
    /// Forgets it.
    fn remove_socket(key: &SocketKey<Self::Words>);
}

macro_rules! tables {
    (
        $family:ty, $services:ident, $backends:ident, $flows:ident, $index:ident, $scratch:ident, $sockets:ident,
        $node:ident, $node_addrs:ident, $affinity:ident, $src_ranges:ident, $fragments:ident, $ways:ident
    ) => {
        impl Tables for $family {
            #[inline(always)]
            fn service(key: &ServiceKey<Self::Words>) -> Option<&'static ServiceEntry> {
                // SAFETY: the entry is only read, and the agent replaces it as a whole; a copy torn by a
                // concurrent update of a preallocated hash element is at worst the next element of the same
                // kind, which `balance` checks against the backend's Service.
                unsafe { $services.get(octets(key)) }
            }

            #[inline(always)]
            fn backend(id: u32) -> Option<&'static BackendEntry<Self::Words>> {
                $backends.get(id).map(words)
            }

            #[inline(always)]
            fn bucket(number: u32) -> Option<*mut Bucket> {
                $index.get_ptr_mut(number)
            }

            #[inline(always)]
            fn flow(index: u32) -> Option<*mut Flow<Self::Words>> {
                $flows.get_ptr_mut(index).map(<*mut _>::cast)
            }

            #[inline(always)]
            fn scratch() -> Option<*mut Scratch<Self::Words>> {
                $scratch.get_ptr_mut(0)
            }

            #[inline(always)]
            fn way(number: u32) -> Option<*mut Hop<Self::Words>> {
                $ways.get_ptr_mut(number)
            }

            #[inline(always)]
            fn node() -> Option<&'static NodeEntry<Self::Words>> {
                $node.get(0).map(words)
            }

            #[inline(always)]
            fn node_addr(addr: &Self::Words) -> NodeAddr {
                // SAFETY: an integer, which is read at once.
                unsafe { $node_addrs.get(&*core::ptr::from_ref(addr).cast()).copied() }.unwrap_or(0)
            }

            #[inline(always)]
            fn affinity(key: &AffinityKey<Self::Words>) -> Option<*mut AffinityEntry> {
                $affinity.get_ptr_mut(octets(key))
            }

            #[inline(always)]
            fn put_affinity(key: &AffinityKey<Self::Words>, value: &AffinityEntry) -> Result<(), i32> {
                $affinity.insert(octets(key), value, 0)
            }

            #[inline(always)]
            fn lets_in(service: u32, client: &Self::Words) -> bool {
                let data = SourceRangeKey { service, addr: *client };
                let bits = SERVICE_BITS + 8 * size_of::<Self::Addr>() as u32;
                $src_ranges.get(&Key::new(bits, *octets(&data))).is_some()
            }

            #[inline(always)]
            fn socket(key: &SocketKey<Self::Words>) -> Option<&'static SocketEntry<Self::Words>> {
                // SAFETY: only the socket that owns the cookie writes its entries.
                unsafe { $sockets.get(octets(key)).map(words) }
            }

            #[inline(always)]
            fn put_socket(key: &SocketKey<Self::Words>, value: &SocketEntry<Self::Words>) -> Result<(), i32> {
                $sockets.insert(octets(key), octets(value), 0)
            }

            #[inline(always)]
            fn fragment(key: &FragmentKey<Self::Words>) -> Option<&'static FragmentEntry> {
                // SAFETY: read at once; an entry that is reused meanwhile is a fragment that goes astray, as any
                // may whose identification comes again.
                unsafe { $fragments.get(key) }
            }

            #[inline(always)]
            fn put_fragment(key: &FragmentKey<Self::Words>, value: &FragmentEntry) -> Result<(), i32> {
                $fragments.insert(key, value, 0)
            }

            #[inline(always)]
            fn remove_socket(key: &SocketKey<Self::Words>) {
                // Gone already is as good as removed.
                let _ = $sockets.remove(octets(key));
            }
        }
    };
}

tables!(
    proxy_common::V4,
    SERVICES,
    BACKENDS,
    FLOWS,
    FLOW_INDEX,
    SCRATCH,
    SOCKETS,
    NODE,
    NODE_ADDRS,
    AFFINITY,
    SRC_RANGES,
    FRAGMENTS,
    WAYS
);
tables!(
    proxy_common::V6,
    SERVICES6,
    BACKENDS6,
    FLOWS6,
    FLOW_INDEX6,
    SCRATCH6,
    SOCKETS6,
    NODE6,
    NODE_ADDRS6,
    AFFINITY6,
    SRC_RANGES6,
    FRAGMENTS6,
    WAYS6
);
