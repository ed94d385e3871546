//! Access of the socket programs to the kernel's maps.

use aya_ebpf::bindings::BPF_SK_STORAGE_GET_F_CREATE;
use aya_ebpf::bindings::bpf_sock;
use aya_ebpf::helpers::generated::bpf_sk_storage_get;
use proxy_common::affinity::{AffinityEntry, NetnsAffinityKey};
use proxy_common::socket::{SocketEntry, SocketKey, SocketStorage, USED_WITHIN};
use proxy_common::{V4, V6};

use super::cast::{octets, words};
use super::handle::Kernel;
use super::maps::{AFFINITY_NETNS, CONFIG, CONNECTIONS, Elements as _, SOCKET_STORAGE, SOCKETS, SOCKETS6};
use crate::env::{Node, OpenConnections, Words};

/// Whether `bpf_set_retval` is available; see [`can_set_errno`]. The agent loads the socket programs with 0 if the kernel
/// lacks the helper for these programs (before Linux 6.1). 64 bits wide for the reason given at `LINK_HEADER`.
#[cfg(target_arch = "bpf")]
#[unsafe(no_mangle)]
static SOCKET_ERRORS: aya_ebpf::Global<u64> = aya_ebpf::Global::new(1);

/// Whether a program can choose the error with which a call fails. Otherwise every call that is denied fails with `EPERM`.
#[inline(always)]
pub fn can_set_errno() -> bool {
    #[cfg(target_arch = "bpf")]
    {
        SOCKET_ERRORS.load() != 0
    }
    #[cfg(not(target_arch = "bpf"))]
    {
        true
    }
}

/// Whether a network namespace is the node's own.
#[inline(always)]
pub fn is_host(netns: u64) -> bool {
    CONFIG.get(0).is_some_and(|config| config.host_netns == netns)
}

/// Returns the storage of a socket; with `create` it is allocated if there is none.
#[inline(always)]
pub fn storage(socket: *mut bpf_sock, create: bool) -> Option<*mut SocketStorage> {
    let map = core::ptr::from_ref(&SOCKET_STORAGE).cast_mut().cast();
    let flags = if create { u64::from(BPF_SK_STORAGE_GET_F_CREATE) } else { 0 };
    if socket.is_null() {
        return None;
    }
    // SAFETY: a map, and a socket that the kernel has passed to the program.
    let storage = unsafe { bpf_sk_storage_get(map, socket.cast(), core::ptr::null_mut(), flags) };
    (!storage.is_null()).then_some(storage.cast())
}

/// Returns the storage of a socket that is being closed, if the socket has any.
///
/// # Safety
/// `socket` must be a socket that the kernel has passed to the program. There is no check for null: it would compare a
/// pointer to the context.
#[inline(always)]
pub unsafe fn storage_of_closed(socket: *mut bpf_sock) -> Option<*mut SocketStorage> {
    let map = core::ptr::from_ref(&SOCKET_STORAGE).cast_mut().cast();
    // SAFETY: a map, and the caller guarantees the socket.
    let storage = unsafe { bpf_sk_storage_get(map, socket.cast(), core::ptr::null_mut(), 0) };
    (!storage.is_null()).then_some(storage.cast())
}

impl<F> OpenConnections for Kernel<F>
where
    Self: Node,
{
    #[inline(always)]
    fn open_connections(self, backend: u32) -> Option<*mut u64> {
        CONNECTIONS.at(backend)
    }
}

/// Returns the affinity entry of a network namespace: the backend that it stays with.
#[inline(always)]
pub fn netns_affinity(key: &NetnsAffinityKey) -> Option<*mut AffinityEntry> {
    AFFINITY_NETNS.get_ptr_mut(key)
}

/// Adds or replaces an entry.
#[inline(always)]
pub fn put_netns_affinity(key: &NetnsAffinityKey, entry: &AffinityEntry) -> Result<(), i32> {
    AFFINITY_NETNS.insert(key, entry, 0)
}

/// The peers of sockets that `socket_storage` cannot hold: `sockets` and `sockets6`.
pub trait Peers: Node {
    /// Returns the translated address of a peer: the backend for a frontend, or the frontend for a backend.
    fn peer(self, key: &SocketKey<Words<Self>>) -> Option<SocketEntry<Words<Self>>>;
    /// Adds or replaces an entry.
    fn put_peer(self, key: &SocketKey<Words<Self>>, entry: &SocketEntry<Words<Self>>) -> Result<(), i32>;
    /// Removes the entry of a peer.
    fn remove_peer(self, key: &SocketKey<Words<Self>>);
}

macro_rules! peers {
    ($family:ty, $sockets:ident) => {
        impl Peers for Kernel<$family> {
            #[inline(always)]
            fn peer(self, key: &SocketKey<Words<Self>>) -> Option<SocketEntry<Words<Self>>> {
                let (entry, now) = ($sockets.get_ptr_mut(octets(key))?, self.jiffies());
                // SAFETY: only the socket that owns the cookie writes its entries.
                let found: SocketEntry<Words<Self>> = unsafe { *words(&*entry) };
                if now.wrapping_sub(found.last_used) > USED_WITHIN {
                    // SAFETY: as above.
                    unsafe { (&raw mut (*entry).last_used).write_volatile(now) };
                }
                Some(found)
            }

            #[inline(always)]
            fn put_peer(
                self,
                key: &SocketKey<Words<Self>>,
                entry: &SocketEntry<Words<Self>>,
            ) -> Result<(), i32> {
                $sockets.insert(octets(key), octets(entry), 0)
            }

            #[inline(always)]
            fn remove_peer(self, key: &SocketKey<Words<Self>>) {
                // An entry that is already missing is no error.
                let _ = $sockets.remove(octets(key));
            }
        }
    };
}

peers!(V4, SOCKETS);
peers!(V6, SOCKETS6);
