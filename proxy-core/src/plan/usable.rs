//! Which endpoints may serve which clients.
//!
//! There are two sets. The *cluster* set is for clients that may use any endpoint: the ready endpoints that topology
//! prefers, or, if there is none, the serving-terminating endpoints. The *local* set is for clients that a policy keeps on
//! this node: its ready endpoints, or, if there is none, its serving-terminating endpoints. The fallback of one set does
//! not depend on the other set, and topology does not affect the local set. The rules are those of `CategorizeEndpoints` in
//! kube-proxy's `pkg/proxy/topology.go`.

use std::sync::Arc;

use crate::model::{Endpoint, NodeView};

use super::BackendAddress;
use super::merged::{MergedEndpoints, is_local};

/// The sets that a Service port needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointSets {
    /// Some clients may use any endpoint.
    pub cluster: bool,
    /// A policy keeps some clients on this node.
    pub local: bool,
}

impl EndpointSets {
    /// Returns the sets that the policies need. The external policy of a port without an external address does not matter.
    /// A port with an external address needs the cluster set even if that policy is Local: the policy does not apply to
    /// clients inside the cluster that connect to an external address.
    pub const fn new(internal_is_local: bool, external_is_local: bool, is_external: bool) -> Self {
        Self {
            cluster: !internal_is_local || is_external,
            local: internal_is_local || (external_is_local && is_external),
        }
    }
}

/// The endpoints of one Service port in one family that may serve.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsableEndpoints {
    /// The endpoints for clients that may use any endpoint, sorted; empty if not wanted.
    pub cluster: Arc<[BackendAddress]>,
    /// The endpoints for clients that are kept on this node, sorted; empty if not wanted.
    pub local: Arc<[BackendAddress]>,
    /// Whether an endpoint on any node could serve. If a set is empty, a packet is then dropped (another node would serve
    /// it), and refused otherwise.
    pub has_any: bool,
    /// Number of endpoints that serve; each of the two sets is a subset of them.
    pub serving: usize,
}

impl UsableEndpoints {
    /// Returns one of the two sets in the form of [`FrontendPlan::slots`](super::FrontendPlan::slots).
    pub fn slots(&self, set: &Arc<[BackendAddress]>) -> Option<Arc<[BackendAddress]>> {
        (set.len() < self.serving).then(|| Arc::clone(set))
    }

    /// Returns the union of both sets, sorted, each endpoint once.
    pub fn union(&self) -> Vec<BackendAddress> {
        let mut all = [&*self.cluster, &*self.local].concat();
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// Returns the wanted sets of the merged endpoints. `cluster`: those of them that may be in the cluster set; with `keeps_own`, the
/// hints of endpoints on this node do not matter.
pub fn usable_endpoints(
    merged: &MergedEndpoints<'_>,
    cluster: &MergedEndpoints<'_>,
    wanted: EndpointSets,
    keeps_own: bool,
    node: &NodeView,
) -> UsableEndpoints {
    let cluster = if wanted.cluster {
        let topology = Topology::of(cluster, node);
        let prefers = |e: &Endpoint| topology.admits(e, node) || keeps_own && is_local(e, &node.name);
        ready_or_serving_terminating(cluster, prefers, |_| true)
    } else {
        Vec::new()
    };
    let local = if wanted.local {
        ready_or_serving_terminating(merged, |e| is_local(e, &node.name), |e| is_local(e, &node.name))
    } else {
        Vec::new()
    };
    let has_any = merged.values().any(|e| e.ready || is_serving_terminating(e));
    let serving = merged.values().filter(|e| e.is_serving()).count();
    UsableEndpoints { cluster: cluster.into(), local: local.into(), has_any, serving }
}

/// Returns the ready endpoints that `prefer` accepts; if there is none, the serving-terminating ones that `accept` accepts.
fn ready_or_serving_terminating(
    merged: &MergedEndpoints<'_>,
    prefer: impl Fn(&Endpoint) -> bool,
    accept: impl Fn(&Endpoint) -> bool,
) -> Vec<BackendAddress> {
    let pick = |test: &dyn Fn(&Endpoint) -> bool| -> Vec<BackendAddress> {
        merged.iter().filter(|(_, e)| test(e)).map(|(address, _)| *address).collect()
    };
    let ready = pick(&|e| e.ready && prefer(e));
    if ready.is_empty() { pick(&|e| is_serving_terminating(e) && accept(e)) } else { ready }
}

/// Whether the endpoint is serving-terminating.
const fn is_serving_terminating(endpoint: &Endpoint) -> bool {
    endpoint.serving && endpoint.terminating
}

/// How topology hints restrict the cluster set. The hints of all endpoints together determine it: they apply only if every
/// ready endpoint has some, and one of them names this node or its zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Topology {
    Anywhere,
    SameZone,
    SameNode,
}

impl Topology {
    fn of(merged: &MergedEndpoints<'_>, node: &NodeView) -> Self {
        let ready = || merged.values().filter(|e| e.ready);
        let counts = |has: fn(&Endpoint) -> bool, names_us: &dyn Fn(&Endpoint) -> bool| {
            ready().all(|e| has(e)) && ready().any(|e| names_us(e))
        };
        if counts(|e| !e.node_hints.is_empty(), &|e| Self::SameNode.admits(e, node)) {
            Self::SameNode
        } else if counts(|e| !e.zone_hints.is_empty(), &|e| Self::SameZone.admits(e, node)) {
            Self::SameZone
        } else {
            Self::Anywhere
        }
    }

    fn admits(self, endpoint: &Endpoint, node: &NodeView) -> bool {
        match self {
            Self::Anywhere => true,
            Self::SameZone => node.zone.as_ref().is_some_and(|zone| endpoint.zone_hints.contains(zone)),
            Self::SameNode => endpoint.node_hints.contains(&node.name),
        }
    }
}

#[cfg(test)]
mod tests;
