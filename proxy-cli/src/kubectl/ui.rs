//! `kubectl ballast ui`: serves the page of the whole cluster on this machine. The events of all agents' pages become one
//! stream; each event has the field `node`, and the script of the page merges them.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::http::StatusCode;
use futures::{StreamExt as _, stream};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;

use super::cluster::{Agent, Cluster};
use super::error::KubectlError;
use super::forward;
use crate::page::{self, Events, HistoryAnswer, PageQuery, Refusal, Source};
use proxy_core::model::plural::plural;

/// Maximum number of connected browsers: each one is a listener at every agent, and an agent accepts 16 listeners.
const LISTENERS: usize = 4;
/// Maximum number of events that wait for a browser.
const QUEUE: usize = 64;
/// Time between two searches for agents, and between two attempts to reach an agent.
const LOOK: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_secs(5);
/// Maximum number of nodes that are asked for their history at the same time.
const AT_ONCE: usize = 32;
/// Maximum length of an event, in bytes.
const MOST: usize = 16 << 20;

/// Serves the page until Ctrl-C.
pub(super) async fn run(cluster: Cluster, port: u16, out: &mut impl Write) -> Result<(), KubectlError> {
    let agents = cluster.agents().await?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let listener = TcpListener::bind(address).await;
    let listener = listener.map_err(|source| KubectlError::Listen { address, source })?;
    let address = listener.local_addr()?;
    writeln!(out, "http://{address}/ shows {}; press Ctrl-C to stop", plural(agents.len(), "node"))?;
    out.flush()?;
    let router = page::router(Nodes::new(cluster), Vec::new());
    tokio::select! {
        served = axum::serve(listener, router) => Ok(served?),
        ended = tokio::signal::ctrl_c() => Ok(ended?),
    }
}

/// The agents of a cluster as the source of the page's data.
#[derive(Clone)]
pub(super) struct Nodes {
    cluster: Cluster,
    listeners: Arc<Semaphore>,
}

impl Nodes {
    pub(super) fn new(cluster: Cluster) -> Self {
        Self { cluster, listeners: Arc::new(Semaphore::new(LISTENERS)) }
    }

    /// Returns the history of one agent.
    async fn history_of(&self, agent: &Agent, path: &str) -> Result<HistoryAnswer, String> {
        let asked = async {
            let response = forward::get(&self.cluster, agent, path).await?;
            let status = response.status;
            let text = response.text().await?;
            if status != StatusCode::OK {
                return Err(text);
            }
            serde_json::from_str(&text).map_err(|error| format!("cannot parse the answer: {error}"))
        };
        self.cluster.within(asked).await
    }
}

impl Source for Nodes {
    async fn events(&self, query: PageQuery) -> Result<Events, Refusal> {
        let permit = Arc::clone(&self.listeners).try_acquire_owned();
        let permit = permit.map_err(|_| Refusal::TooMany { most: LISTENERS })?;
        let (sender, events) = mpsc::channel(QUEUE);
        tokio::spawn(follow_all(self.cluster.clone(), path("events", &query), sender));
        let next = |(mut events, permit): (mpsc::Receiver<String>, OwnedSemaphorePermit)| async {
            Some((events.recv().await?, (events, permit)))
        };
        Ok(stream::unfold((events, permit), next).boxed())
    }

    async fn history(&self, service: String) -> Result<HistoryAnswer, Refusal> {
        let unreachable = |error: KubectlError| Refusal::Unreachable(error.to_string());
        let agents = self.cluster.agents().await.map_err(unreachable)?;
        let path = path("history", &PageQuery { service, ..PageQuery::default() });
        let ask = |agent: Agent| {
            let path = &path;
            async move { self.history_of(&agent, path).await }
        };
        let answers: Vec<_> = stream::iter(agents).map(ask).buffered(AT_ONCE).collect().await;
        let (mut sum, mut failure, mut has_some) = (HistoryAnswer::default(), None, false);
        let now = SystemTime::now();
        for answer in answers {
            match answer {
                // A history with another --page-history, or of a node with a wrong clock, cannot be added.
                Ok(answer) => has_some |= sum.add(&answer, now),
                Err(error) => failure = Some(error),
            }
        }
        match failure {
            Some(failure) if !has_some => Err(Refusal::Unreachable(failure)),
            _ => Ok(sum),
        }
    }
}

