//! The phases of a sync that need only the jobs and the maps, one function for each.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::take;
use std::time::Instant;

use ipnet::IpNet;
use proxy_common::backend::{BACKEND_ACTIVE, BACKEND_GONE};
use proxy_common::service::{
    SCOPE_EXTERNAL, SCOPE_INTERNAL, SERVICE_SCOPED, SERVICE_SOURCE_RANGES, ServiceEntry,
};

use super::applied::Applied;
use super::extents::NoRoom;
use super::job::{DesiredPort, Job, Owner, Steps, SyncError};
use super::prefilter::backend_bit;
use super::removal::has_left;
use super::shares::Resource;
use super::writer::Writer;
use crate::store::FilterBit as Bit;
use crate::store::{Backend, FrontendKey, Store, Table, Write};

impl Applied {
    /// Whether the backend of this id may get new connections.
    pub(super) fn serves(&self, id: u32) -> bool {
        self.backends.get(id).is_some_and(|row| row.state == BACKEND_ACTIVE)
    }

    /// Returns the filter bits that a Service port needs.
    pub(super) fn bits_of(&self, wanted: &DesiredPort) -> impl Iterator<Item = Bit> {
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
                jobs.push(Job::new(Owner::NoPort));
                jobs.len() - 1
            });
            steps.push(job, Write::NoService(key));
        }
        self.execute(&steps, jobs, true, now);
    }

    /// Gives every frontend an extent with exactly its endpoints: its current extent, one of another frontend of the port,
    /// or a new one.
    pub(super) fn write_slots(&mut self, jobs: &mut [Job], now: Instant) {
        let capacity = self.store.capacity();
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
                let len = ids.len() as u32;
                let is_allowed = job.owner.port().is_some_and(|port| {
                    self.reserve.allows(&self.applied, &capacity, Resource::Slots, port, len.into())
                });
                let allocated = if is_allowed {
                    self.applied.extents.allocate(entry.id, ids.clone())
                } else {
                    Err(self.applied.extents.no_room(len))
                };
                match allocated {
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
    /// `unscoped`: only those that no longer refer to one.
    pub(super) fn commit(&mut self, jobs: &mut [Job], unscoped: bool, now: Instant) {
        for scope in [SCOPE_EXTERNAL, SCOPE_INTERNAL] {
            let mut steps = Steps::default();
            for (number, job) in jobs.iter().enumerate() {
                // A job that failed in an earlier phase has no complete set to commit.
                if job.stopped && !job.committing {
                    continue;
                }
                for (key, entry, _) in job.wanted.iter().flat_map(|wanted| &wanted.frontends) {
                    let has = self.applied.services.get(key);
                    let refers = |entry: &ServiceEntry| entry.flags & SERVICE_SCOPED != 0;
                    let is_meant = !unscoped || has.is_some_and(refers) && !refers(entry);
                    let differs = is_meant && has != Some(entry);
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

    /// Writes the sets of source ranges that are not in the maps yet. A set that does not fit is not begun.
    pub(super) fn write_ranges(&mut self, jobs: &mut [Job], now: Instant) {
        let capacity = self.store.capacity();
        let mut steps = Steps::default();
        let mut begun: BTreeMap<u32, usize> = BTreeMap::new();
        // The ports of a Service share the list, which may be long: compare it once.
        let mut known: BTreeMap<*const IpNet, u32> = BTreeMap::new();
        for number in 0..jobs.len() {
            let job = &mut jobs[number];
            let (Some(port), Some(wanted), false) = (job.id, &job.wanted, job.stopped) else { continue };
            let Some(set) = wanted.ranges.clone() else { continue };
            let Some(first) = set.first() else { continue };
            let id = match known.get(&set.as_ptr()) {
                Some(id) => Ok(*id),
                None => self.applied.ranges.acquire(&set, port),
            };
            let Ok(id) = id else {
                job.stop(SyncError::Ranges(NoRoom { wanted: set.len() as u32, longest: 0, free: 0 }));
                continue;
            };
            for (_, entry, _) in job.wanted.iter_mut().flat_map(|wanted| &mut wanted.frontends) {
                if entry.flags & SERVICE_SOURCE_RANGES != 0 {
                    entry.ranges = id;
                }
            }
            job.range_set = id;
            known.insert(set.as_ptr(), id);
            let missing: Vec<_> = self.applied.ranges.missing(id).collect();
            if missing.is_empty() || begun.contains_key(&id) {
                continue;
            }
            let (table, len) = (Table::source_ranges(*first), missing.len());
            let resource = if table == Table::SrcRanges6 { Resource::Ranges6 } else { Resource::Ranges };
            // Beyond what is planned, the use has to be exact.
            let used = self.applied.ranges.used(table) + steps.writes.len();
            if (used + len) as u64 > resource.budget(&capacity) {
                self.execute(&take(&mut steps), jobs, false, now);
            }
            let job = &mut jobs[number];
            let free = (capacity.ranges as usize).saturating_sub(self.applied.ranges.used(table));
            let is_allowed = job.owner.port().is_some_and(|port| {
                self.reserve.allows(&self.applied, &capacity, resource, port, len as u64)
            });
            if len > free || !is_allowed {
                let [wanted, free] = [len as u32, free as u32];
                job.stop(SyncError::Ranges(NoRoom { wanted, longest: free, free }));
                known.remove(&set.as_ptr());
                job.range_set = 0;
                self.applied.ranges.undo(id);
                continue;
            }
            begun.insert(id, number);
            for range in missing {
                steps.push(number, Write::SourceRange(id, range));
            }
        }
        self.execute(&steps, jobs, false, now);
        for job in jobs.iter_mut().filter(|job| !job.stopped && begun.contains_key(&job.range_set)) {
            if self.applied.ranges.missing(job.range_set).next().is_some() {
                job.stop(SyncError::IncompleteRanges);
            }
        }
    }

    /// Gives up what failed jobs have written for ports without a frontend in the maps, so that a Service that does not fit
    /// takes no room.
    pub(super) fn abandon(&mut self, jobs: &mut [Job], now: Instant) {
        for job in jobs.iter_mut().filter(|job| job.stopped && !job.committing) {
            if job.id.is_some_and(|id| self.applied.frontends_of(id).next().is_none()) {
                self.note_unused_bits(job.wanted.take().as_ref(), now);
                job.abandoned = true;
            }
        }
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
            let is_quarantined = |key: &_| self.applied.endpoints.is_quarantined(key);
            let unwanted =
                self.applied.endpoints_of(service).filter(|(key, id)| !is_wanted(id) && !is_quarantined(key));
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
            let is_quarantined = |(key, _)| self.applied.endpoints.is_quarantined(&key);
            if self.applied.frontends_of(id).next().is_none()
                && self.applied.endpoints_of(id).all(is_quarantined)
                && let Some(port) = job.port()
            {
                self.applied.ports.retire(port, now, self.number);
            }
        }
    }

    /// Starts the quarantine of bits that were set for entries that were not written afterwards.
    pub(super) fn note_unused_bits(&mut self, wanted: Option<&DesiredPort>, now: Instant) {
        if let Some(wanted) = wanted {
            for bit in self.applied.bits_of(wanted).collect::<Vec<_>>() {
                self.applied.prefilter.unused(bit, now);
            }
        }
    }
}
