//! Tables that are too small: the Service concerned gets a clear error, and the others are programmed.

use std::time::Duration;

use ipnet::IpNet;

use super::{Fixture, ROOMY};
use crate::model::net::IpFamily;
use crate::model::{Problem, ServiceName, TrafficPolicy};
use crate::plan::slow_start::STEPS;
use crate::plan::{
    Access, BackendFacts, Frontend, FrontendKind, FrontendPlan, HealthCheck, Scope, ServicePlan,
    ServicePortName,
};
use crate::store::{Capacity, Faults, FrontendKey};
use crate::testing::generator::{Change, backend, frontend, name, service};

fn problem(fixture: &Fixture) -> Problem {
    let problems = fixture.reconciler.problems();
    assert_eq!(problems.len(), 1, "{problems:?}");
    problems[0].clone()
}

fn serves(fixture: &Fixture, address: u8) -> Option<u32> {
    let addr = std::net::Ipv4Addr::new(10, 96, 0, address).into();
    let key = FrontendKey { addr, port: 80, proto: 6, scope: 0 };
    fixture.contents().services.get(&key).map(|entry| entry.slot_count)
}

/// With space for two Services, the third waits until space is freed.
#[track_caller]
fn third_waits(capacity: Capacity, setting: &str) {
    let mut fixture = Fixture::new(capacity);
    fixture.change([service("a", 1, [1]), service("b", 2, [2])]);
    assert_eq!(fixture.reconciler.problems(), [], "exactly at the limit");
    fixture.change([service("c", 3, [3])]);
    let found = problem(&fixture);
    assert_eq!(found.object, "Service default/c");
    assert!(found.message.contains(setting), "{found}");
    assert_eq!((serves(&fixture, 1), serves(&fixture, 2)), (Some(1), Some(1)));
    fixture.change([service("a", 1, [])]);
    assert_eq!(serves(&fixture, 1), Some(0), "the others go on");
    fixture.change([(name("a"), None)]);
    fixture.wait(Duration::from_secs(61));
    fixture.again();
    assert_eq!(fixture.reconciler.problems(), [], "room was made");
    fixture.assert_right();
}

#[test]
fn frontends_run_out() {
    third_waits(Capacity { frontends: 2, ..ROOMY }, "--max-frontends");
}

#[test]
fn service_ids_run_out() {
    third_waits(Capacity { services: 3, ..ROOMY }, "--max-services");
}

#[test]
fn slots_run_out() {
    third_waits(Capacity { slots: 2, ..ROOMY }, "--max-slots");
}

#[test]
fn failing_service_is_retried_at_once_when_slots_are_freed() {
    let mut fixture = Fixture::new(Capacity { slots: 13, ..ROOMY });
    fixture.change([service("a", 1, 1..6), service("b", 2, 1..6)]);
    fixture.change([service("a", 1, 1..7)]);
    for _ in 0..5 {
        assert_eq!(fixture.reconciler.failing(), 1);
        fixture.now = fixture.reconciler.wake().unwrap();
        fixture.again();
    }
    let retry = fixture.reconciler.wake().unwrap();
    fixture.change([(name("b"), None)]);
    fixture.wait(Duration::from_secs(1));
    fixture.again();
    assert!(fixture.now < retry);
    assert_eq!(fixture.reconciler.problems(), []);
    fixture.assert_right();
}

#[test]
fn flows_are_read_every_minute_while_service_ids_run_out() {
    let mut fixture = Fixture::new(Capacity { services: 3, ..ROOMY });
    let connections = fixture.connections();
    fixture.change([service("a", 1, [1]), service("b", 2, [2])]);
    let id = *fixture.contents().names.iter().find(|(_, name)| name.as_str().contains("/a:")).unwrap().0;
    connections.state().services.insert(id);
    fixture.change([(name("a"), None)]);
    for _ in 0..2 {
        fixture.wait(Duration::from_secs(61));
        fixture.again();
        assert!(fixture.contents().names.contains_key(&id));
    }
    connections.state().services.clear();
    fixture.wait(Duration::from_secs(61));
    fixture.again();
    assert!(!fixture.contents().names.contains_key(&id));
}

#[test]
fn ids_of_deleted_ports_are_free_after_quarantine() {
    let mut fixture = Fixture::new(Capacity { services: 33, ..ROOMY });
    fixture.change((0..32).map(|number| service(&number.to_string(), number, [number])));
    for number in 0..30 {
        fixture.change([(name(&number.to_string()), None)]);
        fixture.wait(Duration::from_millis(100));
    }
    fixture.wait(Duration::from_secs(55));
    for _ in 0..20 {
        fixture.wait(Duration::from_secs(1));
        fixture.again();
    }
    assert_eq!(fixture.contents().names.len(), 2);
}

