//! The traffic of other programs: this test program, started again inside a namespace, and inside a cgroup if one is given.
//!
//! The test writes one request per line to the peer's standard input, as JSON, and reads one answer per line. The peer ends when
//! its input ends.

mod hold;
mod load;
pub mod tcp_info;
mod wire;
pub mod work;

use std::cell::RefCell;
use std::fs::OpenOptions;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use anyhow::{Context as _, Result, bail};

use proxy_testbed::space::Space;
pub use wire::{Attempt, Close, Failure, Held, Load, Reply, Request, Seen, SocketKind, Tally};

/// The first argument of a peer.
pub const ARGUMENT: &str = "__peer";

/// A running peer.
pub struct Peer {
    child: Child,
    pipes: RefCell<(ChildStdin, BufReader<ChildStdout>)>,
}

/// Result of one exchange.
pub type AttemptResult = Result<Seen, Failure>;

impl Peer {
    /// Starts a peer in `space`, and in `cgroup` if one is given.
    pub fn start(space: &Space, cgroup: Option<&Path>) -> Result<Self> {
        let mut command = space.command("/proc/self/exe");
        command.arg(ARGUMENT).stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(cgroup) = cgroup {
            let file = cgroup.join("cgroup.procs");
            let procs = OpenOptions::new()
                .write(true)
                .open(&file)
                .with_context(|| format!("cannot open {}", file.display()))?;
            let join = move || {
                // SAFETY: one system call on a descriptor that the closure owns.
                let written = unsafe { libc::write(procs.as_raw_fd(), b"0".as_ptr().cast(), 1) };
                if written == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
            };
            // SAFETY: the closure makes one system call.
            unsafe { command.pre_exec(join) };
        }
        let mut child = command.spawn().context("cannot start a peer")?;
        let input = child.stdin.take().context("no input")?;
        let output = child.stdout.take().context("no output")?;
        Ok(Self { child, pipes: RefCell::new((input, BufReader::new(output))) })
    }

