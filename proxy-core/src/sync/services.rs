//! Service ports: their desired state, and the phases that write it into the maps.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use proxy_common::PROTO_TCP;
use proxy_common::backend::tunnel_of;
use proxy_common::name::PortName;
use proxy_common::reason::Verdict;
use proxy_common::service::{SCOPE_EXTERNAL, SCOPE_INTERNAL};

use super::addresses::Addresses;
use super::applied::{Applied, is_address};
use super::claims::Claims;
use super::entries::{SlotMember, backend_row, frontend_key, frontend_of, needs_table, service_entry, slots};
use super::job::{DesiredPort, Effect, Failure, Job, Owner, Steps, SyncError, Touched};
use super::shares::{Limit, Resource, Shares, least_endpoints};
use super::writer::Writer;
use crate::model::net::{IpFamily, Protocol};
use crate::model::{Name, Problem, ServiceName, SortedMap, TrafficPolicy, pack};
use crate::plan::maglev::Member;
use crate::plan::{
    Access, BackendAddress, BackendFacts, Frontend, FrontendPlan, HealthCheck, PortPlan, Scope, ServicePlan,
    ServicePortName,
};
use crate::store::FilterBit as Bit;
use crate::store::{Backend, Capacity, FrontendKey, Store, Table, Write};

/// The desired state of all Services, and the failures of Service ports.
#[derive(Debug, Default)]
pub(super) struct Services {
    pub(super) claims: Claims,
    pub(super) shares: Shares,
    pub(super) desired: BTreeMap<ServiceName, Box<ServicePlan>>,
    pub(super) plan_problems: BTreeMap<ServiceName, Vec<Problem>>,
    pub(super) failures: BTreeMap<Owner, Failure>,
    /// Problems may have changed since they were listed.
    has_new_problems: bool,
    /// The Services that may have begun or ceased to fail since they were listed.
    pub(super) fates: BTreeSet<ServiceName>,
    /// The addresses of other nodes are needed and not listed yet: endpoints keep the numbers that an earlier agent wrote.
    pub(super) keeps_tunnels: bool,
    /// The ports of each family and namespace that has some. Those of refused Services count as failed.
    pub(super) ports: BTreeMap<(IpFamily, Name), Share>,
    /// Number of ports whose policy Local has no endpoint on this node, by the scope of the clients and by family.
    pub(super) no_local: BTreeMap<(Scope, IpFamily), u64>,
    /// Snapshots of the status share this map, so it is changed only if it differs.
    pub(super) health_checks: Arc<BTreeMap<ServiceName, HealthCheck>>,
}

/// Returns the ports that a Service has renamed, with the old name first. Such a port has the same frontends under the new name: it
/// keeps its id, so that its flows, sockets and session affinity stay.
pub(super) fn renamed<'a>(
    old: Option<&'a ServicePlan>,
    new: Option<&'a ServicePlan>,
) -> impl Iterator<Item = (&'a ServicePortName, &'a ServicePortName)> {
    let only_in = |one: Option<&'a ServicePlan>, other: Option<&'a ServicePlan>| {
        let ports = one.into_iter().flat_map(|plan| plan.ports.iter());
        ports.filter(move |(port, _)| port_of(other, port).is_none())
    };
    // A frontend has one port, and one protocol and family.
    let first = |(port, plan): (&'a ServicePortName, &'a PortPlan)| {
        plan.frontends.keys().next().map(|frontend| (frontend, (port, plan)))
    };
    let fresh: BTreeMap<&Frontend, _> = only_in(new, old).filter_map(first).collect();
    only_in(old, new).filter_map(first).filter_map(move |(frontend, (before, was))| {
        let (after, is) = fresh.get(frontend)?;
        is.frontends.keys().eq(was.frontends.keys()).then_some((before, *after))
    })
}

impl Services {
    /// Rebuilds the trees compactly, after many plans were accepted.
    pub(super) fn pack(&mut self) {
        pack(&mut self.desired);
        self.claims.pack();
    }

