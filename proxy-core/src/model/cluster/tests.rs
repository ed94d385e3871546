use std::cell::Cell;

use crate::model::net::{IpFamily, Protocol};
use crate::model::{DeviceKind, Endpoint, EndpointPort, HostDevice, Name, ServicePort};

use super::*;

thread_local! {
    /// How many times all Services were searched for the addresses of a device.
    pub(super) static SEARCHES: Cell<usize> = const { Cell::new(0) };
}

fn service(name: &str) -> Service {
    Service {
        cluster_ips: vec!["10.96.0.1".parse().unwrap()],
        ports: vec![ServicePort { name: Name::default(), protocol: Protocol::Tcp, port: 80, node_port: 0 }],
        ..Service::new(ServiceName::new("default", name))
    }
}

fn slice(name: &str, service: &str, zone: Option<&str>) -> EndpointSlice {
    let zone_hints = zone.into_iter().map(Name::from).collect();
    let service = ServiceName::new("default", service);
    EndpointSlice {
        ports: vec![EndpointPort { name: Name::default(), protocol: Protocol::Tcp, port: 8080 }],
        endpoints: vec![Endpoint { zone_hints, ..Endpoint::new("10.0.0.1".parse().unwrap()) }],
        ..EndpointSlice::new(SliceName::new("default", name), service, IpFamily::V4)
    }
}

fn apply_service(cluster: &mut Cluster, name: &str) -> Vec<String> {
    names(cluster.apply(Event::Apply(Object::Service(service(name)))))
}

fn apply_slice(cluster: &mut Cluster, slice: EndpointSlice) -> Vec<String> {
    names(cluster.apply(Event::Apply(Object::Slice(slice))))
}

fn names(changed: BTreeSet<ServiceName>) -> Vec<String> {
    changed.into_iter().map(|name| name.name.to_string()).collect()
}

#[test]
fn a_slice_may_come_before_its_service() {
    let mut cluster = Cluster::default();
    assert!(apply_slice(&mut cluster, slice("s", "web", None)).is_empty(), "nothing to plan yet");
    assert_eq!(apply_service(&mut cluster, "web"), ["web"]);
    assert_eq!(cluster.slices(&ServiceName::new("default", "web")).count(), 1);
}

#[test]
fn a_service_that_comes_back_finds_its_slices() {
    let mut cluster = Cluster::default();
    apply_service(&mut cluster, "web");
    apply_slice(&mut cluster, slice("s", "web", None));
    let name = ServiceName::new("default", "web");
    assert_eq!(names(cluster.apply(Event::Delete(Key::Service(name.clone())))), ["web"]);
    assert!(cluster.service(&name).is_none());
    apply_service(&mut cluster, "web");
    assert_eq!(cluster.slices(&name).count(), 1);
}

#[test]
fn a_slice_whose_label_changes_moves() {
    let mut cluster = Cluster::default();
    apply_service(&mut cluster, "db");
    apply_service(&mut cluster, "web");
    apply_slice(&mut cluster, slice("s", "web", None));
    assert_eq!(apply_slice(&mut cluster, slice("s", "db", None)), ["db", "web"]);
    assert_eq!(cluster.slices(&ServiceName::new("default", "web")).count(), 0);
    assert_eq!(cluster.slices(&ServiceName::new("default", "db")).count(), 1);
    let gone = cluster.apply(Event::Delete(Key::Slice(SliceName::new("default", "s"))));
    assert_eq!(names(gone), ["db"]);
    assert!(
        cluster.reported.slices.is_empty() && cluster.reported.owners.is_empty(),
        "nothing is left behind"
    );
}

#[test]
fn equal_objects_and_unknown_deletions_change_nothing() {
    let mut cluster = Cluster::default();
    apply_service(&mut cluster, "web");
    apply_slice(&mut cluster, slice("s", "web", None));
    assert!(apply_service(&mut cluster, "web").is_empty());
    assert!(apply_slice(&mut cluster, slice("s", "web", None)).is_empty());
    assert!(cluster.apply(Event::Delete(Key::Slice(SliceName::new("default", "other")))).is_empty());
    assert!(cluster.apply(Event::Delete(Key::Service(ServiceName::new("other", "web")))).is_empty());
}

