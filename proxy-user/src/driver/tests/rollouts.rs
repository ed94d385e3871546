//! Services whose endpoints change.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use proxy_common::service::{KIND_CLUSTER_IP, SERVICE_CHANGING, SERVICE_CHANGING_NODE, SERVICE_EJECTS};
use proxy_core::model::{Event, HostDevice, HostView, Object, ServiceCidr};

use super::{DriverSettings, MOMENT, Running, Shared, pass, service, slice};

#[tokio::test(start_paused = true)]
async fn endpoint_change_leaves_pod_sockets_to_packets_for_a_minute() {
    let driver = Running::with(Shared::new(), DriverSettings::default());
    let flags = || {
        let store = driver.tables.0.lock().unwrap();
        let services = store.contents().services.values();
        services.filter(|entry| entry.kind == KIND_CLUSTER_IP).map(|entry| entry.flags).collect::<Vec<_>>()
    };
    driver.list(vec![service("a", 1), service("b", 2)], vec![slice("a", 1..3), slice("b", 3..5)]).await;
    pass(MOMENT).await;
    assert_eq!(flags(), [SERVICE_EJECTS; 2], "the first endpoints are no change");
    driver.send(Event::Apply(Object::Slice(slice("a", 1..4)))).await;
    pass(Duration::from_secs(50)).await;
    assert_eq!(flags(), [SERVICE_EJECTS | SERVICE_CHANGING, SERVICE_EJECTS], "one joined");
    driver.send(Event::Apply(Object::Slice(slice("a", 2..4)))).await;
    pass(Duration::from_secs(50)).await;
    assert_eq!(flags(), [SERVICE_EJECTS | SERVICE_CHANGING, SERVICE_EJECTS], "one left meanwhile");
    pass(Duration::from_secs(11)).await;
    assert_eq!(flags(), [SERVICE_EJECTS; 2]);
    let syncs = driver.status.borrow().sync_duration.count();
    pass(Duration::from_secs(20)).await;
    assert!(driver.status.borrow().sync_duration.count() <= syncs + 1, "nothing is left to end");
}

#[tokio::test(start_paused = true)]
async fn endpoint_change_leaves_sockets_of_the_node_to_packets_that_are_translated() {
    let untranslated = service("b", 2).cluster_ips;
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let driver = Running::with_node_path(move |address| {
        count.fetch_add(1, Ordering::Relaxed);
        !untranslated.contains(&address)
    });
    let flags = || {
        let store = driver.tables.0.lock().unwrap();
        let services = store.contents().services.values();
        services.filter(|entry| entry.kind == KIND_CLUSTER_IP).map(|entry| entry.flags).collect::<Vec<_>>()
    };
    let names = ["a", "b", "c"];
    let services = names.iter().zip(1..).map(|(name, number)| service(name, number)).collect();
    driver.list(services, vec![slice("a", 1..3), slice("b", 3..5), slice("c", 5..7)]).await;
    // The last endpoint of `c` is a process of the node.
    let own = slice("c", 5..8).endpoints.last().unwrap().address;
    let device = HostDevice { addresses: [own].into(), ..HostDevice::default() };
    driver.send(Event::Host(HostView { devices: [(1, device)].into(), ..HostView::default() })).await;
    pass(MOMENT).await;
    driver.send(Event::Apply(Object::Slice(slice("a", 1..5)))).await;
    pass(Duration::from_secs(62)).await;
    assert_eq!(asked.load(Ordering::Relaxed), 0, "no range is known in which the programs refuse");
    let (name, ranges) = ("all".to_owned(), vec!["10.96.0.0/16".parse().unwrap()]);
    driver.send(Event::Apply(Object::ServiceCidr(ServiceCidr { name, ranges }))).await;
    pass(MOMENT).await;
    for (name, endpoints) in names.into_iter().zip([1..4, 3..6, 5..8]) {
        driver.send(Event::Apply(Object::Slice(slice(name, endpoints)))).await;
    }
    pass(MOMENT).await;
    let pods = SERVICE_EJECTS | SERVICE_CHANGING;
    assert_eq!(flags(), [pods | SERVICE_CHANGING_NODE, pods, pods]);
    driver.send(Event::Apply(Object::Slice(slice("c", 5..7)))).await;
    pass(MOMENT).await;
    assert_eq!(flags(), [pods | SERVICE_CHANGING_NODE, pods, pods | SERVICE_CHANGING_NODE], "it left");
    pass(Duration::from_secs(62)).await;
    assert_eq!(flags(), [SERVICE_EJECTS; 3]);
}
