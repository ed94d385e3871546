//! From plans to writes, in an order that no reader of the maps can stumble over.
//!
//! A sync goes through these phases, each for all changed Service ports together, so that it costs a few system
//! calls however many there are:
//!
//! 1. free what is out of quarantine: extents, ids, bits;
//! 2. remove frontends that no Service has any more;
//! 3. names, endpoints, filter bits, source ranges, slots in *new* extents: nothing refers to them yet;
//! 4. the entries of `services`, the commit: each moves readers from one complete set to the next. An entry for
//!    clients outside comes before the one that sends them to it, and goes after it;
//! 5. source ranges that left are closed; endpoints that left are gone at once; their ids, and the old extents,
//!    enter quarantine;
//! 6. endpoints that left some time ago are marked, where the removal policy says that connections to them are reset.
//!
//! What the node is like ([`super::node`]) and which cluster addresses live ([`super::addresses`]) comes before.
//!
//! A port that fails stops where it is, keeps what it had, and is tried again: after a while, longer each time,
//! and whenever something was freed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use super::addresses::Addresses;
use super::applied::{Applied, QuarantinePeriods};
use super::audit::Step;
use super::entries::frontend_key;
use super::job::{Job, Owner, Touched};
use super::node::NodeState;
use super::question::Expected;
use super::release::Quarantine;
use super::services::Services;
use super::writer::{Counters, Writer};
use crate::maps::{Capacity, FlowUse, MapError, Store, Table};
use crate::model::net::IpFamily;
use crate::model::{Problem, ServiceName};
use crate::plan::{HealthCheck, NodePlan, PortPlan, Scope, ServicePlan, ServicePortName};

/// Service ports that are written at once to maps that have none: few enough to take little memory, enough for few system calls.
const PART: usize = 2048;

/// Makes the maps say what the plans say.
pub struct Reconciler<S> {
    pub(super) writer: Writer<S>,
    pub(super) holds: QuarantinePeriods,
    /// The next sync looks at everything.
    pub(super) full: bool,
    services: Services,
    addresses: Addresses,
    node: NodeState,
    pub(super) quarantine: Quarantine,
}

impl<S: Store> Reconciler<S> {
    /// For tables that are not known yet: [`Reconciler::recover`] comes next.
    pub(super) fn new(store: S, holds: QuarantinePeriods) -> Self {
        Self {
            writer: Writer::new(store, holds),
            holds,
            full: true,
            services: Services::default(),
            addresses: Addresses::default(),
            node: NodeState::default(),
            quarantine: Quarantine::default(),
        }
    }

    /// Asks these connections before it clears a bit of the filter; without, there are none.
    #[must_use]
    pub fn with_flows(mut self, flows: Box<dyn FlowUse + Send>) -> Self {
        self.quarantine.flows = flows;
        self
    }

    /// Builds trees anew that have grown.
    pub(super) fn pack(&mut self) {
        self.writer.applied.pack();
        self.services.pack();
        self.addresses.pack();
    }

    /// The node should look like this from the next sync on.
    pub fn set_node(&mut self, plan: &NodePlan) {
        self.node.set(plan, &self.writer.applied.node);
    }

    /// Whether something of the node waits for a sync.
    pub fn is_node_due(&self) -> bool {
        self.node.is_due()
    }

    /// Tells of devices only, and forgets none: what an agent may do before it knows the cluster.
    pub fn tell_devices(&mut self, now: Instant) {
        self.node.tell_devices(&mut self.writer, now);
    }

    /// Takes new plans (`None`: the Service is gone) and brings the maps as close to all plans as possible.
    ///
    /// The first call removes what no plan asks for: every Service there is must be among `changed`.
    pub fn sync(&mut self, now: Instant, changed: BTreeMap<ServiceName, Option<ServicePlan>>) {
        let mut dirty = self.accept(changed);
        let freed = self.quarantine.free(&mut self.writer, now);
        dirty.extend(self.services.retries(now, freed));
        let full = self.full;
        let flows = &mut *self.quarantine.flows;
        self.node.reconcile(&mut self.writer, flows, now, full, freed);
        self.addresses.reconcile(&mut self.writer, now, full, freed);
        let mut touched = Touched::new();
        // With no port in the maps, no frontend changes hands: parts are as good as the whole, and take less memory.
        let at_once = if self.writer.applied.ports.used() == 0 { PART } else { usize::MAX };
        if full {
            let wanted = self.services.desired.values().flat_map(|plan| plan.ports.keys().cloned());
            let known = self.writer.applied.ports.iter().map(|(port, _)| port);
            dirty.extend(wanted.chain(known).map(Owner::Port));
            touched.extend(self.writer.applied.services.keys());
            self.full = false;
        }
        let mut dirty = dirty.into_iter().peekable();
        while dirty.peek().is_some() || !touched.is_empty() {
            let part = dirty.by_ref().take(at_once).collect();
            self.reconcile(part, std::mem::take(&mut touched), now);
        }
        self.writer.reset_due(now);
        self.quarantine.remove_orphans(&mut self.writer, now);
    }

