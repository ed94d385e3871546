//! Open connections of endpoints: as the programs count them, and as the flow tables show them.
//!
//! This module writes to the maps, by the rules of the programs, entry by entry.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use aya::maps::MapType;
use proxy_common::config::NodeConfig;
use proxy_common::connections;
use proxy_common::conntrack::{is_counted, is_expired};
use proxy_common::flow::{FlowEntry, STATE_COUNTS, STATE_USED, bits_of, holds_flow, with_bits};
use proxy_common::map_names as map;

use super::{View, ViewError, flows};
use crate::maps::family::MapFamily;
use crate::maps::mapping::Mapping;

/// Seconds by which the clock may be wrong that decides whether a flow has expired.
const TOLERANCE: u32 = 2;

/// The result of one [`View::recount`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// The programs' counts by backend, without zeros; below zero if an end was counted twice.
    pub noted: BTreeMap<u32, i64>,
    /// Number of flows that are counted, by backend.
    pub flows: BTreeMap<u32, i64>,
    /// Number of flows that had expired, and were removed from the count.
    pub expired: usize,
}

impl View {
    /// Returns the number of open connections of each of these backends; 0 for none.
    pub fn open_connections(
        &self,
        backends: impl IntoIterator<Item = u32>,
    ) -> Result<BTreeMap<u32, u64>, ViewError> {
        let open = self.pin(map::CONNECTIONS, MapType::Array)?.mapped::<u64>()?;
        let count = |id: u32| {
            let word = open.word64(id as usize).map_or(0, |word| word.load(Ordering::Relaxed));
            u64::try_from(connections::open(word)).unwrap_or_default()
        };
        Ok(backends.into_iter().map(|id| (id, count(id))).collect())
    }

    /// Whether any open connection is counted.
    pub fn has_open_connections(&self) -> Result<bool, ViewError> {
        let open = self.pin(map::CONNECTIONS, MapType::Array)?.mapped::<u64>()?;
        Ok(open.all64().into_iter().any(|word| connections::open(word) != 0))
    }

    /// Reads all flows, and removes those that have expired from the count: no packet will come that would cause a program
    /// to do so.
    pub fn recount(&self) -> Result<Counted, ViewError> {
        let config = self.node_config()?;
        let open = self.pin(map::CONNECTIONS, MapType::Array)?.shared::<u64>()?;
        let mut counted = Counted::default();
        self.recount_family::<[u8; 4]>(&open, &config, &mut counted)?;
        self.recount_family::<[u8; 16]>(&open, &config, &mut counted)?;
        let noted = open.all64().into_iter().map(connections::open).zip(0..).filter(|(count, _)| *count != 0);
        counted.noted = noted.map(|(count, id)| (id, count.into())).collect();
        Ok(counted)
    }

    fn recount_family<A: MapFamily>(
        &self,
        open: &Mapping,
        config: &NodeConfig,
        counted: &mut Counted,
    ) -> Result<(), ViewError> {
        let entries = self.pin(A::FLOWS, MapType::Array)?.shared::<FlowEntry<A>>()?;
        let now = flows::now(config.hz).wrapping_sub(TOLERANCE * config.hz);
        for index in 0..entries.len() {
            let Some(word) = entries.word64(index) else { break };
            let state = word.load(Ordering::SeqCst);
            let bits = bits_of(state);
            if bits & STATE_USED == 0 || !is_counted(bits) {
                continue;
            }
            let Some(flow) = entries.read::<FlowEntry<A>>(index) else { break };
            let has_expired =
                is_expired(flow.proto, bits, flow.last_seen, flows::not_before(&flow, config, now), config);
            let without = with_bits(state, bits & !STATE_COUNTS);
            // Fails if the entry holds another flow by now, or the flow has changed: the next recount decides. A CPU that has
            // claimed the entry updates the count.
            if has_expired
                && holds_flow(state)
                && word.compare_exchange(state, without, Ordering::SeqCst, Ordering::SeqCst).is_ok()
            {
                if let Some(count) = open.word64(flow.backend_id as usize) {
                    count.fetch_sub(1, Ordering::SeqCst);
                }
                counted.expired += 1;
            } else {
                *counted.flows.entry(flow.backend_id).or_default() += 1;
            }
        }
        Ok(())
    }

    /// Adds `changes` to the open connections of backends.
    pub fn correct(&self, changes: &BTreeMap<u32, i64>) -> Result<(), ViewError> {
        let open = self.pin(map::CONNECTIONS, MapType::Array)?.shared::<u64>()?;
        for (id, change) in changes {
            if let Some(count) = open.word64(*id as usize) {
                count.fetch_add(change.cast_unsigned(), Ordering::SeqCst);
            }
        }
        Ok(())
    }
}
