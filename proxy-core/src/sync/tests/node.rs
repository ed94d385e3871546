//! The entries that describe the node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use proxy_common::config::{CONFIG_DSR, CONFIG_SNAT_MOVED, NodeConfig, PortRange, SNAT_RANGES};
use proxy_common::map_names::TUNNEL_COUNT;
use proxy_common::service::{KIND_ADDRESS, KIND_NODE_PORT, KIND_UNMANAGED, SCOPE_INTERNAL};

use ipnet::IpNet;

use super::{Fixture, ROOMY};
use crate::model::Problem;
use crate::model::settings::{NodePortBind, NodeSettings, SocketDrop, SocketLb};
use crate::model::{ServiceName, SortedMap};
use crate::plan::{
    Access, AddressFacts, BackendFacts, Changing, Frontend, FrontendKind, FrontendPlan, NodePlan, PortPlan,
    Scope, ServicePlan, ServicePortName, Unmanaged,
};
use crate::store::{Capacity, ConfigRow, Contents, Ends, Faults, FrontendKey, NodeRow, Table};
use crate::sync::prefilter::frontend_bit;
use crate::testing::generator::{self, backend, name, port_id};
use proxy_common::Address as _;
use proxy_common::node::{Cidr, DEVICE_LAN_PORT, DEVICE_MAC, DEVICE_UPLINK};

/// Asserts that the tables hold the plan of the node; checks nothing without a plan.
#[track_caller]
pub fn check_node(contents: &Contents, plan: Option<&NodePlan>) {
    let Some(plan) = plan else { return };
    let found = &contents.node;
    let addresses: BTreeMap<_, _> = plan
        .addresses
        .iter()
        .map(|(at, facts)| (*at, u32::from(facts.node_ports) + 2 * u32::from(facts.loopback) + 4))
        .collect();
    assert_eq!(found.addresses, addresses);
    assert_eq!(found.devices, plan.devices);
    let mut uplinks: Vec<_> =
        plan.devices.iter().filter(|(_, bits)| **bits & DEVICE_UPLINK != 0).map(|(at, _)| *at).collect();
    uplinks.resize(3, 0);
    let uplinks: [u32; 3] = uplinks.try_into().unwrap();
    let range4 = plan.pod_ranges.v4.map(|range| {
        let [[addr, ..], [mask, ..]] = [range.network().octets().words(), range.netmask().octets().words()];
        Cidr { addr: [addr], mask: [mask] }
    });
    let range6 = plan
        .pod_ranges
        .v6
        .map(|range| Cidr { addr: range.network().octets().words(), mask: range.netmask().octets().words() });
    let flags = u32::from(plan.settings.masquerade_all)
        + 0x2 * u32::from(plan.detect_local)
        + 0x4 * u32::from(plan.other_proxy)
        + 0x8 * u32::from(plan.settings.socket_lb == SocketLb::HostOnly)
        + 0x10 * u32::from(plan.settings.socket_lb == SocketLb::Off)
        + 0x20 * u32::from(plan.settings.socket_drop == SocketDrop::Fail)
        + 0x80 * u32::from(plan.pod_udp_by_packets)
        + 0x200 * u32::from(!plan.ipsec.is_empty() || !plan.routes_by_mark.is_empty())
        + 0x400 * u32::from(plan.devices.values().any(|bits| bits & DEVICE_LAN_PORT != 0))
        + 0x800 * u32::from(plan.policy_routes)
        + 0x1000 * u32::from(plan.settings.masquerade_mark != 0)
        + 0x2000 * u32::from(!plan.device_sources.is_empty())
        + 0x4000 * u32::from(plan.settings.node_port_bind == NodePortBind::Refuse)
        + 0x8000 * u32::from(plan.settings.vip_echo);
    let mut expected = NodeConfig {
        flags,
        snat: plan.settings.snat_ports,
        masquerade_mark: plan.settings.masquerade_mark,
        host_netns: plan.host_netns,
        mesh_ports: plan.settings.mesh_ports.0,
        pod_cgroups: plan.pod_cgroups,
        pods4: range4.unwrap_or(Cidr::NONE),
        pods6: range6.unwrap_or(Cidr::NONE),
        dsr_sources4: Cidr::NONE,
        dsr_sources6: Cidr::NONE,
        dsr_flow_rate: plan.settings.dsr.flow_rate,
        uplinks,
        macs: uplinks.map(|index| plan.devices.get(&index).map_or(0, |bits| bits & DEVICE_MAC)),
        ..ConfigRow::default().0
    };
    plan.settings.timeouts.apply(&mut expected);
    assert_eq!(found.config, ConfigRow(expected));
    let NodeRow::V4(row) = &found.rows[&Table::Node] else { panic!("{:?}", found.rows) };
    assert_eq!(row.source.map(IpAddr::V4), plan.sources.get(&crate::model::net::IpFamily::V4).copied());
    assert_eq!(row.pods.map(Into::into), plan.pods.get(&crate::model::net::IpFamily::V4).copied());
}

