//! What the programs are told of the node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proxy_common::config::{PortRange, SNAT_RANGES};
use proxy_common::map_names::TUNNEL_COUNT;
use proxy_common::service::{KIND_ADDRESS, KIND_NODE_PORT, KIND_UNMANAGED, SCOPE_INTERNAL};

use super::universe::{self, backend, name, port_id};
use super::{ROOMY, World};
use crate::maps::{ConfigRow, Contents, Faults, FilterBit, FlowUse, FrontendKey, NodeRow, Table};
use crate::model::Problem;
use crate::model::{ServiceName, SortedMap};
use crate::plan::{
    Access, AddressFacts, BackendFacts, Frontend, FrontendKind, FrontendPlan, NodePlan, PortPlan, Scope,
    ServicePlan, Unmanaged,
};
use crate::sync::filter::frontend_bit;

/// The tables say what the plan says of the node; nothing where it was not told.
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
    let devices: BTreeMap<_, _> = plan
        .devices
        .iter()
        .map(|(index, facts)| (*index, u32::from(facts.uplink) + 2 * u32::from(facts.no_header)))
        .collect();
    assert_eq!(found.devices, devices);
    let NodePlan { masquerade_all, detect_local, leave_old, snat_ports, host_netns, .. } = *plan;
    let NodePlan { socket_lb, socket_drop, timeouts, .. } = *plan;
    let mut uplinks: Vec<_> =
        plan.devices.iter().filter(|(_, facts)| facts.uplink).map(|(at, _)| *at).collect();
    uplinks.resize(3, 0);
    let uplinks = uplinks.try_into().unwrap();
    let expected = ConfigRow {
        masquerade_all,
        detect_local,
        leave_old,
        socket_lb,
        socket_drop,
        timeouts,
        snat_moved: false,
        snat_ports,
        host_netns,
        uplinks,
        dsr: false,
    };
    assert_eq!(found.config, expected);
    let NodeRow::V4(row) = &found.rows[&Table::Node] else { panic!("{:?}", found.rows) };
    assert_eq!(row.source.map(IpAddr::V4), plan.sources.get(&crate::model::net::IpFamily::V4).copied());
    assert_eq!(row.pods.map(Into::into), plan.pods.get(&crate::model::net::IpFamily::V4).copied());
}

fn ip(last: u8) -> IpAddr {
    Ipv4Addr::new(192, 0, 2, last).into()
}

/// A node whose node ports answer on these addresses.
fn node(addresses: impl IntoIterator<Item = u8>) -> NodePlan {
    let facts = AddressFacts { node_ports: true, loopback: false };
    let addresses = addresses.into_iter().map(|last| (ip(last), facts)).collect();
    NodePlan { addresses, snat_ports: proxy_common::config::SNAT_PORTS, ..NodePlan::default() }
}

/// A Service with one node port, and one with a load balancer that lets these ranges in.
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
        reset_after: None,
        source_ranges: ranges.iter().map(|range| range.parse().unwrap()).collect(),
    };
    (name(of), Some(ServicePlan { ports: [(id, plan)].into(), ..ServicePlan::default() }))
}

fn is_set(world: &World, address: u8) -> bool {
    let key = FrontendKey { addr: ip(address), port: 30_080, proto: 6, scope: SCOPE_INTERNAL };
    let (word, mask) = frontend_bit(&key);
    world.contents().filter[word as usize] & mask != 0
}

fn tell(world: &mut World, plan: NodePlan) -> u64 {
    world.reconciler.set_node(&plan);
    world.node = Some(plan);
    world.again()
}

