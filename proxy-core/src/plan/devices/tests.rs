use rstest::rstest;

use crate::model::DefaultRoute;

use super::*;

/// Returns a device of this kind with these addresses; all addresses whose prefix is not of full length are in subnets.
fn device(name: &str, kind: DeviceKind, addresses: &[&str]) -> HostDevice {
    let nets: Vec<IpNet> = addresses.iter().map(|text| text.parse().unwrap()).collect();
    HostDevice {
        name: name.to_owned(),
        kind,
        addresses: nets.iter().map(IpNet::addr).collect(),
        subnets: nets.into_iter().filter(|net| net.prefix_len() < net.max_prefix_len()).collect(),
        ..HostDevice::default()
    }
}

/// Returns a host with lo, eth0 with the default route, and these devices from index 10 on.
fn host(devices: impl IntoIterator<Item = HostDevice>) -> HostView {
    let first = [
        (1, device("lo", DeviceKind::Loopback, &["127.0.0.1/8"])),
        (2, device("eth0", DeviceKind::Physical, &["192.0.2.1/24"])),
    ];
    HostView {
        devices: first.into_iter().chain((10..).zip(devices)).collect(),
        defaults: vec![DefaultRoute { device: 2, source: None }],
        ..HostView::default()
    }
}

/// Returns a node whose pods are in 10.244.1.0/24 and `fd00:10:244:1::/64`.
fn node() -> NodeView {
    let pod_cidrs = ["10.244.1.0/24", "fd00:10:244:1::/64"].map(|range| range.parse().unwrap()).into();
    NodeView { pod_cidrs, ..NodeView::new("n1") }
}

fn uplinks(host: &HostView, node: &NodeView, detect: &DetectLocal) -> Vec<u32> {
    let facts = devices(node, host, detect);
    facts.into_iter().filter(|(_, bits)| bits & DEVICE_UPLINK != 0).map(|(index, _)| index).collect()
}

#[rstest]
#[case::second_nic(DeviceKind::Physical, &[], true)]
#[case::second_nic_with_an_address(DeviceKind::Physical, &["198.51.100.1/24"], true)]
#[case::bond(DeviceKind::Bond, &[], true)]
#[case::flannel_vxlan(DeviceKind::Tunnel, &["10.244.1.0/32"], true)]
#[case::wireguard(DeviceKind::Tunnel, &["10.7.0.1/24"], true)]
#[case::cni0_or_docker0(DeviceKind::Bridge, &["172.17.0.1/16"], false)]
#[case::openvpn_or_routed_virtual_machine(DeviceKind::Tun, &["198.51.100.1/24"], true)]
#[case::tailscale(DeviceKind::Tun, &["100.64.0.1/32"], true)]
#[case::virtual_machine(DeviceKind::Tun, &[], false)]
#[case::pod_behind_a_tap(DeviceKind::Tun, &["10.244.1.1/32", "fd00:10:244:1::1/128"], false)]
#[case::node_local_dns(DeviceKind::Dummy, &["10.96.0.10/32"], false)]
#[case::calico_or_cilium(DeviceKind::Veth, &[], false)]
#[case::kindnet_or_ptp(DeviceKind::Veth, &["10.244.1.1/32", "fd00:10:244:1::1/128"], false)]
#[case::pod_range_on_a_veth(DeviceKind::Veth, &["10.244.1.1/24"], false)]
#[case::pod_range_on_a_veth_v6(DeviceKind::Veth, &["fd00:10:244:1::1/64"], false)]
#[case::second_nic_of_a_container(DeviceKind::Veth, &["198.51.100.1/24"], true)]
#[case::second_nic_of_a_container_v6(DeviceKind::Veth, &["2001:db8:9::1/64"], true)]
#[case::one_of_two_addresses(DeviceKind::Veth, &["10.244.1.1/24", "198.51.100.1/24"], true)]
#[case::open_vswitch_of_the_pods(DeviceKind::Other, &["10.244.1.1/24"], false)]
#[case::open_vswitch_network(DeviceKind::Other, &["198.51.100.1/24"], true)]
fn device_is_an_uplink_or_local_by_its_kind_and_addresses(
    #[case] kind: DeviceKind,
    #[case] addresses: &[&str],
    #[case] is_uplink: bool,
    #[values(DetectLocal::Devices, DetectLocal::NodeCidr, DetectLocal::ClusterCidr(Vec::new()))]
    detect: DetectLocal,
) {
    let found = uplinks(&host([device("x0", kind, addresses)]), &node(), &detect);
    assert_eq!(found, if is_uplink { vec![2, 10] } else { vec![2] });
}

