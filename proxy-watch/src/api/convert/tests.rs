use rstest::rstest;
use serde_json::{Value, json};

use crate::api::objects;
use proxy_core::model::net::IpFamily;
use proxy_core::model::{
    EndpointSlice, ForwardingMode, NodeView, RemovalPolicy, Service, ServiceKind, TrafficPolicy,
};

use proxy_common::select::Algorithm;

use super::*;
use proxy_core::model::spread::{WeightOf, Weights};

fn service_of(mut metadata: Value, spec: &Value, status: &Value) -> Option<Service> {
    metadata["name"] = json!("web");
    metadata["namespace"] = json!("shop");
    let object: objects::Service =
        serde_json::from_value(json!({"metadata": metadata, "spec": spec, "status": status})).unwrap();
    service(object)
}

fn from_spec(spec: &Value) -> Service {
    service_of(json!({}), spec, &json!({})).unwrap()
}

fn slice_of(labels: &Value, rest: Value) -> Option<EndpointSlice> {
    let mut object = rest;
    object["metadata"] = json!({"name": "web-x1", "namespace": "shop", "labels": labels});
    slice(serde_json::from_value::<objects::EndpointSlice>(object).unwrap())
}

fn from_slice(rest: Value) -> EndpointSlice {
    slice_of(&json!({"kubernetes.io/service-name": "web"}), rest).unwrap()
}

fn fields(problems: &[Problem]) -> Vec<&str> {
    problems.iter().map(|p| p.field.as_str()).collect()
}

#[test]
fn annotations_say_how_connections_are_spread() {
    let of = |annotations: Value| {
        service_of(json!({"annotations": annotations}), &json!({"clusterIP": "10.96.0.1"}), &json!({}))
            .unwrap()
    };
    let service = of(json!({
        "ballast.io/algorithm": "wrr",
        "ballast.io/weights": "10.0.0.7=10, fd00::7=1,\nnode/worker-3=0, zone/eu-1a=5, *=100",
    }));
    assert_eq!((service.algorithm, service.problems), (Some(Algorithm::WeightedRoundRobin), vec![]));
    let expected = [
        (WeightOf::Address("10.0.0.7".parse().unwrap()), 10),
        (WeightOf::Address("fd00::7".parse().unwrap()), 1),
        (WeightOf::Node("worker-3".into()), 0),
        (WeightOf::Zone("eu-1a".into()), 5),
        (WeightOf::All, 100),
    ];
    assert_eq!(service.weights.0, expected.into());
    let bad = of(json!({"ballast.io/forwarding-mode": "direct"}));
    assert_eq!(
        (bad.forwarding, fields(&bad.problems)),
        (None, vec!["metadata.annotations[ballast.io/forwarding-mode]"])
    );
    assert!(
        bad.problems[0].message.contains("`direct`") && bad.problems[0].message.contains("snat, dsr, hybrid")
    );
    let direct = of(json!({"ballast.io/forwarding-mode": "hybrid"}));
    assert_eq!((direct.forwarding, direct.problems), (Some(ForwardingMode::Hybrid), vec![]));
    let ejections = ["on", " off", "true"].map(|text| of(json!({"ballast.io/ejection": text})));
    let seen = ejections.map(|service| (service.ejection, service.problems.len()));
    assert_eq!(seen, [(Some(true), 0), (Some(false), 0), (None, 1)]);
    let sockets = ["host-only", "all", "off"].map(|text| of(json!({"ballast.io/socket-lb": text})));
    let seen = sockets.map(|service| (service.no_sockets, service.problems.len()));
    assert_eq!(seen, [(true, 0), (false, 0), (false, 1)]);
    let moves = [
        json!({"ballast.io/rebalance": "on"}),
        json!({"ballast.io/rebalance": "off"}),
        json!({"ballast.io/rebalance": "true"}),
        json!({"ballast.io/rebalance": "on", "ballast.io/algorithm": "sh"}),
        json!({"ballast.io/rebalance": "on", "ballast.io/algorithm": "mh"}),
    ];
    let moves = moves.map(of).map(|service| (service.rebalances, service.problems.len()));
    assert_eq!(moves, [(true, 0), (false, 0), (false, 1), (false, 1), (true, 0)]);
    // The policy of this Service is Cluster.
    let failovers = ["passthrough", "forward"].map(|text| of(json!({"ballast.io/external-failover": text})));
    assert!(failovers.iter().all(|service| !service.passes_when_empty));
    let message = |at: usize| &failovers[at].problems[0].message;
    assert!(message(0).contains("externalTrafficPolicy is not Local"), "{}", message(0));
    assert!(message(1).contains("`forward` is not `passthrough`"), "{}", message(1));
    let bad = of(json!({"ballast.io/algorithm": "fastest"}));
    assert_eq!(
        (bad.algorithm, fields(&bad.problems)),
        (None, vec!["metadata.annotations[ballast.io/algorithm]"])
    );
    let message = &bad.problems[0].message;
    assert!(message.contains("`fastest`") && message.contains("random, rr, wrr, sh, dh, mh"), "{message}");
    for text in ["10.0.0.7=101", "10.0.0.7", "node/=1", "rack/7=1", "x=1", "*=-1", "*=1, zone/a"] {
        let bad = of(json!({"ballast.io/weights": text}));
        assert_eq!(fields(&bad.problems), ["metadata.annotations[ballast.io/weights]"], "{text}");
        assert!(bad.problems[0].message.contains("N from 0 to 100"));
        assert_eq!(bad.weights, Weights::default(), "{text}");
    }
}

