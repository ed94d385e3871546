//! close(2) of the last descriptor of a socket.

use proxy_common::V4;

use super::call::ALLOW;
use super::peer::uncount;
use super::sockaddr::Bound;
use crate::kernel::handle::Kernel;
use crate::kernel::sockets::storage_of_closed;

/// Stops counting a closed socket as an open connection of its backend. Sockets that never connected, or whose connect
/// failed, come here, too.
#[inline(always)]
pub fn released(socket: &Bound) -> i32 {
    // SAFETY: the socket of the hook's context.
    if let Some(storage) = unsafe { storage_of_closed(socket.raw()) } {
        // SAFETY: the socket's own storage, and the socket is closed.
        uncount(Kernel::<V4>::new(), unsafe { &mut *storage });
    }
    ALLOW
}