#[test]
fn both_kinds_must_have_been_listed() {
    let mut cluster = Cluster::default();
    apply_service(&mut cluster, "web");
    cluster.apply(Event::Reset(Listing::Node(None)));
    cluster.apply(Event::Reset(Listing::Services(Vec::new())));
    assert!(!cluster.has_listed_all(), "slices are missing");
    cluster.apply(Event::Reset(Listing::Slices(Vec::new())));
    assert!(cluster.has_listed_all());
}

#[test]
fn a_list_names_only_what_differs() {
    let mut cluster = Cluster::default();
    for name in ["a", "b", "c"] {
        apply_service(&mut cluster, name);
    }
    let mut b = service("b");
    b.affinity_secs = 10;
    let changed = cluster.apply(Event::Reset(Listing::Services(vec![service("a"), b, service("d")])));
    assert_eq!(names(changed), ["b", "c", "d"]);
}

#[test]
fn a_new_zone_concerns_services_with_hints() {
    let mut cluster = Cluster::new(NodeView::new("n1"));
    apply_service(&mut cluster, "db");
    apply_service(&mut cluster, "web");
    apply_slice(&mut cluster, slice("s1", "db", None));
    apply_slice(&mut cluster, slice("s2", "web", Some("a")));
    let node = |name: &str, zone: &str| NodeView { zone: Some(zone.to_owned()), ..NodeView::new(name) };
    assert!(cluster.apply(Event::Apply(Object::Node(node("n2", "a")))).is_empty(), "not our node");
    assert_eq!(names(cluster.apply(Event::Apply(Object::Node(node("n1", "a"))))), ["web"]);
    assert!(cluster.apply(Event::Apply(Object::Node(node("n1", "a")))).is_empty());
    assert_eq!(cluster.node().zone.as_deref(), Some("a"));
    assert_eq!(names(cluster.apply(Event::Apply(Object::Node(node("n1", "b"))))), ["web"]);
}

#[test]
fn addresses_ranges_and_zone_of_a_node_stay_after_its_object_is_gone() {
    let view = NodeView {
        zone: Some("a".to_owned()),
        internal_ips: vec!["10.0.0.5".parse().unwrap()],
        pod_cidrs: vec!["10.244.1.0/24".parse().unwrap()],
        ..NodeView::new("n1")
    };
    let mut cluster = Cluster::new(NodeView::new("n1"));
    for gone in [Event::Delete(Key::Node("n1".to_owned())), Event::Reset(Listing::Node(None))] {
        cluster.apply(Event::Apply(Object::Node(view.clone())));
        assert!(cluster.is_node_eligible());
        assert!(cluster.apply(gone).is_empty());
        assert_eq!(*cluster.node(), view);
        assert!(!cluster.is_node_eligible(), "load balancers send to other nodes");
    }
}

#[test]
fn new_object_of_a_node_keeps_what_it_lacks() {
    let full = NodeView {
        zone: Some("a".to_owned()),
        internal_ips: vec!["10.0.0.5".parse().unwrap()],
        external_ips: vec!["192.0.2.5".parse().unwrap()],
        pod_cidrs: vec!["10.244.1.0/24".parse().unwrap()],
        ..NodeView::new("n1")
    };
    let mut cluster = Cluster::new(NodeView::new("n1"));
    let mut apply = |node: &NodeView| {
        cluster.apply(Event::Apply(Object::Node(node.clone())));
        assert!(cluster.is_heartbeat(node));
        cluster.node().clone()
    };
    apply(&full);
    let without_label = NodeView { zone: None, ..full.clone() };
    assert_eq!(apply(&without_label).zone, None, "the object is the same");
    apply(&full);
    cluster.apply(Event::Delete(Key::Node("n1".to_owned())));
    let mut apply = |node: &NodeView| {
        cluster.apply(Event::Apply(Object::Node(node.clone())));
        cluster.node().clone()
    };
    assert_eq!(apply(&NodeView::new("n1")), full);
    assert_eq!(apply(&without_label), full, "the label is set last");
    let other = NodeView { zone: Some("b".to_owned()), external_ips: vec![], ..full };
    assert_eq!(apply(&other), other);
    assert_eq!(apply(&without_label).zone, None);
}

