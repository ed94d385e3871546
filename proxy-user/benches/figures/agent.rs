//! The agent: the driver in this process, on real maps in this kernel, with events as the API server's watch and
//! the folder of manifests deliver them.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use proxy_user::maps::KernelStore;
use proxy_user::model::net::{IpFamily, Protocol};
use proxy_user::model::{
    Endpoint, EndpointPort, EndpointSlice, Event, Listing, NodeView, Object, Service, ServiceName,
    ServicePort, SliceName,
};
use proxy_user::programs::Capacities;
use proxy_user::sync::{Driver, DriverSettings};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

use crate::harness::Harness;
use crate::report::{Row, median, percentile};

const SERVICES: u32 = 1000;
const ENDPOINTS: u32 = 10;
/// Cold starts, each with maps of its own.
const STARTS: usize = 5;
const CHANGES: u32 = 200;
const BETWEEN_CHANGES: Duration = Duration::from_millis(50);
/// Thirty times as often as by default, so that changes meet comparisons of the tables.
const SYNC_PERIOD: Duration = Duration::from_secs(1);

fn name(n: u32) -> ServiceName {
    ServiceName::new("default", format!("service-{n}"))
}

fn service(n: u32) -> Service {
    let port = ServicePort { name: "http".into(), protocol: Protocol::Tcp, port: 80, node_port: 0 };
    Service {
        cluster_ips: vec![IpAddr::V4(Ipv4Addr::from(0x0a60_0000 + n))],
        ports: vec![port],
        ..Service::new(name(n))
    }
}

fn slice(n: u32, endpoints: u32) -> EndpointSlice {
    let endpoint = |at| Endpoint::new(IpAddr::V4(Ipv4Addr::from(0x0a80_0000 + n * 16 + at)));
    let slice_name = SliceName::new("default", format!("service-{n}-abcde"));
    EndpointSlice {
        ports: vec![EndpointPort { name: "http".into(), protocol: Protocol::Tcp, port: 8080 }],
        endpoints: (0..endpoints).map(endpoint).collect(),
        ..EndpointSlice::new(slice_name, name(n), IpFamily::V4)
    }
}

/// Measures all of it.
pub fn measure(bpffs: &Path) -> Vec<Row> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let mut starts = Vec::new();
    let mut latencies = Vec::new();
    for start in 0..STARTS {
        let harness = Harness::with_capacities(bpffs, &Capacities::default());
        let changes = if start + 1 == STARTS { CHANGES } else { 0 };
        let (synced, mut changed) = runtime.block_on(run(harness.pins(), changes));
        starts.push(synced.as_secs_f64());
        latencies.append(&mut changed);
    }
    let cold = format!("{SERVICES} Services x {ENDPOINTS} endpoints, from the lists to the maps");
    let group = "Agent";
    vec![
        Row::new(group, cold, median(starts), "s", Some(0.3)),
        Row::new(group, "EndpointSlice event to the map, p50", percentile(&mut latencies, 50), "ms", None),
        Row::new(
            group,
            "EndpointSlice event to the map, p99",
            percentile(&mut latencies, 99),
            "ms",
            Some(20.0),
        ),
    ]
}

/// A cold start, and then so many changes, 20 in a second; milliseconds of each.
async fn run(maps: &Path, changes: u32) -> (Duration, Vec<f64>) {
    let store = KernelStore::open(maps).unwrap();
    let settings = DriverSettings { sync_period: SYNC_PERIOD, ..DriverSettings::default() };
    let driver = Driver::new(store, NodeView::new("node"), settings).unwrap();
    let mut status = driver.status();
    let (sender, events) = mpsc::channel(1024);
    let driver = tokio::spawn(driver.run(events));
    let services = Listing::Services((0..SERVICES).map(service).collect());
    let slices = Listing::Slices((0..SERVICES).map(|n| slice(n, ENDPOINTS)).collect());

    let begun = Instant::now();
    sender.send(Event::Reset(services)).await.unwrap();
    sender.send(Event::Reset(slices)).await.unwrap();
    status.wait_for(|status| status.synced).await.unwrap();
    let synced = begun.elapsed();
    assert_eq!(status.borrow().endpoints, (SERVICES * ENDPOINTS) as usize);

    let mut clock = interval(BETWEEN_CHANGES);
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut latencies = Vec::new();
    for change in 0..changes {
        clock.tick().await;
        // An endpoint less, and one more the next time round.
        let changed = slice(change % (SERVICES / 10), ENDPOINTS - 1 + change / (SERVICES / 10) % 2);
        let (sent, begun) = (SystemTime::now(), Instant::now());
        sender.send(Event::Apply(Object::Slice(changed))).await.unwrap();
        status.wait_for(|status| status.last_sync.is_some_and(|last| last >= sent)).await.unwrap();
        latencies.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    drop(sender);
    driver.await.unwrap();
    (synced, latencies)
}
