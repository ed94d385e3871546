//! Services whose idle connections move to endpoints that joined.

use std::time::Duration;

use proxy_common::service::{KIND_CLUSTER_IP, SERVICE_REBALANCES};
use proxy_core::model::{Event, Object, Service};

use super::{DriverSettings, MOMENT, Running, Shared, pass, service, slice};

#[tokio::test(start_paused = true)]
async fn joined_endpoint_lets_connections_move_for_two_minutes() {
    let driver = Running::with(Shared::new(), DriverSettings::default());
    let moves = || {
        let store = driver.tables.0.lock().unwrap();
        let services = store.contents().services.values();
        let moves = |flags: u16| flags & SERVICE_REBALANCES != 0;
        let frontends = services.filter(|entry| entry.kind == KIND_CLUSTER_IP);
        let moving = frontends.map(|entry| moves(entry.flags)).collect::<Vec<_>>();
        (moving, driver.status.borrow().rebalances)
    };
    let with = Service { rebalances: true, ..service("a", 1) };
    driver.list(vec![with, service("b", 2)], vec![slice("a", 1..3), slice("b", 3..5)]).await;
    pass(Duration::from_secs(10)).await;
    assert_eq!(moves(), (vec![false, false], 0), "the first endpoints have not joined others");
    driver.send(Event::Apply(Object::Slice(slice("a", 1..4)))).await;
    driver.send(Event::Apply(Object::Slice(slice("b", 3..6)))).await;
    pass(Duration::from_secs(4)).await;
    assert_eq!(moves(), (vec![false, false], 0), "another endpoint may follow");
    pass(Duration::from_secs(2)).await;
    assert_eq!(moves(), (vec![true, false], 1), "only with the annotation");
    driver.send(Event::Apply(Object::Slice(slice("a", 1..5)))).await;
    pass(MOMENT).await;
    assert_eq!(moves(), (vec![false, false], 0), "another endpoint has joined");
    pass(Duration::from_mins(2)).await;
    assert_eq!(moves(), (vec![true, false], 1));
    driver.send(Event::Apply(Object::Slice(slice("a", 2..5)))).await;
    pass(MOMENT).await;
    assert_eq!(moves(), (vec![true, false], 1), "one left");
    pass(Duration::from_secs(7)).await;
    assert_eq!(moves(), (vec![false, false], 0));
    let syncs = driver.status.borrow().sync_duration.count();
    pass(Duration::from_secs(20)).await;
    assert!(driver.status.borrow().sync_duration.count() <= syncs + 1, "nothing is left to end");
}
