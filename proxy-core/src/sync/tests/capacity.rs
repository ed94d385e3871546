//! Tables that are too small: the Service concerned gets a clear error, and the others are programmed.

use std::time::Duration;

use super::{Fixture, ROOMY};
use crate::model::Problem;
use crate::plan::ServicePlan;
use crate::store::{Capacity, FrontendKey};
use crate::testing::generator::{Change, name, service};

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