fn ip(last: u8) -> IpAddr {
    Ipv4Addr::new(192, 0, 2, last).into()
}

/// Returns a node whose node ports answer on these addresses.
fn node(addresses: impl IntoIterator<Item = u8>) -> NodePlan {
    let facts = AddressFacts { node_ports: true, loopback: false };
    let addresses = addresses.into_iter().map(|last| (ip(last), facts)).collect();
    NodePlan { addresses, ..NodePlan::default() }
}

/// Returns a Service with one frontend of this kind (a node port, else 192.0.2.200:80) and these source ranges.
fn service(of: &str, kind: FrontendKind, ranges: &[&str]) -> (ServiceName, Option<ServicePlan>) {
    let (address, port) = match kind {
        FrontendKind::NodePort => (Ipv4Addr::UNSPECIFIED.into(), 30_080),
        _ => (ip(200), 80),
    };
    let id = port_id(of, "http");
    let frontend = Frontend { address, port, protocol: id.protocol, scope: Scope::Internal };
    let access = if ranges.is_empty() { Access::Unrestricted } else { Access::Ranges { node: false } };
    let plan = PortPlan {
        frontends: [(frontend, FrontendPlan { access, ..FrontendPlan::new(kind) })].into(),
        backends: [(backend(1), BackendFacts::default())].into(),
        tunnels: SortedMap::default(),
        affinity_secs: 0,
        algorithm: proxy_common::select::Algorithm::Random,
        maglev_outside: false,
        ejects: false,
        no_sockets: false,
        changing: Changing::No,
        rebalances: false,
        reset_after: None,
        source_ranges: ranges
            .iter()
            .map(|range| range.parse::<IpNet>().unwrap())
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect(),
    };
    (name(of), Some(ServicePlan { ports: [(id, plan)].into(), ..ServicePlan::default() }))
}

fn is_set(fixture: &Fixture, address: u8) -> bool {
    let key = FrontendKey { addr: ip(address), port: 30_080, proto: 6, scope: SCOPE_INTERNAL };
    let (word, mask) = frontend_bit(&key);
    fixture.contents().prefilter[word as usize] & mask != 0
}

fn apply(fixture: &mut Fixture, plan: NodePlan) -> u64 {
    fixture.reconciler.set_node(&plan);
    fixture.node = Some(plan);
    fixture.again()
}

#[test]
fn a_node_port_has_a_bit_for_each_address_of_the_node() {
    let mut fixture = Fixture::new(ROOMY);
    apply(&mut fixture, node([1]));
    fixture.change([service("a", FrontendKind::NodePort, &[])]);
    assert_eq!([1, 2].map(|last| is_set(&fixture, last)), [true, false]);
    let entry = fixture.contents().services.values().next().unwrap();
    assert_eq!((entry.kind, entry.slot_count), (KIND_NODE_PORT, 1));

    // The bit of the new address, and the address.
    assert_eq!(apply(&mut fixture, node([1, 2])), 2);
    assert_eq!([1, 2].map(|last| is_set(&fixture, last)), [true, true]);
    assert_eq!(apply(&mut fixture, node([2])), 1, "flows to the old address continue");
    assert_eq!([1, 2].map(|last| is_set(&fixture, last)), [true, true]);
    fixture.wait(Duration::from_hours(24));
    assert_eq!(fixture.again(), 1);
    assert_eq!([1, 2].map(|last| is_set(&fixture, last)), [false, true]);
    fixture.assert_right();
    let mut fixture = fixture.restarted();
    assert_eq!(fixture.tell_all(), 0);
}

