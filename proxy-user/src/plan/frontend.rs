//! What clients dial, and where each of these addresses leads.

use std::collections::BTreeMap;

use crate::model::net::IpFamily;
use crate::model::{Service, ServicePort, TrafficPolicy};

use super::eligible::Eligible;
use super::{Frontend, FrontendKind, FrontendPlan, Scope};

/// The frontends of one Service port in one family. A family without endpoints has its frontends all the same:
/// they refuse.
pub fn frontends(
    service: &Service,
    port: &ServicePort,
    family: IpFamily,
    eligible: &Eligible,
) -> BTreeMap<Frontend, FrontendPlan> {
    cluster_ips(service, port, family, eligible).collect()
}

/// A cluster address is dialled inside the cluster, whoever dials it: the internal policy decides.
fn cluster_ips(
    service: &Service,
    port: &ServicePort,
    family: IpFamily,
    eligible: &Eligible,
) -> impl Iterator<Item = (Frontend, FrontendPlan)> {
    service.cluster_ips.iter().filter(move |address| IpFamily::of(**address) == family).map(move |address| {
        let frontend =
            Frontend { address: *address, port: port.port, protocol: port.protocol, scope: Scope::Internal };
        (frontend, under_policy(FrontendKind::ClusterIp, service.internal_policy, eligible))
    })
}

/// The set that the policy allows. Where it is Local and only other nodes could serve, packets are dropped: a
/// refusal would tell the client that nobody serves (`pkg/proxy/iptables/proxier.go`).
fn under_policy(kind: FrontendKind, policy: TrafficPolicy, eligible: &Eligible) -> FrontendPlan {
    match policy {
        TrafficPolicy::Cluster => {
            FrontendPlan { kind, slots: eligible.cluster.clone(), drop_when_empty: false }
        }
        TrafficPolicy::Local => FrontendPlan {
            kind,
            slots: eligible.local.clone(),
            drop_when_empty: eligible.local.is_empty() && eligible.has_any,
        },
    }
}
