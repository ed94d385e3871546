//! Turns plans into writes, in an order in which every reader of the maps sees a consistent state.
//!
//! A sync has these phases. Each handles all changed Service ports together, so a sync takes few system calls, whatever
//! their number:
//!
//! 1. free extents, ids and bits whose quarantine is over;
//! 2. remove frontends that no Service has any more;
//! 3. write names, endpoints, filter bits, source ranges, and slots in *new* extents: no entry refers to them yet;
//! 4. write the entries of `services`, the commit: each moves readers from one complete set to the next. An entry for
//!    clients outside is written before the internal entry that refers to it, and removed after it;
//! 5. mark removed endpoints as gone at once; their ids, the old extents and the old sets of source ranges enter quarantine;
//! 6. mark endpoints whose connections are reset, after the delay of the removal policy.
//!
//! The entries of the node ([`super::node`]) and of cluster addresses ([`super::addresses`]) are written before phase 2.
//!
//! A port that fails stops at that point, keeps its previous entries, and is retried: after a pause that doubles each time,
//! and whenever space was freed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use super::addresses::{Addresses, Turn};
use super::applied::{Applied, QuarantinePeriods};
use super::audit::Step;
use super::entries::frontend_key;
use super::job::{Job, Owner, Touched};
use super::node::NodeState;
use super::release::Releases;
use super::services::{Services, renamed};
use super::shares::Reserve;
use super::writer::{Counters, Writer};
use crate::model::net::IpFamily;
use crate::model::{Problem, ServiceName};
use crate::plan::{Frontend, HealthCheck, NodePlan, PortPlan, Scope, ServicePlan, ServicePortName};
use crate::store::{Capacity, FlowUse, FrontendKey, MapError, Store, Table};

/// Service ports that are written together to empty maps: few enough to save memory, enough to need few system calls.
const PART: usize = 2048;

/// The desired content of the maps for each frontend: its endpoints for new connections. `None` if the agent failed to
/// program the frontend's Service port: such entries may be wrong, and the status counts them.
pub type Expected = BTreeMap<FrontendKey, Option<BTreeSet<SocketAddr>>>;

/// Brings the maps to the state that the plans ask for.
pub struct Reconciler<S> {
    pub(super) writer: Writer<S>,
    pub(super) quarantine: QuarantinePeriods,
    /// The next sync is a full one: it processes all Service ports and frontends.
    pub(super) full: bool,
    pub(super) services: Services,
    addresses: Addresses,
    node: NodeState,
    /// The problems that belong to no Service, at the last look.
    node_problems: Vec<Problem>,
    pub(super) releases: Releases,
}

impl<S: Store> Reconciler<S> {
    /// Creates a reconciler with an empty mirror; [`Reconciler::recover`] then reads the maps.
    pub fn new(store: S, quarantine: QuarantinePeriods) -> Self {
        Self {
            writer: Writer::new(store, quarantine),
            quarantine,
            full: true,
            services: Services::default(),
            addresses: Addresses::default(),
            node: NodeState::default(),
            node_problems: Vec::new(),
            releases: Releases::default(),
        }
    }

    /// Sets the source of open connections, which is asked before a filter bit is cleared. By default there are no
    /// connections.
    #[must_use]
    pub fn with_flows(mut self, flows: Box<dyn FlowUse + Send>) -> Self {
        self.releases.flows = flows;
        self
    }

    /// Rebuilds trees that have grown.
    pub fn pack(&mut self) {
        self.writer.applied.pack();
        self.services.pack();
        self.addresses.pack();
    }

    /// Sets the desired entries of the node for the next sync.
    pub fn set_node(&mut self, plan: &NodePlan) {
        let keeps_tunnels = plan.dsr && plan.tunnels.is_none();
        // Endpoints may have the numbers of nodes that are gone.
        self.full |= self.services.keeps_tunnels && !keeps_tunnels;
        self.services.keeps_tunnels = keeps_tunnels;
        self.node.set(plan, &self.writer.applied.node);
    }

