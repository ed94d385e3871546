//! `socket_storage`, `sockets` and `sockets6`: the frontend that a socket dialled and its backend, for the socket hooks.

use crate::Address;

/// Value of `socket_storage` (socket-local storage): the frontend that a connected socket dialled, and its backend. The
/// kernel frees it with the socket. Addresses are words in memory order; an IPv4 address is in the first word, and the
/// others are zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketStorage {
    /// The address that the application dialled.
    pub frontend: [u32; 4],
    /// The address that the socket is connected to.
    pub backend: [u32; 4],
    /// The port that the application dialled, host byte order.
    pub frontend_port: u16,
    /// The port that the socket is connected to, host byte order.
    pub backend_port: u16,
    /// Id of the Service port.
    pub service: u32,
    /// Id of the backend.
    pub backend_id: u32,
    /// 4 or 6: the family of both addresses; 0: the socket is connected to no Service.
    pub family: u8,
    /// Number of direct connects that do not remove the value. An IPv6 socket that connects to an IPv4 address passes the
    /// IPv6 hook, and then the IPv4 hook with the address that the IPv6 hook wrote.
    pub grace: u8,
    /// 1: the socket counts as an open connection of the backend.
    pub counted: u8,
    /// 1: the success or failure of the connection updates the backend's entry in [`health`](crate::health).
    pub watched: u8,
}

/// The record that the iterator over UDP sockets writes for each socket that is connected to a Service.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TranslatedSocket {
    /// The kernel's socket cookie.
    pub cookie: u64,
    /// The socket's storage.
    pub storage: SocketStorage,
}

/// Key of `sockets`: for unconnected UDP sockets, which may have many peers, and for sockets whose storage the
/// kernel could not allocate.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SocketKey<A: Address> {
    /// The kernel's socket cookie.
    pub cookie: u64,
    /// With [`TO_BACKEND`] the frontend's address, with [`TO_FRONTEND`] the backend's.
    pub addr: A,
    /// The port of that address, host byte order.
    pub port: u16,
    /// IP protocol number.
    pub proto: u8,
    /// [`TO_BACKEND`] or [`TO_FRONTEND`].
    pub direction: u8,
    /// Zero.
    pub reserved: A::SocketKeyFill,
}

/// Frontend to backend: an unconnected UDP socket keeps its backend as long as the backend serves.
pub const TO_BACKEND: u8 = 0;
/// Backend to frontend: the application sees the address that it dialled.
pub const TO_FRONTEND: u8 = 1;

impl<A: Address> SocketKey<A> {
    /// Returns a key whose reserved bytes are zero.
    #[inline(always)]
    pub fn new(cookie: u64, addr: A, port: u16, proto: u8, direction: u8) -> Self {
        Self { cookie, addr, port, proto, direction, reserved: A::SocketKeyFill::default() }
    }
}

/// Value of `sockets`: the address and port to which the key's address is translated.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketEntry<A> {
    /// With [`TO_BACKEND`] the backend's address, with [`TO_FRONTEND`] the frontend's.
    pub addr: A,
    /// The port of that address, host byte order.
    pub port: u16,
    /// Number of direct connects that do not remove the entry. An IPv6 UDP socket that connects to an IPv4 address passes
    /// the IPv6 hook, and then the IPv4 hook with the address that the IPv6 hook wrote.
    pub grace: u16,
    /// Id of the Service port.
    pub service: u32,
    /// Id of the backend.
    pub backend_id: u32,
    /// Low 32 bits of jiffies when the entry was last used, to within [`USED_WITHIN`].
    pub last_used: u32,
}

/// The number of jiffies for which the use of an entry of `sockets` is not noted again.
pub const USED_WITHIN: u32 = 1_000;
