//! The task that alone owns the cluster state, the mirror and the maps.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use proxy_common::config::CONFIG_DSR;
use proxy_core::model::net::IpFamily;
use proxy_core::model::settings::NodeSettings;
use proxy_core::model::{Cluster, Event, Key, Listing, NodeView, Object, ObjectKind, ServiceName};
use proxy_core::plan::{
    Frontend, NodePlan, PlanSettings, PortPlan, ServicePlan, Unmanaged, plan_node, plan_service,
};
use proxy_core::store::{FlowUse, MapError, Store};
use proxy_core::sync::{QuarantinePeriods, Reconciler};

mod answers;
mod audits;
mod dsr_use;
mod early;
mod gate;
mod histogram;
mod joins;
mod programmed;
mod question;
mod recent;
mod rollouts;
mod slow_start;
mod span;
mod status;
mod timed;
mod triggers;

use dsr_use::DsrUse;
pub use gate::PodState;
pub use histogram::{EventScale, Histogram, ProgrammingScale, Scale, SyncScale};
use joins::Joins;
use programmed::Ledger;
pub use programmed::{Programmed, ProgrammedService};
pub use question::{Ask, Question};
use recent::Recent;
use rollouts::Rollouts;
use slow_start::SlowStart;
pub use status::{Changes, NodeFate, Operations, Status, TableUse, problems_begun};
use status::{log_problems, publish};
use triggers::Triggers;

/// The most events taken before a sync: enough that a list of all objects is one sync.
const AT_ONCE: usize = 65_536;

/// The longest time for which events are taken before a sync: a source that never runs dry does not delay the sync further.
const TAKE_FOR: Duration = Duration::from_millis(50);

/// The driver rebuilds its trees compactly after a sync that planned more Services than this, if these are more than half
/// of all: such a sync took a full list.
const MANY: usize = 1000;

/// Periods and settings of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverSettings {
    /// Minimum time between two syncs. A single change does not wait.
    pub min_sync_period: Duration,
    /// Period of the comparison of the maps with the mirror.
    pub sync_period: Duration,
    /// Quarantine periods.
    pub quarantine: QuarantinePeriods,
    /// Settings of the planning of Services.
    pub plan: PlanSettings,
    /// Settings of the planning of the node.
    pub node: NodeSettings,
    /// Time until an endpoint that joins others has its full share; 0: no slow start.
    pub slow_start: Duration,
    /// Packets that other nodes encapsulate are accepted before a Service has DSR here.
    pub accept_dsr: bool,
}

impl Default for DriverSettings {
    fn default() -> Self {
        Self {
            min_sync_period: Duration::from_millis(5),
            sync_period: Duration::from_secs(30),
            quarantine: QuarantinePeriods::default(),
            plan: PlanSettings::default(),
            node: NodeSettings::default(),
            slow_start: Duration::ZERO,
            accept_dsr: false,
        }
    }
}

/// State of the time before all objects are listed.
#[derive(Debug, Default)]
struct Early {
    /// No earlier agent has programmed a Service. If one has, its entries of the node stay, because it knew the cluster.
    is_first: bool,
    /// A static Service may have changed.
    is_due: bool,
}

/// Takes events and keeps the maps up to date.
pub struct Driver<S> {
    pub(super) reconciler: Reconciler<S>,
    pub(super) cluster: Cluster,
    pub(super) settings: DriverSettings,
    changed: BTreeSet<ServiceName>,
    /// The plan of the node may have to change.
    is_node_new: bool,
    /// Whether the node takes part in DSR.
    dsr: DsrUse,
    /// Arrival time of the oldest change that waits for a sync.
    waiting_since: Option<Instant>,
    /// Earliest time of the next sync; `None` before the first.
    earliest_sync: Option<Instant>,
    next_audit: Instant,
    /// Time of the next piece of the comparison in progress.
    next_piece: Option<Instant>,
    /// The last comparison failed, because the maps could not be read.
    is_unreadable: bool,
    triggers: Triggers,
    slow_start: SlowStart,
    rollouts: Rollouts,
    joins: Joins,
    recent: Recent,
    /// Tells whether packets of the node itself to a cluster address are translated; `None`: they are not.
    node_path: Option<Box<dyn FnMut(IpAddr) -> bool + Send>>,
    early: Early,
    ledger: Ledger,
    status: watch::Sender<Status>,
    /// Questions of the audit; `None`: there is no audit.
    questions: Option<mpsc::Receiver<Question>>,
}

