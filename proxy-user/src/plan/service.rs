//! The plan of one Service.

use std::collections::BTreeSet;

use proxy_common::select::Algorithm;

use crate::model::net::IpFamily;
use crate::model::{Cluster, NodeView, Service, ServiceName, ServicePort, TrafficPolicy};

use super::candidates::{is_local, merge};
use super::eligible::{Wanted, eligible};
use super::frontend::frontends;
use super::{BackendFacts, PortId, PortPlan, ServicePlan};

/// Plans one Service as `node` should serve it; `None` if there is no such Service.
///
/// The work is linear in the ports and endpoints of this Service, whatever else the cluster holds.
pub fn plan_service(cluster: &Cluster, name: &ServiceName, node: &NodeView) -> Option<ServicePlan> {
    let service = cluster.service(name)?;
    let mut plan = ServicePlan {
        created: service.created,
        problems: service.problems.clone(),
        ..ServicePlan::default()
    };
    plan.problems.extend(cluster.slices(name).flat_map(|slice| slice.problems.iter().cloned()));
    let families: BTreeSet<IpFamily> = service.cluster_ips.iter().copied().map(IpFamily::of).collect();
    for port in &service.ports {
        for family in &families {
            let id = PortId {
                namespace: name.namespace.clone(),
                name: name.name.clone(),
                port: port.name.clone(),
                protocol: port.protocol,
                family: *family,
            };
            plan.ports.insert(id, plan_port(cluster, service, port, *family, node));
        }
    }
    Some(plan)
}

fn plan_port(
    cluster: &Cluster,
    service: &Service,
    port: &ServicePort,
    family: IpFamily,
    node: &NodeView,
) -> PortPlan {
    let candidates = merge(cluster.slices(&service.name), &port.name, port.protocol, family, &node.name);
    let wanted = Wanted::new(
        service.internal_policy == TrafficPolicy::Local,
        service.external_policy == TrafficPolicy::Local,
        service.is_external(port),
    );
    let eligible = eligible(&candidates, wanted, node);
    PortPlan {
        frontends: frontends(service, port, family, &eligible),
        backends: candidates
            .iter()
            .filter(|(_, endpoint)| endpoint.is_serving())
            .map(|(address, endpoint)| {
                let facts =
                    BackendFacts { local: is_local(endpoint, &node.name), terminating: endpoint.terminating };
                (*address, facts)
            })
            .collect(),
        affinity_secs: service.affinity_secs,
        algorithm: Algorithm::Random,
    }
}

#[cfg(test)]
mod tests;
