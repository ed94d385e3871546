//! The driver under a paused clock, which advances only when all tasks wait.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proxy_common::service::{KIND_ADDRESS, KIND_CLUSTER_IP, KIND_UNMANAGED};
use rstest::rstest;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

mod early;
mod gate;
mod health;
mod joins;
mod memory;
mod recent;
mod rollouts;
mod slow_start;
mod tenants;

use super::{Driver, DriverSettings, pause, take_queued};
use crate::driver::{NodeFate, Status};
use proxy_core::model::net::{IpFamily, Protocol};
use proxy_core::model::{
    Endpoint, EndpointPort, EndpointSlice, Event, HostDevice, HostView, Key, Listing, NodeView, Object,
    Service, ServiceCidr, ServiceName, ServicePort, SliceName, TrafficPolicy,
};
use proxy_core::plan::{PlanSettings, Scope};
use proxy_core::store::{BatchError, Capacity, Contents, Cursor, MapError, MemoryStore, Store, Table, Write};
use proxy_core::testing::generator;

/// Tables that a test can read while a driver uses them, and the driver's operations on them.
#[derive(Clone)]
struct Shared(Arc<Mutex<MemoryStore>>, Arc<Mutex<Vec<Done>>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Done {
    /// All tables were read.
    All,
    /// This number of entries was read.
    Piece(usize),
    Write,
}

impl Shared {
    fn new() -> Self {
        Self(Arc::new(Mutex::new(MemoryStore::new(Capacity::default()))), Arc::default())
    }

    fn note(&self, done: Done) {
        self.1.lock().unwrap().push(done);
    }

    fn note_piece(&self, found: &Contents) {
        let Contents { services, slots, backends, backends6, prefilter, names, source_ranges, node, maglev } =
            found;
        let node = node.rows.len() + node.addresses.len() + node.devices.len();
        let lists = slots.len() + prefilter.len() + maglev.len();
        let rows = services.len() + backends.len() + backends6.len() + names.len() + source_ranges.len();
        self.note(Done::Piece(lists + rows + node));
    }
}

impl Store for Shared {
    fn capacity(&self) -> Capacity {
        self.0.lock().unwrap().capacity()
    }

    fn read(&mut self, backends_below: u32) -> Result<Contents, MapError> {
        self.note(Done::All);
        self.0.lock().unwrap().read(backends_below)
    }

    fn read_range(&mut self, table: Table, range: Range<u32>) -> Result<Contents, MapError> {
        let found = self.0.lock().unwrap().read_range(table, range)?;
        self.note_piece(&found);
        Ok(found)
    }

    fn walk(
        &mut self,
        table: Table,
        from: Option<Cursor>,
        count: u32,
    ) -> Result<(Contents, Option<Cursor>), MapError> {
        let (found, next) = self.0.lock().unwrap().walk(table, from, count)?;
        self.note_piece(&found);
        Ok((found, next))
    }

    fn write(&mut self, writes: &[Write]) -> Result<(), BatchError> {
        self.note(Done::Write);
        self.0.lock().unwrap().write(writes)
    }
}

struct Running {
    events: mpsc::Sender<Event>,
    status: watch::Receiver<Status>,
    tables: Shared,
    task: JoinHandle<Shared>,
}

impl Running {
    fn start(tables: Shared) -> Self {
        Self::with(tables, DriverSettings::default())
    }

    fn with(tables: Shared, settings: DriverSettings) -> Self {
        Self::run(tables, settings, |driver| driver)
    }

    fn with_node_path(is_translated: impl FnMut(IpAddr) -> bool + Send + 'static) -> Self {
        Self::run(Shared::new(), DriverSettings::default(), |driver| {
            driver.with_node_path(Box::new(is_translated))
        })
    }

    fn with_questions(
        tables: Shared,
        settings: DriverSettings,
        questions: mpsc::Receiver<super::Question>,
    ) -> Self {
        Self::run(tables, settings, |driver| driver.with_questions(questions))
    }

    fn run(
        tables: Shared,
        settings: DriverSettings,
        change: impl FnOnce(Driver<Shared>) -> Driver<Shared>,
    ) -> Self {
        let driver = change(Driver::new(tables.clone(), NodeView::new("node"), settings).unwrap());
        let (events, receiver) = mpsc::channel(1024);
        let status = driver.status();
        Self { events, status, tables, task: tokio::spawn(driver.run(receiver)) }
    }

    fn new() -> Self {
        Self::start(Shared::new())
    }

    /// Starts a driver with 250 Services of 20 endpoints each; also returns its operations from now on.
    async fn with_many() -> (Self, Arc<Mutex<Vec<Done>>>) {
        // With ejection, a Service whose endpoints have changed is written once more a minute later.
        let plan = PlanSettings { no_ejection: true, ..PlanSettings::default() };
        let driver = Self::with(Shared::new(), DriverSettings { plan, ..DriverSettings::default() });
        let names: Vec<_> = (0..250).map(|number| format!("s{number}")).collect();
        let services = names.iter().zip(0..).map(|(name, at)| service(name, at)).collect();
        driver.list(services, names.iter().map(|name| slice(name, 0..20)).collect()).await;
        pass(Duration::from_secs(5)).await;
        let done = Arc::clone(&driver.tables.1);
        done.lock().unwrap().clear();
        (driver, done)
    }

    async fn send(&self, event: Event) {
        self.events.send(event).await.unwrap();
    }

    async fn list(&self, services: Vec<Service>, slices: Vec<EndpointSlice>) {
        self.send(Event::Reset(Listing::Services(services))).await;
        self.send(Event::Reset(Listing::Slices(slices))).await;
    }

    /// Returns the number of slots of each frontend, by address.
    fn seen(&self) -> BTreeMap<IpAddr, usize> {
        let store = self.tables.0.lock().unwrap();
        store.contents().services.iter().map(|(key, entry)| (key.addr, entry.slot_count as usize)).collect()
    }

    fn steps(&self) -> u64 {
        self.tables.0.lock().unwrap().steps()
    }
}

async fn pass(time: Duration) {
    tokio::time::sleep(time).await;
}

const MOMENT: Duration = Duration::from_millis(4);

#[tokio::test(start_paused = true)]
async fn nothing_is_written_before_everything_was_listed() {
    let driver = Running::new();
    driver.send(Event::Apply(Object::Service(service("a", 1)))).await;
    driver.send(Event::Reset(Listing::Services(vec![service("a", 1)]))).await;
    pass(Duration::from_mins(5)).await;
    assert_eq!(driver.steps(), 0);
    let status = driver.status.borrow().clone();
    assert!(status.services_listed && !status.slices_listed && !status.synced);
    driver.send(Event::Reset(Listing::Slices(vec![slice("a", 1..4)]))).await;
    pass(MOMENT).await;
    assert_eq!(driver.seen(), BTreeMap::from([(vip(1), 3)]));
    assert!(driver.status.borrow().synced);
}

#[tokio::test(start_paused = true)]
async fn a_change_that_comes_alone_is_in_the_maps_at_once_and_a_burst_is_one_sync() {
    let driver = Running::new();
    driver.list(vec![service("a", 1)], vec![slice("a", 1..4)]).await;
    pass(Duration::from_secs(5)).await;
    let before = driver.status.borrow().clone();
    driver.send(Event::Apply(Object::Slice(slice("a", 1..6)))).await;
    pass(MOMENT).await;
    assert_eq!(driver.seen(), BTreeMap::from([(vip(1), 5)]));
    let after = driver.status.borrow().clone();
    assert_eq!((after.endpoints, after.frontends, after.services), (5, 1, 1));
    assert_eq!(after.event_to_map.count(), before.event_to_map.count() + 1);
    assert_eq!((after.slice_changes.total, after.slice_changes.pending), (2, 0));
    pass(Duration::from_secs(5)).await;
    let before = driver.status.borrow().sync_duration.count();
    for last in 2..100 {
        driver.send(Event::Apply(Object::Slice(slice("a", 1..last)))).await;
    }
    pass(Duration::from_millis(10)).await;
    assert!(driver.status.borrow().sync_duration.count() <= before + 3);
    assert_eq!(driver.seen(), BTreeMap::from([(vip(1), 98)]));
}

#[tokio::test(start_paused = true)]
async fn new_address_soon_after_a_sync_is_in_the_maps_after_the_pause() {
    let driver = Running::new();
    driver.send(machine(&[])).await;
    driver.list(vec![service("a", 1)], vec![slice("a", 1..4)]).await;
    pass(Duration::from_secs(5)).await;
    driver.send(Event::Apply(Object::Slice(slice("a", 1..6)))).await;
    pass(Duration::from_millis(1)).await;
    driver.send(machine(&[vip(9)])).await;
    pass(Duration::from_millis(20)).await;
    assert!(driver.tables.0.lock().unwrap().contents().node.addresses.contains_key(&vip(9)));
}

#[test]
fn a_source_that_never_runs_dry_is_left_for_a_sync() {
    let (source, mut events) = mpsc::channel(1);
    source.try_send(Event::Delete(Key::Node("other".to_owned()))).unwrap();
    let mut taken = 0;
    take_queued(&mut events, |event| {
        taken += 1;
        std::thread::sleep(Duration::from_millis(1));
        // Ends a loop without a bound.
        if taken < 1000 {
            source.try_send(event).unwrap();
        }
    });
    assert!((1..100).contains(&taken), "{taken}");
}

#[tokio::test(start_paused = true)]
async fn quarantined_entries_are_freed_without_any_event() {
    let driver = Running::new();
    driver.list(vec![service("a", 1), service("b", 2)], vec![slice("a", 1..4)]).await;
    driver.send(Event::Delete(Key::Service(ServiceName::new("default", "a")))).await;
    pass(Duration::from_millis(100)).await;
    assert_eq!(driver.seen(), BTreeMap::from([(vip(2), 0)]));
    pass(Duration::from_mins(2)).await;
    {
        let store = driver.tables.0.lock().unwrap();
        assert!(store.contents().backends.is_empty());
        assert_eq!(store.contents().names.len(), 1);
    }
    let syncs = driver.status.borrow().sync_duration.count();
    assert!(syncs < 12, "{syncs} syncs in two minutes");
}

#[tokio::test(start_paused = true)]
async fn drift_is_repaired_within_a_sync_period_and_counted() {
    let driver = Running::new();
    driver.list(vec![service("a", 1)], vec![slice("a", 1..4)]).await;
    pass(Duration::from_secs(5)).await;
    driver.tables.0.lock().unwrap().contents_mut().services.clear();
    pass(Duration::from_secs(30)).await;
    assert_eq!(driver.seen(), BTreeMap::from([(vip(1), 3)]));
    let status = driver.status.borrow().clone();
    // The frontend, and the entry of its address.
    assert_eq!((status.drift, status.audits, status.audit_failures), (2, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_change_waits_for_one_piece_of_a_comparison_at_most() {
    let (driver, done) = Running::with_many().await;
    for change in 0..8 {
        // Wait for a position in the comparison, each time a bit further.
        let before = driver.status.borrow().audits;
        while done.lock().unwrap().len() < 1 + 4 * change {
            pass(Duration::from_millis(1)).await;
        }
        let begun = done.lock().unwrap().len();
        driver.send(Event::Apply(Object::Slice(slice("s7", 0..21 + change as u8)))).await;
        pass(MOMENT).await;
        let after = done.lock().unwrap()[begun..].to_vec();
        let pieces = after.iter().position(|done| *done == Done::Write).unwrap();
        assert!(pieces <= 1, "{change}: {after:?}");
        assert_eq!(driver.seen()[&vip(7)], 21 + change, "{change}");
        assert_eq!(driver.status.borrow().audits, before, "{change}: the comparison was over");
        pass(Duration::from_secs(31)).await;
        assert!(driver.status.borrow().audits > before);
        done.lock().unwrap().clear();
    }
    let status = driver.status.borrow().clone();
    assert_eq!((status.drift, status.audit_failures), (0, 0), "our own changes are no drift");
}

#[tokio::test(start_paused = true)]
async fn pieces_are_small_and_nothing_is_read_as_a_whole() {
    let (driver, done) = Running::with_many().await;
    pass(Duration::from_secs(30)).await;
    assert_eq!(driver.status.borrow().audits, 1);
    let pieces: Vec<_> = done.lock().unwrap().iter().filter(|done| **done != Done::Write).copied().collect();
    let entries: usize =
        pieces.iter().map(|done| if let Done::Piece(entries) = done { *entries } else { 0 }).sum();
    assert!(entries >= 2 * 250 * 20, "backends and slots, and more: {entries}");
    // A piece may exceed its size: a walk ends at the end of a bucket, and an extent is read as a whole.
    let is_small =
        |done: &Done| matches!(done, Done::Piece(entries) if *entries <= 2 * super::audits::PIECE as usize);
    assert!(pieces.iter().all(is_small), "{pieces:?}");
}

#[tokio::test(start_paused = true)]
async fn leaving_node_is_reported_before_the_first_list() {
    let driver = Running::new();
    assert_eq!(driver.status.borrow().node, NodeFate::Stays);
    let node = |is_leaving| Event::Apply(Object::Node(NodeView { is_leaving, ..NodeView::new("node") }));
    for (leaves, fate) in [(true, NodeFate::Leaves), (false, NodeFate::Stays)] {
        driver.send(node(leaves)).await;
        pass(MOMENT).await;
        assert_eq!(driver.status.borrow().node, fate);
    }
    driver.send(Event::Delete(Key::Node("node".to_owned()))).await;
    pass(MOMENT).await;
    assert_eq!(driver.status.borrow().node, NodeFate::Leaves);
}

#[tokio::test(start_paused = true)]
async fn heartbeats_of_nodes_cause_no_sync() {
    let driver = Running::new();
    driver.list(vec![service("a", 1)], vec![slice("a", 1..4)]).await;
    let beat = |name: &str, zone: &str| {
        let zone = Some(zone.to_owned());
        Event::Apply(Object::Node(NodeView { zone, ..NodeView::new(name) }))
    };
    let syncs = || driver.status.borrow().sync_duration.count();
    driver.send(beat("node", "a")).await;
    pass(Duration::from_secs(5)).await;
    let before = syncs();
    for name in ["node", "other"].repeat(10) {
        driver.send(beat(name, "a")).await;
        pass(MOMENT).await;
    }
    assert_eq!(syncs(), before);
    driver.send(beat("node", "b")).await;
    pass(MOMENT).await;
    assert_eq!(syncs(), before + 1);
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_ends_leaves_everything_and_the_next_one_writes_nothing() {
    let driver = Running::new();
    driver.list(vec![service("a", 1)], vec![slice("a", 1..4)]).await;
    drop(driver.events);
    let tables = driver.task.await.unwrap();
    let before = tables.0.lock().unwrap().contents().clone();
    let next = Running::start(tables);
    pass(Duration::from_mins(1)).await;
    let steps = next.steps();
    next.list(vec![service("a", 1)], vec![slice("a", 1..4)]).await;
    pass(Duration::from_mins(1)).await;
    assert_eq!(next.steps(), steps);
    assert_eq!(*next.tables.0.lock().unwrap().contents(), before);
}

#[tokio::test(start_paused = true)]
async fn full_and_partial_syncs_are_counted_separately_and_latency_is_measured() {
    let driver = Running::new();
    driver.list(vec![service("a", 1)], vec![slice("a", 1..4)]).await;
    pass(Duration::from_secs(5)).await;
    let counts = |status: &Status| {
        (
            status.sync_duration.count(),
            status.full_sync_duration.count(),
            status.partial_sync_duration.count(),
        )
    };
    assert_eq!(counts(&driver.status.borrow()), (1, 1, 0));
    // The annotation uses the wall clock, which is not paused.
    let triggered = Some(std::time::SystemTime::now());
    driver.send(Event::Apply(Object::Slice(EndpointSlice { triggered, ..slice("a", 1..5) }))).await;
    pass(MOMENT).await;
    let status = driver.status.borrow().clone();
    assert_eq!((status.full_sync_duration.count(), status.partial_sync_duration.count()), (1, 1));
    assert_eq!(status.network_programming[&IpFamily::V4].count(), 1);
    assert!(!status.network_programming.contains_key(&IpFamily::V6));
    driver.tables.0.lock().unwrap().contents_mut().services.clear();
    pass(Duration::from_secs(30)).await;
    assert_eq!(driver.status.borrow().full_sync_duration.count(), 2, "a repair looks at everything");
}

#[tokio::test(start_paused = true)]
async fn a_local_policy_without_local_endpoints_is_counted() {
    let driver = Running::new();
    let local = |name, address| Service { internal_policy: TrafficPolicy::Local, ..service(name, address) };
    let services = vec![local("a", 1), local("b", 2), service("c", 3), local("d", 4)];
    let mut here = slice("b", 1..3);
    here.endpoints[0].node = Some("node".into());
    driver.list(services, vec![slice("a", 1..3), here, slice("c", 1..3)]).await;
    pass(MOMENT).await;
    let count =
        || driver.status.borrow().no_local.get(&(Scope::Internal, IpFamily::V4)).copied().unwrap_or(0);
    assert_eq!(count(), 1, "a; b has one here, c may use all, d has none at all");
    driver.send(Event::Apply(Object::Slice(slice("b", 1..3)))).await;
    pass(Duration::from_millis(100)).await;
    assert_eq!(count(), 2);
    driver.send(Event::Delete(Key::Service(ServiceName::new("default", "a")))).await;
    driver.send(Event::Apply(Object::Service(service("b", 2)))).await;
    pass(Duration::from_millis(100)).await;
    assert_eq!(count(), 0);
}

/// Returns the event of a host that has these addresses itself.
fn machine(addresses: &[IpAddr]) -> Event {
    let addresses = addresses.iter().copied().collect();
    let devices = [(7, HostDevice { addresses, ..HostDevice::default() })].into();
    Event::Host(HostView { devices, ..HostView::default() })
}

#[tokio::test(start_paused = true)]
async fn a_cluster_address_of_the_node_itself_is_left_alone_without_a_problem_while_it_has_it() {
    let driver = Running::new();
    driver.send(machine(&[vip(1)])).await;
    let (name, ranges) = ("all".to_owned(), vec!["10.96.0.0/16".parse().unwrap()]);
    driver.send(Event::Apply(Object::ServiceCidr(ServiceCidr { name, ranges }))).await;
    driver.list(vec![service("dns", 1)], vec![slice("dns", 1..4)]).await;
    let look = || {
        let store = driver.tables.0.lock().unwrap();
        let kinds: Vec<_> = store.contents().services.values().map(|entry| entry.kind).collect();
        (kinds, driver.status.borrow().problems.len())
    };
    pass(Duration::from_secs(1)).await;
    assert_eq!(look(), (vec![KIND_UNMANAGED], 0));
    driver.send(Event::Delete(Key::Service(ServiceName::new("default", "dns")))).await;
    pass(Duration::from_secs(1)).await;
    assert_eq!(look(), (vec![], 1), "an address of the node in the range, and no Service's");
    driver.send(Event::Apply(Object::Service(service("dns", 1)))).await;
    pass(Duration::from_secs(1)).await;
    assert_eq!(look(), (vec![KIND_UNMANAGED], 0));
    driver.send(machine(&[])).await;
    pass(Duration::from_secs(1)).await;
    assert_eq!((look(), driver.seen()), ((vec![KIND_ADDRESS, KIND_CLUSTER_IP], 0), [(vip(1), 3)].into()));
    driver.send(machine(&[vip(1)])).await;
    pass(Duration::from_secs(1)).await;
    assert_eq!(look(), (vec![KIND_UNMANAGED], 0));
}

fn vip(last: u8) -> IpAddr {
    generator::frontend(last).address
}

fn slice(of: &str, endpoints: Range<u8>) -> EndpointSlice {
    let endpoint = |last| Endpoint::new(Ipv4Addr::new(10, 1, 0, last).into());
    let name = SliceName::new("default", format!("{of}-1"));
    EndpointSlice {
        ports: vec![EndpointPort { name: "http".into(), protocol: Protocol::Tcp, port: 8080 }],
        endpoints: endpoints.map(endpoint).collect(),
        ..EndpointSlice::new(name, ServiceName::new("default", of), IpFamily::V4)
    }
}

fn service(name: &str, address: u8) -> Service {
    Service {
        cluster_ips: vec![vip(address)],
        ports: vec![ServicePort { name: "http".into(), protocol: Protocol::Tcp, port: 80, node_port: 0 }],
        ..Service::new(ServiceName::new("default", name))
    }
}

#[rstest]
#[case::short(0, 0, 1)]
#[case::flag(500, 3, 500)]
#[case::long(0, 40, 160)]
#[case::longest(0, 900, 1000)]
fn pause_grows_with_the_last_sync(#[case] min: u64, #[case] took: u64, #[case] expected: u64) {
    let millis = Duration::from_millis;
    assert_eq!(pause(millis(min), millis(took)), millis(expected));
}
