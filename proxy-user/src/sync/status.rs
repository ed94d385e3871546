//! What others may know of the driver: a snapshot, published after every sync.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::sync::watch;
use tokio::time::Instant;

use super::histogram::{EventScale, Histogram, ProgrammingScale, SyncScale};
use super::reconcile::Reconciler;
use super::writer::{Count, Operation};
use crate::maps::{Store, Table};
use crate::model::Problem;
use crate::model::ServiceName;
use crate::model::net::IpFamily;
use crate::plan::{HealthCheck, Scope};

/// How full a table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableUse {
    /// Which one.
    pub table: Table,
    /// Entries in use, quarantined ones included.
    pub used: u64,
    /// Entries it takes.
    pub capacity: u64,
}

/// Changes of objects of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Since the start.
    pub total: u64,
    /// Not in the maps yet.
    pub pending: u64,
}

impl Changes {
    pub(super) fn add(&mut self) {
        self.total += 1;
        self.pending += 1;
    }
}

/// Operations on one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operations {
    /// Which table.
    pub table: Table,
    /// Which kind.
    pub operation: Operation,
    /// How many.
    pub count: Count,
}

/// What becomes of this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NodeFate {
    /// It stays, as far as we know.
    #[default]
    Stays,
    /// It leaves the cluster, or has left it: traffic should not be sent to it any more.
    Leaves,
}

/// A snapshot of the driver. Figures are there to be read; only what is part of `News` wakes those that follow it.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own, which others wait for")]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Status {
    /// Services have been listed.
    pub services_listed: bool,
    /// EndpointSlices have been listed.
    pub slices_listed: bool,
    /// The first sync is done, whatever came of it.
    pub synced: bool,
    /// Since then there was a sync after which all that was listed was in the maps. Objects that cannot be used do not count.
    pub complete: bool,
    /// Since when not everything of a family could be programmed; the family is not here while everything is.
    pub failing_since: BTreeMap<IpFamily, SystemTime>,
    /// When the driver last took events in or found nothing to do. It does so at least once in each sync period.
    pub progress: Option<Instant>,
    /// The maps say what the folder beside the API server says, which may come before all else.
    pub statics_synced: bool,
    /// The addresses of all nodes are needed: a Service has or had DSR.
    pub needs_nodes: bool,
    /// What becomes of this node.
    pub node: NodeFate,
    /// When the last sync ended.
    pub last_sync: Option<SystemTime>,
    /// When the first change that is or was waiting for a sync came in.
    pub last_queued: Option<SystemTime>,
    /// How long syncs took.
    pub sync_duration: Histogram<SyncScale>,
    /// Those of them that looked at everything: the first one, and those that repair what was changed externally.
    pub full_sync_duration: Histogram<SyncScale>,
    /// The others, which looked at what had changed.
    pub partial_sync_duration: Histogram<SyncScale>,
    /// From the arrival of a change to the end of the sync that brought it into the maps.
    pub event_to_map: Histogram<EventScale>,
    /// From what happened to an endpoint (its slice tells when) to the end of that sync, by family.
    pub network_programming: BTreeMap<IpFamily, Histogram<ProgrammingScale>>,
    /// Changes of Services.
    pub service_changes: Changes,
    /// Changes of EndpointSlices.
    pub slice_changes: Changes,
    /// Services that are programmed.
    pub services: usize,
    /// Service ports that have an id, quarantined ones included.
    pub ports: usize,
    /// Frontends in both tables; the entries of cluster addresses as such are not counted.
    pub frontends: usize,
    /// Endpoints that serve, counted once for each Service port.
    pub endpoints: usize,
    /// Frontends that are spread by open connections.
    pub by_load: usize,
    /// UDP endpoints that left their Service since the start.
    pub udp_left: u64,
    /// Endpoints to which connections were to be reset since the start.
    pub resets: u64,
    /// Slots in use, those of old extents included.
    pub slots: usize,
    /// How full the tables are.
    pub tables: Vec<TableUse>,
    /// Operations on the tables since the start.
    pub operations: Vec<Operations>,
    /// Service ports whose policy keeps clients of a scope on this node, where they have no endpoint though they
    /// have some elsewhere, by scope and family.
    pub no_local: BTreeMap<(Scope, IpFamily), u64>,
    /// What load balancers ask this node about Services.
    pub health_checks: Arc<BTreeMap<ServiceName, HealthCheck>>,
    /// Where that is answered; unspecified stands for all addresses of its family.
    pub listen: BTreeSet<IpAddr>,
    /// What is wrong with which object.
    pub problems: Vec<Problem>,
    /// Those of them that are this node's: it could not do what the objects ask for.
    pub failed: Vec<Problem>,
    /// Service ports that are not in the maps as they should be; they are tried again.
    pub failing: usize,
    /// Comparisons of the tables with what was written to them.
    pub audits: u64,
    /// Those that could not be made.
    pub audit_failures: u64,
    /// Entries found changed externally, and repaired.
    pub drift: u64,
}

