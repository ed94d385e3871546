//! The contents that the maps should have, derived from the rules of the API without the agent's code; and the contents that
//! they have.
//!
//! Covers only cluster addresses, because the compared cases use no other frontends.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use proxy_user::maps::view::{BackendState, FrontendRowKind};

use crate::agent::{NODE, Node};
use proxy_testbed::kube::api::Api;
use proxy_testbed::kube::control::ADDRESS;
use proxy_testbed::kube::eventually;

/// A frontend as text, like `10.96.0.1:443/TCP`.
pub type OrigDst = String;

/// How connections to a frontend are served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrontendAnswer {
    /// `namespace/name:port`.
    pub name: String,
    /// Endpoints that can be selected.
    pub endpoints: BTreeSet<SocketAddr>,
    /// Timeout of the session affinity, in seconds; 0: no affinity.
    pub affinity: u32,
    /// Whether packets are dropped, without an answer, if no endpoint can be selected.
    pub drops: bool,
    /// All backends of the Service port in this family, whether or not they can be selected.
    pub backends: BTreeMap<SocketAddr, Facts>,
}

/// Properties of a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    pub local: bool,
    pub terminating: bool,
}

/// All frontends.
pub type Table = BTreeMap<OrigDst, FrontendAnswer>;

/// Waits until the maps agree with the API server's objects.
pub fn agree(api: &Api, node: &Node) -> Result<Table> {
    agree_within(proxy_testbed::kube::PATIENCE, api, node)
}

/// Like [`agree`], with another timeout.
pub fn agree_within(patience: Duration, api: &Api, node: &Node) -> Result<Table> {
    eventually(patience, || {
        let wanted = wanted(api)?;
        same(&wanted, &found(node)?)?;
        Ok(wanted)
    })
}

/// Returns an error if the tables differ, with the first five differences.
pub fn same(wanted: &Table, found: &Table) -> Result<()> {
    let keys: BTreeSet<_> = wanted.keys().chain(found.keys()).collect();
    let differences: Vec<_> = keys
        .into_iter()
        .filter(|key| wanted.get(*key) != found.get(*key))
        .map(|key| format!("{key}\n  wanted {:?}\n  found  {:?}", wanted.get(key), found.get(key)))
        .collect();
    let first = differences.iter().take(5).cloned().collect::<Vec<_>>().join("\n");
    ensure!(differences.is_empty(), "{} differences:\n{first}", differences.len());
    Ok(())
}

/// Reads the table from the maps.
pub fn found(node: &Node) -> Result<Table> {
    let maps = node.maps()?;
    let (names, backends) = (maps.names()?, maps.backends()?);
    let mut table = Table::new();
    let mut of_port = BTreeMap::<u32, BTreeMap<SocketAddr, Facts>>::new();
    for row in backends.values().filter(|row| row.state == BackendState::Active) {
        let facts = Facts { local: row.local, terminating: row.terminating };
        let before = of_port.entry(row.service).or_default().insert(row.socket, facts);
        ensure!(before.is_none(), "{} is there twice", row.socket);
    }
    for row in maps.services()?.iter().filter(|row| row.kind == FrontendRowKind::ClusterIp) {
        let name = names.get(&row.service).with_context(|| format!("{row:?} has no name"))?;
        let mut endpoints = BTreeSet::new();
        for id in &row.backends {
            let backend = backends.get(id).with_context(|| format!("{row:?}: there is no backend {id}"))?;
            ensure!(backend.service == row.service, "{row:?}: backend {id} is another's: {backend:?}");
            ensure!(backend.state == BackendState::Active, "{row:?}: backend {id} has gone");
            ensure!(endpoints.insert(backend.socket), "{row:?}: {} is there twice", backend.socket);
        }
        let answer = FrontendAnswer {
            name: name.to_string(),
            endpoints,
            affinity: row.affinity_secs,
            drops: row.when_empty == "drop",
            backends: of_port.get(&row.service).cloned().unwrap_or_default(),
        };
        table.insert(format!("{}/{}", row.socket(), row.protocol), answer);
    }
    // A name may stay in the maps for a while after its Service was removed; an active backend may not.
    let orig_dst: BTreeSet<_> = maps.services()?.iter().map(|row| row.service).collect();
    for (id, backends) in &of_port {
        ensure!(orig_dst.contains(id), "{:?} has no frontend, but has {backends:?}", names.get(id));
    }
    Ok(table)
}

