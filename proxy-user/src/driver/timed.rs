//! What the driver notes about Services for a time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use proxy_core::model::ServiceName;

/// Values of Services, and the times at which a Service with a value is planned again without an event.
#[derive(Debug)]
pub(super) struct Timed<T> {
    of: BTreeMap<ServiceName, (T, Vec<Instant>)>,
    /// The times that are still to come.
    times: BTreeSet<(Instant, ServiceName)>,
}

impl<T> Default for Timed<T> {
    fn default() -> Self {
        Self { of: BTreeMap::new(), times: BTreeSet::new() }
    }
}

impl<T> Timed<T> {
    pub(super) fn get(&self, name: &ServiceName) -> Option<&T> {
        self.of.get(name).map(|(value, _)| value)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &T> {
        self.of.values().map(|(value, _)| value)
    }

    /// Replaces the value of a Service, and its times.
    pub(super) fn set(&mut self, name: &ServiceName, value: T, times: impl Into<Vec<Instant>>) {
        self.remove(name);
        let times = times.into();
        self.times.extend(times.iter().map(|at| (*at, name.clone())));
        self.of.insert(name.clone(), (value, times));
    }

    pub(super) fn remove(&mut self, name: &ServiceName) -> Option<T> {
        let (value, times) = self.of.remove(name)?;
        for at in times {
            self.times.remove(&(at, name.clone()));
        }
        Some(value)
    }

    /// Returns the first time.
    pub(super) fn wake(&self) -> Option<Instant> {
        self.times.first().map(|(at, _)| *at)
    }

    /// Removes the times until `now`, and returns their Services.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<ServiceName> {
        let mut due = Vec::new();
        while self.times.first().is_some_and(|(at, _)| *at <= now) {
            due.extend(self.times.pop_first().map(|(_, name)| name));
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn replaced_or_removed_value_has_no_times() {
        let (name, now) = (ServiceName::new("default", "web"), Instant::now());
        let later = now + Duration::from_secs(1);
        let mut timed = Timed::default();
        timed.set(&name, 1, [now, later]);
        timed.set(&name, 2, [later]);
        assert_eq!((timed.wake(), timed.take_due(now)), (Some(later), vec![]));
        assert_eq!((timed.remove(&name), timed.wake()), (Some(2), None));
    }
}
