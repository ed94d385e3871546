use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::driver::{Programmed, Status};
use crate::metrics::Metrics;
use proxy_core::model::Problem;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

pub(super) fn state(status: Status) -> State {
    let status = watch::Sender::new(status).subscribe();
    State {
        metrics: Arc::new(Metrics::new(std::path::Path::new("/nonexistent"), status.clone(), true)),
        status,
        programmed: Programmed::default(),
        patience: Duration::from_mins(1),
        config: Arc::new(serde_json::json!({"ballast": {"nodeName": "node-a"}})),
        notices: mpsc::channel(1).0,
        node_name: "node-a".to_owned(),
        page: None,
        gate: gate_state::Gate::default(),
    }
}

/// Returns the time before this number of seconds.
pub(super) fn ago(seconds: u64) -> Instant {
    Instant::now() - Duration::from_secs(seconds)
}

/// Returns the status of an agent with a change that has waited for too long.
fn unwell() -> Status {
    let known = Status { synced: true, complete: true, ..Status::default() };
    let mut status = Status { waiting_since: Some(ago(61)), ..known };
    status.service_changes.pending = 1;
    status
}

/// Returns the status, the headers in lower case, and the body.
pub(super) async fn fetch(address: SocketAddr, path: &str) -> (u16, String, String) {
    fetch_with(address, path, "").await
}

/// Like [`fetch`] with more headers, each with its line break.
async fn fetch_with(address: SocketAddr, path: &str, headers: &str) -> (u16, String, String) {
    request("GET", address, path, headers).await
}

async fn request(method: &str, address: SocketAddr, path: &str, headers: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("{method} {path} HTTP/1.1\r\nHost: test\r\n{headers}Connection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await.unwrap();
    let (head, body) = reply.split_once("\r\n\r\n").unwrap();
    let code = head.split(' ').nth(1).unwrap().parse().unwrap();
    (code, head.to_lowercase(), body.to_owned())
}

pub(super) async fn start(router: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async { axum::serve(listener, router).await });
    address
}