#[test]
fn a_slice_that_says_the_same_again_changes_nothing_whenever_it_was_triggered() {
    let mut cluster = Cluster::default();
    apply_service(&mut cluster, "web");
    let first = slice("s", "web", None);
    assert_eq!(apply_slice(&mut cluster, first.clone()), ["web"]);
    let again = EndpointSlice { triggered: Some(std::time::SystemTime::UNIX_EPOCH), ..first };
    assert!(apply_slice(&mut cluster, again.clone()).is_empty());
    assert!(cluster.slice(&again.name).is_some_and(|known| known.has_same_content(&again)));
    assert_eq!(cluster.slice(&SliceName::new("default", "other")), None);
}

#[test]
fn a_node_is_eligible_until_it_leaves_or_is_gone() {
    let mut cluster = Cluster::new(NodeView::new("n1"));
    assert!(cluster.is_node_eligible(), "no Node object yet");
    let mut after = |event| {
        cluster.apply(event);
        cluster.is_node_eligible()
    };
    let node =
        |name: &str, is_leaving| Event::Apply(Object::Node(NodeView { is_leaving, ..NodeView::new(name) }));
    assert!(after(node("n2", true)), "not our node");
    assert!(!after(node("n1", true)));
    assert!(!after(node("n2", false)));
    assert!(after(node("n1", false)), "the autoscaler has changed its mind");
    assert!(after(Event::Delete(Key::Node("n2".to_owned()))));
    assert!(!after(Event::Delete(Key::Node("n1".to_owned()))));
    assert!(after(node("n1", false)));
    assert!(!after(Event::Reset(Listing::Node(None))));
    assert!(after(Event::Reset(Listing::Node(Some(NodeView::new("n1"))))));
}

#[test]
fn other_nodes_concern_the_services_that_have_endpoints_there() {
    let mut cluster = Cluster::new(NodeView::new("n1"));
    apply_service(&mut cluster, "web");
    apply_service(&mut cluster, "db");
    let mut here = slice("s", "web", None);
    here.endpoints[0].node = Some("n2".into());
    apply_slice(&mut cluster, here);
    let node =
        |name: &str, ip: &str| NodeView { internal_ips: vec![ip.parse().unwrap()], ..NodeView::new(name) };
    let apply = |cluster: &mut Cluster, node| names(cluster.apply(Event::Apply(Object::Node(node))));
    assert!(
        apply(&mut cluster, node("n2", "192.0.2.2")).is_empty() && cluster.others().is_none(),
        "not listed"
    );
    let list = |nodes| Event::Reset(Listing::Others(nodes));
    assert_eq!(names(cluster.apply(list(vec![node("n2", "192.0.2.2"), node("n3", "192.0.2.3")]))), ["web"]);
    assert!(apply(&mut cluster, node("n2", "192.0.2.2")).is_empty(), "nothing new");
    assert!(apply(&mut cluster, node("n4", "192.0.2.4")).is_empty(), "no such node");
    assert_eq!(apply(&mut cluster, node("n2", "192.0.2.9")), ["web"]);
    assert_eq!(names(cluster.apply(Event::Delete(Key::Node("n2".to_owned())))), ["web"]);
    let known: Vec<_> = cluster.others().unwrap().keys().map(String::as_str).collect();
    assert_eq!(known, ["n3", "n4"]);
}

#[test]
fn node_address_change_replans_services() {
    let mut cluster = Cluster::new(NodeView::new("here"));
    apply_service(&mut cluster, "web");
    let has = |addresses: [&str; 2]| {
        let internal_ips = addresses.map(|address| address.parse().unwrap()).into();
        Event::Apply(Object::Node(NodeView { internal_ips, ..NodeView::new("here") }))
    };
    cluster.apply(has(["192.0.2.1", "2001:db8::1"]));
    assert!(apply_host(&mut cluster, "eth0", DeviceKind::Physical, &["192.0.2.1"]).is_empty());
    let others = Listing::Others(vec![NodeView::new("there")]);
    assert_eq!(names(cluster.apply(Event::Reset(others.clone()))), ["web"]);
    assert!(cluster.apply(Event::Reset(others)).is_empty());
    let both = ["192.0.2.1", "2001:db8::1"];
    assert_eq!(apply_host(&mut cluster, "eth0", DeviceKind::Physical, &both), ["web"]);
    assert_eq!(names(cluster.apply(has(["192.0.2.1", "192.0.2.2"]))), ["web"]);
    assert!(cluster.apply(has(["192.0.2.1", "192.0.2.3"])).is_empty(), "the family is the same");
}

