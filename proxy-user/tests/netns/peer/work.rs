//! The peer's side: sockets and servers.

use std::collections::BTreeMap;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::process::ExitCode;
use std::time::Duration;

use proxy_testbed::Family;
use socket2::{Domain, Socket, Type};

use super::hold::{self, Holder};
use super::load::{self, Traffic};
use super::tcp_info;
use super::wire::{Attempt, Close, Failure, Reply, Request, Seen, SocketKind};

/// The last byte of a message.
const END: u8 = b'\n';
/// The first byte of a message after which the server closes the connection.
const LAST: u8 = b'q';

/// Answers requests until the input ends.
pub fn run() -> ExitCode {
    let mut state = State::default();
    for line in io::stdin().lines().map_while(Result::ok) {
        let answer = match serde_json::from_str(&line) {
            Ok(request) => answer(request, &mut state),
            Err(error) => Err(Failure::of("parse")(error.into())),
        };
        let Ok(text) = serde_json::to_string(&answer) else { return ExitCode::FAILURE };
        if writeln!(io::stdout(), "{text}").is_err() {
            break;
        }
    }
    ExitCode::SUCCESS
}

/// The open sockets and the traffic of a peer.
#[derive(Default)]
struct State {
    sockets: BTreeMap<u32, Conversation>,
    traffic: Option<Traffic>,
    holder: Holder,
}

fn answer(request: Request, state: &mut State) -> Result<Reply, Failure> {
    let State { sockets, traffic, holder } = state;
    match request {
        Request::Serve { is_tcp, addr, name } => {
            let result = if is_tcp { serve_tcp(addr, name) } else { serve_udp(addr, name) };
            result.map_err(Failure::of("listen"))?;
        }
        Request::ServeMany { addr, name } => hold::serve(addr, name).map_err(Failure::of("listen"))?,
        Request::Many { attempt, count } => return Ok(Reply::Tallies(vec![load::many(attempt, count)])),
        Request::Hold { attempt, count } => return Ok(Reply::Held(holder.open(attempt, count))),
        Request::Pulse { patience } => return Ok(Reply::Held(holder.pulse(Duration::from_secs(patience)))),
        Request::Once(attempt) => return once(attempt).map(Reply::Seen),
        Request::Open { id, attempt } => {
            sockets.insert(id, Conversation::open(attempt)?);
        }
        Request::Close { id } => {
            sockets.remove(&id);
        }
        Request::Disconnect { id } => {
            let gone = || Failure::of("find")(io::ErrorKind::NotFound.into());
            sockets.get_mut(&id).ok_or_else(gone)?.disconnect().map_err(Failure::of("connect"))?;
        }
        Request::Talk { id, to } => {
            let gone = || Failure::of("find")(io::ErrorKind::NotFound.into());
            return sockets.get_mut(&id).ok_or_else(gone)?.talk(to, false).map(Reply::Seen);
        }
        Request::Load(loads) => *traffic = Some(Traffic::start(loads)),
        Request::Stop => {
            return Ok(Reply::Tallies(traffic.take().map(Traffic::stop).unwrap_or_default()));
        }
    }
    Ok(Reply::Done)
}

/// Opens a socket, exchanges one message, and closes the socket.
pub fn once(attempt: Attempt) -> Result<Seen, Failure> {
    let mut conversation = Conversation::open(attempt)?;
    let seen = conversation.talk(None, attempt.close == Close::Server)?;
    conversation.close()?;
    Ok(seen)
}

/// A client's socket.
pub struct Conversation {
    attempt: Attempt,
    socket: Socket,
    /// Retransmitted SYNs that were not reported yet.
    syn_retransmits: u32,
}

impl Conversation {
    pub fn open(attempt: Attempt) -> Result<Self, Failure> {
        let Attempt { kind, to, source_port, patience, .. } = attempt;
        let patience = Duration::from_secs(patience);
        let make = || {
            let kind = if kind.is_tcp() { Type::STREAM } else { Type::DGRAM };
            let socket = Socket::new(Domain::for_address(to), kind, None)?;
            socket.set_read_timeout(Some(patience))?;
            socket.set_write_timeout(Some(patience))?;
            if source_port != 0 {
                let any = Family::of(to.ip()).unspecified();
                socket.set_reuse_address(true)?;
                socket.bind(&SocketAddr::new(any, source_port).into())?;
            }
            Ok(socket)
        };
        let socket = make().map_err(Failure::of("socket"))?;
        match kind {
            SocketKind::Tcp => {
                socket.connect_timeout(&to.into(), patience).map_err(Failure::of("connect"))?;
            }
            SocketKind::Udp => socket.connect(&to.into()).map_err(Failure::of("connect"))?,
            SocketKind::Datagram => {}
        }
        let resent = if kind.is_tcp() { tcp_info::retransmits(&socket) } else { Ok(0) };
        Ok(Self { attempt, socket, syn_retransmits: resent.map_err(Failure::of("TCP_INFO"))? })
    }

    /// Returns the socket's own address, by which it is found in the agent's flows.
    pub fn local(&self) -> String {
        let local = self.socket.local_addr().ok().and_then(|local| local.as_socket());
        local.map_or_else(|| "no address".to_owned(), |local| local.to_string())
    }

