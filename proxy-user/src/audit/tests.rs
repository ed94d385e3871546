//! Audits of a driver with maps in memory, under a paused clock, which advances only when all tasks wait.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::{Stream, stream};
use proxy_common::backend::BACKEND_ACTIVE;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::*;
use crate::driver::{Driver, DriverSettings, Question};
use proxy_core::model::net::{IpFamily, Protocol};
use proxy_core::model::{
    Endpoint, EndpointPort, EndpointSlice, Event, Listing, NodeView, Object, Service, ServiceName,
    ServicePort, SliceName,
};
use proxy_core::store::{BatchError, Capacity, Contents, Cursor, MapError, MemoryStore, Store, Table, Write};

const PERIOD: Duration = Duration::from_mins(10);
/// Returns the time until the first audit is done: its turn, and two waits of [`GRACE`] with a margin.
fn one() -> Duration {
    turn("node", PERIOD) + 3 * GRACE
}

#[derive(Clone)]
struct Maps(Arc<Mutex<MemoryStore>>);

impl Store for Maps {
    fn capacity(&self) -> Capacity {
        self.0.lock().unwrap().capacity()
    }

    fn read(&mut self, below: u32) -> Result<Contents, MapError> {
        self.0.lock().unwrap().read(below)
    }

    fn read_range(&mut self, table: Table, range: Range<u32>) -> Result<Contents, MapError> {
        self.0.lock().unwrap().read_range(table, range)
    }

    fn walk(
        &mut self,
        table: Table,
        from: Option<Cursor>,
        count: u32,
    ) -> Result<(Contents, Option<Cursor>), MapError> {
        self.0.lock().unwrap().walk(table, from, count)
    }

    fn write(&mut self, writes: &[Write]) -> Result<(), BatchError> {
        self.0.lock().unwrap().write(writes)
    }
}

impl Maps {
    fn found(&self) -> BTreeMap<FrontendKey, BTreeSet<SocketAddr>> {
        let store = self.0.lock().unwrap();
        let contents = store.contents();
        let endpoints = |base: u32, count: u32| {
            let slots = &contents.slots[base as usize..(base + count) as usize];
            let rows = slots.iter().filter_map(|id| contents.backends.get(id));
            let active = rows.filter(|row| row.state == BACKEND_ACTIVE);
            active.map(|row| SocketAddr::new(row.addr, row.port)).collect()
        };
        let frontends = contents.services.iter().filter(|(key, _)| key.port != 0);
        frontends.map(|(key, entry)| (*key, endpoints(entry.slot_base, entry.slot_count))).collect()
    }

    /// Returns the number of endpoints of each frontend.
    fn counts(&self) -> Vec<usize> {
        self.found().values().map(BTreeSet::len).collect()
    }
}

impl Frontends for Maps {
    async fn read(&self) -> Result<BTreeMap<FrontendKey, BTreeSet<SocketAddr>>, AuditError> {
        Ok(self.found())
    }
}

/// An API server with its objects; `None`: it is unreachable.
#[derive(Clone)]
struct Api(Arc<Mutex<Option<Vec<Object>>>>);

impl Api {
    fn set(&self, objects: Option<Vec<Object>>) {
        *self.0.lock().unwrap() = objects;
    }

    fn objects(&self) -> Result<Vec<Object>, AuditError> {
        let objects = self.0.lock().unwrap().clone();
        objects.ok_or_else(|| AuditError::List("connection refused".into()))
    }
}

impl Lists for Api {
    fn all(&self) -> impl Stream<Item = Result<Object, AuditError>> + Send {
        stream::iter(match self.objects() {
            Ok(objects) => objects.into_iter().map(Ok).collect(),
            Err(error) => vec![Err(error)],
        })
    }

    async fn one(&self, key: &Key) -> Result<Option<Object>, AuditError> {
        Ok(self.objects()?.into_iter().find(|object| object.key() == *key))
    }
}

struct Bench {
    maps: Maps,
    api: Api,
    audits: Arc<Audits>,
    events: mpsc::Sender<Event>,
    _tasks: [JoinHandle<()>; 2],
}

