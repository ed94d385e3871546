//! Properties of the plan of any cluster, whatever events led to it.

use std::collections::{BTreeMap, VecDeque};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use proxy_common::reason::Verdict;

use crate::model::annotations::Annotations;
use crate::model::net::IpFamily;
use crate::model::{Cluster, Event, Key, Listing, Object, ServiceName, TrafficPolicy};
use crate::testing::arbitrary;

use super::{Access, FrontendKind, PlanSettings, Scope, ServicePlan, plan_service};

type Plans = BTreeMap<ServiceName, ServicePlan>;

fn settings() -> PlanSettings {
    PlanSettings { annotations: Annotations::ALL, ..PlanSettings::default() }
}

/// Returns a cluster that knows the addresses of other nodes, of which there are none.
fn new() -> Cluster {
    let mut cluster = Cluster::new(arbitrary::this_node());
    cluster.apply(Event::Host(arbitrary::this_host()));
    cluster.apply(Event::Reset(Listing::Others(Vec::new())));
    cluster
}

fn build(events: impl IntoIterator<Item = Event>) -> Cluster {
    let mut cluster = new();
    for event in events {
        cluster.apply(event);
    }
    cluster
}

fn plans(cluster: &Cluster) -> Plans {
    let names = cluster.services().map(|service| service.name.clone());
    names.filter_map(|name| plan_service(cluster, &name, settings()).map(|plan| (name, plan))).collect()
}

/// Applies the event, and plans only the Services that it returns as changed.
fn step(cluster: &mut Cluster, plans: &mut Plans, event: Event) {
    for name in cluster.apply(event) {
        match plan_service(cluster, &name, settings()) {
            Some(plan) => plans.insert(name, plan),
            None => plans.remove(&name),
        };
    }
}

fn key(event: &Event) -> Key {
    match event {
        Event::Apply(object) => object.key(),
        Event::Delete(key) => key.clone(),
        Event::Reset(_) | Event::Static { .. } | Event::Host(_) => unreachable!("the generator makes none"),
    }
}

/// Returns the events in another order; the events of each object keep their order.
fn shuffle(events: &[Event], choices: &[Index]) -> Vec<Event> {
    let mut queues: BTreeMap<Key, VecDeque<Event>> = BTreeMap::new();
    for event in events {
        queues.entry(key(event)).or_default().push_back(event.clone());
    }
    let mut shuffled = Vec::new();
    for choice in choices.iter().cycle() {
        queues.retain(|_, queue| !queue.is_empty());
        if queues.is_empty() {
            break;
        }
        let at = choice.index(queues.len());
        shuffled.extend(queues.values_mut().nth(at).and_then(VecDeque::pop_front));
    }
    shuffled
}

/// Returns all objects that exist after these events, as lists. This node stays as it was if it is gone, and keeps what a later
/// object of it lacks.
fn listings(events: &[Event]) -> [Event; 4] {
    let mut last: BTreeMap<Key, Option<Object>> = BTreeMap::new();
    for event in events {
        match event {
            Event::Apply(object) => last.insert(object.key(), Some(object.clone())),
            Event::Delete(key) => last.insert(key.clone(), None),
            Event::Reset(_) | Event::Static { .. } | Event::Host(_) => {
                unreachable!("the generator makes none")
            }
        };
    }
    let (mut services, mut slices, mut others) = (Vec::new(), Vec::new(), Vec::new());
    for object in last.into_values().flatten() {
        match object {
            Object::Service(service) => services.push(service),
            Object::Slice(slice) => slices.push(slice),
            Object::Node(view) if view.name == arbitrary::NODE => {}
            Object::Node(view) => others.push(view),
            Object::ServiceCidr(_) => unreachable!("the generator makes none"),
        }
    }
    let node = build(events.to_vec()).node().clone();
    let (node, others) = (Listing::Node(Some(node)), Listing::Others(others));
    [Listing::Services(services), Listing::Slices(slices), node, others].map(Event::Reset)
}

