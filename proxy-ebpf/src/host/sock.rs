//! Sockets and their calls, with socket storage in ordinary memory.

use std::boxed::Box;
use std::cell::Cell;

use proxy_common::Family;
use proxy_common::config::MESH_PORTS;
use proxy_common::socket::{SocketPeers, SocketStorage};

use crate::sock::{Bound, CLOSE, ESTABLISHED, Sock, Sockaddr, TcpEvent, TcpEventKind};

/// A value of socket-local storage: null until it is allocated. It is never freed, since a test may hold a reference to it.
#[derive(Debug)]
pub(super) struct Local<T>(Cell<*mut T>);

impl<T: Default> Local<T> {
    fn new() -> Self {
        Self(Cell::new(core::ptr::null_mut()))
    }

    fn get(&self, create: bool) -> Option<*mut T> {
        if self.0.get().is_null() && create {
            self.0.set(Box::into_raw(Box::default()));
        }
        (!self.0.get().is_null()).then(|| self.0.get())
    }
}

/// A socket.
#[derive(Debug)]
pub struct HostSock {
    /// Number of its network namespace.
    pub netns: u64,
    /// Number of the socket.
    pub cookie: u64,
    /// Protocol number.
    pub proto: u8,
    /// Whether the kernel has memory for its storage.
    pub has_memory: bool,
    /// The address to which it is bound, as words ([`Address::words`](proxy_common::Address::words)).
    pub bound_addr: [u32; 4],
    /// The port to which it is bound, host byte order.
    pub bound_port: u16,
    /// A port at which another socket of the namespace listens, host byte order.
    pub listener: Option<u16>,
    /// The state of the socket; for UDP sockets, [`ESTABLISHED`] means connected.
    pub state: Cell<u32>,
    /// Whether the kernel reports timeouts and state changes.
    pub is_watched: Cell<bool>,
    /// The time of the first SYN, if it was noted.
    pub begun: Cell<Option<u64>>,
    pub(super) storage: Local<SocketStorage>,
    pub(super) peers: Local<SocketPeers>,
}

impl HostSock {
    /// Returns a socket that is neither bound nor connected.
    pub fn new(netns: u64, cookie: u64, proto: u8) -> Self {
        Self {
            netns,
            cookie,
            proto,
            has_memory: true,
            bound_addr: [0; 4],
            bound_port: 0,
            listener: None,
            state: Cell::new(CLOSE),
            is_watched: Cell::new(false),
            begun: Cell::new(None),
            storage: Local::new(),
            peers: Local::new(),
        }
    }

    /// Returns a call on the socket with this address and port.
    pub fn call<F: Family>(&self, addr: F::Words, port: u16) -> HostCall<'_, F> {
        HostCall { sock: self, addr: Cell::new(addr), port: Cell::new(port) }
    }

    /// Returns an event of the socket.
    pub fn event(&self, kind: TcpEventKind) -> HostEvent<'_> {
        HostEvent {
            sock: self,
            kind,
            states: [CLOSE; 2],
            segments_in: 0,
            rtt: 0,
            local4: [0],
            local6: [0; 4],
            port: 0,
        }
    }
}

impl Sock for HostSock {
    fn netns(&self) -> u64 {
        self.netns
    }

    fn storage(&self, create: bool) -> Option<*mut SocketStorage> {
        self.storage.get(create && self.has_memory)
    }
}

impl Bound for HostSock {
    fn addr4(&self) -> [u32; 1] {
        [self.bound_addr[0]]
    }

    fn addr6(&self) -> [u32; 4] {
        self.bound_addr
    }

    fn port(&self) -> u16 {
        self.bound_port
    }

    fn proto(&self) -> u8 {
        self.proto
    }
}

/// A call on a socket.
#[derive(Debug)]
pub struct HostCall<'a, F: Family> {
    /// The socket.
    pub sock: &'a HostSock,
    /// The address.
    pub addr: Cell<F::Words>,
    /// The port, host byte order.
    pub port: Cell<u16>,
}

impl<F: Family> Sock for HostCall<'_, F> {
    fn netns(&self) -> u64 {
        self.sock.netns()
    }

    fn storage(&self, create: bool) -> Option<*mut SocketStorage> {
        self.sock.storage(create)
    }
}

impl<F: Family> Sockaddr for HostCall<'_, F> {
    type Family = F;

    fn addr(&self) -> F::Words {
        self.addr.get()
    }

    fn set_addr(&self, addr: F::Words) {
        self.addr.set(addr);
    }

    fn port(&self) -> u16 {
        self.port.get()
    }

    fn set_port(&self, port: u16) {
        self.port.set(port);
    }

    fn proto(&self) -> u8 {
        self.sock.proto
    }

    fn cookie(&self) -> u64 {
        self.sock.cookie
    }

    fn is_connected(&self) -> bool {
        self.sock.state.get() == ESTABLISHED
    }

    fn is_bound(&self) -> bool {
        self.sock.bound_port != 0
    }

    fn has_listener(&self, ports: &[u16; MESH_PORTS]) -> bool {
        self.sock.listener.is_some_and(|port| ports.contains(&port))
    }

    fn peers(&self, create: bool) -> Option<*mut SocketPeers> {
        self.sock.peers.get(create && self.sock.has_memory)
    }
}

/// Nanoseconds from the first SYN to any later event of a test.
pub const TOOK: u64 = 70_000;

/// An event of a TCP socket.
#[derive(Clone, Copy, Debug)]
pub struct HostEvent<'a> {
    /// The socket.
    pub sock: &'a HostSock,
    /// The kind of the event.
    pub kind: TcpEventKind,
    /// The state before a change, and after it.
    pub states: [u32; 2],
    /// Number of segments that the socket has received.
    pub segments_in: u32,
    /// The round-trip time in microseconds.
    pub rtt: u32,
    /// The socket's own address, if it is an IPv4 address.
    pub local4: [u32; 1],
    /// The socket's own address, if it is an IPv6 address.
    pub local6: [u32; 4],
    /// The socket's own port, host byte order.
    pub port: u16,
}

impl Sock for HostEvent<'_> {
    fn netns(&self) -> u64 {
        self.sock.netns()
    }

    fn storage(&self, create: bool) -> Option<*mut SocketStorage> {
        self.sock.storage(create)
    }
}

impl TcpEvent for HostEvent<'_> {
    fn kind(&self) -> TcpEventKind {
        self.kind
    }

    fn old_state(&self) -> u32 {
        self.states[0]
    }

    fn new_state(&self) -> u32 {
        self.states[1]
    }

    fn state(&self) -> u32 {
        self.sock.state.get()
    }

    fn segments_in(&self) -> u32 {
        self.segments_in
    }

    fn rtt(&self) -> u32 {
        self.rtt
    }

    fn local(&self) -> ([u32; 1], [u32; 4]) {
        (self.local4, self.local6)
    }

    fn local_port(&self) -> u16 {
        self.port
    }

    fn watch(&self) {
        self.sock.is_watched.set(true);
    }

    fn begin_measurement(&self) {
        self.sock.begun.set(Some(1));
    }

    fn since_connect(&self) -> Option<(u64, u64)> {
        self.sock.begun.get().map(|begun| (begun, TOOK))
    }
}
