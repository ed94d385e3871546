//! What a test and its peers say to each other.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// A kind of socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    Tcp,
    /// UDP after connect(2).
    Udp,
    /// UDP by sendto(2) and recvfrom(2).
    Datagram,
}

impl Kind {
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

/// One exchange. The socket has the family of `to`: an IPv4-mapped address makes an IPv6 socket.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Attempt {
    pub kind: Kind,
    pub to: SocketAddr,
    /// 0: any.
    pub source_port: u16,
    /// Bytes of the message.
    pub size: usize,
    pub close: Close,
    /// Seconds that each call may take.
    pub patience: u64,
}

impl Attempt {
    /// A busy machine may not run a process for many seconds.
    pub fn new(kind: Kind, to: SocketAddr) -> Self {
        Self { kind, to, source_port: 0, size: 10, close: Close::Client, patience: 30 }
    }

    /// Where no answer is expected.
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

/// An answer, and what the client could see of who gave it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// The server's name.
    pub server: String,
    /// Whom the server saw.
    pub client: SocketAddr,
    /// The client's own address.
    pub local: SocketAddr,
    /// getpeername(2).
    pub peer: Option<SocketAddr>,
    /// Where recvfrom(2) says the answer is from; UDP only.
    pub from: Option<SocketAddr>,
    /// SYNs that the socket sent again, told with its first answer; TCP only.
    pub syn_retransmits: u32,
}

/// What failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The call.
    pub call: String,
    pub errno: Option<i32>,
    pub text: String,
}

impl Failure {
    pub fn of(call: &str) -> impl Fn(io::Error) -> Self {
        move |error| Self { call: call.to_owned(), errno: error.raw_os_error(), text: error.to_string() }
    }
}

/// Traffic that goes on: the attempt again and again, each time or only once with a new socket.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Load {
    pub attempt: Attempt,
    pub is_one_socket: bool,
    /// Milliseconds between two messages.
    pub pause: u64,
}

impl Load {
    /// The machine is shared, and a client has only so many ports: five milliseconds between two messages.
    pub fn new(attempt: Attempt, is_one_socket: bool) -> Self {
        Self { attempt, is_one_socket, pause: 5 }
    }

    pub fn paced(self, pause: u64) -> Self {
        Self { pause, ..self }
    }
}

/// What became of a load.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Tally {
    /// Answers by server.
    pub servers: BTreeMap<String, u64>,
    pub failed: u64,
    /// The first few: when each attempt began, as logs of the agent have it, from where, and what failed.
    pub failures: Vec<(String, Failure)>,
    /// SYNs that were sent again, however the connections fared.
    pub syn_retransmits: u64,
    /// The first few connections that had to: milliseconds since the load began, and what was seen.
    pub late: Vec<(u128, Seen)>,
}

/// What became of connections that are held.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Held {
    /// Those that are left.
    pub alive: u64,
    /// Those that the call lost.
    pub lost: u64,
    /// The first few losses.
    pub failures: Vec<Failure>,
    /// SYNs that were sent again.
    pub syn_retransmits: u64,
    /// Connections by server.
    pub servers: BTreeMap<String, u64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    Serve {
        is_tcp: bool,
        addr: SocketAddr,
        name: String,
    },
    /// TCP, for thousands of connections.
    ServeMany {
        addr: SocketAddr,
        name: String,
    },
    Once(Attempt),
    /// The same so many times, each with a new socket.
    Many {
        attempt: Attempt,
        count: usize,
    },
    /// Opens connections that stay.
    Hold {
        attempt: Attempt,
        count: usize,
    },
    /// Exchanges a message on each connection that is held.
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