#[rstest]
#[case(json!({}), RemovalPolicy::Drain, &[])]
#[case(json!({"ballast.io/removal-policy": "drain", "ballast.io/removal-delay": "30s"}), RemovalPolicy::Drain, &[])]
#[case(json!({"ballast.io/removal-policy": " reset"}), reset(0), &[])]
#[case(json!({"ballast.io/removal-policy": "reset", "ballast.io/removal-delay": "30s"}), reset(30), &[])]
#[case(json!({"ballast.io/removal-policy": "reset", "ballast.io/removal-delay": "1m30s"}), reset(90), &[])]
#[case(json!({"ballast.io/removal-policy": "reset", "ballast.io/removal-delay": "24h"}), reset(86_400), &[])]
#[case(json!({"ballast.io/removal-policy": "kill"}), RemovalPolicy::Drain, &["policy"])]
#[case(json!({"ballast.io/removal-policy": "reset", "ballast.io/removal-delay": "30"}), reset(0), &["delay"])]
#[case(json!({"ballast.io/removal-policy": "reset", "ballast.io/removal-delay": "-1s"}), reset(0), &["delay"])]
#[case(json!({"ballast.io/removal-policy": "reset", "ballast.io/removal-delay": "25h"}), reset(0), &["delay"])]
#[case(json!({"ballast.io/removal-delay": "soon"}), RemovalPolicy::Drain, &["delay"])]
fn annotations_say_what_becomes_of_connections_to_endpoints_that_leave(
    #[case] annotations: Value,
    #[case] expected: RemovalPolicy,
    #[case] bad: &[&str],
) {
    let metadata = json!({"annotations": annotations});
    let service = service_of(metadata, &json!({"clusterIP": "10.96.0.1"}), &json!({})).unwrap();
    let fields: Vec<_> =
        bad.iter().map(|name| format!("metadata.annotations[ballast.io/removal-{name}]")).collect();
    assert_eq!(
        (service.removal, self::fields(&service.problems)),
        (expected, fields.iter().map(|f| &**f).collect())
    );
    for problem in &service.problems {
        let accepted = if problem.field.contains("delay") { "from 0s to 24h" } else { "one of drain, reset" };
        assert!(problem.message.contains(accepted), "{}", problem.message);
    }
}

fn reset(seconds: u64) -> RemovalPolicy {
    RemovalPolicy::Reset(std::time::Duration::from_secs(seconds))
}

