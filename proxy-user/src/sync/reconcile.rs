//! From plans to writes, in an order that no reader of the maps can stumble over.
//!
//! A sync goes through these phases, each for all changed Service ports together, so that it costs a few system
//! calls however many there are:
//!
//! 1. free what has rested: extents, ids, bits;
//! 2. remove frontends that no Service has any more;
//! 3. names, endpoints, filter bits, source ranges, slots in *new* extents: nothing refers to them yet;
//! 4. the entries of `services`, the commit: each moves readers from one complete set to the next. An entry for
//!    clients outside comes before the one that sends them to it, and goes after it;
//! 5. source ranges that left are closed; endpoints that left are gone at once; their ids, and the old extents,
//!    begin to rest.
//!
//! What the node is like ([`super::node`]) and which cluster addresses live ([`super::addresses`]) comes before.
//!
//! A port that fails stops where it is, keeps what it had, and is tried again: after a while, longer each time,
//! and whenever something was freed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use proxy_common::service::{SCOPE_EXTERNAL, SCOPE_INTERNAL, SERVICE_SCOPED};

use super::addresses::{Addresses, is_address};
use super::applied::{Applied, Holds};
use super::audit::Audit;
use super::claims::Claims;
use super::counters::Counters;
use super::job::{Job, Steps, Touched, frontend_key};
use super::node::NodeState;
use crate::maps::{BatchError, FlowUse, FrontendKey, NoFlows, Store, Write};
use crate::model::Problem;
use crate::model::ServiceName;
use crate::model::net::IpFamily;
use crate::plan::{Frontend, FrontendPlan, HealthCheck, PortId, PortPlan, Scope, ServicePlan};

/// The first pause after a failure; each further one is twice as long.
const RETRY_FIRST: Duration = Duration::from_millis(100);
/// The longest pause.
const RETRY_LONGEST: Duration = Duration::from_secs(30);

/// A port that is not in the maps as it should be.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) attempts: u32,
    pub(super) retry: Instant,
    pub(super) problem: Problem,
}

/// Makes the maps say what the plans say.
pub struct Reconciler<S> {
    pub(super) store: S,
    pub(super) applied: Applied,
    pub(super) holds: Holds,
    pub(super) counters: Counters,
    /// Entries of the maps that made no sense, to be removed.
    pub(super) orphans: Vec<Write>,
    pub(super) number: u64,
    /// The next sync looks at everything.
    pub(super) full: bool,
    /// The comparison under way.
    pub(super) audit: Option<Audit>,
    pub(super) claims: Claims,
    pub(super) desired: BTreeMap<ServiceName, ServicePlan>,
    pub(super) plan_problems: BTreeMap<ServiceName, Vec<Problem>>,
    pub(super) failures: BTreeMap<PortId, Failure>,
    /// Ports whose policy keeps clients of a scope on this node, which has no endpoint for them.
    pub(super) no_local: BTreeMap<(Scope, IpFamily), u64>,
    pub(super) cleanup: Option<(u32, Instant)>,
    pub(super) health_checks: BTreeMap<ServiceName, HealthCheck>,
    pub(super) addresses: Addresses,
    pub(super) node: NodeState,
    pub(super) flows: Box<dyn FlowUse + Send>,
    /// When bits of the filter may be cleared next; `None`: at any time.
    pub(super) next_release: Option<Instant>,
}

impl<S: Store> Reconciler<S> {
    /// Around tables that are not known yet: [`Reconciler::recover`] comes next.
    pub(super) fn around(store: S, holds: Holds) -> Self {
        let capacity = store.capacity();
        Self {
            store,
            applied: Applied::new(capacity, holds),
            holds,
            counters: Counters::default(),
            orphans: Vec::new(),
            number: 0,
            full: true,
            audit: None,
            claims: Claims::default(),
            desired: BTreeMap::new(),
            plan_problems: BTreeMap::new(),
            failures: BTreeMap::new(),
            no_local: BTreeMap::new(),
            cleanup: None,
            health_checks: BTreeMap::new(),
            addresses: Addresses::default(),
            node: NodeState::default(),
            flows: Box::new(NoFlows),
            next_release: None,
        }
    }

