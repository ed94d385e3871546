use std::net::Ipv4Addr;

use proptest::prelude::*;
use rstest::rstest;

use crate::model::Name;
use crate::testing::arbitrary;

use super::*;

/// Parses an endpoint. `A@n1 z=a,b n=n1 draining`: the endpoint A on the node n1, with hints for two zones and a node.
fn endpoint(text: &str) -> (BackendAddress, Endpoint) {
    let mut words = text.split(' ');
    let (letter, node) = words.next().unwrap().split_once('@').unwrap();
    let address = Ipv4Addr::new(10, 0, 0, letter.as_bytes()[0]).into();
    let mut endpoint = Endpoint { node: Some(node.into()), ..Endpoint::new(address) };
    let list = |text: &str| text.split(',').map(Name::from).collect();
    for word in words {
        match word.split_once('=').unwrap_or((word, "")) {
            ("z", zones) => endpoint.zone_hints = list(zones),
            ("n", nodes) => endpoint.node_hints = list(nodes),
            ("unready", _) => (endpoint.ready, endpoint.serving) = (false, false),
            ("draining", _) => (endpoint.ready, endpoint.terminating) = (false, true),
            ("dead", _) => (endpoint.ready, endpoint.serving, endpoint.terminating) = (false, false, true),
            other => panic!("{other:?}"),
        }
    }
    (BackendAddress { address, port: 80 }, endpoint)
}

fn letters(addresses: &[BackendAddress]) -> String {
    let letter = |b: &BackendAddress| match b.address {
        std::net::IpAddr::V4(v4) => char::from(v4.octets()[3]),
        std::net::IpAddr::V6(_) => '?',
    };
    addresses.iter().map(letter).collect()
}

const CLUSTER: EndpointSets = EndpointSets::new(false, false, false);
const INTERNAL_LOCAL: EndpointSets = EndpointSets::new(true, false, false);
const INTERNAL_LOCAL_NODE_PORT: EndpointSets = EndpointSets::new(true, false, true);
const EXTERNAL_LOCAL: EndpointSets = EndpointSets::new(false, true, true);
const EXTERNAL_LOCAL_UNUSED: EndpointSets = EndpointSets::new(false, true, false);
const BOTH_LOCAL: EndpointSets = EndpointSets::new(true, true, true);

const HINTED: &[&str] = &["A@n1 z=a", "B@n2 z=b", "C@n3 z=c", "D@n1 z=a"];

