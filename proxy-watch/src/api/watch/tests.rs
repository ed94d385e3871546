//! Tests against a server that implements just enough of the API: lists, and watches that stay open until the test ends them.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::{broadcast, mpsc};

use crate::api::client::{Options, connect};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use proxy_core::model::{Key, NodeView, Object, ObjectKind};

use super::*;

const SERVICES: &str = "/api/v1/services";
const SERVICE_A: &str = "/api/v1/namespaces/default/services";
const SLICES: &str = "/apis/discovery.k8s.io/v1/endpointslices";
const NODES: &str = "/api/v1/nodes";
const CIDRS: &str = "/apis/networking.k8s.io/v1/servicecidrs";

/// How the server answers a request for a streamed list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Streams {
    /// Sends the objects, and a bookmark that ends the list.
    #[default]
    Served,
    /// Rejects the request, like a server on which the feature is disabled.
    Refused,
}

#[derive(Default)]
struct Inner {
    /// The newest version of all objects.
    version: u64,
    streams: Streams,
    items: BTreeMap<&'static str, Vec<Value>>,
    /// The objects as they were at each version.
    past: Vec<Value>,
    /// What the server answers instead to a list of Services that need not be the newest: a version and the objects.
    cached: Option<(u64, Vec<Value>)>,
    /// Failures that are sent before the regular answers: (path, whether for a watch, status).
    failures: Vec<(&'static str, bool, u16)>,
    requests: Vec<String>,
    /// Whether the request is a watch, and its `Accept-Encoding`.
    encodings: BTreeSet<(bool, String)>,
    agents: BTreeSet<String>,
}

/// The server, as the test controls it.
#[derive(Clone)]
struct Server {
    inner: Arc<Mutex<Inner>>,
    /// (path, line) for the watches of that path.
    lines: broadcast::Sender<(String, String)>,
}

async fn answer(State(server): State<Server>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let query = request.uri().query().unwrap_or_default();
    let (is_watch, is_list) = (query.contains("watch=true"), query.contains("sendInitialEvents=true"));
    let mut inner = server.inner.lock().unwrap();
    inner.requests.push(request.uri().to_string());
    let encodings = request.headers().get("accept-encoding").map(|value| value.to_str().unwrap().to_owned());
    inner.encodings.insert((is_watch, encodings.unwrap_or_default()));
    inner.agents.insert(request.headers()["user-agent"].to_str().unwrap().to_owned());
    let failure = inner.failures.iter().position(|(p, watch, _)| *p == path && *watch == is_watch);
    if let Some((_, _, code)) = failure.map(|at| inner.failures.remove(at)) {
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
            "reason": "Test", "message": "as the test asked"});
        let wait = [("retry-after", if code == 429 { "2" } else { "0" })];
        return (StatusCode::from_u16(code).unwrap(), wait, status.to_string()).into_response();
    }
    let mut first = Vec::new();
    if is_list {
        if inner.streams == Streams::Refused {
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 422,
                "reason": "Invalid", "message": "sendInitialEvents is forbidden"});
            return (StatusCode::UNPROCESSABLE_ENTITY, status.to_string()).into_response();
        }
        let items = inner.items.get(path.as_str()).into_iter().flatten();
        first.extend(items.map(|item| json!({"type": "ADDED", "object": item})));
        let metadata = json!({"resourceVersion": inner.version.to_string(), "annotations": {"k8s.io/initial-events-end": "true"}});
        let object = json!({"kind": "Service", "apiVersion": "v1", "metadata": metadata});
        first.push(json!({"type": "BOOKMARK", "object": object}));
    }
    if is_watch {
        let first: Vec<_> =
            first.into_iter().map(|line| Ok::<_, std::convert::Infallible>(format!("{line}\n"))).collect();
        let lines = stream::unfold((server.lines.subscribe(), path), |(mut lines, path)| async {
            loop {
                let (to, line) = lines.recv().await.ok()?;
                if to == path {
                    return Some((Ok::<_, std::convert::Infallible>(line + "\n"), (lines, path)));
                }
            }
        });
        return Body::from_stream(stream::iter(first).chain(lines)).into_response();
    }
    // The path of a request for one object contains its namespace.
    let whole = path.replace("/namespaces/default", "");
    let items = inner.items.iter().find(|(of, _)| **of == whole).map(|(_, items)| items.clone());
    let named = query.split('&').find_map(|part| part.strip_prefix("fieldSelector=metadata.name%3D"));
    let is_asked_for = |item: &Value| named.is_none_or(|name| item["metadata"]["name"] == name);
    let mut items: Vec<_> = items.into_iter().flatten().filter(is_asked_for).collect();
    let mut version = inner.version;
    if let Some(at) = query
        .contains("Exact")
        .then(|| query.split('&').find_map(|part| part.strip_prefix("resourceVersion=")))
    {
        let is_then =
            |item: &&Value| item["metadata"]["resourceVersion"].as_str() == at && is_asked_for(item);
        items = inner.past.iter().filter(is_then).cloned().collect();
    }
    if let Some(cached) = inner.cached.clone().filter(|_| path == SERVICES && query.contains("NotOlderThan"))
    {
        (version, items) = cached;
    }
    let metadata = json!({"resourceVersion": version.to_string()});
    json!({"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": items})
        .to_string()
        .into_response()
}

