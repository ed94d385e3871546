//! Requests of a client: each kind of request detects lost connections in another way.

use std::fmt;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

/// Time limit of a TCP connect.
const LIMIT: Duration = Duration::from_secs(2);
/// Time limit of an answer on a connection; on a small machine, servers wait for a CPU.
const ANSWER: Duration = Duration::from_secs(20);
/// Time limit of an answer to a datagram, which is not retransmitted.
const DATAGRAM: Duration = Duration::from_secs(5);
/// Offset of `tcpi_total_retrans` in `struct tcp_info`, which only grows at its end (`include/uapi/linux/tcp.h`).
const TOTAL_RETRANS: usize = 100;

/// How a client sends its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    /// On a new TCP connection each time.
    New,
    /// On the same TCP connection each time.
    Long,
    /// From a new UDP socket each time.
    Udp,
    /// From the same UDP socket each time.
    Flow,
    /// On a new TCP connection each time, to a Service with session affinity: the same pod has to answer.
    Sticky,
}

impl Kind {
    const ALL: [(Self, &'static str); 5] = [
        (Self::New, "new"),
        (Self::Long, "long"),
        (Self::Udp, "udp"),
        (Self::Flow, "flow"),
        (Self::Sticky, "sticky"),
    ];
}

/// Kind of request, address, and prefix of the names of the pods that may answer: `new/10.96.0.80:80=echo-`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub(super) kind: Kind,
    pub(super) address: SocketAddr,
    name: String,
}

impl Target {
    /// Returns a target; an error if `address` is not an address with a port.
    pub(super) fn new(kind: Kind, address: &str, name: &str) -> Result<Self> {
        let address = address.parse().with_context(|| format!("`{address}` is no address with a port"))?;
        Ok(Self { kind, address, name: name.to_owned() })
    }
}

impl FromStr for Target {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let parts = text.split_once('/').and_then(|(kind, rest)| Some((kind, rest.split_once('=')?)));
        let (kind, (address, name)) = parts.context("a target is KIND/ADDRESS:PORT=NAME")?;
        let kind = Kind::ALL.into_iter().find(|(_, word)| *word == kind).context("an unknown kind")?.0;
        Self::new(kind, address, name)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = Kind::ALL.into_iter().find(|(kind, _)| *kind == self.kind).map_or("", |(_, word)| word);
        write!(f, "{word}/{}={}", self.address, self.name)
    }
}

/// An answer and its connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// Name of the pod that answered.
    pub by: String,
    /// Source address of the client, with which the flow can be found in a trace.
    pub from: SocketAddr,
    /// Number of retransmitted SYNs of the connection.
    pub syns: u32,
    /// Whether another pod answered before although the pod must not change.
    pub moved: bool,
}

/// State of one client of a target.
#[derive(Debug)]
pub(super) struct Prober<'a> {
    target: &'a Target,
    stream: Option<BufReader<TcpStream>>,
    socket: Option<UdpSocket>,
    before: Option<String>,
}

impl<'a> Prober<'a> {
    pub(super) fn new(target: &'a Target) -> Self {
        Self { target, stream: None, socket: None, before: None }
    }

    /// Sends one request.
    pub(super) fn ask(&mut self) -> Result<Answer> {
        let asked = match self.target.kind {
            Kind::New | Kind::Sticky => once(self.target.address),
            Kind::Long => self.on_stream(),
            Kind::Udp => socket(self.target.address).and_then(|socket| datagram(&socket)),
            Kind::Flow => self.on_socket(),
        };
        let Reply { by, syns, from } = asked.inspect_err(|_| (self.stream, self.socket) = (None, None))?;
        ensure!(by.starts_with(&self.target.name), "`{by}` answered");
        let stays = matches!(self.target.kind, Kind::Long | Kind::Flow | Kind::Sticky);
        let moved = stays && self.before.as_ref().is_some_and(|before| *before != by);
        self.before = Some(by.clone());
        Ok(Answer { by, from, syns, moved })
    }

    fn on_stream(&mut self) -> Result<Reply> {
        let mut syns = 0;
        if self.stream.is_none() {
            let (stream, again) = connect(self.target.address)?;
            // A new connection may have another server.
            (self.stream, self.before, syns) = (Some(BufReader::new(stream)), None, again);
        }
        let stream = self.stream.as_mut().context("no connection")?;
        let from = stream.get_ref().local_addr().context("who are we")?;
        let by = keep_asking(stream).with_context(|| format!("from {from}"))?;
        Ok(Reply { by, syns, from })
    }

    fn on_socket(&mut self) -> Result<Reply> {
        if self.socket.is_none() {
            (self.socket, self.before) = (Some(socket(self.target.address)?), None);
        }
        datagram(self.socket.as_ref().context("no socket")?)
    }
}

/// A server's answer, and the connection it came on.
struct Reply {
    by: String,
    syns: u32,
    from: SocketAddr,
}

fn connect(address: SocketAddr) -> Result<(TcpStream, u32)> {
    let stream = TcpStream::connect_timeout(&address, LIMIT).context("connect")?;
    let syns = retransmits(&stream).context("TCP_INFO")?;
    stream.set_read_timeout(Some(ANSWER)).context("set a limit")?;
    Ok((stream, syns))
}

/// Sends one request on a new connection.
fn once(address: SocketAddr) -> Result<Reply> {
    let (mut stream, syns) = connect(address)?;
    let from = stream.local_addr().context("who are we")?;
    let name = (|| {
        stream.write_all(b"GET /hostname HTTP/1.0\r\n\r\n").context("ask")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).context("listen")?;
        ensure!(answer.starts_with("HTTP/1") && answer.contains(" 200 "), "an answer of `{answer}`");
        Ok(answer.rsplit("\r\n").next().unwrap_or_default().to_owned())
    })();
    Ok(Reply { by: name.with_context(|| format!("from {from}"))?, syns, from })
}