    /// Whether a change of the node waits for a sync.
    pub fn is_node_due(&self) -> bool {
        self.node.is_due()
    }

    /// Writes the entries of devices only, and removes none: all that an agent may do before it knows the cluster. Devices
    /// that `exists` stay uplinks.
    pub fn write_devices(&mut self, exists: impl Fn(u32) -> bool, now: Instant) {
        self.node.write_devices(&mut self.writer, exists, now);
    }

    /// Takes new plans (`None`: the Service was removed) and brings the maps as close to all plans as possible.
    ///
    /// The first call removes all entries that no plan asks for, so `changed` must contain every Service.
    pub fn sync(&mut self, now: Instant, changed: BTreeMap<ServiceName, Option<ServicePlan>>) {
        let mut dirty = self.accept(changed);
        let freed = self.releases.free(&mut self.writer, now);
        dirty.extend(self.services.retries(now, freed));
        let full = self.full;
        let flows = &mut *self.releases.flows;
        self.node.reconcile(&mut self.writer, flows, now, full, freed);
        self.addresses.reconcile(&mut self.writer, Turn::BeforePorts, now, full, freed);
        let mut touched = Touched::new();
        // With no port in the maps, no frontend gets a new owner, so the ports can be written in parts, which take less
        // memory.
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
        self.addresses.reconcile(&mut self.writer, Turn::AfterPorts, now, full, freed);
        self.writer.reset_due(now);
        self.releases.remove_orphans(&mut self.writer, now);
    }

    /// As [`Reconciler::sync`], before all Services are known: writes these Services, and the node if `with_node`. Entries
    /// that no plan asks for stay, because an earlier agent may have written them for objects that this one does not know
    /// yet.
    pub fn sync_early(
        &mut self,
        now: Instant,
        changed: BTreeMap<ServiceName, Option<ServicePlan>>,
        with_node: bool,
    ) {
        let mut dirty = self.accept(changed);
        dirty.extend(self.services.retries(now, false));
        if with_node {
            self.node.reconcile(&mut self.writer, &mut *self.releases.flows, now, false, false);
        }
        self.addresses.reconcile(&mut self.writer, Turn::BeforePorts, now, false, false);
        self.reconcile(dirty, Touched::new(), now);
        self.addresses.reconcile(&mut self.writer, Turn::AfterPorts, now, false, false);
    }

    /// Takes new plans; returns the ports that may have to change.
    fn accept(&mut self, changed: BTreeMap<ServiceName, Option<ServicePlan>>) -> BTreeSet<Owner> {
        self.writer.number += 1;
        // The needs are changed in place if nothing else refers to them.
        self.writer.reserve = Reserve::default();
        let mut dirty = BTreeSet::new();
        for (name, plan) in changed {
            let known = self.services.desired.get(&name).map(|plan| &**plan);
            self.addresses.replace(&name, known, plan.as_ref());
            for (before, after) in renamed(known, plan.as_ref()) {
                self.writer.applied.ports.rename(before, after);
            }
            self.services.accept(name, plan, &mut dirty);
        }
        let capacity = self.writer.store.capacity();
        self.services.update_shares(&capacity, &mut dirty);
        self.writer.reserve = self.services.shares.reserve();
        dirty.into_iter().map(Owner::Port).collect()
    }

    fn reconcile(&mut self, dirty: BTreeSet<Owner>, touched: Touched, now: Instant) {
        if !dirty.is_empty() || !touched.is_empty() {
            let jobs = dirty.into_iter().map(Job::new).collect();
            self.services.reconcile(&mut self.writer, &mut self.addresses, jobs, touched, now);
            // The failed write belongs to no port; a full sync finds the entry again.
            self.full |= self.services.failures.contains_key(&Owner::NoPort);
        }
    }

