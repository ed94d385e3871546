//! Lookup of the kernel's sockets, in the network namespace of the hook.

use core::ffi::c_void;

use aya_ebpf::bindings::{BPF_F_CURRENT_NETNS, bpf_sock};
use aya_ebpf::helpers::generated::{
    bpf_sk_lookup_tcp, bpf_sk_lookup_udp, bpf_sk_release, bpf_skc_lookup_tcp,
};
use proxy_common::flow::FlowKey;
use proxy_common::{Address, PROTO_UDP};

/// `TCP_ESTABLISHED` (`include/net/tcp_states.h`); also the state of a connected UDP socket.
const ESTABLISHED: u32 = 1;
/// `TCP_LISTEN`.
const LISTEN: u32 = 10;

/// The network namespace of the hook.
const CURRENT_NETNS: u64 = (BPF_F_CURRENT_NETNS as i64).cast_unsigned();

/// The part of `struct bpf_sock_tuple` of a family, in network byte order; its size tells the kernel the family.
#[repr(C)]
struct SockTuple<A> {
    src: A,
    dst: A,
    src_port: u16,
    dst_port: u16,
}

impl<A> SockTuple<A> {
    const SIZE: u32 = size_of::<Self>() as u32;
}

/// Whether a TCP socket listens at this address, or at all addresses, and the port, host byte order.
///
/// # Safety
/// `context` must be the context of a program.
#[inline(always)]
pub unsafe fn has_listener<A: Address>(context: *mut c_void, dst: A, port: u16) -> bool {
    let mut tuple = SockTuple { src: A::ZERO, dst, src_port: 0, dst_port: port.to_be() };
    // SAFETY: a valid context, and a tuple of this size.
    let found = unsafe {
        bpf_sk_lookup_tcp(context, (&raw mut tuple).cast(), SockTuple::<A>::SIZE, CURRENT_NETNS, 0)
    };
    // SAFETY: the result of the lookup; nothing uses it later.
    !found.is_null() && unsafe { release(found) }
}

/// Whether a TCP socket has a connection for a packet with this key, or a UDP socket is connected to its source.
///
/// # Safety
/// `context` must be the context of a program.
#[inline(always)]
pub unsafe fn has_connection<A: Address>(context: *mut c_void, key: &FlowKey<A>) -> bool {
    let (src_port, dst_port) = (key.src_port.to_be(), key.dst_port.to_be());
    let mut tuple = SockTuple { src: key.src, dst: key.dst, src_port, dst_port };
    let (tuple, size, is_udp) = ((&raw mut tuple).cast(), SockTuple::<A>::SIZE, key.proto == PROTO_UDP);
    // SAFETY: a valid context, and a tuple of this size.
    let found = unsafe {
        if is_udp {
            bpf_sk_lookup_udp(context, tuple, size, CURRENT_NETNS, 0)
        } else {
            bpf_skc_lookup_tcp(context, tuple, size, CURRENT_NETNS, 0)
        }
    };
    if found.is_null() {
        return false;
    }
    // SAFETY: the result of the lookup.
    let state = unsafe { (*found).state };
    // SAFETY: nothing uses it later.
    unsafe { release(found) && if is_udp { state == ESTABLISHED } else { state != LISTEN } }
}

/// Releases a socket; returns true.
///
/// # Safety
/// A lookup has returned the socket, and nothing uses it later.
#[inline(always)]
unsafe fn release(found: *mut bpf_sock) -> bool {
    // SAFETY: see above.
    unsafe { bpf_sk_release(found.cast()) };
    true
}
