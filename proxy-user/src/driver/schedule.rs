//! When Services are planned again without an event.

use std::collections::BTreeSet;
use std::time::Instant;

use proxy_core::model::ServiceName;

/// Times of the next planning of Services.
#[derive(Debug, Default)]
pub(super) struct Schedule(BTreeSet<(Instant, ServiceName)>);

impl Schedule {
    pub(super) fn add(&mut self, at: Instant, name: &ServiceName) {
        self.0.insert((at, name.clone()));
    }

    pub(super) fn remove(&mut self, at: Instant, name: &ServiceName) {
        self.0.remove(&(at, name.clone()));
    }

    /// Returns the first time.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.first().map(|(at, _)| *at)
    }

    /// Removes the times until `now`, and returns their Services.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<ServiceName> {
        let mut due = Vec::new();
        while self.0.first().is_some_and(|(at, _)| *at <= now) {
            due.extend(self.0.pop_first().map(|(_, name)| name));
        }
        due
    }
}
