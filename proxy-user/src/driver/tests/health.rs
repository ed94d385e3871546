//! The status of the driver if not everything can be programmed.

use super::*;

#[tokio::test(start_paused = true)]
async fn a_first_sync_that_failed_is_not_complete() {
    let capacity = Capacity { frontends: 2, ..Capacity::default() };
    let driver = Running::start(Shared(Arc::new(Mutex::new(MemoryStore::new(capacity))), Arc::default()));
    let names: Vec<_> = (0..6).map(|number| format!("s{number}")).collect();
    let services = names.iter().zip(1..).map(|(name, at)| service(name, at)).collect();
    driver.list(services, names.iter().map(|name| slice(name, 0..2)).collect()).await;
    pass(Duration::from_secs(1)).await;
    let status = driver.status.borrow().clone();
    assert!(status.synced && !status.complete, "{status:?}");
    let since = status.failing_since[&IpFamily::V4];
    assert_eq!((status.failing, status.failing_since.len()), (4, 1), "IPv6 has no part in it");
    pass(Duration::from_mins(2)).await;
    assert_eq!(driver.status.borrow().failing_since[&IpFamily::V4], since, "the same failure goes on");
    for name in &names[..3] {
        driver.send(Event::Delete(Key::Service(ServiceName::new("default", name)))).await;
    }
    pass(Duration::from_mins(2)).await;
    let status = driver.status.borrow().clone();
    assert!(status.complete && status.failing_since.is_empty(), "{:?}", status.problems);
    assert_eq!(status.failing, 1, "one Service that does not fit blocks no rollout");
}

#[tokio::test(start_paused = true)]
async fn the_driver_shows_progress_without_any_event() {
    let driver = Running::new();
    driver.list(vec![service("a", 1)], vec![slice("a", 1..4)]).await;
    for _ in 0..5 {
        pass(DriverSettings::default().sync_period).await;
        let progress = driver.status.borrow().progress.unwrap();
        assert!(progress.elapsed() <= DriverSettings::default().sync_period);
    }
}

#[tokio::test(start_paused = true)]
async fn family_is_up_to_date_while_idle_and_not_while_it_fails() {
    let capacity = Capacity { frontends: 2, ..Capacity::default() };
    let driver = Running::start(Shared(Arc::new(Mutex::new(MemoryStore::new(capacity))), Arc::default()));
    let at = || driver.status.borrow().up_to_date.clone();
    driver.list(vec![service("s0", 1)], vec![slice("s0", 0..2)]).await;
    pass(Duration::from_secs(1)).await;
    let first = at();
    pass(Duration::from_mins(2)).await;
    let idle = at();
    for family in [IpFamily::V4, IpFamily::V6] {
        assert!(first[&family] < idle[&family], "a comparison found everything");
    }
    for number in 1..6 {
        driver.send(Event::Apply(Object::Service(service(&format!("s{number}"), 1 + number)))).await;
    }
    pass(Duration::from_secs(1)).await;
    let failing = at();
    pass(Duration::from_mins(2)).await;
    assert!(driver.status.borrow().failing_since.contains_key(&IpFamily::V4));
    let later = at();
    assert_eq!(failing[&IpFamily::V4], later[&IpFamily::V4]);
    assert!(failing[&IpFamily::V6] < later[&IpFamily::V6]);
}
