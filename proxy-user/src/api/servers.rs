//! Several API servers: a request goes to the active one, and to the next ones while no server answers it.
//!
//! The server that answers in the place of the active one is active from then on, until it fails in its turn: an earlier
//! one that comes back is not gone back to, so that no connection is broken for it. A server fails that takes no connection,
//! has no valid certificate, breaks the connection, is silent, or has no better answer than "try again" (429) or a fault of
//! its own (5xx). When all fail, the last answer is the result, and the caller's pauses apply.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::{Request, Response, StatusCode};
use kube::client::Body;
use kube::{Client, Error};
use thiserror::Error as ThisError;
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{debug, info, warn};

use crate::model::ApiServers;
use crate::model::problem::chain;

/// How long a server may take until it begins to answer, where there is another one. A list of 50,000 objects takes it seconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// One server.
#[derive(Clone)]
pub struct Server {
    /// Where it is.
    pub url: String,
    /// What talks to it, and to it alone.
    pub client: Client,
}

/// All of them.
pub struct Servers {
    state: Mutex<State>,
    told: watch::Sender<ApiServers>,
}

struct State {
    servers: Vec<Server>,
    active: Option<String>,
    failovers: u64,
}

/// A server that takes a connection and says nothing.
#[derive(Debug, ThisError)]
#[error("no answer within {} s", PATIENCE.as_secs())]
struct Silent;

impl Servers {
    /// Of at least one, in the order in which they are to be tried. What becomes of them is told to `told`.
    pub fn new(servers: Vec<Server>, told: watch::Sender<ApiServers>) -> Self {
        let servers = Self { state: Mutex::new(State { servers, active: None, failovers: 0 }), told };
        servers.tell(&servers.lock());
        servers
    }

    /// The servers, in their order.
    pub fn list(&self) -> Vec<Server> {
        self.lock().servers.clone()
    }

    /// The servers from now on. The active one stays so while it is among them.
    pub fn replace(&self, servers: Vec<Server>) {
        let mut state = self.lock();
        let active = state.active.take();
        state.active = active.filter(|url| servers.iter().any(|server| server.url == *url));
        state.servers = servers;
        self.tell(&state);
    }

    /// Sends a request to the active server, or to the first one after it that answers.
    pub async fn send(&self, request: Request<Body>) -> Result<Response<Body>, Error> {
        let (began_with, servers) = self.in_order();
        let patience = (servers.len() > 1).then_some(PATIENCE);
        let (mut next, mut last, mut error) = (Some(request), None, None);
        for server in servers {
            let Some(request) = next.take() else { break };
            next = copy(&request);
            let answer = ask(&server.client, request, patience).await;
            let Some(failure) = failure(&answer) else {
                self.answered(&server, began_with.as_deref(), error.as_deref());
                return answer;
            };
            debug!(server = server.url, error = failure, "an API server failed");
            (last, error) = (Some(answer), error.or(Some(failure)));
        }
        last.unwrap_or_else(|| Err(Error::Service("there is no API server".into())))
    }

    /// The active server, and all servers from it on.
    fn in_order(&self) -> (Option<String>, Vec<Server>) {
        let state = self.lock();
        let mut servers = state.servers.clone();
        let at = servers.iter().position(|server| Some(&server.url) == state.active.as_ref());
        servers.rotate_left(at.unwrap_or_default());
        (state.active.clone(), servers)
    }

    /// `server` has answered a request that began with another server, where there is an `error`: that of the first one
    /// that failed.
    fn answered(&self, server: &Server, began_with: Option<&str>, error: Option<&str>) {
        let mut state = self.lock();
        let is_known = state.servers.iter().any(|known| known.url == server.url);
        // Another request has chosen meanwhile.
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
        self.tell(&state);
    }

    fn tell(&self, state: &State) {
        let State { servers, active, failovers } = state;
        self.told.send_replace(ApiServers {
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

async fn ask(
    client: &Client,
    request: Request<Body>,
    patience: Option<Duration>,
) -> Result<Response<Body>, Error> {
    let answer = client.send(request);
    match patience {
        Some(patience) => {
            timeout(patience, answer).await.unwrap_or_else(|_| Err(Error::Service(Silent.into())))
        }
        None => answer.await,
    }
}

/// The same request for another server; `None` for one whose body is a stream, which the agent never sends.
fn copy(request: &Request<Body>) -> Option<Request<Body>> {
    let mut copy = Request::new(request.body().try_clone()?);
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.headers_mut() = request.headers().clone();
    *copy.extensions_mut() = request.extensions().clone();
    Some(copy)
}

/// Why another server should be asked.
fn failure(answer: &Result<Response<Body>, Error>) -> Option<String> {
    match answer {
        Err(error) => Some(chain(error)),
        Ok(answer) => {
            let status = answer.status();
            let is_failure = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
            is_failure.then(|| format!("answered with {status}"))
        }
    }
}

#[cfg(test)]
mod tests;
