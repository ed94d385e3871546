//! Removal policies: when connections to removed endpoints are reset.
//!
//! [`super::resets`] writes the state [`BACKEND_RESET`](proxy_common::backend::BACKEND_RESET) into the maps.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use proxy_common::backend::BACKEND_ACTIVE;

use super::index::BackendKey;
use crate::store::Backend;

/// The shortest delay: an endpoint whose port is renamed has left until the EndpointSlices have the new name, too.
const SHORTEST: Duration = Duration::from_secs(2);

/// Removed endpoints whose connections are to be reset, and the delay of each Service port.
#[derive(Clone, Debug, Default)]
pub(super) struct Removals {
    /// The delay of Service ports whose policy is `reset`, by id. A removed port keeps its last delay until its id is free.
    pub(super) delays: BTreeMap<u32, Duration>,
    /// Removed endpoints of these ports, by id, each with the time of its removal.
    pub(super) left: BTreeMap<u32, (BackendKey, Instant)>,
    /// Time of the next try, if the last write failed.
    pub(super) retry: Option<Instant>,
}

impl Removals {
    /// Sets the delay from the plan of a Service port; `None` if its policy is `drain`.
    pub(super) fn set(&mut self, service: u32, delay: Option<Duration>) {
        match delay {
            Some(delay) => self.delays.insert(service, delay),
            None => self.delays.remove(&service),
        };
    }

    /// Forgets a Service port whose id is free.
    pub(super) fn forget(&mut self, service: u32) {
        self.delays.remove(&service);
    }

    /// Whether the endpoint of this id waits for the reset of its connections.
    pub(super) fn waits(&self, id: u32) -> bool {
        self.left.contains_key(&id)
    }

    fn due_at(&self, (service, _): &BackendKey, since: Instant) -> Option<Instant> {
        self.delays.get(service).and_then(|delay| since.checked_add(SHORTEST.max(*delay)))
    }

    /// Returns the time of the next reset.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let due = self.left.values().filter_map(|(key, since)| self.due_at(key, *since)).min();
        due.map(|due| self.retry.map_or(due, |retry| due.max(retry)))
    }

    /// Returns the endpoints whose delay is over, by id.
    pub(super) fn due(&self, now: Instant) -> Vec<(u32, BackendKey)> {
        if self.retry.is_some_and(|retry| now < retry) {
            return Vec::new();
        }
        let is_due = |key, since| self.due_at(key, since).is_some_and(|at| at <= now);
        let due = self.left.iter().filter(|(_, (key, since))| is_due(key, *since));
        due.map(|(id, (key, _))| (*id, *key)).collect()
    }
}

/// Whether the endpoint of a row was removed from its Service, whatever the removal policy.
pub(super) fn has_left(row: &Backend) -> bool {
    row.state != BACKEND_ACTIVE
}