#[test]
fn a_slice_gives_weights_to_its_endpoints() {
    let object = json!({
        "metadata": {
            "name": "web-x1",
            "labels": {"kubernetes.io/service-name": "web"},
            "annotations": {"ballast.io/weights": "zone/a=7, 10.0.0.2=2"},
        },
        "addressType": "IPv4",
        "endpoints": [
            {"addresses": ["10.0.0.1"], "zone": "a"},
            {"addresses": ["10.0.0.2"], "zone": "a"},
            {"addresses": ["10.0.0.3"], "zone": "b"},
        ],
    });
    let slice = slice(serde_json::from_value::<objects::EndpointSlice>(object).unwrap()).unwrap();
    let found: Vec<_> = slice.endpoints.iter().map(|one| (one.zone.as_deref(), one.weight)).collect();
    assert_eq!(found, [(Some("a"), Some(7)), (Some("a"), Some(2)), (Some("b"), None)]);
}

#[rstest]
#[case::headless(json!({}), json!({"clusterIP": "None"}))]
#[case::headless_by_list(json!({}), json!({"clusterIPs": ["None"]}))]
#[case::external_name(json!({}), json!({"type": "ExternalName", "clusterIP": "10.96.0.1", "externalName": "a.b"}))]
fn services_that_ballast_does_not_serve_are_skipped(#[case] metadata: Value, #[case] spec: Value) {
    assert_eq!(service_of(metadata, &spec, &json!({})), None);
}

/// kube-proxy 1.36 checks this label only on slices.
#[test]
fn a_service_labelled_headless_with_an_address_is_served() {
    let metadata = json!({"labels": {"service.kubernetes.io/headless": ""}});
    let service = service_of(metadata, &json!({"clusterIP": "10.96.0.1"}), &json!({})).unwrap();
    assert!(!service.is_foreign && service.cluster_ips.len() == 1, "{service:?}");
}

#[test]
fn of_another_proxys_service_the_addresses_are_kept_and_nothing_else() {
    let service = service_of(
        json!({"labels": {"service.kubernetes.io/service-proxy-name": "x"}, "creationTimestamp": "1970-01-01T00:01:00Z"}),
        &json!({
            "type": "LoadBalancer",
            "clusterIPs": ["10.96.0.1", "fd00::1", "10.96.0.2"],
            "externalIPs": ["203.0.113.7"],
            "ports": [{"port": 80, "nodePort": 30080}],
        }),
        &json!({"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}]}}),
    )
    .unwrap();
    let cluster_ips = ["10.96.0.1", "fd00::1"].map(|text| text.parse().unwrap()).to_vec();
    let expected = Service { is_foreign: true, cluster_ips, ..Service::new(ServiceName::new("shop", "web")) };
    assert_eq!(service, expected);
    let headless = json!({"clusterIP": "None"});
    let labels = json!({"labels": {"service.kubernetes.io/service-proxy-name": "x"}});
    assert_eq!(service_of(labels, &headless, &json!({})), None);
}

#[test]
fn a_plain_service() {
    let service =
        from_spec(&json!({"clusterIP": "10.96.0.1", "ports": [{"port": 80, "targetPort": "http"}]}));
    assert_eq!(service.name.to_string(), "shop/web");
    assert_eq!(service.kind, ServiceKind::ClusterIp);
    assert_eq!(service.cluster_ips, ["10.96.0.1".parse::<std::net::IpAddr>().unwrap()]);
    let ports: Vec<_> =
        service.ports.iter().map(|p| (p.name.as_str(), p.protocol, p.port, p.node_port)).collect();
    assert_eq!(ports, [("", Protocol::Tcp, 80, 0)]);
    assert_eq!((service.internal_policy, service.external_policy), Default::default());
    assert_eq!((service.affinity_secs, service.created, service.source_ranges), (0, 0, None));
    assert_eq!(service.problems, []);
}

#[test]
fn a_load_balancer_with_everything() {
    let service = service_of(
        json!({"creationTimestamp": "1970-01-01T00:01:00Z"}),
        &json!({
            "type": "LoadBalancer",
            "clusterIP": "10.96.0.1",
            "clusterIPs": ["10.96.0.1", "fd00::1"],
            "externalIPs": ["203.0.113.07", "203.0.113.7"],
            "loadBalancerSourceRanges": [" 10.0.0.1/8 "],
            "internalTrafficPolicy": "Local",
            "externalTrafficPolicy": "Local",
            "healthCheckNodePort": 32000,
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 90}},
            "ports": [{"name": "dns", "port": 53, "nodePort": 30053},
                      {"name": "dns", "port": 53, "protocol": "UDP"}],
        }),
        &json!({"loadBalancer": {"ingress": [
            {"ip": "198.51.100.1"}, {"ip": "198.51.100.2", "ipMode": "VIP"},
            {"ip": "198.51.100.3", "ipMode": "Proxy"}, {"hostname": "lb.example.org"},
        ]}}),
    )
    .unwrap();
    assert_eq!(service.problems, []);
    assert_eq!(service.kind, ServiceKind::LoadBalancer);
    assert_eq!(service.cluster_ips.len(), 2);
    assert_eq!(service.external_ips, ["203.0.113.7".parse::<std::net::IpAddr>().unwrap()]);
    let ips: Vec<_> = service.load_balancer_ips.iter().map(ToString::to_string).collect();
    assert_eq!(ips, ["198.51.100.1", "198.51.100.2"]);
    assert_eq!(service.source_ranges, Some(vec!["10.0.0.0/8".parse().unwrap()]));
    assert_eq!(service.internal_policy, TrafficPolicy::Local);
    assert_eq!(service.external_policy, TrafficPolicy::Local);
    assert_eq!((service.affinity_secs, service.health_check_node_port, service.created), (90, 32_000, 60));
    let ports: Vec<_> = service.ports.iter().map(|p| (p.protocol, p.node_port)).collect();
    assert_eq!(ports, [(Protocol::Tcp, 30_053), (Protocol::Udp, 0)]);
}

