//! kube-proxy's network programming latency: the time from the trigger of an endpoint change to its write into the maps.
//!
//! The rules are those of kube-proxy (`pkg/proxy/endpointschangetracker.go`). Only a slice with new content counts.
//! Triggers before the start of this agent do not count, because this agent did not delay them. The deletion of a slice
//! discards the waiting triggers of its Service, because its trigger time is that of an earlier change. Changes of a Service
//! whose writes fail wait until they succeed.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use proxy_core::model::net::IpFamily;
use proxy_core::model::{Cluster, EndpointSlice, Event, Key, Listing, Object, ServiceName};

/// The most changes that wait for each Service; later ones are not measured.
const MOST: usize = 64;

/// Trigger times of changes that are not in the maps yet.
#[derive(Debug)]
pub(super) struct Triggers {
    since: SystemTime,
    waiting: BTreeMap<ServiceName, Vec<(IpFamily, SystemTime)>>,
}

impl Triggers {
    /// Creates an empty collection, for changes triggered after `since`.
    pub(super) fn new(since: SystemTime) -> Self {
        Self { since, waiting: BTreeMap::new() }
    }

    /// Records the trigger times of an event; call it before `cluster` takes the event.
    pub(super) fn note(&mut self, cluster: &Cluster, event: &Event) {
        match event {
            Event::Apply(Object::Slice(slice)) => self.note_slice(cluster, slice),
            Event::Reset(Listing::Slices(slices)) => {
                for slice in slices {
                    self.note_slice(cluster, slice);
                }
            }
            Event::Delete(Key::Slice(name)) => {
                if let Some(known) = cluster.slice(name) {
                    self.waiting.remove(&known.service);
                }
            }
            Event::Apply(_) | Event::Delete(_) | Event::Reset(_) | Event::Static { .. } | Event::Host(_) => {}
        }
    }

    fn note_slice(&mut self, cluster: &Cluster, slice: &EndpointSlice) {
        let Some(triggered) = slice.triggered.filter(|time| *time > self.since) else { return };
        if cluster.slice(&slice.name).is_some_and(|known| known.has_same_content(slice)) {
            return;
        }
        let waiting = self.waiting.entry(slice.service.clone()).or_default();
        if waiting.len() < MOST {
            waiting.push((slice.family, triggered));
        }
    }

    /// Removes the waiting changes that are in the maps at `now`; returns the latency of each. Those of failing Services
    /// are not. The latency is 0 if the clock was set back.
    pub(super) fn done(
        &mut self,
        now: SystemTime,
        is_failing: impl Fn(&ServiceName) -> bool,
    ) -> impl Iterator<Item = (IpFamily, Duration)> {
        let done: Vec<_> = self.waiting.extract_if(.., |name, _| !is_failing(name)).collect();
        done.into_iter()
            .flat_map(|(_, changes)| changes)
            .map(move |(family, triggered)| (family, now.duration_since(triggered).unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proxy_core::model::{NodeView, SliceName};

    const START: SystemTime = SystemTime::UNIX_EPOCH;

    struct Fixture {
        triggers: Triggers,
        cluster: Cluster,
    }

    impl Fixture {
        fn new() -> Self {
            Self { triggers: Triggers::new(START), cluster: Cluster::new(NodeView::new("node")) }
        }

        fn take(&mut self, event: Event) {
            self.triggers.note(&self.cluster, &event);
            self.cluster.apply(event);
        }

        /// Applies a slice; a different value of `contents` makes it a change.
        fn apply(&mut self, service: &str, contents: u8, triggered: Option<i64>) {
            self.take(Event::Apply(Object::Slice(slice(service, contents, triggered))));
        }

        fn delete(&mut self, service: &str) {
            self.take(Event::Delete(Key::Slice(SliceName::new("default", format!("{service}-1")))));
        }

        /// Returns the latency of each waiting change in seconds, if all are done 100 seconds after the start.
        fn seconds(&mut self) -> Vec<u64> {
            self.seconds_without(|_| false)
        }

        fn seconds_without(&mut self, is_failing: impl Fn(&ServiceName) -> bool) -> Vec<u64> {
            let done = self.triggers.done(START + Duration::from_secs(100), is_failing);
            done.map(|(_, duration)| duration.as_secs()).collect()
        }
    }

    fn slice(service: &str, contents: u8, triggered: Option<i64>) -> EndpointSlice {
        let at = |seconds: i64| match u64::try_from(seconds) {
            Ok(after) => START + Duration::from_secs(after),
            Err(_) => START - Duration::from_secs(seconds.unsigned_abs()),
        };
        let name = SliceName::new("default", format!("{service}-1"));
        let protocol = proxy_core::model::net::Protocol::Tcp;
        EndpointSlice {
            ports: vec![proxy_core::model::EndpointPort {
                name: proxy_core::model::Name::default(),
                protocol,
                port: contents.into(),
            }],
            triggered: triggered.map(at),
            ..EndpointSlice::new(name, ServiceName::new("default", service), IpFamily::V4)
        }
    }

    #[test]
    fn each_change_of_each_service_counts_once() {
        let mut fixture = Fixture::new();
        fixture.apply("a", 1, Some(10));
        fixture.apply("a", 2, Some(20));
        fixture.apply("b", 1, Some(30));
        assert_eq!(fixture.seconds(), [90, 80, 70]);
        assert_eq!(fixture.seconds(), [0; 0], "they are done");
    }

    #[test]
    fn changes_of_failing_services_wait_until_they_are_written() {
        let mut fixture = Fixture::new();
        fixture.apply("a", 1, Some(10));
        fixture.apply("b", 1, Some(20));
        assert_eq!(fixture.seconds_without(|_| true), [0; 0], "the node's own entries fail");
        let failing = |name: &ServiceName| *name == ServiceName::new("default", "a");
        assert_eq!(fixture.seconds_without(failing), [80]);
        for contents in 2..200 {
            fixture.apply("a", contents, Some(30));
        }
        assert_eq!(fixture.seconds_without(failing), [0; 0]);
        let written = fixture.seconds();
        assert_eq!((written[0], written.len()), (90, MOST));
    }

    #[test]
    fn changes_without_a_new_trigger_time_are_not_measured() {
        let mut fixture = Fixture::new();
        fixture.apply("a", 1, None);
        fixture.apply("a", 1, Some(20));
        fixture.take(Event::Reset(Listing::Slices(vec![slice("a", 1, Some(30)), slice("b", 1, Some(40))])));
        assert_eq!(fixture.seconds(), [60]);
    }

    #[test]
    fn changes_before_the_start_are_not_measured() {
        let mut fixture = Fixture::new();
        fixture.apply("a", 1, Some(-5));
        fixture.apply("b", 1, Some(0));
        assert_eq!(fixture.seconds(), [0; 0]);
    }

    #[test]
    fn a_slice_that_goes_takes_along_what_waits() {
        let mut fixture = Fixture::new();
        fixture.apply("a", 1, Some(10));
        fixture.delete("a");
        assert_eq!(fixture.seconds(), [0; 0]);
        fixture.apply("a", 1, Some(10));
        fixture.delete("a");
        fixture.apply("a", 1, Some(20));
        assert_eq!(fixture.seconds(), [80], "only the last");
        fixture.delete("a");
        assert_eq!(fixture.seconds(), [0; 0]);
    }

    #[test]
    fn programming_latency_is_zero_if_the_clock_was_set_back() {
        let mut fixture = Fixture::new();
        fixture.apply("a", 1, Some(500));
        assert_eq!(fixture.seconds(), [0]);
    }
}
