//! Lists one kind, then watches it, and resumes the watch for as long as the API server has its resourceVersion, like
//! client-go's Reflector. kube-rs has the same (`runtime::watcher`), but for JSON only; the items have the same type.

use std::io;
use std::time::Duration;
use std::vec;

use futures::stream::BoxStream;
use futures::{Stream, StreamExt, stream};
use kube::ResourceExt as _;
use kube::api::{ListParams, VersionMatch, WatchParams};
use kube::core::WatchEvent;
use kube::runtime::watcher::{Config, Error, Event, InitialListStrategy, ListSemantic, Result};
use tokio::time::{Instant, timeout};
use tracing::debug;

use super::frames::is_malformed;
use super::kinds::Watched;
use super::transport::Source;

/// Timeout of a watch: the agent requests it, and the API server ends the watch then.
const WATCH: Duration = Duration::from_secs(290);
/// A watch that is silent for this much longer than its timeout is dead.
const MARGIN: Duration = Duration::from_secs(5);
/// A watch that ends earlier, and without an event, has failed: client-go's "very short watch".
const SHORT: Duration = Duration::from_secs(1);
/// The annotation of the bookmark that ends a streamed list.
const LIST_ENDS: &str = "k8s.io/initial-events-end";

/// The status code for a resourceVersion that the API server no longer has.
const GONE: u16 = 410;

/// An open watch.
struct Events<K> {
    stream: BoxStream<'static, kube::Result<WatchEvent<K>>>,
    opened: Instant,
    /// Whether no event has arrived yet.
    is_empty: bool,
}

enum State<K> {
    /// Nothing is known; the next step requests a list.
    Start,
    /// A normal list is requested: its first page, or the page that this token names.
    ListRequest(Option<String>),
    /// A page of a normal list has arrived; `token` names the next page, or `version` is where the watch begins.
    ListPage { objects: vec::IntoIter<K>, version: Option<String>, token: Option<String> },
    /// A streamed list is in progress.
    StreamedList(Events<K>),
    /// The watch is to be started at this version.
    Resume(String),
    /// The watch is open, and has reached this version.
    Watching(String, Events<K>),
}

/// Returns the existing objects, and then their changes. The stream continues after an error: the next item is the next
/// attempt, so the caller should wait.
pub fn reflect<K: Watched>(source: Source<K>, config: Config) -> impl Stream<Item = Result<Event<K>>> + Send {
    stream::unfold((source, config, State::Start), |(source, config, mut state)| async {
        loop {
            let (item, next) = step(&source, &config, state).await;
            state = next;
            if let Some(item) = item {
                return Some((item, (source, config, state)));
            }
        }
    })
}

type Step<K> = (Option<Result<Event<K>>>, State<K>);

async fn step<K: Watched>(source: &Source<K>, config: &Config, state: State<K>) -> Step<K> {
    match state {
        State::Start => match config.initial_list_strategy {
            InitialListStrategy::ListWatch => (Some(Ok(Event::Init)), State::ListRequest(None)),
            InitialListStrategy::StreamingList => {
                match source.watch(&watch_params(config, true), "0").await {
                    Ok(events) => (Some(Ok(Event::Init)), State::StreamedList(Events::new(events))),
                    Err(error) => (Some(Err(Error::WatchStartFailed(error))), State::Start),
                }
            }
        },
        State::ListRequest(token) => match source.list(&list_params(config, token)).await {
            Ok(list) => {
                let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
                let (version, token) =
                    (filled(list.metadata.resource_version), filled(list.metadata.continue_));
                if version.is_none() && token.is_none() {
                    return (Some(Err(Error::NoResourceVersion)), State::Start);
                }
                (None, State::ListPage { objects: list.items.into_iter(), version, token })
            }
            Err(error) => (Some(Err(Error::InitialListFailed(error))), State::Start),
        },
        State::ListPage { mut objects, version, token } => match (objects.next(), token, version) {
            (Some(object), token, version) => {
                (Some(Ok(Event::InitApply(object))), State::ListPage { objects, version, token })
            }
            (None, Some(token), _) => (None, State::ListRequest(Some(token))),
            (None, None, version) => (Some(Ok(Event::InitDone)), State::Resume(version.unwrap_or_default())),
        },
        State::StreamedList(mut events) => match events.next().await {
            Some(item) => streamed(item, events),
            None => (Some(Err(ended("a streamed list ended before it was complete"))), State::Start),
        },
        State::Resume(version) => match source.watch(&watch_params(config, false), &version).await {
            Ok(events) => (None, State::Watching(version, Events::new(events))),
            Err(error) => {
                // A server may also refuse a version that is too old when the watch is requested.
                let is_too_old = matches!(&error, kube::Error::Api(status) if status.code == GONE);
                let next = if is_too_old { State::Start } else { State::Resume(version) };
                (Some(Err(Error::WatchStartFailed(error))), next)
            }
        },
        State::Watching(version, mut events) => {
            if let Some(item) = events.next().await {
                return watched(item, version, events);
            }
            let error = || Err(ended("the API server ended a watch immediately"));
            (events.is_short().then(error), State::Resume(version))
        }
    }
}

