use std::net::Ipv4Addr;

use super::*;
use crate::model::{EndpointPort, EndpointSlice, Event, Name, NodeView, Object, SliceName};

#[test]
fn forwarding_mode_of_a_service_has_priority_over_the_setting_and_external_ips_may_be_off() {
    let service = Service {
        external_ips: vec!["192.0.2.9".parse().unwrap()],
        ..Service::new(ServiceName::new("default", "web"))
    };
    let with =
        |service: &Service, settings| known(service, Vec::new(), settings, &mut Vec::new()).into_owned();
    let annotations = Annotations::ALL;
    let dsr = PlanSettings { forwarding: ForwardingMode::Dsr, annotations, ..PlanSettings::default() };
    assert_eq!(with(&service, dsr).forwarding, Some(ForwardingMode::Dsr));
    assert_eq!(with(&service, PlanSettings::default()).forwarding, None);
    let own = Service { forwarding: Some(ForwardingMode::Hybrid), ..service.clone() };
    assert_eq!(with(&own, dsr).forwarding, Some(ForwardingMode::Hybrid));
    assert_eq!(with(&service, PlanSettings::default()).external_ips, service.external_ips);
    let shut = PlanSettings { no_external_ips: true, ..PlanSettings::default() };
    assert_eq!(with(&service, shut).external_ips, Vec::<IpAddr>::new());
}

#[test]
fn a_service_with_too_many_frontends_is_a_problem() {
    let name = ServiceName::new("default", "many");
    let port = |port: u16| ServicePort {
        name: port.to_string().into(),
        protocol: Protocol::Tcp,
        port,
        node_port: 0,
    };
    let addresses = (0..8_000).rev().map(|number| IpAddr::from(Ipv4Addr::from(0x0b00_0000 + number)));
    let many = Service {
        cluster_ips: vec!["10.96.0.1".parse().unwrap()],
        external_ips: addresses.collect(),
        ports: (1..=1_000).map(port).collect(),
        ..Service::new(name.clone())
    };
    let few = Service { ports: vec![port(80)], ..many.clone() };
    let mut cluster = Cluster::new(NodeView::new("n1"));
    let mut planned = |service| {
        cluster.apply(Event::Apply(Object::Service(service)));
        plan_service(&cluster, &name, PlanSettings::default()).unwrap()
    };
    let plan = planned(many);
    assert!(plan.ports.is_empty() && plan.addresses.is_empty());
    assert!(plan.problems.iter().any(|problem| problem.message.contains("too many")), "{:?}", plan.problems);
    let plan = planned(few);
    assert_eq!(plan.ports.values().map(|port| port.frontends.len()).sum::<usize>(), 8_001);
}

#[test]
fn refused_cluster_address_leaves_its_node_port() {
    let name = ServiceName::new("default", "web");
    let port = ServicePort { name: "".into(), protocol: Protocol::Tcp, port: 80, node_port: 30_080 };
    let mut cluster = Cluster::new(NodeView::new("n1"));
    cluster.apply(Event::Apply(Object::Service(Service {
        kind: ServiceKind::NodePort,
        refused_families: [Some(IpFamily::V4), None],
        ports: vec![port],
        ..Service::new(name.clone())
    })));
    let plan = plan_service(&cluster, &name, PlanSettings::default()).unwrap();
    let frontends = plan.ports.values().flat_map(|port| port.frontends.iter());
    let found: Vec<_> = frontends.map(|(frontend, _)| (frontend.address, frontend.port)).collect();
    assert_eq!(found, [(Ipv4Addr::UNSPECIFIED.into(), 30_080)]);
}

