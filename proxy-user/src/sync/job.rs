//! One Service port on its way into the maps.

use std::collections::BTreeMap;
use std::collections::BTreeSet;

use ipnet::IpNet;
use proxy_common::backend::{
    BACKEND_ACTIVE, BACKEND_IN_CLUSTER, BACKEND_IN_LOCAL, BACKEND_LOCAL, BACKEND_TERMINATING,
    BACKEND_TUNNEL_SHIFT, BACKEND_WEIGHT_SHIFT,
};
use proxy_common::maglev;
use proxy_common::select::Algorithm;
use proxy_common::service::{
    KIND_CLUSTER_IP, KIND_EXTERNAL_IP, KIND_LOAD_BALANCER, KIND_NODE_PORT, SCOPE_EXTERNAL, SCOPE_INTERNAL,
    SERVICE_DROP_WHEN_EMPTY, SERVICE_DSR, SERVICE_EJECTS, SERVICE_LOCAL, SERVICE_MAGLEV_OUTSIDE,
    SERVICE_NODE_ALLOWED, SERVICE_SCOPED, SERVICE_SOURCE_RANGES, ServiceEntry,
};

use super::trouble::Trouble;
use crate::maps::{Backend, FrontendKey, Write};
use crate::model::{SortedMap, TrafficPolicy};
use crate::plan::maglev::Member;
use crate::plan::weights;
use crate::plan::{
    Access, BackendAddress, BackendFacts, Frontend, FrontendKind, FrontendPlan, PortId, PortPlan, Scope,
};

/// A Service port, what it should be, and how far it got in this sync.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) port: PortId,
    pub(super) id: Option<u32>,
    /// `None`: it has no frontend, so it should not be in the maps.
    pub(super) wanted: Option<Wanted>,
    /// Extents allocated in this sync.
    pub(super) extents: Vec<u32>,
    /// Maglev tables allocated in this sync.
    pub(super) tables: Vec<u32>,
    pub(super) trouble: Option<Trouble>,
    /// It goes no further.
    pub(super) stopped: bool,
    /// It got as far as the commit, where an entry that fails does not stop the others.
    pub(super) committing: bool,
}

/// What a Service port should be, with its ids.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    pub(super) rows: SortedMap<u32, Backend>,
    /// With the ids of each frontend's slots: sorted, or in the order of turns.
    pub(super) frontends: Vec<(FrontendKey, ServiceEntry, Vec<u32>)>,
    /// The endpoints of its Maglev tables, by address: those of policy Cluster, and those of policy Local.
    pub(super) tables: BTreeMap<bool, Vec<Member>>,
    /// Clients that its load balancer addresses let in.
    pub(super) ranges: BTreeSet<IpNet>,
}

impl Job {
    pub(super) fn new(port: PortId) -> Self {
        Self {
            port,
            id: None,
            wanted: None,
            extents: Vec::new(),
            tables: Vec::new(),
            trouble: None,
            stopped: false,
            committing: false,
        }
    }

    /// It cannot go on.
    pub(super) fn stop(&mut self, trouble: impl Into<Trouble>) {
        self.trouble.get_or_insert(trouble.into());
        self.stopped = true;
    }
}

/// Writes of one phase, each with the job it belongs to.
#[derive(Debug, Default)]
pub(super) struct Steps {
    pub(super) owners: Vec<usize>,
    pub(super) writes: Vec<Write>,
}

impl Steps {
    pub(super) fn push(&mut self, owner: usize, write: Write) {
        self.owners.push(owner);
        self.writes.push(write);
    }
}

/// The key of a frontend in the maps.
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

/// The bits that are set.
pub(super) fn bits<T: Default + std::ops::BitOr<Output = T>>(all: impl IntoIterator<Item = (bool, T)>) -> T {
    all.into_iter().filter(|(is_set, _)| *is_set).fold(T::default(), |bits, (_, bit)| bits | bit)
}

/// The row of an endpoint that serves. `tunnel`: the number of its node's address, or 0.
pub(super) fn backend_row(
    service: u32,
    port: &PortId,
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

/// The entry of a frontend; where its slots are comes later.
pub(super) fn service_entry(
    service: u32,
    key: &FrontendKey,
    port: &PortPlan,
    frontend: &FrontendPlan,
) -> ServiceEntry {
    ServiceEntry {
        tag: key.tag(),
        id: service,
        slot_base: 0,
        slot_count: 0,
        affinity_secs: port.affinity_secs,
        flags: bits([
            (frontend.drop_when_empty, SERVICE_DROP_WHEN_EMPTY),
            (frontend.scoped, SERVICE_SCOPED),
            (frontend.dsr, SERVICE_DSR),
            (frontend.policy == TrafficPolicy::Local, SERVICE_LOCAL),
            (frontend.access != Access::Everybody, SERVICE_SOURCE_RANGES),
            (is_maglev_outside(port, frontend), SERVICE_MAGLEV_OUTSIDE),
            // The last endpoint is never skipped, so a frontend with one endpoint need not look.
            (port.ejects && frontend.slots.len() > 1, SERVICE_EJECTS),
            (frontend.access == Access::Ranges { node: true }, SERVICE_NODE_ALLOWED),
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

/// Whether a frontend spreads clients outside by Maglev, whatever the algorithm inside.
fn is_maglev_outside(port: &PortPlan, frontend: &FrontendPlan) -> bool {
    port.maglev_outside && frontend.kind != FrontendKind::ClusterIp
}

/// Whether a frontend needs a Maglev table. One endpoint needs none.
pub(super) fn needs_table(port: &PortPlan, frontend: &FrontendPlan) -> bool {
    let is_hash = port.algorithm.is_hash() || is_maglev_outside(port, frontend);
    is_hash && (2..=maglev::MOST as usize).contains(&frontend.slots.len())
}

/// The slots of endpoints with these ids and weights: in the order of ids; by turns where weights count.
pub(super) fn slots(mut endpoints: Vec<(u32, u32)>, algorithm: Algorithm) -> Vec<u32> {
    endpoints.sort_unstable();
    let is_even = endpoints.windows(2).all(|pair| pair[0].1 == pair[1].1);
    if is_even || !algorithm.repeats_slots() {
        return endpoints.into_iter().map(|(id, _)| id).collect();
    }
    let weights: Vec<u32> = endpoints.iter().map(|(_, weight)| *weight).collect();
    weights::slots(&weights).into_iter().filter_map(|at| endpoints.get(at)).map(|(id, _)| *id).collect()
}

/// Every frontend that a job may have changed: the ones it has and the ones it should have.
pub(super) type Touched = BTreeSet<FrontendKey>;