    /// Accepts the new plan of a Service (`None`: the Service was removed). Adds the ports that may have to change to
    /// `dirty`.
    pub(super) fn accept(
        &mut self,
        name: ServiceName,
        plan: Option<ServicePlan>,
        dirty: &mut BTreeSet<ServicePortName>,
    ) {
        let old = self.desired.remove(&name);
        self.has_new_problems |= self.claims.replace(old.as_deref(), plan.as_ref(), dirty);
        self.shares.replace(&name, plan.as_ref());
        for port in [old.as_deref(), plan.as_ref()].into_iter().flatten().flat_map(|plan| plan.ports.keys()) {
            if port_of(old.as_deref(), port) != port_of(plan.as_ref(), port) {
                dirty.insert(port.clone());
            }
        }
        let is_refused = usize::from(self.shares.is_refused(&name));
        count_ports(&mut self.ports, plan.as_ref(), |share| {
            share.all += 1;
            share.failed += is_refused;
        });
        count_ports(&mut self.ports, old.as_deref(), |share| {
            share.all -= 1;
            share.failed -= is_refused;
        });
        for key in old.iter().flat_map(|old| no_local(old)) {
            self.no_local.entry(key).and_modify(|count| *count -= 1);
        }
        for key in plan.iter().flat_map(no_local) {
            *self.no_local.entry(key).or_default() += 1;
        }
        let before = self.plan_problems.remove(&name).unwrap_or_default();
        self.has_new_problems |= before != plan.as_ref().map_or(&[][..], |plan| &plan.problems);
        let check = plan.as_ref().and_then(|plan| plan.health_check.as_ref());
        if self.health_checks.get(&name) != check {
            let checks = Arc::make_mut(&mut self.health_checks);
            match check {
                Some(check) => drop(checks.insert(name.clone(), check.clone())),
                None => drop(checks.remove(&name)),
            }
        }
        if let Some(plan) = plan {
            if !plan.problems.is_empty() {
                self.plan_problems.insert(name.clone(), plan.problems.clone());
            }
            self.desired.insert(name, Box::new(plan));
        }
    }

    /// Returns the health checks, with no local endpoints in a family in which the maps do not serve the Service.
    pub(super) fn health_checks(&self, applied: &Applied) -> Arc<BTreeMap<ServiceName, HealthCheck>> {
        let mut checks = Arc::clone(&self.health_checks);
        let families = self.health_checks.iter().flat_map(|(name, check)| {
            check.local.iter().filter(|(_, local)| **local > 0).map(move |(family, _)| (name, *family))
        });
        for (name, family) in families.filter(|(name, family)| !self.is_served(name, *family, applied)) {
            let check = Arc::make_mut(&mut checks).get_mut(name);
            check.and_then(|check| check.local.get_mut(&family)).into_iter().for_each(|local| *local = 0);
        }
        checks
    }

    /// Whether the maps have frontends of a port of this Service, and each one for clients outside has endpoints.
    fn is_served(&self, name: &ServiceName, family: IpFamily, applied: &Applied) -> bool {
        let ports = self.desired.get(name).into_iter().flat_map(|plan| plan.ports.keys());
        let mut ids = ports.filter(|port| port.family == family).filter_map(|port| applied.ports.get(port));
        let has_endpoints = |key: &FrontendKey| {
            key.scope != SCOPE_EXTERNAL || applied.services.get(key).is_some_and(|entry| entry.slot_count > 0)
        };
        ids.any(|id| applied.frontends.has(id) && applied.frontends_of(id).all(has_endpoints))
    }

    /// Returns the owners whose failures are retried now: those whose pause is over, and if space was `freed`, those that
    /// lacked space in a map. What the kernel refuses keeps its pause.
    pub(super) fn retries(&self, now: Instant, freed: bool) -> impl Iterator<Item = Owner> {
        let has_space = move |failure: &Failure| freed && failure.effect != Effect::Node;
        let due = self.failures.iter().filter(move |(_, failure)| has_space(failure) || failure.retry <= now);
        due.map(|(owner, _)| owner.clone())
    }

