//! The status of the driver for other tasks: a snapshot, published after every sync.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::sync::watch;
use tokio::time::Instant;

use super::histogram::{EventScale, Histogram, ProgrammingScale, SyncScale};
use proxy_common::node::DEVICE_UPLINK;
use proxy_core::model::Problem;
use proxy_core::model::ServiceName;
use proxy_core::model::net::IpFamily;
use proxy_core::plan::{HealthCheck, Scope};
use proxy_core::store::{Store, Table};
use proxy_core::sync::{Count, Operation, Reconciler};

/// The use of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableUse {
    /// The table.
    pub table: Table,
    /// Entries in use, quarantined ones included.
    pub used: u64,
    /// The most entries that it can hold.
    pub capacity: u64,
}

/// Numbers of changes of objects of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Changes since the start.
    pub total: u64,
    /// Changes that are not in the maps yet.
    pub pending: u64,
}

impl Changes {
    /// Adds the objects of an event. A list without objects is a change, too: it removes those that were known.
    pub(super) fn add(&mut self, objects: usize) {
        let objects = objects.max(1) as u64;
        self.total += objects;
        self.pending += objects;
    }
}

/// The count of one kind of operation on one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operations {
    /// The table.
    pub table: Table,
    /// The kind of operation.
    pub operation: Operation,
    /// How many succeeded and failed.
    pub count: Count,
}

/// Whether this node stays in the cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NodeFate {
    /// It stays, as far as the agent knows.
    #[default]
    Stays,
    /// It leaves the cluster, or has left it: load balancers should send it no more traffic.
    Leaves,
}

/// A snapshot of the driver. Subscribers wake up only if a value that is part of [`Status::news`] has changed.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own, which others wait for")]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Status {
    /// Services have been listed.
    pub services_listed: bool,
    /// EndpointSlices have been listed.
    pub slices_listed: bool,
    /// The first sync is done, even if writes have failed.
    pub synced: bool,
    /// After at least one sync, both families were programmed ([`Reconciler::failing_families`](super::Reconciler)).
    pub complete: bool,
    /// Time since which a family is not programmed; a family that is has no element.
    pub failing_since: BTreeMap<IpFamily, Instant>,
    /// Last time at which the driver took events or found nothing to do. It does so at least once in each sync period.
    pub progress: Option<Instant>,
    /// The static Services are programmed; this may be so before the API server's objects are listed.
    pub statics_synced: bool,
    /// Since when the driver has needed the addresses of all nodes, because a Service has or had DSR; `None`: it does not.
    pub needs_nodes: Option<Instant>,
    /// Whether this node stays in the cluster.
    pub node: NodeFate,
    /// Time at which the maps were last known to hold all changes of a family: the end of a sync or of a comparison, while the
    /// family does not fail.
    pub up_to_date: BTreeMap<IpFamily, SystemTime>,
    /// Arrival time of the oldest change of those that wait for a sync, or that waited for the last one.
    pub waiting_since: Option<Instant>,
    /// Arrival time of the newest change.
    pub last_queued: Option<SystemTime>,
    /// Durations of all syncs.
    pub sync_duration: Histogram<SyncScale>,
    /// Durations of full syncs: the first one, and those that repair external changes.
    pub full_sync_duration: Histogram<SyncScale>,
    /// Durations of the other syncs, which process changes only.
    pub partial_sync_duration: Histogram<SyncScale>,
    /// Times from the arrival of the oldest waiting change to the end of the sync that wrote it.
    pub event_to_map: Histogram<EventScale>,
    /// Times from the trigger of an endpoint change (an annotation of its slice) to the end of that sync, by family.
    pub network_programming: BTreeMap<IpFamily, Histogram<ProgrammingScale>>,
    /// Changes of Services.
    pub service_changes: Changes,
    /// Changes of EndpointSlices.
    pub slice_changes: Changes,
    /// Services with a plan; those of other proxies are not counted.
    pub services: usize,
    /// Service ports that have an id, quarantined ones included.
    pub ports: usize,
    /// Frontends in both tables; the entries of cluster addresses as such are not counted.
    pub frontends: usize,
    /// Active endpoints, counted once for each Service port.
    pub endpoints: usize,
    /// Frontends whose algorithm uses open connections.
    pub by_load: usize,
    /// UDP endpoints that were removed from their Service since the start.
    pub udp_left: u64,
    /// Endpoints that were marked, since the start, to have their connections reset.
    pub resets: u64,
    /// Services whose idle connections move to endpoints that joined lately.
    pub rebalances: usize,
    /// Slots in use, quarantined extents included.
    pub slots: usize,
    /// Use of the tables.
    pub tables: Vec<TableUse>,
    /// Operations on the tables since the start.
    pub operations: Vec<Operations>,
    /// Service ports with policy Local that have no endpoint on this node, but have some on other nodes, by scope and
    /// family.
    pub no_local: BTreeMap<(Scope, IpFamily), u64>,
    /// Indexes of the devices on which packets of other machines arrive.
    pub uplinks: BTreeSet<u32>,
    /// Health checks of Services, which load balancers send to this node.
    pub health_checks: Arc<BTreeMap<ServiceName, HealthCheck>>,
    /// Addresses on which health checks are answered; unspecified stands for all addresses of its family.
    pub listen: BTreeSet<IpAddr>,
    /// All problems of objects and of the node.
    pub problems: Arc<Vec<Problem>>,
    /// Those of `problems` that arose on this node: it could not program a valid object.
    pub failed: Arc<Vec<Problem>>,
    /// Service ports that are not programmed as desired; they are retried.
    pub failing: usize,
    /// Comparisons of the maps with the mirror.
    pub audits: u64,
    /// Comparisons that failed.
    pub audit_failures: u64,
    /// Entries found changed externally, and repaired.
    pub drift: u64,
}

