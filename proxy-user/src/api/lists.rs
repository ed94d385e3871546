//! How the objects that there are already are asked for.
//!
//! A *streamed* list is a watch that begins with what there is (`sendInitialEvents`, Kubernetes' `WatchList`): the API
//! server sends one object after the other out of its cache, and neither side holds the whole list. Servers that do
//! not have it refuse (their status is 400 or 422), or pass over the parameter and never say that the list is
//! complete. They are asked for a *whole* list out of their cache instead (`resourceVersion=0`, as kube-proxy asks), by
//! one request, so that none of it goes to etcd. The next list that is needed is asked for as a streamed one again: the
//! server may be a newer one then.

use std::time::Duration;

use kube::runtime::watcher::{self, Event, InitialListStrategy, ListSemantic};
use tracing::info;

use super::watch_health::WatchErrorKind;

/// A streamed list that is silent for so long is not served. A server that begins to listen fills its cache first, which
/// takes a second or two.
const SILENCE: Duration = Duration::from_secs(10);

/// How the next list is asked for, and whether one is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lists {
    streamed: bool,
    under_way: bool,
}

/// What becomes of a watch after something came out of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It goes on.
    GoesOn,
    /// Its place in the history is lost: tried again from there, it would be refused again and again.
    BeginsAnew,
    /// The server does not have streamed lists. That is not reported as a failure.
    AsksOtherwise,
}

impl Default for Lists {
    fn default() -> Self {
        Self { streamed: true, under_way: true }
    }
}

impl Lists {
    /// Says in `config` how to list.
    pub fn configure(self, config: watcher::Config) -> watcher::Config {
        if self.streamed {
            return config.streaming_lists();
        }
        // kube-rs asks for version 0 only where it does not ask for pages; the cache has no pages.
        let (list_semantic, initial_list_strategy) = (ListSemantic::Any, InitialListStrategy::ListWatch);
        watcher::Config { page_size: None, list_semantic, initial_list_strategy, ..config }
    }

    /// How long the watch may be silent; `None`: for ever.
    pub fn patience(self) -> Option<Duration> {
        (self.streamed && self.under_way).then_some(SILENCE)
    }

    /// It was silent for longer.
    pub fn was_silent(&mut self, resource: &'static str) {
        info!(resource, "the API server did not complete a streamed list; requesting a normal list");
        *self = Self { streamed: false, under_way: true };
    }

    /// The watch begins anew, with a list.
    pub fn begins_anew(&mut self) {
        self.under_way = true;
    }

    /// Something came out of the watch.
    pub fn saw<K>(&mut self, resource: &'static str, item: &watcher::Result<Event<K>>) -> Next {
        match item {
            Ok(Event::Init) => self.under_way = true,
            Ok(Event::InitDone) => *self = Self { streamed: true, under_way: false },
            Err(error @ watcher::Error::WatchStartFailed(cause)) => {
                if WatchErrorKind::of(error) == WatchErrorKind::Expired {
                    self.begins_anew();
                    return Next::BeginsAnew;
                }
                let is_refused =
                    matches!(cause, kube::Error::Api(status) if matches!(status.code, 400 | 422));
                if is_refused && self.streamed && self.under_way {
                    info!(
                        resource,
                        "the API server does not support streamed lists; requesting a normal list"
                    );
                    self.streamed = false;
                    return Next::AsksOtherwise;
                }
            }
            Ok(Event::InitApply(_) | Event::Apply(_) | Event::Delete(_)) | Err(_) => {}
        }
        Next::GoesOn
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
            assert_eq!(lists.saw("services", &refused(code)), Next::AsksOtherwise);
            let config = lists.configure(watcher::Config::default());
            assert_eq!(config.initial_list_strategy, InitialListStrategy::ListWatch);
            assert_eq!((config.list_semantic, config.page_size), (ListSemantic::Any, None));
            assert_eq!(lists.patience(), None, "a whole list may take its time");
            assert_eq!(lists.saw("services", &refused(code)), Next::GoesOn, "that is a failure now");
            assert_eq!(lists.saw::<()>("services", &Ok(Event::InitDone)), Next::GoesOn);
            let config = lists.configure(watcher::Config::default());
            assert_eq!(config.initial_list_strategy, InitialListStrategy::StreamingList);
        }
    }

    #[test]
    fn silence_ends_a_streamed_list_but_no_watch() {
        let mut lists = Lists::default();
        assert_eq!(lists.patience(), Some(SILENCE));
        lists.saw::<()>("services", &Ok(Event::InitApply(())));
        lists.was_silent("services");
        assert_eq!(lists.patience(), None);
        lists.saw::<()>("services", &Ok(Event::InitDone));
        assert_eq!(lists.patience(), None, "a watch may be silent");
        lists.saw::<()>("services", &Ok(Event::Init));
        assert_eq!(lists.patience(), Some(SILENCE));
    }

    #[test]
    fn a_watch_that_is_too_far_behind_begins_anew_and_refusals_of_watches_are_failures() {
        let mut lists = Lists::default();
        lists.saw::<()>("services", &Ok(Event::InitDone));
        assert_eq!(lists.saw("services", &refused(422)), Next::GoesOn);
        assert_eq!(lists.saw("services", &refused(410)), Next::BeginsAnew);
        assert_eq!(lists.patience(), Some(SILENCE));
        assert_eq!(lists.saw("services", &refused(403)), Next::GoesOn);
    }
}
