use proxy_common::node::DEVICE_NO_HEADER;
use rstest::rstest;

use crate::model::{DefaultRoute, DeviceKind, DeviceRole, HostDevice};

use super::*;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// Returns a device of that name with these addresses.
fn device(name: &str, addresses: &[&str]) -> HostDevice {
    HostDevice {
        name: name.to_owned(),
        kind: if name.starts_with("veth") { DeviceKind::Veth } else { DeviceKind::Other },
        addresses: addresses.iter().map(|address| ip(address)).collect(),
        ..HostDevice::default()
    }
}

/// Returns a host with lo, an uplink with two addresses, the veth of a pod, and a tunnel.
fn host() -> HostView {
    let tunnel = HostDevice { no_header: true, ..device("tun0", &[]) };
    HostView {
        devices: BTreeMap::from([
            (1, device("lo", &["127.0.0.1", "::1"])),
            (2, device("eth0", &["192.0.2.1", "192.0.2.7", "2001:db8::1"])),
            (3, device("veth1", &[])),
            (4, tunnel),
        ]),
        defaults: vec![
            DefaultRoute { device: 2, source: Some(ip("192.0.2.7")) },
            DefaultRoute { device: 2, source: Some(ip("2001:db8::1")) },
        ],
        local_routes: BTreeSet::new(),
        ipsec: BTreeMap::new(),
        has_policy_routes: false,
        mark_routes: BTreeSet::new(),
        masquerades: BTreeSet::new(),
        pod_sockets_stay: false,
        loopback_is_closed: false,
        leftovers: BTreeSet::new(),
        netns_cookie: 77,
        pod_cgroups: [5, 0],
        has_kube_proxy_rules: true,
        local_ports: Vec::new(),
    }
}

fn node(internal: &[&str]) -> NodeView {
    NodeView { internal_ips: internal.iter().map(|address| ip(address)).collect(), ..NodeView::new("n1") }
}

fn settings(addresses: NodePortAddresses) -> NodeSettings {
    NodeSettings { node_port_addresses: addresses, ..NodeSettings::default() }
}

fn plan(node: &NodeView, host: &HostView, settings: &NodeSettings) -> NodePlan {
    plan_node(node, host, &BTreeSet::new(), &BTreeSet::new(), settings)
}

fn all() -> NodePortAddresses {
    NodePortAddresses { all: true, ..NodePortAddresses::default() }
}

#[rstest]
#[case::internal(&["192.0.2.1"], "192.0.2.1")]
#[case::an_internal_address_that_is_elsewhere(&["203.0.113.1"], "192.0.2.7")]
#[case::not_known(&[], "192.0.2.7")]
fn packets_leave_under_the_internal_address(#[case] internal: &[&str], #[case] expected: &str) {
    let plan = plan(&node(internal), &host(), &NodeSettings::default());
    assert_eq!(plan.sources.get(&IpFamily::V4), Some(&ip(expected)));
    assert_eq!(plan.sources.get(&IpFamily::V6), Some(&ip("2001:db8::1")));
    assert_eq!((plan.host_netns, plan.settings.snat_ports), (77, proxy_common::config::SNAT_PORTS));
    assert_eq!(plan.pod_cgroups, [5, 0]);
    assert!(plan.other_proxy, "another proxy's connections");
}

/// Returns a device whose packets have the first of these addresses as source with MASQUERADE.
fn link(kind: DeviceKind, addresses: &[&str]) -> HostDevice {
    let masquerade = addresses.iter().take(1).map(|address| ip(address)).collect();
    HostDevice { kind, masquerade, ..device("link", addresses) }
}

#[test]
fn an_uplink_without_the_internal_address_has_a_source_of_its_own() {
    let mut host = host();
    host.devices.insert(5, link(DeviceKind::Physical, &["10.1.0.1", "10.1.0.2"]));
    host.devices.insert(6, link(DeviceKind::Tunnel, &["2001:db8:1::1"]));
    host.devices.insert(7, link(DeviceKind::Bridge, &["10.244.0.1"]));
    host.devices.insert(8, link(DeviceKind::Physical, &["10.1.1.1", "192.0.2.1"]));
    let plan = plan(&node(&["192.0.2.1"]), &host, &NodeSettings::default());
    let expected =
        [(IpFamily::V4, vec![(5, ip("10.1.0.1"))]), (IpFamily::V6, vec![(6, ip("2001:db8:1::1"))])];
    assert_eq!(plan.device_sources, BTreeMap::from(expected));
    assert_eq!(plan.problems, []);
}

