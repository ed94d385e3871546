//! Access of the socket programs to the kernel's maps.

use aya_ebpf::bindings::BPF_SK_STORAGE_GET_F_CREATE;
use aya_ebpf::bindings::bpf_sock;
use aya_ebpf::btf_maps::SkStorage;
use aya_ebpf::helpers::generated::{bpf_get_current_ancestor_cgroup_id, bpf_sk_storage_get};
use proxy_common::affinity::{AffinityEntry, NetnsAffinityKey};
use proxy_common::config::NodeConfig;
use proxy_common::socket::{SocketEntry, SocketKey, SocketPeers, SocketStorage, USED_WITHIN};
use proxy_common::{V4, V6};

use super::cast::{octets, words};
use super::handle::Kernel;
use super::maps::{
    AFFINITY_NETNS, CONFIG, CONNECTIONS, Elements as _, NAMESPACES, SOCKET_PEERS, SOCKET_STORAGE, SOCKETS,
    SOCKETS6,
};
use crate::env::{Node, OpenConnections, Words};
use crate::select::load;

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

/// Whether `namespaces` shows which namespaces are those of pods.
#[inline(always)]
fn learns(config: &NodeConfig) -> bool {
    config.pod_cgroups[0] == 0 && (config.pods4.is_some() || config.pods6.is_some())
}

/// Notes that a network namespace is a pod's, if the source of its connection shows it. The source is the one of these that
/// has the socket's family.
#[inline(always)]
pub fn learn(netns: u64, v4: [u32; 1], v6: [u32; 4]) {
    let Some(config) = CONFIG.get(0) else { return };
    if !learns(config) || config.host_netns == netns {
        return;
    }
    // SAFETY: the entry is not used.
    let is_known = || unsafe { NAMESPACES.get(netns) }.is_some();
    // No range contains the all-zero address, which a socket of the other family has.
    let is_in4 = config.pods4.is_some() && config.pods4.contains(&v4);
    let is_in6 = config.pods6.is_some() && config.pods6.contains(&v6);
    if (is_in4 || is_in6) && !is_known() {
        // If this fails, the next connection shows it again.
        let _ = NAMESPACES.insert(netns, 1, 0);
    }
}

/// The deepest level of the cgroup tree at which the cgroups of pods are looked for.
const CGROUP_LEVELS: i32 = 8;

/// The most levels from the cgroup of all pods to that of a process of a container: a quality of service class, a pod, a
/// container, and the group that crun makes in it. Deeper are the processes of containers in a container (kind in a pod), whose
/// own cluster may have the same addresses of Services, and translates them where they leave the container.
const CONTAINER_LEVELS: i32 = 4;

/// Whether a socket of the current process is a pod's: by the cgroup of the process; where the cgroups of pods are not known, by
/// the network namespace; also true if the node's range of pods is not known either.
#[inline(always)]
pub fn is_pod(config: &NodeConfig, netns: u64) -> bool {
    let [first, second] = config.pod_cgroups;
    if first == 0 {
        // SAFETY: the entry is not used.
        return !learns(config) || unsafe { NAMESPACES.get(netns) }.is_some();
    }
    let mut level = 1;
    while level <= CGROUP_LEVELS {
        // SAFETY: the helper has no preconditions.
        let id = unsafe { bpf_get_current_ancestor_cgroup_id(level) };
        if id == 0 {
            return false;
        }
        if id == first || id == second {
            // SAFETY: the helper has no preconditions.
            return unsafe { bpf_get_current_ancestor_cgroup_id(level + CONTAINER_LEVELS + 1) } == 0;
        }
        level += 1;
    }
    false
}

/// Returns a socket's value in a map of socket-local storage; with `create` it is allocated if there is none.
///
/// # Safety
/// `socket` must be a socket that the kernel has passed to the program, and not null.
#[inline(always)]
unsafe fn local<T>(map: &'static SkStorage<T>, socket: *mut bpf_sock, create: bool) -> Option<*mut T> {
    let map = core::ptr::from_ref(map).cast_mut().cast();
    let flags = if create { u64::from(BPF_SK_STORAGE_GET_F_CREATE) } else { 0 };
    // SAFETY: a map, and the caller guarantees the socket.
    let value = unsafe { bpf_sk_storage_get(map, socket.cast(), core::ptr::null_mut(), flags) };
    (!value.is_null()).then_some(value.cast())
}

/// The same for a socket that may be null.
#[inline(always)]
fn checked<T>(map: &'static SkStorage<T>, socket: *mut bpf_sock, create: bool) -> Option<*mut T> {
    if socket.is_null() {
        return None;
    }
    // SAFETY: a socket that the kernel has passed to the program, and it is not null.
    unsafe { local(map, socket, create) }
}

/// Returns the storage of a socket; with `create` it is allocated if there is none.
#[inline(always)]
pub fn storage(socket: *mut bpf_sock, create: bool) -> Option<*mut SocketStorage> {
    checked(&SOCKET_STORAGE, socket, create)
}

/// Returns the peers of an unconnected UDP socket; with `create` they are allocated if there are none.
#[inline(always)]
pub fn peers(socket: *mut bpf_sock, create: bool) -> Option<*mut SocketPeers> {
    checked(&SOCKET_PEERS, socket, create)
}

/// Returns the storage of a socket that is being closed, if the socket has any.
///
/// # Safety
/// `socket` must be a socket that the kernel has passed to the program. There is no check for null: it would compare a
/// pointer to the context.
#[inline(always)]
pub unsafe fn storage_of_closed(socket: *mut bpf_sock) -> Option<*mut SocketStorage> {
    // SAFETY: the caller guarantees the socket.
    unsafe { local(&SOCKET_STORAGE, socket, false) }
}

impl<F> OpenConnections for Kernel<F>
where
    Self: Node,
{
    #[inline(always)]
    fn open_connections(self, backend: u32) -> Option<*mut u64> {
        CONNECTIONS.at(backend)
    }

    #[inline(always)]
    fn count_open(self, backend: u32, change: u64) {
        count_open(backend, change);
    }
}

/// Subprogram for [`load::count`]: few packets open or close a connection.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn count_open(backend: u32, change: u64) -> u32 {
    load::count(Kernel::<V4>::new(), backend, change);
    0
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

/// The peers of sockets that no storage holds: `sockets` and `sockets6`.
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
