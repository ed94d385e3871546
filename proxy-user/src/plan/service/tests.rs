use crate::model::{Event, Object};
use crate::plan::{BackendAddress, FrontendKind, Scope};
use crate::source::manifest::{Syntax, parse};

use super::*;

/// A cluster of manifests, seen from the node n1.
fn cluster(manifests: &str) -> Cluster {
    let objects = parse(manifests, Syntax::Yaml).unwrap();
    let mut cluster = Cluster::new(NodeView::new("n1"));
    for service in objects.services {
        cluster.apply(Event::Apply(Object::Service(service)));
    }
    for slice in objects.slices {
        cluster.apply(Event::Apply(Object::Slice(slice)));
    }
    cluster
}

fn plan(manifests: &str) -> ServicePlan {
    let cluster = cluster(manifests);
    plan_service(&cluster, &ServiceName::new("default", "web"), cluster.node()).unwrap()
}

/// `port/protocol family -> address: slots [drop] | backends`.
fn lines(plan: &ServicePlan) -> Vec<String> {
    let list = |all: Vec<String>| all.join(" ");
    let text = |b: &BackendAddress| std::net::SocketAddr::new(b.address, b.port).to_string();
    let mut lines = Vec::new();
    for (id, port) in &plan.ports {
        for (frontend, target) in &port.frontends {
            assert_eq!((target.kind, frontend.scope), (FrontendKind::ClusterIp, Scope::Internal));
            let address = std::net::SocketAddr::new(frontend.address, frontend.port);
            let slots = list(target.slots.iter().map(text).collect());
            let drop = if target.drop_when_empty { " drop" } else { "" };
            let backends = list(port.backends.keys().map(text).collect());
            lines.push(format!("{} {}: {address} -> {slots}{drop} | {backends}", id.port, id.protocol));
        }
    }
    lines
}

const DUAL: &str = "
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  clusterIPs: [10.96.0.1, 'fd00:96::1']
  ports: [{name: http, port: 80}, {name: dns, port: 53}, {name: dns, port: 53, protocol: UDP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}, {name: dns, port: 53, protocol: UDP}]
endpoints:
- addresses: [10.0.0.1]
- addresses: [10.0.0.2]
  conditions: {ready: false, serving: true, terminating: true}
- addresses: [10.0.0.3]
  conditions: {ready: false, serving: false}
";

#[test]
fn families_and_protocols_are_planned_apart() {
    let plan = plan(DUAL);
    assert_eq!(
        lines(&plan),
        [
            "dns TCP: 10.96.0.1:53 ->  | ",
            "dns TCP: [fd00:96::1]:53 ->  | ",
            "dns UDP: 10.96.0.1:53 -> 10.0.0.1:53 | 10.0.0.1:53 10.0.0.2:53",
            "dns UDP: [fd00:96::1]:53 ->  | ",
            "http TCP: 10.96.0.1:80 -> 10.0.0.1:8080 | 10.0.0.1:8080 10.0.0.2:8080",
            "http TCP: [fd00:96::1]:80 ->  | ",
        ]
    );
    assert!(plan.problems.is_empty());
}

const LOCAL: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, creationTimestamp: '2024-01-02T03:04:05Z'}
spec:
  clusterIP: 10.96.0.1
  internalTrafficPolicy: Local
  sessionAffinity: ClientIP
  ports: [{port: 80}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints:
- {addresses: [10.0.0.1], nodeName: NODE}
- {addresses: [10.0.0.2], nodeName: n2}
";

#[test]
fn the_internal_policy_local_keeps_traffic_here() {
    let plan = plan(&LOCAL.replace("NODE", "n1"));
    assert_eq!(lines(&plan), [" TCP: 10.96.0.1:80 -> 10.0.0.1:8080 | 10.0.0.1:8080 10.0.0.2:8080"]);
    let port = plan.ports.values().next().unwrap();
    let local: Vec<_> = port.backends.values().map(|facts| facts.local).collect();
    assert_eq!(local, [true, false]);
    assert_eq!((port.affinity_secs, plan.created), (10_800, 1_704_164_645));
}

#[test]
fn with_that_policy_and_only_remote_endpoints_packets_are_dropped() {
    let plan = plan(&LOCAL.replace("NODE", "n3"));
    assert_eq!(lines(&plan), [" TCP: 10.96.0.1:80 ->  drop | 10.0.0.1:8080 10.0.0.2:8080"]);
}

#[test]
fn with_that_policy_and_no_endpoint_at_all_they_are_refused() {
    let (service, _) = LOCAL.split_once("---").unwrap();
    assert_eq!(lines(&plan(service)), [" TCP: 10.96.0.1:80 ->  | "]);
}

#[test]
fn the_problems_of_service_and_slices_are_the_plans() {
    let plan = plan(&LOCAL.replace("10.96.0.1", "10.96.0.300").replace("10.0.0.2", "127.0.0.1"));
    let problems: Vec<_> = plan.problems.iter().map(ToString::to_string).collect();
    assert_eq!(
        problems,
        [
            "Service default/web: spec.clusterIP: `10.96.0.300` is not an IP address",
            "EndpointSlice default/web-1: endpoints[1].addresses[0]: 127.0.0.1 is a loopback address; give an \
             address that can be routed to",
        ]
    );
    assert!(plan.ports.is_empty(), "without an address there is nothing to dial");
}

#[test]
fn what_is_not_there_has_no_plan() {
    let cluster = cluster(DUAL);
    assert_eq!(plan_service(&cluster, &ServiceName::new("other", "web"), cluster.node()), None);
}

/// The limit is for a loaded machine without optimisation; a release build takes a fiftieth of it.
#[test]
fn a_thousand_services_are_planned_in_linear_time() {
    let base = parse(DUAL, Syntax::Yaml).unwrap();
    let (mut services, mut slices) = (Vec::new(), Vec::new());
    for number in 0..1_000 {
        let mut service = base.services[0].clone();
        service.name.name = format!("web-{number}");
        let mut slice = base.slices[0].clone();
        slice.name.name = format!("web-{number}-1");
        slice.service = service.name.clone();
        services.push(service);
        slices.push(slice);
    }
    let mut cluster = Cluster::new(NodeView::new("n1"));
    let start = std::time::Instant::now();
    cluster.apply(Event::Reset(crate::model::Listing::Slices(slices)));
    let changed = cluster.apply(Event::Reset(crate::model::Listing::Services(services)));
    let ports: usize = changed
        .iter()
        .filter_map(|name| plan_service(&cluster, name, cluster.node()))
        .map(|p| p.ports.len())
        .sum();
    assert_eq!(ports, 6_000);
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
}