#[test]
fn addresses_of_uplinks_that_are_down_are_known() {
    let mut host = host();
    let is_down = true;
    host.devices.insert(
        5,
        HostDevice { is_down, ..link(DeviceKind::Physical, &["10.1.0.1", "10.1.1.1", "fd01::1"]) },
    );
    host.devices.insert(6, link(DeviceKind::Physical, &["10.1.1.1"]));
    host.devices.insert(7, HostDevice { is_down, ..link(DeviceKind::Bridge, &["172.17.0.1"]) });
    let plan = plan(&node(&["192.0.2.1"]), &host, &NodeSettings::default());
    assert_eq!(plan.down, ["10.1.0.1", "fd01::1"].map(ip).into());
}

#[test]
fn node_without_a_network_has_the_address_of_any_device() {
    let mut host = host();
    host.defaults.clear();
    host.devices.insert(1, link(DeviceKind::Other, &["127.0.0.1"]));
    host.devices.insert(7, link(DeviceKind::Bridge, &["10.244.0.1"]));
    host.devices.insert(8, link(DeviceKind::Bridge, &["fd44::1"]));
    host.devices.remove(&2);
    let plan = plan(&node(&["192.0.2.1"]), &host, &NodeSettings::default());
    let expected = [(IpFamily::V4, ip("10.244.0.1")), (IpFamily::V6, ip("fd44::1"))];
    assert_eq!(plan.sources, BTreeMap::from(expected));
}

#[test]
fn more_uplinks_than_have_room_are_a_problem() {
    let mut host = host();
    for number in 0..=DEVICE_SOURCES as u8 {
        host.devices
            .insert(10 + u32::from(number), link(DeviceKind::Physical, &[&format!("10.1.{number}.1")]));
    }
    let plan = plan(&node(&["192.0.2.1"]), &host, &NodeSettings::default());
    assert_eq!(plan.device_sources[&IpFamily::V4].len(), DEVICE_SOURCES);
    let [problem] = &plan.problems[..] else { panic!("{:?}", plan.problems) };
    assert!(problem.message.starts_with("9 uplinks have IPv4 addresses"), "{}", problem.message);
}

#[test]
fn masquerading_needs_the_setting_and_the_rule() {
    for (wanted, works) in [(false, false), (false, true), (true, false), (true, true)] {
        let settings = NodeSettings { masquerade_mark: u32::from(wanted) << 14, ..NodeSettings::default() };
        let host = HostView {
            masquerades: FAMILIES.into_iter().filter(|_| works).collect(),
            has_policy_routes: works,
            ..host()
        };
        let plan = plan(&node(&["192.0.2.1"]), &host, &settings);
        assert_eq!(plan.settings.masquerade_mark, u32::from(wanted && works) << 14);
        assert_eq!(plan.policy_routes, works);
        let fields: Vec<_> = plan.problems.iter().map(|problem| &problem.field[..]).collect();
        assert_eq!(fields, if wanted && !works { vec!["--masquerade-external"; 2] } else { vec![] });
    }
}

#[test]
fn mark_with_routes_sends_snat_by_the_stack() {
    let host = HostView { mark_routes: BTreeSet::from([IpFamily::V4]), ..host() };
    let plan = plan(&node(&["192.0.2.1", "2001:db8::1"]), &host, &NodeSettings::default());
    assert_eq!((plan.routes_by_mark, plan.ipsec), (host.mark_routes, BTreeMap::new()));
}

