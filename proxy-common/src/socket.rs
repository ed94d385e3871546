//! `socket_storage`, `socket_peers`, `sockets` and `sockets6`: the frontend to which a socket connects or sends, and its backend,
//! for the socket hooks.

use crate::Address;

/// Value of `socket_storage` (socket-local storage): the original destination of a connected socket, and its backend. The
/// kernel frees it with the socket. Addresses are words in memory order; an IPv4 address is in the first word, and the
/// others are zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketStorage {
    /// The original destination address.
    pub frontend: [u32; 4],
    /// The address that the socket is connected to.
    pub backend: [u32; 4],
    /// The original destination port, host byte order.
    pub frontend_port: u16,
    /// The port that the socket is connected to, host byte order.
    pub backend_port: u16,
    /// Id of the Service port.
    pub service: u32,
    /// Id of the backend.
    pub backend_id: u32,
    /// 4 or 6: the family of both addresses; 0: the socket is connected to no Service.
    pub family: u8,
    /// Zero.
    pub reserved: u8,
    /// Not 0: the socket counts as an open connection of the backend; [`TIMED`]: and the time to its first answer is noted.
    pub counted: u8,
    /// 1: the success or failure of the connection updates the backend's entry in [`health`](crate::health).
    pub watched: u8,
}

/// Returns the number of the family with addresses of type `A` in [`SocketStorage`] and [`SocketPeer`].
#[inline(always)]
pub const fn socket_family<A: Address>() -> u8 {
    if size_of::<A>() == size_of::<u32>() { 4 } else { 6 }
}

impl SocketStorage {
    /// Whether the socket is connected to this backend through a Service.
    #[inline(always)]
    pub fn has_backend(&self, family: u8, addr: &[u32; 4], port: u16) -> bool {
        self.family == family && self.backend_port == port && same_words(&self.backend, addr)
    }
}

/// In [`SocketStorage::counted`]: the backend is selected by the time to the first answer.
pub const TIMED: u8 = 2;

/// Number of peers that [`SocketPeers`] holds; a power of two.
pub const SOCKET_PEERS: usize = 8;

/// Value of `socket_peers` (socket-local storage): the Services to which an unconnected UDP socket sends. The kernel frees it
/// with the socket, so that short-lived sockets leave nothing behind and no socket can evict the peers of another one.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketPeers {
    /// The peers, in no order.
    pub peers: [SocketPeer; SOCKET_PEERS],
}

/// A Service to which an unconnected UDP socket sends, and its backend. Addresses as in [`SocketStorage`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketPeer {
    /// The address that the application uses.
    pub frontend: [u32; 4],
    /// The address to which the messages go.
    pub backend: [u32; 4],
    /// The port that the application uses, host byte order.
    pub frontend_port: u16,
    /// The port to which the messages go, host byte order.
    pub backend_port: u16,
    /// Id of the Service port.
    pub service: u32,
    /// Id of the backend.
    pub backend_id: u32,
    /// 4 or 6: the family of both addresses; 0: the place is free.
    pub family: u8,
    /// 1: the application sees the frontend as the source of the backend's messages. Of the peers with one backend, this is the
    /// one to which the application has sent last; none after a message directly to the backend.
    pub shown: u8,
    /// Zero.
    pub reserved: u16,
}

impl SocketPeer {
    #[inline(always)]
    fn has_frontend(&self, family: u8, addr: &[u32; 4], port: u16) -> bool {
        self.family == family && self.frontend_port == port && same_words(&self.frontend, addr)
    }

    #[inline(always)]
    fn has_backend(&self, family: u8, addr: &[u32; 4], port: u16) -> bool {
        self.family == family && self.backend_port == port && same_words(&self.backend, addr)
    }
}

#[inline(always)]
fn same_words(a: &[u32; 4], b: &[u32; 4]) -> bool {
    a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3]
}

impl SocketPeers {
    /// Returns the peer in a place; `place` is below [`SOCKET_PEERS`].
    #[inline(always)]
    pub const fn at(&mut self, place: u32) -> &mut SocketPeer {
        &mut self.peers[place as usize & (SOCKET_PEERS - 1)]
    }

    #[inline(always)]
    fn find(&self, is_it: impl Fn(&SocketPeer) -> bool) -> Option<u32> {
        let mut place = 0;
        while place < SOCKET_PEERS {
            if is_it(&self.peers[place]) {
                return Some(place as u32);
            }
            place += 1;
        }
        None
    }