/// The cases of `TestCategorizeEndpoints` (`pkg/proxy/topology_test.go`), on the node n1. The zone `-` is that
/// of a node without the label.
#[rstest]
#[case::zone_hints(CLUSTER, "a", HINTED, "AD", "", true)]
#[case::local_ignores_hints(EXTERNAL_LOCAL, "c", HINTED, "C", "AD", true)]
#[case::internal_local_ignores_hints(INTERNAL_LOCAL_NODE_PORT, "c", HINTED, "C", "AD", true)]
#[case::node_without_zone(CLUSTER, "-", HINTED, "ABCD", "", true)]
#[case::node_with_empty_zone(CLUSTER, "", HINTED, "ABCD", "", true)]
#[case::zone_without_endpoint(CLUSTER, "d", HINTED, "ABCD", "", true)]
#[case::unready_in_own_zone_left_out(CLUSTER, "a", &["A@n1 z=a", "B@n2 z=b", "C@n3 z=a unready"], "A", "", true)]
#[case::own_zone_has_only_unready(CLUSTER, "a", &["A@n1 z=a unready", "B@n2 z=b", "C@n3 z=c"], "BC", "", true)]
#[case::one_lacks_a_hint(CLUSTER, "a", &["A@n1 z=a", "B@n2 z=b", "C@n3"], "ABC", "", true)]
#[case::an_unready_one_may_lack_a_hint(CLUSTER, "a", &["A@n1 z=a", "B@n2 z=b", "C@n3 unready"], "A", "", true)]
#[case::several_zones_in_a_hint(CLUSTER, "a", &["A@n1 z=a,b", "B@n2 z=b,c", "C@n3 z=c,a"], "AC", "", true)]
// Node hints cannot be switched off since Kubernetes 1.35, so they count wherever the API server sends them;
// a server that has them off sends zone hints alone.
#[case::node_hints_off_means_zone(CLUSTER, "a", &["A@n1 z=a", "B@n2 z=a", "C@n3 z=b"], "AB", "", true)]
#[case::node_hint(CLUSTER, "a", &["A@n1 z=a n=n1", "B@n2 z=a n=n2", "C@n3 z=b n=n3"], "A", "", true)]
#[case::one_without_any_hint(CLUSTER, "a", &["A@n1 z=a n=n1", "B@n2 z=a n=n2", "C@n3"], "ABC", "", true)]
#[case::one_without_node_hint_means_zone(CLUSTER, "a", &["A@n1 z=a n=n1", "B@n2 z=a", "C@n3 z=b"], "AB", "", true)]
#[case::no_hint_for_our_node_means_zone(CLUSTER, "a", &["A@n4 z=a n=n4", "B@n2 z=a n=n2", "C@n3 z=b n=n3"], "AB", "", true)]
#[case::zone_and_locality_conflict(EXTERNAL_LOCAL, "b", &["A@n1 z=a", "B@n2 z=b", "C@n3 z=b", "D@n1 z=b"], "BCD", "AD", true)]
#[case::no_endpoints_internal_local(INTERNAL_LOCAL, "-", &[], "", "", false)]
#[case::internal_local_only_remote(INTERNAL_LOCAL, "-", &["A@n2", "B@n3"], "", "", true)]
#[case::internal_local_all_local(INTERNAL_LOCAL, "-", &["A@n1", "B@n1"], "", "AB", true)]
#[case::internal_local_some_local(INTERNAL_LOCAL, "-", &["A@n1", "B@n2"], "", "A", true)]
#[case::cluster_none_ready(CLUSTER, "-", &["A@n1 unready", "B@n2 unready"], "", "", false)]
#[case::cluster_some_ready(CLUSTER, "-", &["A@n1 unready", "B@n2"], "B", "", true)]
#[case::cluster_all_draining(CLUSTER, "-", &["A@n1 draining", "B@n2 draining"], "AB", "", true)]
#[case::internal_local_external_cluster(INTERNAL_LOCAL_NODE_PORT, "-", &["A@n1", "B@n2"], "AB", "A", true)]
#[case::internal_cluster_external_local(EXTERNAL_LOCAL, "-", &["A@n1", "B@n2"], "AB", "A", true)]
#[case::both_local(BOTH_LOCAL, "-", &["A@n1", "B@n2"], "AB", "A", true)]
#[case::both_local_all_remote(BOTH_LOCAL, "-", &["A@n2", "B@n3"], "AB", "", true)]
#[case::both_local_all_remote_draining(BOTH_LOCAL, "-", &["A@n2 draining", "B@n3 draining"], "AB", "", true)]
#[case::sets_fall_back_apart(EXTERNAL_LOCAL, "-", &["A@n1 draining", "B@n1 dead", "C@n2", "D@n3 draining"], "C", "A", true)]
#[case::external_local_without_external(EXTERNAL_LOCAL_UNUSED, "-", &["A@n1", "B@n2"], "AB", "", true)]
#[case::internal_local_has_no_cluster_set(INTERNAL_LOCAL, "-", &["A@n1", "B@n2", "C@n3"], "", "A", true)]
#[case::no_endpoints(CLUSTER, "-", &[], "", "", false)]
#[case::one_that_is_dead(CLUSTER, "-", &["A@n1 dead"], "", "", false)]
#[case::draining_ignores_zones(CLUSTER, "a", &["A@n1 z=a draining", "B@n2 z=b draining"], "AB", "", true)]
fn categories(
    #[case] wanted: EndpointSets,
    #[case] zone: &str,
    #[case] endpoints: &[&str],
    #[case] cluster: &str,
    #[case] local: &str,
    #[case] has_any: bool,
) {
    let endpoints: Vec<_> = endpoints.iter().map(|text| endpoint(text)).collect();
    let merged = endpoints.iter().map(|(address, endpoint)| (*address, endpoint)).collect();
    // The conversion treats an empty label in the same way.
    let zone = Some(zone.to_owned()).filter(|zone| !zone.is_empty() && zone != "-");
    let found = usable_endpoints(&merged, &merged, wanted, false, &NodeView { zone, ..NodeView::new("n1") });
    assert_eq!(
        (&*letters(&found.cluster), &*letters(&found.local), found.has_any),
        (cluster, local, has_any)
    );

    let mut union: Vec<char> = cluster.chars().chain(local.chars()).collect();
    union.sort_unstable();
    union.dedup();
    assert_eq!(letters(&found.union()), String::from_iter(union));
}