/// Returns a path of the agents' pages, with its query.
fn path(name: &str, query: &PageQuery) -> String {
    let encode = |text| utf8_percent_encode(text, NON_ALPHANUMERIC);
    format!("/page/{name}?filter={}&service={}", encode(&query.filter), encode(&query.service))
}

/// Follows all agents, including those that start later, until the browser disconnects.
async fn follow_all(cluster: Cluster, path: String, events: mpsc::Sender<String>) {
    let mut followed: BTreeMap<Agent, AbortOnDropHandle<()>> = BTreeMap::new();
    loop {
        // If the API server does not answer, the known agents are still followed.
        if let Ok(agents) = cluster.agents().await {
            let left: Vec<_> = followed.keys().filter(|agent| !agents.contains(agent)).cloned().collect();
            for agent in left {
                followed.remove(&agent);
                if !agents.iter().any(|other| other.node == agent.node) {
                    let gone = serde_json::json!({ "node": agent.node, "gone": true });
                    let _ = events.send(gone.to_string()).await;
                }
            }
            for agent in agents {
                let begin = || {
                    let follow = follow(cluster.clone(), agent.clone(), path.clone(), events.clone());
                    AbortOnDropHandle::new(tokio::spawn(follow))
                };
                followed.entry(agent.clone()).or_insert_with(begin);
            }
        }
        tokio::select! {
            () = sleep(LOOK) => {}
            () = events.closed() => return,
        }
    }
}

/// Forwards the events of one agent, and reconnects whenever the connection ends.
async fn follow(cluster: Cluster, agent: Agent, path: String, events: mpsc::Sender<String>) {
    loop {
        let error = match pass_on(&cluster, &agent, &path, &events).await {
            Ok(()) => "the agent closed the stream; retrying".to_owned(),
            Err(error) => error,
        };
        let failure = serde_json::json!({ "node": agent.node, "failure": error });
        if events.send(failure.to_string()).await.is_err() {
            return;
        }
        sleep(RETRY).await;
    }
}

async fn pass_on(
    cluster: &Cluster,
    agent: &Agent,
    path: &str,
    events: &mpsc::Sender<String>,
) -> Result<(), String> {
    let mut answer = cluster.within(forward::get(cluster, agent, path)).await?;
    match answer.status {
        StatusCode::OK => {}
        StatusCode::NOT_FOUND => {
            return Err("the agent has no page: set its flag --page (chart: page)".to_owned());
        }
        _ => return Err(answer.text().await?),
    }
    let mut held = Vec::new();
    while let Some(part) = answer.next().await {
        held.extend_from_slice(part?.as_ref());
        while let Some(end) = held.windows(2).position(|two| two == b"\n\n") {
            let event: Vec<u8> = held.drain(..end + 2).collect();
            if let Some(frame) = frame(&event, &agent.node) {
                // Fails if the browser has disconnected.
                events.send(frame).await.map_err(|error| error.to_string())?;
            }
        }
        if held.len() > MOST {
            return Err(format!("an event is longer than {MOST} bytes"));
        }
    }
    Ok(())
}

/// Returns the data of an event with the name of its node; `None` for a comment.
fn frame(event: &[u8], node: &str) -> Option<String> {
    let text = std::str::from_utf8(event).ok()?;
    let data = text.lines().find_map(|line| line.strip_prefix("data:"))?;
    let mut frame: Value = serde_json::from_str(data).ok()?;
    frame.as_object_mut()?.insert("node".to_owned(), node.into());
    Some(frame.to_string())
}

#[cfg(test)]
mod tests;
