//! Removal policies: when rows are marked so that connections are reset.

use std::time::Duration;

use proxy_common::backend::{BACKEND_ACTIVE, BACKEND_GONE, BACKEND_RESET};

use super::{Fixture, ROOMY};
use crate::model::ServiceName;
use crate::plan::ServicePlan;
use crate::store::Faults;
use crate::testing::generator::{port_id, service};

const DELAY: Duration = Duration::from_secs(30);

/// Returns a Service whose policy is `reset` with this delay; `None`: `drain`.
fn resets(
    endpoints: impl IntoIterator<Item = u8>,
    delay: Option<Duration>,
) -> [(ServiceName, Option<ServicePlan>); 1] {
    let (name, mut plan) = service("a", 1, endpoints);
    for port in plan.iter_mut().flat_map(|plan| plan.ports.values_mut()) {
        port.reset_after = delay;
    }
    [(name, plan)]
}

fn state(fixture: &Fixture, id: u32) -> Option<u8> {
    fixture.contents().backends.get(&id).map(|row| row.state)
}

/// Returns a fixture with two endpoints, the first of which was removed.
fn left(delay: Option<Duration>) -> Fixture {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change(resets([1, 2], delay));
    fixture.change(resets([2], delay));
    fixture
}

#[test]
fn a_row_says_so_when_the_delay_is_over_and_not_before() {
    let mut fixture = left(Some(DELAY));
    assert_eq!(state(&fixture, 1), Some(BACKEND_GONE));
    let due = fixture.now + DELAY;
    // The replaced extent stays in quarantine for a second.
    fixture.wait(Duration::from_secs(2));
    fixture.again();
    assert_eq!(fixture.reconciler.wake(), Some(due));
    fixture.wait(Duration::from_millis(27_999));
    assert_eq!(fixture.again(), 0);
    fixture.wait(Duration::from_millis(1));
    assert_eq!(fixture.again(), 1);
    assert_eq!((state(&fixture, 1), fixture.reconciler.counters().resets()), (Some(BACKEND_RESET), 1));
    fixture.assert_right();
    // Its quarantine restarts, so that the processes that reset connections find it.
    fixture.wait(Duration::from_secs(59));
    assert_eq!((fixture.again(), state(&fixture, 1)), (0, Some(BACKEND_RESET)));
    fixture.wait(Duration::from_secs(1));
    assert_eq!((fixture.again(), state(&fixture, 1)), (1, None));
}

#[test]
fn without_a_delay_rows_are_marked_after_two_seconds() {
    let mut fixture = left(Some(Duration::ZERO));
    fixture.wait(Duration::from_millis(1_999));
    fixture.again();
    assert_eq!(state(&fixture, 1), Some(BACKEND_GONE));
    fixture.wait(Duration::from_millis(1));
    fixture.again();
    assert_eq!(state(&fixture, 1), Some(BACKEND_RESET));
    fixture.assert_right();
}

/// Returns the Service of [`resets`] without a delay, with this name of its port.
fn with_port(port: &str, endpoints: impl IntoIterator<Item = u8>) -> [(ServiceName, Option<ServicePlan>); 1] {
    let [(name, mut plan)] = resets(endpoints, Some(Duration::ZERO));
    if let Some(plan) = &mut plan {
        let ports = std::mem::take(&mut plan.ports).into_iter();
        plan.ports = ports.map(|(_, plan)| (port_id("a", port), plan)).collect();
    }
    [(name, plan)]
}

#[test]
fn renamed_port_whose_slices_follow_resets_nothing() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change(with_port("", [1, 2]));
    fixture.change(with_port("http", []));
    assert_eq!([1, 2].map(|id| state(&fixture, id)), [Some(BACKEND_GONE); 2]);
    fixture.wait(Duration::from_secs(1));
    fixture.again();
    fixture.change(with_port("http", [1, 2]));
    fixture.wait(DELAY);
    fixture.again();
    assert_eq!([1, 2].map(|id| state(&fixture, id)), [Some(BACKEND_ACTIVE); 2]);
    assert_eq!(fixture.reconciler.counters().resets(), 0);
    fixture.assert_right();
}

#[test]
fn rows_of_a_removed_service_stay_marked_after_a_restart() {
    let mut fixture = left(Some(DELAY));
    let [(name, _)] = resets([], None);
    fixture.change([(name, None)]);
    fixture.wait(DELAY);
    fixture.again();
    let mut fixture = fixture.restarted();
    fixture.tell_all();
    assert_eq!([1, 2].map(|id| state(&fixture, id)), [Some(BACKEND_RESET); 2]);
}

