//! Handles several API servers: a request is sent to the active one, and to the next ones until a server answers.
//!
//! Each agent tries the servers in its own random order, after the first one of the list: the agents of a server that fails spread
//! over the others. The server that answers in place of the active one becomes active, until it fails in turn. An earlier server that
//! recovers does not become active again, so that no connection is broken. A server fails if it accepts no connection,
//! has no valid certificate, breaks the connection, does not answer in time, or answers with a server error (5xx). A
//! server that answers "try again later" (429) works: the caller waits as long as it says. If all servers fail, the last
//! answer is the result, and the caller's backoff applies.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::stream::BoxStream;
use futures::{StreamExt as _, TryStreamExt as _};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Bytes, Frame};
use kube::client::Body;
use kube::{Client, Config, Error};
use thiserror::Error as ThisError;
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{debug, info, warn};

use super::connect::Address;
use super::proxy::UnusableProxy;
use proxy_core::model::ApiServers;
use proxy_core::model::problem::chain;

/// Timeout for the start of an answer, if there is another server. A server needs seconds for a list of 50,000 objects.
const PATIENCE: Duration = Duration::from_secs(30);
/// Timeout for the start of an answer of the only server.
const ONLY_PATIENCE: Duration = Duration::from_secs(90);

/// One API server.
#[derive(Clone)]
struct Server {
    address: Address,
    url: String,
    /// The client that connects to this server only.
    client: Client,
}

/// All API servers, and which one is active.
pub struct Servers {
    state: Mutex<State>,
    /// Determines this agent's order of attempts.
    order: RandomState,
    server_status: watch::Sender<ApiServers>,
    /// Changes when the credentials do: then answers that are in progress end.
    renewed: watch::Sender<()>,
    /// Whether the last answer was "401 Unauthorized".
    is_unauthorized: AtomicBool,
}

/// The body of an answer.
pub type ResponseBody = StreamBody<BoxStream<'static, Result<Frame<Bytes>, Error>>>;

struct State {
    /// The credentials; the servers differ only by their addresses.
    config: Config,
    servers: Vec<Server>,
    active: Option<String>,
    failovers: u64,
}

/// Certificates, keys or tokens cannot be used.
#[derive(Debug, ThisError)]
#[error("cannot set up the connection to {server}{}", hint(source))]
pub struct SetupError {
    /// The API server's URL.
    server: String,
    /// The cause.
    source: Box<Error>,
}

impl SetupError {
    /// Whether the cause is the proxy, and not a certificate, a key or a token.
    pub fn is_proxy(&self) -> bool {
        is_proxy(&self.source)
    }
}

fn is_proxy(source: &Error) -> bool {
    matches!(source, Error::Service(source) if source.is::<UnusableProxy>())
}

/// Returns what to check, unless the cause says it.
fn hint(source: &Error) -> &'static str {
    if is_proxy(source) { "" } else { "; check the certificates and credentials in the kubeconfig" }
}

/// A server accepted the connection, but did not answer in time.
#[derive(Debug, ThisError)]
#[error("no answer within {} s", .0.as_secs())]
struct Silent(Duration);

impl Servers {
    /// Creates the list from at least one address; the first one is the first to be tried. Sends each change of the state to
    /// `server_status`.
    pub fn new(
        config: Config,
        addresses: Vec<Address>,
        server_status: watch::Sender<ApiServers>,
    ) -> Result<Self, SetupError> {
        let servers = addresses.into_iter().map(|address| Server::new(&config, address));
        let servers = servers.collect::<Result<_, _>>()?;
        let state = Mutex::new(State { config, servers, active: None, failovers: 0 });
        let servers = Self {
            state,
            order: RandomState::new(),
            server_status,
            renewed: watch::Sender::new(()),
            is_unauthorized: AtomicBool::new(false),
        };
        servers.publish(&servers.lock());
        Ok(servers)
    }

    /// Returns the addresses of the servers, in their order.
    pub fn list(&self) -> Vec<Address> {
        self.lock().servers.iter().map(|server| server.address.clone()).collect()
    }

    /// Replaces the servers; those that are known keep their connections. The active one stays active if it is among them.
    pub fn replace(&self, addresses: Vec<Address>) {
        let mut state = self.lock();
        let known = std::mem::take(&mut state.servers);
        for address in addresses {
            let server = match known.iter().find(|server| server.address == address) {
                Some(server) => Ok(server.clone()),
                None => Server::new(&state.config, address),
            };
            match server {
                Ok(server) => state.servers.push(server),
                Err(error) => debug!(error = chain(&error), "cannot use an endpoint of the API server"),
            }
        }
        let active = state.active.take();
        state.active = active.filter(|url| state.servers.iter().any(|server| server.url == *url));
        self.publish(&state);
    }

    /// Connects to all servers again, with new credentials, and ends the answers that are in progress.
    pub fn renew(&self, config: Config) -> Result<(), SetupError> {
        loop {
            // Without the lock, for which requests would wait: the plugin that a kubeconfig names may take long.
            let addresses = self.list();
            let servers = addresses.iter().map(|address| Server::new(&config, address.clone()));
            let servers = servers.collect::<Result<_, _>>()?;
            let mut state = self.lock();
            if state.servers.iter().map(|server| &server.address).eq(&addresses) {
                state.servers = servers;
                state.config = config;
                drop(state);
                self.renewed.send_replace(());
                return Ok(());
            }
        }
    }