/// Returns the last octets of the endpoints that a node in zone `a` selects for a cluster address, of these
/// (last octet, node, zone of the hint, weight).
fn selected(forwarding: ForwardingMode, endpoints: &[(u8, &str, &str, u16)]) -> Vec<u8> {
    let name = ServiceName::new("default", "web");
    let port = ServicePort { name: "http".into(), protocol: Protocol::Tcp, port: 80, node_port: 30_080 };
    let service = Service {
        cluster_ips: vec!["10.96.0.1".parse().unwrap()],
        ports: vec![port],
        forwarding: Some(forwarding),
        ..Service::new(name.clone())
    };
    let endpoint = |&(last, node, zone, weight): &(u8, &str, &str, u16)| Endpoint {
        node: Some(node.into()),
        zone_hints: [Name::from(zone)].into_iter().collect(),
        weight: Some(weight),
        ..Endpoint::new(Ipv4Addr::new(10, 0, 0, last).into())
    };
    let slice = EndpointSlice {
        endpoints: endpoints.iter().map(endpoint).collect(),
        ports: vec![EndpointPort { name: "http".into(), protocol: Protocol::Tcp, port: 8080 }],
        ..EndpointSlice::new(SliceName::new("default", "web-1"), name.clone(), IpFamily::V4)
    };
    let mut cluster = Cluster::new(NodeView { zone: Some("a".to_owned()), ..NodeView::new("n1") });
    cluster.apply(Event::Apply(Object::Service(service)));
    cluster.apply(Event::Apply(Object::Slice(slice)));
    let plan = plan_service(
        &cluster,
        &name,
        PlanSettings { annotations: Annotations::ALL, ..PlanSettings::default() },
    );
    let plan = plan.unwrap();
    let port = plan.ports.values().next().unwrap();
    let what = port.frontends.values().next().unwrap();
    let last = |at: &BackendAddress| match at.address {
        IpAddr::V4(address) => address.octets()[3],
        IpAddr::V6(_) => 0,
    };
    port.slots(what).map(last).collect()
}

/// A node of another zone selects the second endpoint and encapsulates to this node.
#[test]
fn endpoint_of_this_node_serves_with_dsr_whatever_its_hint() {
    let endpoints = [(1, "n1", "a", 1), (2, "n1", "b", 1), (3, "n2", "b", 1)];
    assert_eq!(selected(ForwardingMode::Dsr, &endpoints), [1, 2]);
    assert_eq!(selected(ForwardingMode::Snat, &endpoints), [1]);
}

#[test]
fn zone_whose_endpoints_have_weight_0_is_left() {
    let endpoints = |weight| [(1, "n1", "a", weight), (2, "n2", "b", weight), (3, "n3", "b", 5)];
    assert_eq!(selected(ForwardingMode::Snat, &endpoints(0)), [3]);
    assert_eq!(selected(ForwardingMode::Snat, &endpoints(1)), [1]);
    let all = [(1, "n1", "a", 0), (2, "n2", "b", 0)];
    assert_eq!(selected(ForwardingMode::Snat, &all), [1], "some endpoint has to serve");
}

#[test]
fn external_ip_of_api_server_is_not_served() {
    const SERVERS: &[SocketAddr] = &[SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 6443)];
    let name = ServiceName::new("default", "web");
    let port = |port: u16, protocol| ServicePort {
        name: Name::from(format!("{port}-{protocol}")),
        protocol,
        port,
        node_port: 0,
    };
    let mut cluster = Cluster::new(NodeView::new("n1"));
    cluster.apply(Event::Apply(Object::Service(Service {
        cluster_ips: vec!["10.96.0.1".parse().unwrap()],
        external_ips: vec!["192.0.2.1".parse().unwrap()],
        external_policy: TrafficPolicy::Local,
        ports: vec![port(6443, Protocol::Tcp), port(6443, Protocol::Udp), port(80, Protocol::Tcp)],
        ..Service::new(name.clone())
    })));
    let plan = |api_servers| {
        let plan = plan_service(&cluster, &name, PlanSettings { api_servers, ..PlanSettings::default() });
        let plan = plan.unwrap();
        let all = plan.ports.values().map(|port| port.frontends.len()).sum::<usize>();
        (
            all,
            plan.problems.iter().filter(|problem| problem.message.contains("reaches the API server")).count(),
        )
    };
    // At the external address, there is one for each scope.
    assert_eq!(plan(&[]), (9, 0));
    assert_eq!(plan(SERVERS), (7, 1));
}
