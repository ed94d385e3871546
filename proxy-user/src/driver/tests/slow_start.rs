//! Slow start in the driver.

use std::time::Duration;

use super::{DriverSettings, MOMENT, Running, Shared, pass, service, slice, vip};
use proxy_core::model::{Event, Object};

#[tokio::test(start_paused = true)]
async fn the_share_of_an_endpoint_that_joins_others_grows_step_by_step() {
    let settings = DriverSettings { slow_start: Duration::from_secs(9), ..DriverSettings::default() };
    let driver = Running::with(Shared::new(), settings);
    let weights = || {
        let store = driver.tables.0.lock().unwrap();
        store.contents().backends.values().map(|row| row.flags >> 16).collect::<Vec<_>>()
    };
    driver.list(vec![service("a", 1)], vec![slice("a", 1..3)]).await;
    pass(MOMENT).await;
    assert_eq!(weights(), [1, 1], "the first ones are alone");
    driver.send(Event::Apply(Object::Slice(slice("a", 1..4)))).await;
    pass(MOMENT).await;
    for step in 1..10 {
        assert_eq!((weights(), driver.seen()[&vip(1)]), (vec![10, 10, step], shares(step)));
        pass(Duration::from_secs(1)).await;
    }
    assert_eq!((weights(), driver.seen()[&vip(1)]), (vec![1, 1, 1], 3));
    let syncs = driver.status.borrow().sync_duration.count();
    pass(Duration::from_secs(10)).await;
    assert!(driver.status.borrow().sync_duration.count() <= syncs + 2, "nothing is left to grow");
}

#[tokio::test(start_paused = true)]
async fn endpoints_that_join_one_after_the_other_share_steps() {
    let settings = DriverSettings { slow_start: Duration::from_secs(30), ..DriverSettings::default() };
    let driver = Running::with(Shared::new(), settings);
    driver.list(vec![service("a", 1)], vec![slice("a", 0..2)]).await;
    pass(Duration::from_secs(5)).await;
    for last in 3..103 {
        driver.send(Event::Apply(Object::Slice(slice("a", 0..last)))).await;
        pass(Duration::from_millis(10)).await;
    }
    let syncs = || driver.status.borrow().sync_duration.count();
    let before = syncs();
    pass(Duration::from_secs(32)).await;
    assert_eq!(driver.seen()[&vip(1)], 102, "all have their full share");
    assert!((9..=35).contains(&(syncs() - before)), "{}", syncs() - before);
}

/// Returns the slots of two endpoints with share 10 and one with share `step`, divided by the greatest common divisor.
fn shares(step: u32) -> usize {
    let common =
        (1..=10).rev().find(|one| step.is_multiple_of(*one) && 10_u32.is_multiple_of(*one)).unwrap_or(1);
    ((20 + step) / common) as usize
}