fn all(address: IpAddr) -> BTreeMap<IpAddr, Ends> {
    [(address, Ends::All)].into()
}

#[test]
fn udp_flows_of_switched_off_uplink_end() {
    let mut fixture = Fixture::new(ROOMY);
    let connections = fixture.connections();
    let down = |addresses: &[IpAddr]| NodePlan { down: addresses.iter().copied().collect(), ..node([1, 2]) };
    let ended = || std::mem::take(&mut connections.state().ended);
    apply(&mut fixture, down(&[ip(1)]));
    assert_eq!(ended(), [], "it was down before");
    apply(&mut fixture, down(&[ip(1), ip(2)]));
    let udp: BTreeMap<_, _> = [(ip(2), Ends::Udp)].into();
    assert_eq!(ended(), vec![udp.clone()]);
    let mut times = Vec::new();
    while let Some(next) = fixture.reconciler.wake() {
        times.push((next - fixture.now).as_secs());
        fixture.wait(next - fixture.now);
        fixture.again();
        assert_eq!(ended(), vec![udp.clone()]);
    }
    assert_eq!(times, [1], "a program may have read the old route");
    apply(&mut fixture, down(&[]));
    apply(&mut fixture, down(&[ip(2)]));
    assert_eq!(ended(), [udp]);
    apply(&mut fixture, down(&[]));
    assert_eq!((ended(), fixture.reconciler.wake()), (Vec::new(), None), "it is up again");
}

#[test]
fn flows_end_when_the_node_has_lost_their_source_address() {
    let mut fixture = Fixture::new(ROOMY);
    let connections = fixture.connections();
    let ended = || std::mem::take(&mut connections.state().ended);
    apply(&mut fixture, node([1, 2]));
    assert_eq!(ended(), []);
    let second = node([1, 2]).addresses.into_keys().find(|at| !node([1]).addresses.contains_key(at)).unwrap();
    apply(&mut fixture, node([1]));
    assert_eq!(ended(), [all(second)]);
    assert_eq!(fixture.reconciler.wake(), Some(fixture.now + Duration::from_secs(1)));
    fixture.wait(Duration::from_secs(1));
    fixture.again();
    assert_eq!(ended(), [all(second)], "a program may have read the old source");
    assert_eq!(fixture.reconciler.wake(), None);
    // A failure is repeated, and an address that is back is not ended.
    apply(&mut fixture, node([1, 2]));
    connections.state().fails = true;
    apply(&mut fixture, node([1]));
    assert_eq!(ended().len(), 1);
    connections.state().fails = false;
    fixture.wait(Duration::from_secs(10));
    fixture.again();
    assert_eq!(ended(), [all(second)]);
    apply(&mut fixture, node([1, 2]));
    fixture.again();
    assert_eq!(ended(), []);
}

#[test]
fn flows_of_lost_source_end_until_node_is_written() {
    let mut fixture = Fixture::new(ROOMY);
    let connections = fixture.connections();
    let with_source = |last, addresses: &[u8]| NodePlan {
        sources: [(crate::model::net::IpFamily::V4, ip(last))].into(),
        ..node(addresses.iter().copied())
    };
    apply(&mut fixture, with_source(2, &[1, 2]));
    let ended = |fixture: &mut Fixture, millis| {
        fixture.wait(Duration::from_millis(millis));
        fixture.again();
        std::mem::take(&mut connections.state().ended)
    };
    // The address is removed, and the programs still have the old source.
    let first_fails = Faults { at: [0].into(), ..Faults::default() };
    fixture.faults(first_fails.clone());
    apply(&mut fixture, with_source(1, &[1]));
    fixture.faults(first_fails);
    assert_eq!(ended(&mut fixture, 900), [all(ip(2)), all(ip(2))]);
    fixture.faults(Faults::default());
    assert_eq!(ended(&mut fixture, 200), [all(ip(2))]);
    fixture.assert_right();
    assert_eq!(fixture.reconciler.wake(), Some(fixture.now + Duration::from_millis(800)));
    assert_eq!(ended(&mut fixture, 800), [all(ip(2))]);
    assert_eq!(fixture.reconciler.wake(), None);
}

