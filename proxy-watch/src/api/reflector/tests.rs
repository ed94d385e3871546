//! Tests against a server whose streamed lists do not end.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use axum::body::Body;
use http::header::CONTENT_TYPE;
use http::{Request, Response};
use kube::{Api, Client, client};
use rstest::rstest;
use serde_json::json;
use tokio::sync::watch;
use tower::service_fn;

use super::*;
use crate::api::fresh::Relister;
use crate::api::objects::Service;
use proxy_core::model::{Key, ServiceName, WatchFailure, Watches};

/// What the server sends after the objects of a streamed list, instead of the bookmark that ends it.
#[derive(Clone, Copy)]
enum Rest {
    Nothing,
    End,
    Cut,
    /// A bookmark from time to time, as in a watch.
    Bookmarks,
    /// A new object from time to time, as in a watch.
    Objects,
    /// A long list on a slow network, and its end.
    Slow,
}

fn line(kind: &str, name: &str) -> Vec<u8> {
    event(kind, name, "7")
}

fn event(kind: &str, name: &str, version: &str) -> Vec<u8> {
    let metadata = json!({"name": name, "namespace": "default", "resourceVersion": version});
    let object = json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {}});
    format!("{}\n", json!({"type": kind, "object": object})).into_bytes()
}

fn list_ends() -> Vec<u8> {
    let metadata = json!({"resourceVersion": "9", "annotations": {LIST_ENDS: "true"}});
    let object = json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {}});
    format!("{}\n", json!({"type": "BOOKMARK", "object": object})).into_bytes()
}

/// Returns a server that answers each request after `delay`, and its requests.
fn server(rest: Rest, delay: Duration) -> (Api<Service>, Arc<Mutex<Vec<String>>>) {
    let requests: Arc<Mutex<Vec<String>>> = Arc::default();
    let log = Arc::clone(&requests);
    let service = service_fn(move |request: Request<client::Body>| {
        let uri = request.uri().to_string();
        log.lock().unwrap().push(uri.clone());
        let body = if uri.contains("sendInitialEvents=true") {
            let later = move |kind, name| {
                stream::repeat(()).then(move |()| async move {
                    sleep(Duration::from_secs(50)).await;
                    Ok(line(kind, name))
                })
            };
            let rest = match rest {
                Rest::Nothing => stream::pending().boxed(),
                Rest::End => stream::empty().boxed(),
                Rest::Cut => stream::iter([Err(io::Error::other("reset"))]).boxed(),
                Rest::Bookmarks => later("BOOKMARK", "").boxed(),
                Rest::Objects => later("ADDED", "b").boxed(),
                Rest::Slow => {
                    let objects = stream::iter(0..500).then(|_| async {
                        sleep(Duration::from_millis(500)).await;
                        Ok(line("ADDED", "b"))
                    });
                    objects.chain(stream::iter([Ok(list_ends())])).chain(stream::pending()).boxed()
                }
            };
            let first = stream::once(async move {
                sleep(delay).await;
                Ok(line("ADDED", "a"))
            });
            Body::from_stream(first.chain(rest))
        } else if uri.contains("watch=true") {
            Body::from_stream(stream::pending::<io::Result<Vec<u8>>>())
        } else {
            let metadata = json!({"resourceVersion": "9"});
            let items = [json!({"metadata": {"name": "a", "namespace": "default", "resourceVersion": "7"}})];
            Body::from(json!({"kind": "List", "metadata": metadata, "items": items}).to_string())
        };
        let answer = Response::builder().header(CONTENT_TYPE, "application/json").body(body).unwrap();
        std::future::ready(Ok::<_, Infallible>(answer))
    });
    (Api::all(Client::new(service, "default")), requests)
}

/// Returns the items in a short notation, until the text is long enough.
async fn text_of(
    items: impl Stream<Item = Result<Event<Service>>>,
    is_complete: impl Fn(&str) -> bool,
) -> String {
    let mut text = String::new();
    let mut items = std::pin::pin!(items);
    while !is_complete(&text) {
        text.push(match items.next().await.unwrap() {
            Ok(Event::Init) => '[',
            Ok(Event::InitApply(_)) => 'o',
            Ok(Event::InitDone) => ']',
            Ok(_) => 'c',
            Err(_) => '!',
        });
    }
    text
}

/// Returns the items until a list is complete, and the seconds that it took.
async fn first_list(api: Api<Service>) -> (String, u64) {
    let begun = Instant::now();
    let items = reflect(Source::new(api), Config::default());
    (text_of(items, |text| text.ends_with(']')).await, begun.elapsed().as_secs())
}

