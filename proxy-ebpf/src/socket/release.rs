//! close(2) of a socket, by its last descriptor.

use proxy_common::V4;

use super::call::ALLOW;
use super::peer::uncount;
use super::sockaddr::Bound;
use crate::kernel::handle::Kernel;
use crate::kernel::sockets::storage_of_closed;

/// A socket that was connected to a Service is none of the open connections of its backend any more. One that never connected,
/// or whose connect failed, comes here too.
#[inline(always)]
pub fn released(socket: &Bound) -> i32 {
    // SAFETY: the socket of the hook's context.
    if let Some(storage) = unsafe { storage_of_closed(socket.raw()) } {
        // SAFETY: the socket's own storage, and the socket is closed.
        uncount(Kernel::<V4>::new(), unsafe { &mut *storage });
    }
    ALLOW
}
