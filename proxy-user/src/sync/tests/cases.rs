//! The cases of kube-proxy's own tests of what a sync may write, and of who owns a frontend.

use std::sync::Arc;
use std::time::Duration;

use proxy_common::backend::{BACKEND_ACTIVE, BACKEND_GONE};

use super::universe::{backend, frontend, name, port_id, service};
use super::{ROOMY, World};
use crate::maps::Faults;
use crate::model::ServiceName;
use crate::plan::{Frontend, FrontendKind, FrontendPlan, Scope, ServicePlan};
use crate::sync::entries::frontend_key;

/// The id of an endpoint of a Service.
fn id(world: &World, of: &str, last: u8) -> u32 {
    let applied = world.reconciler.applied();
    let service = applied.ports.get(&port_id(of, "http")).unwrap();
    applied.endpoints.get(&(service, backend(last))).unwrap()
}

fn owner(world: &World, address: u8) -> String {
    let entry = world.contents().services[&frontend_key(&frontend(address))];
    world.contents().names[&entry.id].as_str().to_owned()
}

#[test]
fn inc_1_a_new_service_writes_its_own_entries_only() {
    let mut world = World::new(ROOMY);
    world.change([service("a", 1, 1..3)]);
    // A name, one endpoint, two bits, one slot, one frontend.
    assert_eq!(world.change([service("b", 2, [9])]), 6);
    world.assert_right();
}

#[test]
fn inc_2_a_deletion_removes_at_once_what_clients_see_and_the_rest_later() {
    let mut world = World::new(ROOMY);
    world.change([service("a", 1, 1..3), service("b", 2, [9])]);
    // The frontend goes, and its endpoint is gone.
    assert_eq!(world.change([(name("b"), None)]), 2);
    world.assert_right();
    world.wait(Duration::from_mins(1));
    // The endpoint's id and the name.
    assert_eq!(world.again(), 2);
    world.wait(Duration::from_hours(24));
    assert_eq!(world.again(), 2, "the two bits");
    world.assert_right();
}

#[test]
fn inc_3_nothing_new_writes_nothing() {
    let mut world = World::new(ROOMY);
    world.change([service("a", 1, 1..3)]);
    assert_eq!((world.again(), world.tell_all()), (0, 0));
}

#[test]
fn inc_4_and_5_the_first_endpoint_comes_later() {
    let mut world = World::new(ROOMY);
    assert_eq!(world.change([service("a", 1, [])]), 3, "a name, a bit, a frontend");
    assert_eq!(world.change([service("a", 1, [1])]), 4, "an endpoint, its bit, a slot, the commit");
    world.assert_right();
}

#[test]
fn inc_8_9_and_10_emptied_and_restored() {
    let mut world = World::new(ROOMY);
    world.change([service("a", 1, [1])]);
    let before = id(&world, "a", 1);
    assert_eq!(world.change([service("a", 1, [])]), 2, "the commit, and the endpoint is gone");
    assert_eq!(world.contents().backends[&before].state, BACKEND_GONE);
    assert_eq!(
        world.change([service("a", 1, [1])]),
        2,
        "the endpoint serves, and the commit, to the old slots"
    );
    assert_eq!(id(&world, "a", 1), before);
    world.wait(Duration::from_mins(2));
    assert_eq!(world.again(), 0, "the removal is off");
    world.change([service("a", 1, [])]);
    world.wait(Duration::from_mins(2));
    assert_eq!(world.again(), 1, "now it is freed");
    world.change([service("a", 1, [1])]);
    assert_ne!(id(&world, "a", 1), before, "ids never used come first");
    world.assert_right();
}

#[test]
fn the_order_of_slots_is_no_change() {
    let mut world = World::new(ROOMY);
    world.change([service("a", 1, [3, 1, 2])]);
    let (name, plan) = service("a", 1, [1, 2, 3]);
    let mut plan = plan.unwrap();
    for port in plan.ports.values_mut() {
        let reversed: Arc<[_]> = port.backends.keys().rev().copied().collect();
        port.frontends.values_mut().for_each(|frontend| frontend.slots = Some(Arc::clone(&reversed)));
    }
    assert_eq!(world.change([(name, Some(plan))]), 0);
}

#[test]
fn frontends_of_one_port_with_one_set_share_an_extent() {
    let mut world = World::new(ROOMY);
    let (name, plan) = service("a", 1, 1..4);
    let mut plan = plan.unwrap();
    let port = plan.ports.values_mut().next().unwrap();
    let what = port.frontends.get(&frontend(1)).unwrap().clone();
    port.frontends.insert(frontend(2), what);
    world.change([(name, Some(plan))]);
    assert_eq!(world.reconciler.applied().extents.slots_used(), 3);
    world.assert_right();
}

#[test]
fn endpoints_of_two_services_never_share_an_id() {
    let mut world = World::new(ROOMY);
    world.change([service("a", 1, [1]), service("b", 2, [1])]);
    let (a, b) = (id(&world, "a", 1), id(&world, "b", 1));
    world.change([service("a", 1, [])]);
    assert_eq!(world.contents().backends[&a].state, BACKEND_GONE);
    assert_eq!(world.contents().backends[&b].state, BACKEND_ACTIVE);
}

fn claimed(of: &str, created: i64, kind: FrontendKind) -> (ServiceName, Option<ServicePlan>) {
    let (name, plan) = service(of, 1, [1]);
    let mut plan = ServicePlan { created, ..plan.unwrap() };
    for port in plan.ports.values_mut() {
        port.frontends.values_mut().for_each(|frontend| frontend.kind = kind);
    }
    (name, Some(plan))
}

