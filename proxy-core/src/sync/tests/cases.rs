//! The cases of kube-proxy's own tests of which entries a sync may write, and which Service owns a frontend.

use std::sync::Arc;
use std::time::Duration;

use proxy_common::backend::{BACKEND_ACTIVE, BACKEND_GONE};
use proxy_common::service::SERVICE_CHANGING;

use super::{Fixture, ROOMY};
use crate::model::ServiceName;
use crate::plan::{Frontend, FrontendKind, FrontendPlan, Scope, ServicePlan};
use crate::store::Faults;
use crate::sync::entries::frontend_key;
use crate::testing::generator::{backend, frontend, name, port_id, service};

/// Returns the id of an endpoint of a Service.
fn id(fixture: &Fixture, of: &str, last: u8) -> u32 {
    let applied = fixture.reconciler.applied();
    let service = applied.ports.get(&port_id(of, "http")).unwrap();
    applied.endpoints.get(&(service, backend(last))).unwrap()
}

fn owner(fixture: &Fixture, address: u8) -> String {
    let entry = fixture.contents().services[&frontend_key(&frontend(address))];
    fixture.contents().names[&entry.id].as_str().to_owned()
}

#[test]
fn inc_1_a_new_service_writes_its_own_entries_only() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([service("a", 1, 1..3)]);
    // A name, one endpoint, two bits, one slot, one frontend.
    assert_eq!(fixture.change([service("b", 2, [9])]), 6);
    fixture.assert_right();
}

#[test]
fn inc_2_a_deletion_removes_at_once_what_clients_see_and_the_rest_later() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([service("a", 1, 1..3), service("b", 2, [9])]);
    // The frontend is removed, and its endpoint is marked as gone.
    assert_eq!(fixture.change([(name("b"), None)]), 2);
    fixture.assert_right();
    fixture.wait(Duration::from_mins(1));
    // The endpoint's id and the name.
    assert_eq!(fixture.again(), 2);
    fixture.wait(Duration::from_hours(24));
    assert_eq!(fixture.again(), 2, "the two bits");
    fixture.assert_right();
}

#[test]
fn inc_3_nothing_new_writes_nothing() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([service("a", 1, 1..3)]);
    assert_eq!((fixture.again(), fixture.tell_all()), (0, 0));
}

#[test]
fn inc_4_and_5_the_first_endpoint_comes_later() {
    let mut fixture = Fixture::new(ROOMY);
    assert_eq!(fixture.change([service("a", 1, [])]), 3, "a name, a bit, a frontend");
    assert_eq!(fixture.change([service("a", 1, [1])]), 4, "an endpoint, its bit, a slot, the commit");
    fixture.assert_right();
}

#[test]
fn inc_8_9_and_10_emptied_and_restored() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([service("a", 1, [1])]);
    let before = id(&fixture, "a", 1);
    assert_eq!(fixture.change([service("a", 1, [])]), 2, "the commit, and the endpoint is gone");
    assert_eq!(fixture.contents().backends[&before].state, BACKEND_GONE);
    assert_eq!(
        fixture.change([service("a", 1, [1])]),
        2,
        "the endpoint serves, and the commit, to the old slots"
    );
    assert_eq!(id(&fixture, "a", 1), before);
    fixture.wait(Duration::from_mins(2));
    assert_eq!(fixture.again(), 0, "the removal is off");
    fixture.change([service("a", 1, [])]);
    fixture.wait(Duration::from_mins(2));
    assert_eq!(fixture.again(), 1, "now it is freed");
    fixture.change([service("a", 1, [1])]);
    assert_ne!(id(&fixture, "a", 1), before, "ids never used come first");
    fixture.assert_right();
}

#[test]
fn the_order_of_slots_is_no_change() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([service("a", 1, [3, 1, 2])]);
    let (name, plan) = service("a", 1, [1, 2, 3]);
    let mut plan = plan.unwrap();
    for port in plan.ports.values_mut() {
        let reversed: Arc<[_]> = port.backends.keys().rev().copied().collect();
        port.frontends.values_mut().for_each(|frontend| frontend.slots = Some(Arc::clone(&reversed)));
    }
    assert_eq!(fixture.change([(name, Some(plan))]), 0);
}