impl Status {
    /// Returns the values whose changes wake the subscribers.
    fn news(&self) -> impl PartialEq + use<> {
        let facts = [
            self.services_listed,
            self.slices_listed,
            self.synced,
            self.complete,
            self.statics_synced,
            self.needs_nodes.is_some(),
            self.by_load > 0,
        ];
        let (health_checks, failed) = (Arc::clone(&self.health_checks), Arc::clone(&self.failed));
        (facts, self.node, self.udp_left, self.resets, health_checks, self.listen.clone(), failed)
    }

    /// Whether a change waits for a sync.
    pub fn is_pending(&self) -> bool {
        self.service_changes.pending + self.slice_changes.pending > 0
    }

    /// Records the families that are not programmed; the others are up to date, unless a change waits.
    pub(super) fn note_failing(&mut self, families: &BTreeSet<IpFamily>, now: SystemTime) {
        self.failing_since.retain(|family, _| families.contains(family));
        for family in families {
            self.failing_since.entry(*family).or_insert_with(Instant::now);
        }
        if self.synced && !self.is_pending() {
            let right = [IpFamily::V4, IpFamily::V6].into_iter().filter(|family| !families.contains(family));
            self.up_to_date.extend(right.map(|family| (family, now)));
        }
        self.complete |= self.synced && families.is_empty();
    }

    /// Updates the snapshot from the reconciler, without the problems.
    pub(super) fn describe<S: Store>(&mut self, reconciler: &Reconciler<S>) {
        let (applied, capacity) = (reconciler.applied(), reconciler.capacity());
        self.services = reconciler.services();
        self.ports = applied.ports.used();
        self.frontends = applied.services.len() - applied.addresses;
        self.endpoints = applied.active;
        self.by_load = applied.by_load;
        self.udp_left = reconciler.counters().udp_left();
        self.resets = reconciler.counters().resets();
        self.slots = applied.extents.slots_used() as usize;
        let uplinks = applied.node.devices.iter().filter(|(_, bits)| **bits & DEVICE_UPLINK != 0);
        self.uplinks = uplinks.map(|(index, _)| *index).collect();
        self.failing = reconciler.failing();
        self.no_local.clone_from(reconciler.no_local());
        self.health_checks = reconciler.health_checks();
        let each = |(table, operation, count)| Operations { table, operation, count };
        self.operations = reconciler.counters().iter().map(each).collect();
        let of = |table, used: usize, capacity: u32| TableUse {
            table,
            used: used as u64,
            capacity: capacity.into(),
        };
        self.tables = vec![
            of(Table::Services, applied.services.len() - applied.services6, capacity.frontends),
            of(Table::Services6, applied.services6, capacity.frontends),
            of(Table::Slots, self.slots, capacity.slots),
            of(Table::Maglev, applied.tables.slots_used() as usize - 1, capacity.maglev.saturating_sub(1)),
            // Both families share the ids.
            of(Table::Backends, applied.endpoints.used(), capacity.backends.saturating_sub(1)),
            of(Table::Names, self.ports, capacity.services.saturating_sub(1)),
        ];
    }
}

