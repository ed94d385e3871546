use std::convert::Infallible;
use std::sync::Mutex;

use futures::StreamExt as _;
use http::header::CONTENT_TYPE;
use kube::runtime::watcher::{self, Event};
use tower::service_fn;

use super::*;
use crate::api::objects::Service;
use crate::api::reflector::reflect;

const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
const LIST: &[u8] = include_bytes!("../protobuf/recorded/services.list.pb");
const WATCH: &[u8] = include_bytes!("../protobuf/recorded/services.watch.pb");
const LINES: &[u8] = include_bytes!("../protobuf/recorded/services.watch.json");
const REFUSED: &[u8] = include_bytes!("../protobuf/recorded/refused.pb");

type Reply = (u16, &'static str, Vec<u8>);

/// The requests: the path with its query, and the `Accept` header.
type Requests = Arc<Mutex<Vec<(String, String)>>>;

fn server(answer: impl Fn(&str, &str) -> Reply + Clone + Send + 'static) -> (Api<Service>, Requests) {
    let requests = Requests::default();
    let log = Arc::clone(&requests);
    let service = service_fn(move |request: Request<Body>| {
        let uri = request.uri().to_string();
        let accept = request.headers()[ACCEPT].to_str().unwrap().to_owned();
        let (status, form, body) = answer(&uri, &accept);
        log.lock().unwrap().push((uri, accept));
        let answer = Response::builder().status(status).header(CONTENT_TYPE, form).body(Body::from(body));
        std::future::ready(Ok::<_, Infallible>(answer.unwrap()))
    });
    (Api::all(Client::new(service, "default")), requests)
}

/// Returns the first items of the watch in a short notation.
async fn first(api: Api<Service>, count: usize) -> Vec<String> {
    let name = |object: Service| object.metadata.name.unwrap_or_default();
    let items = reflect(Source::new(api), watcher::Config::default()).take(count);
    let items = items.map(|item| match item {
        Ok(Event::Init) => "[".to_owned(),
        Ok(Event::InitApply(object)) => name(object),
        Ok(Event::InitDone) => "]".to_owned(),
        Ok(Event::Apply(object)) => format!("+{}", name(object)),
        Ok(Event::Delete(object)) => format!("-{}", name(object)),
        Err(error) => error.to_string(),
    });
    items.collect().await
}

/// Returns the answer to a request for the object with a name, after the last event of the recorded watch.
fn found(uri: &str) -> Vec<u8> {
    let lines = LINES.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let mut items = Vec::new();
    for line in lines {
        let event: serde_json::Value = serde_json::from_slice(line).unwrap();
        let name = event["object"]["metadata"]["name"].as_str().unwrap_or_default();
        if event["type"] != "BOOKMARK" && uri.contains(&format!("metadata.name%3D{name}&")) {
            items = if event["type"] == "DELETED" { Vec::new() } else { vec![event["object"].clone()] };
        }
    }
    let list = serde_json::json!({"metadata": {"resourceVersion": "999"}, "items": items});
    list.to_string().into_bytes()
}

const ALL: [&str; 9] = ["[", "kubernetes", "away", "headless", "plain", "web", "]", "+web", "-plain"];

fn forms(requests: &Requests) -> Vec<String> {
    requests.lock().unwrap().iter().map(|(_, accept)| accept.clone()).collect()
}

fn sorted(mut items: Vec<String>) -> Vec<String> {
    // Objects of a cache have no order.
    items[1..6].sort_unstable();
    items
}

fn expected() -> Vec<String> {
    sorted(ALL.map(str::to_owned).to_vec())
}

#[tokio::test]
async fn a_watch_in_protobuf_is_the_same() {
    let (api, requests) =
        server(|_, _| (200, "application/vnd.kubernetes.protobuf;stream=watch", WATCH.to_vec()));
    assert_eq!(sorted(first(api, 9).await), expected());
    assert_eq!(forms(&requests), [WATCHES]);
}

#[tokio::test]
async fn a_whole_list_in_protobuf_is_the_same() {
    let (api, requests) =
        server(|uri, _| match (uri.contains("sendInitialEvents"), uri.contains("watch=true")) {
            (true, _) => (422, PROTOBUF, include_bytes!("../protobuf/recorded/invalid.pb").to_vec()),
            (false, true) => (200, PROTOBUF, Vec::new()),
            (false, false) => (200, PROTOBUF, LIST.to_vec()),
        });
    assert_eq!(sorted(first(api, 7).await), expected()[..7]);
    assert_eq!(forms(&requests), [WATCHES, LISTS]);
}

#[tokio::test]
async fn a_refusal_in_protobuf_says_its_words() {
    let (api, _) = server(|_, _| (403, PROTOBUF, REFUSED.to_vec()));
    let refused = first(api, 1).await;
    assert!(refused[0].contains("services is forbidden"), "{refused:?}");
}

#[tokio::test]
async fn a_server_without_protobuf_is_asked_for_json() {
    for code in [406, 415] {
        let (api, requests) = server(move |_, accept| match accept {
            JSON => (200, JSON, LINES.to_vec()),
            _ => (code, "text/plain", b"no".to_vec()),
        });
        let source = Source::new(api);
        for _ in 0..2 {
            let events = source.watch(&WatchParams::default(), "0").await.unwrap();
            assert_eq!(events.filter(|event| std::future::ready(event.is_ok())).count().await, 9);
        }
        assert_eq!(forms(&requests), [WATCHES, JSON, JSON], "it is asked once");
    }
    let (api, requests) = server(|_, _| (200, JSON, LINES.to_vec()));
    assert_eq!(sorted(first(api, 9).await), expected());
    assert_eq!(forms(&requests), [WATCHES], "what comes is read as what it says it is");
}

#[tokio::test]
async fn bytes_that_make_no_sense_end_in_a_new_list_in_json() {
    let garbage = b"\0\0\0\x05hello".to_vec();
    let huge = [WATCH, b"\xff\xff\xff\xff"].concat();
    for (bytes, good) in [(garbage, 1), (huge, 9)] {
        let (api, requests) = server(move |_, accept| match accept {
            JSON => (200, JSON, LINES.to_vec()),
            _ => (200, PROTOBUF, bytes.clone()),
        });
        // The list is older than the last event, so it is refused at first.
        let refused = if good == 9 { 7 } else { 0 };
        let mut items = first(api, good + 1 + refused + 9).await;
        let again = items.split_off(good + 1 + refused);
        let error = items.pop().unwrap();
        assert!(error.starts_with("watch stream failed"), "{error}");
        assert_eq!(sorted(again), expected());
        let requests = requests.lock().unwrap();
        assert!(requests.iter().all(|(uri, _)| !uri.contains("sendInitialEvents=false")), "{requests:?}");
        assert_eq!(requests.last().unwrap().1, JSON, "{requests:?}");
        assert!(requests.last().unwrap().0.contains("sendInitialEvents=true"), "a list: {requests:?}");
    }
}

#[tokio::test]
async fn a_watch_that_ends_within_an_event_goes_on_where_it_was() {
    let (api, requests) = server(|uri, _| {
        if uri.contains("metadata.name") {
            return (200, JSON, found(uri));
        }
        // The second answer also ends within an event, so the version stays the same.
        let length = if uri.contains("sendInitialEvents=true") { WATCH.len() - 1 } else { 9 };
        (200, PROTOBUF, WATCH[..length].to_vec())
    });
    let mut watch = std::pin::pin!(reflect(Source::new(api), watcher::Config::default()));
    for _ in 0..9 {
        watch.next().await.unwrap().unwrap();
    }
    for _ in 0..2 {
        // An error makes the caller wait.
        let error = watch.next().await.unwrap().unwrap_err().to_string();
        assert!(error.starts_with("watch stream failed"), "{error}");
    }
    let requests = requests.lock().unwrap();
    // After a failure, the server is asked for the newest objects as well.
    let watches: Vec<_> = requests.iter().filter(|(uri, _)| uri.contains("watch=true")).skip(1).collect();
    let version = watches[0].0.split("resourceVersion=").nth(1).unwrap();
    assert!(version != "0" && watches.len() == 2, "{requests:?}");
    assert!(watches.iter().all(|(uri, accept)| uri.ends_with(version) && accept == WATCHES), "{requests:?}");
}

#[tokio::test]
async fn a_list_that_ends_too_early_is_a_failure_each_time() {
    let (api, requests) = server(|_, _| (200, PROTOBUF, b"k8".to_vec()));
    let items = first(api, 6).await;
    let (streamed, whole) = items.split_at(4);
    let is_failure = |two: &[String]| two[0] == "[" && two[1].starts_with("watch stream failed");
    assert!(streamed.chunks(2).all(is_failure), "{items:?}");
    assert!(whole.iter().all(|item| item.starts_with("failed to perform initial")), "{items:?}");
    assert_eq!(requests.lock().unwrap().len(), 4);
}

/// The server refuses the version when the watch is resumed, not with an event of the watch.
#[tokio::test]
async fn a_version_that_is_refused_ends_in_a_new_list() {
    let (api, requests) = server(|uri, _| {
        if uri.contains("sendInitialEvents=true") {
            (200, PROTOBUF, WATCH.to_vec())
        } else if uri.contains("metadata.name") {
            (200, JSON, found(uri))
        } else {
            (410, "text/plain", b"too old".to_vec())
        }
    });
    let items = first(api, 11).await;
    assert!(items[9].contains("too old"), "{items:?}");
    assert_eq!(items[10], "[", "{:?}", requests.lock().unwrap());
}
