//! The frontends of a Service port, and the endpoints of each.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proxy_common::reason::Verdict;

use crate::model::net::IpFamily;
use crate::model::{Service, ServicePort, SortedMap, TrafficPolicy};

use super::usable::UsableEndpoints;
use super::{Access, Frontend, FrontendKind, FrontendPlan, Scope};

/// Returns the frontends of one Service port in one family. A family without endpoints has frontends, too: they refuse
/// connections. `access`: which clients may use the frontends of a load balancer; `dsr`: whether packets of clients outside
/// are encapsulated.
///
/// An address that the Service has twice gets the first applicable kind: cluster address, load balancer, external address.
/// So an external address does not open an address that a load balancer's source ranges close.
pub fn frontends(
    service: &Service,
    port: &ServicePort,
    family: IpFamily,
    usable: &UsableEndpoints,
    access: Access,
    dsr: bool,
) -> SortedMap<Frontend, FrontendPlan> {
    let mut all = BTreeMap::new();
    for (kind, address, number) in frontend_addresses(service, port, family) {
        let frontend = Frontend { address, port: number, protocol: port.protocol, scope: Scope::Internal };
        if all.contains_key(&frontend) {
            continue;
        }
        let access = if kind == FrontendKind::LoadBalancer { access } else { Access::Unrestricted };
        let scoped = kind != FrontendKind::ClusterIp && service.external_policy == TrafficPolicy::Local;
        // At a cluster address, the internal policy applies to every client. At other addresses, the external policy
        // applies to clients outside only; clients inside may use any endpoint.
        let policy =
            if kind == FrontendKind::ClusterIp { service.internal_policy } else { TrafficPolicy::Cluster };
        // With policy Local, clients outside never use an endpoint on another node.
        let dsr = dsr && kind != FrontendKind::ClusterIp && !scoped;
        all.insert(frontend, FrontendPlan { scoped, access, dsr, ..under_policy(kind, policy, usable) });
        if scoped {
            let mut outside = under_policy(kind, TrafficPolicy::Local, usable);
            // The routes of a node port's addresses lead to this node.
            if service.passes_when_empty && usable.local.is_empty() && kind != FrontendKind::NodePort {
                outside.when_empty = Verdict::Pass;
            }
            all.insert(Frontend { scope: Scope::External, ..frontend }, FrontendPlan { access, ..outside });
        }
    }
    all.into_iter().collect()
}

/// Returns the kind, address and port of each frontend.
fn frontend_addresses(
    service: &Service,
    port: &ServicePort,
    family: IpFamily,
) -> impl Iterator<Item = (FrontendKind, IpAddr, u16)> {
    let any: IpAddr = match family {
        IpFamily::V4 => Ipv4Addr::UNSPECIFIED.into(),
        IpFamily::V6 => Ipv6Addr::UNSPECIFIED.into(),
    };
    let (number, node_port) = (port.port, port.node_port);
    let of = move |kind, addresses: &[IpAddr]| {
        let of_family = |address: &&IpAddr| IpFamily::of(**address) == family;
        addresses.iter().filter(of_family).map(|address| (kind, *address, number)).collect::<Vec<_>>()
    };
    let node_ports = (node_port != 0).then_some((FrontendKind::NodePort, any, node_port));
    of(FrontendKind::ClusterIp, &service.cluster_ips)
        .into_iter()
        .chain(of(FrontendKind::LoadBalancer, &service.load_balancer_ips))
        .chain(of(FrontendKind::ExternalIp, &service.external_ips))
        .chain(node_ports)
}

/// Returns the plan of a frontend with the endpoints that the policy allows. If the policy is Local and only other nodes
/// could serve, packets are dropped: a refusal would tell the client that there is no endpoint
/// (`pkg/proxy/iptables/proxier.go`).
fn under_policy(kind: FrontendKind, policy: TrafficPolicy, usable: &UsableEndpoints) -> FrontendPlan {
    match policy {
        TrafficPolicy::Cluster => {
            FrontendPlan { slots: usable.slots(&usable.cluster), ..FrontendPlan::new(kind) }
        }
        TrafficPolicy::Local => FrontendPlan {
            policy,
            slots: usable.slots(&usable.local),
            when_empty: if usable.local.is_empty() && usable.has_any {
                Verdict::Drop
            } else {
                Verdict::Reject
            },
            ..FrontendPlan::new(kind)
        },
    }
}
