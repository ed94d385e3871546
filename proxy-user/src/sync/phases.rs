//! The phases of a sync, one function each.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use proxy_common::backend::BACKEND_GONE;
use proxy_common::name::PortName;
use proxy_common::service::{SCOPE_EXTERNAL, SCOPE_INTERNAL, SERVICE_SCOPED, ServiceEntry};

use super::applied::Applied;
use super::filter::{Bit, backend_bit};
use super::job::{Job, Steps, Wanted, backend_row, frontend_key, service_entry};
use super::reconcile::Reconciler;
use super::trouble::Trouble;
use crate::maps::{Backend, FrontendKey, Store, Write};
use crate::model::ServiceName;
use crate::plan::{Access, PortId};

impl Applied {
    /// The filter bits that a Service port needs.
    fn bits_of(&self, wanted: &Wanted) -> impl Iterator<Item = Bit> {
        let frontends = wanted.frontends.iter().flat_map(|(key, ..)| self.frontend_bits(key));
        wanted.rows.values().map(backend_bit).chain(frontends)
    }
}

impl Job {
    /// For writes that belong to no port.
    pub(super) fn cleanup() -> Self {
        Self::new(PortId {
            namespace: String::new(),
            name: String::new(),
            port: String::new(),
            protocol: crate::model::net::Protocol::Tcp,
            family: crate::model::net::IpFamily::V4,
        })
    }

    pub(super) fn is_cleanup(&self) -> bool {
        self.port.name.is_empty()
    }
}

impl<S: Store> Reconciler<S> {
    /// Takes frontends out of `services`. A failure counts for the port whose id the entry has.
    pub(super) fn remove_services(&mut self, keys: Vec<FrontendKey>, jobs: &mut Vec<Job>, now: Instant) {
        if keys.is_empty() {
            return;
        }
        let mut numbers: BTreeMap<u32, usize> =
            jobs.iter().enumerate().filter_map(|(number, job)| job.id.map(|id| (id, number))).collect();
        let mut steps = Steps::default();
        for key in keys {
            let Some(id) = self.applied.services.get(&key).map(|entry| entry.id) else { continue };
            // An id that nobody knows belongs to no port.
            let job = *numbers.entry(id).or_insert_with(|| {
                jobs.push(Job::cleanup());
                jobs.len() - 1
            });
            steps.push(job, Write::NoService(key));
        }
        self.execute(&steps, jobs, true, now);
    }

    /// Ids, names, endpoints, filter bits and source ranges.
    pub(super) fn prepare(&mut self, jobs: &mut [Job], now: Instant) {
        let (mut names, mut rows, mut bits) = (Steps::default(), Steps::default(), Steps::default());
        let mut ranges = Steps::default();
        for (number, job) in jobs.iter_mut().enumerate() {
            if let Err(trouble) = self.plan_job(job) {
                job.stop(trouble);
                continue;
            }
            let (Some(wanted), Some(id)) = (&job.wanted, job.id) else { continue };
            let port = &job.port;
            let Some(name) = PortName::new(&port.text(), port.protocol.number(), port.family.number()) else {
                job.stop(Trouble::Name);
                continue;
            };
            if self.applied.names.get(&id) != Some(&name) {
                names.push(number, Write::Name(id, Box::new(name)));
            }
            for (id, row) in &wanted.rows {
                if self.applied.backends.get(id) != Some(row) {
                    rows.push(number, Write::Backend(*id, *row));
                }
            }
            let needed: BTreeSet<_> = self.applied.bits_of(wanted).collect();
            for (word, mask) in needed.into_iter().filter(|bit| !self.applied.filter.is_set(*bit)) {
                bits.push(number, Write::FilterSet(word, mask));
            }
            let known = self.applied.ranges.get(&id);
            for range in wanted.ranges.iter().filter(|range| known.is_none_or(|known| !known.contains(range)))
            {
                ranges.push(number, Write::SourceRange(id, *range));
            }
        }
        self.execute(&names, jobs, false, now);
        self.execute(&rows, jobs, false, now);
        self.execute(&bits, jobs, false, now);
        self.execute(&ranges, jobs, false, now);
    }