/// Changes the snapshot; wakes the subscribers if its [news](Status::news) have changed.
pub(super) fn publish(sender: &watch::Sender<Status>, change: impl FnOnce(&mut Status)) {
    sender.send_if_modified(|status| {
        let before = status.news();
        change(status);
        status.news() != before
    });
}

/// Returns problems by object and field, which identify a problem: messages contain numbers that change with every attempt.
fn by_place(problems: &[Problem]) -> BTreeMap<(&str, &str), &Problem> {
    // If two problems have the same object and field, the first one counts.
    problems.iter().rev().map(|problem| ((&*problem.object, &*problem.field), problem)).collect()
}

/// Returns the problems that began and the problems that ended between two lists.
fn changes<'a>(before: &'a [Problem], after: &'a [Problem]) -> (Vec<&'a Problem>, Vec<&'a Problem>) {
    let (before, after) = (by_place(before), by_place(after));
    let begun = after.iter().filter(|(place, _)| !before.contains_key(*place)).map(|(_, p)| *p).collect();
    let ended = before.iter().filter(|(place, _)| !after.contains_key(*place)).map(|(_, p)| *p).collect();
    (begun, ended)
}

/// Returns the problems that began between two lists.
pub fn problems_begun<'a>(before: &'a [Problem], after: &'a [Problem]) -> Vec<&'a Problem> {
    changes(before, after).0
}

/// Logs the problems that began or ended.
pub(super) fn log_problems(before: &[Problem], after: &[Problem]) {
    if before == after {
        return;
    }
    let (begun, ended) = changes(before, after);
    for Problem { object, field, message } in begun {
        tracing::warn!(object, field, problem = message, "a part of an object is not programmed");
    }
    for Problem { object, field, .. } in ended {
        tracing::info!(object, field, "problem solved");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(object: &str, field: &str, message: &str) -> Problem {
        Problem { object: object.into(), field: field.into(), message: message.into() }
    }

    #[test]
    fn problem_is_logged_when_it_begins_and_when_it_ends() {
        let one = problem("Service default/a", "spec.ports", "no room for 5 slots");
        let other = problem("Service default/b", "spec.ports", "no room for 5 slots");
        let (both, first) = (vec![one.clone(), other.clone()], vec![one.clone()]);
        assert_eq!(changes(&[], &both), (vec![&one, &other], vec![]));
        assert_eq!(changes(&both, &both), (vec![], vec![]));
        assert_eq!(changes(&both, &first), (vec![], vec![&other]));
        assert_eq!(changes(&first, &[]), (vec![], vec![&one]));
    }

    #[test]
    fn counters_alone_do_not_notify_receivers() {
        let (sender, mut follows) = watch::channel(Status::default());
        publish(&sender, |status| {
            status.service_changes.add(1);
            status.services = 7;
            status.problems = vec![problem("Service default/a", "spec.ports", "no room")].into();
        });
        assert!(!follows.has_changed().unwrap());
        assert_eq!(follows.borrow().services, 7, "they are there all the same");
        let news: [fn(&mut Status); 6] = [
            |status| status.synced = true,
            |status| status.udp_left += 1,
            |status| status.resets += 1,
            |status| status.by_load = 1,
            |status| status.failed = Arc::new(vec![problem("Service default/a", "spec.ports", "no room")]),
            |status| {
                Arc::make_mut(&mut status.health_checks)
                    .extend([(ServiceName::new("a", "b"), HealthCheck { port: 1, local: BTreeMap::new() })]);
            },
        ];
        for change in news {
            publish(&sender, change);
            assert!(follows.has_changed().unwrap());
            follows.mark_unchanged();
        }
    }

    #[test]
    fn other_figures_are_the_same_problem_and_another_field_is_another() {
        let before = [problem("Service default/a", "spec.ports", "no room for 5 slots: 3 are free")];
        let after = [
            problem("Service default/a", "spec.ports", "no room for 5 slots: 2 are free"),
            problem("Service default/a", "spec.clusterIP", "x"),
        ];
        assert_eq!(changes(&before, &after), (vec![&after[1]], vec![]));
    }
}