#[test]
fn bits_of_a_service_that_never_fit_are_cleared() {
    let mut fixture = Fixture::new(Capacity { slots: 13, ..ROOMY });
    fixture.change([service("a", 1, 1..6)]);
    // The replaced extent is in quarantine, and three slots are free.
    fixture.change([service("a", 1, 2..7), service("b", 2, 10..14)]);
    assert_eq!(fixture.reconciler.failing(), 1);
    fixture.change([(name("a"), None), (name("b"), None)]);
    for _ in 0..2 {
        fixture.wait(Duration::from_hours(25));
        fixture.again();
    }
    assert!(fixture.contents().prefilter.iter().all(|word| *word == 0));
}

#[test]
fn without_endpoint_ids_those_that_have_one_are_served() {
    let mut fixture = Fixture::new(Capacity { backends: 4, ..ROOMY });
    fixture.trust_nothing();
    fixture.change([service("a", 1, 1..6)]);
    assert_eq!(serves(&fixture, 1), Some(3));
    assert!(problem(&fixture).message.contains("--max-backends"));
    fixture.change([service("b", 2, [9])]);
    assert_eq!(serves(&fixture, 2), Some(0));
    fixture.change([service("a", 1, [1])]);
    fixture.wait(Duration::from_secs(61));
    fixture.again();
    assert_eq!(fixture.reconciler.problems(), []);
    fixture.assert_right();
}

#[test]
fn a_service_that_outgrows_the_slots_keeps_its_old_set() {
    let mut fixture = Fixture::new(Capacity { slots: 8, ..ROOMY });
    fixture.change([service("a", 1, 1..6)]);
    fixture.change([service("a", 1, 1..7)]);
    assert_eq!(serves(&fixture, 1), Some(5));
    let found = problem(&fixture);
    assert!(found.message.contains("no room for 6 slots: 3 are free, the longest free range"), "{found}");
    fixture.change([service("a", 1, 1..3)]);
    assert_eq!((serves(&fixture, 1), fixture.reconciler.failing()), (Some(2), 0));
}

#[test]
fn an_endpoint_that_left_serves_no_longer_when_there_is_no_room_for_new_slots() {
    let mut fixture = Fixture::new(Capacity { slots: 8, ..ROOMY });
    fixture.trust_nothing();
    fixture.change([service("a", 1, 1..6)]);
    fixture.change([service("a", 1, 2..7)]);
    assert!(problem(&fixture).message.contains("--max-slots"), "five slots are in use, and five are wanted");
    let state = |fixture: &Fixture, last: u8| {
        let contents = fixture.contents();
        let is_it = |addr: std::net::IpAddr| addr == std::net::IpAddr::from([10, 1, 0, last]);
        contents.backends.values().find(|row| is_it(row.addr)).map(|row| row.state)
    };
    assert_eq!(state(&fixture, 1), Some(proxy_common::backend::BACKEND_GONE));
    assert_eq!(state(&fixture, 2), Some(proxy_common::backend::BACKEND_ACTIVE));
    fixture.wait(Duration::from_secs(61));
    fixture.again();
    fixture.change([service("a", 1, 2..5)]);
    assert_eq!((serves(&fixture, 1), fixture.reconciler.failing()), (Some(3), 0));
    fixture.wait(Duration::from_secs(61));
    fixture.again();
    assert_eq!(state(&fixture, 1), None, "its id was freed");
    fixture.assert_right();
}

/// Returns a Service with an entry for its address as such.
fn with_address(of: &str, number: u8) -> Change {
    let (name, plan) = service(of, number, [number]);
    let plan = plan.map(|plan| ServicePlan {
        addresses: [std::net::Ipv4Addr::new(10, 96, 0, number).into()].into(),
        ..plan
    });
    (name, plan)
}

