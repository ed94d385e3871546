//! Many connections in one thread: a client that holds them, and a server that answers on all of them.

use std::io::{self, Read as _, Write as _};
use std::net::SocketAddr;
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use super::tcp_info;
use super::wire::{Attempt, Failure, Held};
use super::work::listener;

/// Maximum number of pending connects: more would fill a listener's backlog.
const AT_ONCE: usize = 128;
/// Milliseconds between two checks of the clock.
const TICK: libc::c_int = 50;
/// Number of failures that are reported in full.
const MAX_REPORTED: usize = 5;

/// A client's end of a connection.
struct Connection {
    socket: Socket,
    /// Name of the server that answered first; only this server may answer later.
    server: String,
    text: Vec<u8>,
    is_waiting: bool,
}

/// The connections of one client.
#[derive(Default)]
pub struct Holder {
    connections: Vec<Connection>,
}

impl Holder {
    /// Opens `count` more connections.
    pub fn open(&mut self, attempt: Attempt, count: usize) -> Held {
        let mut report = Held::default();
        let end = Instant::now() + Duration::from_secs(attempt.patience);
        let mut pending: Vec<Connection> = Vec::new();
        let mut begun = 0;
        while begun < count || !pending.is_empty() {
            while begun < count && pending.len() < AT_ONCE {
                begun += 1;
                match begin(attempt.to) {
                    Ok(socket) => pending.push(Connection {
                        socket,
                        server: String::new(),
                        text: Vec::new(),
                        is_waiting: false,
                    }),
                    Err(error) => note(&mut report, &Failure::of("connect")(error)),
                }
            }
            let ready = poll(&pending, libc::POLLOUT);
            for (is_ready, connection) in ready.into_iter().zip(std::mem::take(&mut pending)) {
                if !is_ready {
                    pending.push(connection);
                    continue;
                }
                match connection.socket.take_error() {
                    Ok(None) => {
                        let resent = tcp_info::retransmits(&connection.socket).unwrap_or_default();
                        report.syn_retransmits += u64::from(resent);
                        self.connections.push(connection);
                    }
                    Ok(Some(error)) | Err(error) => note(&mut report, &Failure::of("connect")(error)),
                }
            }
            if Instant::now() > end {
                let late = pending.len() + count - begun;
                (0..late).for_each(|_| note(&mut report, &late_by("connect")));
                break;
            }
        }

        report.alive = self.connections.len() as u64;
        report
    }

    /// Exchanges a message on each connection; one that does not answer in time is counted as lost, and closed.
    pub fn pulse(&mut self, patience: Duration) -> Held {
        let mut report = Held::default();
        let end = Instant::now() + patience;
        let lost = |report: &mut Held, failure: &Failure| note(report, failure);
        self.connections.retain_mut(|connection| {
            connection.is_waiting = true;
            connection.text.clear();
            let sent = connection.socket.write_all(b"pulse\n");
            sent.inspect_err(|_| lost(&mut report, &Failure::of("write")(io::ErrorKind::Other.into())))
                .is_ok()
        });
        while self.connections.iter().any(|connection| connection.is_waiting) {
            if Instant::now() > end {
                self.connections.retain(|connection| {
                    if connection.is_waiting {
                        note(&mut report, &late_by("read"));
                    }
                    !connection.is_waiting
                });
                break;
            }
            let ready = poll(&self.connections, libc::POLLIN);
            let mut ready = ready.into_iter();
            self.connections.retain_mut(|connection| {
                if ready.next() != Some(true) || !connection.is_waiting {
                    return true;
                }
                let answered = connection.read();
                answered.inspect_err(|failure| note(&mut report, failure)).is_ok()
            });
        }
        for connection in &self.connections {
            *report.servers.entry(connection.server.clone()).or_default() += 1;
        }
        report.alive = self.connections.len() as u64;
        report
    }
}

impl Connection {
    fn read(&mut self) -> Result<(), Failure> {
        let mut part = [0; 256];
        let count = match self.socket.read(&mut part) {
            Ok(0) => return Err(Failure::of("read")(io::ErrorKind::UnexpectedEof.into())),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(Failure::of("read")(error)),
        };
        self.text.extend_from_slice(&part[..count]);
        if self.text.last() == Some(&b'\n') {
            self.is_waiting = false;
            let text = String::from_utf8_lossy(&self.text);
            let server = text.split('|').next().unwrap_or_default();
            if self.server.is_empty() {
                server.clone_into(&mut self.server);
            }
            if self.server != server {
                let moved = format!("moved from {} to {server}", self.server);
                return Err(Failure::of("read")(io::Error::other(moved)));
            }
        }
        Ok(())
    }
}

fn late_by(call: &str) -> Failure {
    Failure::of(call)(io::Error::from_raw_os_error(libc::ETIMEDOUT))
}

fn note(report: &mut Held, failure: &Failure) {
    report.lost += 1;
    if report.failures.len() < MAX_REPORTED {
        report.failures.push(failure.clone());
    }
}

fn begin(to: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    match socket.connect(&to.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
        _ => Ok(socket),
    }
}

/// Returns for each connection whether it is ready or broken.
fn poll(connections: &[Connection], events: libc::c_short) -> Vec<bool> {
    let waits = |connection: &Connection| events == libc::POLLOUT || connection.is_waiting;
    let fds = connections.iter().map(|one| if waits(one) { one.socket.as_raw_fd() } else { -1 });
    ready(fds, events)
}

fn ready(fds: impl Iterator<Item = libc::c_int>, events: libc::c_short) -> Vec<bool> {
    let mut fds: Vec<_> = fds.map(|fd| libc::pollfd { fd, events, revents: 0 }).collect();
    // SAFETY: the kernel writes only to the number of elements that is passed.
    unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, TICK) };
    fds.iter().map(|fd| fd.revents != 0).collect()
}

/// Starts a thread that answers on every connection to `addr`.
pub fn serve(addr: SocketAddr, name: String) -> io::Result<()> {
    let socket = listener(addr, Type::STREAM)?;
    socket.listen(4096)?;
    socket.set_nonblocking(true)?;
    std::thread::spawn(move || {
        let mut clients: Vec<(Socket, String)> = Vec::new();
        loop {
            let fds = std::iter::once(socket.as_raw_fd()).chain(clients.iter().map(|one| one.0.as_raw_fd()));
            let ready = ready(fds, libc::POLLIN);
            let mut of_clients = ready.iter().skip(1);
            clients.retain_mut(|(client, from)| {
                of_clients.next() != Some(&true) || answer(client, &name, from).is_ok()
            });
            while let Ok((client, from)) = socket.accept() {
                let from = from.as_socket().map(|from| from.to_string()).unwrap_or_default();
                // A socket that blocks would stop the answers to all other clients.
                if client.set_nonblocking(true).is_ok() {
                    clients.push((client, from));
                }
            }
        }
    });
    Ok(())
}

fn answer(client: &mut Socket, name: &str, from: &str) -> io::Result<()> {
    let mut message = [0; 4096];
    match client.read(&mut message) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        // Answer in one segment, so that one read returns the whole answer.
        Ok(count) if message[..count].ends_with(b"\n") => {
            client.write_all(format!("{name}|{from}|{count}\n").as_bytes())
        }
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        Err(error) => Err(error),
    }
}