    /// The same before all Services are known: for these, and for the node if it is `with_node`. What no plan asks for
    /// stays, since an earlier agent may have had reasons for it that this one does not know yet.
    pub fn sync_early(
        &mut self,
        now: Instant,
        changed: BTreeMap<ServiceName, Option<ServicePlan>>,
        with_node: bool,
    ) {
        let mut dirty = self.accept(changed);
        dirty.extend(self.services.retries(now, false));
        if with_node {
            self.node.reconcile(&mut self.writer, &mut *self.quarantine.flows, now, false, false);
        }
        self.addresses.reconcile(&mut self.writer, now, false, false);
        self.reconcile(dirty, Touched::new(), now);
    }

    /// Takes new plans in; returns the ports that may have to change.
    fn accept(&mut self, changed: BTreeMap<ServiceName, Option<ServicePlan>>) -> BTreeSet<Owner> {
        self.writer.number += 1;
        let mut dirty = BTreeSet::new();
        for (name, plan) in changed {
            let known = self.services.desired.get(&name).map(|plan| &**plan);
            self.addresses.replace(&name, known, plan.as_ref());
            self.services.accept(name, plan, &mut dirty);
        }
        dirty.into_iter().map(Owner::Port).collect()
    }

    fn reconcile(&mut self, dirty: BTreeSet<Owner>, touched: Touched, now: Instant) {
        if !dirty.is_empty() || !touched.is_empty() {
            let jobs = dirty.into_iter().map(Job::new).collect();
            self.services.reconcile(&mut self.writer, &mut self.addresses, jobs, touched, now);
            // A write that belongs to no port: a full sync finds it again.
            self.full |= self.services.failures.contains_key(&Owner::Upkeep);
        }
    }

    /// When [`Reconciler::sync`] should be called even if nothing changes.
    pub fn wake(&mut self) -> Option<Instant> {
        let retries = self.services.failures.values().map(|failure| failure.retry).min();
        // What fails may wait for room.
        let is_urgent = !self.services.failures.is_empty();
        let (applied, quarantine) = (&mut self.writer.applied, &self.quarantine);
        let due = |at: Option<Instant>, is_id| at.map(|at| quarantine.due(at, is_id));
        let space = [applied.extents.next_rested(), applied.tables.next_rested()];
        let space = if is_urgent { space } else { space.map(|at| due(at, false)) };
        let ids = [due(applied.endpoints.next_rested(), true), due(applied.ports.next_rested(), true)];
        let bits = applied.filter.next_rested();
        let bits = bits.map(|at| quarantine.next_release.map_or(at, |next| at.max(next)));
        let mut rests = [space[0], space[1], applied.drains.next_over(), ids[0], ids[1], bits];
        if let Some((_, retry)) = self.quarantine.failed {
            for rest in &mut rests {
                *rest = rest.map(|rest| rest.max(retry));
            }
            rests[0] = Some(rests[0].map_or(retry, |rest| rest.min(retry)));
        }
        let resets = self.writer.removals.next_due();
        let others =
            [retries, resets, self.addresses.retry(), self.node.retry(), self.node.next_snat_check()];
        rests.into_iter().chain(others).flatten().min()
    }

    /// When [`Reconciler::sync_early`] should be called even if nothing changes.
    pub fn early_wake(&self) -> Option<Instant> {
        let retries = self.services.failures.values().map(|failure| failure.retry);
        retries.chain(self.addresses.retry()).chain(self.node.retry()).min()
    }

    /// Whether the next sync looks at everything.
    pub fn is_full_due(&self) -> bool {
        self.full
    }

    /// What is wrong with which object, in their order.
    pub fn problems(&self) -> Vec<Problem> {
        let mut all: Vec<Problem> = self.services.plan_problems.values().flatten().cloned().collect();
        all.extend(self.services.failures.values().map(|failure| failure.problem.clone()));
        all.extend(self.services.claims.problems());
        all.extend(self.addresses.problem());
        all.extend(self.node.problems());
        all.sort();
        all.dedup();
        all
    }