#[test]
fn a_node_port_has_a_bit_for_each_address_of_the_node() {
    let mut world = World::new(ROOMY);
    tell(&mut world, node([1]));
    world.change([service("a", FrontendKind::NodePort, &[])]);
    assert_eq!([1, 2].map(|last| is_set(&world, last)), [true, false]);
    let entry = world.contents().services.values().next().unwrap();
    assert_eq!((entry.kind, entry.slot_count), (KIND_NODE_PORT, 1));

    // The bit of the new address, and the address.
    assert_eq!(tell(&mut world, node([1, 2])), 2);
    assert_eq!([1, 2].map(|last| is_set(&world, last)), [true, true]);
    assert_eq!(tell(&mut world, node([2])), 1, "what flows to the old address goes on");
    assert_eq!([1, 2].map(|last| is_set(&world, last)), [true, true]);
    world.wait(Duration::from_hours(24));
    assert_eq!(world.again(), 1);
    assert_eq!([1, 2].map(|last| is_set(&world, last)), [false, true]);
    world.assert_right();
    let mut world = world.restarted();
    assert_eq!(world.tell_all(), 0);
}

/// Connections that need these bits, and how often they were looked through; backends with open ones; whether one has a source
/// port of ranges of before.
#[derive(Clone, Default)]
struct Connections(Arc<Mutex<(BTreeSet<FilterBit>, usize)>>, Arc<Mutex<BTreeSet<u32>>>, Arc<AtomicBool>);

impl FlowUse for Connections {
    fn connected(&mut self, backends: &BTreeSet<u32>) -> std::io::Result<BTreeSet<u32>> {
        Ok(&*self.1.lock().unwrap() & backends)
    }

    fn used_among(&mut self, bits: &BTreeSet<FilterBit>) -> std::io::Result<BTreeSet<FilterBit>> {
        let (used, looks) = &mut *self.0.lock().unwrap();
        *looks += 1;
        Ok(&*used & bits)
    }

    fn has_snat_beside(&mut self, _: [PortRange; SNAT_RANGES]) -> std::io::Result<bool> {
        Ok(self.2.load(Ordering::Relaxed))
    }
}

#[test]
fn old_snat_ports_are_looked_up_while_a_connection_has_one() {
    let connections = Connections::default();
    let mut world = World::new(ROOMY);
    world.reconciler = world.reconciler.with_flows(Box::new(connections.clone()));
    let ranges = |first| NodePlan { snat_ports: [PortRange::new(first, 29_999); SNAT_RANGES], ..node([1]) };
    let is_moved = |world: &World| world.contents().node.config.snat_moved;
    tell(&mut world, ranges(2_000));
    assert!(!is_moved(&world), "there are no connections");
    // One may have begun while the ranges were written.
    connections.2.store(true, Ordering::Relaxed);
    world.wait(Duration::from_secs(1));
    world.again();
    assert!(is_moved(&world));
    tell(&mut world, ranges(3_000));
    world.wait(Duration::from_mins(10));
    world.again();
    assert!(is_moved(&world), "it goes on");
    connections.2.store(false, Ordering::Relaxed);
    assert!(world.reconciler.wake().is_some_and(|wake| wake <= world.now + Duration::from_mins(10)));
    world.wait(Duration::from_mins(10));
    world.again();
    assert!(!is_moved(&world), "it has expired");
    assert_eq!(world.reconciler.wake(), None);
}

#[test]
fn an_id_rests_while_connections_of_its_endpoint_are_open() {
    let connections = Connections::default();
    let mut world = World::new(ROOMY);
    world.reconciler = world.reconciler.with_flows(Box::new(connections.clone()));
    world.change([universe::service("a", 1, 1..4)]);
    let ids: Vec<u32> = world.contents().backends.keys().copied().collect();
    connections.1.lock().unwrap().insert(ids[0]);
    world.change([universe::service("a", 1, [])]);
    for _ in 0..3 {
        world.wait(Duration::from_mins(1));
        world.again();
        assert_eq!(world.contents().backends.keys().copied().collect::<Vec<_>>(), ids[..1]);
        let wake = world.reconciler.wake().unwrap();
        assert!(wake > world.now, "it looks again after a while");
    }
    connections.1.lock().unwrap().clear();
    world.wait(Duration::from_mins(1));
    world.again();
    assert!(world.contents().backends.is_empty());
    world.assert_right();
}