proptest! {
    #[test]
    fn the_order_of_events_does_not_matter(
        events in vec(arbitrary::event(), 0..30),
        choices in vec(any::<Index>(), 1..40),
    ) {
        prop_assert_eq!(plans(&build(shuffle(&events, &choices))), plans(&build(events)));
    }

    #[test]
    fn planning_what_has_changed_is_enough(events in vec(arbitrary::event_or_host(), 0..30)) {
        let (mut cluster, mut incremental) = (new(), Plans::new());
        for event in events {
            step(&mut cluster, &mut incremental, event);
            prop_assert_eq!(&incremental, &plans(&cluster));
        }
    }

    #[test]
    fn a_list_equals_the_events_that_led_to_it(
        before in vec(arbitrary::event(), 0..20),
        after in vec(arbitrary::event(), 0..30),
        order in Just([0, 1, 2, 3]).prop_shuffle(),
    ) {
        let (mut cluster, mut incremental) = (new(), Plans::new());
        for event in before.into_iter().filter(|event| key(event) != Key::Node(arbitrary::NODE.to_owned())) {
            step(&mut cluster, &mut incremental, event);
        }
        let lists = listings(&after);
        for at in order {
            step(&mut cluster, &mut incremental, lists[at].clone());
        }
        prop_assert!(cluster.has_listed_all());
        prop_assert_eq!(&plans(&cluster), &plans(&build(after)));
        prop_assert_eq!(&plans(&cluster), &incremental);
    }

    #[test]
    fn repeated_lists_change_nothing(events in vec(arbitrary::event(), 0..30)) {
        let mut cluster = build(events.clone());
        for list in listings(&events) {
            prop_assert!(cluster.apply(list).is_empty());
        }
    }

    #[test]
    fn a_plan_is_whole(events in vec(arbitrary::event_or_host(), 0..30)) {
        let cluster = build(events);
        for service in cluster.services() {
            let plan = plan_service(&cluster, &service.name, settings()).expect("the Service is there");
            prop_assert_eq!(&plan, &plan_service(&cluster, &service.name, settings()).expect("still"));
            prop_assert_eq!(plan.ports.len(), service.ports.len() * service.cluster_ips.len());
            let is_left_alone = |address| service.is_foreign || cluster.is_own(address);
            for address in &service.cluster_ips {
                prop_assert_eq!(plan.unmanaged.contains_key(address), is_left_alone(address));
                prop_assert_ne!(plan.addresses.contains(address), is_left_alone(address));
            }
            for (id, port) in &plan.ports {
                for (frontend, target) in &port.frontends {
                    let has = match target.kind {
                        FrontendKind::ClusterIp => &service.cluster_ips,
                        FrontendKind::LoadBalancer => &service.load_balancer_ips,
                        FrontendKind::ExternalIp => &service.external_ips,
                        FrontendKind::NodePort => &Vec::new(),
                    };
                    prop_assert!(has.contains(&frontend.address) != frontend.address.is_unspecified());
                    prop_assert!(target.kind != FrontendKind::ClusterIp || !is_left_alone(&frontend.address));
                    // Clients outside have a separate entry exactly if the policy distinguishes them.
                    let other = crate::plan::Frontend { scope: Scope::External, ..*frontend };
                    let is_bound = target.kind != FrontendKind::ClusterIp
                        && service.external_policy == TrafficPolicy::Local;
                    prop_assert_eq!(port.frontends.contains_key(&other), is_bound);
                    prop_assert_eq!(target.scoped, is_bound && frontend.scope == Scope::Internal);
                    let policy = match (target.kind, frontend.scope) {
                        (FrontendKind::ClusterIp, _) => service.internal_policy,
                        (_, Scope::Internal) => TrafficPolicy::Cluster,
                        (_, Scope::External) => service.external_policy,
                    };
                    prop_assert_eq!(target.policy, policy);
                    prop_assert!(target.access == Access::Unrestricted || target.kind == FrontendKind::LoadBalancer);
                    prop_assert_eq!(IpFamily::of(frontend.address), id.family);
                    prop_assert_eq!(frontend.protocol, id.protocol);
                    prop_assert!(port.slots(target).is_sorted_by(|a, b| a < b), "sorted, each once");
                    prop_assert_eq!(port.slots(target).count(), port.slot_count(target));
                    let has_list = target.slots.is_some();
                    prop_assert_eq!(has_list, port.slot_count(target) < port.backends.len(), "a list of all");
                    for slot in port.slots(target) {
                        let facts = port.backends.get(slot);
                        prop_assert!(facts.is_some(), "{} has a slot that is no backend", id);
                        let (local, cluster) =
                            facts.map_or((false, false), |f| (f.local && f.in_local, f.in_cluster));
                        let allowed = if policy == TrafficPolicy::Local { local } else { cluster };
                        prop_assert!(allowed);
                    }
                    prop_assert!(target.when_empty == Verdict::Reject || port.slot_count(target) == 0);
                }
                for (backend, facts) in &port.backends {
                    prop_assert!(facts.local || !cluster.is_own(&backend.address));
                    prop_assert_eq!(IpFamily::of(backend.address), id.family);
                }
            }
        }
    }
}