impl<S: Store> Driver<S> {
    /// Recovers the state from the maps; writes nothing. `node` is this node as far as it is known without the API server.
    pub fn new(store: S, node: NodeView, settings: DriverSettings) -> Result<Self, MapError> {
        let now = Instant::now();
        let reconciler = Reconciler::recover(store, settings.quarantine, now.into_std())?;
        let dsr = DsrUse::new(settings.accept_dsr, reconciler.applied().node.config.has(CONFIG_DSR), now);
        let early = Early { is_first: reconciler.applied().services.is_empty(), is_due: false };
        let mut status = Status { needs_nodes: dsr.is_needed().then_some(now), ..Status::default() };
        if early.is_first {
            // Nothing serves this node until the first sync.
            status.note_failing(&[IpFamily::V4, IpFamily::V6].into(), SystemTime::now());
        }
        status.describe(&reconciler);
        Ok(Self {
            reconciler,
            cluster: Cluster::new(node),
            changed: BTreeSet::new(),
            is_node_new: true,
            dsr,
            waiting_since: None,
            earliest_sync: None,
            next_audit: now + settings.sync_period,
            next_piece: None,
            is_unreadable: false,
            slow_start: SlowStart::new(settings.slow_start),
            rollouts: Rollouts::default(),
            joins: Joins::new(settings.slow_start),
            recent: Recent::default(),
            node_path: None,
            early,
            ledger: Ledger::default(),
            settings,
            triggers: Triggers::new(SystemTime::now()),
            status: watch::Sender::new(status),
            questions: None,
        })
    }

    /// Sets the source that tells which filter bits and ids open connections need.
    #[must_use]
    pub fn with_flows(self, flows: Box<dyn FlowUse + Send>) -> Self {
        Self { reconciler: self.reconciler.with_flows(flows), ..self }
    }

    /// Sets what tells whether packets of the node itself to a cluster address are translated. It may block for a moment.
    #[must_use]
    pub fn with_node_path(self, node_path: Box<dyn FnMut(IpAddr) -> bool + Send>) -> Self {
        Self { node_path: Some(node_path), ..self }
    }

    /// Sets the questions that the driver answers between two syncs.
    #[must_use]
    pub fn with_questions(self, questions: mpsc::Receiver<Question>) -> Self {
        Self { questions: Some(questions), ..self }
    }