struct Test {
    server: Server,
    events: mpsc::Receiver<Event>,
    watch_states: watch::Receiver<Watches>,
    agent: tokio::task::JoinHandle<()>,
}

impl Test {
    /// Starts a server with one Service and this node, whose first answers are `failures`, and an agent that watches it.
    async fn start(failures: &[(&'static str, bool, u16)]) -> Self {
        Self::start_with(Streams::Served, failures).await
    }

    async fn start_with(streams: Streams, failures: &[(&'static str, bool, u16)]) -> Self {
        let (lines, _) = broadcast::channel(16);
        let server = Server { inner: Arc::default(), lines };
        {
            let mut inner = server.inner.lock().unwrap();
            (inner.version, inner.streams) = (10, streams);
            inner.failures = failures.to_vec();
            inner.items.insert(SERVICES, vec![service("a", "10.96.0.1")]);
            inner.items.insert(
                NODES,
                vec![json!({"metadata": {"name": "n1", "resourceVersion": "1",
                "labels": {"topology.kubernetes.io/zone": "z"}},
                "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]}})],
            );
        }
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let router = Router::new().fallback(answer).with_state(server.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });

        let mut kubeconfig = tempfile::NamedTempFile::new().unwrap();
        write!(
            kubeconfig,
            "{{apiVersion: v1, kind: Config, current-context: c, contexts: [{{name: c, context: {{cluster: k, user: u}}}}], \
             clusters: [{{name: k, cluster: {{server: '{url}'}}}}], users: [{{name: u, user: {{}}}}]}}"
        )
        .unwrap();
        let options = Options { kubeconfig: Some(kubeconfig.path().to_owned()), servers: Vec::new() };
        let client = connect(&options, watch::Sender::default()).await.unwrap().client;
        let (sender, events) = mpsc::channel(16);
        let (watches, watch_states) = watch::channel(Watches::new());
        let needs_nodes = watch::channel(None).1;
        let agent = tokio::spawn(run(client, "n1".to_owned(), sender, needs_nodes, watches, |_| ()));
        Self { server, events, watch_states, agent }
    }

    async fn next(&mut self) -> Event {
        timeout(Duration::from_secs(30), self.events.recv())
            .await
            .expect("an event")
            .expect("it runs for ever")
    }

    /// Returns the names in the next list of Services.
    async fn services(&mut self) -> Vec<String> {
        loop {
            if let Event::Reset(Listing::Services(services)) = self.next().await {
                return services.into_iter().map(|s| s.name.name.to_string()).collect();
            }
        }
    }

    /// Waits until all four kinds are watched.
    async fn watches(&self) {
        while self.server.lines.receiver_count() < 4 {
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Sends an event; a change of an object gets the next version.
    fn send(&self, path: &str, kind: &str, object: &Value) {
        let mut object = object.clone();
        if kind != "ERROR" {
            let mut inner = self.server.inner.lock().unwrap();
            inner.version += 1;
            object["metadata"]["resourceVersion"] = inner.version.to_string().into();
            inner.past.push(object.clone());
        }
        self.send_as_it_is(path, kind, &object);
    }

    fn send_as_it_is(&self, path: &str, kind: &str, object: &Value) {
        let line = json!({"type": kind, "object": object}).to_string();
        self.server.lines.send((path.to_owned(), line)).unwrap();
    }

    fn asked_so_far(&self) -> usize {
        self.server.inner.lock().unwrap().requests.iter().filter(|one| one.contains("/services?")).count()
    }

    /// Returns the requests for Services since the last call.
    fn asked(&self) -> Vec<String> {
        let mut requests = std::mem::take(&mut self.server.inner.lock().unwrap().requests);
        requests.retain(|request| request.contains("/services?"));
        requests
    }

    /// Sets the existing Services; what was there before has never been.
    fn set(&self, services: Vec<Value>) {
        let mut inner = self.server.inner.lock().unwrap();
        inner.items.insert(SERVICES, services);
        inner.past.clear();
    }
}

fn service(name: &str, address: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": name, "namespace": "default", "resourceVersion": "8"},
        "spec": {"clusterIP": address, "ports": [{"port": 80}]}})
}

#[tokio::test]
async fn lists_are_sent_before_watch_events() {
    let mut test = Test::start(&[]).await;
    let first = test.next().await;
    assert!(
        matches!(&first, Event::Reset(Listing::Node(Some(n))) if n.zone.as_deref() == Some("z")),
        "the zone comes before what depends on it: {first:?}"
    );
    let mut kinds = [test.next().await, test.next().await, test.next().await].map(|event| match event {
        Event::Reset(listing) => listing.kind(),
        other => panic!("{other:?}"),
    });
    kinds.sort_unstable();
    assert_eq!(kinds, [ObjectKind::Service, ObjectKind::Slice, ObjectKind::ServiceCidr]);
    test.watches().await;

    test.send(SERVICES, "ADDED", &service("b", "10.96.0.2"));
    assert!(matches!(test.next().await, Event::Apply(Object::Service(s)) if s.name.name == "b"));
    let key = Key::Service(proxy_core::model::ServiceName::new("default", "b"));
    test.send(SERVICES, "MODIFIED", &service("b", "None"));
    assert_eq!(test.next().await, Event::Delete(key.clone()), "it is no business of ours any more");
    test.send(SERVICES, "DELETED", &service("b", "10.96.0.2"));
    assert_eq!(test.next().await, Event::Delete(key));
    let slice = json!({"metadata": {"name": "s", "namespace": "default", "resourceVersion": "9",
        "labels": {"kubernetes.io/service-name": "a"}}, "addressType": "IPv4", "endpoints": []});
    test.send(SLICES, "ADDED", &slice);
    assert!(matches!(test.next().await, Event::Apply(Object::Slice(s)) if s.service.name == "a"));

    let inner = test.server.inner.lock().unwrap();
    let has = |path: &str, selector: &str| {
        inner.requests.iter().any(|r| r.starts_with(path) && r.contains(selector))
    };
    assert!(has(SERVICES, "fieldSelector=spec.clusterIP%21%3DNone"), "{:?}", inner.requests);
    let headless = "%21service.kubernetes.io%2Fheadless";
    assert!(has(SLICES, headless) && !has(SERVICES, headless), "{:?}", inner.requests);
    assert!(!has(SERVICES, "service-proxy-name"), "addresses of other proxies must be known");
    assert!(has(NODES, "fieldSelector=metadata.name%3Dn1"));
    assert!(
        inner.agents.iter().all(|a| a == concat!("ballast/", env!("CARGO_PKG_VERSION"))),
        "{:?}",
        inner.agents
    );
}

#[tokio::test]
async fn a_watch_that_expires_ends_in_a_new_list() {
    let mut test = Test::start(&[]).await;
    assert_eq!(test.services().await, ["a"]);
    test.watches().await;
    test.set(vec![service("b", "10.96.0.2"), service("c", "10.96.0.3")]);
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410, "reason": "Expired",
        "message": "too old resource version"});
    test.send(SERVICES, "ERROR", &status);
    assert_eq!(test.services().await, ["b", "c"]);
}

/// Makes the watch of Services fail.
fn fail(test: &Test) {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 500});
    test.send(SERVICES, "ERROR", &status);
}

/// Makes the watch of Services fail, and waits until it is resumed.
async fn fail_and_resume(test: &Test) {
    let resumed = || {
        let inner = test.server.inner.lock().unwrap();
        let of_services =
            |request: &&String| request.contains("/services?") && request.contains("watch=true");
        inner.requests.iter().filter(of_services).count()
    };
    let before = resumed();
    fail(test);
    while resumed() == before {
        sleep(Duration::from_millis(5)).await;
    }
    // The request is recorded before the server begins to send events.
    sleep(Duration::from_millis(50)).await;
    test.watches().await;
}

#[tokio::test(start_paused = true)]
async fn each_need_has_a_watch_of_its_own_even_if_the_end_of_the_last_was_not_seen() {
    let (need, needed) = watch::channel(None);
    let begin = || stream::once(future::ready(Report::Late("nodes"))).chain(stream::pending()).boxed();
    let mut reports = Box::pin(while_needed(needed, begin));
    let mut begins = async || timeout(Duration::from_secs(1), reports.next()).await.is_ok();
    assert!(!begins().await);
    let first = Instant::now();
    need.send_replace(Some(first));
    assert!(begins().await);
    need.send_replace(Some(first));
    assert!(!begins().await, "it is the same need");
    need.send_replace(None);
    need.send_replace(Some(Instant::now()));
    assert!(begins().await);
    need.send_replace(None);
    assert!(!begins().await);
}

/// After etcd is restored from a snapshot, a watch would continue from a version that does not exist yet, and miss deletions.
#[tokio::test]
async fn a_history_that_went_back_ends_in_a_new_list() {
    let mut test = Test::start(&[]).await;
    assert_eq!(test.services().await, ["a"]);
    test.watches().await;
    // A failure alone does not cause a list.
    fail_and_resume(&test).await;
    test.send(SERVICES, "ADDED", &service("b", "10.96.0.2"));
    while !matches!(test.next().await, Event::Apply(Object::Service(s)) if s.name.name == "b") {}
    test.set(vec![service("c", "10.96.0.3")]);
    test.server.inner.lock().unwrap().version = 3;
    fail(&test);
    assert_eq!(test.services().await, ["c"]);
}

#[tokio::test]
async fn objects_that_were_deleted_during_a_break_cause_no_list() {
    let mut test = Test::start(&[]).await;
    assert_eq!(test.services().await, ["a"]);
    test.watches().await;
    for name in ["b", "c", "d", "e", "f"] {
        test.send(SERVICES, "ADDED", &service(name, "10.96.0.2"));
        while !matches!(test.next().await, Event::Apply(Object::Service(s)) if s.name.name == name) {}
    }
    test.asked();
    fail_and_resume(&test).await;
    let asked = test.asked();
    assert!(!asked.iter().any(|request| request.contains("sendInitialEvents=true")), "{asked:?}");
}

/// The restored server has made as many changes as were lost before the agent asks it.
#[tokio::test]
async fn a_history_that_has_grown_again_is_known_by_its_objects() {
    let mut test = Test::start(&[]).await;
    assert_eq!(test.services().await, ["a"]);
    test.watches().await;
    test.set(vec![service("b", "10.96.0.2"), service("c", "10.96.0.3")]);
    test.server.inner.lock().unwrap().version = 50;
    fail(&test);
    assert_eq!(test.services().await, ["b", "c"], "the one that changed last is not there");
    test.watches().await;
    test.send(SERVICES, "DELETED", &service("b", "10.96.0.2"));
    while !matches!(test.next().await, Event::Delete(_)) {}
    fail(&test);
    assert_eq!(test.services().await, ["b", "c"], "the one that was removed last is there");
}

/// Creates `ghost` and `job`, and deletes `job`.
async fn delete_the_newest(test: &mut Test) {
    assert_eq!(test.services().await, ["a"]);
    test.watches().await;
    for name in ["ghost", "job"] {
        test.send(SERVICES, "ADDED", &service(name, "10.96.0.2"));
        while !matches!(test.next().await, Event::Apply(Object::Service(s)) if s.name.name == name) {}
    }
    test.send(SERVICES, "DELETED", &service("job", "10.96.0.2"));
    while !matches!(test.next().await, Event::Delete(_)) {}
}

#[tokio::test]
async fn restore_after_a_deletion_is_known_by_the_change_before() {
    let mut test = Test::start(&[]).await;
    delete_the_newest(&mut test).await;
    test.set(vec![service("a", "10.96.0.1"), service("missed", "10.96.0.3")]);
    test.server.inner.lock().unwrap().version = 50;
    fail(&test);
    assert_eq!(test.services().await, ["a", "missed"]);
}

#[tokio::test]
async fn deletion_before_a_break_causes_no_list() {
    let mut test = Test::start(&[]).await;
    delete_the_newest(&mut test).await;
    test.asked();
    fail_and_resume(&test).await;
    let asked = test.asked();
    assert!(!asked.iter().any(|request| request.contains("sendInitialEvents=true")), "{asked:?}");
    assert!(asked.iter().any(|request| request.contains("ghost")), "{asked:?}");
}

#[tokio::test]
async fn history_without_an_object_left_ends_in_a_new_list() {
    let mut test = Test::start(&[]).await;
    assert_eq!(test.services().await, ["a"]);
    test.watches().await;
    test.send(SERVICES, "DELETED", &service("a", "10.96.0.1"));
    while !matches!(test.next().await, Event::Delete(_)) {}
    test.set(vec![service("missed", "10.96.0.3")]);
    test.server.inner.lock().unwrap().version = 50;
    fail(&test);
    assert_eq!(test.services().await, ["missed"]);
}

#[tokio::test]
async fn a_watch_that_cannot_begin_ends_in_a_new_list() {
    let mut test = Test::start_with(Streams::Refused, &[]).await;
    test.server.inner.lock().unwrap().failures = vec![(SERVICES, true, 422), (SERVICES, true, 410)];
    assert_eq!(test.services().await, ["a"]);
    assert_eq!(test.services().await, ["a"], "listed again, not watched from the same place for ever");
    test.watches().await;
}

#[tokio::test]
async fn a_streamed_list_is_all_there_is() {
    let mut test = Test::start(&[]).await;
    assert_eq!(test.services().await, ["a"]);
    test.watches().await;
    let inner = test.server.inner.lock().unwrap();
    let lists: Vec<_> = inner.requests.iter().filter(|request| !request.contains("watch=true")).collect();
    assert!(lists.is_empty(), "{lists:?}");
    let consistent = |request: &&String| request.ends_with("resourceVersion=");
    let lists = inner.requests.iter().filter(|request| request.contains("sendInitialEvents=true"));
    assert!(
        lists.clone().count() == 4 && lists.clone().all(|list| consistent(&list)),
        "{:?}",
        inner.requests
    );
}

#[tokio::test]
async fn a_server_without_streamed_lists_is_asked_for_whole_ones_out_of_its_cache() {
    let mut test = Test::start_with(Streams::Refused, &[]).await;
    assert_eq!(test.services().await, ["a"]);
    test.watches().await;
    let inner = test.server.inner.lock().unwrap();
    let lists: Vec<_> = inner.requests.iter().filter(|request| !request.contains("watch=true")).collect();
    assert_eq!(lists.len(), 4, "{lists:?}");
    let encodings = [(false, "gzip".to_owned()), (true, "identity".to_owned())];
    assert!(inner.encodings.iter().eq(&encodings), "whole lists may be compressed: {:?}", inner.encodings);
    assert!(lists.iter().all(|request| request.contains("resourceVersion=0")), "{lists:?}");
}

#[tokio::test]
async fn watch_recovers_from_errors_of_the_server() {
    let refused = [(NODES, true, 403), (SERVICES, true, 500), (SERVICES, true, 403), (SLICES, true, 500)];
    let mut test = Test::start(&refused).await;
    assert_eq!(test.services().await, ["a"]);
    test.watches().await;
    test.send(SERVICES, "ADDED", &service("b", "10.96.0.2"));
    while !matches!(test.next().await, Event::Apply(Object::Service(s)) if s.name.name == "b") {}
}

/// Waits until the watch of the resource fails, or works.
async fn becomes(test: &mut Test, resource: &str, fails: bool) {
    let is_so = |watches: &Watches| watches.get(resource).is_some_and(|failure| failure.is_some() == fails);
    timeout(Duration::from_secs(30), test.watch_states.wait_for(is_so)).await.expect("in time").unwrap();
}

#[tokio::test]
async fn watch_fails_until_the_server_accepts_it_again() {
    let mut test = Test::start(&[(SERVICES, true, 500)]).await;
    becomes(&mut test, "services", true).await;
    assert_eq!(test.services().await, ["a"]);
    becomes(&mut test, "services", false).await;
    test.watches().await;
    test.server.inner.lock().unwrap().failures = vec![(SERVICES, true, 401); 3];
    fail(&test);
    becomes(&mut test, "services", true).await;
    assert!(test.watch_states.borrow()["endpointslices.discovery.k8s.io"].is_none(), "it still works");
    becomes(&mut test, "services", false).await;
}

#[tokio::test]
async fn whole_list_does_not_show_that_the_watch_works() {
    let mut test = Test::start_with(Streams::Refused, &[]).await;
    test.services().await;
    assert!(!test.watch_states.borrow().contains_key("services"), "the watch may be refused");
    becomes(&mut test, "services", false).await;
}

#[tokio::test]
async fn cluster_without_service_cidrs_is_no_failure() {
    let mut test = Test::start(&[(CIDRS, true, 404); 20]).await;
    let resource = "servicecidrs.networking.k8s.io";
    let watches = timeout(
        Duration::from_secs(30),
        test.watch_states.wait_for(|watch_states| watch_states.contains_key(resource)),
    )
    .await;
    assert_eq!(watches.unwrap().unwrap()[resource], None);
}

#[tokio::test]
async fn it_stops_with_its_receiver() {
    let Test { agent, events, .. } = Test::start(&[]).await;
    drop(events);
    timeout(Duration::from_secs(10), agent).await.expect("it stops").unwrap();
}

#[tokio::test(start_paused = true)]
async fn pauses_grow_although_each_attempt_begins_well() {
    let attempt = || {
        let refused = watcher::Error::InitialListFailed(kube::Error::LinesCodecMaxLineLengthExceeded);
        stream::iter([Ok(watcher::Event::<Node>::Init), Err(refused)])
    };
    let begun = Instant::now();
    let attempts = paced(stream::repeat_with(attempt).flatten(), REFUSED_DELAY);
    let times: Vec<_> = attempts
        .filter(|item| future::ready(item.is_err()))
        .take(12)
        .map(|_| begun.elapsed())
        .collect()
        .await;
    assert!(times[3] < Duration::from_secs(3), "short at first: {times:?}");
    assert!(times.windows(2).skip(6).all(|pair| pair[1] >= pair[0] + MAX_DELAY), "{times:?}");
}

/// The history of an overloaded server is compared once, however many events follow.
#[tokio::test]
async fn a_broken_watch_asks_once_and_obeys_retry_after() {
    let mut test = Test::start(&[]).await;
    assert_eq!(test.services().await, ["a"]);
    test.watches().await;
    test.asked();
    test.server.inner.lock().unwrap().failures = vec![(SERVICE_A, false, 429), (SERVICES, true, 429)];
    let begun = Instant::now();
    fail(&test);
    while test.asked_so_far() < 3 {
        sleep(Duration::from_millis(5)).await;
    }
    assert!(begun.elapsed() > Duration::from_secs(2), "{:?}", begun.elapsed());
    test.watches().await;
    for number in 0..300 {
        test.send(SERVICES, "MODIFIED", &service("a", &format!("10.96.{}.{}", number / 256, number % 256)));
        assert!(matches!(test.next().await, Event::Apply(Object::Service(_))));
    }
    let asked = test.asked();
    let looks = asked.iter().filter(|request| request.contains("metadata.name")).count();
    assert_eq!((looks, asked.len()), (2, 4), "{asked:?}");
    assert!(begun.elapsed() > Duration::from_secs(4), "both answers demanded two seconds");
}

#[tokio::test]
async fn an_event_from_the_past_is_refused_and_a_list_decides() {
    let mut test = Test::start(&[]).await;
    assert_eq!(test.services().await, ["a"]);
    test.watches().await;
    test.send(SERVICES, "MODIFIED", &service("a", "10.96.0.9"));
    while !matches!(test.next().await, Event::Apply(Object::Service(_))) {}
    test.set(vec![service("now", "10.96.0.9")]);
    test.asked();
    test.send_as_it_is(SERVICES, "MODIFIED", &service("past", "10.96.0.1"));
    let Event::Reset(Listing::Services(list)) = test.next().await else { panic!("an event from the past") };
    assert_eq!(list[0].name.name, "now");
    assert!(test.asked()[0].ends_with("resourceVersion="), "a consistent list");
}

/// The server's cache is frozen, and the server does not stream lists.
#[tokio::test]
async fn a_list_from_the_past_is_refused_and_a_consistent_one_decides() {
    let mut test = Test::start_with(Streams::Refused, &[]).await;
    assert_eq!(test.services().await, ["a"]);
    test.watches().await;
    test.send(SERVICES, "ADDED", &service("b", "10.96.0.2"));
    while !matches!(test.next().await, Event::Apply(Object::Service(_))) {}
    {
        let mut inner = test.server.inner.lock().unwrap();
        inner.cached = Some((9, vec![service("past", "10.96.0.1")]));
        inner.items.insert(SERVICES, vec![service("now", "10.96.0.2")]);
    }
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410});
    test.asked();
    test.send(SERVICES, "ERROR", &status);
    assert_eq!(test.services().await, ["now"]);
    let lists: Vec<_> = test.asked().into_iter().filter(|request| !request.contains("watch=true")).collect();
    assert!(lists[0].contains("resourceVersion=11&resourceVersionMatch=NotOlderThan"), "{lists:?}");
    assert!(lists.len() == 2 && !lists[1].contains("resourceVersion"), "{lists:?}");
}