#[test]
fn frontends_of_one_port_with_one_set_share_an_extent() {
    let mut fixture = Fixture::new(ROOMY);
    let (name, plan) = service("a", 1, 1..4);
    let mut plan = plan.unwrap();
    let port = plan.ports.values_mut().next().unwrap();
    let what = port.frontends.get(&frontend(1)).unwrap().clone();
    port.frontends.insert(frontend(2), what);
    fixture.change([(name, Some(plan))]);
    assert_eq!(fixture.reconciler.applied().extents.slots_used(), 3);
    fixture.assert_right();
}

#[test]
fn endpoints_of_two_services_never_share_an_id() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([service("a", 1, [1]), service("b", 2, [1])]);
    let (a, b) = (id(&fixture, "a", 1), id(&fixture, "b", 1));
    fixture.change([service("a", 1, [])]);
    assert_eq!(fixture.contents().backends[&a].state, BACKEND_GONE);
    assert_eq!(fixture.contents().backends[&b].state, BACKEND_ACTIVE);
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
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([claimed("young", 2, ExternalIp)]);
    assert_eq!(owner(&fixture, 1), "default/young:http");
    fixture.change([claimed("old", 1, ExternalIp)]);
    assert_eq!(owner(&fixture, 1), "default/old:http");
    let problems = fixture.reconciler.problems();
    assert_eq!((problems.len(), problems[0].object.as_str()), (1, "Service default/young"));
    assert!(problems[0].message.contains("is already used by default/old:http"), "{}", problems[0]);
    fixture.change([claimed("cluster", 9, ClusterIp)]);
    assert_eq!(owner(&fixture, 1), "default/cluster:http", "a cluster address beats age");
    fixture.change([claimed("also-old", 1, ExternalIp), (name("cluster"), None)]);
    assert_eq!(owner(&fixture, 1), "default/also-old:http", "of one age, the name that sorts first");
    fixture.change([(name("also-old"), None), (name("old"), None)]);
    assert_eq!(owner(&fixture, 1), "default/young:http");
    assert_eq!(fixture.reconciler.problems(), []);
    fixture.assert_right();
}

#[test]
fn a_service_that_fails_keeps_what_it_had_and_is_tried_again() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([service("a", 1, [1]), service("b", 2, [2])]);
    fixture.faults(Faults { at: [0].into(), ..Faults::default() });
    // Both Services change; the first write is the new endpoint of `a`.
    fixture.change([service("a", 1, [1, 5]), service("b", 2, [2, 6])]);
    assert_eq!(fixture.reconciler.failing(), 1);
    assert_eq!(fixture.reconciler.problems()[0].object, "Service default/a");
    assert!(fixture.reconciler.wake().unwrap() <= fixture.now + Duration::from_millis(100));
    let b = fixture.contents().services[&frontend_key(&frontend(2))];
    assert_eq!(b.slot_count, 2, "the others go on");
    fixture.wait(Duration::from_millis(100));
    fixture.again();
    assert_eq!(fixture.reconciler.failing(), 0);
    fixture.assert_right();
}

#[test]
fn a_frontend_that_moves_to_a_port_that_fails_does_not_stay_with_the_old_one() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([service("a", 1, [1])]);
    fixture.faults(Faults { at: [0].into(), ..Faults::default() });
    // The first write is the name of `b`.
    fixture.change([(name("a"), None), service("b", 1, [2])]);
    assert!(fixture.contents().services.is_empty());
    fixture.wait(Duration::from_secs(1));
    fixture.again();
    fixture.assert_right();
}

#[test]
fn clients_outside_are_never_sent_to_an_entry_that_is_gone_whichever_write_fails() {
    for fails in 0..8 {
        let mut fixture = Fixture::new(ROOMY);
        let (name, plan) = service("a", 1, [1]);
        let mut plan = plan.unwrap();
        for port in plan.ports.values_mut() {
            let (inside, what) = port.frontends.pop_first().unwrap();
            port.frontends.insert(Frontend { scope: Scope::External, ..inside }, what.clone());
            port.frontends.insert(inside, FrontendPlan { scoped: true, ..what });
        }
        fixture.change([(name.clone(), Some(plan))]);
        // The guard of `Fixture` checks every intermediate state.
        fixture.faults(Faults { at: [fails].into(), ..Faults::default() });
        fixture.change([(name, None)]);
        fixture.wait(Duration::from_secs(31));
        fixture.again();
        fixture.assert_right();
        assert_eq!(fixture.reconciler.problems(), []);
    }
}

