use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use proxy_common::reason::Verdict;
use proxy_common::select::Algorithm;
use proxy_core::model::annotations::Annotations;
use proxy_core::model::net::{IpFamily, Protocol};
use proxy_core::model::{
    Cluster, DefaultRoute, Event, HostDevice, HostView, NodeView, Object, ServiceName, TrafficPolicy,
};
use proxy_core::plan::{
    Access, BackendAddress, FrontendKind, PlanSettings, PortPlan, Scope, ServicePlan, Unmanaged, plan_service,
};

use crate::source::manifest::{Syntax, parse};

/// Returns the cluster of these manifests; n1 is this node.
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

/// Returns lines of the form `port/protocol family -> address: slots [drop] | backends`.
fn lines(plan: &ServicePlan) -> Vec<String> {
    let list = |all: Vec<String>| all.join(" ");
    let text = |b: &BackendAddress| std::net::SocketAddr::new(b.address, b.port).to_string();
    let mut lines = Vec::new();
    for (id, port) in &plan.ports {
        for (frontend, target) in &port.frontends {
            assert_eq!((target.kind, frontend.scope), (FrontendKind::ClusterIp, Scope::Internal));
            let address = std::net::SocketAddr::new(frontend.address, frontend.port);
            let slots = list(port.slots(target).map(text).collect());
            let drop = if target.when_empty == Verdict::Drop { " drop" } else { "" };
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
            "EndpointSlice default/web-1: endpoints[1].addresses[0]: 127.0.0.1 is a loopback address; give a \
             routable address",
        ]
    );
    assert!(plan.ports.is_empty(), "without an address there is no frontend");
}

#[test]
fn missing_service_has_no_plan() {
    let cluster = cluster(DUAL);
    assert_eq!(plan_service(&cluster, &ServiceName::new("other", "web"), PlanSettings::default()), None);
}

#[test]
fn an_address_that_is_a_pods_is_reported_and_one_of_the_nodes_is_left_alone() {
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
    let own = plan_service(&cluster, &web, PlanSettings::default()).unwrap();
    assert_eq!(own.problems, []);
    assert_eq!(own.unmanaged, BTreeMap::from([("10.96.0.1".parse().unwrap(), Unmanaged::Own)]));
    assert!(own.addresses.is_empty());
    let kinds: BTreeSet<_> =
        own.ports.values().flat_map(|port| port.frontends.values().map(|frontend| frontend.kind)).collect();
    let others = [FrontendKind::NodePort, FrontendKind::LoadBalancer, FrontendKind::ExternalIp];
    assert_eq!(kinds, BTreeSet::from(others), "node ports and addresses outside stay");
    let changed = cluster.apply(Event::Host(HostView::default()));
    assert!(changed.contains(&web), "it is planned again");
    let plan = plan_service(&cluster, &web, PlanSettings::default()).unwrap();
    assert_eq!((plan.unmanaged.len(), plan.addresses.len()), (0, 1));
}

#[test]
fn of_another_proxys_service_only_the_address_is_known() {
    let labelled = EVERYTHING.replace(
        "metadata: {name: web}",
        "metadata: {name: web, labels: {service.kubernetes.io/service-proxy-name: x}}",
    );
    let plan = plan(&labelled.replace("POLICY", "Local"));
    let unmanaged = BTreeMap::from([("10.96.0.1".parse().unwrap(), Unmanaged::Foreign)]);
    assert_eq!(plan, ServicePlan { unmanaged, ..ServicePlan::default() });
}

/// Returns the event of a host with these addresses on one device, and a default route on this device.
fn machine(addresses: &[&str]) -> Event {
    let addresses: BTreeSet<IpAddr> = addresses.iter().map(|text| text.parse().unwrap()).collect();
    let source = addresses.first().copied();
    let devices = [(2, HostDevice { addresses, ..HostDevice::default() })].into();
    let defaults = vec![DefaultRoute { device: 2, source }];
    Event::Host(HostView { devices, defaults, ..HostView::default() })
}

