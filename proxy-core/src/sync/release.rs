//! Frees extents, ids and filter bits whose quarantine is over, and removes invalid entries.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::applied::Applied;
use super::index::BackendKey;
use super::job::{Failure, Owner, Steps, SyncError};
use super::shares::RESERVE;
use super::writer::Writer;
use crate::model::Problem;
use crate::plan::ServicePortName;
use crate::store::FilterBit as Bit;
use crate::store::{FlowUse, NoFlows, Store, Table, Write};

/// Minimum time between two searches for the filter bits that connections need, and for ids of Service ports if flows have had some
/// of them: each search reads all flows.
const RELEASE_PERIOD: Duration = Duration::from_mins(10);
/// Minimum time between two searches for ids of Service ports if flows have had none of them.
const PORTS_PERIOD: Duration = Duration::from_mins(1);
/// The same if ids are short.
const SHORT_PERIOD: Duration = Duration::from_secs(10);

/// Minimum time between two syncs that only free things. Ids of endpoints are freed together at most this often, because
/// the agent has to read their counts of open connections.
const TOGETHER: Duration = Duration::from_secs(1);

/// The state that decides when things are freed.
pub(super) struct Releases {
    pub(super) flows: Box<dyn FlowUse + Send>,
    /// Removals of invalid entries of the maps.
    pub(super) orphans: Vec<Write>,
    /// The failure of those removals. The others do not wait for their retry.
    pub(super) orphans_failure: Option<Failure>,
    /// The failure of the other removals.
    pub(super) failure: Option<Failure>,
    /// Earliest time at which filter bits may be cleared; `None`: at any time.
    pub(super) next_release: Option<Instant>,
    /// Earliest time at which ids of endpoints may be freed; `None`: at any time.
    next_ids: Option<Instant>,
    /// When flows were searched for ids of Service ports, and whether they had some.
    ports_search: Option<(Instant, bool)>,
    /// Earliest time of the next sync that only frees things; `None`: at any time.
    next_free: Option<Instant>,
}

impl Default for Releases {
    fn default() -> Self {
        let (next_release, next_ids, ports_search, next_free) = (None, None, None, None);
        Self {
            flows: Box::new(NoFlows),
            orphans: Vec::new(),
            orphans_failure: None,
            failure: None,
            next_release,
            next_ids,
            ports_search,
            next_free,
        }
    }
}

impl Releases {
    /// Returns the time of the sync that should free a thing whose quarantine ends at `at`. Ids of endpoints may wait
    /// longer.
    pub(super) fn due(&self, at: Instant, is_id: bool) -> Instant {
        let next = [self.next_free, self.next_ids.filter(|_| is_id)];
        next.into_iter().flatten().fold(at, Instant::max)
    }

    /// Returns the earliest time at which ids of Service ports may be freed; `None`: at any time.
    pub(super) fn next_ports(&self, applied: &Applied) -> Option<Instant> {
        let (last, had_some) = self.ports_search?;
        let limit = applied.ports.exhausted().limit as usize;
        let is_short = applied.ports.used() >= limit - limit / RESERVE;
        Some(
            last + if is_short {
                SHORT_PERIOD
            } else if had_some {
                RELEASE_PERIOD
            } else {
                PORTS_PERIOD
            },
        )
    }

    /// Frees everything whose quarantine is over; returns whether this made space.
    pub(super) fn free<S: Store>(&mut self, writer: &mut Writer<S>, now: Instant) -> bool {
        let freed = self.free_after_quarantine(writer, now);
        if freed {
            self.next_free = Some(now + TOGETHER);
        }
        freed
    }

    fn free_after_quarantine<S: Store>(&mut self, writer: &mut Writer<S>, now: Instant) -> bool {
        let mut freed = writer.applied.extents.free_after_quarantine(now, writer.number) > 0;
        freed |= writer.applied.tables.free_after_quarantine(now, writer.number) > 0;
        if is_paused(self.failure.as_ref(), now) {
            return freed;
        }
        let mut steps = writer.drained(now);
        let endpoints = self.releasable_endpoints(writer, now);
        for ((_, at), id) in &endpoints {
            if writer.applied.backends.has(*id) {
                steps.push(0, Write::NoBackend(*id, Table::backends(at.address)));
            }
        }
        for (word, mask) in self.releasable_bits(&mut writer.applied, now) {
            steps.push(0, Write::PrefilterClear(word, mask));
        }
        let sets = writer.applied.ranges.quarantine_over(now, writer.number);
        for (id, ranges) in &sets {
            for range in ranges {
                steps.push(0, Write::NoSourceRange(*id, *range));
            }
        }
        let job = writer.write_without_port(&steps, now);
        let applied = &mut writer.applied;
        for (id, _) in sets {
            freed |= applied.ranges.forget(id);
        }
        if job.cause.is_some() {
            self.next_release = None;
        }
        for (key, id) in endpoints {
            if !writer.applied.backends.has(id) {
                writer.applied.endpoints.forget(&key);
                freed = true;
            }
        }
        let ports = self.releasable_ports(writer, now);
        let mut steps = Steps::default();
        for (_, id) in ports.iter().filter(|(_, id)| writer.applied.names.has(*id)) {
            steps.push(0, Write::NoName(*id));
        }
        let names = writer.write_without_port(&steps, now);
        for (port, id) in ports {
            if !writer.applied.names.has(id) {
                writer.applied.ports.forget(&port);
                writer.removals.forget(id);
                freed = true;
            }
        }
        note_result(&mut self.failure, job.cause.or(names.cause), now);
        freed
    }