#[tokio::test]
async fn an_event_that_cannot_be_decoded_ends_in_a_new_list() {
    let mut test = Test::start(&[]).await;
    assert_eq!(test.services().await, ["a"]);
    test.watches().await;
    let mut odd = service("a", "10.96.0.1");
    odd["spec"]["ports"] = "none".into();
    test.send(SERVICES, "MODIFIED", &odd);
    loop {
        match test.next().await {
            Event::Reset(Listing::Services(list)) => break assert_eq!(list[0].name.name, "a"),
            Event::Reset(_) => {}
            other => panic!("the known object stays: {other:?}"),
        }
    }
}

#[tokio::test]
async fn watches_end_at_random_between_five_and_ten_minutes() {
    let mut test = Test::start(&[]).await;
    assert_eq!(test.services().await, ["a"]);
    test.watches().await;
    for _ in 0..4 {
        fail_and_resume(&test).await;
    }
    let inner = test.server.inner.lock().unwrap();
    let seconds = |request: &String| {
        let (_, rest) = request.split_once("timeoutSeconds=")?;
        rest.split('&').next()?.parse::<u32>().ok()
    };
    let times: BTreeSet<_> = inner.requests.iter().filter_map(seconds).collect();
    assert!(times.iter().all(|time| (300..600).contains(time)) && times.len() > 3, "{times:?}");
}

