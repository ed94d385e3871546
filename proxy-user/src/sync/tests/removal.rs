//! Removal policies: when rows say that connections are reset.

use std::time::Duration;

use proxy_common::backend::{BACKEND_ACTIVE, BACKEND_GONE, BACKEND_RESET};

use super::universe::service;
use super::{ROOMY, World};
use crate::maps::Faults;
use crate::model::ServiceName;
use crate::plan::ServicePlan;

const DELAY: Duration = Duration::from_secs(30);

/// A Service whose policy is `reset` with this delay; `None`: `drain`.
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

fn state(world: &World, id: u32) -> Option<u8> {
    world.contents().backends.get(&id).map(|row| row.state)
}

/// Two endpoints, of which the first has left.
fn left(delay: Option<Duration>) -> World {
    let mut world = World::new(ROOMY);
    world.change(resets([1, 2], delay));
    world.change(resets([2], delay));
    world
}

#[test]
fn a_row_says_so_when_the_delay_is_over_and_not_before() {
    let mut world = left(Some(DELAY));
    assert_eq!(state(&world, 1), Some(BACKEND_GONE));
    let due = world.now + DELAY;
    // What is replaced rests for a second.
    world.wait(Duration::from_secs(2));
    world.again();
    assert_eq!(world.reconciler.wake(), Some(due));
    world.wait(Duration::from_millis(27_999));
    assert_eq!(world.again(), 0);
    world.wait(Duration::from_millis(1));
    assert_eq!(world.again(), 1);
    assert_eq!((state(&world, 1), world.reconciler.counters().resets()), (Some(BACKEND_RESET), 1));
    world.assert_right();
    // It rests anew, so that those who reset connections find it.
    world.wait(Duration::from_secs(59));
    assert_eq!((world.again(), state(&world, 1)), (0, Some(BACKEND_RESET)));
    world.wait(Duration::from_secs(1));
    assert_eq!((world.again(), state(&world, 1)), (1, None));
}

#[test]
fn without_a_delay_it_is_one_sync() {
    let world = left(Some(Duration::ZERO));
    assert_eq!(state(&world, 1), Some(BACKEND_RESET));
    world.assert_right();
}

#[test]
fn by_default_nothing_is_reset() {
    let mut world = left(None);
    world.wait(Duration::from_secs(59));
    world.again();
    assert_eq!((state(&world, 1), world.reconciler.counters().resets()), (Some(BACKEND_GONE), 0));
}

#[test]
fn a_delay_longer_than_ids_rest_keeps_the_row() {
    let long = Duration::from_mins(10);
    let mut world = left(Some(long));
    for _ in 0..9 {
        world.wait(Duration::from_mins(1));
        world.again();
        assert_eq!(state(&world, 1), Some(BACKEND_GONE));
    }
    world.wait(Duration::from_mins(1));
    world.again();
    assert_eq!(state(&world, 1), Some(BACKEND_RESET));
}

#[test]
fn an_endpoint_that_comes_back_in_time_is_not_reset() {
    let mut world = left(Some(DELAY));
    world.wait(DELAY / 2);
    world.change(resets([1, 2], Some(DELAY)));
    world.wait(DELAY);
    assert_eq!((world.again(), state(&world, 1)), (0, Some(BACKEND_ACTIVE)));
    // And after the reset it serves again.
    world.change(resets([2], Some(DELAY)));
    world.wait(DELAY);
    world.again();
    assert_eq!(state(&world, 1), Some(BACKEND_RESET));
    world.change(resets([1, 2], Some(DELAY)));
    assert_eq!(state(&world, 1), Some(BACKEND_ACTIVE));
    world.assert_right();
}

#[test]
fn a_policy_that_changes_counts_for_endpoints_that_have_left() {
    let mut world = left(None);
    world.change(resets([2], Some(DELAY)));
    world.wait(DELAY);
    world.again();
    assert_eq!(state(&world, 1), Some(BACKEND_RESET), "counted from when the policy was told");
    world.change(resets([2], None));
    assert_eq!(state(&world, 1), Some(BACKEND_GONE), "what is not reset yet goes on");
    let mut world = left(Some(DELAY));
    world.change(resets([2], None));
    world.wait(DELAY);
    world.again();
    assert_eq!(state(&world, 1), Some(BACKEND_GONE));
    let mut world = left(Some(DELAY));
    world.change(resets([2], Some(DELAY / 2)));
    world.wait(DELAY / 2);
    world.again();
    assert_eq!(state(&world, 1), Some(BACKEND_RESET), "a shorter delay counts from when the endpoint left");
}

#[test]
fn of_a_service_that_is_gone_the_last_policy_counts() {
    let mut world = left(Some(DELAY));
    let [(name, _)] = resets([], None);
    world.change([(name, None)]);
    assert_eq!([1, 2].map(|id| state(&world, id)), [Some(BACKEND_GONE); 2]);
    world.wait(DELAY);
    world.again();
    assert_eq!([1, 2].map(|id| state(&world, id)), [Some(BACKEND_RESET); 2]);
    for _ in 0..4 {
        world.wait(Duration::from_mins(1));
        world.again();
    }
    assert_eq!(state(&world, 1), None, "the rows are freed in the end");
    world.assert_right();
}

#[test]
fn after_a_restart_the_delay_begins_anew() {
    let world = left(Some(DELAY));
    let mut world = world.restarted();
    world.tell_all();
    assert_eq!(state(&world, 1), Some(BACKEND_GONE));
    world.wait(DELAY);
    world.again();
    assert_eq!(state(&world, 1), Some(BACKEND_RESET));
    let mut world = world.restarted();
    assert_eq!(world.tell_all(), 0, "what is said stays said");
    world.assert_right();
}

#[test]
fn a_write_that_fails_is_made_again_and_does_not_keep_the_driver_busy() {
    let mut world = left(Some(DELAY));
    world.wait(DELAY);
    world.faults(Faults { per_mille: 1000, ..Faults::default() });
    world.again();
    assert_eq!(state(&world, 1), Some(BACKEND_GONE));
    assert!(world.reconciler.wake().is_some_and(|at| at > world.now));
    world.faults(Faults::default());
    world.wait(Duration::from_secs(1));
    world.again();
    assert_eq!(state(&world, 1), Some(BACKEND_RESET));
}
