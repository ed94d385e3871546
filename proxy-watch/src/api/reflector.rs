//! Lists one kind, then watches it, and resumes the watch for as long as the API server has its resourceVersion, like
//! client-go's Reflector. kube-rs has the same (`runtime::watcher`), but for JSON only; the items have the same type.
//!
//! **State only moves forward.** resourceVersions are numbers that grow (KEP-5504), and all objects of a kind share them.
//! A watch is at a version; an event or a list that is older is refused. What then decides is one *consistent* list: the
//! API server compares its cache with etcd before it answers, so that a server with an old cache answers late or not at
//! all. Only such a list may be older than what is known, because only a restore of etcd makes it so.
//!
//! A *streamed* list is a watch that begins with the existing objects (`sendInitialEvents`, Kubernetes' `WatchList`): the
//! API server sends one object after the other from its cache, and neither side holds the whole list. The agent requests
//! it without a resourceVersion, so it is always consistent. A server without this feature rejects the request (status
//! 400 or 422). The agent then requests a *whole* list from the server's cache, which is at least as new as what is known
//! (`resourceVersionMatch=NotOlderThan`), or, in doubt, a consistent one. It does the same if a streamed list does not end:
//! a proxy may hold the bookmark that ends it back, and a server that ignores the request never sends this bookmark.

use std::io;
use std::time::Duration;
use std::vec;

use futures::stream::BoxStream;
use futures::{Stream, StreamExt, stream};
use kube::api::{ListParams, VersionMatch, WatchParams};
use kube::core::WatchEvent;
use kube::runtime::watcher::{Config, Error, Event, Result};
use tokio::time::error::Elapsed;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tracing::{debug, info, warn};

use super::frames::is_malformed;
use super::history::{Comparison, History, number};
use super::jitter::jitter;
use super::kinds::Watched;
use super::transport::Source;

/// The shortest timeout of a watch, after which the API server ends it; the longest is twice as long. Each watch has
/// a random one between, as in client-go, so that the agents do not resume their watches at the same time.
const WATCH: Duration = Duration::from_mins(5);
/// How much longer the agent waits for that end.
const MARGIN: Duration = Duration::from_secs(5);
/// The longest pause before a broken watch is resumed. An API server that stops breaks the watches of all agents at the same time, and
/// each of them sends two to four requests to the next server: without pauses, this server would get them all within milliseconds.
/// client-go has no such pause, but sends one request.
const SPREAD: Duration = Duration::from_secs(1);
/// A watch that has been open for this time without an error works. A refusal that comes as an event is the first event.
const SETTLED: Duration = Duration::from_secs(5);
/// A watch that ends earlier, and without an event, has failed: client-go's "very short watch".
const SHORT: Duration = Duration::from_secs(1);
/// The API server sends a bookmark each minute. A watch that had one, and a list in progress, is dead after this silence.
const SILENCE: Duration = Duration::from_secs(90);
/// A streamed list that takes longer makes no progress, if no more than an object a second has arrived: these may be new ones.
const LONGEST: Duration = Duration::from_mins(3);
/// The annotation of the bookmark that ends a streamed list.
const LIST_ENDS: &str = "k8s.io/initial-events-end";

/// The status code for a resourceVersion that the API server no longer has.
const GONE: u16 = 410;
/// The status code for a resourceVersion that the API server does not have yet.
const TOO_LARGE: u16 = 504;

/// An open watch.
struct Events<K> {
    stream: BoxStream<'static, kube::Result<WatchEvent<K>>>,
    opened: Instant,
    /// When it is reported to work; `None`: it was.
    settles: Option<Instant>,
    /// Its timeout.
    lasts: Duration,
    /// Whether no event has arrived yet.
    is_empty: bool,
    /// Whether the server sends bookmarks.
    is_lively: bool,
    /// When the last object of a list arrived.
    progressed: Instant,
    /// Number of objects of the list that have arrived.
    objects: u64,
}

enum State<K> {
    /// The next step requests a list.
    List,
    /// A whole list has arrived.
    Whole(vec::IntoIter<K>),
    /// A streamed list is in progress.
    Streamed(Events<K>),
    /// The watch has broken: the next step compares the server's history with the known one.
    Broken,
    /// The next step opens a watch at the version that was reached.
    Resume,
    /// The watch is open.
    Watching(Events<K>),
}

struct Reflector<K> {
    source: Source<K>,
    config: Config,
    state: State<K>,
    /// The newest version of what is known; 0: nothing is known.
    reached: u64,
    /// Whether the next list has to be consistent, and decides whatever its version is.
    is_doubtful: bool,
    /// Whether the next list is a whole one: a streamed one was refused, or did not end.
    is_whole: bool,
    /// How many streamed lists in a row were cut off.
    cuts: u8,
    /// How often in a row the server refused the watch.
    refusals: u32,
    history: History,
}

