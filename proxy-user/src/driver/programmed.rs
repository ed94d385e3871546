//! The version of each Service and of its EndpointSlices that is programmed: its writes to the maps have succeeded.
//!
//! A sync plans every Service that has changed, so afterwards each Service without a failed write is programmed in the
//! version of the cluster state. A Service with a failed write keeps the version that was programmed before, until the writes
//! have succeeded.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::SystemTime;

use proxy_core::model::{Cluster, Event, Key, Object, ServiceName, SliceName, Version, pack};

/// The programmed version of one Service.
#[derive(Clone, Debug)]
pub struct ProgrammedService {
    /// The version of the Service.
    pub service: Version,
    /// The versions of its EndpointSlices.
    pub slices: Box<[(SliceName, Version)]>,
    /// Time at which these versions were programmed.
    pub since: SystemTime,
    /// There is no newer version that could not be programmed.
    pub is_current: bool,
    /// Number of its frontends, without those that other Services have.
    pub frontends: usize,
}

impl ProgrammedService {
    fn is(&self, other: &Self) -> bool {
        let same = |(one, other): (&(SliceName, Version), &(SliceName, Version))| {
            one.0 == other.0 && one.1.is(&other.1)
        };
        self.service.is(&other.service)
            && self.slices.len() == other.slices.len()
            && self.slices.iter().zip(&*other.slices).all(same)
    }
}

/// The programmed version of each Service, for other tasks to read. Clones share the same content.
#[derive(Clone, Debug, Default)]
pub struct Programmed(Arc<RwLock<BTreeMap<ServiceName, Arc<ProgrammedService>>>>);

impl Programmed {
    /// Returns the programmed version of a Service; `None` if it was never programmed, or its removal is complete.
    pub fn get(&self, name: &ServiceName) -> Option<Arc<ProgrammedService>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    /// Returns all programmed Services, sorted by name.
    pub fn all(&self) -> Vec<(ServiceName, Arc<ProgrammedService>)> {
        let book = self.0.read().unwrap_or_else(PoisonError::into_inner);
        book.iter().map(|(name, known)| (name.clone(), Arc::clone(known))).collect()
    }
}

/// Keeps [`Programmed`] up to date.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    programmed: Programmed,
    /// Services whose programmed version may differ from the recorded one.
    open: BTreeSet<ServiceName>,
    /// All Services are open.
    all_pending: bool,
}

impl Ledger {
    pub(super) fn programmed(&self) -> Programmed {
        self.programmed.clone()
    }