#[test]
fn joining_endpoint_is_a_newcomer_if_another_has_served() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([service("a", 1, 1..3)]);
    let joined = |fixture: &Fixture, last: u8| {
        fixture.reconciler.store().inner().joined().get(&id(fixture, "a", last)).cloned()
    };
    assert_eq!(
        [joined(&fixture, 1), joined(&fixture, 2)],
        [Some(vec![]), Some(vec![])],
        "there was none before"
    );
    fixture.change([service("a", 1, [2, 9])]);
    let before = [1, 2].map(|last| id(&fixture, "a", last)).to_vec();
    assert_eq!(joined(&fixture, 9), Some(before), "the one that leaves served until then");
    // It returns with the same id.
    fixture.change([service("a", 1, [1, 2, 9])]);
    assert_eq!(joined(&fixture, 1), Some([2, 9].map(|last| id(&fixture, "a", last)).to_vec()));
}

#[test]
fn entries_whose_quarantine_is_over_are_freed_together() {
    let mut fixture = Fixture::new(ROOMY);
    for last in 2..32 {
        fixture.wait(Duration::from_millis(100));
        fixture.change([service("a", 1, [1, last])]);
    }
    // Sync as the driver does if nothing changes.
    let mut syncs = 0;
    while let Some(at) = fixture.reconciler.wake().filter(|at| *at < fixture.now + Duration::from_mins(2)) {
        fixture.now = at.max(fixture.now + Duration::from_millis(1));
        fixture.again();
        syncs += 1;
    }
    assert!((2..=8).contains(&syncs), "{syncs} syncs to free 30 extents and 29 ids");
    assert_eq!(fixture.reconciler.applied().extents.slots_used(), 2);
    assert_eq!(fixture.reconciler.applied().endpoints.used(), 2);
    fixture.assert_right();
}

#[test]
fn a_port_with_another_name_keeps_its_id_and_its_endpoints() {
    let renamed = |port: &str| {
        let (name, plan) = service("a", 1, 1..3);
        let plan = plan.map(|plan| {
            let mut ports: Vec<_> = plan.ports.iter().map(|(_, port)| port.clone()).collect();
            let port = ports.pop().map(|plan| {
                (port_id("a", port), crate::plan::PortPlan { reset_after: Some(Duration::ZERO), ..plan })
            });
            ServicePlan { ports: port.into_iter().collect(), ..plan }
        });
        [(name, plan)]
    };
    let mut fixture = Fixture::new(ROOMY);
    fixture.change(renamed("http"));
    let before = fixture.contents().services[&frontend_key(&frontend(1))];
    for name in ["web", "http", "web"] {
        assert_eq!(fixture.change(renamed(name)), 1, "the name");
        assert_eq!(fixture.contents().services[&frontend_key(&frontend(1))], before);
        assert!(owner(&fixture, 1).ends_with(name));
        assert!(fixture.contents().backends.values().all(|row| row.state == BACKEND_ACTIVE));
        fixture.assert_right();
    }
    fixture.wait(Duration::from_mins(2));
    assert_eq!((fixture.again(), fixture.reconciler.counters().resets()), (0, 0));
    // The frontends of a port that is added beside it are its own.
    let [(name, plan)] = renamed("web");
    let [(_, other)] = renamed("http");
    let both = plan.zip(other).map(|(plan, other)| {
        let ports = plan.ports.iter().chain(other.ports.iter()).map(|(id, port)| (id.clone(), port.clone()));
        ServicePlan { ports: ports.collect(), ..plan.clone() }
    });
    fixture.change([(name, both)]);
    fixture.change(renamed("http"));
    assert!(owner(&fixture, 1).ends_with("http"));
    fixture.assert_right();
}

#[test]
fn port_with_own_frontend_as_endpoint_is_left_to_packets() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.trust_nothing();
    let (name, mut plan) = service("a", 1, [1]);
    let is_left = |fixture: &Fixture| {
        let entries = fixture.contents().services.values();
        entries.map(|entry| entry.flags & SERVICE_CHANGING != 0).collect::<Vec<_>>()
    };
    fixture.change([(name.clone(), plan.clone())]);
    assert_eq!(is_left(&fixture), [false]);
    for port in plan.iter_mut().flat_map(|plan| plan.ports.values_mut()) {
        let endpoint = *port.backends.keys().next().unwrap();
        let same = Frontend { address: endpoint.address, port: endpoint.port, ..frontend(1) };
        port.frontends.insert(same, FrontendPlan::new(FrontendKind::ExternalIp));
    }
    fixture.change([(name, plan)]);
    assert_eq!(is_left(&fixture), [true, true]);
}