    /// Returns the endpoints whose ids are out of quarantine and have no open connections: these would be subtracted from
    /// the count of the id's next owner when they end. The quarantine of the others restarts until they have none.
    fn releasable_endpoints<S>(&mut self, writer: &mut Writer<S>, now: Instant) -> Vec<(BackendKey, u32)> {
        if self.next_ids.is_some_and(|next| now < next) {
            return Vec::new();
        }
        let mut quarantine_over = writer.applied.endpoints.quarantine_over(now, writer.number);
        if quarantine_over.is_empty() {
            return quarantine_over;
        }
        self.next_ids = Some(now + TOGETHER);
        let ids = quarantine_over.iter().map(|(_, id)| *id).collect();
        let connected = self.flows.connected(&ids).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read open connections, so ids of removed endpoints are not freed");
            ids
        });
        let removals = &writer.removals;
        let is_needed = |id: &u32| connected.contains(id) || removals.waits(*id);
        for (key, _) in quarantine_over.extract_if(.., |(_, id)| is_needed(id)) {
            writer.applied.endpoints.restart_quarantine(&key, now, writer.number);
        }
        quarantine_over
    }

    /// Returns the Service ports whose ids are out of quarantine, and have no endpoint and no flow: a flow would count for the id's
    /// next owner, and be listed and deleted as its flow. The quarantine of the others restarts. Their names stay, which reserve
    /// the ids after a restart.
    fn releasable_ports<S>(&mut self, writer: &mut Writer<S>, now: Instant) -> Vec<(ServicePortName, u32)> {
        if self.next_ports(&writer.applied).is_some_and(|next| now < next) {
            return Vec::new();
        }
        let applied = &mut writer.applied;
        let mut ports = applied.ports.quarantine_over(now, writer.number);
        let mut waiting: Vec<_> =
            ports.extract_if(.., |(_, id)| applied.endpoints_of(*id).next().is_some()).collect();
        if !ports.is_empty() {
            let ids = ports.iter().map(|(_, id)| *id).collect();
            let used = self.flows.services_among(&ids).unwrap_or_else(|error| {
                tracing::warn!(%error, "cannot read connections, so ids of removed Service ports are not freed");
                ids
            });
            self.ports_search = Some((now, !used.is_empty()));
            waiting.extend(ports.extract_if(.., |(_, id)| used.contains(id)));
        }
        for (port, _) in waiting {
            applied.ports.restart_quarantine(&port, now, writer.number);
        }
        ports
    }

    /// Returns the bits that are out of quarantine and that no connection needs: the packets of a long connection need them
    /// even after its Service and endpoint were removed.
    fn releasable_bits(&mut self, applied: &mut Applied, now: Instant) -> BTreeSet<Bit> {
        if self.next_release.is_some_and(|next| now < next) {
            return BTreeSet::new();
        }
        let quarantine_over = applied.prefilter.quarantine_over(now);
        if quarantine_over.is_empty() {
            return quarantine_over;
        }
        self.next_release = Some(now + RELEASE_PERIOD);
        match self.flows.used_among(&quarantine_over) {
            Ok(used) => {
                for bit in &used {
                    applied.prefilter.is_in_use(*bit, now);
                }
                &quarantine_over - &used
            }
            Err(error) => {
                tracing::warn!(%error, "cannot read connections, so bits of the prefilter are not cleared");
                BTreeSet::new()
            }
        }
    }

    /// Removes the entries that were invalid when the maps were read.
    pub(super) fn remove_orphans<S: Store>(&mut self, writer: &mut Writer<S>, now: Instant) {
        if is_paused(self.orphans_failure.as_ref(), now) {
            return;
        }
        let mut cause = None;
        for write in std::mem::take(&mut self.orphans) {
            let mut steps = Steps::default();
            steps.push(0, write);
            let job = writer.write_without_port(&steps, now);
            let is_done = job.cause.is_none();
            cause = cause.or(job.cause);
            match steps.writes.pop() {
                Some(write) if !is_done => self.orphans.push(write),
                Some(Write::NoBackend(id, _)) => writer.applied.endpoints.unreserve(id),
                Some(Write::NoName(id)) => writer.applied.ports.unreserve(id),
                _ => {}
            }
        }
        note_result(&mut self.orphans_failure, cause, now);
    }

    /// Returns the problems of the last failures.
    pub(super) fn problems(&self) -> impl Iterator<Item = Problem> {
        [&self.failure, &self.orphans_failure].into_iter().flatten().map(|failure| failure.problem.clone())
    }
}

fn is_paused(failure: Option<&Failure>, now: Instant) -> bool {
    failure.is_some_and(|failure| now < failure.retry)
}

fn note_result(failure: &mut Option<Failure>, cause: Option<SyncError>, now: Instant) {
    *failure = cause.map(|cause| Failure::after(failure.as_ref(), cause.problem(&Owner::NoPort), now));
}
