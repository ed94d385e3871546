//! Compares the reconciler with a naive oracle, at every state that a reader of the maps could see.

mod audit;
mod capacity;
mod cases;
mod connections;
mod drain;
mod node;
mod properties;
mod removal;
mod restart;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::services::Share;
use super::{QuarantinePeriods, Reconciler};
use crate::model::ServiceName;
use crate::plan::{NodePlan, ServicePlan};
use crate::store::{Capacity, Contents, Faults, FaultyStore, MemoryStore, Store};
use crate::testing::generator::Moment;
use crate::testing::oracle::{Guard, check, guard};
use connections::Connections;
use node::check_node;
use proptest::prelude::ProptestConfig;

/// Small enough to be copied often, large enough for every plan of `generator`.
pub const ROOMY: Capacity =
    Capacity { frontends: 64, slots: 512, maglev: 200_000, backends: 256, services: 64, ranges: 64 };

/// Runs a quarter of the configured cases, because a history has many states and each is checked.
pub fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    ProptestConfig { cases: default.cases.div_ceil(4), ..default }
}

/// A reconciler on tables in memory, with a guard on every step and its own clock.
pub struct Fixture {
    pub reconciler: Reconciler<FaultyStore<MemoryStore>>,
    pub plans: BTreeMap<ServiceName, ServicePlan>,
    /// The last plan of the node.
    pub node: Option<NodePlan>,
    pub now: Instant,
    /// Whether the last sync may have changed problems.
    pub has_new_problems: bool,
    guard: Guard,
}

impl Fixture {
    pub fn new(capacity: Capacity) -> Self {
        Self::over(MemoryStore::new(capacity))
    }

    pub fn over(mut store: MemoryStore) -> Self {
        let guard = guard(&mut store);
        let now = Instant::now();
        let store = FaultyStore::new(store, Faults::default());
        let reconciler = Reconciler::recover(store, QuarantinePeriods::default(), now).unwrap();
        Self { reconciler, plans: BTreeMap::new(), node: None, now, has_new_problems: false, guard }
    }

    /// Gives the reconciler flows that the test sets.
    pub fn connections(&mut self) -> Connections {
        let connections = Connections::default();
        self.reconciler.releases.flows = Box::new(connections.clone());
        connections
    }

    /// Starts another agent on the same tables, which has listed no objects yet.
    pub fn restarted(self) -> Self {
        let store = self.reconciler.into_store().into_inner();
        let (capacity, contents) = (store.capacity(), store.contents().clone());
        let mut fixture = Self {
            plans: self.plans,
            node: self.node,
            ..Self::over(MemoryStore::with_contents(capacity, contents))
        };
        if let Some(node) = &fixture.node {
            fixture.reconciler.set_node(node);
        }
        fixture
    }

    pub fn contents(&self) -> &Contents {
        self.reconciler.store().inner().contents()
    }

    pub fn contents_mut(&mut self) -> &mut Contents {
        self.reconciler.store_mut().inner_mut().contents_mut()
    }

    /// Turns the guard off, because the tables were damaged or are too small: only the final state is checked.
    pub fn trust_nothing(&mut self) {
        self.guard.lock().unwrap().off = true;
    }

    pub fn faults(&mut self, faults: Faults) {
        self.guard.lock().unwrap().may_fail = true;
        self.reconciler.store_mut().set_faults(faults);
    }

    /// Returns the number of steps so far that a reader could distinguish.
    pub fn steps(&self) -> u64 {
        self.reconciler.store().inner().steps()
    }

    pub fn wait(&mut self, time: Duration) {
        self.now += time;
    }

    /// Runs one sync with these changes; returns its number of steps.
    pub fn change(&mut self, changes: impl IntoIterator<Item = (ServiceName, Option<ServicePlan>)>) -> u64 {
        let changes: BTreeMap<_, _> = changes.into_iter().collect();
        for (name, plan) in &changes {
            match plan {
                Some(plan) => self.plans.insert(name.clone(), plan.clone()),
                None => self.plans.remove(name),
            };
        }
        self.sync(changes)
    }

    /// Runs one sync with all changes of a moment of a history.
    pub fn moment(&mut self, (changes, node, pause): Moment) {
        self.wait(Duration::from_millis(pause));
        if let Some(node) = node {
            self.reconciler.set_node(&node);
            self.node = Some(node);
        }
        self.change(changes);
    }

    /// Runs one sync with the unchanged plan of every Service.
    pub fn tell_all(&mut self) -> u64 {
        self.sync(self.plans.iter().map(|(name, plan)| (name.clone(), Some(plan.clone()))).collect())
    }

    fn sync(&mut self, changes: BTreeMap<ServiceName, Option<ServicePlan>>) -> u64 {
        let before = self.steps();
        let contents = self.contents().clone();
        self.guard.lock().unwrap().begin(&contents, &self.plans);
        let problems = self.reconciler.problems();
        self.reconciler.sync(self.now, changes);
        self.has_new_problems = self.reconciler.has_new_problems();
        assert!(
            self.has_new_problems || self.reconciler.problems() == problems,
            "the flag of changes is missing"
        );
        let steps = self.steps() - before;
        let wake = self.reconciler.wake();
        assert!(
            steps > 0 || wake.is_none_or(|at| at > self.now),
            "a sync without effect is due again at once"
        );
        steps
    }

    /// Runs one sync without changes.
    pub fn again(&mut self) -> u64 {
        self.sync(BTreeMap::new())
    }

    /// Asserts that the tables hold exactly what the plans ask for.
    #[track_caller]
    pub fn assert_right(&self) {
        check(self.contents(), &self.plans);
        check_node(self.contents(), self.node.as_ref());
        let mut ports = BTreeMap::<_, Share>::new();
        for port in self.plans.values().flat_map(|plan| plan.ports.keys()) {
            ports.entry((port.family, port.namespace.clone())).or_default().all += 1;
        }
        assert_eq!(self.reconciler.services.ports, ports);
    }
}
