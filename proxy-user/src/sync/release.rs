//! What has rested is freed: extents, ids, bits of the filter.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::applied::BackendKey;
use super::job::{Job, Steps};
use super::reconcile::Reconciler;
use crate::maps::FilterBit as Bit;
use crate::maps::{Store, Table, Write};

/// Connections are looked through at most this often for the bits that they need.
const RELEASE_PERIOD: Duration = Duration::from_mins(10);

impl<S: Store> Reconciler<S> {
    /// Frees what has rested; says whether there is room now that was not there before.
    pub(super) fn free_rested(&mut self, now: Instant) -> bool {
        let mut freed = self.applied.extents.free_rested(now, self.number) > 0;
        freed |= self.applied.tables.free_rested(now, self.number) > 0;
        if self.cleanup.is_some_and(|(_, retry)| now < retry) {
            return freed;
        }
        let mut steps = self.drained(now);
        let endpoints = self.disconnected(now);
        for ((_, at), id) in &endpoints {
            if self.applied.backends.has(*id) {
                steps.push(0, Write::NoBackend(*id, Table::backends(at.address)));
            }
        }
        for (word, mask) in self.releasable_bits(now) {
            steps.push(0, Write::FilterClear(word, mask));
        }
        let mut job = [Job::cleanup()];
        self.execute(&steps, &mut job, true, now);
        self.applied.drains.forget_done(&self.applied.maglev);
        if job[0].trouble.is_some() {
            self.next_release = None;
        }
        for (key, id) in endpoints {
            if !self.applied.backends.has(id) {
                self.applied.endpoints.forget(&key);
                freed = true;
            }
        }
        let mut ports = self.applied.ports.rested(now, self.number);
        ports.retain(|(_, id)| self.applied.endpoints_of(*id).next().is_none());
        let mut steps = Steps::default();
        for (_, id) in ports.iter().filter(|(_, id)| self.applied.names.contains_key(id)) {
            steps.push(0, Write::NoName(*id));
        }
        self.execute(&steps, &mut job, true, now);
        for (port, id) in ports {
            if !self.applied.names.contains_key(&id) {
                self.applied.ports.forget(&port);
                freed = true;
            }
        }
        self.cleanup_went(&job[0], now);
        freed
    }

    /// Endpoints whose ids have rested, and have no open connections that would end on the next owner's count. The others rest
    /// again, as long as that takes.
    fn disconnected(&mut self, now: Instant) -> Vec<(BackendKey, u32)> {
        let mut rested = self.applied.endpoints.rested(now, self.number);
        if rested.is_empty() {
            return rested;
        }
        let ids = rested.iter().map(|(_, id)| *id).collect();
        let connected = self.flows.connected(&ids).unwrap_or_else(|error| {
            tracing::warn!(%error, "open connections cannot be read, so no id of an endpoint is freed");
            ids
        });
        for (key, _) in rested.extract_if(.., |(_, id)| connected.contains(id)) {
            self.applied.endpoints.rest_again(&key, now, self.number);
        }
        rested
    }

    /// Bits that have rested, and that no connection needs: one of a long life still finds its way by them when its
    /// Service and its endpoint are gone.
    fn releasable_bits(&mut self, now: Instant) -> BTreeSet<Bit> {
        if self.next_release.is_some_and(|next| now < next) {
            return BTreeSet::new();
        }
        let rested = self.applied.filter.rested(now);
        if rested.is_empty() {
            return rested;
        }
        self.next_release = Some(now + RELEASE_PERIOD);
        match self.flows.used_among(&rested) {
            Ok(used) => {
                for bit in &used {
                    self.applied.filter.is_in_use(*bit, now);
                }
                &rested - &used
            }
            Err(error) => {
                tracing::warn!(%error, "connections cannot be read, so no bit of the filter is cleared");
                BTreeSet::new()
            }
        }
    }
}
