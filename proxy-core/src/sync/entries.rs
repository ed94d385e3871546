//! Converts plans to map entries.

use std::collections::BTreeSet;

use proxy_common::backend::{
    BACKEND_ACTIVE, BACKEND_IN_CLUSTER, BACKEND_IN_LOCAL, BACKEND_LOCAL, BACKEND_TERMINATING,
    BACKEND_TUNNEL_SHIFT, BACKEND_WEIGHT_SHIFT,
};
use proxy_common::maglev;
use proxy_common::reason::Verdict;
use proxy_common::select::Algorithm;
use proxy_common::service::{
    KIND_CLUSTER_IP, KIND_EXTERNAL_IP, KIND_LOAD_BALANCER, KIND_NODE_PORT, SCOPE_EXTERNAL, SCOPE_INTERNAL,
    SERVICE_CHANGING, SERVICE_CHANGING_NODE, SERVICE_DROP_WHEN_EMPTY, SERVICE_DSR, SERVICE_EJECTS,
    SERVICE_LOCAL, SERVICE_MAGLEV_OUTSIDE, SERVICE_NO_SOCKETS, SERVICE_NODE_ALLOWED, SERVICE_PASS_WHEN_EMPTY,
    SERVICE_REBALANCES, SERVICE_RECENT, SERVICE_SCOPED, SERVICE_SOURCE_RANGES, ServiceEntry,
};

use crate::model::TrafficPolicy;
use crate::model::net::Protocol;
use crate::plan::devices::bits;
use crate::plan::weights;
use crate::plan::{
    Access, BackendAddress, BackendFacts, Changing, Frontend, FrontendKind, FrontendPlan, PortPlan, Scope,
    ServicePortName,
};
use crate::store::{Backend, FrontendKey};

/// Returns the key of a frontend in the maps.
pub(super) fn frontend_key(frontend: &Frontend) -> FrontendKey {
    FrontendKey {
        addr: frontend.address,
        port: frontend.port,
        proto: frontend.protocol.number(),
        scope: match frontend.scope {
            Scope::Internal => SCOPE_INTERNAL,
            Scope::External => SCOPE_EXTERNAL,
        },
    }
}

/// Returns the row of an active backend. `tunnel`: the number of its node's address in `tunnels`, or 0.
pub(super) fn backend_row(
    service: u32,
    port: &ServicePortName,
    at: &BackendAddress,
    facts: BackendFacts,
    tunnel: u32,
) -> Backend {
    let flags = bits([
        (facts.local, BACKEND_LOCAL),
        (facts.terminating, BACKEND_TERMINATING),
        (facts.in_cluster, BACKEND_IN_CLUSTER),
        (facts.in_local, BACKEND_IN_LOCAL),
    ]) | u32::from(facts.share()) << BACKEND_WEIGHT_SHIFT
        | tunnel << BACKEND_TUNNEL_SHIFT;
    let proto = port.protocol.number();
    Backend { addr: at.address, port: at.port, proto, state: BACKEND_ACTIVE, service, flags }
}

/// Returns the entry of a frontend, without the extent of its slots and the id of its source ranges.
pub(super) fn service_entry(
    service: u32,
    key: &FrontendKey,
    port: &PortPlan,
    frontend: &FrontendPlan,
    is_own_endpoint: bool,
) -> ServiceEntry {
    ServiceEntry {
        tag: key.tag(),
        id: service,
        slot_base: 0,
        slot_count: 0,
        affinity_secs: port.affinity_secs,
        ranges: 0,
        flags: bits([
            (frontend.when_empty == Verdict::Drop, SERVICE_DROP_WHEN_EMPTY),
            (frontend.when_empty == Verdict::Pass, SERVICE_PASS_WHEN_EMPTY),
            (frontend.scoped, SERVICE_SCOPED),
            (frontend.dsr, SERVICE_DSR),
            (frontend.policy == TrafficPolicy::Local, SERVICE_LOCAL),
            (frontend.access != Access::Unrestricted, SERVICE_SOURCE_RANGES),
            (is_maglev_outside(port, frontend), SERVICE_MAGLEV_OUTSIDE),
            // Also with one endpoint: the programs record its answers; an endpoint that joins later has no record yet.
            (port.ejects, SERVICE_EJECTS),
            (
                is_own_endpoint || port.changing != Changing::No && port.slot_count(frontend) > 1,
                SERVICE_CHANGING,
            ),
            (is_left_by_node(port, frontend), SERVICE_CHANGING_NODE),
            (frontend.access == Access::Ranges { node: true }, SERVICE_NODE_ALLOWED),
            (port.no_sockets, SERVICE_NO_SOCKETS),
            (is_rebalanced(port, frontend), SERVICE_REBALANCES),
            // With DSR, packets of connections that other nodes know have no flow, either.
            (frontend.recent && !frontend.dsr, SERVICE_RECENT),
        ]),
        algorithm: port.algorithm as u8,
        kind: match frontend.kind {
            FrontendKind::ClusterIp => KIND_CLUSTER_IP,
            FrontendKind::NodePort => KIND_NODE_PORT,
            FrontendKind::LoadBalancer => KIND_LOAD_BALANCER,
            FrontendKind::ExternalIp => KIND_EXTERNAL_IP,
        },
    }
}