    /// Returns the problems of failures, sorted by Service port.
    pub(super) fn failed(&self) -> impl Iterator<Item = Problem> {
        let failures = self.failures.values().filter(|failure| failure.effect != Effect::Waits);
        failures.map(|failure| failure.problem.clone())
    }

    /// Returns whether problems may have changed since the last call.
    pub(super) fn take_new_problems(&mut self) -> bool {
        std::mem::take(&mut self.has_new_problems)
    }

    /// Returns the families that are not programmed. Objects that do not fit count if they are most ports of most
    /// namespaces; and what the kernel refuses, in each family.
    pub(super) fn failing_families(&self) -> BTreeSet<IpFamily> {
        if self.failing() == 0 {
            return BTreeSet::new();
        }
        let mut all: BTreeMap<&Name, Share> = BTreeMap::new();
        let mut by_kernel: BTreeMap<IpFamily, BTreeMap<&Name, Share>> = BTreeMap::new();
        for ((family, namespace), share) in &self.ports {
            let sum = all.entry(namespace).or_default();
            (sum.failed, sum.all) = (sum.failed + share.failed, sum.all + share.all);
            by_kernel.entry(*family).or_default().insert(namespace, Share { failed: 0, all: share.all });
        }
        let failures = self
            .failures
            .iter()
            .filter(|(_, failure)| !matches!(failure.effect, Effect::Degraded | Effect::Waits));
        let ports = failures.filter_map(|(owner, failure)| Some((owner.port()?, failure.effect)));
        for (port, effect) in ports.filter(|(port, _)| self.port_plan(port).is_some()) {
            all.entry(&port.namespace).or_default().failed += 1;
            let of_family = by_kernel.entry(port.family).or_default();
            let share = of_family.entry(&port.namespace).or_default();
            share.failed += usize::from(effect == Effect::Node);
        }
        let does_not_fit = is_most_of_most(&all);
        by_kernel.retain(|_, namespaces| does_not_fit || is_most_of_most(namespaces));
        by_kernel.into_keys().collect()
    }

    /// Decides which Services fit into the tables; adds the ports that may have to change to `dirty`.
    pub(super) fn update_shares(&mut self, capacity: &Capacity, dirty: &mut BTreeSet<ServicePortName>) {
        for (name, was_refused) in self.shares.update(capacity) {
            let plan = self.desired.get(&name).map(|plan| &**plan);
            let is_refused = self.shares.is_refused(&name);
            count_ports(&mut self.ports, plan, |share| {
                share.failed = share.failed + usize::from(is_refused) - usize::from(was_refused);
            });
            dirty.extend(plan.into_iter().flat_map(|plan| plan.ports.keys().cloned()));
            self.has_new_problems = true;
            self.fates.insert(name);
        }
    }

    /// Returns the limits of the port's Service, if it does not fit into the tables.
    fn limit(&self, port: &ServicePortName) -> Option<&Limit> {
        self.shares.limit(&service_of(port))
    }

    /// Whether the maps hold less than the port's plan.
    pub(super) fn is_limited(&self, port: &ServicePortName) -> bool {
        self.limit(port).is_some()
    }

    /// Returns the number of ports that are not programmed as desired.
    pub(super) fn failing(&self) -> usize {
        self.failures.len() + self.ports.values().map(|share| share.failed).sum::<usize>()
    }

    /// Whether a port of this Service is not programmed as desired.
    pub(super) fn is_failing(&self, name: &ServiceName) -> bool {
        let first = Owner::Port(ServicePortName {
            namespace: name.namespace.clone(),
            name: name.name.clone(),
            port: Name::default(),
            protocol: Protocol::Tcp,
            family: IpFamily::V4,
        });
        let next = self.failures.range(first..).next().and_then(|(owner, _)| owner.port());
        self.shares.is_refused(name) || next.is_some_and(|port| service_of(port) == *name)
    }

