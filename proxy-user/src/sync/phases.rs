//! The phases of a sync that need only the jobs and the maps, one function for each.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use proxy_common::backend::{BACKEND_ACTIVE, BACKEND_GONE};
use proxy_common::service::{SCOPE_EXTERNAL, SCOPE_INTERNAL, SERVICE_SCOPED, ServiceEntry};

use super::applied::Applied;
use super::job::{Job, Owner, Steps, SyncError, Wanted};
use super::prefilter::backend_bit;
use super::removal::has_left;
use super::writer::Writer;
use crate::maps::FilterBit as Bit;
use crate::maps::{Backend, FrontendKey, Store, Write};

impl Applied {
    /// Whether the backend of this id may get new connections.
    pub(super) fn serves(&self, id: u32) -> bool {
        self.backends.get(id).is_some_and(|row| row.state == BACKEND_ACTIVE)
    }

    /// Returns the filter bits that a Service port needs.
    pub(super) fn bits_of(&self, wanted: &Wanted) -> impl Iterator<Item = Bit> {
        let frontends = wanted.frontends.iter().flat_map(|(key, ..)| self.frontend_bits(key));
        wanted.rows.values().map(backend_bit).chain(frontends)
    }
}

impl<S: Store> Writer<S> {
    /// Removes frontends from `services`. A failure counts for the port whose id the entry has.
    pub(super) fn remove_services(&mut self, keys: Vec<FrontendKey>, jobs: &mut Vec<Job>, now: Instant) {
        if keys.is_empty() {
            return;
        }
        let mut numbers: BTreeMap<u32, usize> =
            jobs.iter().enumerate().filter_map(|(number, job)| job.id.map(|id| (id, number))).collect();
        let mut steps = Steps::default();
        for key in keys {
            let Some(id) = self.applied.services.get(&key).map(|entry| entry.id) else { continue };
            // An unknown id belongs to no port.
            let job = *numbers.entry(id).or_insert_with(|| {
                jobs.push(Job::new(Owner::Upkeep));
                jobs.len() - 1
            });
            steps.push(job, Write::NoService(key));
        }
        self.execute(&steps, jobs, true, now);
    }

    /// Gives every frontend an extent with exactly its endpoints: its current extent, one of another frontend of the port,
    /// or a new one.
    pub(super) fn write_slots(&mut self, jobs: &mut [Job], now: Instant) {
        let mut steps = Steps::default();
        for (number, job) in jobs.iter_mut().enumerate().filter(|(_, job)| !job.stopped) {
            let Some(wanted) = &mut job.wanted else { continue };
            for (key, entry, ids) in wanted.frontends.iter_mut().filter(|(.., ids)| !ids.is_empty()) {
                entry.slot_count = ids.len() as u32;
                let has = self.applied.services.get(key).filter(|has| has.id == entry.id);
                let keeps =
                    has.filter(|has| self.applied.extents.ids(has.slot_base, has.slot_count) == Some(ids));
                if let Some(base) =
                    keeps.map(|has| has.slot_base).or_else(|| self.applied.extents.find(entry.id, ids))
                {
                    entry.slot_base = base;
                    continue;
                }
                match self.applied.extents.allocate(entry.id, ids.clone()) {
                    Ok(base) => {
                        entry.slot_base = base;
                        job.extents.push(base);
                        steps.push(number, Write::Slots(base, ids.clone()));
                    }
                    Err(no_room) => {
                        job.cause.get_or_insert(SyncError::Slots(no_room));
                        job.stopped = true;
                        break;
                    }
                }
            }
        }
        self.execute(&steps, jobs, false, now);
        for job in jobs.iter().filter(|job| job.stopped) {
            for base in &job.extents {
                self.applied.extents.spoil(*base);
            }
        }
    }

    /// Writes the entries of `services`: first those for clients outside, then the internal ones that refer to them.
    pub(super) fn commit(&mut self, jobs: &mut [Job], now: Instant) {
        for scope in [SCOPE_EXTERNAL, SCOPE_INTERNAL] {
            let mut steps = Steps::default();
            for (number, job) in jobs.iter().enumerate() {
                // A job that failed in an earlier phase has no complete set to commit.
                if job.stopped && !job.committing {
                    continue;
                }
                for (key, entry, _) in job.wanted.iter().flat_map(|wanted| &wanted.frontends) {
                    let differs = self.applied.services.get(key) != Some(entry);
                    if key.scope == scope && differs && self.external_entry_exists(key, entry) {
                        steps.push(number, Write::Service(*key, *entry));
                    }
                }
            }
            for job in jobs.iter_mut().filter(|job| !job.stopped) {
                job.committing = true;
            }
            self.execute(&steps, jobs, true, now);
        }
    }