    /// Returns the peer's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn ask(&self, request: &Request) -> Result<Result<Reply, Failure>> {
        let mut pipes = self.pipes.borrow_mut();
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        pipes.0.write_all(line.as_bytes()).context("a peer died")?;
        line.clear();
        pipes.1.read_line(&mut line)?;
        serde_json::from_str(&line).with_context(|| format!("a peer said {line:?} to {request:?}"))
    }

    fn seen(&self, request: &Request) -> Result<AttemptResult> {
        match self.ask(request)? {
            Ok(Reply::Seen(seen)) => Ok(Ok(seen)),
            Ok(other) => bail!("unexpected answer {other:?}"),
            Err(failure) => Ok(Err(failure)),
        }
    }

    /// Starts a server on `addr`, which answers with this name.
    pub fn serve(&self, is_tcp: bool, addr: SocketAddr, name: &str) -> Result<()> {
        self.listen(is_tcp, addr, name)?
            .map_err(|failure| anyhow::anyhow!("cannot serve {addr}: {failure:?}"))
    }

    /// Like [`Peer::serve`], but the kernel may refuse the address.
    pub fn listen(&self, is_tcp: bool, addr: SocketAddr, name: &str) -> Result<Result<(), Failure>> {
        Ok(self.ask(&Request::Serve { is_tcp, addr, name: name.to_owned() })?.map(drop))
    }

    /// Opens a socket, exchanges one message, and closes the socket.
    pub fn once(&self, attempt: Attempt) -> Result<AttemptResult> {
        self.seen(&Request::Once(attempt))
    }

    /// Like [`Peer::once`], but a failed exchange is an error.
    pub fn reach(&self, attempt: Attempt) -> Result<Seen> {
        self.once(attempt)?.map_err(|failure| anyhow::anyhow!("{attempt:?}: {failure:?}"))
    }

    /// Like [`Peer::once`], but the exchange has to fail with this error number.
    pub fn fails(&self, attempt: Attempt, errno: i32) -> Result<Failure> {
        match self.once(attempt)? {
            Err(failure) if failure.errno == Some(errno) => Ok(failure),
            other => bail!("{attempt:?}: expected {}, had {other:?}", io::Error::from_raw_os_error(errno)),
        }
    }

    /// Opens a socket that stays open, under an id that the caller selects.
    pub fn open(&self, id: u32, attempt: Attempt) -> Result<()> {
        match self.ask(&Request::Open { id, attempt })? {
            Ok(_) => Ok(()),
            Err(failure) => bail!("{attempt:?}: {failure:?}"),
        }
    }

    /// Closes a socket that [`Peer::open`] has opened.
    pub fn close(&self, id: u32) -> Result<()> {
        self.ask(&Request::Close { id })?.map(drop).map_err(|failure| anyhow::anyhow!("{failure:?}"))
    }

    /// Ends the connection of an open UDP socket (`connect(AF_UNSPEC)`), which sends datagrams from then on.
    pub fn disconnect(&self, id: u32) -> Result<()> {
        self.ask(&Request::Disconnect { id })?.map(drop).map_err(|failure| anyhow::anyhow!("{failure:?}"))
    }

    /// Exchanges a message on an open socket; `to` is for UDP: the destination of sendto(2).
    pub fn talk(&self, id: u32, to: Option<SocketAddr>) -> Result<AttemptResult> {
        self.seen(&Request::Talk { id, to })
    }

    /// Like [`Peer::talk`], but a failed exchange is an error.
    pub fn hears(&self, id: u32, to: Option<SocketAddr>) -> Result<Seen> {
        self.talk(id, to)?.map_err(|failure| anyhow::anyhow!("socket {id} to {to:?}: {failure:?}"))
    }

    /// Starts a server on `addr` for thousands of TCP connections, which answers with this name.
    pub fn serve_many(&self, addr: SocketAddr, name: &str) -> Result<()> {
        self.ask(&Request::ServeMany { addr, name: name.to_owned() })?
            .map(drop)
            .map_err(|failure| anyhow::anyhow!("cannot serve {addr}: {failure:?}"))
    }

    /// Makes the attempt `count` times, one after the other.
    pub fn many(&self, attempt: Attempt, count: usize) -> Result<Tally> {
        match self.ask(&Request::Many { attempt, count })? {
            Ok(Reply::Tallies(mut tallies)) => tallies.pop().context("no tally"),
            other => bail!("unexpected answer {other:?}"),
        }
    }

    /// Opens TCP connections that stay open; the attempt's timeout is for all of them together.
    pub fn hold(&self, attempt: Attempt, count: usize) -> Result<Held> {
        self.held(&Request::Hold { attempt, count })
    }

    /// Exchanges a message on each held connection; `patience` is the timeout in seconds for all of them together.
    pub fn pulse(&self, patience: u64) -> Result<Held> {
        self.held(&Request::Pulse { patience })
    }

    fn held(&self, request: &Request) -> Result<Held> {
        match self.ask(request)? {
            Ok(Reply::Held(held)) => Ok(held),
            other => bail!("unexpected answer {other:?}"),
        }
    }

    /// Starts traffic that continues until [`Peer::stop`].
    pub fn load(&self, loads: &[Load]) -> Result<()> {
        match self.ask(&Request::Load(loads.to_vec()))? {
            Ok(_) => Ok(()),
            Err(failure) => bail!("no traffic: {failure:?}"),
        }
    }

    /// Ends the traffic, and returns a tally of each load, in the order of the loads.
    pub fn stop(&self) -> Result<Vec<Tally>> {
        match self.ask(&Request::Stop)? {
            Ok(Reply::Tallies(tallies)) => Ok(tallies),
            other => bail!("unexpected answer {other:?}"),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The peer may have ended before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
