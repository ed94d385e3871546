//! The plan of one Service.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use proxy_common::select::Algorithm;

use crate::model::annotations::{Annotation, Annotations};
use crate::model::net::{IpFamily, Protocol};
use crate::model::spread::Weights;
use crate::model::{
    Cluster, Endpoint, ForwardingMode, Problem, RemovalPolicy, Service, ServiceKind, ServiceName,
    ServicePort, TrafficPolicy,
};

use super::access::{Allowed, allowed};
use super::frontend::frontends;
use super::merged::{MergedEndpoints, is_local, merge};
use super::node::source;
use super::rebalance;
use super::tunnels::Tunnels;
use super::usable::{EndpointSets, usable_endpoints};
use super::{
    BackendAddress, BackendFacts, Changing, Frontend, FrontendKind, HealthCheck, PortPlan, Scope,
    ServicePlan, ServicePortName, Unmanaged,
};

/// The operator's settings for the plans of Services.
#[expect(clippy::struct_excessive_bools, reason = "each is a setting of its own, in every combination")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanSettings {
    /// A family without a range in `loadBalancerSourceRanges` is closed (`--source-ranges-strict`).
    pub strict_source_ranges: bool,
    /// The addresses of load balancers and external addresses are known as such, too (`--vip-echo`).
    pub vip_echo: bool,
    /// External addresses of Services are ignored (kube-proxy's feature `AllowServiceExternalIPs`, off).
    pub no_external_ips: bool,
    /// The algorithm of Services that do not set one; `None`: random for clients inside the cluster, Maglev for clients
    /// outside.
    pub algorithm: Option<Algorithm>,
    /// How packets of clients outside reach endpoints on other nodes, if a Service does not set it.
    pub forwarding: ForwardingMode,
    /// The annotations that count; the others are problems.
    pub annotations: Annotations,
    /// Endpoints that fail are not skipped, unless a Service sets it (`--ejection off`).
    pub no_ejection: bool,
    /// The node's address in its family, if the operator sets it ([`NodeSettings::address`]).
    ///
    /// [`NodeSettings::address`]: crate::model::settings::NodeSettings::address
    pub address: Option<IpAddr>,
    /// The addresses of the API servers that the agent uses: no external address may take its connection.
    pub api_servers: &'static [SocketAddr],
}

/// Plans one Service as this node should serve it; `None` if there is no such Service.
///
/// The work is linear in the ports and endpoints of this Service, and does not depend on the rest of the cluster.
pub fn plan_service(cluster: &Cluster, name: &ServiceName, settings: PlanSettings) -> Option<ServicePlan> {
    let all = cluster.service(name)?;
    if all.is_foreign {
        let unmanaged = all.cluster_ips.iter().map(|address| (*address, Unmanaged::Foreign)).collect();
        return Some(ServicePlan { unmanaged, ..ServicePlan::default() });
    }
    let families: BTreeSet<IpFamily> = all.families().collect();
    let (own, ours) = all.cluster_ips.iter().partition(|address| cluster.is_own(address));
    let own: Vec<IpAddr> = own;
    let mut problems = all.problems.clone();
    let service = known(all, ours, settings, &mut problems);
    let service = &*service;
    if let Some(problem) = too_many(service) {
        problems.push(problem);
        return Some(ServicePlan { created: service.created, problems, ..ServicePlan::default() });
    }
    let mut plan = ServicePlan {
        created: service.created,
        problems,
        addresses: answering(service, settings).copied().collect(),
        unmanaged: own.into_iter().map(|address| (address, Unmanaged::Own)).collect(),
        ..ServicePlan::default()
    };
    plan.problems.extend(cluster.slices(name).flat_map(|slice| slice.problems.iter().cloned()));
    plan.problems.extend(overlaps(cluster, service));
    let mut ready = BTreeMap::new();
    for family in families {
        let allowed =
            allowed(service, family, settings.strict_source_ranges, node_ip(cluster, settings, family));
        plan.problems.extend(allowed.problem.clone());
        let ready: &mut BTreeSet<IpAddr> = ready.entry(family).or_default();
        for port in &service.ports {
            let id = ServicePortName {
                namespace: name.namespace.clone(),
                name: name.name.clone(),
                port: port.name.clone(),
                protocol: port.protocol,
                family,
            };
            let node = &cluster.node().name;
            let merged = merge(cluster.slices(name), &port.name, port.protocol, family, node);
            let here = merged.iter().filter(|(_, endpoint)| endpoint.ready && is_local(endpoint, node));
            ready.extend(here.map(|(at, _)| at.address));
            let tunnels = Tunnels::new(cluster, family);
            let mut port = plan_port(cluster, service, port, family, &merged, &allowed, &tunnels);
            plan.problems.extend(keep_api_servers(name, &id, &mut port, settings.api_servers));
            plan.problems.extend(tunnels.problem(service, &port, &merged));
            plan.ports.insert(id, port);
        }
    }
    let is_asked = service.kind == ServiceKind::LoadBalancer
        && service.external_policy == TrafficPolicy::Local
        && service.health_check_node_port != 0;
    plan.health_check = is_asked.then(|| HealthCheck {
        port: service.health_check_node_port,
        local: ready.into_iter().map(|(family, ready)| (family, ready.len())).collect(),
    });
    Some(plan)
}

