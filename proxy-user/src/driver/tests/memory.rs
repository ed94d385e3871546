//! The agent's memory for each Service and endpoint: the model, the plans, the mirror of the maps, the programmed versions.
//!
//! Counted as glibc's allocator does: each block takes 8 bytes more, in multiples of 16, and at least 32.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::pin::pin;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::sync::mpsc;

use crate::driver::{Driver, DriverSettings};
use proxy_core::model::net::{IpFamily, Protocol};
use proxy_core::model::{
    Endpoint, EndpointPort, EndpointSlice, Event, Listing, NodeView, Object, Service, ServiceName,
    ServicePort, SliceName, Version,
};
use proxy_core::store::{BatchError, Capacity, Contents, Cursor, MapError, Store, Table, Write};

thread_local! {
    /// Bytes that this thread has allocated, minus the bytes that it has freed.
    static LIVE: Cell<isize> = const { Cell::new(0) };
    /// The maximum of [`LIVE`] so far.
    static MOST: Cell<isize> = const { Cell::new(0) };
}

/// The system's allocator, with a count for each thread.
struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

fn count(layout: Layout, sign: isize) {
    let block = (layout.size() + 8).next_multiple_of(16).max(32);
    // A thread that ends may free memory after its counter was dropped.
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + sign * block.cast_signed());
        MOST.with(|most| most.set(most.get().max(live.get())));
    });
}

// SAFETY: every call is passed on unchanged; the counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout, 1);
        // SAFETY: the caller observes the same rules.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(layout, -1);
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) }
    }
}

/// Maps that accept every write and store nothing: maps are in the kernel's memory, not in the agent's.
struct Nowhere;

impl Store for Nowhere {
    fn capacity(&self) -> Capacity {
        Capacity {
            frontends: 1 << 17,
            slots: 1 << 20,
            maglev: 1 << 22,
            backends: 1 << 19,
            services: 1 << 17,
            ranges: 65_536,
        }
    }

    fn read(&mut self, _: u32) -> Result<Contents, MapError> {
        Ok(Contents::default())
    }

    fn read_range(&mut self, _: Table, _: Range<u32>) -> Result<Contents, MapError> {
        Ok(Contents::default())
    }

    fn walk(&mut self, _: Table, _: Option<Cursor>, _: u32) -> Result<(Contents, Option<Cursor>), MapError> {
        Ok((Contents::default(), None))
    }

    fn write(&mut self, _: &[Write]) -> Result<(), BatchError> {
        Ok(())
    }
}

fn version(kind: u32, number: u32) -> Version {
    Version {
        uid: (*format!("{number:08x}-0000-4000-8000-{kind:012}")).into(),
        resource_version: (*(1_000_000 + number).to_string()).into(),
        generation: None,
    }
}

fn service(number: u32) -> Service {
    let name = ServiceName::new("default", format!("service-{number}"));
    let port = ServicePort { name: "http".into(), protocol: Protocol::Tcp, port: 80, node_port: 0 };
    Service {
        version: version(1, number),
        cluster_ips: vec![Ipv4Addr::from(0x0a60_0000 + number).into()],
        ports: vec![port],
        created: 1,
        ..Service::new(name)
    }
}

fn slice(number: u32, endpoints: u32) -> EndpointSlice {
    let name = SliceName::new("default", format!("service-{number}-00000"));
    let service = ServiceName::new("default", format!("service-{number}"));
    let endpoint = |index: u32| {
        let place = number * endpoints + index;
        let address = IpAddr::from(Ipv4Addr::from(0x0a01_0000 + place));
        Endpoint {
            node: Some(format!("ip-10-0-{}.example.internal", place % 100).into()),
            zone: Some(format!("zone-{}", place % 3).into()),
            ..Endpoint::new(address)
        }
    };
    EndpointSlice {
        version: version(2, number),
        ports: vec![EndpointPort { name: "http".into(), protocol: Protocol::Tcp, port: 8080 }],
        endpoints: (0..endpoints).map(endpoint).collect(),
        ..EndpointSlice::new(name, service, IpFamily::V4)
    }
}