    /// Whether the external entry exists, if this entry refers clients outside to it; `true` for entries without such a
    /// reference.
    fn external_entry_exists(&self, key: &FrontendKey, entry: &ServiceEntry) -> bool {
        let outside = FrontendKey { scope: SCOPE_EXTERNAL, ..*key };
        let found = self.applied.services.get(&outside).is_some_and(|found| found.id == entry.id);
        entry.flags & SERVICE_SCOPED == 0 || found
    }

    /// Whether the internal entry refers clients outside to this external entry.
    pub(super) fn is_referred_to(&self, key: &FrontendKey) -> bool {
        let inside = FrontendKey { scope: SCOPE_INTERNAL, ..*key };
        let entry = self.applied.services.get(&inside).filter(|_| inside != *key);
        entry.is_some_and(|entry| entry.flags & SERVICE_SCOPED != 0)
    }

    /// Removes source ranges that are no longer allowed. A failed job keeps its ranges.
    pub(super) fn retire_ranges(&mut self, jobs: &mut [Job], now: Instant) {
        let mut steps = Steps::default();
        for (number, job) in jobs.iter().enumerate().filter(|(_, job)| !job.stopped) {
            let Some(id) = job.id else { continue };
            let wanted =
                |range: &&_| job.wanted.as_ref().is_some_and(|wanted| wanted.ranges.contains(*range));
            for range in self.applied.ranges.get(&id).into_iter().flatten().filter(|range| !wanted(range)) {
                steps.push(number, Write::NoSourceRange(id, *range));
            }
        }
        self.execute(&steps, jobs, true, now);
    }

    /// Marks removed endpoints as gone at once, so that flows select another endpoint, even if old slots still refer to
    /// them because there is no space for new slots. Ids to which no slot refers enter quarantine, and so do the ids of
    /// removed ports.
    pub(super) fn retire_endpoints(&mut self, jobs: &mut [Job], now: Instant) {
        let mut steps = Steps::default();
        let mut left = Vec::new();
        for (number, job) in jobs.iter().enumerate() {
            let Some(service) = job.id else { continue };
            let is_wanted = |id: &u32| job.wanted.as_ref().is_some_and(|wanted| wanted.rows.contains_key(id));
            let rests = |key: &_| self.applied.endpoints.is_quarantined(key);
            let unwanted =
                self.applied.endpoints_of(service).filter(|(key, id)| !is_wanted(id) && !rests(key));
            let unwanted: Vec<_> = unwanted.collect();
            // In most cases, no endpoint was removed.
            let live =
                if unwanted.is_empty() { BTreeSet::new() } else { self.applied.extents.live_ids(service) };
            for (key, id) in unwanted {
                if !live.contains(&id) {
                    left.push((key, id));
                }
                if let Some(row) = self.applied.backends.get(id).filter(|row| !has_left(row)) {
                    steps.push(number, Write::Backend(id, Backend { state: BACKEND_GONE, ..*row }));
                }
            }
        }
        self.execute(&steps, jobs, true, now);
        for (key, id) in left {
            if self.applied.backends.get(id).is_none_or(has_left) {
                self.applied.endpoints.retire(&key, now, self.number);
            }
        }
        for job in jobs.iter().filter(|job| job.wanted.is_none()) {
            let Some(id) = job.id else { continue };
            let rests = |(key, _)| self.applied.endpoints.is_quarantined(&key);
            if self.applied.frontends_of(id).next().is_none()
                && self.applied.endpoints_of(id).all(rests)
                && !self.applied.ranges.contains_key(&id)
                && let Some(port) = job.port()
            {
                self.applied.ports.retire(port, now, self.number);
            }
        }
    }

    /// Starts the quarantine of bits that were set for entries that were not written afterwards.
    pub(super) fn note_unused_bits(&mut self, wanted: Option<&Wanted>, now: Instant) {
        if let Some(wanted) = wanted {
            for bit in self.applied.bits_of(wanted).collect::<Vec<_>>() {
                self.applied.prefilter.unused(bit, now);
            }
        }
    }
}
