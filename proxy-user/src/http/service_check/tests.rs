use super::*;
use crate::http::tests::{ago, fetch, state};
use crate::metrics::Metrics;
use proxy_core::plan::HealthCheck;
use proxy_core::testing::free_port;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

struct Node {
    status: watch::Sender<Status>,
    server: JoinHandle<()>,
    events: mpsc::Receiver<Notice>,
    metrics: Arc<Metrics>,
}

impl Node {
    fn start() -> Self {
        let listen = BTreeSet::from([IpAddr::V4(Ipv4Addr::LOCALHOST)]);
        let status = watch::Sender::new(Status { listen, ..Status::default() });
        let (notices, events) = mpsc::channel(8);
        let state = State { status: status.subscribe(), notices, ..state(Status::default()) };
        let metrics = Arc::clone(&state.metrics);
        let server = tokio::spawn(serve(state));
        Self { status, server, events, metrics }
    }

    /// Waits until `/status` has so many faults of health check ports, and returns them.
    async fn faults(&self, count: usize) -> Vec<String> {
        loop {
            let faults = self.metrics.recent.standing_of(CAUSE);
            if faults.len() == count {
                return faults;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Sets a Service with this health check port and `local` ready endpoints on this node.
    fn service(&self, name: &str, port: u16, local: usize) {
        let check = HealthCheck { port, local: BTreeMap::from([(IpFamily::V4, local)]) };
        self.status.send_modify(|status| {
            Arc::make_mut(&mut status.health_checks).insert(ServiceName::new("shop", name), check);
        });
    }

    /// Returns status, headers and body once a server listens; `None` if none does.
    async fn ask(&self, port: u16) -> Option<(u16, String, String)> {
        let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
        for _ in 0..200 {
            if tokio::net::TcpStream::connect(address).await.is_ok() {
                return Some(fetch(address, "/any/path").await);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        None
    }

    /// Waits until no server listens.
    async fn closed(&self, port: u16) {
        while tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.server.abort();
    }
}

#[tokio::test]
async fn the_answer_is_kube_proxys() {
    let (node, port) = (Node::start(), free_port());
    node.service("web", port, 2);
    let (code, head, body) = node.ask(port).await.unwrap();
    assert_eq!(code, 200);
    assert_eq!(
        body,
        r#"{"service":{"namespace":"shop","name":"web"},"localEndpoints":2,"serviceProxyHealthy":true}"#
    );
    for header in [
        "content-type: application/json",
        "x-content-type-options: nosniff",
        "x-load-balancing-endpoint-weight: 2",
    ] {
        assert!(head.contains(header), "{head}");
    }
}

#[tokio::test]
async fn health_check_is_503_without_a_ready_local_endpoint_or_with_an_unhealthy_agent() {
    let (node, port) = (Node::start(), free_port());
    node.service("web", port, 0);
    assert_eq!(node.ask(port).await.unwrap().0, 503);
    node.service("web", port, 1);
    assert_eq!(node.ask(port).await.unwrap().0, 200);
    node.status.send_modify(|status| {
        status.synced = true;
        status.waiting_since = Some(ago(61));
        status.service_changes.pending = 1;
    });
    let (code, _, body) = node.ask(port).await.unwrap();
    assert_eq!(code, 503);
    assert!(body.ends_with(r#""localEndpoints":1,"serviceProxyHealthy":false}"#), "{body}");
}

#[tokio::test]
async fn health_check_is_503_if_most_writes_fail_and_200_if_the_node_leaves() {
    let (node, port) = (Node::start(), free_port());
    node.service("web", port, 1);
    node.status.send_modify(|status| status.node = crate::driver::NodeFate::Leaves);
    assert_eq!(node.ask(port).await.unwrap().0, 200, "its endpoints still serve");
    node.status.send_modify(|status| {
        status.failing_since.insert(IpFamily::V4, ago(61));
    });
    let (code, _, body) = node.ask(port).await.unwrap();
    assert_eq!(code, 503);
    assert!(body.ends_with(r#""localEndpoints":1,"serviceProxyHealthy":false}"#), "{body}");
}

#[tokio::test]
async fn connection_ends_when_its_port_moves_to_another_service() {
    let (node, port) = (Node::start(), free_port());
    node.service("blue", port, 1);
    assert!(node.ask(port).await.unwrap().2.contains("blue"));
    let mut kept = tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    kept.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut bytes = [0; 1024];
    assert!(kept.read(&mut bytes).await.unwrap() > 0);
    node.status.send_modify(|status| status.health_checks = Arc::default());
    node.service("green", port, 1);
    let rest = timeout(Duration::from_secs(10), kept.read_to_end(&mut Vec::new())).await;
    assert!(rest.is_ok(), "the load balancer has to connect again");
    assert!(node.ask(port).await.unwrap().2.contains("green"));
}

#[tokio::test]
async fn ports_open_and_close_with_their_services() {
    let (node, first, second) = (Node::start(), free_port(), free_port());
    node.service("web", first, 1);
    node.service("dns", second, 3);
    assert!(node.ask(first).await.unwrap().2.contains("\"localEndpoints\":1"));
    assert!(node.ask(second).await.unwrap().2.contains("\"localEndpoints\":3"));
    let third = free_port();
    node.service("web", third, 1);
    assert!(node.ask(third).await.is_some());
    node.closed(first).await;
    node.status.send_modify(|status| status.health_checks = Arc::default());
    node.closed(second).await;
    node.closed(third).await;
}

#[tokio::test]
async fn port_in_use_is_a_fault_in_status_until_it_is_free() {
    let port = free_port();
    let taken = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    let mut node = Node::start();
    node.service("web", port, 1);
    node.events.recv().await.unwrap();
    assert!(
        node.faults(1).await[0].starts_with("Service shop/web: cannot listen on its healthCheckNodePort")
    );
    drop(taken);
    tokio::time::pause();
    tokio::time::advance(RETRY).await;
    tokio::time::resume();
    assert_eq!(node.ask(port).await.unwrap().0, 200);
    node.faults(0).await;
}

#[tokio::test]
async fn both_families_share_a_port() {
    let port = free_port();
    let v4 = open_one(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port), true).unwrap();
    let v6 = open_one(SocketAddr::new(std::net::Ipv6Addr::UNSPECIFIED.into(), port), true).unwrap();
    drop((v4, v6));
}

#[test]
fn a_service_is_asked_for_in_its_families_only() {
    let listen = BTreeSet::from([IpAddr::V4(Ipv4Addr::UNSPECIFIED), std::net::Ipv6Addr::UNSPECIFIED.into()]);
    let check = HealthCheck { port: 9, local: BTreeMap::from([(IpFamily::V6, 0)]) };
    let health_checks = Arc::new(BTreeMap::from([(ServiceName::new("shop", "web"), check)]));
    let wanted = wanted(&Status { health_checks, listen, ..Status::default() });
    assert!(wanted.iter().map(|(_, address)| address.to_string()).eq(["[::]:9"]));
}

#[tokio::test]
async fn health_check_port_in_use_is_sent_as_an_event() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let mut node = Node::start();
    node.service("a", port, 1);
    let notice = node.events.recv().await.unwrap();
    assert_eq!(notice.reason, "FailedToStartServiceHealthcheck");
    let begin = format!("node node-a failed to start healthcheck \"shop/a\" on port {port}: ");
    assert!(notice.note.starts_with(&begin), "{}", notice.note);
}
