use std::collections::BTreeMap;

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;

use super::*;
use crate::model::{Cluster, Event, Listing};
use crate::testing::arbitrary::{event, service, service_name, slice};

/// Generates the content of a folder.
fn statics() -> impl Strategy<Value = Event> {
    let services = btree_map(service_name(), service(), 0..3);
    let slices = vec(slice(), 0..4);
    (services, slices).prop_map(|(services, slices)| {
        let services = services.into_iter().map(|(name, service)| Service { name, ..service });
        let slices: BTreeMap<_, _> = slices.into_iter().map(|slice| (slice.name.clone(), slice)).collect();
        Event::Static { services: services.collect(), slices: slices.into_values().collect() }
    })
}

/// Returns each visible Service with its slices.
fn seen(cluster: &Cluster) -> BTreeMap<ServiceName, (Service, Vec<EndpointSlice>)> {
    let one = |service: &Service| {
        (service.name.clone(), (service.clone(), cluster.slices(&service.name).cloned().collect()))
    };
    cluster.services().map(one).collect()
}

/// Returns a cluster to which these events were applied.
fn lists(events: &[Event]) -> Cluster {
    let mut cluster = Cluster::default();
    for event in events {
        cluster.apply(event.clone());
    }
    cluster
}

proptest! {
    /// The final state does not depend on when the folder changes, and each Service that differs was returned as changed.
    #[test]
    fn final_state_does_not_depend_on_when_the_folder_changes(
        history in vec(event(), 0..24),
        first in statics(),
        last in statics(),
        at in any::<(prop::sample::Index, prop::sample::Index)>(),
    ) {
        let mut mixed = history.clone();
        let early = at.0.index(mixed.len() + 1);
        mixed.insert(early, first);
        let late = early + 1 + at.1.index(mixed.len() - early);
        mixed.insert(late, last.clone());
        let mut cluster = Cluster::default();
        for event in mixed {
            let before = seen(&cluster);
            let changed = cluster.apply(event);
            let after = seen(&cluster);
            for name in before.keys().chain(after.keys()) {
                prop_assert!(before.get(name) == after.get(name) || changed.contains(name), "{name}");
            }
        }
        let (begins, ends) = ([std::slice::from_ref(&last), &history[..]].concat(), [&history[..], std::slice::from_ref(&last)].concat());
        prop_assert_eq!(seen(&cluster), seen(&lists(&begins)));
        prop_assert_eq!(seen(&cluster), seen(&lists(&ends)));
        // With an empty folder, the state is that of the API server alone.
        cluster.apply(Event::Static { services: Vec::new(), slices: Vec::new() });
        prop_assert_eq!(seen(&cluster), seen(&lists(&history)));
    }
}

fn named(name: &str, address: &str) -> Service {
    Service { cluster_ips: vec![address.parse().unwrap()], ..Service::new(ServiceName::new("default", name)) }
}

fn slice_of(name: &str, service: &str) -> EndpointSlice {
    let (name, service) = (SliceName::new("default", name), ServiceName::new("default", service));
    EndpointSlice::new(name, service, crate::model::net::IpFamily::V4)
}

#[test]
fn a_service_of_the_folder_stands_before_one_of_the_api_server_and_says_so() {
    let mut cluster = Cluster::default();
    let name = ServiceName::new("default", "vip");
    cluster.apply(Event::Static {
        services: vec![named("vip", "192.0.2.100")],
        slices: vec![slice_of("vip-1", "vip")],
    });
    assert!(!cluster.has_listed_all(), "a folder is no list of the cluster's");
    assert!(cluster.service(&name).unwrap().problems.is_empty());
    let lists = [
        Listing::Services(vec![named("vip", "10.96.0.1"), named("web", "10.96.0.2")]),
        Listing::Slices(vec![slice_of("vip-9", "vip"), slice_of("web-1", "web")]),
    ];
    for list in lists {
        cluster.apply(Event::Reset(list));
    }
    let vip = cluster.service(&name).unwrap();
    assert_eq!(vip.cluster_ips, ["192.0.2.100".parse::<std::net::IpAddr>().unwrap()]);
    let message = vip.problems[0].to_string();
    assert!(message.starts_with("Service default/vip: metadata.name:"), "{message}");
    assert!(message.contains("--manifests") && message.contains("API server"), "{message}");
    let slices: Vec<_> = cluster.slices(&name).map(|slice| slice.name.to_string()).collect();
    assert_eq!(slices, ["default/vip-1"], "the API server's slices do not count");
    // The API server deletes its Service.
    let list = Listing::Services(vec![named("web", "10.96.0.2")]);
    assert_eq!(cluster.apply(Event::Reset(list)), BTreeSet::from([name.clone()]));
    assert!(cluster.service(&name).unwrap().problems.is_empty());
    // The API server has a Service of this name again; it becomes visible when the folder has none.
    cluster.apply(Event::Apply(Object::Service(named("vip", "10.96.0.3"))));
    cluster.apply(Event::Static { services: Vec::new(), slices: Vec::new() });
    let vip = cluster.service(&name).unwrap();
    assert_eq!(vip.cluster_ips, ["10.96.0.3".parse::<std::net::IpAddr>().unwrap()]);
    let slices: Vec<_> = cluster.slices(&name).map(|slice| slice.name.to_string()).collect();
    assert_eq!(slices, ["default/vip-9"]);
}
