//! What the programs are told of the node.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use proxy_common::service::{KIND_NODE_PORT, SCOPE_INTERNAL};

use super::universe::{backend, name, port_id};
use super::{ROOMY, World};
use crate::maps::{ConfigRow, Contents, Faults, FrontendKey, NodeRow, Table};
use crate::model::ServiceName;
use crate::plan::{
    Access, AddressFacts, BackendFacts, Frontend, FrontendKind, FrontendPlan, NodePlan, PortPlan, Problem,
    Scope, ServicePlan,
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
        .map(|(at, facts)| (*at, u32::from(facts.node_ports) + 2 * u32::from(facts.loopback)))
        .collect();
    assert_eq!(found.addresses, addresses);
    let devices: BTreeMap<_, _> = plan
        .devices
        .iter()
        .map(|(index, facts)| (*index, u32::from(facts.uplink) + 2 * u32::from(facts.no_header)))
        .collect();
    assert_eq!(found.devices, devices);
    let NodePlan { masquerade_all, detect_local, leave_old, snat_ports, host_netns, .. } = *plan;
    let mut uplinks: Vec<_> =
        plan.devices.iter().filter(|(_, facts)| facts.uplink).map(|(at, _)| *at).collect();
    uplinks.resize(3, 0);
    let uplinks = uplinks.try_into().unwrap();
    let expected = ConfigRow { masquerade_all, detect_local, leave_old, snat_ports, host_netns, uplinks };
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
    NodePlan { addresses, snat_ports: (61_000, 65_535), ..NodePlan::default() }
}

/// A Service with one node port, and one with a load balancer that lets these ranges in.
fn service(of: &str, kind: FrontendKind, ranges: &[&str]) -> (ServiceName, Option<ServicePlan>) {
    let (address, port) = match kind {
        FrontendKind::NodePort => (Ipv4Addr::UNSPECIFIED.into(), 30_080),
        _ => (ip(200), 80),
    };
    let id = port_id(of, "http");
    let frontend = Frontend { address, port, protocol: id.protocol, scope: Scope::Internal };
    let access = if ranges.is_empty() { Access::Everybody } else { Access::Ranges { node: false } };
    let plan = PortPlan {
        frontends: [(frontend, FrontendPlan { access, ..FrontendPlan::new(kind, vec![backend(1)]) })].into(),
        backends: [(backend(1), BackendFacts::default())].into(),
        affinity_secs: 0,
        algorithm: proxy_common::select::Algorithm::Random,
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