/// Returns the existing objects, and then their changes. The stream continues after an error: the next item is the next
/// attempt, so the caller should wait. Changes may come before [`Event::InitDone`]; they belong to the list.
pub fn reflect<K: Watched>(source: Source<K>, config: Config) -> impl Stream<Item = Result<Event<K>>> + Send {
    let reflector = Reflector {
        source,
        config,
        state: State::List,
        reached: 0,
        is_doubtful: false,
        is_whole: false,
        cuts: 0,
        refusals: 0,
        history: History::default(),
    };
    stream::unfold(reflector, |mut reflector| async {
        loop {
            if let Some(item) = reflector.step().await {
                return Some((item, reflector));
            }
        }
    })
}

impl<K: Watched> Reflector<K> {
    /// Makes one step, and returns its item, if it has one.
    async fn step(&mut self) -> Option<Result<Event<K>>> {
        match std::mem::replace(&mut self.state, State::List) {
            State::List if self.is_whole => self.list().await,
            State::List => self.stream().await,
            State::Whole(mut objects) => Some(Ok(match objects.next() {
                Some(object) => {
                    self.history.applied(&object);
                    self.state = State::Whole(objects);
                    Event::InitApply(object)
                }
                None => {
                    (self.state, self.is_whole) = (State::Resume, false);
                    Event::InitDone
                }
            })),
            State::Streamed(mut events) => match events.next_of_list().await {
                Ok(Some(item)) => self.streamed(item, events),
                Ok(None) => {
                    self.cut_off();
                    Some(Err(ended("a streamed list ended before it was complete")))
                }
                Err(_) => {
                    self.give_up_streaming();
                    Some(Err(ended("no object of a streamed list arrived in time")))
                }
            },
            State::Broken => self.compare_histories().await,
            State::Resume => self.resume().await,
            State::Watching(mut events) => match events.next_until_settled().await {
                Err(_) => {
                    self.source.works();
                    self.state = State::Watching(events);
                    None
                }
                Ok(Some(item)) => self.watched(item, events),
                Ok(None) => {
                    self.state = if events.ended_early() { State::Broken } else { State::Resume };
                    events.is_short().then(|| Err(ended("the API server ended a watch immediately")))
                }
            },
        }
    }

    /// Requests a streamed list.
    async fn stream(&mut self) -> Option<Result<Event<K>>> {
        match self.watch(true, "").await {
            Ok(events) => {
                self.state = State::Streamed(events);
                Some(Ok(self.begin()))
            }
            Err(kube::Error::Api(status)) if matches!(status.code, 400 | 422) => {
                let resource = K::RESOURCE;
                info!(resource, "the API server does not support streamed lists; requesting a whole list");
                self.is_whole = true;
                None
            }
            Err(error) => Some(Err(Error::WatchStartFailed(error))),
        }
    }

    /// A streamed list was cut off. The next one is streamed, too: while API servers are restarted, whole lists of all agents
    /// would be too much for the others. A proxy that cuts each one off gets a request for a whole list.
    fn cut_off(&mut self) {
        self.cuts += 1;
        if self.cuts > 1 {
            self.give_up_streaming();
        }
    }

    fn give_up_streaming(&mut self) {
        let resource = K::RESOURCE;
        info!(resource, "a streamed list did not end with its bookmark; requesting a whole list");
        (self.is_whole, self.cuts) = (true, 0);
    }

