//! Handles several API servers: a request is sent to the active one, and to the next ones until a server answers.
//!
//! The server that answers in place of the active one becomes active, until it fails in turn. An earlier server that
//! recovers does not become active again, so that no connection is broken. A server fails if it accepts no connection,
//! has no valid certificate, breaks the connection, does not answer in time, or answers only "try again" (429) or with
//! a server error (5xx). If all servers fail, the last answer is the result, and the caller's backoff applies.

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

/// Timeout for the start of an answer, if there is another server. A server needs seconds for a list of 50,000 objects.
const PATIENCE: Duration = Duration::from_secs(30);

/// One API server.
#[derive(Clone)]
pub struct Server {
    /// Its URL.
    pub url: String,
    /// The client that connects to this server only.
    pub client: Client,
}

/// All API servers, and which one is active.
pub struct Servers {
    state: Mutex<State>,
    told: watch::Sender<ApiServers>,
}

struct State {
    servers: Vec<Server>,
    active: Option<String>,
    failovers: u64,
}

/// A server accepted the connection, but did not answer in time.
#[derive(Debug, ThisError)]
#[error("no answer within {} s", PATIENCE.as_secs())]
struct Silent;

impl Servers {
    /// Creates the list from at least one server, in the order in which they are to be tried. Sends each change of the
    /// state to `told`.
    pub fn new(servers: Vec<Server>, told: watch::Sender<ApiServers>) -> Self {
        let servers = Self { state: Mutex::new(State { servers, active: None, failovers: 0 }), told };
        servers.tell(&servers.lock());
        servers
    }

    /// Returns the servers, in their order.
    pub fn list(&self) -> Vec<Server> {
        self.lock().servers.clone()
    }

    /// Replaces the servers. The active one stays active if it is among them.
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

    /// Returns the URL of the active server, and all servers in the order of attempts, which begins with the active one.
    fn in_order(&self) -> (Option<String>, Vec<Server>) {
        let state = self.lock();
        let mut servers = state.servers.clone();
        let at = servers.iter().position(|server| Some(&server.url) == state.active.as_ref());
        servers.rotate_left(at.unwrap_or_default());
        (state.active.clone(), servers)
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
            let is_failure = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
            is_failure.then(|| format!("answered with {status}"))
        }
    }
}

#[cfg(test)]
mod tests;