#[test]
fn old_snat_ports_are_looked_up_while_a_connection_has_one() {
    let mut fixture = Fixture::new(ROOMY);
    let connections = fixture.connections();
    let ranges = |first| {
        let snat_ports = [PortRange::new(first, 29_999); SNAT_RANGES];
        NodePlan { settings: NodeSettings { snat_ports, ..NodeSettings::default() }, ..node([1]) }
    };
    let is_moved = |fixture: &Fixture| fixture.contents().node.config.has(CONFIG_SNAT_MOVED);
    apply(&mut fixture, ranges(2_000));
    assert!(is_moved(&fixture), "a connection may have begun while the ranges were written");
    fixture.wait(Duration::from_secs(1));
    fixture.again();
    assert!(!is_moved(&fixture), "there are no connections");
    connections.state().is_outside = true;
    apply(&mut fixture, ranges(2_500));
    fixture.wait(Duration::from_secs(1));
    fixture.again();
    assert!(is_moved(&fixture));
    apply(&mut fixture, ranges(3_000));
    fixture.wait(Duration::from_mins(10));
    fixture.again();
    assert!(is_moved(&fixture), "it goes on");
    connections.state().is_outside = false;
    assert!(fixture.reconciler.wake().is_some_and(|wake| wake <= fixture.now + Duration::from_mins(10)));
    fixture.wait(Duration::from_mins(10));
    fixture.again();
    assert!(!is_moved(&fixture), "it has expired");
    assert_eq!(fixture.reconciler.wake(), None);
}

#[test]
fn id_is_quarantined_while_its_endpoint_has_open_connections() {
    let mut fixture = Fixture::new(ROOMY);
    let connections = fixture.connections();
    fixture.change([generator::service("a", 1, 1..4)]);
    let ids: Vec<u32> = fixture.contents().backends.keys().copied().collect();
    connections.state().backends.insert(ids[0]);
    fixture.change([generator::service("a", 1, [])]);
    for _ in 0..3 {
        fixture.wait(Duration::from_mins(1));
        fixture.again();
        assert_eq!(fixture.contents().backends.keys().copied().collect::<Vec<_>>(), ids[..1]);
        let wake = fixture.reconciler.wake().unwrap();
        assert!(wake > fixture.now, "it looks again after a while");
    }
    connections.state().backends.clear();
    fixture.wait(Duration::from_mins(1));
    fixture.again();
    assert!(fixture.contents().backends.is_empty());
    fixture.assert_right();
}

#[test]
fn id_of_a_service_port_is_quarantined_while_a_flow_has_it() {
    let mut fixture = Fixture::new(ROOMY);
    let connections = fixture.connections();
    let ids = |fixture: &Fixture| fixture.contents().names.keys().copied().collect::<Vec<_>>();
    fixture.change([generator::service("a", 1, 1..2), generator::service("b", 2, 2..3)]);
    let all = ids(&fixture);
    let (first, last) = (all[0], *all.last().unwrap());
    assert!(first < last);
    connections.state().services.insert(last);
    fixture.change([(name("a"), None), (name("b"), None)]);
    for _ in 0..20 {
        fixture.wait(Duration::from_mins(1));
        fixture.again();
        assert!(
            fixture.reconciler.wake().is_some_and(|wake| wake > fixture.now),
            "it looks again after a while"
        );
    }
    assert_eq!(ids(&fixture), [last]);
    let looks = connections.state().service_looks;
    assert!((2..=3).contains(&looks), "all flows are read every ten minutes at most: {looks}");
    // The name, which stays, keeps the id after a restart, too.
    let mut fixture = fixture.restarted();
    let connections = fixture.connections();
    connections.state().services.insert(last);
    fixture.tell_all();
    fixture.change([generator::service("c", 3, 3..4)]);
    assert!(ids(&fixture).contains(&last) && ids(&fixture).len() == 2, "{:?}", ids(&fixture));
    connections.state().services.clear();
    for _ in 0..12 {
        fixture.wait(Duration::from_mins(1));
        fixture.again();
    }
    assert!(!ids(&fixture).contains(&last), "the flow has expired");
    fixture.assert_right();
}

