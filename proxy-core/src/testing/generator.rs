//! Generates plans with so few names and addresses that collisions are frequent.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use ipnet::IpNet;
use proptest::option;
use proptest::prelude::*;
use proxy_common::node::{DEVICE_NO_HEADER, DEVICE_UPLINK};
use proxy_common::reason::Verdict;
use proxy_common::select::Algorithm;

use crate::model::net::{IpFamily, Protocol};
use crate::model::settings::NodeSettings;
use crate::model::{ServiceName, SortedMap, TrafficPolicy};
use crate::plan::{
    Access, AddressFacts, BackendAddress, BackendFacts, Changing, Frontend, FrontendKind, FrontendPlan,
    NodePlan, PortPlan, Scope, ServicePlan, ServicePortName, Unmanaged,
};

const KINDS: [FrontendKind; 4] =
    [FrontendKind::ClusterIp, FrontendKind::NodePort, FrontendKind::LoadBalancer, FrontendKind::ExternalIp];

/// `default/<name>`.
pub fn name(name: &str) -> ServiceName {
    ServiceName::new("default", name)
}

/// A port of `default/<service>`.
pub fn port_id(service: &str, port: &str) -> ServicePortName {
    ServicePortName {
        namespace: "default".into(),
        name: service.into(),
        port: port.into(),
        protocol: Protocol::Tcp,
        family: IpFamily::V4,
    }
}

/// `10.1.0.<last>:8080`.
pub fn backend(last: u8) -> BackendAddress {
    BackendAddress { address: Ipv4Addr::new(10, 1, 0, last).into(), port: 8080 }
}

/// `10.96.0.<last>:80`.
pub fn frontend(last: u8) -> Frontend {
    Frontend {
        address: Ipv4Addr::new(10, 96, 0, last).into(),
        port: 80,
        protocol: Protocol::Tcp,
        scope: Scope::Internal,
    }
}

/// A Service with one port, one cluster address and these endpoints.
pub fn service(
    service: &str,
    address: u8,
    endpoints: impl IntoIterator<Item = u8>,
) -> (ServiceName, Option<ServicePlan>) {
    let backends: SortedMap<_, _> =
        endpoints.into_iter().map(|last| (backend(last), BackendFacts::default())).collect();
    let what = FrontendPlan::new(FrontendKind::ClusterIp);
    let port = PortPlan {
        frontends: SortedMap::from([(frontend(address), what)]),
        backends,
        tunnels: SortedMap::default(),
        affinity_secs: 0,
        algorithm: Algorithm::Random,
        maglev_outside: false,
        ejects: false,
        no_sockets: false,
        changing: Changing::No,
        rebalances: false,
        reset_after: None,
        source_ranges: [].into(),
    };
    let ports = SortedMap::from([(port_id(service, "http"), port)]);
    (name(service), Some(ServicePlan { ports, created: 1, ..ServicePlan::default() }))
}

fn address(family: IpFamily, net: u8, last: u8) -> IpAddr {
    match family {
        IpFamily::V4 => Ipv4Addr::new(10, net, 0, last).into(),
        IpFamily::V6 => Ipv6Addr::new(0xfd00, 0, 0, u16::from(net), 0, 0, 0, u16::from(last)).into(),
    }
}

fn facts() -> impl Strategy<Value = BackendFacts> {
    (any::<[bool; 4]>(), 1u16..4).prop_map(|([local, terminating, in_cluster, in_local], weight)| {
        BackendFacts { local, terminating, in_cluster, in_local, weight, step: 0 }
    })
}

/// Generates the settings of a frontend without its endpoints, and whether it uses all of them.
fn look() -> impl Strategy<Value = (FrontendPlan, bool)> {
    let access = prop_oneof![
        2 => Just(Access::Unrestricted),
        1 => any::<bool>().prop_map(|node| Access::Ranges { node }),
    ];
    let verdict = prop::sample::select(&[Verdict::Reject, Verdict::Drop, Verdict::Pass][..]);
    let flags = any::<[bool; 2]>();
    (prop::sample::select(&KINDS[..]), flags, verdict, access).prop_map(
        |(kind, flags, when_empty, access)| {
            let [is_local, all] = flags;
            let policy = if is_local { TrafficPolicy::Local } else { TrafficPolicy::Cluster };
            let plan = FrontendPlan { policy, when_empty, access, ..FrontendPlan::new(kind) };
            (plan, all)
        },
    )
}

