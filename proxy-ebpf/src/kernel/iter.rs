//! The iterators. They list the UDP sockets of a network namespace that are connected to a Service; the sockets of all
//! namespaces that count as open connections of a backend; and the sockets that are connected to a backend that left its
//! Service. There is no other way to list socket storage.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::{bpf_get_socket_cookie, bpf_seq_write, bpf_sk_storage_get};
use proxy_common::backend::BACKEND_ACTIVE;
use proxy_common::socket::{SocketStorage, TranslatedSocket};
use proxy_common::{Address, V4, V6};

use super::handle::Kernel;
use super::maps::SOCKET_STORAGE;
use crate::env::{Services, Words};
use crate::header::same;

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

/// `struct bpf_iter__udp` of `net/ipv4/udp.c`.
#[repr(C)]
pub struct UdpIterator {
    /// The part that all iterators have.
    pub meta: *mut IteratorMeta,
    /// `struct udp_sock`; null at the end.
    pub socket: *mut c_void,
    /// User id of the socket's owner.
    pub uid: u64,
    /// Number of the bucket in the kernel's hash table.
    pub bucket: u64,
}

/// Writes a [`TranslatedSocket`] for a UDP socket that is connected to a Service.
///
/// # Safety
/// The kernel must have passed the context to the program.
#[inline(always)]
pub unsafe fn udp(context: *mut UdpIterator) -> i32 {
    // SAFETY: see above.
    let (meta, socket) = unsafe { ((*context).meta, (*context).socket) };
    if socket.is_null() {
        return 0;
    }
    let map = core::ptr::from_ref(&SOCKET_STORAGE).cast_mut().cast();
    // SAFETY: a map, and a socket that the kernel has passed to the program.
    let storage: *mut SocketStorage =
        unsafe { bpf_sk_storage_get(map, socket, core::ptr::null_mut(), 0).cast() };
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

/// Writes the id of the backend, if the socket counts as one of its open connections.
///
/// # Safety
/// The kernel must have passed the context to the program.
#[inline(always)]
pub unsafe fn counted(context: *mut StorageIterator) -> i32 {
    // SAFETY: see above.
    let (meta, storage) = unsafe { ((*context).meta, (*context).value) };
    if storage.is_null() {
        return 0;
    }
    // SAFETY: the socket's storage. Its owner may change it meanwhile: the reader of the list counts twice.
    let (counted, backend) = unsafe { ((*storage).counted, (*storage).backend_id) };
    if counted != 0 {
        // SAFETY: a sequence file, and a number of the size that is passed. If the buffer is full, the kernel calls the
        // program again.
        unsafe {
            bpf_seq_write((*meta).seq.cast(), (&raw const backend).cast_mut().cast(), size_of::<u32>() as u32)
        };
    }
    0
}

/// Writes a [`TranslatedSocket`], if the socket is connected to a backend that has left its Service.
///
/// # Safety
/// The kernel must have passed the context to the program.
#[inline(always)]
pub unsafe fn left(context: *mut StorageIterator) -> i32 {
    // SAFETY: see above.
    let (meta, socket, storage) = unsafe { ((*context).meta, (*context).socket, (*context).value) };
    if socket.is_null() || storage.is_null() {
        return 0;
    }
    // SAFETY: the socket's storage. Its owner may change it meanwhile: the reader of the list checks the socket again.
    let storage = unsafe { storage.read() };
    let left = match storage.family {
        4 => has_left(Kernel::<V4>::new(), &storage),
        6 => has_left(Kernel::<V6>::new(), &storage),
        // The socket is no longer connected to a Service.
        _ => false,
    };
    if left {
        // SAFETY: a socket that the kernel has passed to the program.
        let led = TranslatedSocket { cookie: unsafe { bpf_get_socket_cookie(socket) }, storage };
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

/// Whether the backend that a socket is connected to is still in `backends`, but no longer serves.
#[inline(always)]
fn has_left<M: Services>(maps: M, storage: &SocketStorage) -> bool {
    let addr: Words<M> = Address::from_words(storage.backend);
    maps.backend(storage.backend_id).is_some_and(|backend| {
        backend.state != BACKEND_ACTIVE
            && backend.service == storage.service
            && backend.port == storage.backend_port
            && same(&backend.addr, &addr)
    })
}
