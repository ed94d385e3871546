//! The iterators that list the sockets which are connected to a Service: those of one network namespace, or all.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::{bpf_get_socket_cookie, bpf_seq_write, bpf_sk_storage_get};
use proxy_common::socket::{SocketStorage, TranslatedSocket};

use super::maps::SOCKET_STORAGE;

/// `struct bpf_iter_meta` of `include/linux/bpf.h`.
#[repr(C)]
pub struct IteratorMeta {
    /// `struct seq_file`.
    pub seq: *mut c_void,
    /// Number of the session.
    pub session: u64,
    /// Number of the element.
    pub number: u64,
}

/// The start of `struct bpf_iter__udp` (`net/ipv4/udp.c`) and of `struct bpf_iter__tcp` (`net/ipv4/tcp_ipv4.c`).
#[repr(C)]
pub struct NamespaceIterator {
    /// The part that all iterators have.
    pub meta: *mut IteratorMeta,
    /// `struct udp_sock`, or `struct sock_common`; null at the end.
    pub socket: *mut c_void,
}

/// `struct bpf_iter__bpf_sk_storage_map` of `net/core/bpf_sk_storage.c`.
#[repr(C)]
pub struct StorageIterator {
    /// The part that all iterators have.
    pub meta: *mut IteratorMeta,
    /// `struct bpf_map`.
    pub map: *mut c_void,
    /// `struct sock`; null at the end.
    pub socket: *mut c_void,
    /// The socket's value; null at the end.
    pub value: *mut SocketStorage,
}

/// Writes a [`TranslatedSocket`], if the socket is connected to a Service.
///
/// # Safety
/// The kernel must have passed the context to the program.
#[inline(always)]
pub unsafe fn of_namespace(context: *mut NamespaceIterator) -> i32 {
    // SAFETY: see above.
    let (meta, socket) = unsafe { ((*context).meta, (*context).socket) };
    if socket.is_null() {
        return 0;
    }
    let map = core::ptr::from_ref(&SOCKET_STORAGE).cast_mut().cast();
    // SAFETY: a map, and a socket that the kernel has passed to the program. A request or a socket in `TIME_WAIT` has no storage.
    let storage = unsafe { bpf_sk_storage_get(map, socket, core::ptr::null_mut(), 0).cast() };
    // SAFETY: all are of the context.
    unsafe { write(meta, socket, storage) }
}

/// As [`of_namespace`], for the sockets of all network namespaces.
///
/// # Safety
/// The kernel must have passed the context to the program.
#[inline(always)]
pub unsafe fn of_all(context: *mut StorageIterator) -> i32 {
    // SAFETY: see above.
    let (meta, socket, storage) = unsafe { ((*context).meta, (*context).socket, (*context).value) };
    if socket.is_null() {
        return 0;
    }
    // SAFETY: all are of the context.
    unsafe { write(meta, socket, storage) }
}

/// # Safety
/// The kernel must have passed the pointers to the program. `storage` may be null.
#[inline(always)]
unsafe fn write(meta: *mut IteratorMeta, socket: *mut c_void, storage: *mut SocketStorage) -> i32 {
    if storage.is_null() {
        return 0;
    }
    // SAFETY: the socket's storage. Its owner may change it meanwhile: the reader of the list checks the socket again.
    let led = unsafe { TranslatedSocket { cookie: bpf_get_socket_cookie(socket), storage: storage.read() } };
    if led.storage.family != 0 {
        // SAFETY: a sequence file, and a record of the size that is passed. If the buffer is full, the kernel calls the
        // program again.
        unsafe {
            bpf_seq_write(
                (*meta).seq.cast(),
                (&raw const led).cast_mut().cast(),
                size_of::<TranslatedSocket>() as u32,
            )
        };
    }
    0
}
