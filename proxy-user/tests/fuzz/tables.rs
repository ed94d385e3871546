//! Translates a scenario to the writes with which the agent fills the maps.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use proxy_common::backend::{
    BACKEND_ACTIVE, BACKEND_GONE, BACKEND_IN_CLUSTER, BACKEND_IN_LOCAL, BACKEND_LOCAL, BACKEND_TUNNEL_SHIFT,
};
use proxy_common::config::{
    CONFIG_DETECT_LOCAL, CONFIG_DSR, CONFIG_MASQUERADE_ALL, CONFIG_OTHER_PROXY, NodeConfig, PortRange,
};
use proxy_common::maglev;
use proxy_common::node::{DEVICE_UPLINK, NODE_ADDR_INTERNAL, NODE_ADDR_OWN, NODE_ADDR_PORTS, mac};
use proxy_common::prefilter::{Role, position};
use proxy_common::service::{
    KIND_ADDRESS, KIND_CLUSTER_IP, KIND_EXTERNAL_IP, KIND_LOAD_BALANCER, KIND_NODE_PORT, KIND_UNMANAGED,
    SCOPE_EXTERNAL, SCOPE_INTERNAL, SERVICE_DROP_WHEN_EMPTY, SERVICE_DSR, SERVICE_EJECTS, SERVICE_LOCAL,
    SERVICE_MAGLEV_OUTSIDE, SERVICE_SCOPED, SERVICE_SOURCE_RANGES, ServiceEntry,
};
use proxy_core::plan::BackendAddress;
use proxy_core::plan::maglev::{Member, packed};
use proxy_core::store::{
    Backend, ConfigRow, FrontendKey, MaglevRow, MaglevTable, NodeFamily, NodeRow, Table, TunnelRow, Write,
};

use crate::forge::MACS;
use crate::scenario::{ENDPOINTS, Kind, Location, Scenario, Service, address};

/// Number of the other node in `tunnels`.
const NUMBER: u32 = 1;

/// Returns the writes for the node. `uplink`: index of the device that leads outside.
pub fn node(scenario: &Scenario, uplink: u32) -> Vec<Write> {
    let mut writes = vec![
        Write::Device(uplink, DEVICE_UPLINK | mac(MACS[0])),
        Write::Config(Box::new(ConfigRow(NodeConfig {
            flags: u32::from(scenario.masquerade_all) * CONFIG_MASQUERADE_ALL
                + u32::from(scenario.knows_pods) * CONFIG_DETECT_LOCAL
                + u32::from(scenario.other_proxy) * CONFIG_OTHER_PROXY
                + u32::from(scenario.dsr.is_some()) * CONFIG_DSR,
            snat: scenario.snat.map(|(first, last)| PortRange::new(first, last)),
            dsr_flow_rate: u32::from(scenario.limits_flows),
            uplinks: [uplink, 0, 0],
            macs: [mac(MACS[0]), 0, 0],
            ..ConfigRow::default().0
        }))),
    ];
    writes.extend(addresses(scenario));
    let row = match (pods(scenario.is_v6), range(scenario.is_v6)) {
        (IpNet::V6(pods), IpNet::V6(range)) => {
            let source = scenario
                .source()
                .and_then(|source| if let IpAddr::V6(ip) = source { Some(ip) } else { None });
            NodeRow::V6(row(scenario, source, pods, range))
        }
        (IpNet::V4(pods), IpNet::V4(range)) => {
            let source = scenario
                .source()
                .and_then(|source| if let IpAddr::V4(ip) = source { Some(ip) } else { None });
            NodeRow::V4(row(scenario, source, pods, range))
        }
        _ => unreachable!("one family"),
    };
    writes.push(Write::Node(Box::new(row)));
    writes.extend(unmanaged(scenario));
    writes
}

/// Returns the writes for the addresses of the nodes, and for the other node, to which packets are encapsulated.
pub fn addresses(scenario: &Scenario) -> Vec<Write> {
    let internal = if scenario.dsr.is_some() { NODE_ADDR_INTERNAL } else { 0 };
    let mut writes = Vec::new();
    for is_v6 in [false, true] {
        let of = |location| address(is_v6, location);
        let own = NODE_ADDR_PORTS | NODE_ADDR_OWN;
        writes.push(Write::NodeAddr(of(Location::Node), own | internal));
        writes.push(Write::NodeAddr(of(Location::NodeToo), own));
        writes.push(Write::NodeAddr(of(Location::OtherNode), internal));
    }
    let tunnel = |is_v6| TunnelRow {
        addr: address(is_v6, Location::OtherNode),
        source: address(is_v6, Location::Node),
    };
    writes.push(Write::Tunnel(NUMBER, scenario.dsr.map(tunnel)));
    writes
}

/// The range of pods' addresses.
pub fn pods(is_v6: bool) -> IpNet {
    if is_v6 { "fd00:244::/32".parse().unwrap() } else { "10.244.0.0/16".parse().unwrap() }
}

