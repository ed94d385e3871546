//! Traffic at a fixed rate, and the time that each packet takes.
//!
//! The sender writes whole frames to a packet socket, so that each may have another source. Each packet carries the time at which
//! it is due; what delays the sender counts, too. The kernel notes when a packet arrives in the server's namespace.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;
use std::{io, mem, ptr};

use rustix::thread::{CpuSet, sched_setaffinity};
use socket2::{Domain, Protocol, Socket, Type};

use proxy_testbed::packet::Packet;

/// Packets of one system call.
pub const BATCH: usize = 20;
/// Packets of a batch that begin a flow, while there are some left.
const NEW_IN_BATCH: usize = 2;
/// Packets of a flow that the server answers, so that the flow is assured.
const ANSWERED: u8 = 2;
/// Bytes of a payload: the due time in nanoseconds, its complement, the number of the flow.
const PAYLOAD: usize = 20;

/// Nanoseconds of the clock with which the kernel notes the arrival of packets.
pub fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

fn sleep_until(nanoseconds: u64) {
    let until = libc::timespec {
        tv_sec: (nanoseconds / 1_000_000_000).cast_signed(),
        tv_nsec: (nanoseconds % 1_000_000_000).cast_signed(),
    };
    // SAFETY: the kernel reads the time, which outlives the call.
    unsafe {
        libc::clock_nanosleep(libc::CLOCK_REALTIME, libc::TIMER_ABSTIME, &raw const until, ptr::null_mut())
    };
}

/// Puts this thread before all other tasks of a CPU, as the interrupts of a network card are.
fn prioritize(cpu: usize) {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut one = CpuSet::new();
    one.set(cpu % cpus);
    let _ = sched_setaffinity(None, &one);
    let param = libc::sched_param { sched_priority: 1 };
    // SAFETY: the kernel reads the parameter, which outlives the call. Without the right to it, the thread stays as it is.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const param) };
}

/// The frame of a flow; its checksum is that of every due time, because a number and its complement add nothing to it.
pub fn frame(from: SocketAddr, to: SocketAddr, flow: u32) -> Vec<u8> {
    let mut payload = [0; PAYLOAD];
    payload[8..16].fill(0xff);
    payload[16..].copy_from_slice(&flow.to_be_bytes());
    Packet { payload: payload.to_vec(), ..Packet::udp(from, to) }.bytes()
}

/// Flows of one run: those that get packets all the time, and those that begin with the growth, with one packet each.
pub struct Flows {
    pub kept: Vec<Vec<u8>>,
    pub new: Vec<Vec<u8>>,
}

/// When what happens, in nanoseconds of [`now`].
#[derive(Clone, Copy)]
pub struct Times {
    pub start: u64,
    /// The first packet that counts.
    pub counted: u64,
    pub growth: u64,
    pub end: u64,
    /// Between two batches.
    pub period: u64,
}

/// Sends until the end; returns the number of packets that count. Runs in the client's namespace. A batch that is late is sent at
/// once.
pub fn send(mut flows: Flows, times: Times) -> io::Result<u64> {
    prioritize(0);
    let socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(0)))?;
    socket.set_send_buffer_size(8 << 20)?;
    // SAFETY: an address of plain numbers.
    let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    // SAFETY: the name ends with a zero.
    address.sll_ifindex = unsafe { libc::if_nametoindex(c"eth0".as_ptr()) }.cast_signed();
    let length = size_of_val(&address) as libc::socklen_t;
    // SAFETY: the kernel reads the address, which outlives the call.
    if unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let (mut next, mut begun, mut counted) = (0, 0, 0);
    for due in (times.start..times.end).step_by(times.period as usize) {
        sleep_until(due);
        // SAFETY: plain numbers and pointers, which are set below.
        let (mut parts, mut messages): ([libc::iovec; BATCH], [libc::mmsghdr; BATCH]) =
            unsafe { mem::zeroed() };
        for (at, (part, message)) in parts.iter_mut().zip(&mut messages).enumerate() {
            let is_new = due >= times.growth && at < NEW_IN_BATCH && begun < flows.new.len();
            let frame = if is_new {
                begun += 1;
                &mut flows.new[begun - 1]
            } else {
                next = (next + 1) % flows.kept.len();
                &mut flows.kept[next]
            };
            let payload = frame.len() - PAYLOAD;
            frame[payload..payload + 8].copy_from_slice(&due.to_be_bytes());
            frame[payload + 8..payload + 16].copy_from_slice(&(!due).to_be_bytes());
            *part = libc::iovec { iov_base: frame.as_mut_ptr().cast(), iov_len: frame.len() };
            message.msg_hdr.msg_iovlen = 1;
            message.msg_hdr.msg_iov = part;
        }
        let mut sent = 0;
        while sent < BATCH {
            let left = &mut messages[sent..];
            // SAFETY: messages, parts and frames outlive the call.
            let result =
                unsafe { libc::sendmmsg(socket.as_raw_fd(), left.as_mut_ptr(), left.len() as u32, 0) };
            if result < 0 {
                return Err(io::Error::last_os_error());
            }
            sent += result.cast_unsigned() as usize;
        }
        if due >= times.counted {
            counted += BATCH as u64;
        }
    }
    Ok(counted)
}