/// Applies a host whose only device has this name, kind and addresses.
fn apply_host(cluster: &mut Cluster, name: &str, kind: DeviceKind, addresses: &[&str]) -> Vec<String> {
    let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
    let device = HostDevice { name: name.into(), kind, addresses, ..HostDevice::default() };
    names(cluster.apply(Event::Host(HostView { devices: [(7, device)].into(), ..HostView::default() })))
}

#[test]
fn addresses_that_another_proxy_has_left_are_served() {
    let address = "10.96.0.1".parse().unwrap();
    for (device, kind, is_left) in [
        ("kube-ipvs0", DeviceKind::Dummy, true),
        ("kube-dummy-if", DeviceKind::Dummy, true),
        ("kube-dummy-if", DeviceKind::Veth, true),
        ("nodelocaldns", DeviceKind::Dummy, false),
        ("eth0", DeviceKind::Physical, false),
    ] {
        let mut cluster = Cluster::default();
        apply_service(&mut cluster, "web");
        apply_host(&mut cluster, device, kind, &["10.96.0.1"]);
        let left = cluster.host().unwrap().leftovers.contains(device);
        assert_eq!((left, cluster.is_own(&address)), (is_left, !is_left), "{device}");
        assert_eq!(cluster.own_cluster_ips().is_empty(), is_left, "{device}");
    }
}

#[test]
fn a_dummy_device_with_addresses_of_many_services_is_no_dns_cache() {
    let of = |number: u8| Service {
        cluster_ips: vec![format!("10.96.0.{number}").parse().unwrap()],
        ..service(&format!("s{number}"))
    };
    let mut cluster = Cluster::default();
    let put = |cluster: &mut Cluster, number| names(cluster.apply(Event::Apply(Object::Service(of(number)))));
    let addresses = ["10.96.0.1", "10.96.0.2", "10.96.0.3", "169.254.20.10"];
    apply_host(&mut cluster, "cache", DeviceKind::Dummy, &addresses);
    assert_eq!(put(&mut cluster, 1), ["s1"]);
    assert_eq!(put(&mut cluster, 2), ["s2"]);
    assert!(cluster.is_own(&"10.96.0.1".parse().unwrap()) && cluster.host().unwrap().leftovers.is_empty());
    assert_eq!(put(&mut cluster, 3), ["s1", "s2", "s3"], "all of them are planned again");
    assert!(!cluster.is_own(&"10.96.0.1".parse().unwrap()));
    assert!(cluster.host().unwrap().leftovers.contains("cache"));
    let gone = cluster.apply(Event::Delete(Key::Service(ServiceName::new("default", "s3"))));
    assert_eq!(names(gone), ["s1", "s2", "s3"]);
    assert!(cluster.is_own(&"10.96.0.1".parse().unwrap()) && cluster.host().unwrap().leftovers.is_empty());
    // Another kind of device with as many addresses is the node's own.
    put(&mut cluster, 3);
    apply_host(&mut cluster, "eth0", DeviceKind::Physical, &addresses);
    assert!(cluster.is_own(&"10.96.0.1".parse().unwrap()));
}

#[test]
fn slices_and_nodes_search_no_services() {
    let mut cluster = Cluster::new(NodeView::new("n1"));
    apply_service(&mut cluster, "web");
    apply_host(&mut cluster, "cache", DeviceKind::Dummy, &["10.0.0.5", "10.0.0.6", "10.0.0.7"]);
    SEARCHES.set(0);
    assert_eq!(apply_slice(&mut cluster, slice("s", "web", Some("a"))), ["web"]);
    let node = NodeView { zone: Some("a".to_owned()), ..NodeView::new("n1") };
    assert_eq!(names(cluster.apply(Event::Apply(Object::Node(node)))), ["web"]);
    assert_eq!(names(cluster.apply(Event::Delete(Key::Slice(SliceName::new("default", "s"))))), ["web"]);
    assert_eq!(SEARCHES.get(), 0);
    apply_service(&mut cluster, "db");
    assert_eq!(SEARCHES.get(), 1);
}