#[tokio::test]
async fn the_metrics_server() {
    let address = start(metrics_router(state(Status::default()))).await;
    let (code, head, body) = fetch(address, "/proxyMode").await;
    assert_eq!((code, &*body), (200, "ebpf"));
    assert!(head.contains("content-type: text/plain; charset=utf-8"), "{head}");
    assert_eq!(fetch(address, "/healthz").await.2, "ok");
    assert_eq!(fetch(address, "/livez").await.2, "ok");
    assert_eq!(fetch(address, "/configz").await.2, r#"{"ballast":{"nodeName":"node-a"}}"#);
    assert_eq!(fetch(address, "/nothing").await.0, 404);
    let (code, head, body) = fetch(address, "/metrics").await;
    assert_eq!(code, 200);
    assert!(head.contains("content-type: text/plain; version=0.0.4; charset=utf-8"), "{head}");
    assert!(body.contains("\nballast_maps_readable 0\n") && !body.contains("# EOF"), "{body}");
    let accept = "Accept: application/openmetrics-text;version=1.0.0;q=0.5\r\nAccept: text/plain;q=0.4\r\n";
    let (code, head, body) = fetch_with(address, "/metrics", accept).await;
    assert_eq!(code, 200);
    assert!(head.contains("content-type: application/openmetrics-text; version=1.0.0"), "{head}");
    assert!(body.contains("\nballast_maps_readable 0\n") && body.ends_with("# EOF\n"), "{body}");
}

#[tokio::test]
async fn what_is_wrong_with_which_object_can_be_asked() {
    let problem = Problem {
        object: "Service default/web".to_owned(),
        field: "spec.clusterIPs[0]".to_owned(),
        message: "\"10.96.0.300\" is no address".to_owned(),
    };
    let status = Status { problems: vec![problem].into(), ..Status::default() };
    let address = start(metrics_router(state(status))).await;
    let (code, head, body) = fetch(address, "/status").await;
    assert_eq!(code, 200);
    assert!(head.contains("content-type: application/json"), "{head}");
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    let problem = r#"Service default/web: spec.clusterIPs[0]: "10.96.0.300" is no address"#;
    assert_eq!(body["problems"], serde_json::json!([problem]));
}

#[tokio::test]
async fn the_health_server_counts_its_answers() {
    let state = state(unwell());
    let metrics = Arc::clone(&state.metrics);
    let address = start(health_router(state)).await;
    let (code, head, body) = fetch(address, "/healthz").await;
    assert_eq!(code, 503);
    assert!(head.contains("content-type: application/json"), "{head}");
    assert!(head.contains("x-content-type-options: nosniff"), "{head}");
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((&body["nodeEligible"], &body["healthy"]), (&true.into(), &false.into()));
    assert_eq!(fetch(address, "/livez").await.0, 503);
    assert_eq!(fetch(address, "/metrics").await.0, 404);
    let text = metrics.encode(Format::OpenMetrics).unwrap();
    assert!(text.contains("kubeproxy_proxy_healthz_total{code=\"503\"} 1\n"), "{text}");
    assert!(text.contains("kubeproxy_proxy_livez_total{code=\"503\"} 1\n"), "{text}");
}

#[tokio::test]
async fn health_paths_answer_any_method() {
    let health = start(health_router(state(Status::default()))).await;
    let metrics = start(metrics_router(state(Status::default()))).await;
    for (address, path) in [
        (health, "/healthz"),
        (health, "/livez"),
        (metrics, "/healthz"),
        (metrics, "/livez"),
        (metrics, "/proxyMode"),
    ] {
        for method in ["OPTIONS", "POST", "HEAD"] {
            assert_eq!(request(method, address, path, "").await.0, 200, "{method} {path}");
        }
    }
}

#[tokio::test]
async fn an_agent_is_ready_after_its_first_sync() {
    let fresh = start(health_router(state(Status::default()))).await;
    assert_eq!(fetch(fresh, "/readyz").await.0, 503);
    assert_eq!(fetch(fresh, "/livez").await.0, 200, "it is not restarted for it");
    let short = Status { synced: true, failing: 16, ..Status::default() };
    let (code, _, body) = fetch(start(health_router(state(short))).await, "/readyz").await;
    assert_eq!(code, 503, "a sync that failed is not done");
    assert_eq!(body, "16 Service ports not programmed yet; see /status");
    let state = state(unwell());
    let metrics = Arc::clone(&state.metrics);
    let synced = start(health_router(state)).await;
    assert_eq!(fetch(synced, "/readyz").await.0, 200, "a change that waits is not a matter of rollouts");
    metrics.recent.set_standing(SOCKET_PROGRAMS, ["cannot attach".to_owned()]);
    assert_eq!(
        fetch(synced, "/readyz").await.0,
        503,
        "the node has programs of no agent, or of an earlier one"
    );
    metrics.recent.set_standing(SOCKET_PROGRAMS, []);
    assert_eq!(fetch(synced, "/readyz").await.0, 200);
    metrics.recent.set_standing(FIRST_ATTACH, ["not yet".to_owned()]);
    assert_eq!((fetch(synced, "/readyz").await.0, metrics.recent.faults()), (503, vec![]));
}

#[tokio::test]
async fn uplink_without_programs_makes_the_node_unhealthy_after_two_periods() {
    let known = Status { synced: true, complete: true, uplinks: [2].into(), ..Status::default() };
    let state = state(known);
    let metrics = Arc::clone(&state.metrics);
    let address = start(health_router(state)).await;
    let codes = async || {
        let code = async |path| fetch(address, path).await.0;
        [code("/healthz").await, code("/livez").await, code("/readyz").await]
    };
    metrics.bare.set([(3, "veth1".to_owned())], ago(100));
    assert_eq!(codes().await, [200; 3], "a device of a pod");
    metrics.bare.set([(2, "eth0".to_owned())], ago(10));
    assert_eq!(codes().await, [200; 3], "not for long");
    metrics.bare.set([], ago(0));
    metrics.bare.set([(2, "eth0".to_owned())], ago(61));
    assert_eq!(codes().await, [503, 200, 503]);
    metrics.bare.set([], ago(0));
    assert_eq!(codes().await, [200; 3]);
}

#[tokio::test]
async fn stalled_task_of_devices_makes_the_agent_unwell_after_a_minute_and_two_periods() {
    for (patience, codes) in [(1, [200, 503, 503]), (60, [200, 503, 503]), (90, [200, 200, 503])] {
        let state = State { patience: Duration::from_secs(patience), ..state(Status::default()) };
        let (due, receiver) = watch::channel(None);
        state.metrics.recent.expect_progress("reading devices", receiver);
        let address = start(health_router(state)).await;
        for (late, code) in [50, 70, 100].into_iter().zip(codes) {
            due.send_replace(Some(ago(late)));
            for path in ["/healthz", "/livez"] {
                assert_eq!(fetch(address, path).await.0, code, "{path} {patience} {late}");
            }
        }
        due.send_replace(Some(Instant::now()));
        assert_eq!(fetch(address, "/livez").await.0, 200);
    }
}

#[tokio::test]
async fn both_servers_say_when_the_agent_is_unwell() {
    let health = start(health_router(state(unwell()))).await;
    assert_eq!(fetch(health, "/healthz").await.0, 503);
    assert_eq!(fetch(health, "/livez").await.0, 503);
    let metrics = start(metrics_router(state(unwell()))).await;
    let (code, _, body) = fetch(metrics, "/healthz").await;
    assert_eq!(code, 503);
    assert!(body.contains(r#""IPv4":{"lastUpdated":"0001-01-01T00:00:00Z","healthy":false}"#), "{body}");
}

#[tokio::test(start_paused = true)]
async fn an_address_that_is_taken_is_tried_again() {
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap();
    let addresses = Addresses { metrics: Some(address), ..Addresses::default() };
    let (notices, mut sent) = mpsc::channel(1);
    let server = tokio::spawn(serve(addresses, State { notices, ..state(Status::default()) }));
    tokio::time::sleep(RETRY * 2).await;
    assert!(!server.is_finished(), "the agent goes on");
    assert!(sent.try_recv().is_err(), "kube-proxy sends no event either");
    drop(taken);
    tokio::time::sleep(RETRY + Duration::from_millis(1)).await;
    assert_eq!(fetch(address, "/proxyMode").await.2, "ebpf");
    server.abort();
}

#[tokio::test]
async fn an_address_that_is_taken_is_the_end_where_that_is_asked_for() {
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap();
    let addresses = Addresses { health: Some(address), metrics: None, hard_fail: true };
    let (notices, mut sent) = mpsc::channel(1);
    let error = serve(addresses, State { notices, ..state(Status::default()) }).await.unwrap_err();
    assert!(
        error.to_string().starts_with(&format!("the health server cannot listen on {address}: ")),
        "{error}"
    );
    let notice = sent.recv().await.unwrap();
    assert_eq!((notice.reason, notice.warning), ("FailedToStartProxierHealthcheck", true));
}

/// Runs a driver that programs a Service with this version, and returns its record of what is programmed.
async fn programmed(edition: &str) -> Programmed {
    use crate::driver::{Driver, DriverSettings};
    use proxy_core::model::{
        EndpointSlice, Event, Listing, NodeView, Service, ServiceName, SliceName, Version,
    };
    use proxy_core::store::{Capacity, MemoryStore};
    let node = NodeView::new("node-a");
    let driver = Driver::new(MemoryStore::new(Capacity::default()), node, DriverSettings::default()).unwrap();
    let (known, mut status) = (driver.programmed(), driver.status());
    let (events, receiver) = mpsc::channel(8);
    tokio::spawn(driver.run(receiver));
    let version = |edition: &str| Version {
        uid: "u-1".into(),
        resource_version: edition.into(),
        generation: NonZero::new(3),
    };
    let name = ServiceName::new("default", "web");
    let service = Service {
        version: version(edition),
        cluster_ips: vec!["10.96.0.10".parse().unwrap()],
        ..Service::new(name.clone())
    };
    let slice = SliceName::new("default", "web-x");
    let slice = EndpointSlice::new(slice, name, proxy_core::model::net::IpFamily::V4);
    let slice = EndpointSlice { version: version("77"), ..slice };
    events.send(Event::Reset(Listing::Services(vec![service]))).await.unwrap();
    events.send(Event::Reset(Listing::Slices(vec![slice]))).await.unwrap();
    status.wait_for(|status| status.synced).await.unwrap();
    known
}

#[tokio::test]
async fn programmed_answers_with_the_version() {
    let problem =
        |object: &str| Problem { object: object.to_owned(), field: "f".to_owned(), message: "m".to_owned() };
    let problems =
        vec![problem("Service default/web"), problem("EndpointSlice default/web-x"), problem("Service a/b")];
    let status = Status { synced: true, problems: problems.into(), ..Status::default() };
    let state = State { programmed: programmed("41").await, ..state(status) };
    let address = start(metrics_router(state)).await;
    let (code, head, body) = fetch(address, "/programmed/default/web").await;
    assert!(code == 200 && head.contains("content-type: application/json"), "{head}");
    let one: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(
        (&one["uid"], &one["resourceVersion"], &one["generation"]),
        (&"u-1".into(), &"41".into(), &3.into())
    );
    assert_eq!(one["endpointSlices"][0]["resourceVersion"], "77");
    assert_eq!((&one["current"], &one["frontends"]), (&true.into(), &0.into()));
    assert!(one["programmedSince"].as_str().is_some_and(|since| since.starts_with("20")), "{one}");
    assert_eq!(
        one["problems"],
        serde_json::json!(["Service default/web: f: m", "EndpointSlice default/web-x: f: m"])
    );
    let all: serde_json::Value = serde_json::from_str(&fetch(address, "/programmed").await.2).unwrap();
    assert_eq!(
        (&all["node"], &all["synced"], &all["services"]),
        (&"node-a".into(), &true.into(), &serde_json::json!([one]))
    );
    for mistyped in ["default/wbe", "x/web"] {
        let (code, _, body) = fetch(address, &format!("/programmed/{mistyped}")).await;
        assert!(code == 404 && body.contains("did you mean default/web?"), "{body}");
    }
}

#[tokio::test]
async fn name_longer_than_any_service_gets_no_proposal() {
    let state =
        State { programmed: programmed("41").await, ..state(Status { synced: true, ..Status::default() }) };
    let address = start(metrics_router(state)).await;
    let (code, _, body) = fetch(address, &format!("/programmed/default/{}", "web".repeat(5000))).await;
    assert!(code == 404 && !body.contains("did you mean"), "{body}");
}

#[tokio::test]
async fn large_answer_delays_no_other_request() {
    for path in ["/programmed", "/programmed/a/b", "/status"] {
        let status = watch::Sender::new(Status::default());
        let address =
            start(metrics_router(State { status: status.subscribe(), ..state(Status::default()) })).await;
        let (locked, is_locked) = std::sync::mpsc::channel();
        let (release, is_released) = std::sync::mpsc::channel();
        // The answer needs the status, which this thread holds.
        let hold = std::thread::spawn(move || {
            status.send_modify(|_| {
                locked.send(()).unwrap();
                let _ = is_released.recv_timeout(Duration::from_secs(5));
            });
        });
        is_locked.recv().unwrap();
        let answer = tokio::spawn(fetch(address, path));
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(fetch(address, "/proxyMode").await.0, 200);
        assert!(!hold.is_finished() && !answer.is_finished(), "{path}");
        release.send(()).unwrap();
        answer.await.unwrap();
        hold.join().unwrap();
    }
}

#[tokio::test]
async fn before_the_first_sync_nothing_is_programmed() {
    let address = start(metrics_router(state(Status::default()))).await;
    let (code, _, body) = fetch(address, "/programmed/default/web").await;
    assert_eq!((code, &*body), (503, r#"{"error":"the first sync of node-a is not complete"}"#));
    let (code, _, body) = fetch(address, "/programmed").await;
    assert_eq!((code, &*body), (200, r#"{"node":"node-a","synced":false,"services":[]}"#));
}

#[tokio::test]
async fn the_page_is_there_only_where_it_is_asked_for() {
    use crate::config::page::{PageSettings, Shows};
    let closed = start(metrics_router(state(Status::default()))).await;
    assert_eq!(fetch(closed, "/").await.0, 404);
    let settings = PageSettings { page: Shows::All, ..PageSettings::default() };
    let page = crate::page::Agent::new(settings, "/nonexistent".into(), "node-a".to_owned(), Vec::new);
    let open = start(metrics_router(State { page, ..state(Status::default()) })).await;
    // The `Host` header of this request is not the node's name.
    assert_eq!(fetch(open, "/").await.0, 403);
    assert_eq!(fetch(open, "/proxyMode").await.0, 200, "other paths are as they were");
    let get = async |path: &str| {
        let mut stream = TcpStream::connect(open).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: node-a:10249\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).await.unwrap();
        reply
    };
    let index = get("/").await;
    assert!(index.starts_with("HTTP/1.1 200") && index.contains("<title>Ballast</title>"), "{index}");
    let policy = "content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'";
    assert!(index.contains(policy) && !index.contains("<style") && !index.contains("onclick="), "{index}");
    for file in index.split(['"']).filter(|part| part.starts_with("page/")) {
        let reply = get(&format!("/{file}")).await;
        assert!(reply.starts_with("HTTP/1.1 200"), "{file} {reply}");
        assert!(reply.contains("x-content-type-options: nosniff"), "{file}");
    }
    assert!(get("/page/nothing.js").await.starts_with("HTTP/1.1 404"));
    let history = get("/page/history?service=").await;
    assert!(history.ends_with(r#"{"interval":15,"last":0,"points":[]}"#), "{history}");
}
