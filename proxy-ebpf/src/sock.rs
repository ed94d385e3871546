//! The interface of the socket path to a socket and its calls, implemented for the kernel's contexts and for the host.

use proxy_common::Family;
use proxy_common::config::MESH_PORTS;
use proxy_common::socket::{SocketPeers, SocketStorage};

/// `TCP_ESTABLISHED` (`include/net/tcp_states.h`), which the kernel also sets for connected UDP sockets (`net/ipv4/datagram.c`).
pub const ESTABLISHED: u32 = 1;
/// `TCP_SYN_SENT`.
pub const SYN_SENT: u32 = 2;
/// `TCP_CLOSE`.
pub const CLOSE: u32 = 7;

/// A socket.
pub trait Sock {
    /// Returns the number of the socket's network namespace, which is unique until the machine reboots.
    fn netns(&self) -> u64;
    /// Returns the socket's value in `socket_storage`; with `create` it is allocated if there is none.
    fn storage(&self, create: bool) -> Option<*mut SocketStorage>;
}

/// A call on a socket, with an address that a hook may read and replace.
pub trait Sockaddr: Sock {
    /// The address family.
    type Family: Family;
    /// Returns the address.
    fn addr(&self) -> <Self::Family as Family>::Words;
    /// Replaces the address.
    fn set_addr(&self, addr: <Self::Family as Family>::Words);
    /// Returns the port, host byte order.
    fn port(&self) -> u16;
    /// Replaces the port.
    fn set_port(&self, port: u16);
    /// Returns the socket's protocol number. The low byte of MPTCP's number, 262, is TCP's number, and MPTCP packets are TCP
    /// packets.
    fn proto(&self) -> u8;
    /// Returns a number that is unique to the socket until the machine reboots.
    fn cookie(&self) -> u64;
    /// Whether the socket is connected.
    fn is_connected(&self) -> bool;
    /// Whether the process has bound the socket to a port: for connect(2), the kernel selects a port only after the hook.
    fn is_bound(&self) -> bool;
    /// Whether a TCP socket listens at one of these ports, host byte order, in the socket's network namespace; 0 is no port.
    fn has_listener(&self, ports: &[u16; MESH_PORTS]) -> bool;
    /// Returns the socket's value in `socket_peers`; with `create` it is allocated if there is none.
    fn peers(&self, create: bool) -> Option<*mut SocketPeers>;

    /// Replaces address and port.
    #[inline(always)]
    fn set(&self, addr: <Self::Family as Family>::Words, port: u16) {
        self.set_addr(addr);
        self.set_port(port);
    }
}

/// The third word of `::ffff:a.b.c.d`, in network byte order.
const MAPPED: u32 = 0xffffu32.to_be();

/// Returns the IPv4 address of an IPv4-mapped IPv6 address (RFC 4291, 2.5.5.2).
#[inline(always)]
pub fn mapped(words: [u32; 4]) -> Option<[u32; 1]> {
    (words[0] == 0 && words[1] == 0 && words[2] == MAPPED).then_some([words[3]])
}

/// A socket that was just bound.
pub trait Bound: Sock {
    /// Returns the IPv4 address to which the socket is bound; only in the hook of IPv4 sockets.
    fn addr4(&self) -> [u32; 1];
    /// Returns the IPv6 address to which the socket is bound; only in the hook of IPv6 sockets.
    fn addr6(&self) -> [u32; 4];
    /// Returns the port, host byte order.
    fn port(&self) -> u16;
    /// Returns the socket's protocol number, as [`Sockaddr::proto`].
    fn proto(&self) -> u8;
}

/// The kind of a [`TcpEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpEventKind {
    /// The socket sends its first SYN.
    Connect,
    /// A segment was not acknowledged in time, and is sent again. Only of watched sockets.
    Timeout,
    /// The state of the socket changes. Only of watched sockets.
    StateChange,
    /// Any other event.
    Other,
}

/// An event of a TCP socket.
pub trait TcpEvent: Sock {
    /// Returns the kind of the event.
    fn kind(&self) -> TcpEventKind;
    /// Returns the state before a change.
    fn old_state(&self) -> u32;
    /// Returns the state after a change.
    fn new_state(&self) -> u32;
    /// Returns the state of the socket.
    fn state(&self) -> u32;
    /// Returns the number of segments that the socket has received.
    fn segments_in(&self) -> u32;
    /// Returns the smoothed round-trip time in microseconds, after the first answer that of the SYN; 0: unknown, since the SYN was
    /// sent again.
    fn rtt(&self) -> u32;
    /// Returns the socket's own address in both families; the one of the other family has no meaning.
    fn local(&self) -> ([u32; 1], [u32; 4]);
    /// Returns the socket's own port, host byte order.
    fn local_port(&self) -> u16;
    /// Makes the kernel report timeouts and state changes of the socket. If this fails, the result of the connection is not
    /// noted.
    fn watch(&self);
    /// Notes the time of the first SYN.
    fn begin_measurement(&self);
    /// Returns the time of the first SYN, and the nanoseconds since then.
    fn since_connect(&self) -> Option<(u64, u64)>;
}