#[test]
fn missing_rule_is_a_problem_of_its_family() {
    let settings = NodeSettings { masquerade_mark: 1 << 14, ..NodeSettings::default() };
    let host = HostView { masquerades: BTreeSet::from([IpFamily::V4]), ..host() };
    let plan = plan(&node(&["192.0.2.1", "2001:db8::1"]), &host, &settings);
    let [problem] = &plan.problems[..] else { panic!("{:?}", plan.problems) };
    assert!(problem.message.contains("for IPv6"), "{}", problem.message);
    assert_eq!(plan.settings.masquerade_mark, 1 << 14);
}

#[test]
fn the_operator_may_name_the_address() {
    let with = |address| {
        let settings = NodeSettings { address: Some(ip(address)), ..NodeSettings::default() };
        plan(&node(&["192.0.2.1"]), &host(), &settings).sources[&IpFamily::V4]
    };
    assert_eq!(with("192.0.2.7"), ip("192.0.2.7"));
    assert_eq!(with("203.0.113.9"), ip("192.0.2.1"), "which this machine does not have");
}

/// Returns the addresses on which node ports answer, loopback ones in brackets.
fn answering(node: &NodeView, addresses: NodePortAddresses) -> Vec<String> {
    let plan = plan(node, &host(), &settings(addresses));
    let answering = plan.addresses.iter().filter(|(_, facts)| facts.node_ports);
    let text =
        |address: &IpAddr, loopback| if loopback { format!("[{address}]") } else { address.to_string() };
    answering.map(|(address, facts)| text(address, facts.loopback)).collect()
}

#[test]
fn node_ports_answer_where_the_setting_says() {
    let n = node(&["192.0.2.1", "2001:db8::1"]);
    assert_eq!(answering(&n, all()), ["192.0.2.1", "192.0.2.7", "2001:db8::1"]);
    let primary = NodePortAddresses { primary: true, ..NodePortAddresses::default() };
    assert_eq!(answering(&n, primary.clone()), ["192.0.2.1", "2001:db8::1"]);
    assert_eq!(answering(&node(&[]), primary.clone()), ["192.0.2.7", "2001:db8::1"], "until it is known");
    let several = node(&["192.0.2.7", "192.0.2.1", "2001:db8::1"]);
    assert_eq!(
        answering(&several, primary.clone()),
        ["192.0.2.7", "2001:db8::1"],
        "the first of each family"
    );
    let elsewhere = node(&["198.51.100.1", "192.0.2.1"]);
    assert_eq!(answering(&elsewhere, primary.clone()), ["2001:db8::1"], "the host does not have the first");
    let bound = NodeSettings { address: "192.0.2.1".parse().ok(), ..settings(primary.clone()) };
    let plan = plan(&several, &host(), &bound);
    let answering_at = |plan: &NodePlan| -> Vec<_> {
        plan.addresses.iter().filter(|(_, facts)| facts.node_ports).map(|(at, _)| at.to_string()).collect()
    };
    assert_eq!(answering_at(&plan), ["192.0.2.1", "2001:db8::1"], "--bind-address");
    let localhost = NodePortAddresses { localhost: true, ..primary };
    assert_eq!(answering(&n, localhost), ["[127.0.0.1]", "192.0.2.1", "[::1]", "2001:db8::1"]);
    let ranges = |texts: &[&str]| NodePortAddresses { ranges: nets(texts), ..NodePortAddresses::default() };
    let v4 = ["192.0.2.4/30", "10.0.0.0/8"];
    assert_eq!(answering(&n, ranges(&[&v4[..], &["fd00::/8"]].concat())), ["192.0.2.7"]);
    // Ranges of one family do not restrict the other family.
    assert_eq!(answering(&n, ranges(&v4)), ["192.0.2.7", "2001:db8::1"]);
    assert_eq!(answering(&n, ranges(&["2001:db8::/64"])), ["192.0.2.1", "192.0.2.7", "2001:db8::1"]);
    assert_eq!(answering(&n, NodePortAddresses { primary: true, ..ranges(&v4) }).len(), 3);
    let zero = ranges(&["0.0.0.0/0", "192.0.2.4/30", "::/0"]);
    assert_eq!(answering(&n, zero), answering(&n, all()), "loopback is not meant");
    assert_eq!(answering(&n, ranges(&["127.0.0.0/8", "fd00::/8"])), ["[127.0.0.1]"]);
    let loopback = NodePortAddresses { localhost: true, ..ranges(&["192.0.2.4/30"]) };
    assert_eq!(
        answering(&n, loopback),
        ["[127.0.0.1]", "192.0.2.7", "[::1]"],
        "localhost is of both families"
    );
}