/// The most combinations of addresses and ports of one Service. More are not even counted against the share of their namespace: a
/// plan takes about 200 bytes of memory for each, also if the Service does not fit.
const COMBINATIONS: usize = 1 << 13;

fn too_many(service: &Service) -> Option<Problem> {
    let addresses = [&service.cluster_ips, &service.external_ips, &service.load_balancer_ips];
    let addresses: usize = addresses.into_iter().map(Vec::len).sum();
    (addresses.saturating_mul(service.ports.len().max(1)) > COMBINATIONS).then(|| Problem {
        object: format!("Service {}", service.name),
        field: "spec".to_owned(),
        message: format!(
            "{addresses} addresses with {} ports are too many for one Service, which may have {COMBINATIONS} frontends: it is \
             not programmed; divide it",
            service.ports.len()
        ),
    })
}

/// Removes external addresses that would take the agent's connection to an API server, so that it could not learn of their removal;
/// returns a problem for each. The addresses of a load balancer come from a controller: the API server may be behind one.
fn keep_api_servers(
    name: &ServiceName,
    id: &ServicePortName,
    plan: &mut PortPlan,
    servers: &[SocketAddr],
) -> Vec<Problem> {
    let mut problems = Vec::new();
    for server in servers.iter().filter(|_| id.protocol == Protocol::Tcp) {
        for scope in [Scope::Internal, Scope::External] {
            let (address, port) = (server.ip(), server.port());
            let frontend = Frontend { address, port, protocol: id.protocol, scope };
            let has = plan.frontends.get(&frontend).is_some_and(|what| what.kind == FrontendKind::ExternalIp);
            if has {
                plan.frontends.remove(&frontend);
            }
            if has && scope == Scope::Internal {
                problems.push(Problem {
                    object: format!("Service {name}"),
                    field: "spec.externalIPs".to_owned(),
                    message: format!(
                        "{address} port {port} (TCP) is not served for {}: the agent reaches the API server there",
                        id.text()
                    ),
                });
            }
        }
    }
    problems
}

/// Returns this node's address in a family, which is the source of its packets.
fn node_ip(cluster: &Cluster, settings: PlanSettings, family: IpFamily) -> Option<IpAddr> {
    source(cluster.node(), cluster.host()?, settings.address, family)
}

/// Returns the Service with these cluster addresses, and with the settings applied.
fn known<'a>(
    service: &'a Service,
    cluster_ips: Vec<IpAddr>,
    settings: PlanSettings,
    problems: &mut Vec<Problem>,
) -> Cow<'a, Service> {
    let mut known = Cow::Borrowed(service);
    for annotation in Annotation::ALL.into_iter().filter(|annotation| !settings.annotations.has(*annotation))
    {
        if ignore(&mut known, annotation) {
            problems.push(Problem {
                object: format!("Service {}", service.name),
                field: format!("metadata.annotations[ballast.io/{}]", annotation.label()),
                message: "it is ignored: the operator's --tenant-annotations does not list it".to_owned(),
            });
        }
    }
    // `cluster_ips` is a part of the list of the Service, in the same order.
    if cluster_ips.len() < service.cluster_ips.len() {
        known.to_mut().cluster_ips = cluster_ips;
    }
    if settings.no_external_ips && !service.external_ips.is_empty() {
        known.to_mut().external_ips.clear();
    }
    if known.forwarding.is_none() && settings.forwarding != ForwardingMode::Snat {
        known.to_mut().forwarding = Some(settings.forwarding);
    }
    if known.ejection.is_none() && settings.no_ejection {
        known.to_mut().ejection = Some(false);
    }
    if known.algorithm.is_none() && settings.algorithm.is_some() {
        known.to_mut().algorithm = settings.algorithm;
    }
    known
}

/// Removes the effect of an annotation; returns whether the Service has it.
fn ignore(service: &mut Cow<'_, Service>, annotation: Annotation) -> bool {
    let has = match annotation {
        Annotation::Algorithm => service.algorithm.is_some(),
        Annotation::Ejection => service.ejection.is_some(),
        Annotation::ExternalFailover => service.passes_when_empty,
        Annotation::ForwardingMode => service.forwarding.is_some(),
        Annotation::Rebalance => service.rebalances,
        Annotation::RemovalPolicy => service.removal != RemovalPolicy::Drain,
        Annotation::SocketLb => service.no_sockets,
        Annotation::Weights => !service.weights.0.is_empty(),
    };
    if has {
        let service = service.to_mut();
        match annotation {
            Annotation::Algorithm => service.algorithm = None,
            Annotation::Ejection => service.ejection = None,
            Annotation::ExternalFailover => service.passes_when_empty = false,
            Annotation::ForwardingMode => service.forwarding = None,
            Annotation::Rebalance => service.rebalances = false,
            Annotation::RemovalPolicy => service.removal = RemovalPolicy::Drain,
            Annotation::SocketLb => service.no_sockets = false,
            Annotation::Weights => service.weights = Weights::default(),
        }
    }
    has
}