    /// Returns the place of a frontend.
    #[inline(always)]
    pub fn of_frontend(&self, family: u8, addr: &[u32; 4], port: u16) -> Option<u32> {
        self.find(|peer| peer.has_frontend(family, addr, port))
    }

    /// Returns the place whose frontend the application sees as the source of the messages of this backend.
    #[inline(always)]
    pub fn shown(&self, family: u8, addr: &[u32; 4], port: u16) -> Option<u32> {
        self.find(|peer| peer.shown != 0 && peer.has_backend(family, addr, port))
    }

    /// Returns the place for a new frontend: a free one, or that of a backend that does not serve any more.
    #[inline(always)]
    pub fn vacant(&self, serves: impl Fn(&SocketPeer) -> bool) -> Option<u32> {
        self.find(|peer| peer.family == 0).or_else(|| self.find(|peer| !serves(peer)))
    }

    /// Shows the backend's own address as the source of its messages.
    #[inline(always)]
    pub fn hide(&mut self, family: u8, addr: &[u32; 4], port: u16) {
        let mut place = 0;
        while place < SOCKET_PEERS {
            let peer = &mut self.peers[place];
            if peer.has_backend(family, addr, port) {
                peer.shown = 0;
            }
            place += 1;
        }
    }

    /// Shows the frontend in a place as the source of its backend's messages, instead of any other one with that backend.
    #[inline(always)]
    pub fn show(&mut self, place: u32) {
        let SocketPeer { backend, backend_port, family, .. } = *self.at(place);
        self.hide(family, &backend, backend_port);
        self.at(place).shown = 1;
    }
}

/// The record that the iterators write for each socket that is connected to a Service.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TranslatedSocket {
    /// The kernel's socket cookie.
    pub cookie: u64,
    /// The socket's storage.
    pub storage: SocketStorage,
}

/// Key of `sockets`: for the peers of unconnected UDP sockets that have more than [`SOCKET_PEERS`], and for sockets whose
/// storage the kernel could not allocate.
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
/// Backend to frontend: the application sees the original destination.
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
    /// Zero.
    pub reserved: u16,
    /// Id of the Service port.
    pub service: u32,
    /// Id of the backend.
    pub backend_id: u32,
    /// Low 32 bits of jiffies when the entry was last used, to within [`USED_WITHIN`].
    pub last_used: u32,
}

/// The number of jiffies for which the use of an entry of `sockets` is not noted again.
pub const USED_WITHIN: u32 = 1_000;

#[cfg(test)]
mod tests {
    use super::*;

    const FRONTEND: [u32; 4] = [10, 0, 0, 0];
    const BACKEND: [u32; 4] = [20, 0, 0, 0];

    fn peer(port: u16, backend_port: u16) -> SocketPeer {
        SocketPeer {
            frontend: FRONTEND,
            backend: BACKEND,
            frontend_port: port,
            backend_port,
            family: 4,
            ..SocketPeer::default()
        }
    }

    fn put(peers: &mut SocketPeers, place: u32, peer: SocketPeer) {
        *peers.at(place) = peer;
        peers.show(place);
    }

    #[test]
    fn backend_of_two_services_shows_the_last_used_frontend() {
        let mut peers = SocketPeers::default();
        put(&mut peers, 0, peer(53, 5353));
        put(&mut peers, 1, peer(54, 5353));
        assert_eq!(peers.shown(4, &BACKEND, 5353), Some(1));
        peers.show(0);
        assert_eq!(peers.shown(4, &BACKEND, 5353), Some(0));
        assert_eq!(peers.of_frontend(4, &FRONTEND, 54), Some(1), "it keeps its backend");
        peers.hide(4, &BACKEND, 5353);
        assert_eq!(peers.shown(4, &BACKEND, 5353), None);
        assert_eq!((peers.of_frontend(6, &FRONTEND, 53), peers.shown(4, &FRONTEND, 5353)), (None, None));
    }

    #[test]
    fn full_peers_reuse_only_places_of_removed_backends() {
        let mut peers = SocketPeers::default();
        for place in 0..SOCKET_PEERS as u32 {
            assert_eq!(peers.vacant(|_| false), Some(place), "free places come first");
            put(&mut peers, place, peer(place as u16, 1));
        }
        assert_eq!(peers.vacant(|_| true), None);
        assert_eq!(peers.vacant(|peer| peer.frontend_port != 5), Some(5));
    }
}