fn frontend_plan(
    family: IpFamily,
    protocol: Protocol,
) -> impl Strategy<Value = (Frontend, (FrontendPlan, bool))> {
    let scope = prop_oneof![3 => Just(Scope::Internal), 2 => Just(Scope::External)];
    // 0: a node port, on all addresses of the node.
    (0u8..5, scope, look()).prop_map(move |(last, scope, look)| {
        let (address, port) = match (last, family) {
            (0, IpFamily::V4) => (Ipv4Addr::UNSPECIFIED.into(), 30_080),
            (0, IpFamily::V6) => (Ipv6Addr::UNSPECIFIED.into(), 30_080),
            _ => (address(family, 96, last), 80),
        };
        (Frontend { address, port, protocol, scope }, look)
    })
}

fn range(family: IpFamily) -> impl Strategy<Value = IpNet> {
    let lengths = match family {
        IpFamily::V4 => [8, 24, 32],
        IpFamily::V6 => [16, 64, 128],
    };
    (1u8..4, prop::sample::select(lengths.to_vec()))
        .prop_map(move |(net, length)| IpNet::new(address(family, net, 1), length).unwrap().trunc())
}

fn port_plan(family: IpFamily, protocol: Protocol) -> impl Strategy<Value = PortPlan> {
    let backend = (1u8..8, 80u16..82, facts());
    let backends = prop::collection::vec(backend, 0..7);
    let frontends = prop::collection::btree_map(1u8..5, frontend_plan(family, protocol), 0..5);
    let ranges = prop::collection::btree_set(range(family), 0..4);
    let delay = option::of(prop::sample::select(&[0, 30, 90][..]));
    let spread = (prop::sample::select(Algorithm::ALL), any::<bool>(), any::<bool>(), delay);
    (backends, frontends, 0u32..2, ranges, spread).prop_map(
        move |(
            backends,
            frontends,
            affinity_secs,
            source_ranges,
            (algorithm, maglev_outside, ejects, delay),
        )| {
            let backends: SortedMap<_, _> = backends
                .into_iter()
                .map(|(last, port, facts)| {
                    (BackendAddress { address: address(family, 1, last), port }, facts)
                })
                .collect();
            // Some frontends use the local endpoints only, as with policy Local.
            let slots = |all: bool| {
                let local = || backends.iter().filter(|(_, f)| f.local).map(|(at, _)| *at).collect();
                (!all).then(local)
            };
            let frontends = frontends
                .into_values()
                .map(|(frontend, (look, all))| {
                    let policy = if all { TrafficPolicy::Cluster } else { TrafficPolicy::Local };
                    (frontend, FrontendPlan { slots: slots(all), policy, recent: maglev_outside, ..look })
                })
                .collect();
            let frontends: BTreeMap<Frontend, FrontendPlan> = frontends;
            let outside: BTreeSet<Frontend> =
                frontends.keys().copied().filter(|f| f.scope == Scope::External).collect();
            let scoped = |frontend: &Frontend| {
                frontend.scope == Scope::Internal
                    && outside.contains(&Frontend { scope: Scope::External, ..*frontend })
            };
            let frontends = frontends
                .into_iter()
                .map(|(frontend, plan)| (frontend, FrontendPlan { scoped: scoped(&frontend), ..plan }))
                .collect();
            let reset_after = delay.filter(|_| protocol == Protocol::Tcp).map(Duration::from_secs);
            PortPlan {
                frontends,
                backends,
                tunnels: SortedMap::default(),
                affinity_secs,
                algorithm,
                maglev_outside,
                ejects,
                no_sockets: ejects,
                changing: match (ejects, maglev_outside) {
                    (false, _) => Changing::No,
                    (true, false) => Changing::Pods,
                    (true, true) => Changing::All,
                },
                rebalances: ejects,
                reset_after,
                source_ranges: source_ranges.into_iter().collect(),
            }
        },
    )
}