/// The range of Service addresses.
pub fn range(is_v6: bool) -> IpNet {
    if is_v6 { "fd00:96::/32".parse().unwrap() } else { "10.96.0.0/16".parse().unwrap() }
}

/// Returns the write for the unmanaged address.
pub fn unmanaged(scenario: &Scenario) -> Option<Write> {
    scenario.unmanaged.map(|addr| {
        let key = address_key(addr);
        let entry = ServiceEntry { tag: key.tag(), kind: KIND_UNMANAGED, ..ServiceEntry::default() };
        Write::Service(key, entry)
    })
}

/// Returns the writes that remove what [`node`] wrote and the next case does not overwrite.
pub fn no_node(scenario: &Scenario) -> Vec<Write> {
    scenario.unmanaged.map(|addr| Write::NoService(address_key(addr))).into_iter().collect()
}

/// Returns the key of an entry for an address as a whole.
fn address_key(addr: IpAddr) -> FrontendKey {
    FrontendKey { addr, port: 0, proto: 0, scope: SCOPE_INTERNAL }
}

/// Returns the row of the node in one family.
fn row<A, N>(scenario: &Scenario, source: Option<A>, pods: N, range: N) -> NodeFamily<A, N> {
    NodeFamily {
        source,
        pods: scenario.knows_pods.then_some(pods),
        service_cidrs: scenario.knows_range.then_some(range).into_iter().collect(),
        sources: Vec::new(),
        ipsec: Vec::new(),
        routes_by_mark: false,
    }
}

/// Returns the prefilter bit of an address, port and protocol, as a word and a mask.
fn filter(role: Role, addr: SocketAddr, proto: u8) -> (u32, u64) {
    match addr.ip() {
        IpAddr::V4(ip) => position(role, &ip.octets(), addr.port(), proto),
        IpAddr::V6(ip) => position(role, &ip.octets(), addr.port(), proto),
    }
}

/// Number of words for a Maglev table of [`ENDPOINTS`] endpoints.
const TABLE: u32 = 140;

/// Word at which the previous tables begin.
const PREVIOUS: u32 = 4_096;

/// Returns the extent of a Service for a policy: its first slot, and the ids in the slots.
fn extent(service: &Service, is_local: bool) -> (u32, Vec<u32>) {
    let base = (service.id * 2 + u32::from(is_local)) * ENDPOINTS;
    (base, service.extent(is_local).map(|endpoint| endpoint.id).collect())
}

fn key(service: &Service, scope: u8) -> FrontendKey {
    FrontendKey { addr: service.frontend.ip(), port: service.frontend.port(), proto: service.proto, scope }
}

/// Returns the addresses and ports on which a frontend answers.
fn frontends(scenario: &Scenario, service: &Service) -> Vec<SocketAddr> {
    let port = service.frontend.port();
    match service.kind {
        Kind::NodePort => scenario.node_addresses().map(|addr| SocketAddr::new(addr, port)).to_vec(),
        _ => vec![service.frontend],
    }
}

/// Returns the writes for a Service, in the agent's order.
pub fn service(scenario: &Scenario, service: &Service) -> Vec<Write> {
    let mut writes = Vec::new();
    for endpoint in &service.endpoints {
        let local = if endpoint.is_local { BACKEND_LOCAL | BACKEND_IN_LOCAL } else { 0 };
        let has_tunnel = scenario.dsr.is_some() && endpoint.has_tunnel;
        let tunnel = if has_tunnel { NUMBER << BACKEND_TUNNEL_SHIFT } else { 0 };
        let row = Backend {
            addr: endpoint.addr.ip(),
            port: endpoint.addr.port(),
            proto: service.proto,
            state: if endpoint.serves { BACKEND_ACTIVE } else { BACKEND_GONE },
            service: service.id,
            flags: BACKEND_IN_CLUSTER | local | tunnel,
        };
        writes.push(Write::Backend(endpoint.id, row));
        let (word, mask) = filter(Role::Backend, endpoint.addr, service.proto);
        writes.push(Write::PrefilterSet(word, mask));
    }
    for addr in frontends(scenario, service) {
        let (word, mask) = filter(Role::Frontend, addr, service.proto);
        writes.push(Write::PrefilterSet(word, mask));
    }
    for addr in service.allowed.iter().flatten() {
        writes.push(Write::SourceRange(service.id, IpNet::from(*addr)));
    }
    for is_local in [false, true] {
        let (base, ids) = extent(service, is_local);
        writes.push(Write::Slots(base, ids.clone()));
        let members: Vec<Member> = service
            .extent(is_local)
            .map(|one| Member {
                at: BackendAddress { address: one.addr.ip(), port: one.addr.port() },
                weight: 1,
                id: one.id,
            })
            .collect();
        let index = maglev::index(service.id, is_local);
        let previous: Vec<_> = service
            .previous_endpoint(is_local)
            .filter(|_| scenario.dsr.is_some())
            .map(|one| {
                let at = BackendAddress { address: one.addr.ip(), port: one.addr.port() };
                let base = PREVIOUS + index * TABLE;
                writes.push(Write::MaglevTable(base, packed(&[Member { at, weight: 1, id: one.id }])));
                MaglevTable { base, words: 0, signature: 0 }
            })
            .into_iter()
            .collect();
        // Every fourth Service has no table, although it could have one.
        if members.is_empty() || !service.has_table() {
            writes.push(Write::MaglevIndex(index, MaglevRow { previous, ..MaglevRow::default() }));
        } else {
            let words = packed(&members);
            let base = 1 + index * TABLE;
            assert!(words.len() <= TABLE as usize);
            writes.push(Write::MaglevTable(base, words));
            let current = MaglevTable { base, words: 0, signature: 0 };
            writes.push(Write::MaglevIndex(index, MaglevRow { current, previous }));
        }
    }
    let outside = service.is_scoped().then_some((SCOPE_EXTERNAL, service.is_local_outside));
    for (scope, is_local) in outside.into_iter().chain([(SCOPE_INTERNAL, service.is_local_inside)]) {
        let key = key(service, scope);
        writes.push(Write::Service(key, entry(scenario, service, key.tag(), is_local)));
    }
    if service.kind == Kind::ClusterIp {
        let key = address_key(service.frontend.ip());
        writes.push(Write::Service(
            key,
            ServiceEntry { tag: key.tag(), kind: KIND_ADDRESS, ..ServiceEntry::default() },
        ));
    }
    writes
}