/// Derives the table from the API server's objects.
pub fn wanted(api: &Api) -> Result<Table> {
    let zone = api
        .node(NODE)?
        .and_then(|node| label(&node.metadata, "topology.kubernetes.io/zone").map(str::to_owned));
    let (services, slices) = (api.services()?, api.slices()?);
    let mut by_owner = BTreeMap::<_, Vec<&EndpointSlice>>::new();
    for slice in slices.iter().filter(|slice| label(&slice.metadata, HEADLESS).is_none()) {
        let owner = label(&slice.metadata, "kubernetes.io/service-name").unwrap_or_default();
        by_owner.entry((slice.metadata.namespace.clone(), owner)).or_default().push(slice);
    }
    let mut table = Table::new();
    for service in services.iter().filter(|service| label(&service.metadata, OTHER_PROXY).is_none()) {
        let name = service.metadata.name.as_deref().unwrap_or_default();
        let slices = by_owner.get(&(service.metadata.namespace.clone(), name)).map_or(&[][..], Vec::as_slice);
        add(service, slices, zone.as_deref(), &mut table);
    }
    Ok(table)
}

fn label<'a>(metadata: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    metadata.labels.as_ref()?.get(key).map(String::as_str)
}

/// Label of Services that another proxy serves; it has no effect on slices.
const OTHER_PROXY: &str = "service.kubernetes.io/service-proxy-name";
/// Label of the slices of headless Services; it has no effect on Services.
const HEADLESS: &str = "service.kubernetes.io/headless";

fn add(service: &Service, slices: &[&EndpointSlice], zone: Option<&str>, table: &mut Table) {
    let Some(spec) = service.spec.as_ref().filter(|spec| spec.type_.as_deref() != Some("ExternalName"))
    else {
        return;
    };
    let addresses = spec.cluster_ips.iter().flatten().filter_map(|text| text.parse::<IpAddr>().ok());
    let stays = spec.internal_traffic_policy.as_deref() == Some("Local");
    for address in addresses {
        for port in spec.ports.iter().flatten() {
            let protocol = port.protocol.as_deref().unwrap_or("TCP");
            let name = port.name.as_deref().unwrap_or_default();
            let known = endpoints(slices, address.is_ipv4(), name, protocol);
            let (chosen, drops) = choose(&known, stays, zone);
            let suffix = if name.is_empty() { String::new() } else { format!(":{name}") };
            let meta = &service.metadata;
            let [namespace, service] =
                [&meta.namespace, &meta.name].map(|text| text.as_deref().unwrap_or_default());
            let affinity = spec
                .session_affinity_config
                .as_ref()
                .and_then(|config| config.client_ip.as_ref()?.timeout_seconds);
            let answer = FrontendAnswer {
                name: format!("{namespace}/{service}{suffix}"),
                endpoints: chosen,
                affinity: affinity.unwrap_or_default().cast_unsigned(),
                drops,
                backends: known
                    .iter()
                    .filter(|(_, endpoint)| is_ready(endpoint) || is_serving(endpoint))
                    .map(|(socket, e)| {
                        // An endpoint with the node's address is local even without a node name: its replies need no SNAT.
                        let local = is_local(e) || socket.ip().to_string() == ADDRESS;
                        (*socket, Facts { local, terminating: is_terminating(e) })
                    })
                    .collect(),
            };
            table.insert(
                format!("{}/{protocol}", SocketAddr::new(address, port.port.cast_unsigned() as u16)),
                answer,
            );
        }
    }
}