    /// Returns the plan of a port, if its Service fits.
    pub(super) fn port_plan(&self, port: &ServicePortName) -> Option<&PortPlan> {
        let plan = self.desired.get(&service_of(port)).map(|plan| &**plan);
        port_of(plan, port).filter(|_| !self.shares.is_refused(&service_of(port)))
    }

    /// Returns the number of frontends of a Service, without those that other Services have.
    pub(super) fn frontends(&self, name: &ServiceName) -> usize {
        let ports = self.desired.get(name).into_iter().flat_map(|plan| plan.ports.iter());
        let own = |port, plan: &PortPlan| {
            plan.frontends.iter().filter(|(one, _)| self.claims.owner(one) == Some(port)).count()
        };
        ports.map(|(port, plan)| own(port, plan)).sum()
    }

    /// Runs the phases of a sync for the ports of `jobs` and for the frontends in `touched`.
    pub(super) fn reconcile<S: Store>(
        &mut self,
        writer: &mut Writer<S>,
        addresses: &mut Addresses,
        mut jobs: Vec<Job>,
        mut touched: Touched,
        now: Instant,
    ) {
        let mut owners: BTreeMap<FrontendKey, Option<ServicePortName>> = BTreeMap::new();
        for job in &mut jobs {
            job.id = job.port().and_then(|port| writer.applied.ports.get(port));
            touched.extend(job.id.into_iter().flat_map(|id| writer.applied.frontends_of(id)));
        }
        for key in touched.into_iter().filter(|key| !is_address(key)) {
            owners.insert(key, self.owner(&key));
        }
        // A frontend that its port gives up for clients outside only is removed after the entry for clients inside was
        // updated. An external entry is removed after the internal entry that refers to it, and stays if the internal one
        // could not be removed.
        for scope in [SCOPE_INTERNAL, SCOPE_EXTERNAL] {
            let goes = |key: &&FrontendKey| {
                key.scope == scope && self.holder(key).is_none() && !writer.is_referred_to(key)
            };
            let deserted = owners.keys().filter(goes).copied().collect();
            writer.remove_services(deserted, &mut jobs, now);
        }
        self.prepare(writer, &mut jobs, now);
        writer.write_slots(&mut jobs, now);
        writer.write_tables(&mut jobs, now);
        // Frontends that no longer distinguish clients give their room to new ones.
        writer.commit(&mut jobs, true, now);
        let is_left = |(key, owner): &(&FrontendKey, &Option<_>)| {
            key.scope == SCOPE_EXTERNAL && owner.is_none() && !writer.is_referred_to(key)
        };
        let left = owners.iter().filter(is_left).map(|(key, _)| *key).collect();
        writer.remove_services(left, &mut jobs, now);
        addresses.make_room(writer, &jobs, now);
        writer.commit(&mut jobs, false, now);
        // If a frontend gets a new owner and the new owner fails, the entry of the old owner must not stay.
        for scope in [SCOPE_INTERNAL, SCOPE_EXTERNAL] {
            let wrong = |(key, owner): (&FrontendKey, &Option<ServicePortName>)| {
                let has = writer.applied.services.get(key).filter(|_| key.scope == scope)?.id;
                let should = owner.as_ref().and_then(|port| writer.applied.ports.get(port));
                (Some(has) != should && !writer.is_referred_to(key)).then_some(*key)
            };
            let lost = owners.iter().filter_map(wrong).collect();
            writer.remove_services(lost, &mut jobs, now);
        }
        writer.abandon(&mut jobs, now);
        writer.retire_tables(&mut jobs, now);
        writer.retire_endpoints(&mut jobs, now);
        writer.note_removals(&mut jobs, now);
        self.finish(writer, jobs, now);
    }