#[test]
fn frontends_take_the_room_of_addresses() {
    let mut fixture = Fixture::new(Capacity { frontends: 4, ..ROOMY });
    // The tables have fewer addresses than the oracle asks for, so only the final state is checked.
    fixture.trust_nothing();
    fixture.change([with_address("a", 1), with_address("b", 2)]);
    assert_eq!(fixture.reconciler.problems(), [], "two frontends and two addresses");
    fixture.change([with_address("c", 3), with_address("d", 4)]);
    for number in 1..=4 {
        assert_eq!(serves(&fixture, number), Some(1), "{number}");
    }
    assert_eq!(fixture.contents().services.len(), 4, "no address");
    assert_eq!(fixture.reconciler.failing(), 0);
    assert!(problem(&fixture).message.contains("raise --max-frontends"));
    // The retry for the addresses does not remove a frontend.
    fixture.wait(Duration::from_secs(61));
    fixture.again();
    assert_eq!((1..=4).filter(|number| serves(&fixture, *number).is_some()).count(), 4);
    fixture.change([(name("c"), None), (name("d"), None)]);
    fixture.wait(Duration::from_secs(61));
    fixture.again();
    fixture.wait(Duration::from_secs(61));
    fixture.again();
    assert_eq!(fixture.reconciler.problems(), []);
    fixture.assert_right();
}

/// A Service with a health check that counts one local endpoint.
fn checked(of: &str, address: u8, endpoints: u8) -> Change {
    let (name, plan) = service(of, address, 1..=endpoints);
    let local = [(IpFamily::V4, 1)].into();
    let health_check = Some(HealthCheck { port: 30_000, local });
    (name, plan.map(|plan| ServicePlan { health_check, ..plan }))
}

#[test]
fn health_check_without_entries_counts_no_endpoint() {
    let mut fixture = Fixture::new(Capacity { slots: 2, ..ROOMY });
    let local = |fixture: &Fixture, of: &str| {
        fixture.reconciler.health_checks().get(&name(of)).map(|check| check.local[&IpFamily::V4])
    };
    fixture.change([checked("a", 1, 1), checked("b", 2, 1)]);
    fixture.change([checked("c", 3, 1)]);
    assert_eq!((local(&fixture, "a"), local(&fixture, "c")), (Some(1), Some(0)));
    let mut fixture = Fixture::new(Capacity { slots: 8, ..ROOMY });
    fixture.change([checked("b", 2, 5)]);
    fixture.change([checked("b", 2, 6)]);
    assert_eq!(fixture.reconciler.failing(), 1);
    assert_eq!(local(&fixture, "b"), Some(1), "its earlier entries still serve");
}

/// Adds frontends of a load balancer: clients outside may use the endpoints in `local`, and clients inside those in `cluster`.
fn with_lists((name, mut plan): Change, local: &[u8], cluster: &[u8]) -> Change {
    for port in plan.iter_mut().flat_map(|plan| plan.ports.values_mut()) {
        let list = |of: &[u8]| of.iter().map(|last| backend(*last)).collect::<Vec<_>>();
        let facts = |at: &_| BackendFacts {
            in_local: list(local).contains(at),
            in_cluster: list(cluster).contains(at),
            ..BackendFacts::default()
        };
        port.backends = port.backends.keys().map(|at| (*at, facts(at))).collect();
        let what = FrontendPlan::new(FrontendKind::LoadBalancer);
        let inside = FrontendPlan { scoped: true, slots: Some(list(cluster).into()), ..what.clone() };
        let outside = FrontendPlan { policy: TrafficPolicy::Local, slots: Some(list(local).into()), ..what };
        let external = Frontend { scope: Scope::External, ..frontend(200) };
        port.frontends.insert(frontend(200), inside);
        port.frontends.insert(external, outside);
    }
    (name, plan)
}

#[test]
fn each_frontend_has_an_endpoint_if_there_are_too_few_ids() {
    // 14 of 16 ids are planned.
    let mut fixture = Fixture::new(Capacity { backends: 17, ..ROOMY });
    fixture.trust_nothing();
    let local = |fixture: &Fixture| fixture.reconciler.health_checks()[&name("a")].local[&IpFamily::V4];
    let counts = |fixture: &Fixture| {
        let services =
            fixture.contents().services.iter().filter(|(key, _)| key.addr == frontend(200).address);
        services.map(|(_, entry)| entry.slot_count).collect::<Vec<_>>()
    };
    let all: Vec<u8> = (1..=20).collect();
    fixture.change([with_lists(checked("a", 1, 20), &[20], &all)]);
    assert_eq!((counts(&fixture), local(&fixture)), (vec![14, 1], 1), "policy Local");
    fixture.change([with_lists(checked("a", 1, 20), &all[..17], &[18, 19])]);
    fixture.wait(Duration::from_secs(61));
    fixture.again();
    assert_eq!(counts(&fixture), [2, 12], "hints");
    // Another Service had all ids first.
    fixture.change([service("b", 2, 30..46), (name("a"), None)]);
    fixture.wait(Duration::from_secs(61));
    fixture.again();
    fixture.change([with_lists(checked("a", 1, 20), &[20], &all)]);
    assert_eq!((counts(&fixture), local(&fixture)), (vec![2, 1], 1), "one endpoint of each list");
}

