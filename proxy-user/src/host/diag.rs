//! Lists the connected UDP and TCP sockets of the calling thread's network namespace, and destroys them
//! (`sock_diag(7)`; `ss -K` does the same). Lists the sockets that wait for clients.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use netlink_packet_sock_diag::inet::nlas::Nla;
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags};
use netlink_packet_sock_diag::{AF_INET, AF_INET6, SockDiagDestroy, SockDiagMessage};
use rtnetlink::packet_core::{NLM_F_ACK, NLM_F_DUMP};
use rtnetlink::sys::protocols::NETLINK_SOCK_DIAG;

use super::netlink::Netlink;

/// A netlink socket for `sock_diag`.
pub struct Diag(Netlink);

/// The kind of sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sockets {
    /// Connected UDP sockets.
    Udp,
    /// TCP sockets that connect, are established, or whose peer has closed.
    Tcp,
}

impl Sockets {
    const fn protocol(self) -> u8 {
        match self {
            Self::Udp => proxy_common::PROTO_UDP,
            Self::Tcp => proxy_common::PROTO_TCP,
        }
    }

    fn states(self) -> StateFlags {
        match self {
            Self::Udp => StateFlags::ESTABLISHED,
            Self::Tcp => StateFlags::ESTABLISHED | StateFlags::SYN_SENT | StateFlags::CLOSE_WAIT,
        }
    }
}

/// A connected socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connected {
    which: Sockets,
    /// The kernel's cookie of the socket: no other socket gets it while the machine runs.
    pub cookie: u64,
    /// The peer. An IPv4 address that an IPv6 socket uses is an IPv4 address here.
    pub peer: SocketAddr,
    id: SocketId,
}

/// A socket that waits for clients: a TCP listener, or a UDP socket that is bound and not connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Server {
    /// IP protocol number.
    pub protocol: u8,
    /// The address to which it is bound.
    pub addr: SocketAddr,
    /// An IPv6 socket that does not accept IPv4 clients (`IPV6_V6ONLY`).
    pub v6_only: bool,
}

impl Diag {
    /// Opens the netlink socket in the network namespace of the calling thread.
    pub fn open() -> io::Result<Self> {
        Netlink::to(NETLINK_SOCK_DIAG).map(Self)
    }

    /// Returns all sockets of this kind.
    ///
    /// Error `NotFound`: the kernel has no `CONFIG_INET_UDP_DIAG`, or `CONFIG_INET_TCP_DIAG`.
    pub fn connected(&mut self, which: Sockets) -> io::Result<Vec<Connected>> {
        self.list(which.protocol(), &which.states(), &ExtensionFlags::empty(), |found| {
            Some(Connected::of(which, found.header.socket_id))
        })
    }

    /// Returns the established TCP connections on which nothing was sent or received for this long, everything that was sent is
    /// acknowledged, everything that was received is read, and data was received after the last that was sent: no answer is owed.
    ///
    /// Error `NotFound`: as for [`Diag::connected`].
    pub fn idle(&mut self, silent: Duration) -> io::Result<Vec<Connected>> {
        let owes_none = |nla: &Nla| matches!(nla, Nla::TcpInfo(info) if owes_no_answer(info, silent));
        self.list(Sockets::Tcp.protocol(), &StateFlags::ESTABLISHED, &ExtensionFlags::INFO, |found| {
            let InetResponse { header, nlas } = found;
            let is_idle = header.recv_queue == 0 && header.send_queue == 0 && nlas.iter().any(owes_none);
            is_idle.then(|| Connected::of(Sockets::Tcp, header.socket_id))
        })
    }

    /// Returns the sockets that wait for TCP and UDP clients.
    ///
    /// Error `NotFound`: as for [`Diag::connected`].
    pub fn servers(&mut self) -> io::Result<Vec<Server>> {
        let kinds =
            [(Sockets::Tcp.protocol(), StateFlags::LISTEN), (Sockets::Udp.protocol(), StateFlags::CLOSE)];
        let mut all = Vec::new();
        for (protocol, states) in kinds {
            all.extend(self.list(protocol, &states, &ExtensionFlags::empty(), |found| {
                let SocketId { source_address, source_port, .. } = found.header.socket_id;
                let v6_only = found.nlas.iter().any(|nla| matches!(nla, Nla::SkV6Only(true)));
                Some(Server { protocol, addr: SocketAddr::new(source_address, source_port), v6_only })
            })?);
        }
        Ok(all)
    }