#[test]
fn wait_for_the_node_ends_with_its_first_address() {
    let event = |event| ends_wait(&Report::Event("nodes", Box::new(event)));
    let node = NodeView::new("n1");
    let address = || vec!["192.0.2.1".parse().unwrap()];
    let (internal, external) = (
        NodeView { internal_ips: address(), ..node.clone() },
        NodeView { external_ips: address(), ..node.clone() },
    );
    assert!(event(Event::Reset(Listing::Node(Some(internal.clone())))));
    assert!(event(Event::Apply(Object::Node(internal))));
    assert!(event(Event::Apply(Object::Node(external))));
    assert!(!event(Event::Reset(Listing::Node(Some(node.clone())))), "a cloud provider sets them later");
    assert!(!event(Event::Apply(Object::Node(node))));
    assert!(!event(Event::Reset(Listing::Node(None))), "kubelet registers it later");
    let failed = |code| {
        let status = kube::core::Status { code, ..kube::core::Status::default() };
        ends_wait(&Report::Failed("nodes", watcher::Error::WatchError(Box::new(status))))
    };
    assert_eq!((failed(403), failed(500)), (true, false));
}

#[test]
fn changes_during_a_list_are_found_by_name() {
    let object = |name: &str, version: usize| OtherNode {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            resource_version: Some(version.to_string()),
            ..ObjectMeta::default()
        },
        ..OtherNode::default()
    };
    let mut list = List::default();
    assert!(report::<OtherNode>(Ok(watcher::Event::Init), &mut list).is_none());
    let objects = (0..10_000).map(|number| object(&format!("node-{number}"), 1));
    for object in objects.clone() {
        assert!(report(Ok(watcher::Event::InitApply(object)), &mut list).is_none());
    }
    for object in objects {
        assert!(report(Ok(watcher::Event::Apply(object)), &mut list).is_none());
    }
    assert!(report(Ok(watcher::Event::Delete(object("node-7", 2))), &mut list).is_none());
    let Some(Report::Event(_, event)) = report::<OtherNode>(Ok(watcher::Event::InitDone), &mut list) else {
        panic!("the list is complete")
    };
    let Event::Reset(Listing::Others(nodes)) = *event else { panic!("{event:?}") };
    assert_eq!(nodes.len(), 9_999);
    assert!(nodes.iter().all(|node| node.name != "node-7"));
}

