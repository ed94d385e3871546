//! `/gate/...`: whether nodes know a pod as an endpoint of a Service, and whether they still send new connections to it. For
//! `ballast gate` in pods, which may ask only the agent of their own node; this agent asks the others.
//!
//! The agents are the endpoints of the Service `--gate-service`: so an agent needs no permission to list nodes, a node that is
//! down is no endpoint, and no client can make an agent send requests to other addresses. Without the flag, there are no answers.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use axum::Extension;
use axum::extract::{Path, Query, State as Extract};
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::answer::{State, json, text};
use super::listen::Client;
use crate::driver::{PodState, Question};
use proxy_cli::exchange;
use proxy_core::model::ServiceName;

/// How long another agent may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// The most agents that are asked at the same time.
const AT_ONCE: usize = 64;
/// The most bytes of an answer.
const MOST: u64 = 64 << 10;
/// The most addresses of a pod in a request.
const MOST_ADDRESSES: usize = 4;
/// The most nodes that an answer names.
const MOST_NAMED: usize = 10;

/// What a pod waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Until {
    /// Every node knows the pod as an endpoint, ready or not, and has programmed the newest state that it knows.
    Known,
    /// No node sends new connections to the pod.
    Removed,
}

impl Until {
    /// Returns the word in a request.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Known => "known",
            Self::Removed => "removed",
        }
    }

    /// Whether a node has reached it.
    pub const fn is_reached(self, state: PodState) -> bool {
        match self {
            Self::Known => state.is_known,
            Self::Removed => !state.is_selected,
        }
    }
}

/// The parameters of a request.
#[derive(Debug, Deserialize)]
pub(super) struct Pod {
    /// Its addresses, separated by commas.
    addresses: String,
    until: Until,
}

impl Pod {
    fn addresses(&self) -> Option<Vec<IpAddr>> {
        let parsed: Result<Vec<_>, _> = self.addresses.split(',').map(str::parse).collect();
        parsed.ok().filter(|all| all.len() <= MOST_ADDRESSES)
    }
}

/// The answer of one agent.
#[derive(Debug, Deserialize, Serialize)]
struct OfNode {
    node: String,
    reached: bool,
}

/// The answer about all nodes.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct OfNodes {
    /// The number of agents.
    pub nodes: usize,
    /// The number of those that have not reached the state, or have not answered.
    pub behind: usize,
    /// Some of these, by address, each with the reason.
    pub named: Vec<String>,
}

/// Answers for this node.
pub(super) async fn node(
    Extract(state): Extract<State>,
    Path((namespace, name)): Path<(String, String)>,
    Query(pod): Query<Pod>,
) -> Response {
    if state.gate.service.is_none() {
        return off();
    }
    let Some(service) = service(namespace, name) else { return bad_name() };
    let Some(addresses) = pod.addresses() else { return bad() };
    match state.gate.ask(|reply| Question::Pod(service, addresses, reply)).await {
        Some(found) => {
            json(200, &OfNode { node: state.node_name.clone(), reached: pod.until.is_reached(found) })
        }
        None => text(StatusCode::SERVICE_UNAVAILABLE, "the agent is ending".to_owned()),
    }
}

/// Asks the agents of all nodes.
pub(super) async fn nodes(
    Extract(state): Extract<State>,
    Path((namespace, name)): Path<(String, String)>,
    client: Option<Extension<Client>>,
    Query(pod): Query<Pod>,
) -> Response {
    let Some(all) = state.gate.service.clone() else { return off() };
    let Some(service) = service(namespace, name) else { return bad_name() };
    let Some(addresses) = pod.addresses() else { return bad() };
    let _turn = state.gate.turn(client.map(|Extension(client)| client)).await;
    let agents = state.gate.ask(|reply| Question::Endpoints(all.clone(), reply)).await.unwrap_or_default();
    if agents.is_empty() {
        let error = format!("the Service {all} (--gate-service) has no endpoints on this node");
        return text(StatusCode::SERVICE_UNAVAILABLE, error);
    }
    let path = path(&service, &addresses, pod.until, true);
    json(200, &ask_all(agents, &path).await)
}

