//! The traits of the socket path over the kernel's maps.

use aya_ebpf::bindings::BPF_SK_STORAGE_GET_F_CREATE;
use aya_ebpf::bindings::bpf_sock;
use aya_ebpf::btf_maps::SkStorage;
use aya_ebpf::helpers::generated::{bpf_get_current_ancestor_cgroup_id, bpf_set_retval, bpf_sk_storage_get};
use proxy_common::affinity::{AffinityEntry, NetnsAffinityKey};
use proxy_common::socket::{SocketEntry, SocketKey, SocketPeers, SocketStorage};
use proxy_common::{V4, V6};

use super::cast::octets;
use super::events;
use super::handle::Kernel;
use super::maps::{
    AFFINITY_NETNS, CONNECTIONS, Elements as _, NAMESPACES, SOCKET_PEERS, SOCKET_STORAGE, SOCKETS, SOCKETS6,
};
use crate::env::{EventKind, Node, OpenConnections, Pods, Sockets, Words};
use crate::select::load;
use crate::sock::Sockaddr;

/// Whether `bpf_set_retval` is available; see [`Sockets::can_set_errno`]. The agent loads the socket programs with 0 if the kernel
/// lacks the helper for these programs (before Linux 6.1). 64 bits wide for the reason given at `LINK_HEADER`.
#[cfg(target_arch = "bpf")]
#[unsafe(no_mangle)]
static SOCKET_ERRORS: aya_ebpf::Global<u64> = aya_ebpf::Global::new(1);

#[inline(always)]
fn can_set_errno() -> bool {
    #[cfg(target_arch = "bpf")]
    {
        SOCKET_ERRORS.load() != 0
    }
    #[cfg(not(target_arch = "bpf"))]
    {
        true
    }
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

/// Returns the storage of a socket that is the context of the program; with `create` it is allocated if there is none.
///
/// # Safety
/// `socket` must be a socket that the kernel has passed to the program. There is no check for null: it would compare a
/// pointer to the context.
#[inline(always)]
pub unsafe fn context_storage(socket: *mut bpf_sock, create: bool) -> Option<*mut SocketStorage> {
    // SAFETY: the caller guarantees the socket.
    unsafe { local(&SOCKET_STORAGE, socket, create) }
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
    fn count_open(self, backend: u32, change: u64, created: u32) {
        count_open(backend, change, created);
    }
}

/// Subprogram for [`load::count`]: few packets open or close a connection.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn count_open(backend: u32, change: u64, created: u32) -> u32 {
    load::count(Kernel::<V4>::new(), backend, change, created);
    0
}

impl<F> Pods for Kernel<F>
where
    Self: Node,
{
    #[inline(always)]
    fn has_namespace(self, netns: u64) -> bool {
        // SAFETY: the entry is not used.
        unsafe { NAMESPACES.get(netns) }.is_some()
    }

    #[inline(always)]
    fn add_namespace(self, netns: u64) {
        let _ = NAMESPACES.insert(netns, 1, 0);
    }

    #[inline(always)]
    fn ancestor_cgroup(self, level: i32) -> u64 {
        // SAFETY: the helper has no preconditions.
        unsafe { bpf_get_current_ancestor_cgroup_id(level) }
    }
}

macro_rules! sockets {
    ($family:ty, $sockets:ident) => {
        impl Sockets for Kernel<$family> {
            #[inline(always)]
            fn peer(self, key: &SocketKey<Words<Self>>) -> Option<*mut SocketEntry<Words<Self>>> {
                // Octets are the same bytes as words (`proxy_common::abi`).
                $sockets.get_ptr_mut(octets(key)).map(<*mut _>::cast)
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

            #[inline(always)]
            fn netns_affinity(self, key: &NetnsAffinityKey) -> Option<*mut AffinityEntry> {
                AFFINITY_NETNS.get_ptr_mut(key)
            }

            #[inline(always)]
            fn put_netns_affinity(self, key: &NetnsAffinityKey, entry: &AffinityEntry) -> Result<(), i32> {
                AFFINITY_NETNS.insert(key, entry, 0)
            }

            #[inline(always)]
            fn can_set_errno(self) -> bool {
                can_set_errno()
            }

            #[inline(always)]
            fn set_errno(self, errno: i32) {
                // SAFETY: the helper only stores the number.
                unsafe { bpf_set_retval(-errno) };
            }

            #[inline(always)]
            fn notify_call<S: Sockaddr<Family = $family>>(self, call: &S, service: u32, what: EventKind) {
                if events::has_listeners(what) {
                    events::socket(self, call, service, what);
                }
            }
        }
    };
}

sockets!(V4, SOCKETS);
sockets!(V6, SOCKETS6);
