use std::io;
use std::sync::{Mutex, OnceLock};

use clap::Parser as _;
use serde_json::json;
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;

use super::*;
use crate::args::kubectl::KubectlArgs;
use crate::kubectl::mock::{self, Answers, agents_pod};

/// A mock page of one node with the data of a test; it records the requests.
#[derive(Clone)]
struct Told(&'static str, Arc<Mutex<Vec<PageQuery>>>);

impl Source for Told {
    async fn events(&self, query: PageQuery) -> Result<Events, Refusal> {
        self.1.lock().unwrap().push(query);
        let frame = json!({ "node": "a name of its own", "total": self.0 }).to_string();
        Ok(stream::iter([frame]).chain(stream::pending()).boxed())
    }

    async fn history(&self, service: String) -> Result<HistoryAnswer, Refusal> {
        match service.as_str() {
            "none" => Err(Refusal::NoHistory),
            _ => Ok(HistoryAnswer { interval: 15, last: last(), points: vec![[1.0, 0.0, 0.0, 2.0]] }),
        }
    }
}

/// Returns the number of the last interval, the same for the whole run.
fn last() -> u64 {
    static LAST: OnceLock<u64> = OnceLock::new();
    *LAST.get_or_init(|| SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() / 15)
}

/// Port of each agent's metrics server.
const PORT: u16 = 20_249;

/// A mock API server with the agents' pods, and the address of the server behind each node's [`PORT`].
struct Api(BTreeMap<&'static str, SocketAddr>);

impl Answers for Api {
    fn get(&self, _: &str) -> (u16, Value) {
        let ports =
            json!([{ "name": "health", "containerPort": 1 }, { "name": "metrics", "containerPort": PORT }]);
        let pods: Vec<_> = self.0.keys().map(|node| agents_pod(node, &ports)).collect();
        (200, json!({ "metadata": {}, "items": pods }))
    }

    async fn session(&self, node: &str, uri: &str, socket: WebSocketStream<TcpStream>) -> io::Result<()> {
        assert!(uri.contains("/portforward?") && uri.ends_with(&format!("ports={PORT}")), "{uri}");
        mock::forward(socket, PORT, TcpStream::connect(self.0[node]).await.ok()).await
    }
}

/// Returns a cluster of three nodes: two have a page, and the third one's port is closed.
async fn cluster(folder: &std::path::Path) -> (Nodes, Arc<Mutex<Vec<PageQuery>>>) {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let mut agents = BTreeMap::new();
    for node in ["a", "b"] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = page::router(Told(node, Arc::clone(&asked)), Vec::new());
        tokio::spawn(async { axum::serve(listener, router).await });
        agents.insert(node, address);
    }
    agents.insert("c", "127.0.0.1:9".parse().unwrap());
    let kubeconfig = mock::start(Api(agents), folder).await;
    let words = ["kubectl-ballast", "--kubeconfig", kubeconfig.to_str().unwrap(), "ui"];
    let args = KubectlArgs::try_parse_from(words).unwrap();
    (Nodes::new(Cluster::connect(&args.cluster).await.unwrap()), asked)
}

#[tokio::test]
async fn events_of_all_agents_are_one_stream() {
    let folder = tempfile::tempdir().unwrap();
    let (nodes, asked) = cluster(folder.path()).await;
    let wanted = PageQuery { filter: "a b&c=1".to_owned(), service: "default/web:http/TCP/IPv4".to_owned() };
    let mut events = nodes.events(wanted.clone()).await.unwrap();
    let mut by_node = BTreeMap::new();
    while by_node.len() < 3 {
        let event: Value = serde_json::from_str(&events.next().await.unwrap()).unwrap();
        by_node.insert(event["node"].as_str().unwrap().to_owned(), event);
    }
    assert_eq!((&by_node["a"]["total"], &by_node["b"]["total"]), (&json!("a"), &json!("b")));
    let failure = by_node["c"]["failure"].as_str().unwrap();
    assert!(failure.contains("pod kube-system/ballast-c") && failure.contains("refused"), "{failure}");
    assert_eq!(*asked.lock().unwrap(), [wanted.clone(), wanted.clone()], "each was asked for the same");
    // The number of browsers is limited; a browser that disconnects makes room for another one.
    let more = [(); LISTENERS - 1].map(|()| nodes.events(wanted.clone()));
    let more = futures::future::join_all(more).await;
    assert!(more.iter().all(Result::is_ok));
    assert!(matches!(nodes.events(wanted.clone()).await, Err(Refusal::TooMany { .. })));
    drop(more);
    assert!(nodes.events(wanted).await.is_ok());
}

#[tokio::test]
async fn histories_are_added_up() {
    let folder = tempfile::tempdir().unwrap();
    let (nodes, _) = cluster(folder.path()).await;
    let sum = nodes.history(String::new()).await.unwrap();
    assert_eq!((sum.interval, sum.last, sum.points), (15, last(), vec![[2.0, 0.0, 0.0, 4.0]]));
    let error = nodes.history("none".to_owned()).await.unwrap_err();
    assert!(matches!(error, Refusal::Unreachable(_)), "{error}");
}

#[test]
fn events_come_under_the_name_of_their_node() {
    assert_eq!(frame(b"data: {\"node\":\"x\"}\n\n", "a").as_deref(), Some("{\"node\":\"a\"}"));
    assert_eq!(frame(b":\n\n", "a"), None, "what keeps the connection is no event");
    assert_eq!(frame(b"data: [1]\n\n", "a"), None);
    let query = PageQuery { filter: "a&b".to_owned(), service: "é".to_owned() };
    assert_eq!(path("events", &query), "/page/events?filter=a%26b&service=%C3%A9");
}