#[test]
fn slow_start_beyond_half_of_slots_uses_weights() {
    let starts = |endpoints: u8| {
        let (name, mut plan) = service("a", 1, 1..=endpoints);
        for facts in plan
            .iter_mut()
            .flat_map(|plan| plan.ports.values_mut())
            .flat_map(|port| port.backends.values_mut())
        {
            (facts.weight, facts.step) = (1, STEPS);
        }
        let first = plan.iter_mut().flat_map(|plan| plan.ports.values_mut()).next().unwrap();
        first.backends.values_mut().next_back().unwrap().step = 1;
        (name, plan)
    };
    let mut fixture = Fixture::new(ROOMY);
    // The oracle knows no slow start.
    fixture.trust_nothing();
    fixture.change([starts(20)]);
    assert_eq!(serves(&fixture, 1), Some(19 * 10 + 1));
    fixture.change([starts(100)]);
    assert_eq!((serves(&fixture, 1), fixture.reconciler.problems()), (Some(100), vec![]));
}

/// Returns the change of a Service with its Service in this namespace.
pub(super) fn within(namespace: &str, (name, plan): Change) -> Change {
    let id = |port: ServicePortName| ServicePortName { namespace: namespace.into(), ..port };
    let plan = plan.map(|plan| ServicePlan {
        ports: plan.ports.into_iter().map(|(port, plan)| (id(port), plan)).collect(),
        ..plan
    });
    (ServiceName::new(namespace, &*name.name), plan)
}

#[test]
fn one_namespace_leaves_reserve_to_others() {
    // 112 of 127 ids are planned, and 108 are needed.
    let mut fixture = Fixture::new(Capacity { backends: 128, ..ROOMY });
    fixture.trust_nothing();
    fixture.change([
        within("big", service("a", 1, 0..75)),
        within("evil", service("b", 2, 100..130)),
        within("shop", service("c", 3, 200..203)),
    ]);
    assert_eq!(fixture.reconciler.problems(), []);
    fixture.change([within("evil", service("b", 2, 130..160))]);
    for first in [203, 206] {
        fixture.change([within("shop", service("c", 3, first..first + 3))]);
        assert_eq!(serves(&fixture, 3), Some(3), "{first}");
        fixture.change([within("evil", service("b", 2, 160..190))]);
    }
    assert_eq!(problem(&fixture).object, "Service evil/b");
    fixture.wait(Duration::from_secs(61));
    fixture.again();
    fixture.assert_right();
}

/// Returns a Service with an address of a load balancer, which accepts one client.
fn for_client(of: &str, number: u8, client: [u8; 4]) -> Change {
    let (name, mut plan) = service(of, number, [number]);
    for port in plan.iter_mut().flat_map(|plan| plan.ports.values_mut()) {
        port.source_ranges = [IpNet::from(std::net::IpAddr::from(client))].into();
        port.frontends.values_mut().for_each(|what| what.access = Access::Ranges { node: false });
    }
    (name, plan)
}

#[test]
fn source_ranges_fit_after_one_namespace_replaced_its_own() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.trust_nothing();
    let evil = |net: u8| {
        (0..52).map(move |at: u8| within("evil", for_client(&at.to_string(), at, [10, 7, net, at])))
    };
    let shop = |last: u8| within("shop", for_client("shop", 60, [10, 8, 0, last]));
    fixture.change(evil(0).chain([shop(0)]));
    assert_eq!(fixture.reconciler.problems(), []);
    fixture.change(evil(1));
    for last in 1..4 {
        fixture.change([shop(last)]);
        let problems = fixture.reconciler.problems();
        assert!(problems.iter().all(|problem| problem.object.contains("evil/")), "{last}: {problems:?}");
        fixture.change(evil(1 + last));
    }
    for _ in 0..40 {
        fixture.wait(Duration::from_secs(2));
        fixture.again();
    }
    fixture.assert_right();
}