    /// Returns the time at which [`Reconciler::sync`] should be called even if nothing changes.
    pub fn wake(&mut self) -> Option<Instant> {
        let retries = self.services.failures.values().map(|failure| failure.retry).min();
        // A failed port may wait for free space.
        let is_urgent = !self.services.failures.is_empty();
        let (applied, quarantine) = (&mut self.writer.applied, &self.releases);
        let due = |at: Option<Instant>, is_id| at.map(|at| quarantine.due(at, is_id));
        let space = [
            applied.extents.next_quarantine_end(),
            applied.tables.next_quarantine_end(),
            applied.ranges.next_quarantine_end(),
        ];
        let space = if is_urgent { space } else { space.map(|at| due(at, false)) };
        let next_ports = quarantine.next_ports(applied);
        let ids = [
            due(applied.endpoints.next_quarantine_end(), true),
            due(applied.ports.next_quarantine_end(), true)
                .map(|at| next_ports.map_or(at, |next| at.max(next))),
        ];
        let bits = applied.prefilter.next_quarantine_end();
        let bits = bits.map(|at| quarantine.next_release.map_or(at, |next| at.max(next)));
        let mut ends = [space[0], space[1], space[2], applied.next_drained(), ids[0], ids[1], bits];
        if let Some(retry) = self.releases.failure.as_ref().map(|failure| failure.retry) {
            for end in &mut ends {
                *end = end.map(|at| at.max(retry));
            }
            ends[0] = Some(ends[0].map_or(retry, |end| end.min(retry)));
        }
        let resets = self.writer.removals.next_due();
        let orphans = self.releases.orphans_failure.as_ref().map(|failure| failure.retry);
        let others = [
            retries,
            resets,
            orphans,
            self.addresses.retry(),
            self.node.retry(),
            self.node.next_flow_check(),
        ];
        ends.into_iter().chain(others).flatten().min()
    }

    /// Returns the time at which [`Reconciler::sync_early`] should be called even if nothing changes.
    pub fn early_wake(&self) -> Option<Instant> {
        let retries = self.services.failures.values().map(|failure| failure.retry);
        retries.chain(self.addresses.retry()).chain(self.node.retry()).min()
    }

    /// Whether the next sync is a full one.
    pub fn is_full_due(&self) -> bool {
        self.full
    }

    /// Returns whether [`Reconciler::problems`] may have changed since the last call: there may be thousands of problems.
    pub fn has_new_problems(&mut self) -> bool {
        let of_node = self.node_problems().collect();
        let before = std::mem::replace(&mut self.node_problems, of_node);
        self.services.take_new_problems() || before != self.node_problems
    }

    /// Returns all problems, sorted and without duplicates.
    pub fn problems(&self) -> Vec<Problem> {
        let mut all: Vec<Problem> = self.services.plan_problems.values().flatten().cloned().collect();
        all.extend(self.services.failed());
        all.extend(self.services.shares.problems());
        all.extend(self.services.claims.problems());
        all.extend(self.node_problems());
        all.sort();
        all.dedup();
        all
    }

    fn node_problems(&self) -> impl Iterator<Item = Problem> {
        self.addresses.problem().into_iter().chain(self.node.problems()).chain(self.releases.problems())
    }

    /// Returns the failures of this node, sorted by Service port: a part of [`Reconciler::problems`]. Most of the others
    /// are problems of the objects, which every node finds.
    pub fn failed(&self) -> Vec<Problem> {
        self.services.failed().chain(self.services.shares.problems()).collect()
    }

    /// Returns the number of Service ports that drop clients of a scope, though other nodes have endpoints, by scope and
    /// family.
    pub fn no_local(&self) -> &BTreeMap<(Scope, IpFamily), u64> {
        &self.services.no_local
    }

    /// Returns the health checks of Services, which load balancers send to this node. A Service of which the maps have no frontend
    /// of a family has no endpoint there: its clients would not be served.
    pub fn health_checks(&self) -> Arc<BTreeMap<ServiceName, HealthCheck>> {
        self.services.health_checks(&self.writer.applied)
    }

    /// Returns the families that are not programmed: entries of the node fail, or most ports of most namespaces do. So no
    /// namespace decides alone, however many Services it has, and neither does a port that is programmed without all that
    /// it asks for.
    pub fn failing_families(&self) -> BTreeSet<IpFamily> {
        if self.is_node_failing() {
            return BTreeSet::from([IpFamily::V4, IpFamily::V6]);
        }
        self.services.failing_families()
    }