    /// Returns a receiver of status snapshots; each sync publishes a new one.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.subscribe()
    }

    /// Returns the record of the version of each Service that is programmed.
    pub fn programmed(&self) -> Programmed {
        self.ledger.programmed()
    }

    /// Runs until every sender of `events` is dropped, then returns the store. The maps keep their content.
    /// Dropping the future is safe at any time: a sync is never interrupted.
    pub async fn run(mut self, mut events: mpsc::Receiver<Event>) -> S {
        let mut questions = self.questions.take();
        loop {
            let wake = self.wake();
            tokio::select! {
                biased;
                event = events.recv() => match event {
                    Some(event) => self.take(event),
                    None => break,
                },
                question = next(&mut questions) => self.answer(question),
                () = sleep_until(wake) => {}
            }
            take_queued(&mut events, |event| self.take(event));
            if self.cluster.has_listed_all() {
                self.work();
            } else {
                self.work_early();
            }
            // Returning `false` does not wake the receivers.
            self.status.send_if_modified(|status| {
                status.progress = Some(Instant::now());
                false
            });
        }
        // The last changes may still wait for the minimum sync period.
        if !self.changed.is_empty() && self.cluster.has_listed_all() {
            self.sync(Instant::now(), false);
        }
        self.reconciler.into_store()
    }

    /// Returns the time of the next work that needs no event.
    fn wake(&mut self) -> Instant {
        if !self.cluster.has_listed_all() {
            return self.early_wake();
        }
        let audit = self.next_piece.unwrap_or(self.next_audit);
        let next = match self.reconciler.wake() {
            _ if self.waiting_since.is_some() || self.earliest_sync.is_none() => {
                self.earliest(Instant::now())
            }
            Some(wake) => Instant::from_std(wake).max(self.earliest(Instant::now())),
            None => audit,
        };
        let plans = self.next_plan().map(|at| at.max(self.earliest(Instant::now())));
        let ends = self.dsr.next_check();
        plans.into_iter().chain(ends).fold(next.min(audit), Instant::min)
    }

    /// Returns the time at which a plan changes without an event.
    fn next_plan(&self) -> Option<Instant> {
        let wakes = [self.slow_start.wake(), self.rollouts.wake(), self.joins.wake(), self.recent.wake()];
        wakes.into_iter().flatten().min().map(Instant::from_std)
    }

    /// Returns the earliest time of the next sync; `now` if there was none.
    fn earliest(&self, now: Instant) -> Instant {
        self.earliest_sync.unwrap_or(now)
    }

    /// Plans these Services with the next sync.
    pub(super) fn ask_for_sync(&mut self, names: Vec<ServiceName>) {
        self.changed.extend(names);
        self.waiting_since.get_or_insert_with(Instant::now);
    }

    pub(super) fn take(&mut self, event: Event) {
        // Each node of a large cluster changes its status all the time.
        if let Event::Apply(Object::Node(node)) = &event
            && self.cluster.is_heartbeat(node)
        {
            return;
        }
        let kind = match kind_of(&event) {
            Some(kind @ (ObjectKind::Service | ObjectKind::Slice)) => kind,
            other => {
                self.is_node_new = true;
                other.unwrap_or(ObjectKind::Node)
            }
        };
        let listed = matches!(event, Event::Reset(_));
        let count = match &event {
            Event::Reset(Listing::Services(all)) => all.len(),
            Event::Reset(Listing::Slices(all)) => all.len(),
            _ => 1,
        };
        self.triggers.note(&self.cluster, &event);
        self.ledger.note(&self.cluster, &event);
        let mut changed = self.cluster.apply(event);
        self.early.is_due |= changed.iter().any(|name| self.cluster.is_static(name));
        self.changed.append(&mut changed);
        let node = if self.cluster.is_node_eligible() { NodeFate::Stays } else { NodeFate::Leaves };
        let first = self.waiting_since.is_none();
        let waiting_since = *self.waiting_since.get_or_insert_with(Instant::now);
        publish(&self.status, |status| {
            match kind {
                ObjectKind::Service => status.service_changes.add(count),
                ObjectKind::Slice => status.slice_changes.add(count),
                ObjectKind::Node | ObjectKind::ServiceCidr => {}
            }
            status.node = node;
            status.services_listed |= listed && kind == ObjectKind::Service;
            status.slices_listed |= listed && kind == ObjectKind::Slice;
            status.last_queued = Some(SystemTime::now());
            if first {
                status.waiting_since = Some(waiting_since);
            }
        });
    }

    /// Does the work that is due: a sync first, then a piece of the comparison.
    fn work(&mut self) {
        let now = Instant::now();
        let due = self.reconciler.wake().is_some_and(|wake| Instant::from_std(wake) <= now);
        let plans = self.next_plan().is_some_and(|at| at <= now);
        let ends = self.dsr.next_check().is_some_and(|at| at <= now);
        let is_needed = self.earliest_sync.is_none() || self.waiting_since.is_some() || due || plans || ends;
        if now >= self.earliest(now) && (is_needed || self.reconciler.is_full_due()) {
            self.sync(now, false);
        }
        if now >= self.next_piece.unwrap_or(self.next_audit) {
            self.audit(now);
        }
    }

    /// Plans the node again and hands the plan to the reconciler; `None` if nothing has changed or the host is not known
    /// yet.
    fn plan_node(&mut self) -> Option<NodePlan> {
        let host = self.cluster.host().filter(|_| self.is_node_new)?;
        let ranges = self.cluster.service_cidrs();
        let left_alone = self.cluster.own_cluster_ips();
        let mut plan = plan_node(self.cluster.node(), host, &ranges, &left_alone, &self.settings.node);
        if self.dsr.is_needed() {
            let own: Vec<_> = self.cluster.own_internal_ips().collect();
            plan.set_tunnels(&own, self.cluster.others().map(|nodes| nodes.values().flatten()));
        }
        if !self.cluster.has_listed_all() {
            // Before all objects are listed, the agent does not know which addresses of these ranges belong to no Service,
            // nor what the API server says about the node.
            plan.service_cidrs.clear();
            plan.problems.clear();
        }
        self.is_node_new = false;
        self.reconciler.set_node(&plan);
        Some(plan)
    }

    /// Publishes and logs the problems if they have changed.
    fn report_problems(&mut self) {
        if !self.reconciler.has_new_problems() {
            return;
        }
        let (problems, failed) = (Arc::new(self.reconciler.problems()), Arc::new(self.reconciler.failed()));
        let after = Arc::clone(&problems);
        let mut before = Arc::default();
        publish(&self.status, |status| {
            before = std::mem::replace(&mut status.problems, problems);
            status.failed = failed;
        });
        log_problems(&before, &after);
    }

    /// Runs a sync that began at `begun`; for a repair, that is the time before the maps were read.
    fn sync(&mut self, begun: Instant, repairs: bool) {
        let full = repairs || self.reconciler.is_full_due();
        let span = span::begin(full);
        let planning = span::plan();
        let planned = Instant::now().into_std();
        self.changed.extend(self.slow_start.begin(planned));
        self.changed.extend(self.rollouts.begin(planned));
        self.changed.extend(self.joins.begin(planned));
        self.changed.extend(self.recent.begin(planned));
        let plans: BTreeMap<_, _> = std::mem::take(&mut self.changed)
            .into_iter()
            .map(|name| {
                let mut plan = plan_service(&self.cluster, &name, self.settings.plan);
                let before = self.reconciler.plan(&name);
                self.slow_start.apply(&name, plan.as_mut(), before, planned);
                // Rules of another proxy see packets of the node before the programs do.
                let is_other = self.cluster.host().is_none_or(|host| host.has_kube_proxy_rules);
                // Elsewhere, nothing refuses the question, and it would leave the node.
                let programmed = &self.reconciler.applied().node;
                let serves_node = |port: &PortPlan| {
                    self.node_path.as_mut().filter(|_| !is_other).is_some_and(|path| {
                        let is_translated =
                            |address| programmed.is_in_service_range(address) && path(address);
                        rollouts::serves_node(port, |address| self.cluster.is_own(address), is_translated)
                    })
                };
                self.rollouts.apply(&name, plan.as_mut(), before, planned, serves_node);
                self.joins.apply(&name, plan.as_mut(), before, planned);
                let flags = |frontend: &Frontend| self.reconciler.flags(frontend);
                self.recent.apply(&name, plan.as_mut(), before.is_none(), flags, planned);
                (name, plan)
            })
            .collect();
        let services = plans.len();
        let has_own = |plan: &ServicePlan| plan.unmanaged.values().any(|reason| *reason == Unmanaged::Own);
        // Plan the node again: a service CIDR that contains an address of the node is a problem, unless a Service has this
        // address.
        self.is_node_new |=
            plans.iter().any(|(name, plan)| plan.iter().chain(self.reconciler.plan(name)).any(has_own));
        let has_flows = || self.reconciler.has_dsr_flows();
        self.is_node_new |= self.dsr.update(&plans, has_flows, begun);
        let needed = self.status.borrow().needs_nodes;
        let needs_nodes = self.dsr.is_needed().then(|| needed.unwrap_or(begun));
        if needs_nodes.is_none() {
            self.cluster.forget_others();
        }
        let node = self.plan_node();
        drop(planning);
        let applying = span::apply();
        self.reconciler.sync(begun.into_std(), plans);
        self.ledger.open(&self.cluster, self.reconciler.take_fates());
        if self.reconciler.is_node_failing() {
            self.ledger.doubt_open();
        } else {
            let is_failing = |name: &ServiceName| self.reconciler.is_failing(name);
            let frontends = |name: &ServiceName| self.reconciler.frontends(name);
            self.ledger.record_sync(&self.cluster, is_failing, frontends, SystemTime::now());
        }
        drop(applying);
        let ended = Instant::now();
        // The first sync, of everything, says nothing about the next.
        let took = self.earliest_sync.map_or(Duration::ZERO, |_| ended - begun);
        self.earliest_sync = Some(ended + pause(self.settings.min_sync_period, took));
        let waited = self.waiting_since.take().map(|since| ended - since);
        span::describe(&span, services, waited, self.reconciler.failing());
        tracing::debug!(services, duration_us = (ended - begun).as_micros() as u64, "synced");
        let families = self.failing_families();
        self.report_problems();
        let (reconciler, triggers, rebalances) =
            (&self.reconciler, &mut self.triggers, self.joins.active(planned));
        publish(&self.status, |status| {
            let (now, duration) = (SystemTime::now(), ended - begun);
            status.synced = true;
            status.service_changes.pending = 0;
            status.slice_changes.pending = 0;
            status.note_failing(&families, now);
            status.needs_nodes = needs_nodes;
            status.rebalances = rebalances;
            status.sync_duration.observe(duration);
            if full {
                status.full_sync_duration.observe(duration);
            } else {
                status.partial_sync_duration.observe(duration);
            }
            for (family, duration) in triggers.done(now, |name| reconciler.is_failing(name)) {
                status.network_programming.entry(family).or_default().observe(duration);
            }
            if let Some(waited) = waited {
                status.event_to_map.observe(waited);
            }
            if let Some(node) = node {
                status.listen = node.listen;
            }
            status.describe(reconciler);
        });
        if services > MANY && 2 * services > self.reconciler.services() {
            self.reconciler.pack();
            self.ledger.pack();
        }
    }
}

