//! close(2) of the last descriptor of a socket.

use super::call::ALLOW;
use super::peer::uncount;
use crate::env::OpenConnections;
use crate::sock::Sock;

/// Stops counting a closed socket as an open connection of its backend. Sockets that never connected, or whose connect
/// failed, come here, too.
#[inline(always)]
pub fn released<M: OpenConnections, S: Sock>(maps: M, socket: &S) -> i32 {
    if let Some(storage) = socket.storage(false) {
        // SAFETY: the socket's own storage, and the socket is closed.
        uncount(maps, unsafe { &mut *storage });
    }
    ALLOW
}