    /// Whether entries of the node itself fail, on which any Service may depend.
    pub fn is_node_failing(&self) -> bool {
        self.node.retry().is_some()
    }

    /// Whether a port of this Service is not programmed as desired, or the node itself fails.
    pub fn is_failing(&self, name: &ServiceName) -> bool {
        self.is_node_failing() || self.services.is_failing(name)
    }

    /// Returns the Services with a port that may have begun or ceased to fail since the last call.
    pub fn take_fates(&mut self) -> BTreeSet<ServiceName> {
        std::mem::take(&mut self.services.fates)
    }

    /// Returns the `SERVICE_*` bits of a frontend in the maps, of whatever Service; `None` if they do not have it.
    pub fn flags(&self, frontend: &Frontend) -> Option<u16> {
        self.writer.applied.services.get(&frontend_key(frontend)).map(|entry| entry.flags)
    }

    /// Returns the number of frontends of a Service, without those that other Services have.
    pub fn frontends(&self, name: &ServiceName) -> usize {
        self.services.frontends(name)
    }

    /// Returns the number of Service ports that are not programmed as desired.
    pub fn failing(&self) -> usize {
        self.services.failing()
    }

    /// Whether a flow is encapsulated, as far as is known: if flows cannot be read, there may be one.
    pub fn has_dsr_flows(&mut self) -> bool {
        self.releases.flows.has_dsr().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read connections, so direct server return stays on");
            true
        })
    }

    /// Returns the number of Services that have a plan; those of other proxies are not counted.
    pub fn services(&self) -> usize {
        self.services.desired.len() - self.addresses.foreign()
    }

    /// Returns the last plan of a Service.
    pub fn plan(&self, name: &ServiceName) -> Option<&ServicePlan> {
        self.services.desired.get(name).map(|plan| &**plan)
    }

    /// Returns the mirror of the maps.
    pub fn applied(&self) -> &Applied {
        &self.writer.applied
    }

    /// Returns the counts of successful and failed operations.
    pub fn counters(&self) -> &Counters {
        &self.writer.counters
    }

    /// Returns the capacity of the tables.
    pub fn capacity(&self) -> Capacity {
        self.writer.store.capacity()
    }

    /// Returns the store of the maps.
    pub fn store(&self) -> &S {
        &self.writer.store
    }

    /// Returns the store of the maps, mutable.
    pub fn store_mut(&mut self) -> &mut S {
        &mut self.writer.store
    }

    /// Returns the store and drops the rest.
    pub fn into_store(self) -> S {
        self.writer.store
    }

    /// Compares about `piece` more entries of the maps with the mirror; starts a new comparison if none is in progress.
    /// After [`Step::Differs`], [`Reconciler::audit`] counts the different entries and has them repaired.
    pub fn audit_step(&mut self, piece: u32) -> Result<Step, MapError> {
        let mut audit = self.writer.audit.take().unwrap_or_default();
        if !audit.compare(
            &mut self.writer.store,
            &self.writer.applied,
            &self.releases.orphans,
            piece.max(1),
        )? {
            return Ok(Step::Differs);
        }
        if audit.done == Table::ALL.len() {
            return Ok(Step::Clean);
        }
        self.writer.audit = Some(audit);
        Ok(Step::More)
    }

    /// Adds the desired content of the maps for a port with this plan.
    pub fn expect(&self, port: &ServicePortName, plan: &PortPlan, expected: &mut Expected) {
        let fails =
            self.services.failures.contains_key(&Owner::Port(port.clone())) || self.services.is_limited(port);
        for (frontend, what) in &plan.frontends {
            if self.services.claims.owner(frontend) != Some(port) {
                continue;
            }
            let endpoints = plan.slots(what).map(|at| SocketAddr::new(at.address, at.port));
            expected.insert(frontend_key(frontend), (!fails).then(|| endpoints.collect()));
        }
    }
}