/// Returns a Service with three addresses of load balancers and this policy for clients outside.
fn outside(policy: TrafficPolicy) -> Change {
    let (name, mut plan) = service("outside", 1, [1]);
    for port in plan.iter_mut().flat_map(|plan| plan.ports.values_mut()) {
        let what = FrontendPlan::new(FrontendKind::LoadBalancer);
        let scoped = policy == TrafficPolicy::Local;
        let inside = (1..4).map(|last| (frontend(last), FrontendPlan { scoped, ..what.clone() }));
        let external = |last| Frontend { scope: Scope::External, ..frontend(last) };
        let outside = (1..4).filter(|_| scoped).map(|last| (external(last), what.clone()));
        port.frontends = inside.chain(outside).collect();
    }
    (name, plan)
}

#[test]
fn frontends_fit_after_policy_local_became_cluster() {
    // Seven of them are planned.
    let mut fixture = Fixture::new(Capacity { frontends: 8, ..ROOMY });
    fixture.change([outside(TrafficPolicy::Local)]);
    assert_eq!((fixture.contents().services.len(), fixture.reconciler.problems()), (6, vec![]));
    let others = (4..8).map(|number| within("shop", service(&number.to_string(), number, [number])));
    fixture.change([outside(TrafficPolicy::Cluster)].into_iter().chain(others));
    assert_eq!(fixture.reconciler.problems(), []);
    fixture.assert_right();
}

#[test]
fn problem_of_address_ends_after_its_entry_is_written() {
    let mut is_back = false;
    for fails in 0..20 {
        let mut fixture = Fixture::new(Capacity { frontends: 4, ..ROOMY });
        fixture.trust_nothing();
        fixture.change([with_address("a", 1), with_address("b", 2)]);
        fixture.faults(Faults { at: [fails].into(), ..Faults::default() });
        fixture.change([service("c", 3, [3])]);
        let problems = fixture.reconciler.problems();
        let is_reported = problems.iter().any(|problem| problem.message.contains("undefined ports"));
        let addresses = fixture.contents().services.keys().filter(|key| key.port == 0).count();
        assert_eq!(is_reported, addresses < 2, "{fails}: {problems:?}");
        is_back |= !problems.is_empty() && !is_reported;
    }
    assert!(is_back, "the new frontend failed after it was given room");
}

#[test]
fn sync_that_changes_no_problem_has_no_new_problems() {
    let mut fixture = Fixture::new(Capacity { frontends: 3, ..ROOMY });
    fixture.change([service("a", 1, [1])]);
    assert!(!fixture.has_new_problems);
    // One frontend for two Services.
    fixture.change([service("b", 1, [2])]);
    assert!(fixture.has_new_problems && fixture.reconciler.problems().len() == 1);
    fixture.change([service("a", 1, [1, 2])]);
    assert!(!fixture.has_new_problems, "the problem lasts");
    fixture.change((2..6).map(|number| service(&format!("c{number}"), number, [number])));
    assert!(fixture.has_new_problems && fixture.reconciler.problems().len() > 1);
    fixture.change([service("a", 1, [1])]);
    assert!(!fixture.has_new_problems);
    fixture.change([("a", None), ("b", None)].map(|(of, plan)| (service(of, 1, [1]).0, plan)));
    assert!(fixture.has_new_problems);
}

#[test]
fn newer_services_of_a_namespace_displace_no_older_one() {
    let mut fixture = Fixture::new(Capacity { frontends: 64, ..ROOMY });
    fixture.trust_nothing();
    let created = |(name, mut plan): Change, created| {
        plan.iter_mut().for_each(|plan| plan.created = created);
        (name, plan)
    };
    let (name, mut old) = created(service("old", 1, [1]), 1);
    for port in old.iter_mut().flat_map(|plan| plan.ports.values_mut()) {
        let (at, what) = port.frontends.iter().next().map(|(at, what)| (*at, what.clone())).unwrap();
        for number in 1..4 {
            port.frontends.insert(Frontend { port: number, ..at }, what.clone());
        }
    }
    fixture.change([(name.clone(), old)]);
    for number in 2..80 {
        fixture.change([created(service(&format!("new-{number}"), number, [1]), 2)]);
        assert!(!fixture.reconciler.is_failing(&name), "beside {number}");
    }
    assert!(fixture.reconciler.failing() > 0);
    // One that grows beyond an eighth displaces none, although it is older.
    let large = service("large", 200, 1..=3);
    let (name, mut large) = created(large, 0);
    for port in large.iter_mut().flat_map(|plan| plan.ports.values_mut()) {
        let (at, what) = port.frontends.iter().next().map(|(at, what)| (*at, what.clone())).unwrap();
        for number in 1..20 {
            port.frontends.insert(Frontend { port: number, ..at }, what.clone());
        }
    }
    fixture.change([(name.clone(), large)]);
    assert!(fixture.reconciler.is_failing(&name));
}