/// What others wait for.
#[derive(Debug, PartialEq)]
struct News {
    facts: [bool; 7],
    node: NodeFate,
    udp_left: u64,
    resets: u64,
    health_checks: Arc<BTreeMap<ServiceName, HealthCheck>>,
    listen: BTreeSet<IpAddr>,
    failed: Vec<Problem>,
}

impl Status {
    /// What others wait for, as it is now.
    fn news(&self) -> News {
        News {
            facts: [
                self.services_listed,
                self.slices_listed,
                self.synced,
                self.complete,
                self.statics_synced,
                self.needs_nodes,
                self.by_load > 0,
            ],
            node: self.node,
            udp_left: self.udp_left,
            resets: self.resets,
            health_checks: Arc::clone(&self.health_checks),
            listen: self.listen.clone(),
            failed: self.failed.clone(),
        }
    }

    /// Notes after a sync which families could not be programmed as a whole.
    pub(super) fn note_failing(&mut self, families: &BTreeSet<IpFamily>, now: SystemTime) {
        self.failing_since.retain(|family, _| families.contains(family));
        for family in families {
            self.failing_since.entry(*family).or_insert(now);
        }
        self.complete |= self.synced && families.is_empty();
    }

    /// Takes over what the tables hold.
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
        self.failing = reconciler.failing();
        self.problems = reconciler.problems();
        self.failed = reconciler.failed();
        self.no_local.clone_from(reconciler.no_local());
        self.health_checks = Arc::clone(reconciler.health_checks());
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
            // Ids are shared by the two families.
            of(Table::Backends, applied.endpoints.used(), capacity.backends.saturating_sub(1)),
            of(Table::Names, self.ports, capacity.services.saturating_sub(1)),
        ];
    }
}

/// Changes the snapshot; those that follow it wake up where it has news.
pub(super) fn publish(sender: &watch::Sender<Status>, change: impl FnOnce(&mut Status)) {
    sender.send_if_modified(|status| {
        let before = status.news();
        change(status);
        status.news() != before
    });
}

/// What makes two problems the same: messages hold figures that change with every attempt.
fn by_place(problems: &[Problem]) -> BTreeMap<(&str, &str), &Problem> {
    // The first of a place counts.
    problems.iter().rev().map(|problem| ((&*problem.object, &*problem.field), problem)).collect()
}

/// Problems that began, and problems that ended, from one list to the next.
fn changes<'a>(before: &'a [Problem], after: &'a [Problem]) -> (Vec<&'a Problem>, Vec<&'a Problem>) {
    let (before, after) = (by_place(before), by_place(after));
    let begun = after.iter().filter(|(place, _)| !before.contains_key(*place)).map(|(_, p)| *p).collect();
    let ended = before.iter().filter(|(place, _)| !after.contains_key(*place)).map(|(_, p)| *p).collect();
    (begun, ended)
}

/// Problems that began, from one list to the next.
pub fn problems_begun<'a>(before: &'a [Problem], after: &'a [Problem]) -> Vec<&'a Problem> {
    changes(before, after).0
}

/// Logs what changed.
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
    fn a_problem_is_told_when_it_begins_and_when_it_ends() {
        let one = problem("Service default/a", "spec.ports", "no room for 5 slots");
        let other = problem("Service default/b", "spec.ports", "no room for 5 slots");
        let (both, first) = (vec![one.clone(), other.clone()], vec![one.clone()]);
        assert_eq!(changes(&[], &both), (vec![&one, &other], vec![]));
        assert_eq!(changes(&both, &both), (vec![], vec![]));
        assert_eq!(changes(&both, &first), (vec![], vec![&other]));
        assert_eq!(changes(&first, &[]), (vec![], vec![&one]));
    }

    #[test]
    fn figures_wake_no_task_and_news_do() {
        let (sender, mut follows) = watch::channel(Status::default());
        publish(&sender, |status| {
            status.service_changes.add();
            status.services = 7;
            status.problems = vec![problem("Service default/a", "spec.ports", "no room")];
        });
        assert!(!follows.has_changed().unwrap());
        assert_eq!(follows.borrow().services, 7, "they are there all the same");
        let news: [fn(&mut Status); 6] = [
            |status| status.synced = true,
            |status| status.udp_left += 1,
            |status| status.resets += 1,
            |status| status.by_load = 1,
            |status| status.failed = vec![problem("Service default/a", "spec.ports", "no room")],
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
