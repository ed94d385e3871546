//! Information of the kernel about a TCP socket: `TCP_INFO`, and sequence numbers by `TCP_REPAIR`.

use std::io;
use std::os::fd::AsRawFd;

/// Offset of `tcpi_total_retrans` in `struct tcp_info`, which grows only at its end (`include/uapi/linux/tcp.h`).
const TOTAL_RETRANS: usize = 100;
/// Queues of `TCP_REPAIR_QUEUE`, each with its sequence number.
const RECV_QUEUE: libc::c_int = 1;
const SEND_QUEUE: libc::c_int = 2;
/// Ends the repair mode without a window probe (`TCP_REPAIR_OFF_NO_WP`).
const REPAIR_OFF: libc::c_int = -1;

/// Returns how many segments the socket has retransmitted, SYNs included; right after `connect`, only SYNs.
pub fn retransmits(socket: &impl AsRawFd) -> io::Result<u32> {
    let mut info = [0u8; TOTAL_RETRANS + 4];
    let mut size = info.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `size` bytes, which the buffer has.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut size,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let count = info.last_chunk().copied().map(u32::from_ne_bytes);
    count.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Returns the next sequence numbers that the socket sends and expects.
pub fn sequences(socket: &impl AsRawFd) -> io::Result<(u32, u32)> {
    set(socket, libc::TCP_REPAIR, 1)?;
    let both = || {
        set(socket, libc::TCP_REPAIR_QUEUE, SEND_QUEUE)?;
        let sends = get(socket, libc::TCP_QUEUE_SEQ)?;
        set(socket, libc::TCP_REPAIR_QUEUE, RECV_QUEUE)?;
        Ok((sends, get(socket, libc::TCP_QUEUE_SEQ)?))
    };
    let result = both();
    set(socket, libc::TCP_REPAIR, REPAIR_OFF)?;
    result
}

fn set(socket: &impl AsRawFd, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let size = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel reads the value, which outlives the call.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, option, (&raw const value).cast(), size)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn get(socket: &impl AsRawFd, option: libc::c_int) -> io::Result<u32> {
    let (mut value, mut size) = (0u32, 4);
    // SAFETY: the kernel writes at most `size` bytes to the value, which has that size.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            (&raw mut value).cast(),
            &raw mut size,
        )
    };
    if result == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}
