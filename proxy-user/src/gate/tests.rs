use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::extract::{Path, Query};
use axum::http::{Method, StatusCode};
use axum::routing::any;
use axum::{Json, body};
use clap::Parser as _;

use super::*;
use crate::cli::args::{Args, Command};

/// Starts a server on a free port.
async fn start(router: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async { axum::serve(listener, router).await });
    address
}

/// Starts an agent that is behind for this many questions of each kind.
async fn agent(behind: usize) -> SocketAddr {
    let counts: Arc<[AtomicUsize; 2]> = Arc::default();
    let answer = move |Path((_, name)): Path<(String, String)>,
                       Query(query): Query<Vec<(String, String)>>| {
        let is_removal = query.contains(&("until".to_owned(), "removed".to_owned()));
        assert!(query.contains(&("addresses".to_owned(), "10.0.0.7,fd00::7".to_owned())), "{query:?}");
        let asked = counts[usize::from(is_removal)].fetch_add(1, Ordering::Relaxed);
        let behind = usize::from(asked < behind);
        async move { Json(OfNodes { nodes: 2, behind, named: vec![format!("node-b has no {name}")] }) }
    };
    start(Router::new().route("/gate/nodes/{namespace}/{name}", get(answer))).await
}

/// Returns the arguments for an agent.
fn args(agent: SocketAddr, more: &[&str]) -> GateArgs {
    let port = agent.port().to_string();
    let words = ["ballast", "gate", "--service", "web", "--host", "127.0.0.1", "--agent-port", &port];
    let pod = ["--namespace", "shop", "--pod", "web-7", "--addresses", "10.0.0.7,fd00::7"];
    let parsed = Args::try_parse_from(words.iter().chain(&pod).chain(more)).unwrap();
    match parsed.command {
        Command::Gate(args) => args,
        other => panic!("{other:?}"),
    }
}

fn asker(args: &GateArgs) -> Asker {
    let services = vec![ServiceName::new("shop", "web")];
    let agent = SocketAddr::new(args.host, args.agent_port);
    Asker { agent, services, addresses: args.addresses.clone() }
}

#[tokio::test]
async fn gate_waits_while_a_node_is_behind() {
    let asker = asker(&args(agent(1).await, &[]));
    let why = asker.ask(&asker.services[0], Until::Known).await.unwrap_err();
    assert_eq!(why, "1 of 2 nodes: node-b has no web");
    asker.wait(Until::Known).await;
    asker.ask(&asker.services[0], Until::Removed).await.unwrap_err();
}

#[tokio::test]
async fn hook_is_answered_when_no_node_selects_the_pod() {
    let args = args(agent(1).await, &[]);
    let hooks = start(Router::new().route("/removed", get(removed)).with_state(asker(&args))).await;
    let begun = std::time::Instant::now();
    let (status, _) = gate::get(hooks, "/removed", PATIENCE).await.unwrap();
    assert!(status == 200 && begun.elapsed() >= PAUSE);
}

#[tokio::test]
async fn condition_is_set_again_until_the_api_server_takes_it() {
    let seen: Arc<Mutex<Vec<(Method, String, serde_json::Value)>>> = Arc::default();
    let log = Arc::clone(&seen);
    let answer = move |request: axum::extract::Request| async move {
        let (parts, content) = request.into_parts();
        let content = serde_json::from_slice(&body::to_bytes(content, 4096).await.unwrap()).unwrap();
        let mut log = log.lock().unwrap();
        log.push((parts.method, parts.uri.path().to_owned(), content));
        if log.len() == 1 {
            return (StatusCode::INTERNAL_SERVER_ERROR, Json(json!({})));
        }
        (StatusCode::OK, Json(json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "web-7" } })))
    };
    let server = start(Router::new().fallback(any(answer))).await;
    let client = Client::try_from(kube::Config::new(format!("http://{server}").parse().unwrap())).unwrap();
    set_condition(&client, &args(server, &["--condition", "example.com/seen"])).await;
    let seen = seen.lock().unwrap();
    let (method, path, content) = &seen[1];
    assert_eq!((method, path.as_str()), (&Method::PATCH, "/api/v1/namespaces/shop/pods/web-7/status"));
    let condition = &content["status"]["conditions"][0];
    assert_eq!((&condition["type"], &condition["status"]), (&json!("example.com/seen"), &json!("True")));
}

#[test]
fn arguments_that_are_missing_are_named() {
    let error = Args::try_parse_from(["ballast", "gate", "--host", "127.0.0.1"]).unwrap_err().to_string();
    for flag in ["--service", "--namespace", "--pod", "--addresses"] {
        assert!(error.contains(flag), "{error}");
    }
}