    /// Lists the sockets of both families in these states, and returns what `read` makes of each.
    fn list<T>(
        &mut self,
        protocol: u8,
        states: &StateFlags,
        extensions: &ExtensionFlags,
        read: impl Fn(InetResponse) -> Option<T>,
    ) -> io::Result<Vec<T>> {
        let mut all = Vec::new();
        for none in [SocketId::new_v4(), SocketId::new_v6()] {
            let request =
                InetRequest { extensions: extensions.clone(), ..request(protocol, states.clone(), none) };
            let answers = self.0.exchange(SockDiagMessage::InetRequest(request), NLM_F_DUMP)?;
            all.extend(answers.into_iter().filter_map(|answer| match answer {
                SockDiagMessage::InetResponse(found) => read(*found),
                _ => None,
            }));
        }
        Ok(all)
    }

    /// Destroys a socket. UDP: a process that waits for a message gets ECONNABORTED, and one that sends a message gets
    /// EDESTADDRREQ, because the socket is no longer connected. TCP: the process gets ECONNABORTED, and the peer a RST.
    ///
    /// Error `NotFound`: the socket no longer exists. `Unsupported`: the kernel has no `CONFIG_INET_DIAG_DESTROY`.
    pub fn destroy(&mut self, socket: &Connected) -> io::Result<()> {
        let request = request(socket.which.protocol(), socket.which.states(), socket.id.clone());
        let message = SockDiagDestroy::new(SockDiagMessage::InetRequest(request));
        self.0.exchange::<_, SockDiagMessage>(message, NLM_F_ACK).map(drop)
    }
}

/// Returns a request. In a request about one socket, the kernel compares everything in `id`.
fn request(protocol: u8, states: StateFlags, id: SocketId) -> InetRequest {
    InetRequest {
        family: if id.source_address.is_ipv4() { AF_INET } else { AF_INET6 },
        protocol,
        extensions: ExtensionFlags::empty(),
        states,
        socket_id: id,
    }
}

impl Connected {
    fn of(which: Sockets, id: SocketId) -> Self {
        let peer = match id.destination_address {
            IpAddr::V6(ip) => ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4),
            ip @ IpAddr::V4(_) => ip,
        };
        Self { which, cookie: cookie(id.cookie), peer: SocketAddr::new(peer, id.destination_port), id }
    }
}

/// Whether data was received last, and both directions have been silent for this long, by `struct tcp_info` (`linux/tcp.h`). The
/// times are those of a tick: a request of the same tick as the data before it shows by its acknowledgement, and before the first
/// data by the count of bytes.
fn owes_no_answer(info: &[u8], silent: Duration) -> bool {
    let word =
        |at: usize| info.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_ne_bytes);
    let [Some(sent), Some(received), Some(acknowledged), Some(low), Some(high)] =
        [LAST_DATA_SENT, LAST_DATA_RECV, LAST_ACK_RECV, BYTES_RECEIVED, BYTES_RECEIVED + 4].map(word)
    else {
        return false;
    };
    let is_answered = low | high != 0 && received <= sent && received <= acknowledged;
    is_answered && u128::from(received) >= silent.as_millis()
}

/// Offset of `tcpi_last_data_sent`, in milliseconds ago.
const LAST_DATA_SENT: usize = 44;
/// Offset of `tcpi_last_data_recv`, in milliseconds ago.
const LAST_DATA_RECV: usize = 52;
/// Offset of `tcpi_last_ack_recv`, in milliseconds ago.
const LAST_ACK_RECV: usize = 56;
/// Offset of `tcpi_bytes_received`.
const BYTES_RECEIVED: usize = 128;

