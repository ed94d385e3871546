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
