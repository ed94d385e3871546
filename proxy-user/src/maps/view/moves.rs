//! Connections that may move to endpoints that joined their Service (annotation `ballast.io/rebalance`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use aya::maps::MapType;
use proxy_common::PROTO_TCP;
use proxy_common::backend::{BACKEND_ACTIVE, BACKEND_IN_CLUSTER, weight_of};
use proxy_common::conntrack::{MOVES, SEEN_REPLY, age, is_closed, is_half_closed};
use proxy_common::flow::{
    FlowEntry, STATE_DIRECT, STATE_DSR, STATE_RESET, STATE_USED, generation_of, tunnel_of,
};
use proxy_common::select::Algorithm;
use proxy_common::service::{KIND_ADDRESS, KIND_UNMANAGED, SERVICE_REBALANCES, ServiceEntry, ServiceKey};
use proxy_common::socket::TranslatedSocket;

use super::removal::{is_of, mark};
use super::{View, ViewError, flows, ip_of};
use crate::maps::family::MapFamily;

/// A Service port whose idle connections move.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RebalancedPort {
    /// The addresses and ports to which clients of such connections connect; an unspecified address stands for those of the node.
    pub frontends: BTreeSet<SocketAddr>,
    /// The endpoints that get new connections, by id, each with its share.
    pub shares: BTreeMap<u32, u32>,
    /// Whether one of these gets only a small share of new connections, until it has answered.
    pub on_trial: bool,
}

impl RebalancedPort {
    fn has_frontend(&self, address: IpAddr, port: u16) -> bool {
        let any = match address {
            IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        [address, any].into_iter().any(|address| self.frontends.contains(&SocketAddr::new(address, port)))
    }

    /// Whether the socket is a connection that may move, and its endpoint gets new connections.
    pub fn may_move(&self, socket: &TranslatedSocket) -> bool {
        let storage = &socket.storage;
        ip_of(storage.family.into(), storage.frontend)
            .is_some_and(|address| self.has_frontend(address, storage.frontend_port))
            && self.shares.contains_key(&storage.backend_id)
    }
}

/// A flow in the table: entry and generation. No other flow has the same ones for a long time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FlowId {
    is_v6: bool,
    index: u32,
    generation: u32,
}

/// A flow that may move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MovableFlow {
    /// The flow.
    pub id: FlowId,
    /// Id of the Service port.
    pub service: u32,
    /// Id of the endpoint.
    pub backend_id: u32,
    /// Time since its last packet.
    pub idle: Duration,
}

impl View {
    /// Returns the Service ports whose idle connections move, by id.
    pub fn rebalanced(&self) -> Result<BTreeMap<u32, RebalancedPort>, ViewError> {
        let mut ports = BTreeMap::new();
        self.add_rebalanced::<[u8; 4]>(&mut ports)?;
        self.add_rebalanced::<[u8; 16]>(&mut ports)?;
        if !ports.is_empty() {
            let (ejected, trials) = (self.ejected()?, self.on_trial()?);
            for port in ports.values_mut() {
                // New connections skip them.
                port.shares.retain(|id, _| !ejected.contains_key(id));
                port.on_trial = port.shares.keys().any(|id| trials.contains(id));
            }
        }
        Ok(ports)
    }

    fn add_rebalanced<A: MapFamily>(
        &self,
        ports: &mut BTreeMap<u32, RebalancedPort>,
    ) -> Result<(), ViewError> {
        let entries = self.pin(A::SERVICES, MapType::Hash)?.all::<ServiceKey<A>, ServiceEntry>()?;
        let mut algorithms = BTreeMap::new();
        for (key, entry) in entries {
            let is_meant = entry.flags & SERVICE_REBALANCES != 0
                && ![KIND_ADDRESS, KIND_UNMANAGED].contains(&entry.kind);
            if is_meant {
                let frontend = SocketAddr::new(key.addr.into(), key.port);
                ports.entry(entry.id).or_default().frontends.insert(frontend);
                algorithms.insert(entry.id, Algorithm::from_number(entry.algorithm).unwrap_or_default());
            }
        }
        if algorithms.is_empty() {
            return Ok(());
        }
        for (id, row) in self.rows::<A>(|state| state == BACKEND_ACTIVE)? {
            let Some(algorithm) = algorithms.get(&row.service) else { continue };
            if let Some(port) = ports.get_mut(&row.service).filter(|_| row.flags & BACKEND_IN_CLUSTER != 0) {
                let is_weighted = algorithm.weighted() == *algorithm;
                port.shares.insert(id, if is_weighted { weight_of(row.flags) } else { 1 });
            }
        }
        Ok(())
    }

