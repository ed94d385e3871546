//! Services whose endpoints change.

use std::time::Duration;

use proxy_common::service::{KIND_CLUSTER_IP, SERVICE_CHANGING, SERVICE_EJECTS};

use super::{DriverSettings, MOMENT, Running, Shared, pass, service, slice};
use proxy_core::model::{Event, Object};

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