/// Returns the Service of a request; `None` if it is no legal name. The names are part of the requests to the other agents.
fn service(namespace: String, name: String) -> Option<ServiceName> {
    let is_label = |text: &str| {
        let is_legal = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        (1..=63).contains(&text.len()) && text.bytes().all(is_legal)
    };
    (is_label(&namespace) && is_label(&name)).then(|| ServiceName::new(namespace, name))
}

async fn ask_all(agents: Vec<SocketAddr>, path: &str) -> OfNodes {
    let mut all = OfNodes { nodes: agents.len(), behind: 0, named: Vec::new() };
    let (mut agents, mut asked) = (agents.into_iter(), JoinSet::new());
    let begin = |asked: &mut JoinSet<_>, agent: SocketAddr| {
        let path = path.to_owned();
        asked.spawn(async move { (agent, ask_one(agent, &path).await) });
    };
    agents.by_ref().take(AT_ONCE).for_each(|agent| begin(&mut asked, agent));
    while let Some(answer) = asked.join_next().await {
        agents.next().into_iter().for_each(|agent| begin(&mut asked, agent));
        if let Ok((_, None)) = answer {
            continue;
        }
        all.behind += 1;
        if let Ok((agent, Some(why))) = answer
            && all.named.len() < MOST_NAMED
        {
            all.named.push(format!("{agent}: {why}"));
        }
    }
    all.named.sort_unstable();
    all
}

/// Returns why a node has not reached the state; `None` if it has.
async fn ask_one(agent: SocketAddr, path: &str) -> Option<String> {
    match get(agent, path, PATIENCE).await {
        Ok((200, body)) => match serde_json::from_str::<OfNode>(&body) {
            Ok(OfNode { reached: true, .. }) => None,
            Ok(OfNode { node, .. }) => Some(format!("{node} has not programmed it")),
            Err(error) => Some(format!("cannot parse the answer: {error}")),
        },
        Ok((status, body)) => Some(format!("HTTP status {status}: {}", body.trim())),
        Err(error) => Some(error.to_string()),
    }
}

/// Returns the path and the query of a request about a pod; `is_here`: only about the node of the agent that answers.
pub fn path(service: &ServiceName, addresses: &[IpAddr], until: Until, is_here: bool) -> String {
    let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    let (which, until, addresses) =
        (if is_here { "node" } else { "nodes" }, until.label(), addresses.join(","));
    format!("/gate/{which}/{}/{}?until={until}&addresses={addresses}", service.namespace, service.name)
}

/// Sends a GET request to an agent. Returns status and body of the answer.
pub async fn get(agent: SocketAddr, path: &str, patience: Duration) -> io::Result<(u16, String)> {
    let exchange = async {
        let mut stream = TcpStream::connect(agent).await?;
        stream.write_all(exchange::request(agent, path).as_bytes()).await?;
        let mut answer = Vec::new();
        stream.take(MOST).read_to_end(&mut answer).await?;
        let (status, body) = exchange::answer(answer).map_err(io::Error::other)?;
        Ok((status, String::from_utf8_lossy(&body).into_owned()))
    };
    timeout(patience, exchange).await.unwrap_or_else(|_| {
        Err(io::Error::new(io::ErrorKind::TimedOut, format!("no complete answer within {patience:?}")))
    })
}

fn off() -> Response {
    text(StatusCode::NOT_FOUND, "start the agents with --gate-service (value `gate` of the chart)".to_owned())
}

fn bad() -> Response {
    let error = format!("`addresses` is not a list of up to {MOST_ADDRESSES} IP addresses");
    text(StatusCode::BAD_REQUEST, error)
}

