//! Sends Kubernetes Events as kube-proxy does: `events.k8s.io/v1`, reported by `kube-proxy`.
//!
//! Every node sends its own events, so their number is limited: the same event at most once in five minutes, and a
//! burst of 25 events with one more every ten seconds. An event that cannot be sent is lost; the log has all of them.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ObjectReference, Service};
use kube::api::{Api, ListParams};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Error};
use tokio::sync::mpsc::Receiver;
use tokio::time::{Instant, sleep, timeout};

use proxy_core::model::notice::{Notice, Subject};

/// The reporting controller, so that users who search for kube-proxy's events find these.
const REPORTER: &str = "kube-proxy";
/// The same notice is not sent again within this time.
const AGAIN: Duration = Duration::from_mins(5);
/// How many events may be sent at once.
const BURST: u32 = 25;
/// The time after which one more event may be sent.
const REFILL: Duration = Duration::from_secs(10);
/// Timeout of one attempt; the API server may be away for hours.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest note that the API accepts, in bytes.
const MAX_NOTE: usize = 1024;
/// The longest name of a reporting instance that the API accepts, in bytes.
const MAX_INSTANCE: usize = 128;
/// The pause between two attempts to send an event.
const RETRY: Duration = Duration::from_secs(5);
/// The number of attempts to send an event.
const ATTEMPTS: u32 = 3;

/// Sends the received notices as events; returns when all senders are dropped.
pub async fn send(client: Client, node_name: String, mut notices: Receiver<Notice>) {
    let reporter = Reporter { controller: REPORTER.to_owned(), instance: Some(instance(&node_name)) };
    let mut recorder = Recorder::new(client.clone(), reporter.clone());
    let mut limit = Limit::new(Instant::now());
    let mut is_forbidden = false;
    while let Some(notice) = notices.recv().await {
        if !limit.allows(&notice, Instant::now()) {
            continue;
        }
        let uid = match &notice.about {
            Subject::Node => None,
            Subject::Service(name) => {
                timeout(PATIENCE, uid(&client, &name.namespace, &name.name)).await.ok().flatten()
            }
        };
        let about = reference(&notice.about, &node_name, uid);
        let mut fresh = None;
        for attempt in 1..=ATTEMPTS {
            let sender = fresh.as_ref().unwrap_or(&recorder);
            match timeout(PATIENCE, sender.publish(&event(&notice), &about)).await {
                Ok(Ok(())) => {
                    recorder = fresh.take().unwrap_or(recorder);
                    break;
                }
                Ok(Err(Error::Api(status))) if status.code == 403 => {
                    if !std::mem::replace(&mut is_forbidden, true) {
                        tracing::warn!(
                            error = status.message,
                            "cannot send events; allow `create` and `patch` on events.events.k8s.io"
                        );
                    }
                    break;
                }
                Ok(Err(Error::Api(status))) if status.code == 404 && attempt == 1 => {
                    // The recorder updates an Event that the server has removed by now: its own clock may have been set back.
                    fresh = Some(Recorder::new(client.clone(), reporter.clone()));
                    continue;
                }
                Ok(Err(error)) => {
                    tracing::debug!(%error, reason = notice.reason, attempt, "the API server rejected an event");
                }
                Err(_) => tracing::debug!(reason = notice.reason, attempt, "no answer to an event"),
            }
            sleep(RETRY).await;
        }
    }
}

/// Returns the name of this agent in events, as kube-proxy's.
fn instance(node_name: &str) -> String {
    let mut instance = format!("{REPORTER}-{node_name}");
    instance.truncate(instance.floor_char_boundary(MAX_INSTANCE));
    instance
}

fn event(notice: &Notice) -> Event {
    let mut note = notice.note.clone();
    note.truncate(note.floor_char_boundary(MAX_NOTE));
    Event {
        type_: if notice.warning { EventType::Warning } else { EventType::Normal },
        reason: notice.reason.to_owned(),
        note: (!note.is_empty()).then_some(note),
        action: notice.action.to_owned(),
        secondary: None,
    }
}

/// Returns the UID of a Service; `None` if the API server does not tell it.
async fn uid(client: &Client, namespace: &str, name: &str) -> Option<String> {
    let services = Api::<Service>::namespaced(client.clone(), namespace);
    // An answer from the server's cache costs no read of etcd.
    let one = ListParams::default().fields(&format!("metadata.name={name}")).match_any();
    let found = services.list_metadata(&one).await;
    found
        .inspect_err(|error| tracing::debug!(%error, namespace, name, "the UID for an event is not known"))
        .ok()
        .and_then(|found| found.items.into_iter().next()?.metadata.uid)
}

