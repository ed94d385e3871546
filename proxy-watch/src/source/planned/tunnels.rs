use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::source::manifest::{Syntax, parse};
use proxy_core::model::annotations::Annotations;
use proxy_core::model::net::IpFamily;
use proxy_core::model::{Cluster, Event, HostDevice, HostView, Listing, NodeView, Object, ServiceName};
use proxy_core::plan::{FrontendKind, PlanSettings, ServicePlan, plan_service};

const MANIFESTS: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, annotations: {ballast.io/forwarding-mode: MODE}}
spec:
  type: NodePort
  clusterIPs: [10.96.0.1]
  externalTrafficPolicy: POLICY
  ports: [{name: a, port: 80, nodePort: 30080}, {name: b, port: 53, nodePort: 30053, protocol: UDP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: a, port: 8080}, {name: b, port: 53, protocol: UDP}]
endpoints:
- {addresses: [10.0.0.1], nodeName: n1}
- {addresses: [10.0.0.2], nodeName: n2}
- {addresses: [10.0.0.3], nodeName: n3}
";

fn node(name: &str, ips: &[&str]) -> NodeView {
    NodeView { internal_ips: ips.iter().map(|ip| ip.parse().unwrap()).collect(), ..NodeView::new(name) }
}

/// Returns the plan of node n1, which has these addresses, and knows these other nodes.
fn plan(mode: &str, policy: &str, own: &[&str], others: Option<Vec<NodeView>>) -> ServicePlan {
    let text = MANIFESTS.replace("MODE", mode).replace("POLICY", policy);
    let objects = parse(&text, Syntax::Yaml).unwrap();
    let mut cluster = Cluster::new(node("n1", own));
    let addresses = own.iter().map(|ip| ip.parse().unwrap()).collect();
    let devices = BTreeMap::from([(2, HostDevice { addresses, ..HostDevice::default() })]);
    cluster.apply(Event::Host(HostView { devices, ..HostView::default() }));
    cluster.apply(Event::Apply(Object::Service(objects.services[0].clone())));
    cluster.apply(Event::Apply(Object::Slice(objects.slices[0].clone())));
    if let Some(others) = others {
        cluster.apply(Event::Reset(Listing::Others(others)));
    }
    plan_service(
        &cluster,
        &ServiceName::new("default", "web"),
        PlanSettings { annotations: Annotations::ALL, ..PlanSettings::default() },
    )
    .unwrap()
}

/// Returns the addresses of the nodes of the endpoints of a port, and the kinds of its frontends with DSR.
fn of(plan: &ServicePlan, port: &str) -> (Vec<Option<IpAddr>>, Vec<FrontendKind>) {
    let (id, port) = plan.ports.iter().find(|(id, _)| &*id.port == port).unwrap();
    assert_eq!(id.family, IpFamily::V4);
    let dsr = port.frontends.values().filter(|frontend| frontend.dsr).map(|frontend| frontend.kind);
    (port.backends.keys().map(|at| port.tunnels.get(at).copied()).collect(), dsr.collect())
}

fn ips(texts: [&str; 3]) -> Vec<Option<IpAddr>> {
    texts.iter().map(|text| text.parse().ok()).collect()
}

#[test]
fn endpoints_elsewhere_are_reached_by_their_nodes() {
    let others = || Some(vec![node("n2", &["fd00::2", "192.0.2.2"]), node("n3", &["fd00::3"])]);
    let both = ["192.0.2.1", "fd00::1"];
    let all = plan("dsr", "Cluster", &both, others());
    let expected = (ips(["-", "192.0.2.2", "fd00::3"]), vec![FrontendKind::NodePort]);
    assert_eq!([of(&all, "a"), of(&all, "b")], [expected.clone(), expected]);
    assert!(all.problems.is_empty() && all.has_dsr(), "{:?}", all.problems);
    let none = (ips(["-"; 3]), vec![]);
    let hybrid = plan("hybrid", "Cluster", &both, others());
    assert_eq!((of(&hybrid, "a").1.len(), of(&hybrid, "b")), (1, none.clone()));
    for plan in [plan("snat", "Cluster", &both, others()), plan("dsr", "Local", &both, others())] {
        assert_eq!((of(&plan, "a"), plan.has_dsr()), (none.clone(), false));
    }
}

#[test]
fn a_node_that_cannot_be_reached_so_is_a_problem_once_nodes_are_listed() {
    let own = ["192.0.2.1"];
    let waiting = plan("dsr", "Cluster", &own, None);
    assert_eq!((of(&waiting, "a").0, waiting.problems.len()), (ips(["-"; 3]), 0));
    let one = plan("dsr", "Cluster", &own, Some(vec![node("n2", &["192.0.2.2"]), node("n3", &["fd00::3"])]));
    assert_eq!(of(&one, "a").0, ips(["-", "192.0.2.2", "-"]));
    let message = &one.problems[0].message;
    assert!(message.contains("1 node (n3)"), "{message}");
    let windows = NodeView { is_other_os: true, ..node("n3", &["192.0.2.3"]) };
    let mixed = plan("dsr", "Cluster", &own, Some(vec![node("n2", &["192.0.2.2"]), windows]));
    assert_eq!((of(&mixed, "a").0, mixed.problems), (ips(["-", "192.0.2.2", "-"]), one.problems));
}

#[test]
fn an_annotation_that_is_not_listed_is_a_problem() {
    let objects =
        parse(&MANIFESTS.replace("MODE", "dsr").replace("POLICY", "Cluster"), Syntax::Yaml).unwrap();
    let mut cluster = Cluster::new(node("n1", &["192.0.2.1"]));
    cluster.apply(Event::Apply(Object::Service(objects.services[0].clone())));
    let name = ServiceName::new("default", "web");
    let plan = |cluster: &Cluster, settings| plan_service(cluster, &name, settings).unwrap();
    let by_default = plan(&cluster, PlanSettings::default());
    assert!(!by_default.has_dsr());
    let fields: Vec<_> = by_default.problems.iter().map(|problem| &*problem.field).collect();
    assert_eq!(fields, ["metadata.annotations[ballast.io/forwarding-mode]"]);
    let all = PlanSettings { annotations: Annotations::ALL, ..PlanSettings::default() };
    assert!(plan(&cluster, all).has_dsr() && plan(&cluster, all).problems.is_empty());
    // The operator's own setting does not depend on the list.
    let forwarding = proxy_core::model::ForwardingMode::Dsr;
    let by_operator = plan(&cluster, PlanSettings { forwarding, ..PlanSettings::default() });
    assert!(by_operator.has_dsr());
}
