//! Tests against servers that answer what the test says, or do not listen.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};

use axum::Router;
use axum::extract::State as Shared;
use axum::http::StatusCode;
use tokio::net::TcpListener;

use super::*;
use crate::api::client::{Connection, Options, connect};
use proxy_core::testing::free_port;

/// The server, as the test controls it.
struct Peer {
    url: String,
    status: Arc<AtomicU16>,
    asked: Arc<AtomicUsize>,
}

type Counts = (Arc<AtomicU16>, Arc<AtomicUsize>);

impl Peer {
    async fn start(status: u16) -> Self {
        let (status, asked): Counts = (Arc::new(AtomicU16::new(status)), Arc::default());
        let answer = async |Shared((status, asked)): Shared<Counts>| {
            asked.fetch_add(1, Ordering::Relaxed);
            StatusCode::from_u16(status.load(Ordering::Relaxed)).unwrap()
        };
        let router = Router::new().fallback(answer).with_state((Arc::clone(&status), Arc::clone(&asked)));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, status, asked }
    }

    fn asked(&self) -> usize {
        self.asked.swap(0, Ordering::Relaxed)
    }
}

/// Returns a URL at which no server listens.
fn no_server() -> String {
    format!("http://127.0.0.1:{}/", free_port())
}

async fn connected(urls: &[&str]) -> (Connection, watch::Receiver<ApiServers>) {
    let file = tempfile::NamedTempFile::new().unwrap();
    let kubeconfig = "{apiVersion: v1, kind: Config, current-context: c, users: [{name: u, user: {}}], \
        contexts: [{name: c, context: {cluster: k, user: u}}], clusters: [{name: k, cluster: {server: 'http://x'}}]}";
    std::fs::write(file.path(), kubeconfig).unwrap();
    let servers = urls.iter().map(|url| (*url).to_owned()).collect();
    let options = Options { kubeconfig: Some(file.path().to_owned()), servers };
    let (server_status, servers) = watch::channel(ApiServers::default());
    (connect(&options, server_status).await.unwrap(), servers)
}

async fn ask(connection: &Connection) -> Option<u16> {
    let request = Request::get("/livez").body(Body::from(vec![1])).unwrap();
    connection.client.send(request).await.ok().map(|answer| answer.status().as_u16())
}

#[tokio::test]
async fn the_first_server_that_answers_is_asked_until_it_fails() {
    let (away, one, other) = (no_server(), Peer::start(200).await, Peer::start(200).await);
    let servers = vec![away.clone(), one.url.clone(), other.url.clone()];
    let (connection, server_status) = connected(&[&away, &one.url, &other.url]).await;
    assert_eq!((server_status.borrow().active.clone(), server_status.borrow().servers.len()), (None, 3));
    assert_eq!(ask(&connection).await, Some(200));
    let is_one = server_status.borrow().active.as_ref() == Some(&one.url);
    let (one, other) = if is_one { (one, other) } else { (other, one) };
    let expected = |server: &Peer, failovers| ApiServers {
        servers: servers.clone(),
        active: Some(server.url.clone()),
        failovers,
    };
    assert_eq!(*server_status.borrow(), expected(&one, 1));
    for status in [500, 502, 503, 504] {
        one.status.store(status, Ordering::Relaxed);
        other.status.store(200, Ordering::Relaxed);
        let before = server_status.borrow().failovers;
        assert_eq!(ask(&connection).await, Some(200), "{status}");
        assert_eq!(*server_status.borrow(), expected(&other, before + 1));
        // A server that recovers does not become active again.
        one.status.store(200, Ordering::Relaxed);
        let _ = (one.asked(), other.asked());
        assert_eq!(ask(&connection).await, Some(200));
        assert_eq!((one.asked(), other.asked()), (0, 1));
        other.status.store(status, Ordering::Relaxed);
        assert_eq!(ask(&connection).await, Some(200), "{status}: by way of the one that is away");
        assert_eq!(*server_status.borrow(), expected(&one, before + 2));
    }
}

#[tokio::test]
async fn what_all_servers_refuse_is_the_answer_and_changes_nothing() {
    let (one, other) = (Peer::start(200).await, Peer::start(200).await);
    let (connection, server_status) = connected(&[&one.url, &other.url]).await;
    for status in [200, 401, 403, 404, 410, 422, 429] {
        one.status.store(status, Ordering::Relaxed);
        assert_eq!(ask(&connection).await, Some(status), "an answer as good as any");
        assert_eq!((one.asked(), other.asked()), (1, 0));
    }
    one.status.store(503, Ordering::Relaxed);
    other.status.store(500, Ordering::Relaxed);
    assert_eq!(ask(&connection).await, Some(500));
    assert_eq!((one.asked(), other.asked()), (1, 1));
    let server_status = server_status.borrow().clone();
    assert_eq!((server_status.active, server_status.failovers), (Some(one.url), 0));
}

#[tokio::test]
async fn a_broken_connection_is_a_failure_and_no_server_an_error() {
    let (away, other) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), Peer::start(200).await);
    let url = format!("http://{}/", away.local_addr().unwrap());
    let (connection, server_status) = connected(&[&url, &other.url]).await;
    let (asked, ()) = tokio::join!(ask(&connection), async { drop(away.accept().await.unwrap()) });
    assert_eq!((asked, server_status.borrow().active.clone()), (Some(200), Some(other.url)));
    let (connection, server_status) = connected(&[&no_server(), &no_server()]).await;
    assert_eq!((ask(&connection).await, server_status.borrow().active.clone()), (None, None));
}

#[tokio::test]
async fn servers_may_be_replaced() {
    let (one, other) = (Peer::start(200).await, Peer::start(200).await);
    let (connection, server_status) = connected(&[&one.url, &other.url]).await;
    assert_eq!(ask(&connection).await, Some(200));
    let servers = connection.servers.list();
    connection.servers.replace(vec![servers[1].clone(), servers[0].clone()]);
    assert_eq!(server_status.borrow().active, Some(one.url.clone()), "it stays");
    connection.servers.replace(vec![servers[1].clone()]);
    assert_eq!(server_status.borrow().active, None);
    one.asked();
    assert_eq!(ask(&connection).await, Some(200));
    assert_eq!((one.asked(), other.asked(), server_status.borrow().failovers), (0, 1, 0));
}

#[tokio::test]
async fn agents_of_a_server_that_fails_spread_over_the_others() {
    let urls = ["http://192.0.2.1/", "http://192.0.2.2/", "http://192.0.2.3/", "http://192.0.2.4/"];
    let order = |connection: &Connection| {
        connection.servers.in_order().1.into_iter().map(|server| server.url).collect::<Vec<_>>()
    };
    let mut next = BTreeMap::<_, BTreeSet<_>>::new();
    for _ in 0..64 {
        let (connection, _) = connected(&urls).await;
        let attempts = order(&connection);
        assert_eq!(
            (&*attempts[0], attempts.len()),
            (urls[0], urls.len()),
            "the list's first one is the first"
        );
        assert_eq!(attempts, order(&connection), "the agent keeps its order");
        for failed in urls {
            connection.servers.lock().active = Some(failed.to_owned());
            let attempts = order(&connection);
            assert_eq!(attempts[0], failed);
            next.entry(failed).or_default().insert(attempts[1].clone());
        }
    }
    assert!(next.values().all(|others| others.len() == urls.len() - 1), "{next:?}");
}
