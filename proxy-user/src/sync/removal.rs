//! Removal policies: when connections to endpoints that left are reset.
//!
//! [`super::resets`] writes it into the maps.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use proxy_common::backend::BACKEND_ACTIVE;

use super::index::BackendKey;
use crate::maps::Backend;

/// What is to be reset, and when.
#[derive(Clone, Debug, Default)]
pub(super) struct Removals {
    /// The delay of Service ports whose policy is `reset`, by id. A port that is gone keeps what it said last, until its id is
    /// free.
    pub(super) delays: BTreeMap<u32, Duration>,
    /// Endpoints of them that left, by id: since when.
    pub(super) left: BTreeMap<u32, (BackendKey, Instant)>,
    /// The last write failed: no other one before.
    pub(super) retry: Option<Instant>,
}

impl Removals {
    /// What the plan of a Service port says.
    pub(super) fn set(&mut self, service: u32, delay: Option<Duration>) {
        match delay {
            Some(delay) => self.delays.insert(service, delay),
            None => self.delays.remove(&service),
        };
    }

    /// The id of a Service port is free.
    pub(super) fn forget(&mut self, service: u32) {
        self.delays.remove(&service);
    }

    /// Whether connections to the endpoint of this id are yet to be reset.
    pub(super) fn waits(&self, id: u32) -> bool {
        self.left.contains_key(&id)
    }

    fn due_at(&self, (service, _): &BackendKey, since: Instant) -> Option<Instant> {
        self.delays.get(service).and_then(|delay| since.checked_add(*delay))
    }

    /// When the next reset is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let due = self.left.values().filter_map(|(key, since)| self.due_at(key, *since)).min();
        due.map(|due| self.retry.map_or(due, |retry| due.max(retry)))
    }

    /// Endpoints whose delay is over, by id.
    pub(super) fn due(&self, now: Instant) -> Vec<(u32, BackendKey)> {
        if self.retry.is_some_and(|retry| now < retry) {
            return Vec::new();
        }
        let is_due = |key, since| self.due_at(key, since).is_some_and(|at| at <= now);
        let due = self.left.iter().filter(|(_, (key, since))| is_due(key, *since));
        due.map(|(id, (key, _))| (*id, *key)).collect()
    }
}

/// Whether the endpoint of a row has left its Service, whatever becomes of connections to it.
pub(super) fn has_left(row: &Backend) -> bool {
    row.state != BACKEND_ACTIVE
}