    /// Allocates ids, and writes source ranges, names, endpoints and filter bits.
    pub(super) fn prepare<S: Store>(&self, writer: &mut Writer<S>, jobs: &mut [Job], now: Instant) {
        let (mut names, mut rows, mut bits) = (Steps::default(), Steps::default(), Steps::default());
        let mut joins = Steps::default();
        for job in jobs.iter_mut() {
            if let Err(cause) = self.plan_job(writer, job) {
                job.stop(cause);
            }
        }
        writer.write_ranges(jobs, now);
        for (number, job) in jobs.iter_mut().enumerate().filter(|(_, job)| !job.stopped) {
            let (Some(wanted), Some(id), Owner::Port(port)) = (&job.wanted, job.id, &job.owner) else {
                continue;
            };
            let Some(name) = PortName::new(&port.text(), port.protocol.number(), port.family.number()) else {
                job.stop(SyncError::Name);
                continue;
            };
            if writer.applied.names.get(id).is_none_or(|known| *known != name) {
                names.push(number, Write::Name(id, Box::new(name)));
            }
            let is_new =
                |(id, row): &(&u32, &Backend)| row.proto == PROTO_TCP && !writer.applied.serves(**id);
            let mut new = wanted.rows.iter().filter(is_new).peekable();
            if new.peek().is_some() {
                let others = writer.applied.endpoints_of(id).map(|(_, id)| id);
                let others: Arc<[u32]> = others.filter(|id| writer.applied.serves(*id)).collect();
                for (id, row) in new {
                    joins.push(
                        number,
                        Write::ResetHealth(*id, Table::backends(row.addr), Arc::clone(&others)),
                    );
                }
            }
            for (id, row) in &wanted.rows {
                if writer.applied.backends.get(*id) != Some(row) {
                    rows.push(number, Write::Backend(*id, *row));
                }
            }
            let is_missing = |bit: &Bit| !writer.applied.prefilter.is_set(*bit);
            let missing: BTreeSet<_> = writer.applied.bits_of(wanted).filter(is_missing).collect();
            for (word, mask) in missing {
                bits.push(number, Write::PrefilterSet(word, mask));
            }
        }
        writer.execute(&names, jobs, false, now);
        writer.execute(&joins, jobs, false, now);
        writer.execute(&rows, jobs, false, now);
        writer.execute(&bits, jobs, false, now);
    }