#[test]
fn a_bit_stays_while_a_connection_needs_it() {
    let connections = Connections::default();
    let mut world = World::new(ROOMY);
    let flows = Box::new(connections.clone());
    world.reconciler = world.reconciler.with_flows(flows);
    tell(&mut world, node([1]));
    world.change([service("a", FrontendKind::NodePort, &[])]);
    let key = FrontendKey { addr: ip(1), port: 30_080, proto: 6, scope: SCOPE_INTERNAL };
    connections.0.lock().unwrap().0.insert(frontend_bit(&key));
    world.change([(name("a"), None)]);
    let hour = Duration::from_hours(1);
    for rest in [hour, 24 * hour] {
        world.wait(rest);
        world.again();
    }
    assert!(is_set(&world, 1), "a connection drains");
    assert_eq!(
        world.contents().filter.iter().map(|word| word.count_ones()).sum::<u32>(),
        1,
        "not the endpoint's"
    );
    for _ in 0..3 {
        world.wait(hour / 2);
        world.again();
        world.again();
    }
    assert_eq!(connections.0.lock().unwrap().1, 2, "looked through when it may go, and not with each sync");
    assert!(is_set(&world, 1));
    connections.0.lock().unwrap().0.clear();
    assert!(world.reconciler.wake().is_some_and(|wake| wake <= world.now + hour));
    world.wait(hour);
    world.again();
    assert!(!is_set(&world, 1));
    assert_eq!(world.reconciler.wake(), None);
}

#[test]
fn nothing_is_told_before_the_node_was_looked_at() {
    let mut world = World::new(ROOMY);
    tell(&mut world, node([1]));
    let mut world = world.restarted();
    world.node = None;
    world.reconciler = crate::sync::Reconciler::recover(
        crate::maps::FaultyStore::new(
            crate::maps::MemoryStore::with_contents(ROOMY, world.contents().clone()),
            Faults::default(),
        ),
        crate::sync::Holds::default(),
        world.now,
    )
    .unwrap();
    world.reconciler.sync(world.now, BTreeMap::new());
    assert_eq!(world.steps(), 0);
    assert!(world.contents().node.addresses.contains_key(&ip(1)));
}

#[test]
fn what_could_not_be_told_is_told_later() {
    let mut world = World::new(ROOMY);
    world.change([service("a", FrontendKind::NodePort, &[])]);
    world.faults(Faults { from: Some(0), ..Faults::default() });
    tell(&mut world, node([1]));
    let problems: Vec<Problem> = world.reconciler.problems();
    assert_eq!(problems.iter().map(|problem| problem.object.as_str()).collect::<Vec<_>>(), ["Node"]);
    world.faults(Faults::default());
    world.wait(Duration::from_millis(100));
    world.again();
    world.assert_right();
    assert!(world.reconciler.problems().is_empty());
}

#[test]
fn ranges_come_before_the_entry_and_go_with_it() {
    let mut world = World::new(ROOMY);
    world.change([service("a", FrontendKind::LoadBalancer, &["198.51.100.0/24", "203.0.113.0/24"])]);
    world.assert_right();
    // One range more and one less: no entry changes.
    let before = world.contents().services.clone();
    assert_eq!(
        world.change([service("a", FrontendKind::LoadBalancer, &["198.51.100.0/24", "10.0.0.0/8"])]),
        2
    );
    assert_eq!(world.contents().services, before);
    world.assert_right();
    world.change([service("a", FrontendKind::LoadBalancer, &[])]);
    assert!(world.contents().source_ranges.is_empty());
    world.change([service("a", FrontendKind::LoadBalancer, &["198.51.100.0/24"])]);
    world.change([(name("a"), None)]);
    assert!(world.contents().source_ranges.is_empty(), "another port may get the id");
}