#[test]
fn nothing_is_freed_if_the_flows_cannot_be_read() {
    let mut fixture = Fixture::new(ROOMY);
    let connections = fixture.connections();
    // The id of `b` waits for no endpoint.
    fixture.change([generator::service("a", 1, [1]), generator::service("b", 2, [])]);
    let used = |fixture: &Fixture| {
        let contents = fixture.contents();
        let bits: u32 = contents.prefilter.iter().map(|word| word.count_ones()).sum();
        (contents.names.len(), contents.backends.len(), bits)
    };
    connections.state().fails = true;
    fixture.change([(name("a"), None), (name("b"), None)]);
    for _ in 0..50 {
        fixture.wait(Duration::from_hours(1));
        fixture.again();
        assert_eq!(used(&fixture), (2, 1, 3));
        assert!(fixture.reconciler.wake().is_some());
    }
    connections.state().fails = false;
    for _ in 0..3 {
        fixture.wait(Duration::from_hours(1));
        fixture.again();
    }
    assert_eq!(used(&fixture), (0, 0, 0));
    assert_eq!(fixture.reconciler.wake(), None);
}

#[test]
fn a_bit_stays_while_a_connection_needs_it() {
    let mut fixture = Fixture::new(ROOMY);
    let connections = fixture.connections();
    apply(&mut fixture, node([1]));
    fixture.change([service("a", FrontendKind::NodePort, &[])]);
    let key = FrontendKey { addr: ip(1), port: 30_080, proto: 6, scope: SCOPE_INTERNAL };
    connections.state().bits.insert(frontend_bit(&key));
    fixture.change([(name("a"), None)]);
    let hour = Duration::from_hours(1);
    for rest in [hour / 2, hour] {
        fixture.wait(rest);
        fixture.again();
    }
    assert!(is_set(&fixture, 1), "a connection drains");
    assert_eq!(
        fixture.contents().prefilter.iter().map(|word| word.count_ones()).sum::<u32>(),
        1,
        "not the endpoint's"
    );
    for _ in 0..3 {
        fixture.wait(hour / 2);
        fixture.again();
        fixture.again();
    }
    assert_eq!(connections.state().bit_looks, 2, "looked through when it may go, and not with each sync");
    assert!(is_set(&fixture, 1));
    connections.state().bits.clear();
    assert!(fixture.reconciler.wake().is_some_and(|wake| wake <= fixture.now + hour));
    fixture.wait(hour);
    fixture.again();
    assert!(!is_set(&fixture, 1));
    assert_eq!(fixture.reconciler.wake(), None);
}

#[test]
fn nothing_is_written_before_the_node_was_read() {
    let mut fixture = Fixture::new(ROOMY);
    apply(&mut fixture, node([1]));
    let mut fixture = fixture.restarted();
    fixture.node = None;
    fixture.reconciler = crate::sync::Reconciler::recover(
        crate::store::FaultyStore::new(
            crate::store::MemoryStore::with_contents(ROOMY, fixture.contents().clone()),
            Faults::default(),
        ),
        crate::sync::QuarantinePeriods::default(),
        fixture.now,
    )
    .unwrap();
    fixture.reconciler.sync(fixture.now, BTreeMap::new());
    assert_eq!(fixture.steps(), 0);
    assert!(fixture.contents().node.addresses.contains_key(&ip(1)));
}

#[test]
fn failed_node_writes_are_repeated() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([service("a", FrontendKind::NodePort, &[])]);
    fixture.faults(Faults { from: Some(0), ..Faults::default() });
    apply(&mut fixture, node([1]));
    let problems: Vec<Problem> = fixture.reconciler.problems();
    assert_eq!(problems.iter().map(|problem| problem.object.as_str()).collect::<Vec<_>>(), ["Node"]);
    fixture.faults(Faults::default());
    fixture.wait(Duration::from_millis(100));
    fixture.again();
    fixture.assert_right();
    assert!(fixture.reconciler.problems().is_empty());
}

