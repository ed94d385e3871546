//! The iterators: which UDP sockets of a network namespace a Service led somewhere; which sockets of all namespaces count
//! among the open connections of a backend; and which are connected to a backend that left. Their storage cannot be listed
//! otherwise.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::{bpf_get_socket_cookie, bpf_seq_write, bpf_sk_storage_get};
use proxy_common::backend::BACKEND_ACTIVE;
use proxy_common::socket::{LedSocket, SocketStorage};
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
    /// What all iterators have.
    pub meta: *mut IteratorMeta,
    /// `struct udp_sock`; null at the end.
    pub socket: *mut c_void,
    /// The owner.
    pub uid: u64,
    /// The bucket of the kernel's hash table.
    pub bucket: u64,
}

/// Writes a [`LedSocket`] for a socket that was led somewhere.
#[inline(always)]
///
/// # Safety
/// The context is one that the kernel has handed to a program.
pub unsafe fn udp(context: *mut UdpIterator) -> i32 {
    // SAFETY: see above.
    let (meta, socket) = unsafe { ((*context).meta, (*context).socket) };
    if socket.is_null() {
        return 0;
    }
    let map = core::ptr::from_ref(&SOCKET_STORAGE).cast_mut().cast();
    // SAFETY: a map, and a socket that the kernel has handed to the program.
    let storage: *mut SocketStorage =
        unsafe { bpf_sk_storage_get(map, socket, core::ptr::null_mut(), 0).cast() };
    if storage.is_null() {
        return 0;
    }
    // SAFETY: the socket's storage, which its owner may change meanwhile: the reader of the list checks the socket again.
    let led = unsafe { LedSocket { cookie: bpf_get_socket_cookie(socket), storage: storage.read() } };
    if led.storage.family != 0 {
        // SAFETY: a sequence file, and a record of the size that is told. Without room the kernel asks again.
        unsafe {
            bpf_seq_write(
                (*meta).seq.cast(),
                (&raw const led).cast_mut().cast(),
                size_of::<LedSocket>() as u32,
            )
        };
    }
    0
}

/// `struct bpf_iter__bpf_sk_storage_map` of `net/core/bpf_sk_storage.c`.
#[repr(C)]
pub struct StorageIterator {
    /// What all iterators have.
    pub meta: *mut IteratorMeta,
    /// `struct bpf_map`.
    pub map: *mut c_void,
    /// `struct sock`; null at the end.
    pub socket: *mut c_void,
    /// The socket's value; null at the end.
    pub value: *mut SocketStorage,
}

/// Writes the id of the backend, if the socket counts among its open connections.
///
/// # Safety
/// The context is one that the kernel has handed to a program.
#[inline(always)]
pub unsafe fn counted(context: *mut StorageIterator) -> i32 {
    // SAFETY: see above.
    let (meta, storage) = unsafe { ((*context).meta, (*context).value) };
    if storage.is_null() {
        return 0;
    }
    // SAFETY: the socket's storage, which its owner may change meanwhile: the reader of the list counts twice.
    let (counted, backend) = unsafe { ((*storage).counted, (*storage).backend_id) };
    if counted != 0 {
        // SAFETY: a sequence file, and a number of the size that is told. Without room the kernel asks again.
        unsafe {
            bpf_seq_write((*meta).seq.cast(), (&raw const backend).cast_mut().cast(), size_of::<u32>() as u32)
        };
    }
    0
}

/// Writes a [`LedSocket`], if the socket is connected to a backend that left the Service which led it there.
///
/// # Safety
/// The context is one that the kernel has handed to a program.
#[inline(always)]
pub unsafe fn left(context: *mut StorageIterator) -> i32 {
    // SAFETY: see above.
    let (meta, socket, storage) = unsafe { ((*context).meta, (*context).socket, (*context).value) };
    if socket.is_null() || storage.is_null() {
        return 0;
    }
    // SAFETY: the socket's storage, which its owner may change meanwhile: the reader of the list checks the socket again.
    let storage = unsafe { storage.read() };
    let left = match storage.family {
        4 => has_left(Kernel::<V4>::new(), &storage),
        6 => has_left(Kernel::<V6>::new(), &storage),
        // It is connected to no Service any more.
        _ => false,
    };
    if left {
        // SAFETY: a socket that the kernel has handed to the program.
        let led = LedSocket { cookie: unsafe { bpf_get_socket_cookie(socket) }, storage };
        // SAFETY: a sequence file, and a record of the size that is told. Without room the kernel asks again.
        unsafe {
            bpf_seq_write(
                (*meta).seq.cast(),
                (&raw const led).cast_mut().cast(),
                size_of::<LedSocket>() as u32,
            )
        };
    }
    0
}

/// Whether the backend that a socket was led to is still known, and serves no more.
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