    /// Asks these connections before it clears a bit of the filter; without, there are none.
    #[must_use]
    pub fn with_flows(self, flows: Box<dyn FlowUse + Send>) -> Self {
        Self { flows, ..self }
    }

    /// Takes new plans (`None`: the Service is gone) and brings the maps as close to all plans as possible.
    ///
    /// The first call removes what no plan asks for: every Service there is must be among `changed`.
    pub fn sync(&mut self, now: Instant, changed: BTreeMap<ServiceName, Option<ServicePlan>>) {
        self.number += 1;
        let mut dirty = BTreeSet::new();
        for (name, plan) in changed {
            self.accept(name, plan, &mut dirty);
        }
        let freed = self.free_rested(now);
        dirty.extend(
            self.failures.iter().filter(|(_, f)| freed || f.retry <= now).map(|(port, _)| port.clone()),
        );
        let mut touched = Touched::new();
        self.bring_node(now, freed);
        self.bring_addresses(now, freed);
        if self.full {
            dirty.extend(self.desired.values().flat_map(|plan| plan.ports.keys().cloned()));
            dirty.extend(self.applied.ports.iter().map(|(port, _)| port.clone()));
            touched.extend(self.applied.services.keys());
            self.full = false;
        }
        if !dirty.is_empty() || !touched.is_empty() {
            let jobs = dirty.into_iter().map(Job::new).collect();
            self.bring(jobs, touched, now);
        }
        self.remove_orphans(now);
    }

    /// The same before all Services are known: for these, and for the node if it is `with_node`. What no plan asks for
    /// stays, since an earlier agent may have had reasons for it that nobody knows yet.
    pub fn sync_early(
        &mut self,
        now: Instant,
        changed: BTreeMap<ServiceName, Option<ServicePlan>>,
        with_node: bool,
    ) {
        let full = std::mem::replace(&mut self.full, false);
        self.number += 1;
        let mut dirty = BTreeSet::new();
        for (name, plan) in changed {
            self.accept(name, plan, &mut dirty);
        }
        dirty.extend(self.failures.iter().filter(|(_, f)| f.retry <= now).map(|(port, _)| port.clone()));
        if with_node {
            self.bring_node(now, false);
        }
        self.bring_addresses(now, false);
        if !dirty.is_empty() {
            self.bring(dirty.into_iter().map(Job::new).collect(), Touched::new(), now);
        }
        self.full |= full;
    }

    fn accept(&mut self, name: ServiceName, plan: Option<ServicePlan>, dirty: &mut BTreeSet<PortId>) {
        let old = self.desired.remove(&name);
        self.claims.replace(old.as_ref(), plan.as_ref(), dirty);
        for port in [&old, &plan].into_iter().flatten().flat_map(|plan| plan.ports.keys()) {
            if port_of(old.as_ref(), port) != port_of(plan.as_ref(), port) {
                dirty.insert(port.clone());
            }
        }
        for key in old.iter().flat_map(no_local) {
            self.no_local.entry(key).and_modify(|count| *count -= 1);
        }
        for key in plan.iter().flat_map(no_local) {
            *self.no_local.entry(key).or_default() += 1;
        }
        self.addresses.replace(&name, old.as_ref(), plan.as_ref());
        self.plan_problems.remove(&name);
        self.health_checks.remove(&name);
        if let Some(plan) = plan {
            if let Some(check) = &plan.health_check {
                self.health_checks.insert(name.clone(), check.clone());
            }
            if !plan.problems.is_empty() {
                self.plan_problems.insert(name.clone(), plan.problems.clone());
            }
            self.desired.insert(name, plan);
        }
    }