    /// Ends the connection of a UDP socket.
    fn disconnect(&mut self) -> io::Result<()> {
        // SAFETY: the kernel reads the family of a whole, zeroed address.
        let result = unsafe {
            let unspecified: libc::sockaddr_storage = std::mem::zeroed();
            let length = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
            libc::connect(self.socket.as_raw_fd(), (&raw const unspecified).cast(), length)
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        self.attempt.kind = SocketKind::Datagram;
        Ok(())
    }

    /// Sends a message and waits for its answer. With `is_last`, the server closes the connection after the answer.
    pub fn talk(&mut self, to: Option<SocketAddr>, is_last: bool) -> Result<Seen, Failure> {
        let mut message = vec![b'x'; self.attempt.size];
        message.push(END);
        if is_last && let Some(first) = message.first_mut() {
            *first = LAST;
        }
        let (text, from) = match self.attempt.kind {
            SocketKind::Tcp => (self.exchange(&message)?, None),
            SocketKind::Udp if to.is_none() => {
                self.socket.send(&message).map_err(Failure::of("send"))?;
                self.receive()?
            }
            SocketKind::Udp | SocketKind::Datagram => {
                let to = to.unwrap_or(self.attempt.to);
                self.socket.send_to(&message, &to.into()).map_err(Failure::of("sendto"))?;
                self.receive()?
            }
        };
        let peer = self.socket.peer_addr().ok().and_then(|addr| addr.as_socket());
        let syn_retransmits = std::mem::take(&mut self.syn_retransmits);
        let local = self.socket.local_addr().ok().and_then(|addr| addr.as_socket());
        let mut parts = text.trim_end().split('|');
        let mut seen = || {
            let (server, client) = (parts.next()?.to_owned(), parts.next()?.parse().ok()?);
            let is_whole = parts.next()?.parse() == Ok(message.len());
            is_whole.then_some(Seen { server, client, local: local?, peer, from, syn_retransmits })
        };
        seen().ok_or_else(|| Failure::of("read")(io::Error::other(format!("answer {text:?}"))))
    }

    fn exchange(&mut self, message: &[u8]) -> Result<String, Failure> {
        self.socket.write_all(message).map_err(Failure::of("write"))?;
        let mut text = Vec::new();
        while text.last() != Some(&END) {
            let mut part = [0; 256];
            let count = self.socket.read(&mut part).map_err(Failure::of("read"))?;
            if count == 0 {
                return Err(Failure::of("read")(io::ErrorKind::UnexpectedEof.into()));
            }
            text.extend_from_slice(&part[..count]);
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    fn receive(&self) -> Result<(String, Option<SocketAddr>), Failure> {
        let socket: UdpSocket = self.socket.try_clone().map_err(Failure::of("dup"))?.into();
        let mut buffer = [0; 256];
        let (count, from) = socket.recv_from(&mut buffer).map_err(Failure::of("recvfrom"))?;
        Ok((String::from_utf8_lossy(&buffer[..count]).into_owned(), Some(from)))
    }

    fn close(mut self) -> Result<(), Failure> {
        match self.attempt.close {
            _ if !self.attempt.kind.is_tcp() => {}
            Close::Client => {}
            Close::Reset => {
                self.socket.set_linger(Some(Duration::ZERO)).map_err(Failure::of("linger"))?;
            }
            Close::Server => {
                // Wait for the server's FIN before this end closes.
                let count = self.socket.read(&mut [0; 1]).map_err(Failure::of("read"))?;
                if count != 0 {
                    return Err(Failure::of("read")(io::Error::other("more than the answer")));
                }
            }
        }
        Ok(())
    }
}

/// Returns a socket that is bound, but does not listen yet.
pub fn listener(addr: SocketAddr, kind: Type) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(addr), kind, None)?;
    if addr.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_reuse_address(true)?;
    socket.bind(&addr.into())?;
    Ok(socket)
}

fn serve_tcp(addr: SocketAddr, name: String) -> io::Result<()> {
    let socket = listener(addr, Type::STREAM)?;
    socket.listen(1024)?;
    let listener: std::net::TcpListener = socket.into();
    std::thread::spawn(move || {
        while let Ok((stream, client)) = listener.accept() {
            let name = name.clone();
            // A client that closes early ends only its own conversation.
            std::thread::spawn(move || converse(stream, client, &name));
        }
    });
    Ok(())
}

fn converse(mut stream: TcpStream, client: SocketAddr, name: &str) -> io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut message = Vec::new();
    while reader.read_until(END, &mut message)? > 0 {
        // As long as the message, so that large messages show large packets in both directions.
        let mut answer = format!("{name}|{client}|{}", message.len()).into_bytes();
        answer.resize(answer.len().max(message.len() - 1), b' ');
        answer.push(END);
        stream.write_all(&answer)?;
        if message.first() == Some(&LAST) {
            break;
        }
        message.clear();
    }
    Ok(())
}

fn serve_udp(addr: SocketAddr, name: String) -> io::Result<()> {
    let socket: UdpSocket = listener(addr, Type::DGRAM)?.into();
    std::thread::spawn(move || {
        let mut message = vec![0; 65536];
        loop {
            // An ICMP error about an earlier answer must not end the server.
            let Ok((count, client)) = socket.recv_from(&mut message) else { continue };
            let _ = socket.send_to(format!("{name}|{client}|{count}").as_bytes(), client);
        }
    });
    Ok(())
}
