//! The page of one node, served by the node's agent.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use futures::StreamExt as _;
use futures::stream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use proxy_cli::page::{Events, HistoryAnswer, PageQuery, Refusal, Source};

use super::frame;
use super::log::Log;
use super::sampler::Sample;
use super::sampler::Sampler;
use crate::config::page::{PageSettings, Shows};
use crate::maps::view::View;
use crate::rates::Counters;

/// Maximum number of connected browsers: each costs a connection, and its own selection of Services as JSON every two seconds.
const LISTENERS: usize = 16;

/// Returns the current problems of the node, in sentences.
type Problems = Box<dyn Fn() -> Vec<String> + Send + Sync>;

/// The page of one node.
#[derive(Clone)]
pub struct Agent(Arc<Inner>);

struct Inner {
    bpffs: PathBuf,
    node: String,
    shows: Shows,
    problems: Problems,
    log: Option<Log>,
    /// The last look; each open page holds a receiver.
    samples: watch::Sender<Option<Arc<Sample>>>,
    /// Whether a thread reads the maps.
    has_reader_thread: Mutex<bool>,
    listeners: Arc<Semaphore>,
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent")
            .field("node", &self.0.node)
            .field("shows", &self.0.shows)
            .finish_non_exhaustive()
    }
}

impl Agent {
    /// Creates the page of a node whose maps are pinned below `bpffs`; `None` if the page is switched off.
    pub fn new(
        settings: PageSettings,
        bpffs: PathBuf,
        node: String,
        problems: impl Fn() -> Vec<String> + Send + Sync + 'static,
    ) -> Option<Self> {
        (settings.page != Shows::Off).then(|| {
            Self(Arc::new(Inner {
                bpffs,
                node,
                shows: settings.page,
                problems: Box::new(problems),
                log: Log::new(settings.page_history),
                samples: watch::Sender::new(None),
                has_reader_thread: Mutex::new(false),
                listeners: Arc::new(Semaphore::new(LISTENERS)),
            }))
        })
    }

    /// Returns what the page shows.
    pub fn shows(&self) -> Shows {
        self.0.shows
    }

    /// Returns the node's name.
    pub fn node(&self) -> &str {
        &self.0.node
    }

    /// Records the history until the future is dropped.
    pub async fn keep_history(&self) {
        let Some(log) = &self.0.log else { return std::future::pending().await };
        loop {
            sleep(log.pause(SystemTime::now())).await;
            let bpffs = self.0.bpffs.clone();
            // Reading the maps blocks for some milliseconds, so it must not run on a thread that serves requests.
            let read = spawn_blocking(move || Counters::read_totals(&View::open(&bpffs)?)).await;
            let counters = match read {
                Ok(Ok(counters)) => Some(counters),
                Ok(Err(error)) => {
                    tracing::debug!(%error, "a point is missing in the history of the page");
                    None
                }
                Err(_) => None,
            };
            log.add(counters, SystemTime::now());
        }
    }

    /// Adds a listener. The first listener starts the thread that reads the maps.
    fn listen(&self) -> watch::Receiver<Option<Arc<Sample>>> {
        // The lock keeps the thread from ending for lack of listeners before the new one has subscribed.
        let mut has_reader_thread = self.0.has_reader_thread.lock().unwrap_or_else(PoisonError::into_inner);
        let mut samples = self.0.samples.subscribe();
        if *has_reader_thread {
            // The last look is recent, so the new listener gets it at once.
            samples.mark_changed();
        } else {
            *has_reader_thread = true;
            let inner = Arc::clone(&self.0);
            spawn_blocking(move || inner.read());
        }
        samples
    }
}

impl Inner {
    /// Reads the maps until no page is open.
    fn read(&self) {
        let mut sampler = Sampler::new(&self.bpffs, self.shows == Shows::All);
        let is_over = || self.samples.receiver_count() == 0;
        loop {
            let sample = sampler.sample((self.problems)());
            self.samples.send_replace(Some(Arc::new(sample)));
            sampler.wait(is_over);
            let mut has_reader_thread = self.has_reader_thread.lock().unwrap_or_else(PoisonError::into_inner);
            if is_over() {
                *has_reader_thread = false;
                self.samples.send_replace(None);
                return;
            }
        }
    }
}

/// An open page. A slow browser misses looks, and does not delay other browsers.
struct Listening {
    samples: watch::Receiver<Option<Arc<Sample>>>,
    inner: Arc<Inner>,
    query: PageQuery,
    _permit: OwnedSemaphorePermit,
}

impl Listening {
    async fn next(&mut self) -> Option<String> {
        loop {
            self.samples.changed().await.ok()?;
            let sample = self.samples.borrow_and_update().clone();
            let Some(sample) = sample else { continue };
            match frame::text(&self.inner.node, self.inner.shows, &sample, &self.query) {
                Ok(text) => return Some(text),
                Err(error) => {
                    tracing::debug!(%error, "cannot write the data of the page as JSON");
                    return None;
                }
            }
        }
    }
}

impl Source for Agent {
    async fn events(&self, query: PageQuery) -> Result<Events, Refusal> {
        let permit = Arc::clone(&self.0.listeners).try_acquire_owned();
        let permit = permit.map_err(|_| Refusal::TooMany { most: LISTENERS })?;
        let (inner, samples) = (Arc::clone(&self.0), self.listen());
        let listener = Listening { samples, inner, query, _permit: permit };
        Ok(stream::unfold(listener, |mut listener| async { Some((listener.next().await?, listener)) })
            .boxed())
    }

    async fn history(&self, service: String) -> Result<HistoryAnswer, Refusal> {
        self.0.log.as_ref().map(|log| log.answer(&service)).ok_or(Refusal::NoHistory)
    }
}
