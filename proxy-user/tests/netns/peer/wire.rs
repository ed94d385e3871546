//! The requests and answers between a test and its peers.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// A kind of socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SocketKind {
    Tcp,
    /// UDP after connect(2).
    Udp,
    /// UDP by sendto(2) and recvfrom(2).
    Datagram,
}

impl SocketKind {
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Datagram];

    pub fn is_tcp(self) -> bool {
        self == Self::Tcp
    }
}

/// How a TCP connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Close {
    /// The client closes first.
    Client,
    /// The server closes first.
    Server,
    /// The client resets it.
    Reset,
}

/// One exchange. The socket has the family of `to`: an IPv4-mapped address needs an IPv6 socket.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Attempt {
    pub kind: SocketKind,
    pub to: SocketAddr,
    /// Source port of the client; 0: any.
    pub source_port: u16,
    /// Size of the message in bytes.
    pub size: usize,
    pub close: Close,
    /// Timeout of each call, in seconds.
    pub patience: u64,
}

impl Attempt {
    /// Returns an attempt with a long timeout: a busy machine may not run a process for many seconds.
    pub fn new(kind: SocketKind, to: SocketAddr) -> Self {
        Self { kind, to, source_port: 0, size: 10, close: Close::Client, patience: 30 }
    }

    /// Returns the same attempt with a short timeout, for cases where no answer is expected.
    pub fn in_vain(self) -> Self {
        Self { patience: 1, ..self }
    }

    pub fn at_port(self, source_port: u16) -> Self {
        Self { source_port, ..self }
    }

    pub fn size(self, size: usize) -> Self {
        Self { size, ..self }
    }

    pub fn close(self, close: Close) -> Self {
        Self { close, ..self }
    }
}

/// An answer, and what the client could see of its sender.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// The server's name.
    pub server: String,
    /// The client's address, as the server saw it.
    pub client: SocketAddr,
    /// The client's own address: getsockname(2).
    pub local: SocketAddr,
    /// getpeername(2).
    pub peer: Option<SocketAddr>,
    /// The source of the answer by recvfrom(2); UDP only.
    pub from: Option<SocketAddr>,
    /// Number of SYNs that the socket has retransmitted, reported with its first answer; TCP only.
    pub syn_retransmits: u32,
}

/// Why an exchange failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Name of the call that failed.
    pub call: String,
    pub errno: Option<i32>,
    pub text: String,
}

impl Failure {
    pub fn of(call: &str) -> impl Fn(io::Error) -> Self {
        move |error| Self { call: call.to_owned(), errno: error.raw_os_error(), text: error.to_string() }
    }
}

/// Traffic that continues: the attempt is repeated, with a new socket each time, or with one socket for all messages.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Load {
    pub attempt: Attempt,
    pub is_one_socket: bool,
    /// Milliseconds between two messages.
    pub pause: u64,
}

impl Load {
    /// Returns a load with five milliseconds between two messages: the machine is shared, and a client has a limited
    /// number of ports.
    pub fn new(attempt: Attempt, is_one_socket: bool) -> Self {
        Self { attempt, is_one_socket, pause: 5 }
    }

    pub fn paced(self, pause: u64) -> Self {
        Self { pause, ..self }
    }
}

/// Result of a load.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Tally {
    /// Number of answers by server.
    pub servers: BTreeMap<String, u64>,
    pub failed: u64,
    /// The first few failures: when the attempt began, in the format of the agent's logs, its source address, and what failed.
    pub failures: Vec<(String, Failure)>,
    /// Number of retransmitted SYNs of the connections that succeeded.
    pub syn_retransmits: u64,
    /// The highest number of retransmitted SYNs of one connection.
    pub most_retransmits: u32,
    /// The first few connections with a retransmitted SYN: milliseconds since the load began, and what was seen.
    pub late: Vec<(u128, Seen)>,
}

/// Result of an operation on held connections.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Held {
    /// Number of connections that are left.
    pub alive: u64,
    /// Number of connections that the operation has lost.
    pub lost: u64,
    /// The first few losses.
    pub failures: Vec<Failure>,
    /// Number of retransmitted SYNs.
    pub syn_retransmits: u64,
    /// Number of connections by server.
    pub servers: BTreeMap<String, u64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    Serve {
        is_tcp: bool,
        addr: SocketAddr,
        name: String,
    },
    /// TCP server for thousands of connections.
    ServeMany {
        addr: SocketAddr,
        name: String,
    },
    Once(Attempt),
    /// Makes the attempt `count` times, each with a new socket.
    Many {
        attempt: Attempt,
        count: usize,
    },
    /// Opens connections that stay open.
    Hold {
        attempt: Attempt,
        count: usize,
    },
    /// Exchanges a message on each held connection.
    Pulse {
        patience: u64,
    },
    Open {
        id: u32,
        attempt: Attempt,
    },
    Close {
        id: u32,
    },
    /// Ends the connection of a UDP socket: `connect(AF_UNSPEC)`.
    Disconnect {
        id: u32,
    },
    Talk {
        id: u32,
        to: Option<SocketAddr>,
    },
    Load(Vec<Load>),
    Stop,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    Done,
    Seen(Seen),
    Tallies(Vec<Tally>),
    Held(Held),
}
