//! Which endpoints may serve which clients.
//!
//! There are two sets. The *cluster* set is for clients that may be sent anywhere: the ready endpoints that
//! topology prefers, or, when there is no such endpoint, those that serve on while they terminate. The *local*
//! set is for clients that a policy keeps on this node: its ready endpoints, or, when there is none, those of it
//! that serve on while they terminate. Each set falls back by itself, and topology has no say in the local one.
//! As `CategorizeEndpoints` in kube-proxy's `pkg/proxy/topology.go`.

use std::sync::Arc;

use crate::model::{Endpoint, NodeView};

use super::BackendAddress;
use super::candidates::{Candidates, is_local};

/// Which of the two sets a Service port asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Some client may be sent anywhere.
    pub cluster: bool,
    /// A policy keeps some client on this node.
    pub local: bool,
}

impl Wanted {
    /// By the policies. A port without an external address has no use for its external policy. One that
    /// a client can connect to needs the cluster set even if that policy is Local: clients inside the cluster that
    /// dial an external address are not bound by it.
    pub const fn new(internal_is_local: bool, external_is_local: bool, is_external: bool) -> Self {
        Self {
            cluster: !internal_is_local || is_external,
            local: internal_is_local || (external_is_local && is_external),
        }
    }
}

/// The endpoints of one Service port in one family that may serve.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Eligible {
    /// For clients that may be sent anywhere, sorted; empty if not wanted.
    pub cluster: Arc<[BackendAddress]>,
    /// For clients that are kept on this node, sorted; empty if not wanted.
    pub local: Arc<[BackendAddress]>,
    /// Whether an endpoint anywhere could serve: with an empty set, that makes the difference between dropping
    /// a packet (another node would serve it) and refusing it.
    pub has_any: bool,
    /// Endpoints that serve anyone: each of the two sets is a part of them.
    pub serving: usize,
}

impl Eligible {
    /// One of the two sets as [`FrontendPlan::slots`](super::FrontendPlan::slots).
    pub fn slots(&self, set: &Arc<[BackendAddress]>) -> Option<Arc<[BackendAddress]>> {
        (set.len() < self.serving).then(|| Arc::clone(set))
    }

    /// Both sets together, sorted, each endpoint once.
    pub fn union(&self) -> Vec<BackendAddress> {
        let mut all = [&*self.cluster, &*self.local].concat();
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// Sorts the candidates into the sets that are wanted.
pub fn eligible(candidates: &Candidates<'_>, wanted: Wanted, node: &NodeView) -> Eligible {
    let cluster = if wanted.cluster {
        let topology = Topology::of(candidates, node);
        ready_or_draining(candidates, |e| topology.admits(e, node), |_| true)
    } else {
        Vec::new()
    };
    let local = if wanted.local {
        ready_or_draining(candidates, |e| is_local(e, &node.name), |e| is_local(e, &node.name))
    } else {
        Vec::new()
    };
    let has_any = candidates.values().any(|e| e.ready || drains(e));
    let serving = candidates.values().filter(|e| e.is_serving()).count();
    Eligible { cluster: cluster.into(), local: local.into(), has_any, serving }
}

/// The ready endpoints that `prefer` likes; without any, the draining ones that `accept` takes.
fn ready_or_draining(
    candidates: &Candidates<'_>,
    prefer: impl Fn(&Endpoint) -> bool,
    accept: impl Fn(&Endpoint) -> bool,
) -> Vec<BackendAddress> {
    let pick = |test: &dyn Fn(&Endpoint) -> bool| -> Vec<BackendAddress> {
        candidates.iter().filter(|(_, e)| test(e)).map(|(address, _)| *address).collect()
    };
    let ready = pick(&|e| e.ready && prefer(e));
    if ready.is_empty() { pick(&|e| drains(e) && accept(e)) } else { ready }
}

/// Whether the endpoint serves on while it terminates.
const fn drains(endpoint: &Endpoint) -> bool {
    endpoint.serving && endpoint.terminating
}

/// How hints restrict the cluster set. What the endpoints as a whole say decides, never a single one: hints
/// count only if every ready endpoint has some and one of them names us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Topology {
    Anywhere,
    SameZone,
    SameNode,
}

impl Topology {
    fn of(candidates: &Candidates<'_>, node: &NodeView) -> Self {
        let ready = || candidates.values().filter(|e| e.ready);
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