fn port(service: &'static str) -> impl Strategy<Value = (ServicePortName, PortPlan)> {
    let family = prop_oneof![3 => Just(IpFamily::V4), 1 => Just(IpFamily::V6)];
    let protocol = prop_oneof![3 => Just(Protocol::Tcp), 1 => Just(Protocol::Udp)];
    (prop::sample::select(&["", "x"][..]), family, protocol).prop_flat_map(move |(port, family, protocol)| {
        let id = ServicePortName { protocol, family, ..port_id(service, port) };
        port_plan(family, protocol).prop_map(move |plan| (id.clone(), plan))
    })
}

fn unmanaged() -> impl Strategy<Value = Unmanaged> {
    prop_oneof![Just(Unmanaged::Own), Just(Unmanaged::Foreign)]
}

/// Generates a change of one Service: another plan, or none.
pub fn change() -> impl Strategy<Value = (ServiceName, Option<ServicePlan>)> {
    prop::sample::select(&["a", "b", "c", "d"][..]).prop_flat_map(|service| {
        let addresses = prop::collection::btree_set((any::<bool>(), 1u8..5), 0..3);
        let unmanaged = prop::collection::btree_map((any::<bool>(), 1u8..5), unmanaged(), 0..2);
        let at = |(v6, last)| address(if v6 { IpFamily::V6 } else { IpFamily::V4 }, 96, last);
        let plan = (prop::collection::vec(port(service), 0..3), 1i64..3, addresses, unmanaged).prop_map(
            move |(ports, created, addresses, unmanaged)| ServicePlan {
                ports: ports.into_iter().collect(),
                addresses: addresses.into_iter().map(at).collect(),
                unmanaged: unmanaged.into_iter().map(|(place, why)| (at(place), why)).collect(),
                created,
                ..ServicePlan::default()
            },
        );
        option::weighted(0.8, plan).prop_map(move |plan| (name(service), plan))
    })
}

/// A Service and its new plan; `None`: it is removed.
pub type Change = (ServiceName, Option<ServicePlan>);

/// Generates a plan of the node.
pub fn node() -> impl Strategy<Value = NodePlan> {
    let facts = any::<(bool, bool)>();
    let addresses = prop::collection::btree_map((any::<bool>(), 1u8..4), facts, 0..4);
    let devices = prop::collection::btree_map(1u32..4, facts, 0..3);
    (addresses, devices, any::<[bool; 3]>(), option::of(range(IpFamily::V4)), 0u64..3).prop_map(
        |(addresses, devices, [detect_local, masquerade_all, other_proxy], pods, host_netns)| NodePlan {
            sources: BTreeMap::from([(IpFamily::V4, address(IpFamily::V4, 9, 1))]),
            pods: pods.into_iter().map(|pods| (IpFamily::V4, pods)).collect(),
            addresses: addresses
                .into_iter()
                .map(|((v6, last), (node_ports, loopback))| {
                    let family = if v6 { IpFamily::V6 } else { IpFamily::V4 };
                    (address(family, 9, last), AddressFacts { node_ports, loopback })
                })
                .collect(),
            devices: devices
                .into_iter()
                .map(|(index, (uplink, no_header))| {
                    let uplink = if uplink { DEVICE_UPLINK } else { 0 };
                    (index, uplink | if no_header { DEVICE_NO_HEADER } else { 0 })
                })
                .collect(),
            detect_local,
            other_proxy,
            settings: NodeSettings { masquerade_all, ..NodeSettings::default() },
            host_netns,
            ..NodePlan::default()
        },
    )
}

/// Changes that one sync takes: changes of Services, a new plan of the node if it changes, and the milliseconds before
/// them.
pub type Moment = (Vec<Change>, Option<NodePlan>, u64);

/// Generates a sequence of fewer than `length` moments.
pub fn history(length: usize) -> impl Strategy<Value = Vec<Moment>> {
    let pause = prop_oneof![3 => 0u64..500, 2 => 900u64..3_000, 1 => 55_000u64..130_000];
    let node = option::weighted(0.3, node());
    prop::collection::vec((prop::collection::vec(change(), 0..3), node, pause), 1..length)
}