#[test]
fn veth_with_both_ends_on_node_is_uplink() {
    let veth = |name, addresses: &[&str]| HostDevice {
        both_ends: true,
        ..device(name, DeviceKind::Veth, addresses)
    };
    let addresses = ["10.244.1.73/32", "fd00:10:244:1::4d46/128"];
    let all = host([veth("cilium_host", &addresses), veth("cilium_net", &[])]);
    assert_eq!(uplinks(&all, &node(), &DetectLocal::Devices), [2, 10]);
    let port = HostDevice { master: Some(10), ..veth("veth1", &addresses) };
    let all = host([device("br1", DeviceKind::Bridge, &[]), port]);
    assert_eq!(uplinks(&all, &node(), &DetectLocal::Devices), [2], "between two bridges");
}

#[test]
fn a_port_of_a_bridge_is_what_its_kind_is() {
    let port = |name, kind| HostDevice { master: Some(10), ..device(name, kind, &[]) };
    let all = host([
        device("br1", DeviceKind::Bridge, &["198.51.100.1/24"]),
        port("veth1", DeviceKind::Veth),
        port("vnet1", DeviceKind::Tun),
        port("eth1", DeviceKind::Physical),
        HostDevice { master: Some(10), ..device("veth2", DeviceKind::Veth, &["198.51.100.7/24"]) },
    ]);
    assert_eq!(uplinks(&all, &node(), &DetectLocal::Devices), [2, 13], "the pods of a second bridge");
    let internal = NodeView { internal_ips: vec!["198.51.100.1".parse().unwrap()], ..node() };
    assert_eq!(uplinks(&all, &internal, &DetectLocal::Devices), [2, 10, 13], "the node's own bridge");
}

#[test]
fn veth_port_without_a_nic_is_an_uplink() {
    let port = |name, kind| HostDevice { master: Some(10), ..device(name, kind, &[]) };
    let all = host([
        device("br0", DeviceKind::Bridge, &["198.51.100.1/24"]),
        port("eth1", DeviceKind::Veth),
        port("vnet1", DeviceKind::Tun),
        HostDevice { both_ends: true, ..port("veth1", DeviceKind::Veth) },
    ]);
    let internal = NodeView { internal_ips: vec!["198.51.100.1".parse().unwrap()], ..node() };
    assert_eq!(uplinks(&all, &internal, &DetectLocal::Devices), [2, 10, 11]);
    assert_eq!(uplinks(&all, &node(), &DetectLocal::Devices), [2], "a bridge of pods");
}

#[test]
fn ports_of_a_bridge_with_a_nic_are_on_the_lan() {
    let port = |name, kind| HostDevice { master: Some(10), ..device(name, kind, &[]) };
    let ports = |nic| {
        let all = host([
            HostDevice { mac: 7, ..device("vm-br", DeviceKind::Bridge, &[]) },
            port("vm-bo", nic),
            port("vnet1", DeviceKind::Tun),
            port("veth1", DeviceKind::Veth),
        ]);
        let found = devices(&node(), &all, &DetectLocal::Devices);
        [12, 13].map(|index| found.get(&index).copied().unwrap_or(0))
    };
    assert_eq!(ports(DeviceKind::Bond), [DEVICE_LAN_PORT | 7; 2]);
    assert_eq!(ports(DeviceKind::Tun).map(|device| device & DEVICE_LAN_PORT), [0; 2]);
}