/// Applies the same rules in another way: to one endpoint at a time, by counts.
fn naive(all: &[(BackendAddress, Endpoint)], wanted: EndpointSets, node: &NodeView) -> UsableEndpoints {
    let mut result = UsableEndpoints::default();
    let (mut cluster, mut local) = (Vec::new(), Vec::new());
    let count = |test: &dyn Fn(&Endpoint) -> bool| all.iter().filter(|(_, e)| test(e)).count();
    let ready = count(&|e| e.ready);
    let here = |e: &Endpoint| e.node == Some(Name::from(&node.name));
    let in_zone = |e: &Endpoint| node.zone.iter().any(|zone| e.zone_hints.iter().any(|hint| hint == zone));
    let for_node = |e: &Endpoint| e.node_hints.iter().any(|hint| *hint == node.name);
    let by_node =
        count(&|e| e.ready && !e.node_hints.is_empty()) == ready && count(&|e| e.ready && for_node(e)) > 0;
    let by_zone =
        count(&|e| e.ready && !e.zone_hints.is_empty()) == ready && count(&|e| e.ready && in_zone(e)) > 0;
    for (address, e) in all {
        let drains = !e.ready && e.serving && e.terminating;
        result.serving += usize::from(e.ready || e.serving);
        result.has_any |= e.ready || drains;
        let near = if by_node {
            for_node(e)
        } else if by_zone {
            in_zone(e)
        } else {
            true
        };
        // An endpoint that is ready and terminating is never selected as a draining endpoint: it is ready.
        if wanted.cluster && if ready > 0 { e.ready && near } else { drains } {
            cluster.push(*address);
        }
        let ready_here = count(&|e| e.ready && here(e));
        if wanted.local && here(e) && if ready_here > 0 { e.ready } else { drains } {
            local.push(*address);
        }
    }
    UsableEndpoints { cluster: cluster.into(), local: local.into(), ..result }
}

proptest! {
    #[test]
    fn a_naive_reading_of_the_rules_agrees(
        endpoints in prop::collection::vec(arbitrary::endpoint(crate::model::net::IpFamily::V4), 0..6),
        internal_local: bool, external_local: bool, is_external: bool,
        node in arbitrary::node(),
    ) {
        let numbered: Vec<_> = endpoints
            .into_iter()
            .zip(0..)
            .map(|(e, port)| (BackendAddress { address: Ipv4Addr::LOCALHOST.into(), port }, e))
            .collect();
        let merged = numbered.iter().map(|(address, endpoint)| (*address, endpoint)).collect();
        let wanted = EndpointSets::new(internal_local, external_local, is_external);
        prop_assert_eq!(usable_endpoints(&merged, &merged, wanted, false, &node), naive(&numbered, wanted, &node));
    }
}