    /// Fills in the desired state of the job's port, and allocates ids for the port and its endpoints.
    fn plan_job<S: Store>(&self, writer: &mut Writer<S>, job: &mut Job) -> Result<(), SyncError> {
        let Owner::Port(port) = &job.owner else { return Ok(()) };
        let Some(plan) = self.port_plan(port) else { return Ok(()) };
        let has = |frontend: &_| self.claims.owner(frontend) == Some(port);
        if !plan.frontends.keys().any(has) {
            return Ok(());
        }
        let capacity = writer.store.capacity();
        let Writer { applied, reserve, .. } = writer;
        let is_new = applied.ports.get(port).is_none();
        if is_new && !reserve.allows(applied, &capacity, Resource::Ports, port, 1) {
            return Err(SyncError::Services(applied.ports.exhausted()));
        }
        let id = applied.ports.acquire(port).map_err(SyncError::Services)?;
        job.id = Some(id);
        let wanted =
            job.wanted.insert(DesiredPort { reset_after: plan.reset_after, ..DesiredPort::default() });
        let (mut ids_of, mut rows) = (Vec::new(), Vec::new());
        let limit = self.limit(port);
        let most =
            limit.map_or(usize::MAX, |limit| limit.endpoints(plan.backends.len(), least_endpoints(plan)));
        for (at, facts) in by_need(plan).take(most) {
            let is_new = applied.endpoints.get(&(id, *at)).is_none();
            let is_allowed = !is_new || reserve.allows(applied, &capacity, Resource::Backends, port, 1);
            let endpoints = &mut applied.endpoints;
            let acquired = if is_allowed {
                endpoints.acquire(&(id, *at)).map_err(SyncError::Backends)
            } else {
                let (used, limit) = (endpoints.used(), endpoints.exhausted().limit);
                Err(SyncError::ReservedBackends { used, limit })
            };
            match acquired {
                Ok(backend) => {
                    ids_of.push((*at, backend));
                    let known = applied.backends.get(backend).filter(|_| self.keeps_tunnels && !facts.local);
                    let planned = plan.tunnels.get(at).and_then(|node| applied.tunnels.get(node).copied());
                    let tunnel = known.map(|row| tunnel_of(row.flags)).or(planned);
                    rows.push((backend, backend_row(id, port, at, facts, tunnel.unwrap_or(0))));
                }
                // Endpoints that have an id are served; the problem stays until all endpoints have one.
                Err(cause) => {
                    job.cause.get_or_insert(cause);
                }
            }
        }
        let ids_of: SortedMap<_, _> = ids_of.into_iter().collect();
        wanted.rows = rows.into_iter().collect();
        let mut tables = BTreeMap::new();
        // An ingress controller with hostNetwork: packets to such an endpoint would be translated again.
        let is_endpoint = |frontend: &Frontend| {
            plan.backends.contains_key(&BackendAddress { address: frontend.address, port: frontend.port })
        };
        let is_own_endpoint = plan.frontends.keys().any(is_endpoint);
        for (frontend, what) in
            plan.frontends.iter().filter(|(frontend, _)| self.claims.owner(frontend) == Some(port))
        {
            let key = frontend_key(frontend);
            let weight = |at: &_| plan.backends.get(at).map_or(1, |facts| u32::from(facts.weight.max(1)));
            let endpoints =
                || plan.slots(what).filter_map(|at| Some((ids_of.get(at).copied()?, weight(at), *at)));
            if needs_table(plan, what) && !limit.is_some_and(Limit::has_no_table) {
                let mut members: Vec<_> =
                    endpoints().map(|(id, weight, at)| Member { at, weight, id }).collect();
                members.sort_unstable_by_key(|member| member.at);
                tables.insert(what.policy == TrafficPolicy::Local, members);
            }
            let ids_by = |share: fn(&BackendFacts) -> u16| {
                let member = |(id, _, at): (u32, u32, BackendAddress)| {
                    let facts = plan.backends.get(&at);
                    let is_tagged = what.dsr && facts.is_some_and(|facts| facts.local);
                    SlotMember { is_tagged, id, weight: facts.map_or(1, |facts| u32::from(share(facts))) }
                };
                slots(endpoints().map(member).collect(), plan.algorithm)
            };
            let mut ids = ids_by(BackendFacts::share);
            // The slots that a slow start needs beyond the weights are not planned ([`super::shares`]).
            let is_starting = plan.backends.values().any(|facts| facts.step != 0);
            if is_starting && applied.extents.slots_used() as usize + ids.len() > capacity.slots as usize / 2
            {
                ids = ids_by(|facts| facts.weight);
            }
            wanted.frontends.push((key, service_entry(id, &key, plan, what, is_own_endpoint), ids));
            if what.access != Access::Unrestricted {
                wanted.ranges = Some(Arc::clone(&plan.source_ranges));
            }
        }
        wanted.tables = tables;
        Ok(())
    }

    /// Records the failures and the times of their retries.
    fn finish<S: Store>(&mut self, writer: &mut Writer<S>, jobs: Vec<Job>, now: Instant) {
        for job in jobs {
            for base in &job.tables {
                writer.applied.tables.retire(*base, now, writer.number);
            }
            for base in &job.extents {
                writer.applied.extents.retire(*base, now, writer.number);
            }
            writer.applied.ranges.retire(job.range_set, now, writer.number);
            let before = self.failures.remove(&job.owner);
            if before.is_some() || job.cause.is_some() {
                self.has_new_problems = true;
                self.fates.extend(job.port().map(service_of));
            }
            if let Some(cause) = &job.cause {
                writer.note_unused_bits(job.wanted.as_ref(), now);
                let problem = cause.problem(&job.owner);
                let mut failure = Failure::after(before.as_ref(), problem, now);
                failure.effect = match cause {
                    SyncError::TableWaits(_) if !job.stopped => Effect::Waits,
                    _ if job.stopped => cause.effect(),
                    _ => Effect::Degraded,
                };
                self.failures.insert(job.owner, failure);
            }
        }
    }