/// Sends one request on a connection that stays open.
fn keep_asking(stream: &mut BufReader<TcpStream>) -> Result<String> {
    stream.get_mut().write_all(b"GET /hostname HTTP/1.1\r\nHost: pod\r\n\r\n").context("ask")?;
    let (mut size, mut line) = (0, String::new());
    loop {
        line.clear();
        ensure!(stream.read_line(&mut line).context("listen")? > 0, "the server closed the connection");
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            size = value.trim().parse().context("an answer's length")?;
        }
        if line.trim().is_empty() {
            break;
        }
    }
    let mut body = vec![0; size];
    stream.read_exact(&mut body).context("listen")?;
    String::from_utf8(body).context("an answer that is no text")
}

fn socket(address: SocketAddr) -> Result<UdpSocket> {
    let own = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(own).context("bind")?;
    socket.connect(address).context("connect")?;
    socket.set_read_timeout(Some(DATAGRAM)).context("set a limit")?;
    Ok(socket)
}

fn datagram(socket: &UdpSocket) -> Result<Reply> {
    let from = socket.local_addr().context("who are we")?;
    let mut buffer = [0; 256];
    let received = socket.send(b"hostname").and_then(|_| socket.recv(&mut buffer));
    let size = received.with_context(|| format!("from {from}"))?;
    let by = String::from_utf8_lossy(buffer.get(..size).unwrap_or_default()).into_owned();
    Ok(Reply { by, syns: 0, from })
}

/// Returns how many segments the socket has retransmitted; right after `connect`, these are SYNs.
fn retransmits(socket: &TcpStream) -> io::Result<u32> {
    let mut info = [0u8; TOTAL_RETRANS + 4];
    let mut size = info.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `size` bytes, which is the size of the buffer.
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
    info.last_chunk().copied().map(u32::from_ne_bytes).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn target(kind: Kind, address: SocketAddr) -> Target {
        Target::new(kind, &address.to_string(), "pod-").unwrap()
    }

    #[test]
    fn an_answer_of_the_right_one_counts_and_nothing_else_does() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = target(Kind::New, server.local_addr().unwrap());
        let answers = std::thread::spawn(move || {
            for answer in ["200 OK\r\n\r\npod-1", "200 OK\r\n\r\nother-1", "503 No\r\n\r\npod-1"] {
                let (mut stream, _) = server.accept().unwrap();
                let _ = stream.read(&mut [0; 64]).unwrap();
                stream.write_all(format!("HTTP/1.0 {answer}").as_bytes()).unwrap();
            }
        });
        let mut prober = Prober::new(&target);
        let answer = prober.ask().unwrap();
        assert_eq!((answer.by.as_str(), answer.syns, answer.moved), ("pod-1", 0, false));
        assert!(format!("{:#}", prober.ask().unwrap_err()).contains("`other-1` answered"));
        assert!(prober.ask().is_err());
        answers.join().unwrap();
        assert!(prober.ask().is_err());
    }

    #[test]
    fn a_long_connection_is_one_connection_until_it_breaks() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = target(Kind::Long, server.local_addr().unwrap());
        let answers = std::thread::spawn(move || {
            for _ in 0..2 {
                let (mut stream, _) = server.accept().unwrap();
                for name in ["pod-1", "pod-2"] {
                    let _ = stream.read(&mut [0; 64]).unwrap();
                    let text = format!("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n{name}");
                    stream.write_all(text.as_bytes()).unwrap();
                }
            }
        });
        let mut prober = Prober::new(&target);
        assert!(!prober.ask().unwrap().moved && prober.ask().unwrap().moved);
        assert!(prober.ask().is_err(), "the server has closed it");
        assert!(!prober.ask().unwrap().moved, "another connection may go to another pod");
        assert!(prober.ask().unwrap().moved);
        answers.join().unwrap();
    }

    #[test]
    fn a_datagram_that_gets_no_answer_fails() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        let (again, once) = (target(Kind::Flow, address), target(Kind::Udp, address));
        let answers = std::thread::spawn(move || {
            let mut buffer = [0; 64];
            let mut seen = Vec::new();
            for _ in 0..4 {
                let (size, from) = server.recv_from(&mut buffer).unwrap();
                assert_eq!(buffer[..size], *b"hostname");
                server.send_to(b"pod-1", from).unwrap();
                seen.push(from);
            }
            seen
        });
        let (mut again, mut once) = (Prober::new(&again), Prober::new(&once));
        for prober in [&mut again, &mut once] {
            assert_eq!([prober.ask().unwrap().by, prober.ask().unwrap().by], ["pod-1"; 2]);
        }
        let seen = answers.join().unwrap();
        assert!(seen[0] == seen[1] && seen[2] != seen[3], "{seen:?}");
        assert!(once.ask().is_err(), "no server is there");
    }

    #[test]
    fn a_target_reads_as_it_is_written() {
        for text in ["new/10.96.0.80:80=echo-", "flow/[fd96::81]:8081=stay-"] {
            assert_eq!(text.parse::<Target>().unwrap().to_string(), text);
        }
        for text in
            ["10.96.0.80:80=echo-", "new/10.96.0.80=echo-", "new/10.96.0.80:80", "old/10.96.0.80:80=a"]
        {
            assert!(text.parse::<Target>().is_err(), "{text}");
        }
    }
}