impl Bench {
    /// Starts a driver that knows the Services `a` and `b` with three endpoints each, as the API server has them.
    async fn new() -> Self {
        let maps = Maps(Arc::new(Mutex::new(MemoryStore::new(Capacity::default()))));
        // The driver's own comparison of the maps must not run before the audit.
        let settings = DriverSettings { sync_period: Duration::from_hours(24), ..DriverSettings::default() };
        let (ask, questions) = mpsc::channel(1);
        let driver = Driver::new(maps.clone(), NodeView::new("node"), settings).unwrap();
        let driver = driver.with_questions(questions);
        let status = driver.status();
        let (events, receiver) = mpsc::channel(16);
        let listings = [
            Listing::Services(vec![service("a", 1), service("b", 2)]),
            Listing::Slices(vec![slice("a", 1..4), slice("b", 1..4)]),
        ];
        for listing in listings {
            events.send(Event::Reset(listing)).await.unwrap();
        }
        let api = Api(Arc::default());
        api.set(Some(objects()));
        let audits = Arc::new(Audits::default());
        let (asked, read, noted) = (api.clone(), maps.clone(), Arc::clone(&audits));
        let tasks = [
            tokio::spawn(async move {
                driver.run(receiver).await;
            }),
            tokio::spawn(async move {
                run(asked, read, Ask::new(ask), "node", PERIOD, status, &noted).await;
            }),
        ];
        sleep(Duration::from_millis(10)).await;
        assert_eq!(maps.counts(), [3, 3]);
        Self { maps, api, audits, events, _tasks: tasks }
    }

    fn counts(&self) -> (u64, u64, u64) {
        let counts = self.audits.counts();
        (counts.clean, counts.repaired, counts.failed)
    }

    fn differences(&self) -> Vec<(&'static str, u64)> {
        self.audits.counts().differences.into_iter().filter(|(_, count)| *count > 0).collect()
    }
}

fn service(name: &str, last: u8) -> Service {
    Service {
        cluster_ips: vec![IpAddr::from([10, 96, 0, last])],
        ports: vec![ServicePort { name: "http".into(), protocol: Protocol::Tcp, port: 80, node_port: 0 }],
        ..Service::new(ServiceName::new("default", name))
    }
}

fn slice(of: &str, endpoints: Range<u8>) -> EndpointSlice {
    let endpoint = |last| Endpoint::new(Ipv4Addr::new(10, 1, 0, last).into());
    EndpointSlice {
        ports: vec![EndpointPort { name: "http".into(), protocol: Protocol::Tcp, port: 8080 }],
        endpoints: endpoints.map(endpoint).collect(),
        ..EndpointSlice::new(
            SliceName::new("default", format!("{of}-1")),
            ServiceName::new("default", of),
            IpFamily::V4,
        )
    }
}

fn objects() -> Vec<Object> {
    let services = [service("a", 1), service("b", 2)].map(Object::Service);
    services.into_iter().chain([slice("a", 1..4), slice("b", 1..4)].map(Object::Slice)).collect()
}

