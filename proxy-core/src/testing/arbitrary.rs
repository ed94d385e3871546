//! Valid clusters for property tests. Names and addresses come from small pools, so that they collide.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use ipnet::IpNet;
use proptest::collection::{btree_map, btree_set, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use proxy_common::select::Algorithm;

use crate::model::net::{IpFamily, Protocol};
use crate::model::spread::{WeightOf, Weights};
use crate::model::{
    DefaultRoute, Endpoint, EndpointPort, EndpointSlice, Event, ForwardingMode, HostDevice, HostView, Key,
    Name, NodeView, Object, RemovalPolicy, Service, ServiceKind, ServiceName, ServicePort, SliceName,
    TrafficPolicy, Version,
};

/// The name of this node, for which clusters are planned.
pub const NODE: &str = "n1";
/// The last byte of addresses that only this node can have.
const OWN: u8 = 60;
const NODES: &[&str] = &[NODE, "n2", "n3"];
const ZONES: &[&str] = &["a", "b"];

fn text(pool: &'static [&'static str]) -> impl Strategy<Value = String> + Clone {
    select(pool).prop_map(str::to_owned)
}

fn protocol() -> impl Strategy<Value = Protocol> {
    select(&[Protocol::Tcp, Protocol::Udp, Protocol::Sctp][..])
}

fn family() -> impl Strategy<Value = IpFamily> {
    select(&[IpFamily::V4, IpFamily::V6][..])
}

fn policy() -> impl Strategy<Value = TrafficPolicy> {
    select(&[TrafficPolicy::Cluster, TrafficPolicy::Local][..])
}

/// Returns the address of the family with this last byte.
pub fn address(family: IpFamily, low: u8) -> IpAddr {
    match family {
        IpFamily::V4 => Ipv4Addr::new(10, 0, 0, low).into(),
        IpFamily::V6 => Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, low.into()).into(),
    }
}

/// Returns this node with an address of each family.
pub fn this_node() -> NodeView {
    let internal_ips = [IpFamily::V4, IpFamily::V6].map(|family| address(family, OWN)).into();
    NodeView { internal_ips, ..NodeView::new(NODE) }
}

/// Returns the host with the addresses of [`this_node`].
pub fn this_host() -> HostView {
    let addresses = this_node().internal_ips.into_iter().collect();
    HostView {
        devices: [(2, HostDevice { addresses, ..HostDevice::default() })].into(),
        ..HostView::default()
    }
}

/// Generates this node, in one of the zones or in none, with or without an address and a range of pods.
pub fn node() -> impl Strategy<Value = NodeView> {
    let internal = btree_set((family(), prop_oneof![Just(OWN), 1..3u8]), 0..3);
    let pods = btree_set(select(&[0, 2][..]), 0..2);
    (option::of(text(ZONES)), internal, pods).prop_map(|(zone, internal, pods)| NodeView {
        zone,
        internal_ips: internal.into_iter().map(|(family, low)| address(family, low)).collect(),
        // Two addresses that Services also have.
        pod_cidrs: pods.into_iter().map(|low| IpNet::new_assert(address(IpFamily::V4, low), 31)).collect(),
        ..NodeView::new(NODE)
    })
}

/// Generates another node.
pub fn other_node() -> impl Strategy<Value = NodeView> {
    (text(&NODES[1..]), btree_set((family(), 50..52u8), 0..4)).prop_map(|(name, internal)| NodeView {
        internal_ips: internal.into_iter().map(|(family, low)| address(family, low)).collect(),
        ..NodeView::new(name)
    })
}

/// Generates the host, with addresses that may also be those of Services or endpoints, or be in source ranges.
pub fn host() -> impl Strategy<Value = HostView> {
    let addresses = btree_set((family(), prop_oneof![Just(OWN), 1..3u8, 100..102u8]), 0..6);
    (addresses, option::of(1..4u8)).prop_map(|(addresses, source)| {
        let addresses = addresses.into_iter().map(|(family, low)| address(family, low)).collect();
        let route = |low| DefaultRoute { device: 2, source: Some(address(IpFamily::V4, low)) };
        HostView {
            devices: [(2, HostDevice { addresses, ..HostDevice::default() })].into(),
            defaults: source.into_iter().map(route).collect(),
            ..HostView::default()
        }
    })
}

/// Generates the name of a Service.
pub fn service_name() -> impl Strategy<Value = ServiceName> {
    (text(&["blue", "red"]), text(&["db", "web"]))
        .prop_map(|(namespace, name)| ServiceName::new(namespace, name))
}

fn service_ports() -> impl Strategy<Value = Vec<ServicePort>> {
    let port = (text(&["", "dns", "http"]), protocol(), 80..83u16, select(&[0, 30_000][..])).prop_map(
        |(name, protocol, port, node_port)| ServicePort { name: name.into(), protocol, port, node_port },
    );
    vec(port, 0..4).prop_map(|mut ports| {
        let (mut names, mut numbers) = (BTreeSet::new(), BTreeSet::new());
        ports.retain(|p| names.insert((p.name.clone(), p.protocol)) && numbers.insert((p.port, p.protocol)));
        ports
    })
}

fn source_range() -> impl Strategy<Value = IpNet> {
    let range = |family, low, len| IpNet::new_assert(address(family, low), len).trunc();
    (family(), 1..4u8, select(&[0, 8, 32][..])).prop_map(move |(family, low, len)| range(family, low, len))
}