#[rstest]
#[case::silent(Rest::Nothing, "[o![o]", 90)]
#[case::ended(Rest::End, "[o![o![o]", 0)]
#[case::cut_off(Rest::Cut, "[o![o![o]", 0)]
#[case::bookmarks(Rest::Bookmarks, "[o![o]", 90)]
#[case::new_objects(Rest::Objects, "[oooo![o]", 180)]
#[tokio::test(start_paused = true)]
async fn a_streamed_list_without_an_end_is_followed_by_a_whole_one(
    #[case] rest: Rest,
    #[case] expected: &str,
    #[case] seconds: u64,
) {
    let (api, requests) = server(rest, Duration::ZERO);
    assert_eq!(first_list(api).await, (expected.to_owned(), seconds));
    let requests = requests.lock().unwrap();
    assert_eq!(requests.len(), expected.matches('[').count(), "{requests:?}");
    let is_streamed = |request: &String| request.contains("sendInitialEvents=true");
    assert_eq!(
        requests.iter().position(|request| !is_streamed(request)),
        Some(requests.len() - 1),
        "{requests:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_streamed_list_that_makes_progress_is_not_given_up() {
    let (api, requests) = server(Rest::Slow, Duration::ZERO);
    let (items, seconds) = first_list(api).await;
    assert_eq!((items.len(), seconds, requests.lock().unwrap().len()), (503, 250, 1));
}

#[tokio::test(start_paused = true)]
async fn a_slow_first_object_keeps_the_streamed_list() {
    let (api, requests) = server(Rest::Nothing, Duration::from_secs(80));
    let (_, seconds) = first_list(api).await;
    assert_eq!(seconds, 170, "the silence began after the object");
    assert_eq!(requests.lock().unwrap().len(), 2);
}

/// Returns a server before Kubernetes 1.31 at the first request whose number is `old_from`, and its requests.
fn old_server(old_from: usize) -> (Api<Service>, Arc<Mutex<Vec<String>>>) {
    let requests: Arc<Mutex<Vec<String>>> = Arc::default();
    let log = Arc::clone(&requests);
    let service = service_fn(move |request: Request<client::Body>| {
        let uri = request.uri().to_string();
        let mut log = log.lock().unwrap();
        let is_old = log.len() >= old_from;
        log.push(uri.clone());
        let refused = |code: u16, message: &str| {
            let status = json!({"kind": "Status", "status": "Failure", "code": code, "message": message});
            (code, Body::from(status.to_string()))
        };
        let (code, body) = if is_old && uri.contains("spec.clusterIP") {
            refused(
                400,
                "\"spec.clusterIP\" is not a known field selector: only \"metadata.name\", \"metadata.namespace\"",
            )
        } else if uri.contains("sendInitialEvents=true") {
            refused(
                422,
                "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled",
            )
        } else if uri.contains("watch=true") {
            (200, Body::from_stream(stream::iter([Ok::<_, io::Error>(line("MODIFIED", "b"))])))
        } else {
            let object =
                |name| json!({"metadata": {"name": name, "namespace": "default", "resourceVersion": "7"}});
            let items = [object("a"), object("headless")];
            (
                200,
                Body::from(
                    json!({"kind": "List", "metadata": {"resourceVersion": "7"}, "items": items}).to_string(),
                ),
            )
        };
        let answer =
            Response::builder().status(code).header(CONTENT_TYPE, "application/json").body(body).unwrap();
        std::future::ready(Ok::<_, Infallible>(answer))
    });
    (Api::all(Client::new(service, "default")), requests)
}

/// Returns the items until the first change.
async fn until_a_change(items: impl Stream<Item = Result<Event<Service>>>) -> String {
    text_of(items, |text| text.ends_with('c')).await
}

#[tokio::test(start_paused = true)]
async fn a_server_that_does_not_know_the_field_is_asked_for_all_objects() {
    let (api, requests) = old_server(0);
    let source = Source::new(api);
    assert_eq!(until_a_change(reflect(source.clone(), Service::selectors())).await, "[oo]c");
    let with_fields = |requests: &[String]| -> Vec<bool> {
        requests.iter().map(|request| request.contains("fieldSelector")).collect()
    };
    assert_eq!(with_fields(&requests.lock().unwrap()), [true, true, false, false]);
    requests.lock().unwrap().clear();
    assert_eq!(until_a_change(reflect(source, Service::selectors())).await, "[oo]c");
    assert_eq!(with_fields(&requests.lock().unwrap()), [false, false, false], "it is remembered");
}

#[tokio::test(start_paused = true)]
async fn a_watch_at_an_older_server_goes_on_without_the_field() {
    // The server of the watch is older than that of the list.
    let (api, requests) = old_server(2);
    assert_eq!(until_a_change(reflect(Source::new(api), Service::selectors())).await, "[oo]c");
    let requests = requests.lock().unwrap();
    assert!(requests[2].contains("fieldSelector") && !requests[3].contains("fieldSelector"), "{requests:?}");
}

#[tokio::test(start_paused = true)]
async fn one_service_is_found_at_an_old_server() {
    let (api, _) = old_server(0);
    let key = Key::Service(ServiceName::new("default", "a"));
    assert!(Relister::new(api.into_client()).one(&key).await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_field_that_the_agent_needs_stays_in_the_request() {
    let (api, requests) = old_server(0);
    let client = api.into_client();
    let config = Config::default().fields("spec.clusterIP=node-a");
    let source = Source::<crate::api::objects::Node>::new(Api::all(client));
    let mut items = std::pin::pin!(reflect(source, config));
    assert!(items.next().await.unwrap().is_err());
    assert!(items.next().await.unwrap().is_err());
    assert!(requests.lock().unwrap().iter().all(|request| request.contains("fieldSelector")));
}

fn reflector(source: Source<Service>, state: State<Service>) -> Reflector<Service> {
    Reflector {
        source,
        config: Config::default(),
        state,
        reached: 0,
        is_doubtful: false,
        is_whole: false,
        cuts: 0,
        refusals: 0,
        history: History::default(),
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_after_a_whole_one_is_streamed_again() {
    let (api, _) = server(Rest::End, Duration::ZERO);
    let mut reflector = reflector(Source::new(api), State::List);
    while !matches!(reflector.state, State::Whole(_)) {
        reflector.step().await;
    }
    assert!(reflector.is_whole, "it is not complete");
    while !matches!(reflector.state, State::Resume) {
        reflector.step().await;
    }
    assert!(!reflector.is_whole);
}

/// What a server knows of a Service as it was at version 7.
#[derive(Clone, Copy)]
enum Past {
    Same,
    Nothing,
    Compacted,
}

/// Returns a server whose first watch breaks. Its only Service was changed or deleted since, up to version 20.
fn server_with_past(is_deleted: bool, past: Past) -> Api<Service> {
    let lists = Arc::new(Mutex::new(0));
    let service = service_fn(move |request: Request<client::Body>| {
        let uri = request.uri().to_string();
        let items = |version| match version {
            Some(version) => {
                json!([{"metadata": {"name": "a", "namespace": "default", "resourceVersion": version}}])
            }
            None => json!([]),
        };
        let list = |items| json!({"kind": "List", "metadata": {"resourceVersion": "20"}, "items": items});
        let (code, body) = if uri.contains("resourceVersionMatch=Exact") {
            assert!(uri.contains("metadata.name%3Da") && uri.contains("resourceVersion=7&"), "{uri}");
            match past {
                Past::Same => (200, Body::from(list(items(Some("7"))).to_string())),
                Past::Nothing => (200, Body::from(list(items(None)).to_string())),
                Past::Compacted => {
                    (410, Body::from(json!({"kind": "Status", "status": "Failure", "code": 410}).to_string()))
                }
            }
        } else if uri.contains("metadata.name") {
            (200, Body::from(list(items((!is_deleted).then_some("15"))).to_string()))
        } else if uri.contains("sendInitialEvents=true") {
            *lists.lock().unwrap() += 1;
            let events = stream::iter([Ok::<_, io::Error>(line("ADDED", "a")), Ok(list_ends())]);
            // The first watch breaks at once.
            let rest =
                if *lists.lock().unwrap() == 1 { stream::empty().boxed() } else { stream::pending().boxed() };
            (200, Body::from_stream(events.chain(rest)))
        } else {
            let events = stream::iter([Ok::<_, io::Error>(event("ADDED", "b", "21"))]);
            (200, Body::from_stream(events.chain(stream::pending())))
        };
        let answer =
            Response::builder().status(code).header(CONTENT_TYPE, "application/json").body(body).unwrap();
        std::future::ready(Ok::<_, Infallible>(answer))
    });
    Api::all(Client::new(service, "default"))
}

#[rstest]
#[case::same(Past::Same, "[o]c")]
#[case::nothing(Past::Nothing, "[o][o]")]
#[case::compacted(Past::Compacted, "[o][o]")]
#[tokio::test(start_paused = true)]
async fn changed_object_proves_the_history_by_its_past(
    #[case] past: Past,
    #[case] expected: &str,
    #[values(false, true)] is_deleted: bool,
) {
    let source = Source::new(server_with_past(is_deleted, past));
    let items = reflect(source, Config::default());
    let text = text_of(items, |text| text.len() == expected.len()).await;
    assert_eq!(text, expected);
}

#[rstest]
#[case::same(Past::Same, Comparison::Same)]
#[case::nothing(Past::Nothing, Comparison::Other)]
#[case::compacted(
    Past::Compacted,
    Comparison::Unknown("the version of the newest change is no longer known")
)]
#[tokio::test]
async fn compacted_version_is_no_other_history(
    #[case] past: Past,
    #[case] expected: Comparison,
    #[values(false, true)] is_deleted: bool,
) {
    let mut history = History::default();
    let metadata = json!({"name": "a", "namespace": "default", "resourceVersion": "7"});
    let known: Service = serde_json::from_value(json!({"metadata": metadata})).unwrap();
    history.applied(&known);
    let source = Source::new(server_with_past(is_deleted, past));
    assert_eq!(history.compare(&source).await.unwrap(), expected);
}

/// What a server refuses after each list.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Refused {
    /// To open the watch again.
    Resume,
    /// To continue it: it sends an `ERROR` event.
    Event,
    /// To open it, with one `Status` in an answer 200.
    Status,
    /// To find the object that changed last.
    LookUp,
}

/// Returns a server whose lists are complete, and whose watches are refused with this code.
fn refusing(refused: Refused, code: u16) -> Api<Service> {
    let service = service_fn(move |request: Request<client::Body>| {
        let uri = request.uri().to_string();
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code});
        let (code, body) = if uri.contains("metadata.name") && refused == Refused::LookUp {
            (code, status.to_string().into_bytes())
        } else if uri.contains("metadata.name") {
            let items = [json!({"metadata": {"name": "a", "namespace": "default", "resourceVersion": "7"}})];
            let list = json!({"kind": "List", "metadata": {"resourceVersion": "9"}, "items": items});
            (200, list.to_string().into_bytes())
        } else if uri.contains("sendInitialEvents=true") {
            (200, [line("ADDED", "a"), list_ends()].concat())
        } else if refused == Refused::Event {
            (200, format!("{}\n", json!({"type": "ERROR", "object": status})).into_bytes())
        } else {
            (if refused == Refused::Status { 200 } else { code }, format!("{status}\n").into_bytes())
        };
        let answer = Response::builder().status(code).header(CONTENT_TYPE, "application/json");
        std::future::ready(Ok::<_, Infallible>(answer.body(Body::from(body)).unwrap()))
    });
    Api::all(Client::new(service, "default"))
}

