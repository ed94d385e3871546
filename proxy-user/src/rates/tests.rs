use std::time::Duration;

use proxy_common::stats::ServiceStats;
use rstest::rstest;

use super::*;
use crate::maps::view::{BackendRow, BackendState, FrontendRow, FrontendRowKind, NameRow, Transport};
use proxy_core::model::net::IpFamily;
use proxy_core::plan::Scope;

const TCP: Transport = Transport(6);
const WEB: u32 = 3;

/// Adds a Service port with a cluster address.
pub(crate) fn service(counters: &mut Counters, id: u32, name: &str) {
    let name = NameRow {
        namespace: "default".into(),
        name: name.into(),
        port: "http".into(),
        protocol: TCP,
        family: IpFamily::V4,
    };
    counters.snapshot.names.insert(id, name);
    counters.snapshot.frontends.push(FrontendRow {
        service: id,
        address: [10, 96, 0, id as u8].into(),
        port: 80,
        protocol: TCP,
        scope: Scope::Internal,
        kind: FrontendRowKind::ClusterIp,
        backends: Vec::new(),
        slots: 0,
        affinity_secs: 0,
        algorithm: "random",
        by_load: false,
        outside: None,
        dsr: false,
        when_empty: "reject",
        local: false,
        restricted: false,
    });
}

/// Adds an endpoint with this number of connections.
pub(crate) fn endpoint(counters: &mut Counters, id: u32, service: u32, connections: u64) {
    let row = BackendRow {
        socket: ([10, 244, 0, id as u8], 8080).into(),
        protocol: TCP,
        service,
        state: BackendState::Active,
        local: id % 2 == 1,
        terminating: false,
        weight: 100,
    };
    counters.snapshot.backends.insert(id, row);
    counters.snapshot.backend_stats.insert(id, connections);
}

/// Returns two readings of `web` with two endpoints, two seconds apart; its counters are 0 in the first one.
pub(crate) fn two_looks() -> (Counters, Counters) {
    let mut before = Counters { at: Duration::from_secs(10), ..Counters::default() };
    service(&mut before, WEB, "web");
    endpoint(&mut before, 1, WEB, 0);
    endpoint(&mut before, 2, WEB, 0);
    let mut after = Counters { at: Duration::from_secs(12), ..before.clone() };
    let stats =
        ServiceStats { connections: 40, packets: 100, bytes: 6_000, reply_packets: 60, reply_bytes: 54_000 };
    after.snapshot.service_stats.insert(WEB, stats);
    endpoint(&mut after, 1, WEB, 30);
    endpoint(&mut after, 2, WEB, 10);
    after.snapshot.refusals.insert((WEB, Reason::SourceNotAllowed), 8);
    after.snapshot.refusals.insert((WEB, Reason::OutOfWindow), 100);
    after.reasons = [(Reason::SourceNotAllowed, 10), (Reason::OutOfWindow, 100), (Reason::NoRoute, 0)].into();
    (before, after)
}

#[test]
fn counters_become_rates() {
    let (before, after) = two_looks();
    let rates = Rates::between(Some(&before), &after);
    let [web] = &rates.services[..] else { panic!("{rates:?}") };
    let expected = Traffic { connections: 20.0, packets: 80.0, bytes: 30_000.0, failures: 4.0 };
    assert_eq!((web.rates, &*web.service, web.connections), (expected, "default/web:http", 40));
    assert_eq!(web.failures, [("source_not_allowed", 4.0)].into(), "what passes is no failure");
    let shares: Vec<_> = web.endpoints.iter().map(|row| (row.connections, row.share)).collect();
    assert_eq!(shares, [(15.0, Some(0.75)), (5.0, Some(0.25))]);
    // The total includes refusals of packets that belong to no Service.
    assert_eq!(rates.total, Traffic { failures: 5.0, ..expected });
    let reasons: Vec<_> = rates.reasons.iter().map(|row| (row.reason, row.verdict, row.rate)).collect();
    assert_eq!(reasons, [("source_not_allowed", "drop", 5.0), ("out_of_window", "pass", 50.0)]);
}

#[test]
fn rates_are_zero_with_only_one_sample() {
    let (_, after) = two_looks();
    let rates = Rates::between(None, &after);
    assert_eq!((rates.seconds, rates.total), (0.0, Traffic::default()));
    assert_eq!((rates.services[0].rates, rates.services[0].endpoints[0].share), (Traffic::default(), None));
    assert_eq!(rates.services[0].connections, 40, "totals are known");
    let again = Rates::between(Some(&after), &after);
    assert_eq!(again.total, Traffic::default(), "no time has passed");
}

#[rstest]
#[case::grown(10, 30, 10.0)]
#[case::maps_made_anew(1_000, 30, 15.0)]
#[case::wrapped(u64::MAX - 9, 10, 10.0)]
fn a_counter_that_goes_back_begins_anew_or_wraps(#[case] from: u64, #[case] to: u64, #[case] rate: f64) {
    let (mut before, mut after) = two_looks();
    let stats = |connections| ServiceStats { connections, ..ServiceStats::default() };
    before.snapshot.service_stats.insert(WEB, stats(from));
    after.snapshot.service_stats.insert(WEB, stats(to));
    let found = Rates::between(Some(&before), &after).services[0].rates.connections;
    assert!((found - rate).abs() < 1e-9, "{found}");
}

