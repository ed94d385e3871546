//! What others may ask a reconciler.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::applied::Applied;
use super::counters::Counters;
use super::reconcile::Reconciler;
use crate::maps::{Capacity, Store};
use crate::model::ServiceName;
use crate::model::net::IpFamily;
use crate::plan::{HealthCheck, PortId, Problem, Scope, ServicePlan};

impl<S: Store> Reconciler<S> {
    /// When [`Reconciler::sync`] should be called even if nothing changes.
    pub fn wake(&mut self) -> Option<Instant> {
        let retries = self.failures.values().map(|failure| failure.retry).min();
        let mut rests = [
            self.applied.extents.next_rested(),
            self.applied.tables.next_rested(),
            self.applied.drains.next_over(),
            self.applied.endpoints.next_rested(),
            self.applied.ports.next_rested(),
            self.applied.filter.next_rested().map(|at| self.next_release.map_or(at, |next| at.max(next))),
        ];
        if let Some((_, retry)) = self.cleanup {
            for rest in &mut rests {
                *rest = rest.map(|rest| rest.max(retry));
            }
            rests[0] = Some(rests[0].map_or(retry, |rest| rest.min(retry)));
        }
        let others = [retries, self.addresses.retry(), self.node.retry(), self.node.next_snat_check()];
        rests.into_iter().chain(others).flatten().min()
    }

    /// When [`Reconciler::sync_early`] should be called even if nothing changes.
    pub fn early_wake(&self) -> Option<Instant> {
        let retries = self.failures.values().map(|failure| failure.retry);
        retries.chain(self.addresses.retry()).chain(self.node.retry()).min()
    }

    /// Whether the next sync looks at everything.
    pub fn is_full_due(&self) -> bool {
        self.full
    }

    /// What is wrong with which object, in their order.
    pub fn problems(&self) -> Vec<Problem> {
        let mut all: Vec<Problem> = self.plan_problems.values().flatten().cloned().collect();
        all.extend(self.failures.values().map(|failure| failure.problem.clone()));
        all.extend(self.claims.problems());
        all.extend(self.addresses.problem());
        all.extend(self.node.problems());
        all.sort();
        all.dedup();
        all
    }

    /// What this node could not do for a Service, in the order of ports: part of [`Reconciler::problems`]. The others are
    /// in the objects, and every node finds them.
    pub fn failed(&self) -> Vec<Problem> {
        self.failures.values().map(|failure| failure.problem.clone()).collect()
    }

    /// Service ports that are silent to clients of a scope, though another node could serve them.
    pub fn no_local(&self) -> &BTreeMap<(Scope, IpFamily), u64> {
        &self.no_local
    }

    /// What load balancers ask this node.
    pub fn health_checks(&self) -> &BTreeMap<ServiceName, HealthCheck> {
        &self.health_checks
    }

    /// Families of which something is not in the maps that the cluster asks for. What fails for the node fails for both.
    /// Entries that only refuse clients (addresses without a port) do not count: they make room for frontends.
    pub fn failing_families(&self) -> BTreeSet<IpFamily> {
        if self.node.retry().is_some() {
            return BTreeSet::from([IpFamily::V4, IpFamily::V6]);
        }
        self.failures.keys().map(|port| port.family).collect()
    }

    /// Services of which a port is not in the maps as it should be; `None`: entries of the node itself are not, on which any
    /// Service may depend.
    pub fn failing_services(&self) -> Option<BTreeSet<ServiceName>> {
        let name = |port: &PortId| ServiceName { namespace: port.namespace.clone(), name: port.name.clone() };
        self.node.retry().is_none().then(|| self.failures.keys().map(name).collect())
    }

    /// Service ports that are not in the maps as they should be.
    pub fn failing(&self) -> usize {
        self.failures.len()
    }

    /// Services that have a plan; those of other proxies are not counted.
    pub fn services(&self) -> usize {
        self.desired.len() - self.addresses.foreign()
    }

    /// What a Service should look like.
    pub fn plan(&self, name: &ServiceName) -> Option<&ServicePlan> {
        self.desired.get(name)
    }

    /// What the tables hold as far as we know.
    pub fn applied(&self) -> &Applied {
        &self.applied
    }

    /// Operations done and failed so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// How much the tables take.
    pub fn capacity(&self) -> Capacity {
        self.store.capacity()
    }

    /// The tables themselves.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// The same, to be changed.
    pub fn store_mut(&mut self) -> &mut S {
        &mut self.store
    }

    /// The tables alone.
    pub fn into_store(self) -> S {
        self.store
    }
}
