//! Path MTU discovery for encapsulated packets (DSR).
//!
//! A router between two nodes answers an encapsulated packet that is too long with an ICMP error. The kernel notes the path MTU
//! in its routes only if a tunnel device or a socket of that protocol exists (`net/ipv4/raw.c`, `raw_err`; `net/ipv6/raw.c`,
//! `rawv6_err`, for sockets with `IPV6_RECVERR`). `bpf_fib_lookup` then returns the smaller MTU, and the programs tell the client.

use std::io;
use std::os::fd::AsRawFd as _;

use proxy_common::{PROTO_IPIP, PROTO_IPV6};
use socket2::{Domain, Protocol, SockFilter, Socket, Type};

/// Raw sockets for the two protocols of encapsulated packets. They receive errors only.
#[derive(Debug)]
pub struct TunnelErrors {
    _sockets: Vec<Socket>,
}

impl TunnelErrors {
    /// Opens the sockets. A family that the kernel does not have is left out.
    ///
    /// # Errors
    /// The kernel refuses a socket: without `CAP_NET_RAW`.
    pub fn open() -> io::Result<Self> {
        let mut sockets = Vec::new();
        for (domain, proto) in [(Domain::IPV4, PROTO_IPIP), (Domain::IPV6, PROTO_IPV6)] {
            match Socket::new(domain, Type::RAW, Some(Protocol::from(i32::from(proto)))) {
                Ok(socket) => {
                    // BPF_RET | BPF_K: keeps 0 bytes of each packet, which is all of them that get past the programs.
                    let nothing = SockFilter::new(0x06, 0, 0, 0);
                    socket.attach_filter(&[nothing])?;
                    if domain == Domain::IPV6 {
                        report_errors(&socket)?;
                    }
                    sockets.push(socket);
                }
                Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Self { _sockets: sockets })
    }
}

/// Sets `IPV6_RECVERR`. The queue of errors is never read, and holds few of them.
fn report_errors(socket: &Socket) -> io::Result<()> {
    socket.set_recv_buffer_size(1)?;
    let (on, size): (libc::c_int, _) = (1, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: the kernel reads the value, which outlives the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IPV6,
            libc::IPV6_RECVERR,
            (&raw const on).cast(),
            size,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