    /// Requests a whole list.
    async fn list(&mut self) -> Option<Result<Event<K>>> {
        let params = ListParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.fields(),
            version_match: (!self.is_doubtful).then_some(VersionMatch::NotOlderThan),
            resource_version: (!self.is_doubtful).then(|| self.reached.to_string()),
            ..ListParams::default()
        };
        let list = match self.source.list(&params).await {
            Ok(list) => list,
            Err(error) if self.source.drops_fields(&error) => return None,
            Err(error) => {
                self.is_doubtful |= matches!(code(&error), Some(GONE | TOO_LARGE));
                return Some(Err(Error::InitialListFailed(error)));
            }
        };
        if let Err(error) = self.advance(list.metadata.resource_version.as_deref()) {
            return Some(Err(error));
        }
        self.clear_doubts();
        self.state = State::Whole(list.items.into_iter());
        Some(Ok(self.begin()))
    }

    fn begin(&mut self) -> Event<K> {
        self.history = History::default();
        Event::Init
    }

    /// Ends all doubts: a list has been accepted.
    const fn clear_doubts(&mut self) {
        (self.is_doubtful, self.cuts) = (false, 0);
    }

    /// Compares the server's history with the known one, after a random pause: the next step resumes the watch, or requests a list.
    async fn compare_histories(&mut self) -> Option<Result<Event<K>>> {
        sleep(jitter(SPREAD)).await;
        let (resource, reached) = (K::RESOURCE, self.reached);
        match self.history.compare(&self.source).await {
            Ok(Comparison::Same) => self.state = State::Resume,
            Ok(Comparison::Other) => {
                warn!(
                    resource,
                    reached,
                    "the API server's history is another one, as after a restore of etcd; listing again"
                );
                self.is_doubtful = true;
            }
            Ok(Comparison::Unknown(why)) => {
                info!(resource, reached, why, "cannot compare the API server's history; listing again");
                self.is_doubtful = true;
            }
            Err(error) => {
                self.go_on(code(&error), State::Broken);
                return Some(Err(Error::WatchStartFailed(error)));
            }
        }
        None
    }

    /// Opens the watch again.
    async fn resume(&mut self) -> Option<Result<Event<K>>> {
        match self.watch(false, &self.reached.to_string()).await {
            Ok(events) => {
                self.state = State::Watching(events);
                None
            }
            // Another server than that of the list may be older.
            Err(error) if self.source.drops_fields(&error) => {
                self.state = State::Resume;
                None
            }
            Err(error) => {
                let code = code(&error);
                self.go_on(code, if code.is_none() { State::Broken } else { State::Resume });
                Some(Err(Error::WatchStartFailed(error)))
            }
        }
    }

    /// Continues with `next` after a failure, or with a list, if the server refuses a watch at the known version: at once if the
    /// version is gone, else after the second refusal in a row and each fourth one, so that a single error does not make all
    /// agents list. client-go lists each time. A server that refuses every request (401, 403), is overloaded (429) or does not
    /// work (502, 503, 504) does not refuse the version.
    fn go_on(&mut self, code: Option<u16>, next: State<K>) {
        if let Some(code) = code.filter(|code| !matches!(code, 401 | 403 | 429 | 502..=504)) {
            self.refusals = self.refusals.saturating_add(1);
            if code == GONE || self.refusals == 2 || self.refusals.is_multiple_of(4) {
                return;
            }
        }
        self.state = next;
    }

    /// Returns the field selector, if the server knows its fields.
    fn fields(&self) -> Option<String> {
        self.config.field_selector.clone().filter(|_| self.source.has_fields())
    }

    async fn watch(&mut self, send_initial_events: bool, version: &str) -> kube::Result<Events<K>> {
        let lasts = WATCH + jitter(WATCH);
        let params = WatchParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.fields(),
            timeout: Some(lasts.as_secs() as u32),
            bookmarks: true,
            send_initial_events,
        };
        let stream = self.source.watch(&params, version).await?.boxed();
        let opened = Instant::now();
        Ok(Events {
            stream,
            opened,
            settles: Some(opened + SETTLED),
            lasts,
            is_empty: true,
            is_lively: false,
            progressed: opened,
            objects: 0,
        })
    }

    /// Handles an item of a streamed list. The next state is a new list, unless it is set.
    fn streamed(
        &mut self,
        item: kube::Result<WatchEvent<K>>,
        mut events: Events<K>,
    ) -> Option<Result<Event<K>>> {
        let event = match item {
            Ok(WatchEvent::Bookmark(bookmark)) if bookmark.metadata.annotations.contains_key(LIST_ENDS) => {
                if let Err(error) = self.advance(Some(&bookmark.metadata.resource_version)) {
                    return Some(Err(error));
                }
                self.clear_doubts();
                self.source.works();
                events.settles = None;
                self.state = State::Watching(events);
                return Some(Ok(Event::InitDone));
            }
            Ok(WatchEvent::Bookmark(_)) => None,
            Ok(WatchEvent::Added(object)) => {
                events.progressed = Instant::now();
                events.objects += 1;
                self.history.applied(&object);
                Some(Ok(Event::InitApply(object)))
            }
            // Changes until the server's cache is as new as etcd.
            Ok(WatchEvent::Modified(object)) => {
                self.history.applied(&object);
                Some(Ok(Event::Apply(object)))
            }
            Ok(WatchEvent::Deleted(object)) => {
                self.history.deleted(&object);
                Some(Ok(Event::Delete(object)))
            }
            Ok(WatchEvent::Error(status)) => return Some(Err(Error::WatchError(status))),
            Err(error) => {
                // A server that tells why, and one that is asked for JSON now, may end the next list.
                if code(&error).is_none() && !is_malformed(&error) {
                    self.cut_off();
                }
                return Some(Err(Error::WatchFailed(error)));
            }
        };
        self.state = State::Streamed(events);
        event
    }

    /// Handles an item of a watch. The next state is a new list, unless it is set.
    fn watched(
        &mut self,
        item: kube::Result<WatchEvent<K>>,
        mut events: Events<K>,
    ) -> Option<Result<Event<K>>> {
        let event = match item {
            Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)) => {
                self.history.applied(&object);
                Event::Apply(object)
            }
            Ok(WatchEvent::Deleted(object)) => {
                self.history.deleted(&object);
                Event::Delete(object)
            }
            Ok(WatchEvent::Bookmark(bookmark)) => {
                events.is_lively = true;
                let advanced = self.advance(Some(&bookmark.metadata.resource_version));
                if advanced.is_ok() {
                    (self.state, self.refusals) = (State::Watching(events), 0);
                }
                return advanced.err().map(Err);
            }
            Ok(WatchEvent::Error(status)) => {
                self.go_on(Some(status.code), State::Broken);
                return Some(Err(Error::WatchError(status)));
            }
            // The event of a malformed message is lost, so the objects are listed again.
            Err(error) => {
                if !is_malformed(&error) {
                    self.go_on(code(&error), State::Broken);
                }
                return Some(Err(Error::WatchFailed(error)));
            }
        };
        let (Event::Apply(object) | Event::Delete(object)) = &event else { return None };
        let version = object.meta().resource_version.clone();
        if let Err(error) = self.advance(version.as_deref()) {
            return Some(Err(error));
        }
        (self.state, self.refusals) = (State::Watching(events), 0);
        Some(Ok(event))
    }

    /// Moves to the version of an event or a list. An older one than the known one is refused: then a list decides.
    fn advance(&mut self, version: Option<&str>) -> Result<()> {
        let Some(version) = number(version) else {
            return Err(Error::NoResourceVersion);
        };
        let reached = self.reached;
        if version < reached && !self.is_doubtful {
            self.is_doubtful = true;
            let what = format!("the API server sent version {version} after version {reached}");
            return Err(Error::WatchFailed(kube::Error::ReadEvents(io::Error::other(what))));
        }
        self.reached = version;
        Ok(())
    }
}

