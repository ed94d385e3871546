use std::net::Ipv4Addr;

use super::*;
use crate::model::{Event, NodeView, Object};

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
    let addresses = (0..20_000).rev().map(|number| IpAddr::from(Ipv4Addr::from(0x0b00_0000 + number)));
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
    assert_eq!(plan.ports.values().map(|port| port.frontends.len()).sum::<usize>(), 20_001);
}