#[test]
fn an_endpoint_at_an_address_of_the_node_is_here_whatever_its_node_is_called() {
    let (service, slice) = EVERYTHING.split_once("---").unwrap();
    let slice = slice.replace("{addresses: [10.0.0.1], nodeName: HERE}", "{addresses: [10.0.0.1]}");
    let mut cluster = cluster(&format!("{}---{slice}", service.replace("POLICY", "Local")));
    let web = ServiceName::new("default", "web");
    let facts = |cluster: &Cluster| {
        let plan = plan_service(cluster, &web, PlanSettings::default()).unwrap();
        let port = plan.ports.into_values().next().unwrap();
        port.backends.values().map(|facts| [facts.local, facts.in_local]).collect::<Vec<_>>()
    };
    let draining = [true, true];
    assert_eq!(facts(&cluster), [[false, false], [false, false], draining]);
    let changed = cluster.apply(machine(&["10.0.0.1", "10.0.0.2"]));
    assert!(changed.contains(&web), "it is planned again");
    assert_eq!(
        facts(&cluster),
        [[true, false], [true, false], draining],
        "a policy goes by names, as kube-proxy's"
    );
    assert!(cluster.apply(machine(&["10.0.0.2", "10.0.0.7"])).contains(&web));
    assert_eq!(facts(&cluster), [[false, false], [true, false], draining]);
}

#[test]
fn source_ranges_let_the_node_in_by_its_own_address_only() {
    let mut cluster = cluster(&EVERYTHING.replace("POLICY", "Cluster").replace("HERE", "n1"));
    let web = ServiceName::new("default", "web");
    let lets_in = |cluster: &Cluster| {
        let plan = plan_service(cluster, &web, PlanSettings::default()).unwrap();
        let frontends = plan.ports.values().flat_map(|port| port.frontends.values());
        frontends.into_iter().any(|frontend| frontend.access == Access::Ranges { node: true })
    };
    // The list accepts 192.0.2.0/24; cni0 has an address in this range, but the node's own address is another one.
    assert!(cluster.apply(machine(&["10.7.0.1", "192.0.2.1"])).contains(&web));
    assert!(!lets_in(&cluster), "a process of the node connects from 10.7.0.1");
    let node =
        |address: &str| NodeView { internal_ips: vec![address.parse().unwrap()], ..NodeView::new("n1") };
    assert!(cluster.apply(Event::Apply(Object::Node(node("192.0.2.1")))).contains(&web), "planned again");
    assert!(lets_in(&cluster));
    cluster.apply(Event::Apply(Object::Node(node("10.7.0.1"))));
    assert!(!lets_in(&cluster));
    let address = Some("192.0.2.1".parse().unwrap());
    let settings = PlanSettings { address, ..PlanSettings::default() };
    let plan = plan_service(&cluster, &web, settings).unwrap();
    let is_node =
        |frontend: &proxy_core::plan::FrontendPlan| frontend.access == Access::Ranges { node: true };
    assert!(plan.ports.values().any(|port| port.frontends.values().any(is_node)), "--bind-address");
}

#[test]
fn passthrough_without_local_endpoint_passes_at_addresses_outside() {
    let annotated = EVERYTHING.replace("POLICY", "Local").replace("nodeName: n1", "nodeName: n3").replace(
        "metadata: {name: web}",
        "metadata: {name: web, annotations: {ballast.io/external-failover: passthrough}}",
    );
    let passing = |text: &str, annotations: Annotations| {
        let settings = PlanSettings { annotations, ..PlanSettings::default() };
        let web = ServiceName::new("default", "web");
        let all = entries(&plan_service(&cluster(text), &web, settings).unwrap());
        let passing = all.iter().filter(|line| line.contains("passes")).count();
        let kinds = ["LoadBalancer", "ExternalIp"];
        let of_kinds = all
            .iter()
            .filter(|line| line.contains(" external") && kinds.iter().any(|kind| line.starts_with(kind)));
        (passing, of_kinds.count())
    };
    let (passes, all) = passing(&annotated, Annotations::ALL);
    assert!(passes == all && all > 0, "{passes} of {all}");
    assert_eq!(passing(&annotated, Annotations::default()).0, 0, "the operator does not allow it");
    let (passes, _) = passing(&annotated.replace("HERE", "n1"), Annotations::ALL);
    assert_eq!(passes, 0, "an endpoint is on this node");
}