    /// The phases, for these ports and for the frontends in `touched`.
    fn bring(&mut self, mut jobs: Vec<Job>, mut touched: Touched, now: Instant) {
        let mut owners: BTreeMap<FrontendKey, Option<PortId>> = BTreeMap::new();
        for job in &mut jobs {
            job.id = self.applied.ports.get(&job.port);
            touched.extend(job.id.into_iter().flat_map(|id| self.applied.frontends_of(id)));
        }
        for key in touched.into_iter().filter(|key| !is_address(key)) {
            owners.insert(key, self.owner(&key));
        }
        // One that its port gives up for clients outside only goes after those inside were told; and one for clients
        // outside after the entry that sends them there, also if that could not be removed.
        for scope in [SCOPE_INTERNAL, SCOPE_EXTERNAL] {
            let goes = |key: &&FrontendKey| {
                key.scope == scope && self.holder(key).is_none() && !self.is_referred_to(key)
            };
            let deserted = owners.keys().filter(goes).copied().collect();
            self.remove_services(deserted, &mut jobs, now);
        }
        self.prepare(&mut jobs, now);
        self.write_slots(&mut jobs, now);
        self.write_tables(&mut jobs, now);
        self.make_room(&jobs, now);
        self.commit(&mut jobs, now);
        // A frontend that changed hands, to a port that failed, must not stay with the port that lost it.
        for scope in [SCOPE_INTERNAL, SCOPE_EXTERNAL] {
            let wrong = |(key, owner): (&FrontendKey, &Option<PortId>)| {
                let has = self.applied.services.get(key).filter(|_| key.scope == scope)?.id;
                let should = owner.as_ref().and_then(|port| self.applied.ports.get(port));
                (Some(has) != should && !self.is_referred_to(key)).then_some(*key)
            };
            let lost = owners.iter().filter_map(wrong).collect();
            self.remove_services(lost, &mut jobs, now);
        }
        self.retire_tables(&mut jobs, now);
        self.retire_ranges(&mut jobs, now);
        self.retire_endpoints(&mut jobs, now);
        self.settle(jobs, now);
    }

    /// Does the writes of a phase. A failure stops the job concerned: its later writes in `steps` are left out,
    /// unless `each_alone`.
    pub(super) fn execute(&mut self, steps: &Steps, jobs: &mut [Job], each_alone: bool, now: Instant) {
        let Steps { owners, writes } = steps;
        let mut from = 0;
        while from < writes.len() {
            let blocked = |at: usize| !each_alone && jobs[owners[at]].stopped;
            if blocked(from) {
                from += 1;
                continue;
            }
            let end = (from + 1..writes.len()).find(|at| blocked(*at)).unwrap_or(writes.len());
            let run = &writes[from..end];
            let (done, error) = match self.store.write(run) {
                Ok(()) => (run.len(), None),
                Err(BatchError { done, error }) => (done.min(run.len() - 1), Some(error)),
            };
            for write in &run[..done] {
                self.counters.done(write);
                self.applied.advance(write, now, self.number);
                if let Some(audit) = &mut self.audit {
                    audit.note(write);
                }
            }
            from += done;
            if let Some(error) = error {
                self.counters.failed(&writes[from]);
                jobs[owners[from]].stop(error);
                from += 1;
            }
        }
    }

    /// Notes what failed and when to try again.
    fn settle(&mut self, jobs: Vec<Job>, now: Instant) {
        for job in jobs {
            for base in &job.tables {
                self.applied.tables.retire(*base, now, self.number);
            }
            for base in &job.extents {
                self.applied.extents.retire(*base, now, self.number);
            }
            let Some(trouble) = &job.trouble else {
                self.failures.remove(&job.port);
                continue;
            };
            self.note_unused_bits(job.wanted.as_ref(), now);
            // A write that belongs to no port: a full sync finds it again.
            self.full |= job.is_cleanup();
            let problem = trouble.problem(&job.port);
            let attempts = self.failures.get(&job.port).map_or(0, |failure| failure.attempts);
            let retry = now + pause(attempts);
            self.failures.insert(job.port, Failure { attempts: attempts + 1, retry, problem });
        }
    }