    /// Whether the last answer says that the server does not accept the credentials.
    pub fn is_unauthorized(&self) -> bool {
        self.is_unauthorized.load(Ordering::Relaxed)
    }

    /// Sends a request to the active server, or to the first one after it that answers.
    pub async fn send(&self, request: Request<Body>) -> Result<Response<ResponseBody>, Error> {
        let (began_with, servers, renewed) = self.in_order();
        let patience = if servers.len() > 1 { PATIENCE } else { ONLY_PATIENCE };
        let (mut next, mut last, mut error) = (Some(request), None, None);
        for server in servers {
            let Some(request) = next.take() else { break };
            next = copy(&request);
            let answer = ask(&server.client, request, patience).await;
            let Some(failure) = failure(&answer) else {
                self.answered(&server, began_with.as_deref(), error.as_deref());
                let is_unauthorized =
                    answer.as_ref().is_ok_and(|answer| answer.status() == StatusCode::UNAUTHORIZED);
                self.is_unauthorized.store(is_unauthorized, Ordering::Relaxed);
                return answer.map(|answer| answer.map(|body| until(renewed, body)));
            };
            debug!(server = server.url, error = failure, "an API server failed");
            let answer = answer.map_err(|source| Error::Service(OfServer { url: server.url, source }.into()));
            (last, error) = (Some(answer), error.or(Some(failure)));
        }
        let last = last.unwrap_or_else(|| Err(Error::Service("there is no API server".into())));
        last.map(|answer| answer.map(|body| until(renewed, body)))
    }

    /// Returns the URL of the active server, and all servers in the order of attempts, which begins with the active one: the first
    /// server and then the others in this agent's order, as a cycle.
    fn in_order(&self) -> (Option<String>, Vec<Server>, watch::Receiver<()>) {
        let state = self.lock();
        let mut servers = state.servers.clone();
        if let Some(others) = servers.get_mut(1..) {
            others.sort_by_cached_key(|server| self.order.hash_one(&server.url));
        }
        let at = servers.iter().position(|server| Some(&server.url) == state.active.as_ref());
        servers.rotate_left(at.unwrap_or_default());
        (state.active.clone(), servers, self.renewed.subscribe())
    }

    /// Makes `server` active, because it has answered a request. `began_with`: the active server when the request
    /// began; `error`: the error of the first server that failed, if any did.
    fn answered(&self, server: &Server, began_with: Option<&str>, error: Option<&str>) {
        let mut state = self.lock();
        let is_known = state.servers.iter().any(|known| known.url == server.url);
        // Another request has changed the active server, `server` was removed, or it is active already.
        if state.active.as_deref() != began_with || !is_known || (error.is_none() && began_with.is_some()) {
            return;
        }
        state.active = Some(server.url.clone());
        match error {
            None => info!(server = server.url, "the API server answers"),
            Some(error) => {
                state.failovers += 1;
                let before = began_with.unwrap_or_default();
                warn!(
                    server = server.url,
                    before, error, "changed to another API server, because the previous one does not answer"
                );
            }
        }
        self.publish(&state);
    }

    fn publish(&self, state: &State) {
        let State { servers, active, failovers, .. } = state;
        self.server_status.send_replace(ApiServers {
            servers: servers.iter().map(|server| server.url.clone()).collect(),
            active: active.clone(),
            failovers: *failovers,
        });
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A task that panicked with the lock has left a valid list of servers.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns a body that ends when the credentials change.
fn until(mut renewed: watch::Receiver<()>, body: Body) -> ResponseBody {
    let ends = Box::pin(async move { renewed.changed().await });
    StreamBody::new(body.into_data_stream().map_ok(Frame::data).take_until(ends).boxed())
}

/// The error of a request, with the server that was asked.
#[derive(Debug, thiserror::Error)]
#[error("{}", url.trim_end_matches('/'))]
struct OfServer {
    url: String,
    source: Error,
}

impl Server {
    fn new(config: &Config, address: Address) -> Result<Self, SetupError> {
        let url = address.url.to_string();
        match address.client(config) {
            Ok(client) => Ok(Self { address, url, client }),
            Err(source) => Err(SetupError { server: url, source: Box::new(source) }),
        }
    }
}

async fn ask(client: &Client, request: Request<Body>, patience: Duration) -> Result<Response<Body>, Error> {
    let answer = timeout(patience, client.send(request)).await;
    answer.unwrap_or_else(|_| Err(Error::Service(Silent(patience).into())))
}

/// Returns a copy of the request for another server; `None` if the body is a stream, which the agent never sends.
fn copy(request: &Request<Body>) -> Option<Request<Body>> {
    let mut copy = Request::new(request.body().try_clone()?);
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.headers_mut() = request.headers().clone();
    *copy.extensions_mut() = request.extensions().clone();
    Some(copy)
}

/// Returns why another server should be asked; `None` if the answer is usable.
fn failure(answer: &Result<Response<Body>, Error>) -> Option<String> {
    match answer {
        Err(error) => Some(chain(error)),
        Ok(answer) => {
            let status = answer.status();
            status.is_server_error().then(|| format!("answered with {status}"))
        }
    }
}

#[cfg(test)]
mod tests;