#[rstest]
#[case::no_address(json!({}), "spec.clusterIP")]
#[case::empty_address(json!({"clusterIP": ""}), "spec.clusterIP")]
#[case::bad_address(json!({"clusterIP": "10.96.0"}), "spec.clusterIP")]
#[case::loopback(json!({"clusterIP": "127.0.0.1"}), "spec.clusterIP")]
#[case::every_address(json!({"clusterIP": "0.0.0.0"}), "spec.clusterIP")]
#[case::second_of_a_family(json!({"clusterIPs": ["10.96.0.1", "10.96.0.2"]}), "spec.clusterIPs")]
#[case::external(json!({"clusterIP": "10.96.0.1", "externalIPs": ["x"]}), "spec.externalIPs")]
#[case::range(json!({"clusterIP": "10.96.0.1", "loadBalancerSourceRanges": ["10.0.0.0"]}), "spec.loadBalancerSourceRanges")]
#[case::kind(json!({"clusterIP": "10.96.0.1", "type": "Other"}), "spec.type")]
#[case::policy(json!({"clusterIP": "10.96.0.1", "internalTrafficPolicy": "local"}), "spec.internalTrafficPolicy")]
#[case::affinity(json!({"clusterIP": "10.96.0.1", "sessionAffinity": "Cookie"}), "spec.sessionAffinity")]
#[case::timeout(json!({"clusterIP": "10.96.0.1", "sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 86_401}}}), "spec.sessionAffinityConfig.clientIP.timeoutSeconds")]
#[case::port_zero(json!({"clusterIP": "10.96.0.1", "ports": [{"port": 0}]}), "spec.ports[0].port")]
#[case::port_too_large(json!({"clusterIP": "10.96.0.1", "ports": [{"port": 65_536}]}), "spec.ports[0].port")]
#[case::protocol(json!({"clusterIP": "10.96.0.1", "ports": [{"port": 80, "protocol": "QUIC"}]}), "spec.ports[0].protocol")]
#[case::node_port(json!({"clusterIP": "10.96.0.1", "type": "NodePort", "ports": [{"port": 80, "nodePort": -1}]}), "spec.ports[0].nodePort")]
#[case::same_name(json!({"clusterIP": "10.96.0.1", "ports": [{"port": 80}, {"port": 81}]}), "spec.ports[1].name")]
#[case::same_number(json!({"clusterIP": "10.96.0.1", "ports": [{"name": "a", "port": 80}, {"name": "b", "port": 80}]}), "spec.ports[1].port")]
#[case::long_name(json!({"clusterIP": "10.96.0.1", "ports": [{"name": "a".repeat(64), "port": 80}]}), "spec.ports[0].name")]
fn unusable_fields_are_reported_as_problems(#[case] spec: Value, #[case] field: &str) {
    let service = from_spec(&spec);
    assert_eq!(fields(&service.problems), [field]);
    assert_eq!(service.problems[0].object, "Service shop/web");
}

