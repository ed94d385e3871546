use crate::model::{Event, HostDevice, HostView, NodeView, Object};
use crate::plan::{Access, BackendAddress, FrontendKind, Scope};
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
    plan_service(&cluster, &ServiceName::new("default", "web"), PlanSettings::default()).unwrap()
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
    assert_eq!(plan_service(&cluster, &ServiceName::new("other", "web"), PlanSettings::default()), None);
}

#[test]
fn an_address_that_is_the_nodes_or_a_pods_is_reported() {
    let web = ServiceName::new("default", "web");
    let mut cluster = cluster(&EVERYTHING.replace("POLICY", "Local"));
    let problems = |cluster: &Cluster| {
        let plan = plan_service(cluster, &web, PlanSettings::default()).unwrap();
        plan.problems.into_iter().map(|problem| problem.message).collect::<Vec<_>>()
    };
    assert_eq!(problems(&cluster), [""; 0]);
    let pod_cidrs = vec!["10.96.0.0/24".parse().unwrap()];
    let changed = cluster.apply(Event::Apply(Object::Node(NodeView { pod_cidrs, ..NodeView::new("n1") })));
    assert!(changed.contains(&web), "it is planned again");
    assert!(problems(&cluster)[0].contains("pods"));
    let addresses = ["10.96.0.1".parse().unwrap()].into();
    let devices = [(2, HostDevice { addresses, ..HostDevice::default() })].into();
    let changed = cluster.apply(Event::Host(HostView { devices, ..HostView::default() }));
    assert!(changed.contains(&web), "it is planned again");
    assert!(problems(&cluster)[0].contains("an address of this node"));
}

/// `kind address scope: slots [flags]`, in the order of kinds.
fn entries(plan: &ServicePlan) -> Vec<String> {
    let mut lines = Vec::new();
    for (frontend, target) in plan.ports.values().flat_map(|port| &port.frontends) {
        let slots: Vec<_> = target.slots.iter().map(|slot| slot.address.to_string()).collect();
        let mut line = format!("{:?} {}:{}", target.kind, frontend.address, frontend.port);
        for (is_so, word) in [
            (frontend.scope == Scope::External, " external"),
            (target.scoped, " scoped"),
            (target.policy == TrafficPolicy::Local, " local"),
            (target.drop_when_empty, " drops"),
            (target.access != Access::Everybody, " ranges"),
        ] {
            line.push_str(if is_so { word } else { "" });
        }
        lines.push(format!("{line}: {}", slots.join(" ")));
    }
    lines.sort();
    lines
}

const EVERYTHING: &str = "
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.1
  externalIPs: [203.0.113.7, 198.51.100.1]
  externalTrafficPolicy: POLICY
  loadBalancerSourceRanges: [192.0.2.0/24]
  healthCheckNodePort: 32000
  ports: [{port: 80, nodePort: 30080}]