    /// Finds out what the port should be, and gives ids to it and to its endpoints.
    fn plan_job(&mut self, job: &mut Job) -> Result<(), Trouble> {
        let name = ServiceName { namespace: job.port.namespace.clone(), name: job.port.name.clone() };
        let Some(plan) = self.desired.get(&name).and_then(|plan| plan.ports.get(&job.port)) else {
            return Ok(());
        };
        let has = |frontend: &_| self.claims.owner(frontend) == Some(&job.port);
        if !plan.frontends.keys().any(has) {
            return Ok(());
        }
        let id = self.applied.ports.acquire(&job.port).map_err(Trouble::Services)?;
        job.id = Some(id);
        let wanted = job.wanted.insert(Wanted::default());
        for (at, facts) in &plan.backends {
            match self.applied.endpoints.acquire(&(id, *at)) {
                Ok(backend) => {
                    wanted.rows.insert(backend, backend_row(id, &job.port, at, *facts));
                }
                // Those that have an id are served; the problem stands until all are.
                Err(exhausted) => {
                    job.trouble.get_or_insert(Trouble::Backends(exhausted));
                }
            }
        }
        for (frontend, what) in
            plan.frontends.iter().filter(|(frontend, _)| self.claims.owner(frontend) == Some(&job.port))
        {
            let key = frontend_key(frontend);
            let known =
                |at: &_| self.applied.endpoints.get(&(id, *at)).filter(|id| wanted.rows.contains_key(id));
            let mut ids: Vec<u32> = what.slots.iter().filter_map(known).collect();
            ids.sort_unstable();
            wanted.frontends.push((key, service_entry(id, &key, plan, what), ids));
            if what.access != Access::Everybody {
                wanted.ranges.clone_from(&plan.source_ranges);
            }
        }
        Ok(())
    }

    /// Gives every frontend an extent with exactly its endpoints: the one it has, one that another frontend of
    /// the port has, or a new one.
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
                        job.trouble.get_or_insert(Trouble::Slots(no_room));
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

    /// The entries of `services`: first those for clients outside, then those that send them there.
    pub(super) fn commit(&mut self, jobs: &mut [Job], now: Instant) {
        for scope in [SCOPE_EXTERNAL, SCOPE_INTERNAL] {
            let mut steps = Steps::default();
            for (number, job) in jobs.iter().enumerate() {
                // What failed in an earlier phase has no new set to commit.
                if job.stopped && !job.committing {
                    continue;
                }
                for (key, entry, _) in job.wanted.iter().flat_map(|wanted| &wanted.frontends) {
                    let differs = self.applied.services.get(key) != Some(entry);
                    if key.scope == scope && differs && self.leads_on(key, entry) {
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

    /// Whether an entry that sends clients outside to another one finds it there.
    fn leads_on(&self, key: &FrontendKey, entry: &ServiceEntry) -> bool {
        let outside = FrontendKey { scope: SCOPE_EXTERNAL, ..*key };
        let found = self.applied.services.get(&outside).is_some_and(|found| found.id == entry.id);
        entry.flags & SERVICE_SCOPED == 0 || found
    }

    /// Clients that are not let in any more. What failed keeps what it had.
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

    /// Endpoints that no entry leads to are gone, so that flows choose again; their ids begin to rest, and those
    /// of ports that are gone.
    pub(super) fn retire_endpoints(&mut self, jobs: &mut [Job], now: Instant) {
        let mut steps = Steps::default();
        let mut left = Vec::new();
        for (number, job) in jobs.iter().enumerate() {
            let Some(service) = job.id else { continue };
            let live = self.applied.extents.live_ids(service);
            for (key, id) in self.applied.endpoints_of(service) {
                let wanted = job.wanted.as_ref().is_some_and(|wanted| wanted.rows.contains_key(&id));
                if wanted || live.contains(&id) || self.applied.endpoints.is_resting(key) {
                    continue;
                }
                left.push((*key, id));
                if let Some(row) = self.applied.backends.get(&id).filter(|row| row.state != BACKEND_GONE) {
                    steps.push(number, Write::Backend(id, Backend { state: BACKEND_GONE, ..*row }));
                }
            }
        }
        self.execute(&steps, jobs, true, now);
        for (key, id) in left {
            if self.applied.backends.get(&id).is_none_or(|row| row.state == BACKEND_GONE) {
                self.applied.endpoints.retire(&key, now, self.number);
            }
        }
        for job in jobs.iter().filter(|job| job.wanted.is_none()) {
            let Some(id) = job.id else { continue };
            let rests = |(key, _): (&_, _)| self.applied.endpoints.is_resting(key);
            if self.applied.frontends_of(id).next().is_none()
                && self.applied.endpoints_of(id).all(rests)
                && !self.applied.ranges.contains_key(&id)
            {
                self.applied.ports.retire(&job.port, now, self.number);
            }
        }
    }

    /// Bits that were set for entries that then were not written.
    pub(super) fn note_unused_bits(&mut self, wanted: Option<&Wanted>, now: Instant) {
        if let Some(wanted) = wanted {
            for bit in self.applied.bits_of(wanted).collect::<Vec<_>>() {
                self.applied.filter.unused(bit, now);
            }
        }
    }
}