/// Handles an item of a streamed list.
fn streamed<K: Watched>(item: kube::Result<WatchEvent<K>>, events: Events<K>) -> Step<K> {
    match item {
        Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)) => {
            (Some(Ok(Event::InitApply(object))), State::StreamedList(events))
        }
        Ok(WatchEvent::Bookmark(bookmark)) if bookmark.metadata.annotations.contains_key(LIST_ENDS) => {
            let version = bookmark.metadata.resource_version;
            if version.is_empty() {
                return (Some(Err(Error::NoResourceVersion)), State::Start);
            }
            (Some(Ok(Event::InitDone)), State::Watching(version, events))
        }
        // Kubernetes documents that there are no removals before the list is complete.
        Ok(WatchEvent::Deleted(_) | WatchEvent::Bookmark(_)) => (None, State::StreamedList(events)),
        item => failed(item, |events| State::StreamedList(events), events),
    }
}

/// Handles an item of a watch that has reached `version`.
fn watched<K: Watched>(item: kube::Result<WatchEvent<K>>, version: String, events: Events<K>) -> Step<K> {
    let (event, version) = match item {
        Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)) => {
            let version = object.resource_version();
            (Some(Event::Apply(object)), version)
        }
        Ok(WatchEvent::Deleted(object)) => {
            let version = object.resource_version();
            (Some(Event::Delete(object)), version)
        }
        Ok(WatchEvent::Bookmark(bookmark)) => (None, Some(bookmark.metadata.resource_version)),
        item => return failed(item, |events| State::Watching(version, events), events),
    };
    match version.filter(|version| !version.is_empty()) {
        Some(version) => (event.map(Ok), State::Watching(version, events)),
        None => (Some(Err(Error::NoResourceVersion)), State::Start),
    }
}

/// Handles an ERROR event of the API server, and a failed connection.
fn failed<K: Watched>(
    item: kube::Result<WatchEvent<K>>,
    goes_on: impl FnOnce(Events<K>) -> State<K>,
    events: Events<K>,
) -> Step<K> {
    let (error, begins) = match item {
        Ok(WatchEvent::Error(status)) => {
            let is_too_old = status.code == GONE;
            (Error::WatchError(status), is_too_old)
        }
        // The event of a malformed message is lost, so the objects are listed again.
        Err(error) => {
            let is_lost = is_malformed(&error);
            (Error::WatchFailed(error), is_lost)
        }
        Ok(_) => return (None, goes_on(events)),
    };
    (Some(Err(error)), if begins { State::Start } else { goes_on(events) })
}

/// Returns the error for an answer that the server ended too early.
fn ended(why: &str) -> Error {
    Error::WatchFailed(kube::Error::ReadEvents(io::Error::new(io::ErrorKind::UnexpectedEof, why)))
}

impl<K> Events<K> {
    fn new(stream: impl Stream<Item = kube::Result<WatchEvent<K>>> + Send + 'static) -> Self {
        Self { stream: stream.boxed(), opened: Instant::now(), is_empty: true }
    }

    async fn next(&mut self) -> Option<kube::Result<WatchEvent<K>>> {
        let item = timeout(WATCH + MARGIN, self.stream.next()).await.unwrap_or_else(|_| {
            debug!("a watch was silent for too long");
            None
        });
        self.is_empty &= item.is_none();
        item
    }

    fn is_short(&self) -> bool {
        self.is_empty && self.opened.elapsed() < SHORT
    }
}

fn watch_params(config: &Config, send_initial_events: bool) -> WatchParams {
    WatchParams {
        label_selector: config.label_selector.clone(),
        field_selector: config.field_selector.clone(),
        timeout: Some(WATCH.as_secs() as u32),
        bookmarks: true,
        send_initial_events,
    }
}

fn list_params(config: &Config, continue_token: Option<String>) -> ListParams {
    // A continue token contains the version; no other version may be given with it.
    let is_cached = config.list_semantic == ListSemantic::Any && continue_token.is_none();
    ListParams {
        label_selector: config.label_selector.clone(),
        field_selector: config.field_selector.clone(),
        version_match: is_cached.then_some(VersionMatch::NotOlderThan),
        resource_version: is_cached.then(|| "0".to_owned()),
        limit: config.page_size,
        continue_token,
        ..ListParams::default()
    }
}