#[tokio::test(start_paused = true)]
async fn audit_of_equal_state_changes_nothing() {
    let bench = Bench::new().await;
    sleep(one()).await;
    assert_eq!((bench.counts(), bench.differences()), ((1, 0, 0), vec![]));
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_whose_end_was_missed_is_removed_and_counted() {
    let bench = Bench::new().await;
    let objects = objects().into_iter().map(|object| match object {
        Object::Slice(known) if known.name.name.as_str() == "b-1" => Object::Slice(slice("b", 1..3)),
        object => object,
    });
    bench.api.set(Some(objects.collect()));
    sleep(one()).await;
    assert_eq!(bench.maps.counts(), [3, 2]);
    assert_eq!((bench.counts(), bench.differences()), ((0, 1, 0), vec![("EndpointSlice", 1)]));
    sleep(PERIOD).await;
    assert_eq!(bench.counts(), (1, 1, 0), "after that it agrees");
}

#[tokio::test(start_paused = true)]
async fn objects_that_came_or_went_unnoticed() {
    let bench = Bench::new().await;
    let objects = [Object::Service(service("a", 1)), Object::Service(service("c", 3))];
    let slices = [slice("a", 1..4), slice("c", 1..2)].map(Object::Slice);
    bench.api.set(Some(objects.into_iter().chain(slices).collect()));
    sleep(one()).await;
    assert_eq!(bench.maps.counts(), [3, 1]);
    assert_eq!(bench.differences(), [("EndpointSlice", 2), ("Service", 2)]);
}

#[tokio::test(start_paused = true)]
async fn many_differences_are_repaired_as_well_as_few() {
    let bench = Bench::new().await;
    let many = (0..200).map(|number| Object::Service(service(&format!("s{number}"), number + 10)));
    bench.api.set(Some(objects().into_iter().chain(many).collect()));
    sleep(one()).await;
    assert_eq!((bench.maps.counts().len(), bench.differences()), (202, vec![("Service", 200)]));
}

#[tokio::test(start_paused = true)]
async fn a_change_on_its_way_is_no_difference() {
    let bench = Bench::new().await;
    let turn = turn("node", PERIOD);
    // The API server has the object just before the audit; the watch delivers it just after.
    sleep(turn.checked_sub(Duration::from_secs(1)).unwrap()).await;
    bench.api.set(Some([objects(), vec![Object::Service(service("c", 3))]].concat()));
    sleep(Duration::from_secs(2)).await;
    bench.events.send(Event::Apply(Object::Service(service("c", 3)))).await.unwrap();
    sleep(one()).await;
    assert_eq!((bench.counts().1, bench.differences()), (0, vec![]));
}

#[tokio::test(start_paused = true)]
async fn an_object_that_goes_on_changing_is_no_difference() {
    let bench = Bench::new().await;
    let with = |last: u8| {
        let services = [service("a", 1), service("b", 2)].map(Object::Service);
        let slices = [slice("a", 1..last), slice("b", 1..4)].map(Object::Slice);
        Some(services.into_iter().chain(slices).collect())
    };
    bench.api.set(with(5));
    sleep(turn("node", PERIOD) + GRACE / 2).await;
    bench.api.set(with(6));
    sleep(GRACE).await;
    assert_eq!((bench.differences(), bench.maps.counts()), (vec![], vec![3, 3]), "the watch reports it");
}

#[tokio::test(start_paused = true)]
async fn maps_that_do_not_hold_what_is_planned_are_repaired() {
    let bench = Bench::new().await;
    {
        let mut store = bench.maps.0.lock().unwrap();
        let contents = store.contents_mut();
        let entry = *contents.services.values().find(|entry| entry.slot_count == 3).unwrap();
        contents.slots[entry.slot_base as usize] = 0;
    }
    assert_eq!(bench.maps.counts(), [2, 3]);
    sleep(one()).await;
    assert_eq!(bench.maps.counts(), [3, 3]);
    assert_eq!((bench.counts(), bench.differences()), ((0, 1, 0), vec![("frontend", 1)]));
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_is_away_changes_nothing() {
    let bench = Bench::new().await;
    bench.api.set(None);
    sleep(one()).await;
    assert_eq!((bench.counts(), bench.maps.counts()), ((0, 0, 1), vec![3, 3]));
}

/// An infinite list that counts the objects taken from it.
struct Endless(Arc<AtomicUsize>);

impl Lists for Endless {
    fn all(&self) -> impl Stream<Item = Result<Object, AuditError>> + Send {
        let taken = Arc::clone(&self.0);
        stream::repeat_with(move || {
            taken.fetch_add(1, Ordering::Relaxed);
            Ok(Object::Service(service("a", 1)))
        })
    }

    async fn one(&self, _: &Key) -> Result<Option<Object>, AuditError> {
        Ok(None)
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_waits_until_the_driver_has_compared_a_part_of_it() {
    let taken = Arc::new(AtomicUsize::new(0));
    let lists = Endless(Arc::clone(&taken));
    let (ask, mut questions) = mpsc::channel(1);
    let auditing = tokio::spawn(async move { objects::audit(&lists, &Ask::new(ask)).await.is_err() });
    let Some(Question::Differing(first, reply)) = questions.recv().await else { panic!("another question") };
    sleep(Duration::from_secs(1)).await;
    assert_eq!(taken.load(Ordering::Relaxed), first.len(), "the driver has not answered");
    reply.send(Vec::new()).unwrap();
    let second = questions.recv().await;
    assert_eq!(taken.load(Ordering::Relaxed), 2 * first.len());
    drop((questions, second));
    assert!(auditing.await.unwrap(), "the driver has ended");
}

#[test]
fn audits_of_nodes_are_spread_over_the_period() {
    let turns: Vec<_> = (0..100).map(|number| turn(&format!("node-{number}"), PERIOD)).collect();
    assert!(turns.iter().all(|turn| *turn < PERIOD));
    for quarter in 0..4 {
        let part = PERIOD * quarter / 4..PERIOD * (quarter + 1) / 4;
        let count = turns.iter().filter(|turn| part.contains(*turn)).count();
        assert!((15..35).contains(&count), "{count} of 100 in one quarter");
    }
}