#[test]
fn invalid_part_of_an_object_leaves_the_other_parts_in_use() {
    let service = from_spec(&json!({
        "clusterIPs": ["10.96.0.300", "fd00::1"],
        "loadBalancerSourceRanges": ["nonsense"],
        "ports": [{"name": "a", "port": 70_000}, {"name": "b", "port": 81}],
    }));
    assert_eq!(service.cluster_ips, ["fd00::1".parse::<std::net::IpAddr>().unwrap()]);
    assert_eq!(service.ports.iter().map(|p| p.port).collect::<Vec<_>>(), [81]);
    assert_eq!(service.source_ranges, Some(vec![]), "no client, rather than every client");
    assert_eq!(service.problems.len(), 3);
}

#[test]
fn refused_cluster_address_keeps_its_family_served() {
    let service = from_spec(&json!({"clusterIPs": ["169.254.20.10", "fd00::1"]}));
    assert_eq!(service.cluster_ips, ["fd00::1".parse::<std::net::IpAddr>().unwrap()]);
    assert_eq!(service.families().collect::<Vec<_>>(), [IpFamily::V6, IpFamily::V4]);
    let unreadable = from_spec(&json!({"clusterIPs": ["10.96.0.300", "fd00::1"]}));
    assert_eq!(unreadable.families().collect::<Vec<_>>(), [IpFamily::V6]);
}

#[rstest]
#[case::no_service(json!({}), "IPv4")]
#[case::empty_service(json!({"kubernetes.io/service-name": ""}), "IPv4")]
#[case::headless(json!({"kubernetes.io/service-name": "web", "service.kubernetes.io/headless": ""}), "IPv4")]
#[case::names(json!({"kubernetes.io/service-name": "web"}), "FQDN")]
fn slices_that_ballast_does_not_use_are_skipped(#[case] labels: Value, #[case] family: &str) {
    let rest = json!({"addressType": family, "endpoints": [{"addresses": ["10.0.0.1"]}]});
    assert_eq!(slice_of(&labels, rest), None);
}

#[test]
fn conditions_that_are_not_given_have_their_defaults() {
    let slice = from_slice(json!({"addressType": "IPv4", "endpoints": [
        {"addresses": ["10.0.0.2", "10.9.9.9"], "conditions": {}},
        {"addresses": ["10.0.0.01"]},
        {"addresses": ["10.0.0.3"], "conditions": {"ready": false, "serving": false, "terminating": true}},
    ]}));
    let found: Vec<_> =
        slice.endpoints.iter().map(|e| (e.address.to_string(), e.ready, e.serving, e.terminating)).collect();
    let expected =
        [("10.0.0.1", true, true, false), ("10.0.0.2", true, true, false), ("10.0.0.3", false, false, true)];
    assert_eq!(
        found,
        expected.map(|(a, r, s, t)| (a.to_owned(), r, s, t)),
        "sorted; the first address counts"
    );
    assert_eq!(slice.service.to_string(), "shop/web");
    assert_eq!(slice.problems, []);
}

#[test]
fn order_of_endpoints_and_ports_makes_no_difference() {
    let (a, b) = (json!({"addresses": ["10.0.0.1"]}), json!({"addresses": ["10.0.0.2"], "nodeName": "n1"}));
    let (p, q) = (json!({"name": "p", "port": 1}), json!({"name": "q", "port": 2}));
    let one = from_slice(json!({"addressType": "IPv4", "endpoints": [a, b], "ports": [p, q]}));
    let other = from_slice(json!({"addressType": "IPv4", "endpoints": [b, a], "ports": [q, p]}));
    assert_eq!(one, other);
}