#[test]
fn ranges_come_before_the_entry_and_go_with_it() {
    let mut fixture = Fixture::new(ROOMY);
    fixture.change([service("a", FrontendKind::LoadBalancer, &["198.51.100.0/24", "203.0.113.0/24"])]);
    fixture.assert_right();
    // Two ranges of the new set, and the entry, whose replacement is the commit.
    let ranges = ["198.51.100.0/24", "10.0.0.0/8"];
    assert_eq!(fixture.change([service("a", FrontendKind::LoadBalancer, &ranges)]), 3);
    fixture.assert_right();
    assert_eq!(fixture.contents().source_ranges.len(), 4, "programs may still read the old set");
    fixture.wait(Duration::from_secs(2));
    assert_eq!(fixture.again(), 2, "the quarantine of the old set is over");
    fixture.assert_right();
    // The first list is in the maps again before its quarantine is over: nothing but the entry is written.
    fixture.change([service("a", FrontendKind::LoadBalancer, &[])]);
    assert_eq!(fixture.change([service("a", FrontendKind::LoadBalancer, &ranges)]), 1);
    fixture.assert_right();
    fixture.change([(name("a"), None)]);
    fixture.wait(Duration::from_secs(2));
    fixture.again();
    assert!(fixture.contents().source_ranges.is_empty());
}

#[test]
fn ports_with_the_same_ranges_share_a_set() {
    let mut fixture = Fixture::new(Capacity { ranges: 3, ..ROOMY });
    let three: [&str; 3] = ["198.51.100.0/24", "203.0.113.0/24", "10.0.0.0/8"];
    let (_, plan) = service("a", FrontendKind::LoadBalancer, &three);
    let mut plan = plan.unwrap();
    let (id, port) = plan.ports.iter().next().map(|(id, port)| (id.clone(), port.clone())).unwrap();
    for number in 1..20u16 {
        let other = ServicePortName { port: format!("p{number}").into(), ..id.clone() };
        let at = |(frontend, what): (&Frontend, &FrontendPlan)| {
            (Frontend { port: 1000 + number, ..*frontend }, what.clone())
        };
        let frontends = port.frontends.iter().map(at).collect();
        plan.ports.insert(other, PortPlan { frontends, ..port.clone() });
    }
    fixture.change([(name("a"), Some(plan))]);
    fixture.assert_right();
    assert_eq!((fixture.contents().source_ranges.len(), fixture.reconciler.problems()), (3, vec![]));
    let sets: BTreeSet<u32> = fixture.contents().services.values().map(|entry| entry.ranges).collect();
    assert_eq!(sets.len(), 1);
}

#[test]
fn an_address_that_is_left_alone_says_so_unless_a_service_has_it() {
    let address: IpAddr = Ipv4Addr::new(10, 96, 0, 9).into();
    let unmanaged = [(address, Unmanaged::Foreign)].into();
    let foreign = (name("other"), Some(ServicePlan { unmanaged, ..ServicePlan::default() }));
    let ours = (name("a"), Some(ServicePlan { addresses: [address].into(), ..ServicePlan::default() }));
    let mut fixture = Fixture::new(ROOMY);
    let kind =
        |fixture: &Fixture| fixture.contents().services.values().map(|entry| entry.kind).collect::<Vec<_>>();
    assert_eq!(fixture.change([foreign.clone()]), 1);
    assert_eq!(kind(&fixture), [KIND_UNMANAGED]);
    assert_eq!(fixture.reconciler.services(), 0, "it is not programmed");
    assert!(fixture.contents().prefilter.iter().all(|word| *word == 0), "no packet is asked about it");
    assert_eq!(fixture.reconciler.problems(), []);
    assert_eq!(fixture.change([ours]), 1);
    assert_eq!(kind(&fixture), [KIND_ADDRESS]);
    assert_eq!(fixture.change([(name("a"), None)]), 1);
    assert_eq!(kind(&fixture), [KIND_UNMANAGED]);
    fixture.assert_right();
    let mut fixture = fixture.restarted();
    assert_eq!(fixture.tell_all(), 0);
    assert_eq!(fixture.change([(name("other"), None)]), 1);
    assert!(fixture.contents().services.is_empty());
}