    /// Removes what made no sense when the tables were read.
    fn remove_orphans(&mut self, now: Instant) {
        if self.orphans.is_empty() || self.cleanup.is_some_and(|(_, retry)| now < retry) {
            return;
        }
        let mut job = [Job::cleanup()];
        for write in std::mem::take(&mut self.orphans) {
            job[0].stopped = false;
            let mut steps = Steps::default();
            steps.push(0, write);
            self.execute(&steps, &mut job, true, now);
            let Some(write) = steps.writes.pop() else { continue };
            match write {
                write if job[0].stopped => self.orphans.push(write),
                Write::NoBackend(id, _) => self.applied.endpoints.unreserve(id),
                Write::NoName(id) => self.applied.ports.unreserve(id),
                _ => {}
            }
        }
        self.cleanup_went(&job[0], now);
    }

    pub(super) fn cleanup_went(&mut self, job: &Job, now: Instant) {
        self.cleanup = job.trouble.as_ref().map(|trouble| {
            let attempts = self.cleanup.map_or(0, |(attempts, _)| attempts);
            if attempts == 0 {
                tracing::warn!(error = %trouble, "entries that nobody needs any more could not be removed");
            }
            (attempts + 1, now + pause(attempts))
        });
    }

    /// The port that has the address and port of a key, whatever the scope.
    fn holder(&self, key: &FrontendKey) -> Option<&PortId> {
        frontend_of(key).and_then(|frontend| self.claims.owner(&frontend))
    }

    /// The port that a key in the maps should belong to.
    fn owner(&self, key: &FrontendKey) -> Option<PortId> {
        let (frontend, port) = (frontend_of(key)?, self.holder(key)?);
        let name = ServiceName { namespace: port.namespace.clone(), name: port.name.clone() };
        let plan = port_of(self.desired.get(&name), port)?;
        plan.frontends.contains_key(&frontend).then(|| port.clone())
    }

    /// Whether the entry for clients inside sends those outside to this one.
    fn is_referred_to(&self, key: &FrontendKey) -> bool {
        let inside = FrontendKey { scope: SCOPE_INTERNAL, ..*key };
        let entry = self.applied.services.get(&inside).filter(|_| inside != *key);
        entry.is_some_and(|entry| entry.flags & SERVICE_SCOPED != 0)
    }
}

/// Ports of a plan whose policy leaves clients without an endpoint: the scope of these clients, and the family.
fn no_local(plan: &ServicePlan) -> impl Iterator<Item = (Scope, IpFamily)> {
    let silent =
        |(frontend, plan): (&Frontend, &FrontendPlan)| plan.drop_when_empty.then_some(frontend.scope);
    plan.ports.iter().flat_map(move |(port, plan)| {
        let scopes: BTreeSet<Scope> = plan.frontends.iter().filter_map(silent).collect();
        scopes.into_iter().map(|scope| (scope, port.family))
    })
}

fn port_of<'a>(plan: Option<&'a ServicePlan>, port: &PortId) -> Option<&'a PortPlan> {
    plan.and_then(|plan| plan.ports.get(port))
}

pub(super) fn pause(attempts: u32) -> Duration {
    RETRY_FIRST.saturating_mul(1 << attempts.min(16)).min(RETRY_LONGEST)
}

/// The frontend of a key; `None` for a key that no plan could ask for.
fn frontend_of(key: &FrontendKey) -> Option<Frontend> {
    let scopes = [Scope::Internal, Scope::External];
    let protocol = crate::model::net::Protocol::from_number(key.proto)?;
    let frontends = scopes.map(|scope| Frontend { address: key.addr, port: key.port, protocol, scope });
    frontends.into_iter().find(|frontend| frontend_key(frontend) == *key)
}