/// A packet that counts: when it was due, and how many nanoseconds later it arrived.
#[derive(Clone, Copy)]
pub struct Arrival {
    pub due: u64,
    pub late: u32,
}

/// What the server received.
pub struct Received {
    pub packets: Vec<Arrival>,
    /// Kept flows of which both endpoints received packets that count.
    pub moved: usize,
    /// Datagrams of other senders than [`send`].
    pub others: u64,
}

/// Opens the socket of an endpoint, in this thread's namespace.
pub fn endpoint(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(address)?;
    let set = |name, value: libc::c_int| {
        let length = size_of_val(&value) as libc::socklen_t;
        // SAFETY: the kernel reads the value, which outlives the call.
        let result = unsafe {
            libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, (&raw const value).cast(), length)
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    set(libc::SO_RCVBUFFORCE, 128 << 20)?;
    set(libc::SO_TIMESTAMPNS, 1)?;
    Ok(socket)
}

/// Messages that one call receives.
const ROOM: usize = 64;

#[repr(C, align(8))]
struct Control([u8; 64]);

/// Receives what has arrived at a socket; `seen` gets the payload, the time of arrival and the sender of each message.
fn receive(socket: RawFd, mut seen: impl FnMut(&[u8], u64, &libc::sockaddr_storage)) -> usize {
    // SAFETY: plain numbers.
    let mut from: [libc::sockaddr_storage; ROOM] = unsafe { mem::zeroed() };
    let mut payloads = [[0_u8; PAYLOAD]; ROOM];
    let mut controls = [const { Control([0; 64]) }; ROOM];
    // SAFETY: plain numbers and pointers, which are set below.
    let (mut parts, mut messages): ([libc::iovec; ROOM], [libc::mmsghdr; ROOM]) = unsafe { mem::zeroed() };
    for at in 0..ROOM {
        parts[at] = libc::iovec { iov_base: payloads[at].as_mut_ptr().cast(), iov_len: PAYLOAD };
        let header = &mut messages[at].msg_hdr;
        (header.msg_iov, header.msg_iovlen) = (&raw mut parts[at], 1);
        header.msg_name = (&raw mut from[at]).cast();
        header.msg_namelen = size_of::<libc::sockaddr_storage>() as u32;
        header.msg_control = controls[at].0.as_mut_ptr().cast();
        header.msg_controllen = 64;
    }
    let (room, flags) = (ROOM as u32, libc::MSG_DONTWAIT);
    // SAFETY: everything to which the messages point outlives the call.
    let count = unsafe { libc::recvmmsg(socket, messages.as_mut_ptr(), room, flags, ptr::null_mut()) };
    let count = usize::try_from(count).unwrap_or_default();
    for at in 0..count {
        // SAFETY: the kernel has written the headers of the control data, and the time behind the first one.
        let time: libc::timespec = unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const messages[at].msg_hdr);
            assert!(!header.is_null(), "the kernel has noted no time");
            libc::CMSG_DATA(header).cast::<libc::timespec>().read_unaligned()
        };
        let arrived = time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned();
        seen(&payloads[at], arrived, &from[at]);
    }
    count
}

/// Receives the packets of [`send`] with so many kept flows, until the flag is set.
pub fn serve(sockets: &[UdpSocket; 2], kept: usize, times: Times, is_over: &AtomicBool) -> Received {
    prioritize(1);
    let expected = (times.end - times.start) / times.period * BATCH as u64;
    // Written once, so that its pages exist.
    let mut packets: Vec<Arrival> = vec![Arrival { due: 0, late: 0 }; expected as usize];
    packets.clear();
    let (mut endpoints, mut answered, mut others) = (vec![0_u8; kept], vec![0_u8; kept], 0);
    while !is_over.load(Ordering::Relaxed) {
        let mut count = 0;
        for (at, socket) in sockets.iter().enumerate() {
            count += receive(socket.as_raw_fd(), |payload, arrived, from| {
                let due = u64::from_be_bytes(payload[..8].try_into().unwrap());
                let flow = u32::from_be_bytes(payload[16..].try_into().unwrap()) as usize;
                if due == 0 {
                    others += 1;
                    return;
                }
                if due >= times.counted {
                    packets.push(Arrival {
                        due,
                        late: u32::try_from(arrived.saturating_sub(due)).unwrap_or(u32::MAX),
                    });
                }
                if flow < kept {
                    endpoints[flow] |= u8::from(due >= times.counted) << at;
                    if answered[flow] < ANSWERED {
                        answered[flow] += 1;
                        // SAFETY: the kernel reads the payload and the address that it has written itself.
                        unsafe {
                            let (name, length) = (ptr::from_ref(from).cast(), size_of_val(from) as u32);
                            libc::sendto(socket.as_raw_fd(), payload.as_ptr().cast(), 8, 0, name, length);
                        }
                    }
                }
            });
        }
        if count == 0 {
            // Not poll(2): a wakeup for each packet would cost the sender more than the packet.
            sleep(Duration::from_millis(1));
        }
    }
    Received { packets, moved: endpoints.iter().filter(|both| both.count_ones() == 2).count(), others }
}