fn bad_name() -> Response {
    text(StatusCode::BAD_REQUEST, "namespace and name of a Service are DNS labels".to_owned())
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::super::gate_state::Gate;
    use super::super::health_router;
    use super::super::tests::{fetch, start, state};
    use super::*;
    use crate::driver::{Ask, Status};

    /// Starts an agent whose driver knows these agents and this state of every pod.
    async fn agent(known: PodState, agents: Vec<SocketAddr>) -> SocketAddr {
        let (sender, mut questions) = mpsc::channel(1);
        tokio::spawn(async move {
            while let Some(question) = questions.recv().await {
                match question {
                    Question::Pod(_, addresses, reply) => {
                        assert_eq!(addresses.len(), 2);
                        let _ = reply.send(known);
                    }
                    Question::Endpoints(_, reply) => drop(reply.send(agents.clone())),
                    other => panic!("{other:?}"),
                }
            }
        });
        let gate = Gate::new(Some(ServiceName::new("kube-system", "ballast")), Ask::new(sender));
        start(health_router(State { gate, ..state(Status::default()) })).await
    }

    async fn ask(agent: SocketAddr, until: Until) -> (u16, String) {
        let addresses = ["10.0.0.7".parse().unwrap(), "fd00::7".parse().unwrap()];
        let path = path(&ServiceName::new("shop", "web"), &addresses, until, false);
        let (status, _, body) = fetch(agent, &path).await;
        (status, body)
    }

    #[tokio::test]
    async fn nodes_that_are_behind_or_silent_are_named() {
        let (known, new) = (PodState { is_known: true, is_selected: true }, PodState::default());
        let silent = "127.0.0.1:1".parse().unwrap();
        let (first, second) = (agent(known, vec![]).await, agent(new, vec![]).await);
        let all = agent(known, vec![first, second, silent]).await;
        let (status, body) = ask(all, Until::Known).await;
        let answer: OfNodes = serde_json::from_str(&body).unwrap();
        assert_eq!((status, answer.nodes, answer.behind), (200, 3, 2), "{body}");
        assert!(
            answer.named.iter().any(|one| one.starts_with(&format!("{second}: node-a has not"))),
            "{body}"
        );
        assert!(answer.named.iter().any(|one| one.starts_with("127.0.0.1:1: ")), "{body}");
        let (_, body) = ask(all, Until::Removed).await;
        assert!(!body.contains(&second.to_string()) && body.contains(&first.to_string()), "{body}");
        let both = agent(known, vec![first, first]).await;
        let expected = OfNodes { nodes: 2, behind: 0, named: vec![] };
        assert_eq!(serde_json::from_str::<OfNodes>(&ask(both, Until::Known).await.1).unwrap(), expected);
    }

    #[tokio::test]
    async fn agent_without_a_gate_service_or_other_agents_does_not_answer() {
        let off = start(health_router(state(Status::default()))).await;
        let (status, body) = ask(off, Until::Known).await;
        assert!(status == 404 && body.contains("--gate-service"), "{body}");
        let alone = agent(PodState::default(), vec![]).await;
        let (status, body) = ask(alone, Until::Known).await;
        assert!(status == 503 && body.contains("kube-system/ballast"), "{body}");
        let (status, _, _) = fetch(alone, "/gate/node/shop/web?until=known&addresses=localhost").await;
        assert_eq!(status, 400);
        for name in ["a%0D%0AX:%20b", "a%20b", "a%3Fb", "A", "%2e%2e"] {
            for path in
                [format!("node/shop/{name}"), format!("nodes/{name}/web"), format!("nodes/shop/{name}")]
            {
                let path = format!("/gate/{path}?until=known&addresses=10.0.0.7,fd00::7");
                let (status, _, body) = fetch(alone, &path).await;
                assert!(status == 400 && body.contains("DNS labels"), "{path}: {status} {body}");
            }
        }
    }
}