#[rstest]
#[tokio::test(start_paused = true)]
async fn refused_version_ends_in_a_list_after_the_second_refusal(
    #[values(Refused::Resume, Refused::Event, Refused::Status, Refused::LookUp)] refused: Refused,
    #[values(400, 404, 500)] code: u16,
) {
    let items = reflect(Source::new(refusing(refused, code)), Config::default());
    let expected = "[o]!![o]!![o]!!!![o]!!!![o]";
    assert_eq!(text_of(items, |text| text.len() == expected.len()).await, expected);
}

#[rstest]
#[tokio::test(start_paused = true)]
async fn refusal_of_every_request_causes_no_list(
    #[values(Refused::Resume, Refused::Event, Refused::Status, Refused::LookUp)] refused: Refused,
    #[values(401, 403, 429, 502, 503, 504)] code: u16,
) {
    let items = reflect(Source::new(refusing(refused, code)), Config::default());
    assert_eq!(text_of(items, |text| text.len() == 15).await, "[o]!!!!!!!!!!!!");
}

/// Resumes a watch that has failed. Returns after how many seconds it is reported to work.
async fn works_after(api: Api<Service>) -> Option<u64> {
    let failure = WatchFailure { since: std::time::Instant::now(), error: String::new() };
    let watches = watch::Sender::new(Watches::from([(Service::RESOURCE, Some(failure))]));
    let mut states = watches.subscribe();
    let mut reflector = reflector(Source::new(api).with_watches(watches), State::Resume);
    let (resumed, steps) = (Instant::now(), async { while reflector.step().await.is_none() {} });
    let works = states.wait_for(|watches| watches[Service::RESOURCE].is_none());
    tokio::select! {
        biased;
        () = steps => None,
        _ = works => Some(resumed.elapsed().as_secs()),
    }
}

#[tokio::test(start_paused = true)]
async fn watch_open_without_error_counts_as_working() {
    assert_eq!(works_after(server(Rest::Nothing, Duration::ZERO).0).await, Some(5), "it is quiet");
    assert_eq!(works_after(refusing(Refused::Event, 500)).await, None);
}

#[tokio::test(start_paused = true)]
async fn broken_watches_are_resumed_at_random_within_a_second() {
    let mut pauses = Vec::new();
    for _ in 0..16 {
        let items = reflect(Source::new(server_with_past(false, Past::Same)), Config::default());
        let mut items = std::pin::pin!(items);
        while !matches!(items.next().await.unwrap().unwrap(), Event::InitDone) {}
        let broken = Instant::now();
        while !matches!(items.next().await, Some(Ok(Event::Apply(_)))) {}
        pauses.push(broken.elapsed());
    }
    pauses.sort_unstable();
    assert!(pauses[15] <= SPREAD + Duration::from_millis(10), "{pauses:?}");
    assert!(pauses[15].saturating_sub(pauses[0]) > SPREAD / 10, "{pauses:?}");
}