fn weights() -> impl Strategy<Value = Weights> {
    let of = prop_oneof![
        (family(), 100..104u8).prop_map(|(family, low)| WeightOf::Address(address(family, low))),
        text(NODES).prop_map(|node| WeightOf::Node(node.into())),
        text(ZONES).prop_map(|zone| WeightOf::Zone(zone.into())),
        Just(WeightOf::All),
    ];
    btree_map(of, select(&[0, 1, 3][..]), 0..3).prop_map(Weights)
}

/// Generates the settings that a Service has by its annotations, except the algorithm and the forwarding mode.
fn annotated() -> impl Strategy<Value = (Option<bool>, RemovalPolicy, Weights)> {
    let removal = select(vec![RemovalPolicy::Drain, RemovalPolicy::Reset(Duration::from_secs(30))]);
    (option::of(any::<bool>()), removal, weights())
}

/// Generates a Service.
pub fn service() -> impl Strategy<Value = Service> {
    let external = || btree_set(10..13u8, 0..2);
    let addresses = (option::of(1..4u8), option::of(1..4u8), external(), external());
    let ranges = option::of(vec(source_range(), 0..3));
    let is_foreign = prop_oneof![4 => Just(false), 1 => Just(true)];
    let algorithm = option::of(select(Algorithm::ALL));
    let forwarding = option::weighted(0.8, select(&ForwardingMode::ALL[..]));
    let spread = (algorithm, forwarding, annotated());
    let rest = (policy(), policy(), select(&[0, 10_800][..]), 0..3i64, ranges, is_foreign, spread);
    (service_name(), addresses, service_ports(), rest).prop_map(|(name, addresses, ports, rest)| {
        let (v4, v6, external, balanced) = addresses;
        let (internal_policy, external_policy, affinity_secs, created, source_ranges, is_foreign, spread) =
            rest;
        let (algorithm, forwarding, (ejection, removal, weights)) = spread;
        let v4 = v4.map(|low| address(IpFamily::V4, low));
        let v6 = v6.map(|low| address(IpFamily::V6, low));
        let cluster_ips = v4.into_iter().chain(v6).collect();
        if is_foreign {
            return Service { is_foreign, cluster_ips, ..Service::new(name) };
        }
        Service {
            name,
            version: Version::default(),
            is_foreign,
            kind: ServiceKind::LoadBalancer,
            cluster_ips,
            refused_families: [None; 2],
            external_ips: external.into_iter().map(|low| address(IpFamily::V4, low)).collect(),
            load_balancer_ips: balanced
                .into_iter()
                .flat_map(|low| [IpFamily::V4, IpFamily::V6].map(|family| address(family, low)))
                .collect(),
            source_ranges,
            ports,
            internal_policy,
            external_policy,
            affinity_secs,
            algorithm,
            forwarding,
            ejection,
            no_sockets: false,
            passes_when_empty: false,
            removal,
            rebalances: false,
            weights,
            health_check_node_port: 32_000,
            created,
            problems: Vec::new(),
        }
    })
}

/// Generates an endpoint of the family.
pub fn endpoint(family: IpFamily) -> impl Strategy<Value = Endpoint> {
    let conditions = (any::<bool>(), any::<bool>(), any::<bool>());
    let hints = (btree_set(text(ZONES), 0..3), btree_set(text(NODES), 0..3));
    let place = (option::weighted(0.8, text(NODES)), option::of(text(ZONES)));
    let weight = option::of(select(&[0, 1, 2, 100][..]));
    (100..104u8, conditions, place, hints, weight).prop_map(
        move |(low, (ready, serving, terminating), (node, zone), (zone_hints, node_hints), weight)| {
            Endpoint {
                address: address(family, low),
                ready,
                serving,
                terminating,
                node: node.map(Name::from),
                zone: zone.map(Name::from),
                weight,
                zone_hints: zone_hints.into_iter().map(Name::from).collect(),
                node_hints: node_hints.into_iter().map(Name::from).collect(),
            }
        },
    )
}

/// Generates a slice. Its name does not depend on its Service.
pub fn slice() -> impl Strategy<Value = EndpointSlice> {
    let port = (text(&["", "dns", "http"]), protocol(), 8080..8082u16)
        .prop_map(|(name, protocol, port)| EndpointPort { name: name.into(), protocol, port });
    (family(), service_name(), text(&["s1", "s2", "s3"]), btree_set(port, 0..8)).prop_flat_map(
        |(family, service, name, ports)| {
            let ports: Vec<_> = ports.into_iter().collect();
            vec(endpoint(family), 0..5).prop_map(move |mut endpoints| {
                endpoints.sort_unstable();
                EndpointSlice {
                    name: SliceName::new(service.namespace.clone(), name.clone()),
                    service: service.clone(),
                    version: Version::default(),
                    family,
                    ports: ports.clone(),
                    endpoints,
                    triggered: None,
                    problems: Vec::new(),
                }
            })
        },
    )
}

/// Generates one event about one object or the host.
pub fn event_or_host() -> impl Strategy<Value = Event> {
    prop_oneof![5 => event(), 1 => host().prop_map(Event::Host)]
}

/// Generates one event about one object.
pub fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => service().prop_map(|s| Event::Apply(Object::Service(s))),
        8 => slice().prop_map(|s| Event::Apply(Object::Slice(s))),
        1 => node().prop_map(|n| Event::Apply(Object::Node(n))),
        3 => other_node().prop_map(|n| Event::Apply(Object::Node(n))),
        1 => service_name().prop_map(|name| Event::Delete(Key::Service(name))),
        2 => slice().prop_map(|s| Event::Delete(Key::Slice(s.name))),
        1 => text(NODES).prop_map(|name| Event::Delete(Key::Node(name))),
    ]
}