#[test]
fn reused_id_starts_at_zero() {
    let (mut before, mut after) = two_looks();
    before.snapshot.names.get_mut(&WEB).unwrap().name = "db".into();
    endpoint(&mut before, 1, 99, 0);
    after.snapshot.backends.get_mut(&2).unwrap().socket = ([10, 244, 0, 77], 8080).into();
    let rates = Rates::between(Some(&before), &after);
    assert_eq!(rates.services[0].rates, Traffic::default());
    assert!(rates.services[0].endpoints.iter().all(|row| row.connections == 0.0), "{rates:?}");
}

#[test]
fn a_service_that_left_is_gone_and_its_draining_endpoint_with_it() {
    let (before, mut after) = two_looks();
    after.snapshot.frontends.clear();
    for row in after.snapshot.backends.values_mut() {
        row.state = BackendState::Gone;
    }
    assert_eq!(Rates::between(Some(&before), &after).services, []);
    // A removed endpoint is shown while it has open connections.
    after.snapshot.by_load.insert(WEB);
    after.snapshot.open_connections = [(1, 2), (2, 0)].into();
    let rates = Rates::between(Some(&before), &after);
    let left: Vec<_> = rates.services[0].endpoints.iter().map(|row| (row.id, row.state, row.open)).collect();
    assert_eq!(left, [(1, "gone", Some(2))]);
}

#[test]
fn rates_show_ejections_and_trials() {
    let (before, mut after) = two_looks();
    after.snapshot.ejected.insert(1, 7);
    after.on_trial.insert(2);
    let rates = Rates::between(Some(&before), &after);
    let events: Vec<_> =
        rates.services[0].endpoints.iter().map(|row| (row.ejected_seconds, row.on_trial)).collect();
    assert_eq!(events, [(Some(7), false), (None, true)]);
}

fn busy(ids: &[u32]) -> Rates {
    let rates = Traffic { connections: 1.0, ..Traffic::default() };
    let one = |id: &u32| ServiceRates {
        id: *id,
        service: format!("default/s{id}"),
        rates,
        ..ServiceRates::default()
    };
    Rates { services: ids.iter().map(one).collect(), total: rates, ..Rates::default() }
}

#[test]
fn a_history_keeps_the_last_points_of_those_that_were_active_last() {
    let mut history = History::new(3, 2);
    for _ in 0..5 {
        history.add(&busy(&[1]));
    }
    assert_eq!((history.of(1).count(), history.total().count()), (3, 3));
    // For a known Service port, a reading without traffic adds a point, too.
    let mut silent = busy(&[1, 4]);
    for service in &mut silent.services {
        service.rates = Traffic::default();
    }
    history.add(&silent);
    assert_eq!(history.of(1).map(|point| point.connections).collect::<Vec<_>>(), [1.0, 1.0, 0.0]);
    assert_eq!(history.of(4).count(), 0);
    let mut three = busy(&[1, 2, 3]);
    three.services[0].rates = Traffic::default();
    history.add(&three);
    assert_eq!([1, 2, 3].map(|id| history.of(id).count()), [0, 1, 1]);
    history.add(&busy(&[3]));
    assert_eq!(history.of(2).count(), 0, "it left");
    let mut other = busy(&[3]);
    other.services[0].service = "default/another".into();
    history.add(&other);
    assert_eq!(history.of(3).count(), 1, "another Service under the same id");
}

#[test]
fn totals_need_no_frontends_and_no_endpoints() {
    let (mut before, mut after) = two_looks();
    let whole = Rates::between(Some(&before), &after);
    for counters in [&mut before, &mut after] {
        counters.snapshot.frontends.clear();
        counters.snapshot.backends.clear();
        counters.snapshot.backend_stats.clear();
    }
    let totals = Rates::of_totals(Some(&before), &after);
    assert_eq!((totals.total, &totals.reasons), (whole.total, &whole.reasons));
    let [web] = &totals.services[..] else { panic!("{totals:?}") };
    assert_eq!((web.key(), web.rates), (whole.services[0].key(), whole.services[0].rates));
    assert_eq!(web.key(), "default/web:http/TCP/IPv4");
    assert_eq!(Rates::between(Some(&before), &after).services, [], "there, it would have left");
}

#[test]
fn a_history_is_found_by_the_name_that_all_nodes_have() {
    let mut history = History::new(3, 2);
    let (before, after) = two_looks();
    history.add(&Rates::of_totals(Some(&before), &after));
    let points: Vec<_> = history.by_key("default/web:http/TCP/IPv4").collect();
    assert_eq!(points, [Point { connections: 20.0, packets: 80.0, bytes: 30_000.0, failures: 4.0 }]);
    assert_eq!(history.by_key("default/web:http/TCP/IPv6").count(), 0);
}