/// Returns the endpoints of one port, by address. No case lists one address twice with different conditions.
fn endpoints<'a>(
    slices: &[&'a EndpointSlice],
    is_ipv4: bool,
    port: &str,
    protocol: &str,
) -> BTreeMap<SocketAddr, &'a Endpoint> {
    let family = if is_ipv4 { "IPv4" } else { "IPv6" };
    let mut found = BTreeMap::new();
    for slice in slices.iter().filter(|slice| slice.address_type == family) {
        let same = |p: &&k8s_openapi::api::discovery::v1::EndpointPort| {
            p.name.as_deref().unwrap_or_default() == port
                && p.protocol.as_deref().unwrap_or("TCP") == protocol
        };
        for number in slice.ports.iter().flatten().filter(same).filter_map(|port| port.port) {
            for endpoint in &slice.endpoints {
                let address = endpoint.addresses.first().and_then(|text| text.parse::<IpAddr>().ok());
                if let Some(address) = address.filter(|address| !is_special(*address)) {
                    found.insert(SocketAddr::new(address, number.cast_unsigned() as u16), endpoint);
                }
            }
        }
    }
    found
}

/// Whether no pod can have this address. The API server accepts some such addresses.
fn is_special(address: IpAddr) -> bool {
    address.is_multicast() || matches!(address, IpAddr::V4(v4) if v4.is_broadcast())
}

fn is_ready(endpoint: &Endpoint) -> bool {
    endpoint.conditions.as_ref().and_then(|conditions| conditions.ready).unwrap_or(true)
}

fn is_serving(endpoint: &Endpoint) -> bool {
    endpoint.conditions.as_ref().and_then(|conditions| conditions.serving).unwrap_or(true)
}

fn is_terminating(endpoint: &Endpoint) -> bool {
    endpoint.conditions.as_ref().and_then(|conditions| conditions.terminating).unwrap_or(false)
}

fn is_local(endpoint: &Endpoint) -> bool {
    endpoint.node_name.as_deref() == Some(NODE)
}

fn zones(endpoint: &Endpoint) -> BTreeSet<&str> {
    let hints = endpoint.hints.as_ref().and_then(|hints| hints.for_zones.as_deref()).unwrap_or_default();
    hints.iter().map(|zone| zone.name.as_str()).collect()
}

/// Returns the endpoints that can be selected: the ready ones, or the serving-terminating ones if none is ready. With policy
/// Local (`stays`), only those on this node; otherwise only those hinted for `zone`, if every ready endpoint has a hint. Also
/// returns whether packets are dropped, because only other nodes have endpoints.
fn choose(
    known: &BTreeMap<SocketAddr, &Endpoint>,
    stays: bool,
    zone: Option<&str>,
) -> (BTreeSet<SocketAddr>, bool) {
    let usable = |on_node: bool| -> BTreeMap<SocketAddr, &Endpoint> {
        let there = known.iter().filter(|(_, e)| !on_node || is_local(e));
        let all: Vec<_> = there.map(|(socket, endpoint)| (*socket, *endpoint)).collect();
        let pick = |test: fn(&Endpoint) -> bool| {
            all.iter().copied().filter(|(_, e)| test(e)).collect::<BTreeMap<_, _>>()
        };
        let ready = pick(is_ready);
        if ready.is_empty() { pick(|e| is_serving(e) && is_terminating(e)) } else { ready }
    };
    if stays {
        let local: BTreeSet<_> = usable(true).into_keys().collect();
        let drops = local.is_empty() && !usable(false).is_empty();
        return (local, drops);
    }
    let all = usable(false);
    let ready = || known.values().copied().filter(|e| is_ready(e));
    let hinted = ready().all(|e| !zones(e).is_empty());
    let near = |e: &Endpoint| zone.is_some_and(|zone| zones(e).contains(zone));
    if hinted && ready().any(near) {
        return (all.into_iter().filter(|(_, e)| near(e)).map(|(socket, _)| socket).collect(), false);
    }
    (all.into_keys().collect(), false)
}