    /// Returns the Service port that owns the address and port of a key, whatever the scope; `None` if its Service does not
    /// fit.
    fn holder(&self, key: &FrontendKey) -> Option<&ServicePortName> {
        let port = frontend_of(key).and_then(|frontend| self.claims.owner(&frontend))?;
        (!self.shares.is_refused(&service_of(port))).then_some(port)
    }

    /// Returns the Service port to which a key in the maps should belong.
    fn owner(&self, key: &FrontendKey) -> Option<ServicePortName> {
        let (frontend, port) = (frontend_of(key)?, self.holder(key)?);
        let plan = self.port_plan(port)?;
        plan.frontends.contains_key(&frontend).then(|| port.clone())
    }
}

/// How many of all have failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) failed: usize,
    pub(super) all: usize,
}

impl Share {
    fn add(&mut self, failed: bool) {
        self.failed += usize::from(failed);
        self.all += 1;
    }

    fn is_most(self) -> bool {
        2 * self.failed > self.all
    }
}

/// Whether most of most namespaces has failed.
fn is_most_of_most(namespaces: &BTreeMap<&Name, Share>) -> bool {
    let mut failed = Share::default();
    namespaces.values().for_each(|share| failed.add(share.is_most()));
    failed.is_most()
}

/// Changes the share of each port of a plan.
fn count_ports(
    shares: &mut BTreeMap<(IpFamily, Name), Share>,
    plan: Option<&ServicePlan>,
    change: impl Fn(&mut Share),
) {
    for port in plan.into_iter().flat_map(|plan| plan.ports.keys()) {
        let key = (port.family, port.namespace.clone());
        let share = shares.entry(key.clone()).or_default();
        change(share);
        if share.all == 0 {
            shares.remove(&key);
        }
    }
}

/// Returns the ports of a plan that do not serve clients because policy Local has no endpoint here: the scope of these clients, and
/// the family.
fn no_local(plan: &ServicePlan) -> impl Iterator<Item = (Scope, IpFamily)> {
    let silent = |(frontend, plan): (&Frontend, &FrontendPlan)| {
        (plan.when_empty != Verdict::Reject).then_some(frontend.scope)
    };
    plan.ports.iter().flat_map(move |(port, plan)| {
        let scopes: BTreeSet<Scope> = plan.frontends.iter().filter_map(silent).collect();
        scopes.into_iter().map(|scope| (scope, port.family))
    })
}

/// Returns the endpoints of a port in the order in which they get ids if there are too few: the first ones of each list of a
/// frontend, then the second ones, and at the end those that no frontend uses.
fn by_need(plan: &PortPlan) -> impl Iterator<Item = (&BackendAddress, BackendFacts)> {
    let (mut local, mut cluster) = (0, 0);
    let rank = |(at, facts): (_, &BackendFacts)| {
        local += usize::from(facts.in_local);
        cluster += usize::from(facts.in_cluster);
        let ranks = [facts.in_local.then_some(local), facts.in_cluster.then_some(cluster)];
        (ranks.into_iter().flatten().min().unwrap_or(usize::MAX), at, *facts)
    };
    let mut all: Vec<_> = plan.backends.iter().map(rank).collect();
    all.sort_by_key(|(rank, ..)| *rank);
    all.into_iter().map(|(_, at, facts)| (at, facts))
}

/// Returns the name of a port's Service.
fn service_of(port: &ServicePortName) -> ServiceName {
    ServiceName { namespace: port.namespace.clone(), name: port.name.clone() }
}

fn port_of<'a>(plan: Option<&'a ServicePlan>, port: &ServicePortName) -> Option<&'a PortPlan> {
    plan.and_then(|plan| plan.ports.get(port))
}