#[test]
fn hints_and_nodes_are_kept() {
    let slice = from_slice(json!({"addressType": "IPv6", "endpoints": [{
        "addresses": ["fd00::1"], "nodeName": "n1", "zone": "a",
        "hints": {"forZones": [{"name": "a"}, {"name": "b"}], "forNodes": [{"name": "n1"}]},
    }]}));
    let endpoint = &slice.endpoints[0];
    assert_eq!(slice.family, IpFamily::V6);
    assert_eq!(endpoint.node.as_deref(), Some("n1"));
    assert!(endpoint.zone_hints.iter().eq(["a", "b"]) && endpoint.node_hints.iter().eq(["n1"]));
    assert!(slice.has_hints());
}

#[test]
fn ports_without_number_are_ignored_in_silence() {
    let slice = from_slice(json!({"addressType": "IPv4", "endpoints": [], "ports": [
        {"name": "none"}, {"name": "zero", "port": 0}, {"name": "good", "port": 80, "protocol": "SCTP"},
        {"name": "large", "port": 65_536}, {"name": "odd", "port": 80, "protocol": "ICMP"},
    ]}));
    let ports: Vec<_> = slice.ports.iter().map(|p| (p.name.as_str(), p.protocol, p.port)).collect();
    assert_eq!(ports, [("good", Protocol::Sctp, 80)]);
    assert_eq!(fields(&slice.problems), ["ports[3].port", "ports[4].protocol"]);
    assert_eq!(slice.problems[0].object, "EndpointSlice shop/web-x1");
}

#[rstest]
#[case("IPv4", "127.0.0.1")]
#[case("IPv4", "169.254.169.254")]
#[case("IPv4", "224.0.0.1")]
#[case("IPv4", "fd00::1")]
#[case("IPv4", "nonsense")]
#[case("IPv6", "::1")]
#[case("IPv6", "fe80::1")]
#[case("IPv6", "::ffff:127.0.0.1")]
#[case("IPv6", "10.0.0.1")]
fn an_endpoint_that_cannot_be_one_is_left_out_alone(#[case] family: &str, #[case] address: &str) {
    let good = if family == "IPv4" { "10.0.0.9" } else { "fd00::9" };
    let slice = from_slice(json!({"addressType": family, "endpoints": [
        {"addresses": [address]}, {"addresses": []}, {"addresses": [good]},
    ]}));
    assert_eq!(slice.endpoints.iter().map(|e| e.address.to_string()).collect::<Vec<_>>(), [good]);
    assert_eq!(fields(&slice.problems), ["endpoints[0].addresses[0]", "endpoints[1].addresses"]);
}

#[rstest]
#[case(json!({"topology.kubernetes.io/zone": "a"}), Some("a"))]
#[case(json!({"topology.kubernetes.io/zone": ""}), None)]
#[case(json!({}), None)]
fn a_node_has_a_zone_or_none(#[case] labels: Value, #[case] zone: Option<&str>) {
    let object = json!({"metadata": {"name": "n1", "labels": labels}});
    let expected = NodeView { zone: zone.map(str::to_owned), ..NodeView::new("n1") };
    assert_eq!(node(serde_json::from_value(object).unwrap()), expected);
}

#[rstest]
#[case(json!({"kubernetes.io/os": "linux"}), false)]
#[case(json!({"kubernetes.io/os": "windows"}), true)]
fn node_with_another_system_is_known(#[case] labels: Value, #[case] is_other_os: bool) {
    let object = json!({"metadata": {"name": "n1", "labels": labels}});
    let expected = NodeView { is_other_os, ..NodeView::new("n1") };
    assert_eq!(node(serde_json::from_value(object).unwrap()), expected);
}

#[rstest]
#[case(json!({"metadata": {"name": "n1"}}), false)]
#[case(json!({"metadata": {"name": "n1"}, "spec": {"unschedulable": true}}), false)]
#[case(json!({"metadata": {"name": "n1", "deletionTimestamp": "2026-01-02T03:04:05Z"}}), true)]
#[case(taints(&["node.kubernetes.io/unschedulable", "DeletionCandidateOfClusterAutoscaler"]), false)]
#[case(taints(&["node.kubernetes.io/unschedulable", "ToBeDeletedByClusterAutoscaler"]), true)]
fn a_node_stays_or_leaves(#[case] object: Value, #[case] is_leaving: bool) {
    let expected = NodeView { is_leaving, ..NodeView::new("n1") };
    assert_eq!(node(serde_json::from_value(object).unwrap()), expected);
}

