//! Plans from a world so small that everything collides with everything.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;
use proxy_common::select::Algorithm;

use crate::model::ServiceName;
use crate::model::net::{IpFamily, Protocol};
use crate::plan::{
    BackendAddress, BackendFacts, Frontend, FrontendKind, FrontendPlan, PortId, PortPlan, Scope, ServicePlan,
};

const KINDS: [FrontendKind; 4] =
    [FrontendKind::ClusterIp, FrontendKind::NodePort, FrontendKind::LoadBalancer, FrontendKind::ExternalIp];

/// `default/<name>`.
pub fn name(name: &str) -> ServiceName {
    ServiceName::new("default", name)
}

/// A port of `default/<service>`.
pub fn port_id(service: &str, port: &str) -> PortId {
    PortId {
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
    let backends: BTreeMap<_, _> =
        endpoints.into_iter().map(|last| (backend(last), BackendFacts::default())).collect();
    let slots = backends.keys().copied().collect();
    let what = FrontendPlan { kind: FrontendKind::ClusterIp, slots, drop_when_empty: false };
    let port = PortPlan {
        frontends: BTreeMap::from([(frontend(address), what)]),
        backends,
        affinity_secs: 0,
        algorithm: Algorithm::Random,
    };
    let ports = BTreeMap::from([(port_id(service, "http"), port)]);
    (name(service), Some(ServicePlan { ports, created: 1, problems: Vec::new() }))
}

fn address(family: IpFamily, net: u8, last: u8) -> IpAddr {
    match family {
        IpFamily::V4 => Ipv4Addr::new(10, net, 0, last).into(),
        IpFamily::V6 => Ipv6Addr::new(0xfd00, 0, 0, u16::from(net), 0, 0, 0, u16::from(last)).into(),
    }
}

fn facts() -> impl Strategy<Value = BackendFacts> {
    (any::<bool>(), any::<bool>()).prop_map(|(local, terminating)| BackendFacts { local, terminating })
}

fn frontend_plan(
    family: IpFamily,
    protocol: Protocol,
) -> impl Strategy<Value = (Frontend, (FrontendKind, bool, bool))> {
    let scope = prop_oneof![4 => Just(Scope::Internal), 1 => Just(Scope::External)];
    (1u8..5, scope, prop::sample::select(&KINDS[..]), any::<bool>(), any::<bool>()).prop_map(
        move |(last, scope, kind, drops, all)| {
            (Frontend { address: address(family, 96, last), port: 80, protocol, scope }, (kind, drops, all))
        },
    )
}

fn port_plan(family: IpFamily, protocol: Protocol) -> impl Strategy<Value = PortPlan> {
    let backend = (1u8..8, 80u16..82, facts());
    let backends = prop::collection::vec(backend, 0..7);
    let frontends = prop::collection::btree_map(1u8..3, frontend_plan(family, protocol), 0..4);
    (backends, frontends, 0u32..2).prop_map(move |(backends, frontends, affinity_secs)| {
        let backends: BTreeMap<_, _> = backends
            .into_iter()
            .map(|(last, port, facts)| (BackendAddress { address: address(family, 1, last), port }, facts))
            .collect();
        // Some frontends may use the local endpoints only, as with a traffic policy.
        let slots = |all: bool| backends.iter().filter(|(_, f)| all || f.local).map(|(at, _)| *at).collect();
        let frontends = frontends
            .into_values()
            .map(|(frontend, (kind, drop_when_empty, all))| {
                (frontend, FrontendPlan { kind, slots: slots(all), drop_when_empty })
            })
            .collect();
        PortPlan { frontends, backends, affinity_secs, algorithm: Algorithm::Random }
    })
}

fn port(service: &'static str) -> impl Strategy<Value = (PortId, PortPlan)> {
    let family = prop_oneof![3 => Just(IpFamily::V4), 1 => Just(IpFamily::V6)];
    let protocol = prop_oneof![3 => Just(Protocol::Tcp), 1 => Just(Protocol::Udp)];
    (prop::sample::select(&["", "x"][..]), family, protocol).prop_flat_map(move |(port, family, protocol)| {
        let id = PortId { protocol, family, ..port_id(service, port) };
        port_plan(family, protocol).prop_map(move |plan| (id.clone(), plan))
    })
}

/// A change of one Service: another plan, or none.
pub fn change() -> impl Strategy<Value = (ServiceName, Option<ServicePlan>)> {
    prop::sample::select(&["a", "b", "c", "d"][..]).prop_flat_map(|service| {
        let plan = (prop::collection::vec(port(service), 0..3), 1i64..3).prop_map(|(ports, created)| {
            ServicePlan { ports: ports.into_iter().collect(), created, problems: Vec::new() }
        });
        prop::option::weighted(0.8, plan).prop_map(move |plan| (name(service), plan))
    })
}

/// A Service and its plan from now on.
pub type Change = (ServiceName, Option<ServicePlan>);

/// Changes that come together, and the milliseconds before them.
pub fn history(length: usize) -> impl Strategy<Value = Vec<(Vec<Change>, u64)>> {
    let pause = prop_oneof![3 => 0u64..500, 2 => 900u64..3_000, 1 => 55_000u64..130_000];
    prop::collection::vec((prop::collection::vec(change(), 0..3), pause), 1..length)
}