    /// Returns the open flows of these Service ports that may move. Those that are to be reset already are left out.
    pub fn movable_flows(
        &self,
        ports: &BTreeMap<u32, RebalancedPort>,
    ) -> Result<Vec<MovableFlow>, ViewError> {
        let mut found = Vec::new();
        self.add_movable::<[u8; 4]>(ports, &mut found)?;
        self.add_movable::<[u8; 16]>(ports, &mut found)?;
        Ok(found)
    }

    fn add_movable<A: MapFamily>(
        &self,
        ports: &BTreeMap<u32, RebalancedPort>,
        found: &mut Vec<MovableFlow>,
    ) -> Result<(), ViewError> {
        let config = self.node_config()?;
        let (hz, now) = (config.hz.max(1), flows::now(config.hz));
        let rows = self.rows::<A>(|state| state == BACKEND_ACTIVE)?;
        let entries = self.flow_table::<A>()?;
        for (index, flow) in flows::numbered_in_use::<A>(&entries) {
            let Some(port) = ports.get(&flow.service) else { continue };
            let is_meant = may_be_marked(flow.proto, flow.bits())
                && !flow.is_expired(flows::not_before(&flow, &config, now), &config)
                && port.has_frontend(flow.frontend.into(), flow.frontend_port)
                && port.shares.contains_key(&flow.backend_id)
                && rows.get(&flow.backend_id).is_some_and(|row| is_of(&flow, row));
            if is_meant {
                let id = FlowId {
                    is_v6: size_of::<A>() > size_of::<u32>(),
                    index: index as u32,
                    generation: generation_of(flow.state),
                };
                let idle = Duration::from_secs_f64(f64::from(age(now, flow.last_seen, hz)) / f64::from(hz));
                found.push(MovableFlow { id, service: flow.service, backend_id: flow.backend_id, idle });
            }
        }
        Ok(())
    }

    /// Marks these flows: the programs reset the connection of each at the client's next request. Returns how many were marked.
    pub fn move_flows(&self, meant: &[FlowId]) -> Result<u64, ViewError> {
        let (v6, v4): (Vec<_>, Vec<_>) = meant.iter().partition(|id| id.is_v6);
        let v4 = self.move_family::<[u8; 4]>(&v4)?;
        Ok(v4 + self.move_family::<[u8; 16]>(&v6)?)
    }

    fn move_family<A: MapFamily>(&self, meant: &[FlowId]) -> Result<u64, ViewError> {
        if meant.is_empty() {
            return Ok(0);
        }
        let entries = self.pin(A::FLOWS, MapType::Array)?.shared::<FlowEntry<A>>()?;
        let mark_one = |id: &&FlowId| {
            let Some(word) = entries.word64(id.index as usize) else { return false };
            let seen = u64::from(id.generation) << u32::BITS | u64::from(STATE_USED);
            mark(word, seen, |bits| may_be_marked(PROTO_TCP, bits).then_some(bits | MOVES))
        };
        Ok(meant.iter().filter(mark_one).count() as u64)
    }
}

/// Whether a flow in this state may move: its client has an answer, and neither end has closed. The answer to an encapsulated packet
/// would go to the other node, which moves the connection itself.
fn may_be_marked(proto: u8, bits: u32) -> bool {
    let came_encapsulated = bits & STATE_DSR != 0 && tunnel_of(bits) == 0;
    proto == PROTO_TCP
        && bits & (STATE_DIRECT | STATE_RESET | SEEN_REPLY) == SEEN_REPLY
        && !came_encapsulated
        && !is_closed(bits)
        && !is_half_closed(bits)
}