#[test]
fn an_address_lives_as_long_as_a_service_has_it() {
    let address: IpAddr = Ipv4Addr::new(10, 96, 0, 9).into();
    let with = |of| (name(of), Some(ServicePlan { addresses: [address].into(), ..ServicePlan::default() }));
    let mut fixture = Fixture::new(ROOMY);
    assert_eq!(fixture.change([with("a")]), 1);
    assert_eq!(fixture.change([with("b")]), 0, "it lives already");
    fixture.assert_right();
    assert_eq!(fixture.change([(name("a"), None)]), 0);
    assert_eq!(fixture.change([(name("b"), None)]), 1);
    assert!(fixture.contents().services.is_empty());
    assert!(fixture.contents().prefilter.iter().all(|word| *word == 0), "no packet is asked about it");
}

#[test]
fn a_number_stays_with_the_address_of_a_node() {
    let numbers = |fixture: &Fixture| -> BTreeMap<IpAddr, u32> {
        fixture.contents().node.tunnels.iter().map(|(number, row)| (row.addr, *number)).collect()
    };
    let mut fixture = Fixture::new(ROOMY);
    let apply = |fixture: &mut Fixture, others: Option<&[u8]>| {
        let mut plan = node([1]);
        let others: Option<Vec<IpAddr>> = others.map(|others| others.iter().copied().map(ip).collect());
        plan.set_tunnels(&[ip(1)], others.as_ref().map(|others| others.iter()));
        fixture.reconciler.set_node(&plan);
        fixture.again();
    };
    apply(&mut fixture, Some(&[7, 8]));
    let first = numbers(&fixture);
    assert_eq!(first, [(ip(7), 1), (ip(8), 2)].into(), "its own address has none");
    let bits = |fixture: &Fixture, last| fixture.contents().node.addresses[&ip(last)];
    assert_eq!([bits(&fixture, 1), bits(&fixture, 7)], [4 + 8 + 1, 8]);
    apply(&mut fixture, Some(&[3, 8]));
    let all: BTreeMap<_, _> = [(ip(3), 3), (ip(7), 1), (ip(8), 2)].into();
    assert_eq!(numbers(&fixture), all, "node 7 may return");
    // While the other nodes are not listed, the known numbers stay, because flows continue.
    apply(&mut fixture, None);
    assert_eq!((numbers(&fixture), bits(&fixture, 8)), (all, 8));
    assert!(fixture.contents().node.config.has(CONFIG_DSR));
}

#[test]
fn tunnel_of_address_that_moved_here_is_removed() {
    let mut fixture = Fixture::new(ROOMY);
    for (own, numbers) in [(&[1][..], &[(1, ip(7)), (2, ip(8))][..]), (&[1, 7], &[(2, ip(8))])] {
        let mut plan = node(own.iter().copied());
        plan.set_tunnels(&[ip(1)], Some([ip(7), ip(8)].iter()));
        fixture.reconciler.set_node(&plan);
        fixture.again();
        let rows = fixture.contents().node.tunnels.iter().map(|(number, row)| (*number, row.addr));
        assert_eq!(rows.collect::<Vec<_>>(), numbers);
    }
}

#[test]
fn nodes_without_a_tunnel_number_are_reported() {
    let mut fixture = Fixture::new(ROOMY);
    let others: Vec<IpAddr> =
        (0..TUNNEL_COUNT + 4).map(|n| Ipv4Addr::from_bits(0x0a01_0000 + n).into()).collect();
    let mut plan = node([1]);
    plan.set_tunnels(&[ip(1)], Some(others.iter()));
    fixture.reconciler.set_node(&plan);
    fixture.again();
    assert_eq!(fixture.contents().node.tunnels.len(), TUNNEL_COUNT as usize - 1);
    let problems = fixture.reconciler.problems();
    assert!(
        problems.iter().any(|problem| problem.message.starts_with("5 of the 4100 addresses")),
        "{problems:?}"
    );
    let added = [ip(9)];
    plan.set_tunnels(&[ip(1)], Some(others.iter().take(9).chain(&added)));
    fixture.reconciler.set_node(&plan);
    fixture.again();
    assert_eq!(fixture.reconciler.problems(), []);
    let has = |at: &IpAddr| fixture.contents().node.tunnels.values().any(|row| row.addr == *at);
    assert!(has(&added[0]), "the number of a node that has left is used again");
    assert!(others.iter().take(9).all(has));
}
