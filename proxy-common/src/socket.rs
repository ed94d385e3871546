//! `sockets` and `sockets6`: what a socket dialled and where it went, for the socket hooks.

use crate::Address;

/// Key of `sockets` (LRU).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SocketKey<A: Address> {
    /// The kernel's socket cookie.
    pub cookie: u64,
    /// With [`TO_BACKEND`] the frontend's address, with [`TO_FRONTEND`] the backend's.
    pub addr: A,
    /// The port beside it, host byte order.
    pub port: u16,
    /// IP protocol number.
    pub proto: u8,
    /// Which way the entry translates.
    pub direction: u8,
    /// Zero.
    pub reserved: A::SocketKeyFill,
}

/// Frontend to backend: an unconnected UDP socket stays with its backend while that one serves.
pub const TO_BACKEND: u8 = 0;
/// Backend to frontend: the address that the application sees is the one it dialled.
pub const TO_FRONTEND: u8 = 1;

impl<A: Address> SocketKey<A> {
    /// A key with its reserved bytes zero.
    #[inline(always)]
    pub fn new(cookie: u64, addr: A, port: u16, proto: u8, direction: u8) -> Self {
        Self { cookie, addr, port, proto, direction, reserved: A::SocketKeyFill::default() }
    }
}

/// Value of `sockets`: the other side.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketEntry<A> {
    /// With [`TO_BACKEND`] the backend's address, with [`TO_FRONTEND`] the frontend's.
    pub addr: A,
    /// The port beside it, host byte order.
    pub port: u16,
    /// Direct connects that leave the entry in place. An IPv6 UDP socket that connects to an IPv4 address passes
    /// the IPv6 hook, and then the IPv4 hook with the address that the first one wrote.
    pub grace: u16,
    /// Id of the Service port.
    pub service: u32,
    /// Id of the backend.
    pub backend_id: u32,
}