    /// Rebuilds the tree compactly, after many Services were added.
    pub(super) fn pack(&self) {
        pack(&mut self.programmed.0.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// Opens the Services that an event concerns; call it before `cluster` takes the event.
    pub(super) fn note(&mut self, cluster: &Cluster, event: &Event) {
        match event {
            Event::Apply(Object::Service(service)) => drop(self.open.insert(service.name.clone())),
            Event::Delete(Key::Service(name)) => drop(self.open.insert(name.clone())),
            Event::Apply(Object::Slice(slice)) => {
                self.open.insert(slice.service.clone());
                // The label with the name of its Service may have changed.
                self.open.extend(cluster.slice(&slice.name).map(|known| known.service.clone()));
            }
            Event::Delete(Key::Slice(name)) => {
                self.open.extend(cluster.slice(name).map(|known| known.service.clone()));
            }
            Event::Reset(_) | Event::Static { .. } => self.all_pending = true,
            Event::Apply(Object::Node(_) | Object::ServiceCidr(_))
            | Event::Delete(Key::Node(_) | Key::ServiceCidr(_))
            | Event::Host(_) => {}
        }
    }

    /// Opens the Services that have begun or ceased to fail, and all of them after a list.
    pub(super) fn open(&mut self, cluster: &Cluster, fates: BTreeSet<ServiceName>) {
        self.open.extend(fates);
        if std::mem::take(&mut self.all_pending) {
            let book = self.programmed.0.read().unwrap_or_else(PoisonError::into_inner);
            self.open.extend(book.keys().cloned());
            self.open.extend(cluster.services().map(|service| service.name.clone()));
        }
    }

    /// Marks the versions of open Services as not current after a sync in which entries of the node itself failed, on which
    /// any Service may depend.
    pub(super) fn doubt_open(&mut self) {
        let mut book = self.programmed.0.write().unwrap_or_else(PoisonError::into_inner);
        for name in &self.open {
            if let Some(before) = book.get_mut(name) {
                Arc::make_mut(before).is_current = false;
            }
        }
    }

    /// Updates the versions of the open Services after a sync. `is_failing`: whether a write of a Service has failed;
    /// `frontends`: the number of frontends of a Service.
    pub(super) fn record_sync(
        &mut self,
        cluster: &Cluster,
        is_failing: impl Fn(&ServiceName) -> bool,
        frontends: impl Fn(&ServiceName) -> usize,
        now: SystemTime,
    ) {
        let mut book = self.programmed.0.write().unwrap_or_else(PoisonError::into_inner);
        for name in &std::mem::take(&mut self.open) {
            let known = cluster.service(name).filter(|service| !service.is_foreign);
            if is_failing(name) {
                // The version that was programmed before may still be so, in part.
                if let Some(before) = book.get_mut(name) {
                    Arc::make_mut(before).is_current = false;
                }
            } else if let Some(service) = known {
                let slices =
                    cluster.slices(name).map(|slice| (slice.name.clone(), slice.version.clone())).collect();
                let new = ProgrammedService {
                    service: service.version.clone(),
                    slices,
                    since: now,
                    is_current: true,
                    frontends: frontends(name),
                };
                if new.frontends == 0 {
                    // It gets a frontend without an event when the Service that has it now is removed.
                    self.open.insert(name.clone());
                }
                match book.get_mut(name) {
                    Some(before) if before.is(&new) => {
                        let before = Arc::make_mut(before);
                        (before.is_current, before.frontends) = (true, new.frontends);
                    }
                    _ => drop(book.insert(name.clone(), Arc::new(new))),
                }
            } else {
                book.remove(name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use proxy_core::model::net::IpFamily;
    use proxy_core::model::{EndpointSlice, NodeView, Service};

    struct Fixture {
        cluster: Cluster,
        ledger: Ledger,
        now: SystemTime,
        /// Number of frontends of each Service.
        frontends: usize,
        /// The Services whose writes failed in the last sync.
        failing: BTreeSet<ServiceName>,
    }

    impl Fixture {
        fn new() -> Self {
            let cluster = Cluster::new(NodeView::new("node"));
            let failing = BTreeSet::new();
            Self { cluster, ledger: Ledger::default(), now: UNIX_EPOCH, frontends: 1, failing }
        }

        fn take(&mut self, event: Event) {
            self.ledger.note(&self.cluster, &event);
            self.cluster.apply(event);
        }

        /// Runs a sync one second later, in which the writes of these Services fail.
        fn sync(&mut self, failing: &[&str]) {
            self.now += Duration::from_secs(1);
            let failing: BTreeSet<_> =
                failing.iter().map(|name| ServiceName::new("default", *name)).collect();
            let fates = &std::mem::replace(&mut self.failing, failing.clone()) ^ &failing;
            self.ledger.open(&self.cluster, fates);
            let is_failing = |name: &ServiceName| failing.contains(name);
            self.ledger.record_sync(&self.cluster, is_failing, |_| self.frontends, self.now);
        }

        /// Runs a sync in which entries of the node fail.
        fn fail(&mut self) {
            self.ledger.open(&self.cluster, BTreeSet::new());
            self.ledger.doubt_open();
        }

        /// Returns the version of a Service, the versions of its slices, the seconds since the start, and whether it is
        /// current.
        fn of(&self, name: &str) -> Option<(String, Vec<String>, u64, bool)> {
            let known = self.ledger.programmed().get(&ServiceName::new("default", name))?;
            let slices =
                known.slices.iter().map(|(_, version)| version.resource_version.to_string()).collect();
            let since = known.since.duration_since(UNIX_EPOCH).unwrap().as_secs();
            Some((known.service.resource_version.to_string(), slices, since, known.is_current))
        }
    }

    fn version(number: u32) -> Version {
        Version { uid: "u".into(), resource_version: (*number.to_string()).into(), generation: None }
    }

    fn service(name: &str, number: u32) -> Event {
        let version = version(number);
        Event::Apply(Object::Service(Service { version, ..Service::new(ServiceName::new("default", name)) }))
    }

    fn slice(name: &str, of: &str, number: u32) -> Event {
        let (name, of) = (SliceName::new("default", name), ServiceName::new("default", of));
        let version = version(number);
        Event::Apply(Object::Slice(EndpointSlice { version, ..EndpointSlice::new(name, of, IpFamily::V4) }))
    }

    #[expect(clippy::unnecessary_wraps, reason = "it is compared with what may be there")]
    fn programmed(
        edition: u32,
        slices: &[u32],
        since: u64,
        is_current: bool,
    ) -> Option<(String, Vec<String>, u64, bool)> {
        Some((edition.to_string(), slices.iter().map(u32::to_string).collect(), since, is_current))
    }

    #[test]
    fn an_edition_is_programmed_after_the_sync_that_wrote_it() {
        let mut fixture = Fixture::new();
        fixture.take(service("web", 5));
        fixture.take(slice("web-1", "web", 6));
        assert_eq!(fixture.of("web"), None, "known is not programmed");
        fixture.sync(&[]);
        assert_eq!(fixture.of("web"), programmed(5, &[6], 1, true));
        // The same content in a newer version: there is nothing to write.
        fixture.take(slice("web-1", "web", 9));
        fixture.sync(&[]);
        assert_eq!(fixture.of("web"), programmed(5, &[9], 2, true));
        fixture.sync(&[]);
        assert_eq!(
            fixture.of("web"),
            programmed(5, &[9], 2, true),
            "a sync that changes nothing changes no time"
        );
    }

    #[test]
    fn service_with_a_failed_write_is_programmed_later() {
        let mut fixture = Fixture::new();
        fixture.take(service("web", 5));
        fixture.sync(&["web"]);
        assert_eq!(fixture.of("web"), None);
        fixture.sync(&[]);
        assert_eq!(fixture.of("web"), programmed(5, &[], 2, true), "the retry wrote it, without an event");
        fixture.take(service("web", 7));
        fixture.sync(&["web"]);
        assert_eq!(fixture.of("web"), programmed(5, &[], 2, false));
        fixture.sync(&[]);
        assert_eq!(fixture.of("web"), programmed(7, &[], 4, true));
        // A new plan of the same version may fail as well, for example if the node's zone changes.
        fixture.sync(&["web"]);
        assert_eq!(fixture.of("web"), programmed(7, &[], 4, false));
        fixture.sync(&[]);
        assert_eq!(fixture.of("web"), programmed(7, &[], 4, true));
    }

    #[test]
    fn service_that_keeps_failing_is_not_looked_at_again() {
        let mut fixture = Fixture::new();
        fixture.take(service("web", 5));
        fixture.sync(&["web"]);
        assert!(fixture.ledger.open.is_empty());
        fixture.sync(&["web"]);
        fixture.sync(&[]);
        assert_eq!(fixture.of("web"), programmed(5, &[], 3, true));
    }

    #[test]
    fn service_without_frontends_is_counted_again_at_each_sync() {
        let mut fixture = Fixture { frontends: 0, ..Fixture::new() };
        let frontends = |fixture: &Fixture| {
            fixture.ledger.programmed().get(&ServiceName::new("default", "web")).unwrap().frontends
        };
        fixture.take(service("web", 5));
        fixture.sync(&[]);
        assert_eq!((frontends(&fixture), fixture.of("web")), (0, programmed(5, &[], 1, true)));
        fixture.frontends = 1;
        fixture.sync(&[]);
        assert_eq!((frontends(&fixture), fixture.of("web")), (1, programmed(5, &[], 1, true)));
    }

    #[test]
    fn while_the_node_itself_fails_nothing_new_is_programmed() {
        let mut fixture = Fixture::new();
        fixture.take(service("web", 5));
        fixture.fail();
        assert_eq!(fixture.of("web"), None);
        fixture.sync(&[]);
        assert_eq!(fixture.of("web"), programmed(5, &[], 1, true));
    }

    #[test]
    fn service_that_changes_is_not_current_while_entries_of_the_node_fail() {
        let mut fixture = Fixture::new();
        fixture.take(service("web", 5));
        fixture.take(service("db", 5));
        fixture.sync(&[]);
        fixture.take(service("web", 7));
        fixture.fail();
        assert_eq!(fixture.of("web"), programmed(5, &[], 1, false));
        assert_eq!(fixture.of("db"), programmed(5, &[], 1, true), "it has not changed");
        fixture.sync(&[]);
        assert_eq!(fixture.of("web"), programmed(7, &[], 2, true));
    }

    #[test]
    fn slices_that_move_and_services_that_go() {
        let mut fixture = Fixture::new();
        fixture.take(service("web", 1));
        fixture.take(service("db", 2));
        fixture.take(slice("one", "web", 3));
        fixture.sync(&[]);
        fixture.take(slice("one", "db", 4));
        fixture.sync(&[]);
        assert_eq!(
            (fixture.of("web"), fixture.of("db")),
            (programmed(1, &[], 2, true), programmed(2, &[4], 2, true))
        );
        fixture.take(Event::Delete(Key::Slice(SliceName::new("default", "one"))));
        fixture.take(Event::Delete(Key::Service(ServiceName::new("default", "web"))));
        fixture.sync(&["web"]);
        assert_eq!(
            fixture.of("web"),
            programmed(1, &[], 2, false),
            "its removal failed: clients may still reach it"
        );
        assert_eq!(fixture.of("db"), programmed(2, &[], 3, true));
        fixture.sync(&[]);
        assert_eq!(fixture.of("web"), None);
    }

    #[test]
    fn list_replaces_all_versions_and_foreign_services_are_left_out() {
        use proxy_core::model::Listing;
        let mut fixture = Fixture::new();
        fixture.take(service("old", 1));
        fixture.sync(&[]);
        let named = |name| Service { version: version(8), ..Service::new(ServiceName::new("default", name)) };
        let foreign = Service { is_foreign: true, ..named("mesh") };
        fixture.take(Event::Reset(Listing::Services(vec![named("web"), foreign])));
        fixture.sync(&[]);
        assert_eq!(
            (fixture.of("old"), fixture.of("web"), fixture.of("mesh")),
            (None, programmed(8, &[], 2, true), None)
        );
    }
}
