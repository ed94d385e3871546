//! Static Services before the API server has listed its objects.

use proxy_common::service::KIND_CLUSTER_IP;

use super::*;

fn statics(services: Vec<Service>, slices: Vec<EndpointSlice>) -> Event {
    Event::Static { services, slices }
}

/// Asserts that all entries of the earlier agent are unchanged.
fn assert_kept(before: &Contents, after: &Contents) {
    for (key, entry) in &before.services {
        assert_eq!(after.services.get(key), Some(entry), "{key:?}");
    }
    for (id, row) in before.backends.iter().chain(&before.backends6) {
        let now = after.backends.get(id).or_else(|| after.backends6.get(id));
        assert_eq!(now, Some(row), "{id}");
    }
    for (id, name) in &before.names {
        assert_eq!(after.names.get(id), Some(name), "{id}");
    }
    let has_moved =
        before.slots.iter().zip(&after.slots).any(|(before, after)| *before != 0 && before != after);
    assert!(!has_moved, "a slot");
    assert_eq!((&before.source_ranges, &before.maglev), (&after.source_ranges, &after.maglev));
    let lost = before.prefilter.iter().zip(&after.prefilter).any(|(before, after)| before & !after != 0);
    assert!(!lost, "a bit of the prefilter");
}

#[tokio::test(start_paused = true)]
async fn the_first_agent_serves_them_at_once_and_the_cluster_comes_later() {
    let driver = Running::new();
    driver.send(Event::Host(HostView::default())).await;
    driver.send(statics(vec![service("vip", 200)], vec![slice("vip", 1..3)])).await;
    pass(MOMENT).await;
    assert_eq!(driver.seen(), BTreeMap::from([(vip(200), 2)]));
    let status = driver.status.borrow().clone();
    assert!(status.statics_synced && !status.synced && !status.services_listed);
    // A part of the cluster's objects must not be programmed: it would be a Service without endpoints.
    driver.send(Event::Reset(Listing::Services(vec![service("a", 1)]))).await;
    driver.send(statics(vec![service("vip", 200)], vec![slice("vip", 1..2)])).await;
    pass(MOMENT).await;
    assert_eq!(driver.seen(), BTreeMap::from([(vip(200), 1)]));
    driver.send(Event::Reset(Listing::Slices(vec![slice("a", 3..7)]))).await;
    pass(MOMENT).await;
    assert_eq!(driver.seen(), BTreeMap::from([(vip(1), 4), (vip(200), 1)]));
    assert!(driver.status.borrow().synced);
    driver.send(statics(vec![], vec![])).await;
    pass(Duration::from_millis(100)).await;
    assert_eq!(driver.seen(), BTreeMap::from([(vip(1), 4)]));
}

#[tokio::test(start_paused = true)]
async fn what_an_earlier_agent_programmed_stays_until_all_is_listed() {
    let driver = Running::new();
    driver.send(Event::Host(HostView::default())).await;
    driver.list(vec![service("a", 1), service("b", 2)], vec![slice("a", 1..4), slice("b", 4..6)]).await;
    pass(Duration::from_secs(5)).await;
    drop(driver.events);
    let tables = driver.task.await.unwrap();
    let before = tables.0.lock().unwrap().contents().clone();
    let next = Running::start(tables);
    next.send(Event::Host(HostView::default())).await;
    next.send(statics(vec![service("vip", 200)], vec![slice("vip", 1..3)])).await;
    next.send(Event::Reset(Listing::Services(vec![service("b", 2)]))).await;
    pass(Duration::from_mins(5)).await;
    assert_eq!(next.seen(), BTreeMap::from([(vip(1), 3), (vip(2), 2), (vip(200), 2)]));
    let after = next.tables.0.lock().unwrap().contents().clone();
    assert_kept(&before, &after);
    assert_eq!(before.node, after.node, "of the node, the earlier agent knew more");
    // A Service that leaves the folder stays, too: the cluster may have it.
    next.send(statics(vec![], vec![])).await;
    pass(Duration::from_mins(5)).await;
    assert_eq!(next.seen().len(), 3);
    next.send(Event::Reset(Listing::Slices(vec![slice("b", 4..6)]))).await;
    pass(MOMENT).await;
    assert_eq!(next.seen(), BTreeMap::from([(vip(2), 2)]));
}

#[tokio::test(start_paused = true)]
async fn the_service_of_the_folder_is_the_one_that_is_programmed() {
    let driver = Running::new();
    driver.send(Event::Host(HostView::default())).await;
    driver.send(statics(vec![service("a", 200)], vec![slice("a", 1..3)])).await;
    driver.list(vec![service("a", 1)], vec![]).await;
    pass(MOMENT).await;
    assert_eq!(driver.seen(), BTreeMap::from([(vip(200), 2)]));
    let status = driver.status.borrow().clone();
    let told: Vec<_> = status.problems.iter().map(|problem| &*problem.field).collect();
    assert_eq!((told, status.failed.len()), (vec!["metadata.name"], 0));
    let entries = driver.tables.0.lock().unwrap().contents().services.clone();
    assert_eq!(entries.values().filter(|entry| entry.kind == KIND_CLUSTER_IP).count(), 1);
}