#[test]
fn frames_of_a_bridges_ports_are_received_at_its_address() {
    let with = |mac, device| HostDevice { mac, ..device };
    let port = |mac, name, kind| with(mac, HostDevice { master: Some(10), ..device(name, kind, &[]) });
    let all = host([
        with(1, device("br1", DeviceKind::Bridge, &["198.51.100.1/24"])),
        port(2, "eth1", DeviceKind::Physical),
        port(3, "vnet1", DeviceKind::Tun),
        with(4, device("eth2", DeviceKind::Physical, &[])),
        with(5, device("cni0", DeviceKind::Bridge, &["10.244.1.1/24"])),
        HostDevice { master: Some(14), ..device("veth1", DeviceKind::Veth, &[]) },
    ]);
    let internal = NodeView { internal_ips: vec!["198.51.100.1".parse().unwrap()], ..node() };
    let found = devices(&internal, &all, &DetectLocal::Devices);
    let is = |bits: &Device, bit| bits & bit != 0;
    let found: Vec<_> = found
        .iter()
        .map(|(index, bits)| {
            (
                *index,
                is(bits, DEVICE_UPLINK),
                is(bits, DEVICE_LAN_PORT),
                bits & proxy_common::node::DEVICE_MAC,
            )
        })
        .collect();
    let expected = [(2, true, false, 0), (10, true, false, 1), (11, true, false, 1), (12, false, true, 1)];
    assert_eq!(found[..4], expected);
    let rest = [(13, true, false, 4), (15, false, false, 0)];
    assert_eq!(found[4..], rest, "a pod's bridge receives frames for any address");
}

#[test]
fn a_veth_of_the_bridge_that_the_operator_names_is_a_pods_whatever_its_address() {
    let port = |name, kind| HostDevice { master: Some(10), ..device(name, kind, &["198.51.100.1/24"]) };
    let all = host([
        device("br1", DeviceKind::Bridge, &[]),
        port("veth1", DeviceKind::Veth),
        port("eth1", DeviceKind::Physical),
    ]);
    let internal = NodeView { internal_ips: vec!["198.51.100.1".parse().unwrap()], ..node() };
    let found = uplinks(&all, &internal, &DetectLocal::Bridge("br1".into()));
    assert!(!found.contains(&11) && found.contains(&12), "{found:?}");
}

#[test]
fn the_nodes_own_range_comes_before_that_of_all_pods_in_each_family() {
    let all = host([
        device("veth1", DeviceKind::Veth, &["10.244.9.1/24"]),
        device("veth2", DeviceKind::Veth, &["fd00:10:244:9::1/64"]),
    ]);
    let node = NodeView { pod_cidrs: vec!["10.244.1.0/24".parse().unwrap()], ..NodeView::new("n1") };
    let detect = DetectLocal::ClusterCidr(
        ["10.244.0.0/16", "fd00:10:244::/48"].map(|range| range.parse().unwrap()).into(),
    );
    assert_eq!(uplinks(&all, &node, &detect), [2, 10], "the cluster tells no IPv6 range of this node");
}

#[test]
fn device_on_top_of_an_uplink_is_an_uplink() {
    let on = |parent, name| HostDevice { parent: Some(parent), ..device(name, DeviceKind::Stacked, &[]) };
    let all = host([
        on(2, "eth0.7"),
        on(10, "eth0.7.9"),
        device("br1", DeviceKind::Bridge, &[]),
        on(12, "br1.5"),
        HostDevice { parent: Some(12), ..device("br1.6", DeviceKind::Stacked, &["10.244.1.1/24"]) },
    ]);
    assert_eq!(
        uplinks(&all, &node(), &DetectLocal::Devices),
        [2, 10, 11],
        "not what lies on a bridge of pods"
    );
}

