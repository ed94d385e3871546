//! Listens, and serves connections within limits, so that clients that open many connections, or send nothing on them,
//! keep no other client from its answer. A new connection is always accepted: if there are too many, the client with the
//! most connections loses its oldest one; of clients with equally many, the one with the oldest connection. All addresses of
//! an IPv6 network of 64 bits are one client.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, ipproto, listen, socket_with, sockopt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

/// The number of connections that may wait to be accepted; the kernel has a limit of its own (`somaxconn`).
const BACKLOG: i32 = 4096;
/// How long a connection may take to send the head of a request, and how long it may be idle between two requests.
const REQUEST_TIMEOUT: Duration = Duration::from_mins(1);
/// How long a client may take to acknowledge data, in milliseconds: then the kernel ends the connection.
const USER_TIMEOUT_MS: u32 = 30_000;
/// The most bytes of a request's head.
const MAX_HEAD: usize = 16 << 10;
/// The pause after a failure to accept a connection.
const PAUSE: Duration = Duration::from_millis(10);
/// The part of all connections that one client may have.
const OF_A_CLIENT: usize = 4;

/// Listens on an address. The unspecified address of either family stands for all addresses of both, as with Go.
pub(super) fn open(address: SocketAddr) -> io::Result<TcpListener> {
    if !address.ip().is_unspecified() {
        return open_one(address, true);
    }
    let both = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), address.port());
    match open_one(both, false) {
        // The kernel has no IPv6.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL)) => {
            open_one(address, true)
        }
        other => other,
    }
}

/// Listens on an address, or, for the unspecified one and with `only`, on all addresses of its family.
pub(super) fn open_one(address: SocketAddr, only: bool) -> io::Result<TcpListener> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    // Accepted sockets inherit these two.
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_user_timeout(&socket, USER_TIMEOUT_MS)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, only)?;
    }
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    TcpListener::from_std(socket.into())
}

/// The address of the client, an extension of each of its requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Client(pub(super) IpAddr);

/// The open connections of one server, or of several that share a limit.
#[derive(Clone, Debug)]
pub(super) struct Connections {
    open: Arc<Mutex<Open>>,
    limit: usize,
}

#[derive(Debug, Default)]
struct Open {
    /// The connections of each client (see [`client_of`]), in the order in which they were accepted.
    of_clients: BTreeMap<IpAddr, BTreeMap<u64, Option<AbortHandle>>>,
    count: usize,
    next: u64,
}

/// Returns the client to which an address belongs. A client may use every address of its IPv6 network.
fn client_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        v4 @ IpAddr::V4(_) => v4,
    }
}

impl Open {
    /// Ends the oldest connection of a client.
    fn end_oldest(&mut self, client: IpAddr) {
        let Some(connections) = self.of_clients.get_mut(&client) else { return };
        if let Some((_, Some(task))) = connections.pop_first() {
            task.abort();
        }
        self.count -= 1;
        if connections.is_empty() {
            self.of_clients.remove(&client);
        }
    }

    /// Returns the client with the most connections; of several, the one with the oldest connection.
    fn largest(&self) -> Option<IpAddr> {
        let most = self
            .of_clients
            .iter()
            .max_by_key(|(_, connections)| (connections.len(), Reverse(connections.keys().next())));
        most.map(|(client, _)| *client)
    }

    /// Ends the oldest connection of the client with the most.
    fn end_one(&mut self) {
        if let Some(largest) = self.largest() {
            self.end_oldest(largest);
        }
    }

    fn remove(&mut self, client: IpAddr, number: u64) {
        let Some(connections) = self.of_clients.get_mut(&client) else { return };
        self.count -= usize::from(connections.remove(&number).is_some());
        if connections.is_empty() {
            self.of_clients.remove(&client);
        }
    }
}

/// An open connection, until this is dropped.
struct Slot {
    connections: Connections,
    client: IpAddr,
    number: u64,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.connections.lock().remove(self.client, self.number);
    }
}

impl Connections {
    /// Allows up to `limit` connections.
    pub(super) fn new(limit: usize) -> Self {
        Self { open: Arc::default(), limit }
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        // A thread that panicked while it held the lock has left a valid list.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for one more connection of a client, and counts it.
    fn admit(&self, client: IpAddr) -> Slot {
        let mut open = self.lock();
        let has = open.of_clients.get(&client).map_or(0, BTreeMap::len);
        if has >= (self.limit / OF_A_CLIENT).max(1) {
            open.end_oldest(client);
        } else if open.count >= self.limit {
            open.end_one();
        }
        let number = open.next;
        open.next += 1;
        open.count += 1;
        open.of_clients.entry(client).or_default().insert(number, None);
        Slot { connections: self.clone(), client, number }
    }

    fn start(&self, tasks: &mut JoinSet<()>, stream: TcpStream, client: IpAddr, router: Router) {
        let router = router.layer(Extension(Client(client.to_canonical())));
        let slot = self.admit(client_of(client));
        let (client, number) = (slot.client, slot.number);
        let task = tasks.spawn(async move {
            let _slot = slot;
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(REQUEST_TIMEOUT).max_buf_size(MAX_HEAD);
            let served = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)).await;
            if let Err(error) = served {
                tracing::trace!(%client, %error, "a connection ended");
            }
        });
        let mut open = self.lock();
        let known = open.of_clients.get_mut(&client).and_then(|connections| connections.get_mut(&number));
        if let Some(known) = known {
            *known = Some(task);
        }
    }

    /// Accepts and serves connections until the future is dropped, which ends them: the next server at the same port may be another
    /// Service's.
    pub(super) async fn serve(&self, listener: &TcpListener, router: &Router) {
        let mut tasks = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                Some(_) = tasks.join_next() => continue,
            };
            match accepted {
                Ok((stream, client)) => self.start(&mut tasks, stream, client.ip(), router.clone()),
                Err(error) => {
                    if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) {
                        self.lock().end_one();
                    }
                    tracing::debug!(%error, "cannot accept a connection");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
