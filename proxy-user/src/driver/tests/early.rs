//! Static Services before the API server has listed its objects.

use proxy_common::backend::tunnel_of;
use proxy_common::service::KIND_CLUSTER_IP;
use proxy_core::model::ForwardingMode;

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
async fn a_node_without_entries_is_failing_until_something_is_programmed() {
    let failing = |driver: &Running| driver.status.borrow().failing_since.len();
    let driver = Running::new();
    driver.send(Event::Host(HostView::default())).await;
    pass(Duration::from_mins(5)).await;
    assert_eq!(failing(&driver), 2, "the API server does not answer");
    driver.list(vec![service("a", 1)], vec![slice("a", 1..4)]).await;
    pass(MOMENT).await;
    assert_eq!(failing(&driver), 0);
    drop(driver.events);
    let next = Running::start(driver.task.await.unwrap());
    assert_eq!(failing(&next), 0, "the earlier agent's entries serve");
    let with_statics = Running::new();
    with_statics.send(Event::Host(HostView::default())).await;
    with_statics.send(statics(vec![service("vip", 200)], vec![slice("vip", 1..3)])).await;
    pass(MOMENT).await;
    assert_eq!(failing(&with_statics), 0);
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
    let fields: Vec<_> = status.problems.iter().map(|problem| &*problem.field).collect();
    assert_eq!((fields, status.failed.len()), (vec!["metadata.name"], 0));
    let entries = driver.tables.0.lock().unwrap().contents().services.clone();
    assert_eq!(entries.values().filter(|entry| entry.kind == KIND_CLUSTER_IP).count(), 1);
}

#[tokio::test(start_paused = true)]
async fn uplink_by_internal_address_stays_one_while_the_api_server_is_away() {
    let driver = Running::new();
    driver.send(machine(&[vip(9)])).await;
    let node = NodeView { internal_ips: vec![vip(9)], ..NodeView::new("node") };
    driver.send(Event::Reset(Listing::Node(Some(node)))).await;
    driver.list(vec![service("a", 1)], vec![slice("a", 1..4)]).await;
    pass(Duration::from_secs(5)).await;
    drop(driver.events);
    let tables = driver.task.await.unwrap();
    let before = tables.0.lock().unwrap().contents().node.clone();
    assert_eq!(before.config.0.uplinks, [7, 0, 0]);
    let next = Running::start(tables);
    next.send(machine(&[vip(9)])).await;
    pass(Duration::from_mins(5)).await;
    assert_eq!(next.tables.0.lock().unwrap().contents().node, before);
    // A device that is gone gives its place to others.
    next.send(Event::Host(HostView::default())).await;
    pass(MOMENT).await;
    assert_eq!(next.tables.0.lock().unwrap().contents().node.config.0.uplinks, [0; 3]);
}

#[tokio::test(start_paused = true)]
async fn endpoints_keep_their_tunnels_until_the_nodes_are_listed_again() {
    let nodes = |others: &[u8]| {
        let node =
            |last: &u8| NodeView { internal_ips: vec![vip(*last)], ..NodeView::new(format!("n{last}")) };
        let own = NodeView { internal_ips: vec![vip(9)], ..NodeView::new("node") };
        Event::Reset(Listing::Others(others.iter().map(node).chain([own]).collect()))
    };
    let plan = PlanSettings { forwarding: ForwardingMode::Dsr, ..PlanSettings::default() };
    let start = |tables| Running::with(tables, DriverSettings { plan, ..DriverSettings::default() });
    let mut outside = service("a", 1);
    outside.external_ips = vec![vip(2)];
    let mut slice = slice("a", 1..4);
    for endpoint in &mut slice.endpoints {
        endpoint.node = Some("n3".into());
    }
    let driver = start(Shared::new());
    driver.send(machine(&[vip(9)])).await;
    driver.send(nodes(&[3])).await;
    driver.list(vec![outside.clone()], vec![slice.clone()]).await;
    pass(Duration::from_secs(5)).await;
    drop(driver.events);
    let tables = driver.task.await.unwrap();
    let before = tables.0.lock().unwrap().contents().backends.clone();
    assert!(before.values().all(|row| tunnel_of(row.flags) == 1), "{before:?}");
    let next = start(tables);
    next.send(machine(&[vip(9)])).await;
    next.list(vec![outside], vec![slice]).await;
    pass(Duration::from_secs(5)).await;
    let rows = || next.tables.0.lock().unwrap().contents().backends.clone();
    assert_eq!(rows(), before);
    next.send(nodes(&[])).await;
    pass(Duration::from_secs(1)).await;
    assert!(rows().values().all(|row| tunnel_of(row.flags) == 0), "their node is gone");
}