#[test]
fn by_default_nothing_is_reset() {
    let mut fixture = left(None);
    fixture.wait(Duration::from_secs(59));
    fixture.again();
    assert_eq!((state(&fixture, 1), fixture.reconciler.counters().resets()), (Some(BACKEND_GONE), 0));
}

#[test]
fn reset_delay_longer_than_the_quarantine_keeps_the_row() {
    let long = Duration::from_mins(10);
    let mut fixture = left(Some(long));
    for _ in 0..9 {
        fixture.wait(Duration::from_mins(1));
        fixture.again();
        assert_eq!(state(&fixture, 1), Some(BACKEND_GONE));
    }
    fixture.wait(Duration::from_mins(1));
    fixture.again();
    assert_eq!(state(&fixture, 1), Some(BACKEND_RESET));
}

#[test]
fn an_endpoint_that_comes_back_in_time_is_not_reset() {
    let mut fixture = left(Some(DELAY));
    fixture.wait(DELAY / 2);
    fixture.change(resets([1, 2], Some(DELAY)));
    fixture.wait(DELAY);
    assert_eq!((fixture.again(), state(&fixture, 1)), (0, Some(BACKEND_ACTIVE)));
    // After the reset, it can serve again, too.
    fixture.change(resets([2], Some(DELAY)));
    fixture.wait(DELAY);
    fixture.again();
    assert_eq!(state(&fixture, 1), Some(BACKEND_RESET));
    fixture.change(resets([1, 2], Some(DELAY)));
    assert_eq!(state(&fixture, 1), Some(BACKEND_ACTIVE));
    fixture.assert_right();
}

#[test]
fn a_policy_that_changes_counts_for_endpoints_that_have_left() {
    let mut fixture = left(None);
    fixture.change(resets([2], Some(DELAY)));
    fixture.wait(DELAY);
    fixture.again();
    assert_eq!(state(&fixture, 1), Some(BACKEND_RESET), "the delay begins with the policy");
    fixture.change(resets([2], None));
    assert_eq!(state(&fixture, 1), Some(BACKEND_GONE), "what is not reset yet goes on");
    let mut fixture = left(Some(DELAY));
    fixture.change(resets([2], None));
    fixture.wait(DELAY);
    fixture.again();
    assert_eq!(state(&fixture, 1), Some(BACKEND_GONE));
    let mut fixture = left(Some(DELAY));
    fixture.change(resets([2], Some(DELAY / 2)));
    fixture.wait(DELAY / 2);
    fixture.again();
    assert_eq!(state(&fixture, 1), Some(BACKEND_RESET), "a shorter delay counts from when the endpoint left");
}

#[test]
fn of_a_service_that_is_gone_the_last_policy_counts() {
    let mut fixture = left(Some(DELAY));
    let [(name, _)] = resets([], None);
    fixture.change([(name, None)]);
    assert_eq!([1, 2].map(|id| state(&fixture, id)), [Some(BACKEND_GONE); 2]);
    fixture.wait(DELAY);
    fixture.again();
    assert_eq!([1, 2].map(|id| state(&fixture, id)), [Some(BACKEND_RESET); 2]);
    let mut syncs = 0;
    while let Some(at) = fixture.reconciler.wake().filter(|_| !fixture.contents().names.is_empty()) {
        fixture.now = at;
        fixture.again();
        syncs += 1;
        assert!(syncs < 10, "the port waits for its endpoints without a sync");
    }
    assert_eq!(state(&fixture, 1), None, "the rows are freed in the end");
    fixture.assert_right();
}

#[test]
fn after_a_restart_the_delay_begins_anew() {
    let fixture = left(Some(DELAY));
    let mut fixture = fixture.restarted();
    fixture.tell_all();
    assert_eq!(state(&fixture, 1), Some(BACKEND_GONE));
    fixture.wait(DELAY);
    fixture.again();
    assert_eq!(state(&fixture, 1), Some(BACKEND_RESET));
    let mut fixture = fixture.restarted();
    assert_eq!(fixture.tell_all(), 0, "what is said stays said");
    fixture.assert_right();
}

#[test]
fn a_write_that_fails_is_made_again_and_does_not_keep_the_driver_busy() {
    let mut fixture = left(Some(DELAY));
    fixture.wait(DELAY);
    fixture.faults(Faults { per_mille: 1000, ..Faults::default() });
    fixture.again();
    assert_eq!(state(&fixture, 1), Some(BACKEND_GONE));
    assert!(fixture.reconciler.wake().is_some_and(|at| at > fixture.now));
    fixture.faults(Faults::default());
    fixture.wait(Duration::from_secs(1));
    fixture.again();
    assert_eq!(state(&fixture, 1), Some(BACKEND_RESET));
}