/// Whether the sockets of the node itself are not translated: only at cluster addresses, since the others may be the node's own, and
/// no program sees what the node sends to itself.
fn is_left_by_node(port: &PortPlan, frontend: &FrontendPlan) -> bool {
    port.changing == Changing::All
        && frontend.kind == FrontendKind::ClusterIp
        && port.slot_count(frontend) > 1
}

/// Whether connections by a frontend move to endpoints that have joined: not if a policy keeps clients on this node, since other
/// endpoints do not count for them, and a connection does not show by which scope its endpoint was selected.
fn is_rebalanced(port: &PortPlan, frontend: &FrontendPlan) -> bool {
    let is_for_all = frontend.policy == TrafficPolicy::Cluster && !frontend.scoped;
    port.rebalances && is_for_all && port.slot_count(frontend) > 1
}

/// Whether a frontend uses Maglev for clients outside, whatever its algorithm for clients inside. Clients outside do not use a
/// scoped frontend.
fn is_maglev_outside(port: &PortPlan, frontend: &FrontendPlan) -> bool {
    port.maglev_outside && frontend.kind != FrontendKind::ClusterIp && !frontend.scoped
}

/// Whether a frontend needs a Maglev table. One endpoint needs none.
pub(super) fn needs_table(port: &PortPlan, frontend: &FrontendPlan) -> bool {
    let is_hash = port.algorithm.is_hash() || is_maglev_outside(port, frontend);
    is_hash && (2..=maglev::MAX_BACKENDS as usize).contains(&port.slot_count(frontend))
}

/// An endpoint in an extent of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotMember {
    /// Another node may have selected it, and the program looks for it by its tag in the first slots (DSR).
    pub(super) is_tagged: bool,
    pub(super) id: u32,
    pub(super) weight: u32,
}

/// Returns the slots of endpoints: one slot each, in the order of ids, tagged endpoints first; if the weights differ and the
/// algorithm repeats slots, as many slots as the weight says, evenly spread, after one slot of each tagged endpoint.
pub(super) fn slots(mut endpoints: Vec<SlotMember>, algorithm: Algorithm) -> Vec<u32> {
    endpoints.sort_unstable_by_key(|member| (!member.is_tagged, member.id));
    let is_even = endpoints.windows(2).all(|pair| pair[0].weight == pair[1].weight);
    if is_even || !algorithm.repeats_slots() {
        return endpoints.into_iter().map(|member| member.id).collect();
    }
    let weights: Vec<u32> = endpoints.iter().map(|member| member.weight).collect();
    let spread = weights::slots(&weights);
    let mut slots: Vec<_> = spread.into_iter().filter_map(|at| endpoints.get(at)).collect();
    let mut seen = BTreeSet::new();
    slots.sort_by_cached_key(|member| !(member.is_tagged && seen.insert(member.id)));
    slots.into_iter().map(|member| member.id).collect()
}

/// Returns the frontend of a key; `None` for a key that no plan can have.
pub(super) fn frontend_of(key: &FrontendKey) -> Option<Frontend> {
    let scopes = [Scope::Internal, Scope::External];
    let protocol = Protocol::from_number(key.proto)?;
    let frontends = scopes.map(|scope| Frontend { address: key.addr, port: key.port, protocol, scope });
    frontends.into_iter().find(|frontend| frontend_key(frontend) == *key)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn member(is_tagged: bool, id: u32, weight: u32) -> SlotMember {
        SlotMember { is_tagged, id, weight }
    }

    #[test]
    fn light_tagged_endpoint_has_first_slot() {
        let endpoints = vec![member(true, 1, 1), member(false, 2, 100), member(false, 3, 100)];
        let slots = slots(endpoints, Algorithm::Random);
        assert_eq!((slots[0], slots.len()), (1, 201));
    }

    proptest! {
        #[test]
        fn tagged_endpoints_come_first_and_shares_are_the_weights(
            endpoints in prop::collection::vec((any::<bool>(), 1..=100_u32), 1..120),
        ) {
            let members: Vec<_> =
                (1..).zip(endpoints).map(|(id, (is_tagged, weight))| member(is_tagged, id, weight)).collect();
            let tagged: BTreeSet<u32> = members.iter().filter(|one| one.is_tagged).map(|one| one.id).collect();
            let untagged = members.iter().map(|one| SlotMember { is_tagged: false, ..*one }).collect();
            let (mut with, mut without) =
                (slots(members, Algorithm::Random), slots(untagged, Algorithm::Random));
            prop_assert_eq!(with.iter().take(tagged.len()).copied().collect::<BTreeSet<_>>(), tagged);
            with.sort_unstable();
            without.sort_unstable();
            prop_assert_eq!(with, without);
        }
    }
}