/// Returns lines of the form `kind address scope: slots [flags]`, in the order of kinds.
fn entries(plan: &ServicePlan) -> Vec<String> {
    let mut lines = Vec::new();
    let all = plan.ports.values().flat_map(|port| port.frontends.iter().map(move |entry| (port, entry)));
    for (port, (frontend, target)) in all {
        let slots: Vec<_> = port.slots(target).map(|slot| slot.address.to_string()).collect();
        let mut line = format!("{:?} {}:{}", target.kind, frontend.address, frontend.port);
        for (is_so, word) in [
            (frontend.scope == Scope::External, " external"),
            (target.scoped, " scoped"),
            (target.policy == TrafficPolicy::Local, " local"),
            (target.when_empty == Verdict::Drop, " drops"),
            (target.when_empty == Verdict::Pass, " passes"),
            (target.access != Access::Unrestricted, " ranges"),
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
fn under_the_policy_cluster_every_client_is_admitted_go_anywhere() {
    let plan = plan(&EVERYTHING.replace("POLICY", "Cluster").replace("HERE", "n1"));
    assert_eq!(
        entries(&plan),
        [
            "ClusterIp 10.96.0.1:80: 10.0.0.1 10.0.0.2",
            "ExternalIp 203.0.113.7:80: 10.0.0.1 10.0.0.2",
            // The address is also an external address; the source ranges apply nevertheless.
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
fn clients_outside_are_dropped_where_only_others_serve_and_refused_without_any() {
    let local = EVERYTHING.replace("POLICY", "Local").replace("HERE", "n3");
    let remote = entries(&plan(&local.replace("serving: true", "serving: false")));
    assert!(remote.contains(&"NodePort 0.0.0.0:30080 external local drops: ".to_owned()), "{remote:?}");
    assert!(remote.contains(&"NodePort 0.0.0.0:30080 scoped: 10.0.0.1 10.0.0.2".to_owned()));
    let empty = entries(&plan(local.split_once("---").unwrap().0));
    assert!(empty.contains(&"NodePort 0.0.0.0:30080 external local: ".to_owned()), "{empty:?}");
}

/// The limit is for a loaded machine without optimisation; a release build takes a fiftieth of it.
#[test]
fn a_thousand_services_are_planned_in_linear_time() {
    let base = parse(DUAL, Syntax::Yaml).unwrap();
    let (mut services, mut slices) = (Vec::new(), Vec::new());
    for number in 0..1_000 {
        let mut service = base.services[0].clone();
        service.name.name = format!("web-{number}").into();
        let mut slice = base.slices[0].clone();
        slice.name.name = format!("web-{number}-1").into();
        slice.service = service.name.clone();
        services.push(service);
        slices.push(slice);
    }
    let mut cluster = Cluster::new(NodeView::new("n1"));
    let start = std::time::Instant::now();
    cluster.apply(Event::Reset(proxy_core::model::Listing::Slices(slices)));
    let changed = cluster.apply(Event::Reset(proxy_core::model::Listing::Services(services)));
    let ports: usize = changed
        .iter()
        .filter_map(|name| plan_service(&cluster, name, PlanSettings::default()))
        .map(|p| p.ports.len())
        .sum();
    assert_eq!(ports, 6_000);
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
}

#[test]
fn what_a_service_says_of_its_algorithm_comes_before_the_setting() {
    let asks = DUAL.replacen("name: web", "name: web, annotations: {ballast.io/algorithm: sh}", 1);
    for (manifests, set, expected, outside) in [
        (DUAL, None, Algorithm::Random, true),
        (DUAL, Some(Algorithm::RoundRobin), Algorithm::RoundRobin, false),
        (&*asks, Some(Algorithm::RoundRobin), Algorithm::SourceHash, false),
        (&*asks, None, Algorithm::SourceHash, false),
    ] {
        let settings = PlanSettings { algorithm: set, ..PlanSettings::default() };
        let plan = plan_service(&cluster(manifests), &ServiceName::new("default", "web"), settings).unwrap();
        assert!(!plan.ports.is_empty());
        let says = |port: &PortPlan| port.algorithm == expected && port.maglev_outside == outside;
        assert!(plan.ports.values().all(says), "{set:?}: {plan:?}");
    }
}

#[test]
fn tcp_ports_eject_unless_the_service_or_the_setting_says_otherwise() {
    let with = |text: &str| {
        DUAL.replacen("name: web", &format!("name: web, annotations: {{ballast.io/ejection: \"{text}\"}}"), 1)
    };
    for (manifests, no_ejection, expected) in [
        (DUAL.to_owned(), false, true),
        (DUAL.to_owned(), true, false),
        (with("off"), false, false),
        (with("on"), true, true),
    ] {
        let settings = PlanSettings { no_ejection, ..PlanSettings::default() };
        let plan = plan_service(&cluster(&manifests), &ServiceName::new("default", "web"), settings).unwrap();
        assert!(!plan.ports.is_empty());
        for (id, port) in &plan.ports {
            assert_eq!(port.ejects, expected && id.protocol == Protocol::Tcp, "{manifests}");
        }
    }
}

#[test]
fn connections_of_tcp_alone_are_reset() {
    let annotations = "{ballast.io/removal-policy: reset, ballast.io/removal-delay: 5s}";
    let manifests = DUAL.replacen("name: web", &format!("name: web, annotations: {annotations}"), 1);
    let name = ServiceName::new("default", "web");
    let plan = plan_service(&cluster(&manifests), &name, PlanSettings::default()).unwrap();
    let of = |protocol| {
        let ports = plan.ports.iter().filter(move |(id, _)| id.protocol == protocol);
        ports.map(|(_, port)| port.reset_after).collect::<BTreeSet<_>>()
    };
    assert_eq!(of(Protocol::Tcp), [Some(Duration::from_secs(5))].into());
    assert!(of(Protocol::Udp).iter().all(Option::is_none), "{plan:?}");
    let plan = plan_service(&cluster(DUAL), &name, PlanSettings::default()).unwrap();
    assert!(plan.ports.values().all(|port| port.reset_after.is_none()), "the default is kube-proxy's");
}

#[test]
fn weights_choose_among_the_endpoints_unless_all_are_zero() {
    let ready = DUAL.replace("  conditions: {ready: false, serving: true, terminating: true}\n", "");
    let with = |weights: &str| {
        let manifests = ready.replacen(
            "name: web",
            &format!("name: web, annotations: {{ballast.io/weights: '{weights}'}}"),
            1,
        );
        plan(&manifests)
    };
    let all = plan(&ready);
    let addresses = all.ports.values().flat_map(|port| port.backends.keys()).map(|at| at.address);
    let one = addresses.min().unwrap();
    let weighted = with(&format!("{one}=0, *=7"));
    let mut shut = 0;
    for (id, port) in &weighted.ports {
        for (frontend, target) in &port.frontends {
            let before = all.ports.get(id).unwrap();
            let slots = before.slots(before.frontends.get(frontend).unwrap());
            let mut expected: Vec<_> = slots.copied().collect();
            if expected.iter().any(|at| at.address != one) {
                expected.retain(|at| at.address != one);
                shut += 1;
            }
            assert!(port.slots(target).eq(&expected), "{id}");
        }
        for (at, facts) in &port.backends {
            assert_eq!(facts.weight, if at.address == one { 1 } else { 7 }, "{id}");
        }
    }
    assert!(shut > 0);
    let zero = with("*=0");
    assert_eq!(zero.ports, all.ports);
}