/// Returns the bytes for each Service with `endpoints` endpoints: after all are programmed, and the maximum until then,
/// lists included.
fn bytes_of_each(services: u32, endpoints: u32) -> (isize, isize) {
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let driver = Driver::new(Nowhere, NodeView::new("node"), DriverSettings::default()).unwrap();
        let mut status = driver.status();
        let (sender, events) = mpsc::channel(4);
        let before = LIVE.get();
        MOST.set(before);
        let follow = async {
            let all = (0..services).map(service).collect();
            sender.send(Event::Reset(Listing::Services(all))).await.unwrap();
            let all = (0..services).map(|number| slice(number, endpoints)).collect();
            sender.send(Event::Reset(Listing::Slices(all))).await.unwrap();
            status.wait_for(|status| status.synced).await.unwrap();
            assert_eq!(status.borrow().endpoints, (services * endpoints) as usize);
            (LIVE.get() - before, MOST.get() - before)
        };
        tokio::select! {
            _ = pin!(driver.run(events)) => unreachable!("the sender is alive"),
            (stays, most) = follow => {
                let services = isize::try_from(services).unwrap();
                (stays / services, most / services)
            }
        }
    })
}

#[test]
fn a_service_and_an_endpoint_take_little_memory() {
    let ((few, _), (many, _)) = (bytes_of_each(2000, 5), bytes_of_each(2000, 25));
    let endpoint = (many - few) / 20;
    let service = few - 5 * endpoint;
    println!("{service} bytes for each Service, {endpoint} for each endpoint");
    assert!(service <= 2350, "{service} bytes for each Service");
    assert!(endpoint <= 160, "{endpoint} bytes for each endpoint");
}

#[test]
fn a_first_sync_takes_little_more_than_what_stays() {
    let (stays, most) = bytes_of_each(12_000, 5);
    println!("{stays} bytes for each Service, {most} at most");
    assert!(2 * most <= 3 * stays, "{most} bytes for each Service at most, of which {stays} stay");
}

/// Returns the bytes in use after each of these numbers of minutes, with 20 changes a second. At each of these times, all
/// rounds of changes are complete.
fn bytes_during_churn(minutes: &[u32]) -> Vec<isize> {
    const SERVICES: u32 = 300;
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let driver = Driver::new(Nowhere, NodeView::new("node"), DriverSettings::default()).unwrap();
        let mut status = driver.status();
        let (sender, events) = mpsc::channel(4);
        let churn = async {
            let all = (0..SERVICES).map(service).collect();
            sender.send(Event::Reset(Listing::Services(all))).await.unwrap();
            let all = (0..SERVICES).map(|number| slice(number, 5)).collect();
            sender.send(Event::Reset(Listing::Slices(all))).await.unwrap();
            status.wait_for(|status| status.synced).await.unwrap();
            let mut found = Vec::new();
            for change in 0..minutes.iter().max().unwrap() * 60 * 20 {
                if minutes.iter().any(|minutes| minutes * 60 * 20 == change) {
                    found.push(LIVE.get());
                }
                let mut slice = slice(change % SERVICES, 5);
                let is_ready = change / SERVICES % 2 == 1;
                (slice.endpoints[0].ready, slice.endpoints[0].serving) = (is_ready, is_ready);
                slice.version = version(2, 100_000 + change);
                sender.send(Event::Apply(Object::Slice(slice))).await.unwrap();
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            found.push(LIVE.get());
            found
        };
        tokio::select! {
            _ = pin!(driver.run(events)) => unreachable!("the sender is alive"),
            found = churn => found,
        }
    })
}

#[test]
fn churn_leaves_nothing_behind() {
    // A round of 300 changes takes 15 s; two rounds lead to the same state again.
    let found = bytes_during_churn(&[5, 10, 20]);
    println!("{found:?} bytes after 5, 10 and 20 minutes");
    assert!(found[1] - found[0] < found[0] / 100 && found[2] - found[0] < found[0] / 100, "{found:?}");
}