status: {loadBalancer: {ingress: [{ip: 198.51.100.1}, {ip: 198.51.100.2, ipMode: Proxy}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints:
- {addresses: [10.0.0.1], nodeName: HERE}
- {addresses: [10.0.0.2], nodeName: n2}
- {addresses: [10.0.0.3], nodeName: n1, conditions: {ready: false, serving: true, terminating: true}}
";

#[test]
fn under_the_policy_cluster_everybody_may_go_anywhere() {
    let plan = plan(&EVERYTHING.replace("POLICY", "Cluster").replace("HERE", "n1"));
    assert_eq!(
        entries(&plan),
        [
            "ClusterIp 10.96.0.1:80: 10.0.0.1 10.0.0.2",
            "ExternalIp 203.0.113.7:80: 10.0.0.1 10.0.0.2",
            // Also an external address; the ranges hold.
            "LoadBalancer 198.51.100.1:80 ranges: 10.0.0.1 10.0.0.2",
            "NodePort 0.0.0.0:30080: 10.0.0.1 10.0.0.2",
        ]
    );
    assert_eq!(plan.health_check, None);
    assert!(plan.addresses.iter().eq(&["10.96.0.1".parse::<IpAddr>().unwrap()]));
}

#[test]
fn under_the_policy_local_clients_outside_have_entries_of_their_own() {
    let plan = plan(&EVERYTHING.replace("POLICY", "Local").replace("HERE", "n1"));
    assert_eq!(
        entries(&plan),
        [
            "ClusterIp 10.96.0.1:80: 10.0.0.1 10.0.0.2",
            "ExternalIp 203.0.113.7:80 external local: 10.0.0.1",
            "ExternalIp 203.0.113.7:80 scoped: 10.0.0.1 10.0.0.2",
            "LoadBalancer 198.51.100.1:80 external local ranges: 10.0.0.1",
            "LoadBalancer 198.51.100.1:80 scoped ranges: 10.0.0.1 10.0.0.2",
            "NodePort 0.0.0.0:30080 external local: 10.0.0.1",
            "NodePort 0.0.0.0:30080 scoped: 10.0.0.1 10.0.0.2",
        ]
    );
    let check = plan.health_check.unwrap();
    assert_eq!((check.port, check.local), (32_000, BTreeMap::from([(IpFamily::V4, 1)])));
    let port = plan.ports.values().next().unwrap();
    let facts: Vec<_> =
        port.backends.values().map(|f| [f.local, f.terminating, f.in_cluster, f.in_local]).collect();
    assert_eq!(
        facts,
        [[true, false, true, true], [false, false, true, false], [true, true, false, false]],
        "the draining one is for flows that it has"
    );
}

#[test]
fn a_draining_endpoint_serves_where_no_other_is_left_on_the_node() {
    let plan = plan(&EVERYTHING.replace("POLICY", "Local").replace("HERE", "n3"));
    let outside: Vec<_> =
        entries(&plan).into_iter().filter(|line| line.contains("external local:")).collect();
    assert_eq!(
        outside,
        [
            "ExternalIp 203.0.113.7:80 external local: 10.0.0.3",
            "NodePort 0.0.0.0:30080 external local: 10.0.0.3"
        ]
    );
    assert_eq!(
        plan.health_check.unwrap().local,
        BTreeMap::from([(IpFamily::V4, 0)]),
        "but it is not counted"
    );
}

#[test]
fn clients_outside_are_dropped_where_only_others_serve_and_refused_where_nobody_does() {
    let local = EVERYTHING.replace("POLICY", "Local").replace("HERE", "n3");
    let remote = entries(&plan(&local.replace("serving: true", "serving: false")));
    assert!(remote.contains(&"NodePort 0.0.0.0:30080 external local drops: ".to_owned()), "{remote:?}");
    assert!(remote.contains(&"NodePort 0.0.0.0:30080 scoped: 10.0.0.1 10.0.0.2".to_owned()));
    let nobody = entries(&plan(local.split_once("---").unwrap().0));
    assert!(nobody.contains(&"NodePort 0.0.0.0:30080 external local: ".to_owned()), "{nobody:?}");
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
        .filter_map(|name| plan_service(&cluster, name, PlanSettings::default()))
        .map(|p| p.ports.len())
        .sum();
    assert_eq!(ports, 6_000);
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
}

#[test]
fn affinity_that_a_setting_asks_for_does_not_shorten_what_a_service_asks_for() {
    let asks = DUAL.replace("spec:\n  clusterIPs", "spec:\n  sessionAffinity: ClientIP\n  sessionAffinityConfig: {clientIP: {timeoutSeconds: 60}}\n  clusterIPs");
    for (manifests, set, expected) in
        [(DUAL, false, 0), (DUAL, true, 10_800), (&*asks, true, 60), (&*asks, false, 60)]
    {
        let settings = PlanSettings { source_affinity: set, ..PlanSettings::default() };
        let plan = plan_service(&cluster(manifests), &ServiceName::new("default", "web"), settings).unwrap();
        assert!(!plan.ports.is_empty());
        assert!(plan.ports.values().all(|port| port.affinity_secs == expected), "{set}: {plan:?}");
    }
}