#[test]
fn the_older_service_keeps_its_frontend_and_the_other_gets_it_afterwards() {
    use FrontendKind::{ClusterIp, ExternalIp};
    let mut world = World::new(ROOMY);
    world.change([claimed("young", 2, ExternalIp)]);
    assert_eq!(owner(&world, 1), "default/young:http");
    world.change([claimed("old", 1, ExternalIp)]);
    assert_eq!(owner(&world, 1), "default/old:http");
    let problems = world.reconciler.problems();
    assert_eq!((problems.len(), problems[0].object.as_str()), (1, "Service default/young"));
    assert!(problems[0].message.contains("belongs to default/old:http"), "{}", problems[0]);
    world.change([claimed("cluster", 9, ClusterIp)]);
    assert_eq!(owner(&world, 1), "default/cluster:http", "a cluster address beats age");
    world.change([claimed("also-old", 1, ExternalIp), (name("cluster"), None)]);
    assert_eq!(owner(&world, 1), "default/also-old:http", "of one age, the name that sorts first");
    world.change([(name("also-old"), None), (name("old"), None)]);
    assert_eq!(owner(&world, 1), "default/young:http");
    assert_eq!(world.reconciler.problems(), []);
    world.assert_right();
}

#[test]
fn a_service_that_fails_keeps_what_it_had_and_is_tried_again() {
    let mut world = World::new(ROOMY);
    world.change([service("a", 1, [1]), service("b", 2, [2])]);
    world.faults(Faults { at: [0].into(), ..Faults::default() });
    // Both change; the first write is the new endpoint of `a`.
    world.change([service("a", 1, [1, 5]), service("b", 2, [2, 6])]);
    assert_eq!(world.reconciler.failing(), 1);
    assert_eq!(world.reconciler.problems()[0].object, "Service default/a");
    assert!(world.reconciler.wake().unwrap() <= world.now + Duration::from_millis(100));
    let b = world.contents().services[&frontend_key(&frontend(2))];
    assert_eq!(b.slot_count, 2, "the others go on");
    world.wait(Duration::from_millis(100));
    world.again();
    assert_eq!(world.reconciler.failing(), 0);
    world.assert_right();
}

#[test]
fn a_frontend_that_moves_to_a_port_that_fails_does_not_stay_with_the_old_one() {
    let mut world = World::new(ROOMY);
    world.change([service("a", 1, [1])]);
    world.faults(Faults { at: [0].into(), ..Faults::default() });
    // The name of `b` is the first write.
    world.change([(name("a"), None), service("b", 1, [2])]);
    assert!(world.contents().services.is_empty());
    world.wait(Duration::from_secs(1));
    world.again();
    world.assert_right();
}

#[test]
fn clients_outside_are_never_sent_to_an_entry_that_is_gone_whichever_write_fails() {
    for fails in 0..8 {
        let mut world = World::new(ROOMY);
        let (name, plan) = service("a", 1, [1]);
        let mut plan = plan.unwrap();
        for port in plan.ports.values_mut() {
            let (inside, what) = port.frontends.pop_first().unwrap();
            port.frontends.insert(Frontend { scope: Scope::External, ..inside }, what.clone());
            port.frontends.insert(inside, FrontendPlan { scoped: true, ..what });
        }
        world.change([(name.clone(), Some(plan))]);
        // The guard of `World` looks at every state in between.
        world.faults(Faults { at: [fails].into(), ..Faults::default() });
        world.change([(name, None)]);
        world.wait(Duration::from_secs(31));
        world.again();
        world.assert_right();
        assert_eq!(world.reconciler.problems(), []);
    }
}

#[test]
fn an_endpoint_that_joins_is_told_of_those_that_served_before() {
    let mut world = World::new(ROOMY);
    world.change([service("a", 1, 1..3)]);
    let joined = |world: &World, last: u8| {
        world.reconciler.store().inner().joined().get(&id(world, "a", last)).cloned()
    };
    assert_eq!([joined(&world, 1), joined(&world, 2)], [Some(vec![]), Some(vec![])], "there was none before");
    world.change([service("a", 1, [2, 9])]);
    let before = [1, 2].map(|last| id(&world, "a", last)).to_vec();
    assert_eq!(joined(&world, 9), Some(before), "the one that leaves served until then");
    // It comes back with its id.
    world.change([service("a", 1, [1, 2, 9])]);
    assert_eq!(joined(&world, 1), Some([2, 9].map(|last| id(&world, "a", last)).to_vec()));
}

#[test]
fn what_has_rested_is_freed_together() {
    let mut world = World::new(ROOMY);
    for last in 2..32 {
        world.wait(Duration::from_millis(100));
        world.change([service("a", 1, [1, last])]);
    }
    // As the driver does when nothing changes.
    let mut syncs = 0;
    while let Some(at) = world.reconciler.wake().filter(|at| *at < world.now + Duration::from_mins(2)) {
        world.now = at.max(world.now + Duration::from_millis(1));
        world.again();
        syncs += 1;
    }
    assert!((2..=8).contains(&syncs), "{syncs} syncs to free 30 extents and 29 ids");
    assert_eq!(world.reconciler.applied().extents.slots_used(), 2);
    assert_eq!(world.reconciler.applied().endpoints.used(), 2);
    world.assert_right();
}