fn kinds_of(reports: &[Report]) -> String {
    let letter = |report: &Report| match report {
        Report::Event(..) => 'e',
        Report::Late(_) => 'l',
        Report::Failed(..) => 'f',
    };
    reports.iter().map(letter).collect()
}

#[tokio::test(start_paused = true)]
async fn a_list_that_stays_incomplete_is_late_once() {
    let pause = |seconds| sleep(Duration::from_secs(seconds));
    let items = stream::iter([(20, watcher::Event::<Node>::Init), (80, watcher::Event::InitDone)])
        .chain(stream::iter([(80, watcher::Event::Init), (20, watcher::Event::InitDone)]))
        .chain(stream::iter([(80, watcher::Event::Init), (40, watcher::Event::InitDone)]))
        .then(move |(seconds, event)| pause(seconds).map(move |()| Ok(event)));
    let reports = collected(items);
    // The other lists wait for the node's object before their first request.
    sleep(Duration::from_mins(1)).await;
    let reports: Vec<_> = reports.collect().await;
    assert_eq!(kinds_of(&reports), "leele", "the second list was in time");
}

#[tokio::test(start_paused = true)]
async fn a_list_that_is_refused_is_not_late() {
    let refused = kube::core::Status { code: 404, ..kube::core::Status::default() };
    let items = stream::iter([Err::<watcher::Event<Node>, _>(watcher::Error::WatchError(Box::new(refused)))])
        .chain(stream::once(sleep(Duration::from_mins(5)).map(|()| Ok(watcher::Event::Init))));
    let reports: Vec<_> = collected(items).collect().await;
    assert_eq!(kinds_of(&reports), "f");
}

