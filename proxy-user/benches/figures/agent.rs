//! The agent: the driver runs in this process, on real maps in this kernel, with events as the API server's watch and the
//! folder of manifests deliver them.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use proxy_core::model::net::{IpFamily, Protocol};
use proxy_core::model::{
    Endpoint, EndpointPort, EndpointSlice, Event, Listing, NodeView, Object, Service, ServiceName,
    ServicePort, SliceName,
};
use proxy_user::driver::{Driver, DriverSettings};
use proxy_user::maps::KernelStore;
use proxy_user::programs::Capacities;
use tokio::sync::mpsc;
use tokio::task::yield_now;
use tokio::time::{MissedTickBehavior, interval};

use proxy_testbed::harness::Harness;
use proxy_testbed::report::{Row, Sample, percentile};

/// Numbers of Services, and the target in seconds until the lists of so many are in the maps.
const SIZES: [(u32, f64); 2] = [(1000, 0.3), (10_000, 1.0)];
const ENDPOINTS: u32 = 10;
/// Number of cold starts, each with its own maps.
const STARTS: usize = 5;
const CHANGES: u32 = 400;
/// Changes per second.
const RATES: [u32; 2] = [20, 200];
/// Thirty times as often as by default, so that changes coincide with comparisons of the tables.
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

/// Measures all figures of this file.
pub fn measure(bpffs: &Path) -> Vec<Row> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let group = "Agent";
    let mut rows = Vec::new();
    for (services, target) in SIZES {
        let mut starts = Vec::new();
        let mut latencies = [const { Vec::new() }; RATES.len()];
        for start in 0..STARTS {
            let harness = Harness::with_capacities(bpffs, &Capacities::default());
            let rates: &[u32] = if start + 1 == STARTS { &RATES } else { &[] };
            let (synced, changed) = runtime.block_on(run(harness.pins(), services, rates));
            starts.push(synced.as_secs_f64());
            latencies.iter_mut().zip(changed).for_each(|(all, changed)| all.extend(changed));
        }
        let cold = format!("{services} Services x {ENDPOINTS} endpoints, from the lists to the maps");
        rows.push(Row::new(group, cold, Sample::median(starts), "s", Some(target)));
        for (rate, latencies) in RATES.into_iter().zip(&mut latencies) {
            // A change that arrives sooner than `--min-sync-period` after a sync waits for the end of this period.
            let median = (rate == RATES[0]).then_some(3.0);
            for (percent, target) in [(50, median), (99, Some(20.0))] {
                let what =
                    format!("event to the map, p{percent}, {services} Services, {rate} changes a second");
                rows.push(Row::new(group, what, percentile(latencies, percent), "ms", target));
            }
        }
    }
    rows
}

/// Measures a cold start, and then changes at each of these rates (changes per second). Returns the time of the start, and
/// the milliseconds of each change.
async fn run(maps: &Path, services: u32, rates: &[u32]) -> (Duration, Vec<Vec<f64>>) {
    let store = KernelStore::open(maps).unwrap();
    let settings = DriverSettings { sync_period: SYNC_PERIOD, ..DriverSettings::default() };
    let driver = Driver::new(store, NodeView::new("node"), settings).unwrap();
    let mut status = driver.status();
    let (sender, events) = mpsc::channel(1024);
    let driver = tokio::spawn(driver.run(events));
    let count = services;
    let services = Listing::Services((0..count).map(service).collect());
    let slices = Listing::Slices((0..count).map(|n| slice(n, ENDPOINTS)).collect());

    let begun = Instant::now();
    sender.send(Event::Reset(services)).await.unwrap();
    sender.send(Event::Reset(slices)).await.unwrap();
    status.wait_for(|status| status.synced).await.unwrap();
    let synced = begun.elapsed();
    assert_eq!(status.borrow().endpoints, (count * ENDPOINTS) as usize);

    let mut latencies = Vec::new();
    let mut change = 0;
    for rate in rates {
        let mut clock = interval(Duration::from_secs(1) / *rate);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut of_rate = Vec::new();
        for _ in 0..CHANGES {
            clock.tick().await;
            // Removes an endpoint of each of these Services, and adds it again in the next pass.
            let changed = slice(change % (count / 10), ENDPOINTS - 1 + change / (count / 10) % 2);
            change += 1;
            let (sent, begun) = (SystemTime::now(), Instant::now());
            sender.send(Event::Apply(Object::Slice(changed))).await.unwrap();
            // Poll, because not every sync wakes the receivers.
            while status.borrow().up_to_date.get(&IpFamily::V4).is_none_or(|last| *last < sent) {
                yield_now().await;
            }
            of_rate.push(begun.elapsed().as_secs_f64() * 1e3);
        }
        latencies.push(of_rate);
    }
    drop(sender);
    driver.await.unwrap();
    (synced, latencies)
}