/// Takes the queued events, at most [`AT_ONCE`] and for [`TAKE_FOR`].
fn take_queued(events: &mut mpsc::Receiver<Event>, mut take: impl FnMut(Event)) {
    // The real clock: a paused one stands still while events are taken.
    let begun = std::time::Instant::now();
    for _ in 0..AT_ONCE {
        let Ok(event) = events.try_recv() else { break };
        take(event);
        if begun.elapsed() >= TAKE_FOR {
            break;
        }
    }
}

/// Waits for the next question; waits for ever once the audit has ended.
async fn next(questions: &mut Option<mpsc::Receiver<Question>>) -> Question {
    if let Some(receiver) = questions {
        if let Some(question) = receiver.recv().await {
            return question;
        }
        *questions = None;
    }
    std::future::pending().await
}

/// Returns the time from the end of a sync that took `took` to the next one: at most a fifth of the time is spent with syncs, so that
/// a large Service that changes all the time neither keeps a core busy nor fills `slots` with the extents of its last second.
fn pause(min_sync_period: Duration, took: Duration) -> Duration {
    // At least a millisecond, so that the task does not spin while the clock stands still.
    min_sync_period.max(Duration::from_millis(1)).max((4 * took).min(Duration::from_secs(1)))
}

/// Returns the kind of object that an event concerns; `None` for the host.
fn kind_of(event: &Event) -> Option<ObjectKind> {
    Some(match event {
        Event::Apply(Object::Service(_)) | Event::Delete(Key::Service(_)) | Event::Static { .. } => {
            ObjectKind::Service
        }
        Event::Apply(Object::Slice(_)) | Event::Delete(Key::Slice(_)) => ObjectKind::Slice,
        Event::Apply(Object::Node(_)) | Event::Delete(Key::Node(_)) => ObjectKind::Node,
        Event::Apply(Object::ServiceCidr(_)) | Event::Delete(Key::ServiceCidr(_)) => ObjectKind::ServiceCidr,
        Event::Reset(listing) => listing.kind(),
        Event::Host(_) => return None,
    })
}

#[cfg(test)]
mod tests;