fn entry(scenario: &Scenario, service: &Service, tag: u32, is_local: bool) -> ServiceEntry {
    let (slot_base, slots) = extent(service, is_local);
    let flags = [
        (SERVICE_SCOPED, service.is_scoped()),
        (SERVICE_LOCAL, is_local),
        (SERVICE_DROP_WHEN_EMPTY, service.drops_when_empty(is_local)),
        (SERVICE_SOURCE_RANGES, service.allowed.is_some()),
        (SERVICE_EJECTS, service.ejects()),
        (SERVICE_DSR, scenario.is_dsr(service)),
        (SERVICE_MAGLEV_OUTSIDE, service.id.is_multiple_of(2)),
    ];
    ServiceEntry {
        tag,
        id: service.id,
        slot_base,
        slot_count: slots.len() as u32,
        affinity_secs: service.affinity,
        flags: flags.iter().filter(|(_, is)| *is).fold(0, |all, (bit, _)| all | bit),
        // One number is not an algorithm: selection is random then.
        algorithm: (service.id % 11) as u8,
        kind: match service.kind {
            Kind::ClusterIp => KIND_CLUSTER_IP,
            Kind::NodePort => KIND_NODE_PORT,
            Kind::LoadBalancer => KIND_LOAD_BALANCER,
            Kind::ExternalIp => KIND_EXTERNAL_IP,
        },
        ranges: service.id,
    }
}

/// Returns the writes that remove the endpoints and source ranges of Services that no longer exist.
pub fn gone(old: &Scenario, new: &Scenario) -> Vec<Write> {
    let table = if old.is_v6 { Table::Backends6 } else { Table::Backends };
    let mut writes = Vec::new();
    for service in &old.services {
        if new.services.iter().all(|other| other.id != service.id) {
            writes.extend(service.endpoints.iter().map(|endpoint| Write::NoBackend(endpoint.id, table)));
            let allowed = service.allowed.iter().flatten();
            writes.extend(allowed.map(|addr| Write::NoSourceRange(service.id, IpNet::from(*addr))));
        }
    }
    writes
}

/// Returns the writes that remove what [`service`] wrote.
pub fn no_service(scenario: &Scenario, service: &Service) -> Vec<Write> {
    let mut writes = Vec::new();
    for scope in [SCOPE_INTERNAL, SCOPE_EXTERNAL] {
        writes.push(Write::NoService(key(service, scope)));
    }
    if service.kind == Kind::ClusterIp {
        writes.push(Write::NoService(address_key(service.frontend.ip())));
    }
    for addr in service.allowed.iter().flatten() {
        writes.push(Write::NoSourceRange(service.id, IpNet::from(*addr)));
    }
    for endpoint in &service.endpoints {
        let table = if scenario.is_v6 { Table::Backends6 } else { Table::Backends };
        writes.push(Write::NoBackend(endpoint.id, table));
        let (word, mask) = filter(Role::Backend, endpoint.addr, service.proto);
        writes.push(Write::PrefilterClear(word, mask));
    }
    for addr in frontends(scenario, service) {
        let (word, mask) = filter(Role::Frontend, addr, service.proto);
        writes.push(Write::PrefilterClear(word, mask));
    }
    writes
}