#[tokio::test(start_paused = true)]
async fn refusals_that_last_are_repeated_after_minutes() {
    for (code, is_rare) in [(403, true), (404, true), (401, false), (500, false)] {
        let refused = move || {
            let status = kube::core::Status { code, ..kube::core::Status::default() };
            Err::<(), _>(watcher::Error::WatchStartFailed(kube::Error::Api(Box::new(status))))
        };
        let begun = Instant::now();
        let times: Vec<_> = paced(stream::repeat_with(refused), LACKED_DELAY)
            .take(14)
            .map(|_| begun.elapsed())
            .collect()
            .await;
        let pauses: Vec<_> = times.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect();
        assert!(pauses[..9].iter().all(|pause| *pause <= 2 * MAX_DELAY), "{code}: {pauses:?}");
        let is_long = |pause: &Duration| (LACKED_DELAY..2 * LACKED_DELAY).contains(pause);
        assert!(pauses[9..].iter().all(|pause| is_long(pause) == is_rare), "{code}: {pauses:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_object_ends_the_long_pauses() {
    let refused = || {
        let status = kube::core::Status { code: 403, ..kube::core::Status::default() };
        Err::<(), _>(watcher::Error::WatchStartFailed(kube::Error::Api(Box::new(status))))
    };
    let items = stream::repeat_with(refused).take(11).chain(stream::iter([Ok(())]));
    let times: Vec<_> = {
        let begun = Instant::now();
        paced(items.chain(stream::repeat_with(refused)), REFUSED_DELAY)
            .take(14)
            .map(move |_| begun.elapsed())
            .collect()
            .await
    };
    assert!(times[13].saturating_sub(times[12]) <= 2 * MAX_DELAY, "{times:?}");
}
