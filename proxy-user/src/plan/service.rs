//! The plan of one Service.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use proxy_common::select::Algorithm;

use crate::model::net::IpFamily;
use crate::model::{Cluster, Service, ServiceKind, ServiceName, ServicePort, TrafficPolicy};

use super::access::{Allowed, allowed};
use super::candidates::{Candidates, is_local, merge};
use super::eligible::{Wanted, eligible};
use super::frontend::frontends;
use super::{BackendFacts, HealthCheck, PortId, PortPlan, Problem, ServicePlan};

/// How Services are planned, as far as that is a matter of taste.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanSettings {
    /// A family that `loadBalancerSourceRanges` says nothing about is closed (`--source-ranges-strict`).
    pub strict_source_ranges: bool,
    /// External addresses of Services are passed over (kube-proxy's feature `AllowServiceExternalIPs`, off).
    pub no_external_ips: bool,
    /// Clients have affinity to endpoints also where a Service asks for none (schedulers `sh` and `mh` of kube-proxy's
    /// ipvs mode).
    pub source_affinity: bool,
}

/// Seconds of affinity where only the settings ask for it: the API's default.
const SOURCE_AFFINITY: u32 = 10_800;

/// Plans one Service as this node should serve it; `None` if there is no such Service.
///
/// The work is linear in the ports and endpoints of this Service, whatever else the cluster holds.
pub fn plan_service(cluster: &Cluster, name: &ServiceName, settings: PlanSettings) -> Option<ServicePlan> {
    let service = known(cluster.service(name)?, settings);
    let service = &*service;
    let mut plan = ServicePlan {
        created: service.created,
        problems: service.problems.clone(),
        addresses: service.cluster_ips.iter().copied().collect(),
        ..ServicePlan::default()
    };
    plan.problems.extend(cluster.slices(name).flat_map(|slice| slice.problems.iter().cloned()));
    plan.problems.extend(overlaps(cluster, service));
    let families: BTreeSet<IpFamily> = service.cluster_ips.iter().copied().map(IpFamily::of).collect();
    let mut ready = BTreeMap::new();
    for family in families {
        let allowed = allowed(service, family, settings.strict_source_ranges, cluster.host_addresses());
        plan.problems.extend(allowed.problem.clone());
        let ready: &mut BTreeSet<IpAddr> = ready.entry(family).or_default();
        for port in &service.ports {
            let id = PortId {
                namespace: name.namespace.clone(),
                name: name.name.clone(),
                port: port.name.clone(),
                protocol: port.protocol,
                family,
            };
            let node = &cluster.node().name;
            let candidates = merge(cluster.slices(name), &port.name, port.protocol, family, node);
            let here = candidates.iter().filter(|(_, endpoint)| endpoint.ready && is_local(endpoint, node));
            ready.extend(here.map(|(at, _)| at.address));
            plan.ports.insert(id, plan_port(cluster, service, port, family, &candidates, &allowed));
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

/// The Service without what the settings shut out, and with what they add.
fn known(service: &Service, settings: PlanSettings) -> Cow<'_, Service> {
    let mut known = Cow::Borrowed(service);
    if settings.no_external_ips && !service.external_ips.is_empty() {
        known.to_mut().external_ips.clear();
    }
    if settings.source_affinity && service.affinity_secs == 0 {
        known.to_mut().affinity_secs = SOURCE_AFFINITY;
    }
    known
}

/// Cluster addresses that are somebody else's as well: whoever dials these gets the Service instead.
fn overlaps(cluster: &Cluster, service: &Service) -> Vec<Problem> {
    let what = |address: &IpAddr| {
        if cluster.host_addresses().any(|own| own == address) {
            return Some("an address of this node");
        }
        let is_pods = cluster.node().pod_cidrs.iter().any(|range| range.contains(address));
        is_pods.then_some("in the range of this node's pods")
    };
    let report = |address: &IpAddr| {
        Some(Problem {
            object: format!("Service {}", service.name),
            field: "spec.clusterIPs".to_owned(),
            message: format!(
                "{address} is also {}; ranges of Services, pods and nodes must not overlap",
                what(address)?
            ),
        })
    };
    service.cluster_ips.iter().filter_map(report).collect()
}

fn plan_port(
    cluster: &Cluster,
    service: &Service,
    port: &ServicePort,
    family: IpFamily,
    candidates: &Candidates<'_>,
    allowed: &Allowed,
) -> PortPlan {
    let node = cluster.node();
    let wanted = Wanted::new(
        service.internal_policy == TrafficPolicy::Local,
        service.external_policy == TrafficPolicy::Local,
        service.is_external(port),
    );
    let eligible = eligible(candidates, wanted, node);
    PortPlan {
        frontends: frontends(service, port, family, &eligible, allowed.access),
        backends: candidates
            .iter()
            .filter(|(_, endpoint)| endpoint.is_serving())
            .map(|(address, endpoint)| {
                let facts = BackendFacts {
                    local: is_local(endpoint, &node.name),
                    terminating: endpoint.terminating,
                    in_cluster: eligible.cluster.binary_search(address).is_ok(),
                    in_local: eligible.local.binary_search(address).is_ok(),
                };
                (*address, facts)
            })
            .collect(),
        affinity_secs: service.affinity_secs,
        algorithm: Algorithm::Random,
        source_ranges: allowed.ranges.clone(),
    }
}

#[cfg(test)]
mod tests;