#[test]
fn node_ports_answer_at_the_few_addresses_of_local_routes() {
    let with = |routes: &[&str], addresses| {
        let host = HostView { local_routes: nets(routes).into_iter().collect(), ..host() };
        let plan = plan(&node(&["192.0.2.1"]), &host, &settings(addresses));
        let answering: Vec<_> = plan
            .addresses
            .iter()
            .filter(|(_, facts)| facts.node_ports)
            .map(|(at, _)| at.to_string())
            .collect();
        let own = plan.addresses.len();
        (
            answering,
            own,
            plan.listen,
            plan.problems.iter().filter(|one| one.message.contains("route")).count(),
        )
    };
    let few = ["10.7.0.0/30", "2001:db8:7::1/128"];
    let (answering, own, listen, problems) = with(&few, all());
    assert_eq!(answering[..4], ["10.7.0.0", "10.7.0.1", "10.7.0.2", "10.7.0.3"]);
    assert_eq!((answering.len(), own, listen.len(), problems), (8, 10, 2, 0));
    let one =
        NodePortAddresses { ranges: nets(&["10.7.0.2/32", "fd00::/8"]), ..NodePortAddresses::default() };
    let (answering, _, listen, _) = with(&few, one);
    assert_eq!((answering, listen.len()), (vec!["10.7.0.2".to_owned()], 0), "health checks need a device");
    let (answering, own, _, problems) = with(&["10.8.0.0/16", "2001:db8:8::/64", "10.7.0.7/32"], all());
    assert_eq!((answering.len(), own, problems), (4, 6, 2), "{answering:?}");
}

#[test]
fn the_primary_address_of_a_family_that_the_cluster_does_not_tell_is_the_one_in_use() {
    let primary = NodePortAddresses { primary: true, ..NodePortAddresses::default() };
    assert_eq!(answering(&node(&["192.0.2.7"]), primary), ["192.0.2.7", "2001:db8::1"]);
}

#[test]
fn external_ip_is_primary_without_internal_ip() {
    let mut host = host();
    let device =
        host.devices.values_mut().find(|device| device.addresses.contains(&ip("2001:db8::1"))).unwrap();
    device.addresses.insert(ip("2001:db8::7"));
    let external =
        NodeView { external_ips: vec![ip("2001:db8::7"), ip("192.0.2.1")], ..node(&["192.0.2.7"]) };
    let primary = NodePortAddresses { primary: true, ..NodePortAddresses::default() };
    let plan = plan(&external, &host, &settings(primary));
    let answering: Vec<_> =
        plan.addresses.iter().filter(|(_, facts)| facts.node_ports).map(|(at, _)| *at).collect();
    assert_eq!(answering, ["192.0.2.7", "2001:db8::7"].map(ip));
    assert_eq!(plan.sources[&IpFamily::V6], ip("2001:db8::7"));
}