#[test]
fn an_address_that_is_left_alone_says_so_unless_a_service_has_it() {
    let address: IpAddr = Ipv4Addr::new(10, 96, 0, 9).into();
    let unmanaged = [(address, Unmanaged::Foreign)].into();
    let foreign = (name("other"), Some(ServicePlan { unmanaged, ..ServicePlan::default() }));
    let ours = (name("a"), Some(ServicePlan { addresses: [address].into(), ..ServicePlan::default() }));
    let mut world = World::new(ROOMY);
    let kind = |world: &World| world.contents().services.values().map(|entry| entry.kind).collect::<Vec<_>>();
    assert_eq!(world.change([foreign.clone()]), 1);
    assert_eq!(kind(&world), [KIND_UNMANAGED]);
    assert_eq!(world.reconciler.services(), 0, "it is not programmed");
    assert!(world.contents().filter.iter().all(|word| *word == 0), "no packet is asked about it");
    assert_eq!(world.reconciler.problems(), []);
    assert_eq!(world.change([ours]), 1);
    assert_eq!(kind(&world), [KIND_ADDRESS]);
    assert_eq!(world.change([(name("a"), None)]), 1);
    assert_eq!(kind(&world), [KIND_UNMANAGED]);
    world.assert_right();
    let mut world = world.restarted();
    assert_eq!(world.tell_all(), 0);
    assert_eq!(world.change([(name("other"), None)]), 1);
    assert!(world.contents().services.is_empty());
}

#[test]
fn an_address_lives_as_long_as_a_service_has_it() {
    let address: IpAddr = Ipv4Addr::new(10, 96, 0, 9).into();
    let with = |of| (name(of), Some(ServicePlan { addresses: [address].into(), ..ServicePlan::default() }));
    let mut world = World::new(ROOMY);
    assert_eq!(world.change([with("a")]), 1);
    assert_eq!(world.change([with("b")]), 0, "it lives already");
    world.assert_right();
    assert_eq!(world.change([(name("a"), None)]), 0);
    assert_eq!(world.change([(name("b"), None)]), 1);
    assert!(world.contents().services.is_empty());
    assert!(world.contents().filter.iter().all(|word| *word == 0), "no packet is asked about it");
}

#[test]
fn a_number_stays_with_the_address_of_a_node() {
    let numbers = |world: &World| -> BTreeMap<IpAddr, u32> {
        world.contents().node.tunnels.iter().map(|(number, row)| (row.addr, *number)).collect()
    };
    let mut world = World::new(ROOMY);
    let tell = |world: &mut World, others: Option<&[u8]>| {
        let mut plan = node([1]);
        let others: Option<Vec<IpAddr>> = others.map(|others| others.iter().copied().map(ip).collect());
        plan.set_tunnels(&[ip(1)], others.as_ref().map(|others| others.iter()));
        world.reconciler.set_node(&plan);
        world.again();
    };
    tell(&mut world, Some(&[7, 8]));
    let first = numbers(&world);
    assert_eq!(first, [(ip(7), 1), (ip(8), 2)].into(), "its own address has none");
    let bits = |world: &World, last| world.contents().node.addresses[&ip(last)];
    assert_eq!([bits(&world, 1), bits(&world, 7)], [4 + 8 + 1, 8]);
    tell(&mut world, Some(&[3, 8]));
    assert_eq!(numbers(&world), [(ip(3), 1), (ip(8), 2)].into());
    // While they are not listed, those that are known stay: flows go on.
    tell(&mut world, None);
    assert_eq!((numbers(&world), bits(&world, 8)), ([(ip(3), 1), (ip(8), 2)].into(), 8));
    assert!(world.contents().node.config.dsr);
}

#[test]
fn nodes_without_a_number_are_told() {
    let mut world = World::new(ROOMY);
    let others: Vec<IpAddr> =
        (0..TUNNEL_COUNT + 4).map(|n| Ipv4Addr::from_bits(0x0a01_0000 + n).into()).collect();
    let mut plan = node([1]);
    plan.set_tunnels(&[ip(1)], Some(others.iter()));
    world.reconciler.set_node(&plan);
    world.again();
    assert_eq!(world.contents().node.tunnels.len(), TUNNEL_COUNT as usize - 1);
    let problems = world.reconciler.problems();
    assert!(
        problems.iter().any(|problem| problem.message.starts_with("5 of the 4100 addresses")),
        "{problems:?}"
    );
    plan.set_tunnels(&[ip(1)], Some(others.iter().take(9)));
    world.reconciler.set_node(&plan);
    world.again();
    assert_eq!(world.reconciler.problems(), []);
}