/// Returns the addresses that the programs know as addresses of a Service, whatever the port.
fn answering(service: &Service, settings: PlanSettings) -> impl Iterator<Item = &IpAddr> {
    let outside = service.load_balancer_ips.iter().chain(&service.external_ips);
    service.cluster_ips.iter().chain(outside.filter(move |_| settings.vip_echo))
}

/// Returns a problem for each cluster address that may also be a pod's: clients of that pod reach the Service instead.
fn overlaps(cluster: &Cluster, service: &Service) -> Vec<Problem> {
    let is_pods = |address: &&IpAddr| cluster.node().pod_cidrs.iter().any(|range| range.contains(*address));
    let report = |address: &IpAddr| Problem {
        object: format!("Service {}", service.name),
        field: "spec.clusterIPs".to_owned(),
        message: format!(
            "{address} is also in the pod range of this node; ranges of Services, pods and nodes must not overlap"
        ),
    };
    service.cluster_ips.iter().filter(is_pods).map(report).collect()
}

fn plan_port(
    cluster: &Cluster,
    service: &Service,
    port: &ServicePort,
    family: IpFamily,
    merged: &MergedEndpoints<'_>,
    allowed: &Allowed,
    tunnels: &Tunnels<'_>,
) -> PortPlan {
    let node = cluster.node();
    let wanted = EndpointSets::new(
        service.internal_policy == TrafficPolicy::Local,
        service.external_policy == TrafficPolicy::Local,
        service.is_external(port),
    );
    let dsr = service.forwarding.unwrap_or_default().is_dsr(port.protocol);
    let weight = |at: &BackendAddress| merged.get(at).map_or(1, |endpoint| weight(service, endpoint));
    // If all weights are 0, they are ignored: some endpoint has to serve. Weights come before hints: the endpoints that hints leave
    // may all have weight 0.
    let has_weight = |endpoint: &Endpoint| self::weight(service, endpoint) != 0;
    let is_drained = merged.values().any(|endpoint| !has_weight(endpoint))
        && merged.values().any(|endpoint| endpoint.ready && has_weight(endpoint));
    let with_weight = is_drained.then(|| {
        merged.iter().filter(|(_, endpoint)| has_weight(endpoint)).map(|(at, e)| (*at, *e)).collect()
    });
    // Another node has other hints: it may select an endpoint here that this node would not.
    let mut usable = usable_endpoints(merged, with_weight.as_ref().unwrap_or(merged), wanted, dsr, node);
    let local = || usable.local.iter().copied().filter(|at| weight(at) != 0);
    if (1..usable.local.len()).contains(&local().count()) {
        usable.local = local().collect();
    }
    let frontends = frontends(service, port, family, &usable, allowed.access, dsr);
    let has_dsr = frontends.values().any(|frontend| frontend.dsr);
    let is_here = |endpoint: &Endpoint| is_local(endpoint, &node.name) || cluster.is_own(&endpoint.address);
    let elsewhere = merged.iter().filter(|(_, e)| has_dsr && e.is_serving() && !is_here(e));
    PortPlan {
        tunnels: elsewhere.filter_map(|(at, endpoint)| Some((*at, tunnels.to(endpoint)?))).collect(),
        frontends,
        backends: merged
            .iter()
            .filter(|(_, endpoint)| endpoint.is_serving())
            .map(|(address, endpoint)| {
                let facts = BackendFacts {
                    local: is_here(endpoint),
                    terminating: endpoint.terminating,
                    in_cluster: usable.cluster.binary_search(address).is_ok(),
                    in_local: usable.local.binary_search(address).is_ok(),
                    weight: weight(address).max(1),
                    step: 0,
                };
                (*address, facts)
            })
            .collect(),
        affinity_secs: service.affinity_secs,
        algorithm: service.algorithm.unwrap_or_default(),
        maglev_outside: service.algorithm.is_none(),
        // With other protocols, no packet indicates that an endpoint refuses a connection.
        no_sockets: service.no_sockets,
        changing: Changing::No,
        ejects: port.protocol == Protocol::Tcp && service.ejection != Some(false),
        rebalances: port.protocol == Protocol::Tcp && service.rebalances && rebalance::may_move(service),
        // No other protocol has a reset after which the client considers the connection as closed.
        reset_after: service.removal.reset_after().filter(|_| port.protocol == Protocol::Tcp),
        source_ranges: Arc::clone(&allowed.ranges),
    }
}

/// Returns the weight of an endpoint: the weight from its slice takes precedence over the Service's; the default is 1.
fn weight(service: &Service, endpoint: &Endpoint) -> u16 {
    endpoint.weight.or_else(|| service.weights.of(endpoint)).unwrap_or(1)
}

#[cfg(test)]
mod tests;