    /// What this node could not do for a Service, in the order of ports: part of [`Reconciler::problems`]. The others are
    /// in the objects, and every node finds them.
    pub fn failed(&self) -> Vec<Problem> {
        self.services.failures.values().map(|failure| failure.problem.clone()).collect()
    }

    /// Service ports that are silent to clients of a scope, though another node could serve them.
    pub fn no_local(&self) -> &BTreeMap<(Scope, IpFamily), u64> {
        &self.services.no_local
    }

    /// What load balancers ask this node.
    pub fn health_checks(&self) -> &Arc<BTreeMap<ServiceName, HealthCheck>> {
        &self.services.health_checks
    }

    /// Families of which something is not in the maps that the cluster asks for. What fails for the node fails for both.
    /// Entries that only refuse clients (addresses without a port) do not count: they make room for frontends.
    pub fn failing_families(&self) -> BTreeSet<IpFamily> {
        if self.node.retry().is_some() {
            return BTreeSet::from([IpFamily::V4, IpFamily::V6]);
        }
        let both = [IpFamily::V4, IpFamily::V6];
        let of = |owner: &Owner| match owner {
            Owner::Port(port) => vec![port.family],
            Owner::Upkeep => both.to_vec(),
        };
        self.services.failures.keys().flat_map(of).collect()
    }

    /// Services of which a port is not in the maps as it should be; `None`: entries of the node itself are not, on which any
    /// Service may depend.
    pub fn failing_services(&self) -> Option<BTreeSet<ServiceName>> {
        let name = |owner: &Owner| match owner {
            Owner::Port(ServicePortName { namespace, name, .. }) => {
                Some(ServiceName { namespace: namespace.clone(), name: name.clone() })
            }
            // Entries that are no longer needed are still there.
            Owner::Upkeep => None,
        };
        self.node.retry().is_none().then(|| self.services.failures.keys().filter_map(name).collect())
    }

    /// Service ports that are not in the maps as they should be.
    pub fn failing(&self) -> usize {
        self.services.failures.len()
    }

    /// Services that have a plan; those of other proxies are not counted.
    pub fn services(&self) -> usize {
        self.services.desired.len() - self.addresses.foreign()
    }

    /// What a Service should look like.
    pub fn plan(&self, name: &ServiceName) -> Option<&ServicePlan> {
        self.services.desired.get(name).map(|plan| &**plan)
    }

    /// What the tables hold as far as we know.
    pub fn applied(&self) -> &Applied {
        &self.writer.applied
    }

    /// Operations done and failed so far.
    pub fn counters(&self) -> &Counters {
        &self.writer.counters
    }

    /// How much the tables take.
    pub fn capacity(&self) -> Capacity {
        self.writer.store.capacity()
    }

    /// The tables themselves.
    pub fn store(&self) -> &S {
        &self.writer.store
    }

    /// The same, to be changed.
    pub fn store_mut(&mut self) -> &mut S {
        &mut self.writer.store
    }

    /// The tables alone.
    pub fn into_store(self) -> S {
        self.writer.store
    }

    /// Goes on with the comparison of the tables with what was written to them, or begins one, by about `piece`
    /// entries. After [`Step::Differs`], [`Reconciler::audit`] says in how many entries, and has them repaired.
    pub fn audit_step(&mut self, piece: u32) -> Result<Step, MapError> {
        let mut audit = self.writer.audit.take().unwrap_or_default();
        // Entries that we know to make no sense and could not remove yet are no news.
        if !self.quarantine.orphans.is_empty() {
            return Ok(Step::Clean);
        }
        if !audit.compare(&mut self.writer.store, &self.writer.applied, piece.max(1))? {
            return Ok(Step::Differs);
        }
        if audit.done == Table::ALL.len() {
            return Ok(Step::Clean);
        }
        self.writer.audit = Some(audit);
        Ok(Step::More)
    }

    /// Adds what the maps should hold for a port that is planned so.
    pub(super) fn expect(&self, port: &ServicePortName, plan: &PortPlan, expected: &mut Expected) {
        let fails = self.services.failures.contains_key(&Owner::Port(port.clone()));
        for (frontend, what) in &plan.frontends {
            if self.services.claims.owner(frontend) != Some(port) {
                continue;
            }
            let endpoints = plan.slots(what).map(|at| SocketAddr::new(at.address, at.port));
            expected.insert(frontend_key(frontend), (!fails).then(|| endpoints.collect()));
        }
    }
}