/// Returns the status code of the server's answer; `None` if it did not answer.
fn code(error: &kube::Error) -> Option<u16> {
    match error {
        kube::Error::Api(status) => Some(status.code),
        _ => None,
    }
}

/// Returns the error for an answer that the server ended too early.
fn ended(why: &str) -> Error {
    Error::WatchFailed(kube::Error::ReadEvents(io::Error::new(io::ErrorKind::UnexpectedEof, why)))
}

impl<K> Events<K> {
    /// Returns the next event, or once an error: there was none until the watch has settled.
    async fn next_until_settled(
        &mut self,
    ) -> std::result::Result<Option<kube::Result<WatchEvent<K>>>, Elapsed> {
        let Some(settles) = self.settles else { return Ok(self.next().await) };
        timeout_at(settles, self.next()).await.inspect_err(|_| self.settles = None)
    }

    async fn next(&mut self) -> Option<kube::Result<WatchEvent<K>>> {
        let patience = if self.is_lively { SILENCE } else { self.lasts + MARGIN };
        let item = timeout(patience, self.stream.next()).await.unwrap_or_else(|_| {
            debug!("a watch was silent for too long");
            None
        });
        self.is_empty &= item.is_none();
        item
    }

    /// Returns the next event of a streamed list; `None` if it ended. An error if no object has arrived for too long, or at the
    /// end of the watch's timeout. A bookmark or a change does not count: a server that ignores what was requested sends them
    /// as well.
    async fn next_of_list(&mut self) -> std::result::Result<Option<kube::Result<WatchEvent<K>>>, Elapsed> {
        let is_list = self.objects > self.opened.elapsed().as_secs();
        let longest = if is_list { self.lasts + MARGIN } else { LONGEST };
        let deadline = (self.progressed + SILENCE).min(self.opened + longest);
        let item = timeout_at(deadline, self.stream.next()).await?;
        self.is_empty &= item.is_none();
        Ok(item)
    }

    fn is_short(&self) -> bool {
        self.is_empty && self.opened.elapsed() < SHORT
    }

    /// Whether it ended before its timeout: then the server, or another one, may have been started.
    fn ended_early(&self) -> bool {
        self.opened.elapsed() + MARGIN < self.lasts
    }
}

#[cfg(test)]
mod tests;