#[test]
fn device_role_of_the_operator_overrides_detection() {
    let say = |role, device| HostDevice { role, ..device };
    let nic = || device("eth1", DeviceKind::Physical, &[]);
    let veth = || device("veth1", DeviceKind::Veth, &["198.51.100.1/24"]);
    let tun = || device("tailscale0", DeviceKind::Tun, &["100.64.0.1/32"]);
    let (up, local) = (DeviceRole::Uplink, DeviceRole::Local);
    let all = host([say(local, nic()), say(local, veth()), say(up, tun())]);
    let modes = [
        DetectLocal::Devices,
        DetectLocal::NodeCidr,
        DetectLocal::InterfaceNamePrefix("tail".into()),
        DetectLocal::Bridge("x".into()),
    ];
    for detect in modes {
        let found = uplinks(&all, &node(), &detect);
        assert!(!found.contains(&10) && !found.contains(&11) && found.contains(&12), "{detect:?}: {found:?}");
    }
    let mut local_default = host([]);
    local_default.devices.entry(2).and_modify(|device| device.role = local);
    assert_eq!(
        uplinks(&local_default, &node(), &DetectLocal::Devices),
        [0; 0],
        "a default route is a guess, too"
    );
}

#[test]
fn the_range_of_all_pods_stands_in_where_the_nodes_is_not_known() {
    let all = host([device("veth1", DeviceKind::Veth, &["10.99.1.1/24"])]);
    let detect = |range: &str| DetectLocal::ClusterCidr(vec![range.parse().unwrap()]);
    assert_eq!(uplinks(&all, &NodeView::new("n1"), &detect("10.99.0.0/16")), [2]);
    assert_eq!(uplinks(&all, &NodeView::new("n1"), &detect("10.98.0.0/16")), [2, 10]);
    // If the node's own pod range is known, a range so wide that it contains the machines' addresses is ignored.
    assert_eq!(uplinks(&all, &node(), &detect("10.0.0.0/8")), [2, 10]);
}

#[test]
fn a_bridge_that_is_named_has_pods_behind_and_may_have_a_nic() {
    let port = |name, kind| HostDevice { master: Some(10), ..device(name, kind, &[]) };
    let all = host([
        device("cbr0", DeviceKind::Bridge, &["10.244.1.1/24"]),
        port("veth1", DeviceKind::Veth),
        port("eth1", DeviceKind::Physical),
        device("docker0", DeviceKind::Bridge, &["172.17.0.1/16"]),
    ]);
    assert_eq!(uplinks(&all, &node(), &DetectLocal::Bridge("cbr0".into())), [2, 12, 13]);
}

#[test]
fn veth_with_a_route_of_its_own_is_a_guests() {
    let port = |name, master, kind| HostDevice { master: Some(master), ..device(name, kind, &[]) };
    let guests = |devices: &HostView| {
        let found = super::devices(&node(), devices, &DetectLocal::Devices);
        found
            .iter()
            .filter(|(_, bits)| **bits & DEVICE_GUEST != 0)
            .map(|(index, _)| *index)
            .collect::<Vec<_>>()
    };
    let all = [
        device("cali1", DeviceKind::Veth, &[]),
        device("cni0", DeviceKind::Bridge, &["10.244.1.1/24"]),
        port("veth1", 11, DeviceKind::Veth),
        device("ovs-system", DeviceKind::Other, &[]),
        port("veth2", 13, DeviceKind::Veth),
        device("tap0", DeviceKind::Tun, &[]),
        device("eth1", DeviceKind::Veth, &["203.0.113.9/24"]),
    ];
    assert_eq!(guests(&host(all.clone())), [10, 12], "a switch or an uplink may have other routes");
    let between = HostDevice { both_ends: true, ..device("cilium_host", DeviceKind::Veth, &["10.0.0.1/32"]) };
    assert!(
        guests(&host([all.to_vec(), vec![between]].concat())).is_empty(),
        "all routes to pods lead there"
    );
}