#[test]
fn encapsulated_packets_leave_under_this_nodes_address_of_the_others_family() {
    let mut plan = plan(&node(&["192.0.2.1"]), &host(), &NodeSettings::default());
    assert!(!plan.dsr);
    let (own, others) = ([ip("192.0.2.1")], ["192.0.2.9", "2001:db8::9"].map(ip));
    plan.set_tunnels(&own, Some(others.iter()));
    let expected = ["192.0.2.1", "192.0.2.9"].map(|address| (ip(address), own[0]));
    assert_eq!(
        (plan.dsr, plan.tunnels.clone()),
        (true, Some(BTreeMap::from(expected))),
        "no IPv6 of its own"
    );
    plan.set_tunnels(&own, None::<std::slice::Iter<'_, IpAddr>>);
    assert_eq!((plan.dsr, plan.tunnels), (true, None), "nodes are not listed yet");
}

#[test]
fn every_address_of_the_node_is_planned() {
    let primary = NodePortAddresses { primary: true, ..NodePortAddresses::default() };
    let plan = plan(&node(&["192.0.2.1"]), &host(), &settings(primary));
    let all = ["127.0.0.1", "192.0.2.1", "192.0.2.7", "::1", "2001:db8::1"].map(ip);
    assert!(plan.addresses.keys().eq(&all), "{:?}", plan.addresses);
    assert_eq!(plan.addresses[&ip("::1")], AddressFacts { node_ports: false, loopback: true });
}

#[test]
fn more_addresses_than_fit_are_reported_and_those_of_node_ports_come_first() {
    let mut host = host();
    let many = (0..5_000u32).map(|low| IpAddr::V4((0x0a00_0000 + low).into())).collect();
    host.devices.insert(9, HostDevice { addresses: many, ..device("dummy0", &[]) });
    let primary = NodePortAddresses { primary: true, ..NodePortAddresses::default() };
    let found = plan(&node(&["192.0.2.1"]), &host, &settings(primary));
    let v4 = found.addresses.keys().filter(|address| address.is_ipv4()).count();
    assert_eq!(v4, OWN_ADDR_COUNT as usize);
    assert!(found.addresses[&ip("192.0.2.1")].node_ports && found.addresses.contains_key(&ip("::1")));
    assert_eq!(found.problems.len(), 1, "{:?}", found.problems);
    assert!(found.problems[0].message.contains("5003 IPv4 addresses"), "{}", found.problems[0]);
    let last = IpAddr::V4((0x0a00_0000 + 4_999).into());
    let found = plan(&node(&[&last.to_string()]), &host, &settings(all()));
    assert!(found.addresses.contains_key(&last), "the internal address comes before others that answer");
}

#[test]
fn health_checks_answer_where_node_ports_do() {
    let n = node(&["192.0.2.1"]);
    let everywhere = plan(&n, &host(), &settings(all())).listen;
    assert_eq!(everywhere, BTreeSet::from([ip("0.0.0.0"), ip("::")]));
    let ranges = |texts: &[&str]| NodePortAddresses { ranges: nets(texts), ..NodePortAddresses::default() };
    let listen = |texts: &[&str]| plan(&n, &host(), &settings(ranges(texts))).listen;
    assert_eq!(
        listen(&["127.0.0.0/8", "2001:db8::/32"]),
        BTreeSet::from(["127.0.0.1", "2001:db8::1"].map(ip))
    );
    assert_eq!(listen(&["127.0.0.0/8"]), BTreeSet::from(["127.0.0.1", "::"].map(ip)));
    assert_eq!(listen(&["0.0.0.0/0", "::/0"]), everywhere);
}

/// Returns the uplinks, and the devices without a link-layer header.
fn outside(host: &HostView, detect_local: DetectLocal) -> (Vec<u32>, Vec<u32>) {
    let settings = NodeSettings { detect_local, ..NodeSettings::default() };
    let devices = plan(&node(&["192.0.2.1"]), host, &settings).devices;
    let with = |bit| devices.iter().filter(|(_, bits)| **bits & bit != 0).map(|(index, _)| *index).collect();
    (with(DEVICE_UPLINK), with(DEVICE_NO_HEADER))
}

#[test]
fn clients_outside_come_by_the_devices_that_lead_there() {
    assert_eq!(outside(&host(), DetectLocal::Devices), (vec![2], vec![4]));
    let mut host = host();
    host.devices.get_mut(&3).unwrap().role = DeviceRole::Uplink;
    assert_eq!(outside(&host, DetectLocal::Devices).0, [2, 3], "as the operator says");
    host.devices.get_mut(&3).unwrap().role = DeviceRole::Guessed;
    host.defaults.clear();
    assert_eq!(outside(&host, DetectLocal::Devices).0, [2], "it has an internal address");
}

#[test]
fn device_below_an_uplink_is_an_uplink() {
    let mut host = host();
    // eth0 is a VLAN of eth1, and the bridge br0 has an internal address and two ports: eth2 and a pod.
    host.devices.get_mut(&2).unwrap().parent = Some(5);
    host.devices.insert(5, device("eth1", &[]));
    host.devices.insert(6, device("br0", &["192.0.2.1"]));
    host.devices.insert(7, HostDevice { master: Some(6), ..device("eth2", &[]) });
    host.devices.insert(8, HostDevice { master: Some(6), ..device("veth2", &[]) });
    assert_eq!(outside(&host, DetectLocal::Devices).0, [2, 5, 6, 7]);
}

#[test]
fn the_operator_may_say_how_pods_are_known() {
    let mut host = host();
    host.devices.insert(6, device("cni0", &[]));
    host.devices.insert(8, HostDevice { master: Some(6), ..device("veth2", &[]) });
    assert_eq!(outside(&host, DetectLocal::Bridge("cni0".into())).0, [1, 2, 3, 4]);
    assert_eq!(outside(&host, DetectLocal::InterfaceNamePrefix("veth".into())).0, [1, 2, 4, 6]);
    let cluster = DetectLocal::ClusterCidr(nets(&["10.244.0.0/16", "10.0.0.0/8", "fd00::/56"]));
    assert_eq!(
        outside(&host, cluster.clone()).0,
        [2],
        "pods of other nodes are inside, and come by an uplink"
    );
    let n = NodeView { pod_cidrs: nets(&["10.244.1.0/24"]), ..node(&[]) };
    let with = |detect_local| plan(&n, &host, &NodeSettings { detect_local, ..NodeSettings::default() });
    assert_eq!(with(cluster).pods.into_values().collect::<Vec<_>>(), nets(&["10.244.0.0/16", "fd00::/56"]));
    let own = with(DetectLocal::NodeCidr);
    assert_eq!(own.pods.into_values().collect::<Vec<_>>(), nets(&["10.244.1.0/24"]));
    assert!(own.detect_local && own.problems.is_empty(), "by address alone");
    for by_device in [DetectLocal::Devices, DetectLocal::Bridge("cni0".into())] {
        assert!(!with(by_device).detect_local);
    }
    let settings = NodeSettings { detect_local: DetectLocal::NodeCidr, ..NodeSettings::default() };
    assert_eq!(plan(&node(&[]), &host, &settings).problems[0].field, "spec.podCIDRs");
}

#[test]
fn ranges_of_services_are_those_of_cluster_and_operator() {
    let ranges: BTreeSet<IpNet> =
        nets(&["10.96.0.0/16", "10.96.3.0/24", "fd00:96::/112"]).into_iter().collect();
    let settings = NodeSettings { service_cidrs: nets(&["172.30.0.0/16"]), ..NodeSettings::default() };
    let plan = plan_node(&node(&[]), &host(), &ranges, &BTreeSet::new(), &settings);
    assert_eq!(plan.service_cidrs[&IpFamily::V4], nets(&["10.96.0.0/16", "172.30.0.0/16"]));
    assert_eq!(plan.service_cidrs[&IpFamily::V6], nets(&["fd00:96::/112"]));
    assert!(plan.problems.is_empty());
}

#[test]
fn ranges_are_left_out_if_unallocated_addresses_pass() {
    let ranges: BTreeSet<IpNet> = nets(&["10.96.0.0/16", "fd00:96::/112"]).into_iter().collect();
    let settings = NodeSettings {
        service_cidrs: nets(&["172.30.0.0/16"]),
        unallocated: UnallocatedAddresses::Pass,
        ..NodeSettings::default()
    };
    let plan = plan_node(&node(&["10.96.0.7"]), &host(), &ranges, &BTreeSet::new(), &settings);
    assert!(plan.service_cidrs.values().all(Vec::is_empty), "{:?}", plan.service_cidrs);
    assert!(plan.problems.is_empty(), "an overlap does not matter: {:?}", plan.problems);
}

#[test]
fn more_ranges_than_are_looked_at_are_reported() {
    for (count, problems) in [(SERVICE_CIDRS as u8, 0), (SERVICE_CIDRS as u8 + 1, 1)] {
        let ranges = (0..count).map(|i| IpNet::new(Ipv4Addr::new(10, i, 0, 0).into(), 24).unwrap()).collect();
        let plan = plan_node(&node(&[]), &host(), &ranges, &BTreeSet::new(), &NodeSettings::default());
        assert_eq!(plan.service_cidrs[&IpFamily::V4].len(), SERVICE_CIDRS);
        assert_eq!(plan.problems.len(), problems, "{count}");
    }
}

#[rstest]
#[case::an_address_of_the_node("192.0.2.0/28", 2)]
#[case::pods_of_the_node("10.244.0.0/12", 1)]
#[case::a_part_of_them("10.244.1.128/25", 1)]
#[case::nothing("10.96.0.0/12", 0)]
#[case::neighbours("198.51.0.0/16", 1)]
#[case::a_part_of_the_neighbours("198.51.100.128/25", 1)]
#[case::a_subnet_of_a_dummy_device("203.0.113.0/24", 0)]
fn service_range_with_addresses_of_others_is_reported_and_not_enforced(
    #[case] range: &str,
    #[case] problems: usize,
) {
    let n = NodeView { pod_cidrs: nets(&["10.244.1.0/24"]), ..node(&[]) };
    let mut host = host();
    let subnets = nets(&["198.51.100.7/24"]).into_iter().collect();
    host.devices.insert(8, HostDevice { subnets, ..device("eth1", &[]) });
    let subnets = nets(&["203.0.113.1/24"]).into_iter().collect();
    host.devices.insert(9, HostDevice { subnets, kind: DeviceKind::Dummy, ..device("dummy1", &[]) });
    let ranges = nets(&[range]).into_iter().collect();
    let plan = plan_node(&n, &host, &ranges, &BTreeSet::new(), &NodeSettings::default());
    assert_eq!(plan.problems.len(), problems, "{:?}", plan.problems);
    assert_eq!(plan.service_cidrs.len(), usize::from(problems == 0));
}

#[test]
fn an_own_address_that_is_a_services_is_no_problem_of_the_range() {
    let mut host = host();
    host.devices.insert(9, device("nodelocaldns", &["10.96.0.10", "10.96.0.11"]));
    let problems = |left_alone: &[&str]| {
        let left_alone = left_alone.iter().map(|text| ip(text)).collect();
        let ranges = nets(&["10.96.0.0/12"]).into_iter().collect();
        plan_node(&node(&[]), &host, &ranges, &left_alone, &NodeSettings::default()).problems
    };
    assert_eq!(problems(&["10.96.0.10", "10.96.0.11"]), []);
    assert_eq!(problems(&["10.96.0.10"]).len(), 1, "the other one is no Service's");
}

#[test]
fn a_device_that_another_proxy_has_left_is_reported() {
    let leftovers = ["kube-dummy-if", "kube-ipvs0"].map(str::to_owned).into();
    let host = HostView { leftovers, ..host() };
    let plan = plan_node(&node(&[]), &host, &BTreeSet::new(), &BTreeSet::new(), &NodeSettings::default());
    let [problem] = plan.problems.as_slice() else { panic!("{:?}", plan.problems) };
    assert_eq!(problem.field, "device kube-dummy-if", "kube-proxy's own device is reported with its rules");
    assert!(problem.message.contains("`ip link delete kube-dummy-if`"), "{problem}");
}

#[test]
fn uplink_with_an_unknown_header_is_a_problem_and_other_devices_are_none() {
    let mut host = host();
    let infiniband =
        |addresses: &[&str]| HostDevice { unknown_header: true, ..link(DeviceKind::Physical, addresses) };
    host.devices.insert(8, infiniband(&["198.51.100.1"]));
    host.devices.insert(9, infiniband(&[]));
    let plan = plan(&node(&[]), &host, &NodeSettings::default());
    assert_eq!(plan.problems.len(), 1, "{:?}", plan.problems);
    assert_eq!(plan.problems[0].field, "device link");
}