/// Returns the cookie from its two words, of which the lower one is first (`sock_diag_save_cookie`).
fn cookie(bytes: [u8; 8]) -> u64 {
    let [low, high] =
        [0, 4].map(|at| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]));
    u64::from(low) | u64::from(high) << 32
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn a_connected_socket_is_found_by_its_cookie_and_the_others_are_not() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = server.local_addr().unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.connect(to).unwrap();
        let cookie = rustix::net::sockopt::socket_cookie(&client).unwrap();
        let all = Diag::open().unwrap().connected(Sockets::Udp).unwrap();
        let ours: Vec<_> = all.iter().filter(|socket| socket.cookie == cookie).collect();
        assert_eq!(ours.iter().map(|socket| socket.peer).collect::<Vec<_>>(), [to]);
        let server = rustix::net::sockopt::socket_cookie(&server).unwrap();
        assert!(all.iter().all(|socket| socket.cookie != server));
    }

    #[test]
    fn sockets_that_wait_for_clients_are_listed() {
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.connect("127.0.0.1:9").unwrap();
        let v6_only = socket2::Socket::new(socket2::Domain::IPV6, socket2::Type::DGRAM, None).unwrap();
        v6_only.set_only_v6(true).unwrap();
        v6_only.bind(&"[::1]:0".parse::<SocketAddr>().unwrap().into()).unwrap();
        let all = Diag::open().unwrap().servers().unwrap();
        let has = |protocol, addr, v6_only| all.contains(&Server { protocol, addr, v6_only });
        assert!(has(proxy_common::PROTO_TCP, tcp.local_addr().unwrap(), false));
        assert!(has(proxy_common::PROTO_UDP, udp.local_addr().unwrap(), false));
        assert!(has(proxy_common::PROTO_UDP, v6_only.local_addr().unwrap().as_socket().unwrap(), true));
        assert!(!has(proxy_common::PROTO_UDP, client.local_addr().unwrap(), false), "it is connected");
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn a_destroyed_socket_is_not_connected() {
        for [to, from] in [["127.0.0.1:9", "127.0.0.1:0"], ["[::ffff:127.0.0.1]:9", "[::]:0"]] {
            let client = UdpSocket::bind(from).unwrap();
            client.connect(to).unwrap();
            let cookie = rustix::net::sockopt::socket_cookie(&client).unwrap();
            let mut diag = Diag::open().unwrap();
            let all = diag.connected(Sockets::Udp).unwrap();
            let found = all.into_iter().find(|socket| socket.cookie == cookie).unwrap();
            assert_eq!(found.peer, "127.0.0.1:9".parse().unwrap());
            diag.destroy(&found).unwrap();
            assert_eq!(client.recv(&mut [0]).unwrap_err().raw_os_error(), Some(libc::ECONNABORTED));
            assert_eq!(client.send(b"x").unwrap_err().raw_os_error(), Some(libc::EDESTADDRREQ));
            assert_eq!(diag.destroy(&found).unwrap_err().kind(), io::ErrorKind::NotFound);
        }
    }

    #[test]
    fn connection_that_owes_an_answer_is_not_idle() {
        use std::io::{Read as _, Write as _};
        use std::net::{TcpListener, TcpStream};
        use std::thread::sleep;

        const SILENT: Duration = Duration::from_millis(100);
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(server.local_addr().unwrap()).unwrap();
        let (mut peer, _) = server.accept().unwrap();
        let cookie = rustix::net::sockopt::socket_cookie(&client).unwrap();
        let is_idle =
            || Diag::open().unwrap().idle(SILENT).unwrap().iter().any(|socket| socket.cookie == cookie);
        client.write_all(b"request").unwrap();
        peer.read_exact(&mut [0; 7]).unwrap();
        sleep(3 * SILENT);
        assert!(!is_idle(), "the server has not answered");
        peer.write_all(b"answer").unwrap();
        sleep(3 * SILENT);
        assert!(!is_idle(), "the client has not read the answer");
        client.read_exact(&mut [0; 6]).unwrap();
        assert!(is_idle());
        client.write_all(b"request").unwrap();
        assert!(!is_idle(), "the next request is sent");
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn a_destroyed_connection_is_aborted_and_its_peer_is_reset() {
        use std::io::Read as _;
        use std::net::{TcpListener, TcpStream};

        for [at, to] in
            [["127.0.0.1:0", "127.0.0.1"], ["[::1]:0", "::1"], ["127.0.0.1:0", "::ffff:127.0.0.1"]]
        {
            let server = TcpListener::bind(at).unwrap();
            let to = SocketAddr::new(to.parse().unwrap(), server.local_addr().unwrap().port());
            let mut client = TcpStream::connect(to).unwrap();
            let (mut peer, _) = server.accept().unwrap();
            let cookie = rustix::net::sockopt::socket_cookie(&client).unwrap();
            let mut diag = Diag::open().unwrap();
            let all = diag.connected(Sockets::Tcp).unwrap();
            let found = all.into_iter().find(|socket| socket.cookie == cookie).unwrap();
            assert_eq!(found.peer, server.local_addr().unwrap());
            diag.destroy(&found).unwrap();
            assert_eq!(client.read(&mut [0]).unwrap_err().raw_os_error(), Some(libc::ECONNABORTED));
            assert_eq!(peer.read(&mut [0]).unwrap_err().raw_os_error(), Some(libc::ECONNRESET));
            assert_eq!(diag.destroy(&found).unwrap_err().kind(), io::ErrorKind::NotFound);
        }
    }
}