/// Returns the reference to an object. `kubectl describe` shows only events with the UID that it expects: of a node, that is its
/// name, as the kubelet and kube-proxy set it.
fn reference(subject: &Subject, node_name: &str, uid: Option<String>) -> ObjectReference {
    let (kind, name, namespace, uid) = match subject {
        // A node has no namespace; its events belong to the namespace `default`.
        Subject::Node => ("Node", node_name.to_owned(), None, Some(node_name.to_owned())),
        Subject::Service(service) => {
            ("Service", service.name.to_string(), Some(service.namespace.to_string()), uid)
        }
    };
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some(kind.to_owned()),
        name: Some(name),
        namespace,
        uid,
        ..ObjectReference::default()
    }
}

/// The rate limit: a token bucket, and when each notice was last sent.
#[derive(Debug)]
struct Limit {
    left: u32,
    filled: Instant,
    last: BTreeMap<(Subject, &'static str), Instant>,
}

impl Limit {
    const fn new(now: Instant) -> Self {
        Self { left: BURST, filled: now, last: BTreeMap::new() }
    }

    fn allows(&mut self, notice: &Notice, now: Instant) -> bool {
        self.last.retain(|_, at| now - *at < AGAIN);
        let more = (now - self.filled).as_secs() / REFILL.as_secs();
        if more > 0 {
            self.left = BURST.min(self.left.saturating_add(u32::try_from(more).unwrap_or(BURST)));
            self.filled = now;
        }
        let key = (notice.about.clone(), notice.reason);
        if self.left == 0 || self.last.contains_key(&key) {
            return false;
        }
        self.left -= 1;
        self.last.insert(key, now);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::future;
    use std::sync::{Arc, Mutex};

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;

    use super::*;
    use proxy_core::model::ServiceName;

    fn about(name: &str) -> Notice {
        Notice::not_programmed(ServiceName::new("shop", name), "spec.ports: no room".to_owned())
    }

    #[test]
    fn the_same_is_sent_once_in_five_minutes_and_few_at_once() {
        let start = Instant::now();
        let mut limit = Limit::new(start);
        assert!(limit.allows(&about("a"), start));
        assert!(!limit.allows(&about("a"), start + AGAIN - Duration::from_secs(1)));
        let mut limit = Limit::new(start);
        let sent = (0..100).filter(|n| limit.allows(&about(&n.to_string()), start)).count();
        assert_eq!(sent, 25);
        assert!(!limit.allows(&about("late"), start + REFILL / 2));
        assert!(limit.allows(&about("late"), start + REFILL));
        assert!(!limit.allows(&about("later"), start + REFILL));
        assert!(limit.allows(&about("1"), start + AGAIN + REFILL), "five minutes later");
    }

    #[test]
    fn reporting_instance_of_a_long_node_name_is_truncated() {
        assert_eq!(instance("node-a"), "kube-proxy-node-a");
        assert_eq!(instance(&"n".repeat(253)).len(), MAX_INSTANCE);
    }

    #[test]
    fn events_look_like_kube_proxys() {
        let cry = Notice::starting();
        let (sent, to) = (event(&cry), reference(&cry.about, "node-a", None));
        assert_eq!((&*sent.reason, &*sent.action, sent.note), ("Starting", "StartKubeProxy", None));
        assert_eq!(sent.type_, EventType::Normal);
        assert_eq!(
            (to.kind.as_deref(), to.name.as_deref(), to.namespace),
            (Some("Node"), Some("node-a"), None)
        );
        assert_eq!(to.uid.as_deref(), Some("node-a"));
        let long = Notice::no_health_check(ServiceName::new("shop", "a"), "ö".repeat(2000));
        assert_eq!(event(&long).note.unwrap().len(), MAX_NOTE);
        let to = reference(&long.about, "node-a", Some("u1".to_owned()));
        assert_eq!((to.namespace.as_deref(), to.uid.as_deref()), (Some("shop"), Some("u1")));
    }

    #[tokio::test]
    async fn event_of_a_service_has_the_uid_of_the_service() {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let requests = Arc::clone(&asked);
        let service = tower::service_fn(move |request: Request<Body>| {
            requests.lock().unwrap().push(request.uri().to_string());
            let list = json!({
                "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadataList", "metadata": {},
                "items": [{
                    "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
                    "metadata": {"name": "a", "namespace": "shop", "uid": "u1"},
                }],
            });
            future::ready(Ok::<_, Infallible>(Response::new(Body::from(list.to_string().into_bytes()))))
        });
        let client = Client::new(service, "default");
        assert_eq!(uid(&client, "shop", "a").await.as_deref(), Some("u1"));
        let asked = asked.lock().unwrap();
        assert!(asked[0].starts_with("/api/v1/namespaces/shop/services?"), "{asked:?}");
        assert!(
            asked[0].contains("metadata.name%3Da") && asked[0].contains("resourceVersion=0"),
            "{asked:?}"
        );
    }
}
