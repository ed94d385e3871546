//! Selects the request that lists the existing objects of a kind.
//!
//! A *streamed* list is a watch that begins with the existing objects (`sendInitialEvents`, Kubernetes' `WatchList`): the API
//! server sends one object after the other from its cache, and neither side holds the whole list. A server without this feature
//! rejects the request (status 400 or 422), or ignores the parameter and never reports that the list is complete. The agent then
//! requests a *normal* list from the server's cache (`resourceVersion=0`, as kube-proxy does), in one request, so that nothing
//! is read from etcd. The next list is requested as a streamed one again, because the server may have been upgraded by then.

use std::time::Duration;

use kube::runtime::watcher::{self, Event, InitialListStrategy, ListSemantic};
use tracing::info;

use super::watch_health::WatchErrorKind;

/// How long a streamed list may be silent until the agent assumes that the server does not support it. A server that
/// has just started fills its cache first, which takes a second or two.
const SILENCE: Duration = Duration::from_secs(10);

/// How the next list is requested, and whether a list is in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lists {
    streamed: bool,
    under_way: bool,
}

/// What the caller does with the watch after an event or an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Continues the watch.
    Continue,
    /// Starts again with a list: the server has lost the watch's resourceVersion, and would refuse it again and again.
    Relist,
    /// Requests a normal list: the server does not support streamed lists. This is not reported as a failure.
    FallBack,
}

impl Default for Lists {
    fn default() -> Self {
        Self { streamed: true, under_way: true }
    }
}

impl Lists {
    /// Returns `config` with the options for the next list.
    pub fn configure(self, config: watcher::Config) -> watcher::Config {
        if self.streamed {
            return config.streaming_lists();
        }
        // kube-rs sends `resourceVersion=0` only if it does not request pages; the API server's cache has no pages.
        let (list_semantic, initial_list_strategy) = (ListSemantic::Any, InitialListStrategy::ListWatch);
        watcher::Config { page_size: None, list_semantic, initial_list_strategy, ..config }
    }

    /// Returns how long the watch may be silent; `None`: without limit.
    pub fn patience(self) -> Option<Duration> {
        (self.streamed && self.under_way).then_some(SILENCE)
    }

    /// Requests a normal list, because the streamed list was silent for longer than [`Self::patience`].
    pub fn fall_back(&mut self, resource: &'static str) {
        info!(resource, "the API server did not complete a streamed list; requesting a normal list");
        *self = Self { streamed: false, under_way: true };
    }

    /// Records that the watch starts again with a list.
    pub fn restart(&mut self) {
        self.under_way = true;
    }

    /// Handles an event or error of the watch, and returns what the caller has to do.
    pub fn observe<K>(&mut self, resource: &'static str, item: &watcher::Result<Event<K>>) -> Next {
        match item {
            Ok(Event::Init) => self.under_way = true,
            Ok(Event::InitDone) => *self = Self { streamed: true, under_way: false },
            Err(error @ watcher::Error::WatchStartFailed(cause)) => {
                if WatchErrorKind::of(error) == WatchErrorKind::Expired {
                    self.restart();
                    return Next::Relist;
                }
                let is_refused =
                    matches!(cause, kube::Error::Api(status) if matches!(status.code, 400 | 422));
                if is_refused && self.streamed && self.under_way {
                    info!(
                        resource,
                        "the API server does not support streamed lists; requesting a normal list"
                    );
                    self.streamed = false;
                    return Next::FallBack;
                }
            }
            Ok(Event::InitApply(_) | Event::Apply(_) | Event::Delete(_)) | Err(_) => {}
        }
        Next::Continue
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    fn refused(code: u16) -> watcher::Result<Event<()>> {
        let status = Status { code, ..Status::default() };
        Err(watcher::Error::WatchStartFailed(kube::Error::Api(Box::new(status))))
    }

    #[test]
    fn a_server_without_streamed_lists_is_asked_for_a_whole_one_and_next_time_again() {
        for code in [400, 422] {
            let mut lists = Lists::default();
            assert_eq!(lists.observe("services", &refused(code)), Next::FallBack);
            let config = lists.configure(watcher::Config::default());
            assert_eq!(config.initial_list_strategy, InitialListStrategy::ListWatch);
            assert_eq!((config.list_semantic, config.page_size), (ListSemantic::Any, None));
            assert_eq!(lists.patience(), None, "a whole list may take its time");
            assert_eq!(lists.observe("services", &refused(code)), Next::Continue, "that is a failure now");
            assert_eq!(lists.observe::<()>("services", &Ok(Event::InitDone)), Next::Continue);
            let config = lists.configure(watcher::Config::default());
            assert_eq!(config.initial_list_strategy, InitialListStrategy::StreamingList);
        }
    }

    #[test]
    fn silence_ends_a_streamed_list_but_no_watch() {
        let mut lists = Lists::default();
        assert_eq!(lists.patience(), Some(SILENCE));
        lists.observe::<()>("services", &Ok(Event::InitApply(())));
        lists.fall_back("services");
        assert_eq!(lists.patience(), None);
        lists.observe::<()>("services", &Ok(Event::InitDone));
        assert_eq!(lists.patience(), None, "a watch may be silent");
        lists.observe::<()>("services", &Ok(Event::Init));
        assert_eq!(lists.patience(), Some(SILENCE));
    }

    #[test]
    fn a_watch_that_is_too_far_behind_begins_anew_and_refusals_of_watches_are_failures() {
        let mut lists = Lists::default();
        lists.observe::<()>("services", &Ok(Event::InitDone));
        assert_eq!(lists.observe("services", &refused(422)), Next::Continue);
        assert_eq!(lists.observe("services", &refused(410)), Next::Relist);
        assert_eq!(lists.patience(), Some(SILENCE));
        assert_eq!(lists.observe("services", &refused(403)), Next::Continue);
    }
}
