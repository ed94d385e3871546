//! The iterator that lists the sockets of all network namespaces which are connected to a Service.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::{bpf_get_socket_cookie, bpf_seq_write};
use proxy_common::socket::{SocketStorage, TranslatedSocket};

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
pub unsafe fn sockets(context: *mut StorageIterator) -> i32 {
    // SAFETY: see above.
    let (meta, socket, storage) = unsafe { ((*context).meta, (*context).socket, (*context).value) };
    if socket.is_null() || storage.is_null() {
        return 0;
    }
    // SAFETY: the socket's storage. Its owner may change it meanwhile: the reader of the list checks the socket again.
    let storage = unsafe { storage.read() };
    if storage.family != 0 {
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