fn taints(keys: &[&str]) -> Value {
    let taints: Vec<_> = keys.iter().map(|key| json!({"key": key, "effect": "NoSchedule"})).collect();
    json!({"metadata": {"name": "n1"}, "spec": {"taints": taints}})
}

#[rstest]
#[case("2026-01-02T03:04:05Z", Some(1_767_323_045_000))]
#[case("2026-01-02T03:04:05.678901Z", Some(1_767_323_045_678))]
#[case("2026-01-02T04:04:05+01:00", Some(1_767_323_045_000))]
#[case("yesterday", None)]
#[case("", None)]
fn when_a_slice_was_triggered(#[case] text: &str, #[case] milliseconds: Option<u128>) {
    let object = json!({
        "metadata": {
            "name": "web-x1",
            "labels": {"kubernetes.io/service-name": "web"},
            "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": text},
        },
        "addressType": "IPv4",
        "endpoints": [],
    });
    let slice = slice(serde_json::from_value::<objects::EndpointSlice>(object).unwrap()).unwrap();
    let since = |time: std::time::SystemTime| time.duration_since(std::time::UNIX_EPOCH).unwrap().as_millis();
    assert_eq!(slice.triggered.map(since), milliseconds);
    assert_eq!(slice.problems, [], "it costs a measurement, nothing else");
}

#[test]
fn number_of_problems_per_object_is_limited() {
    let bad = "x".repeat(100_000);
    let ranges = vec![bad.as_str(); 1000];
    let service = from_spec(&json!({"clusterIP": "10.96.0.1", "loadBalancerSourceRanges": ranges}));
    assert_eq!(service.problems.len(), MOST_PROBLEMS + 1);
    assert!(service.problems.iter().all(|problem| problem.message.len() < 500));
}

#[test]
fn unknown_annotations_beyond_the_limit_are_not_compared() {
    let keys = (0..18_000).map(|number| (format!("ballast.io/{number}"), String::new()));
    let metadata = ObjectMeta { annotations: Some(keys.collect()), ..ObjectMeta::default() };
    assert_eq!(service::unknown(&metadata, &service::ANNOTATIONS).count(), MOST_PROBLEMS + 1);
}

#[rstest]
#[case::mistyped("ballast.io/weight", Some("unknown annotation, ignored; did you mean ballast.io/weights?"))]
#[case::of_services("ballast.io/algorithm", Some("an annotation of Services, ignored here"))]
#[case::known("ballast.io/weights", None)]
#[case::of_others("example.com/weight", None)]
fn annotation_that_slices_do_not_have_is_a_problem(#[case] key: &str, #[case] expected: Option<&str>) {
    let slice = slice(
        serde_json::from_value::<objects::EndpointSlice>(json!({
            "metadata": {"name": "web-x1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}, "annotations": {key: "*=1"}},
            "addressType": "IPv4", "endpoints": [], "ports": [],
        }))
        .unwrap(),
    );
    let found: Vec<_> = slice.unwrap().problems.into_iter().map(|problem| problem.message).collect();
    assert_eq!(found, expected.into_iter().collect::<Vec<_>>());
}

#[test]
fn documentation_lists_each_annotation() {
    let page = include_str!("../../../../docs/flags.md");
    let (_, list) = page.split_once("\n## Annotations of Services\n").unwrap();
    for name in service::ANNOTATIONS {
        assert!(list.contains(&format!("\n| `{name}` | ")), "{name}");
    }
}

#[test]
fn problem_that_quotes_an_object_has_no_control_characters() {
    let mut problems = Problems::of("Service a/\u{7}");
    problems.add("metadata.annotations[\u{7f}]", &"`\u{1b}[2J\r\nall is well, é`");
    assert_eq!(
        problems.found[0].to_string(),
        r"Service a/\u{7}: metadata.annotations[\u{7f}]: `\u{1b}[2J\r\nall is well, é`"
    );
}
