//! Connections of the packet path to removed endpoints: how many there are, and the mark by which programs reset them.
//!
//! As in [`load`](super::load), entries are changed one by one, by the rules of the programs.

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};

use aya::maps::MapType;
use proxy_common::backend::{BACKEND_ACTIVE, BACKEND_FREE, BACKEND_RESET, BackendEntry};
use proxy_common::conntrack::is_closed;
use proxy_common::flow::{
    FlowEntry, STATE_DIRECT, STATE_DSR, STATE_RESET, STATE_WATCH, bits_of, generation_of, holds_flow,
    tunnel_of, with_bits,
};
use proxy_common::{Address, PROTO_TCP};

use super::{View, ViewError, flows};
use crate::maps::family::MapFamily;

/// Attempts to change the state of a flow that packets change at the same time; then the flow is left to the next call.
const TRIES: usize = 16;

impl View {
    /// Marks the flows of endpoints whose connections are reset; returns how many were not marked before. The programs
    /// answer the next segment of each client with a RST.
    pub fn mark_flows(&self) -> Result<u64, ViewError> {
        let v4 = self.mark_family::<[u8; 4]>()?;
        Ok(v4 + self.mark_family::<[u8; 16]>()?)
    }

    fn mark_family<A: MapFamily>(&self) -> Result<u64, ViewError> {
        let rows = self.rows::<A>(|state| state == BACKEND_RESET)?;
        if rows.is_empty() {
            return Ok(0);
        }
        let entries = self.pin(A::FLOWS, MapType::Array)?.shared::<FlowEntry<A>>()?;
        let mut marked = 0;
        for (index, flow) in flows::numbered_in_use::<A>(&entries) {
            let Some(word) = entries.word64(index) else { break };
            let bits = flow.bits();
            // A direct flow belongs to no Service. The answer to an encapsulated packet would go to the other node, which
            // resets the connection itself.
            let came_encapsulated = bits & STATE_DSR != 0 && tunnel_of(bits) == 0;
            let is_meant = flow.proto == PROTO_TCP
                && bits & (STATE_DIRECT | STATE_RESET) == 0
                && !came_encapsulated
                && rows.get(&flow.backend_id).is_some_and(|row| is_of(&flow, row));
            // The watch has ended: with it, the mark would have another meaning once the endpoint serves again.
            let reset = |bits: u32| Some(bits & !STATE_WATCH | STATE_RESET);
            marked += u64::from(is_meant && mark(word, flow.state, reset));
        }
        Ok(marked)
    }

    /// Returns the number of open flows of each removed endpoint, by its id; endpoints without such flows are left out.
    /// Closed and expired flows do not count.
    pub fn flows_of_left(&self) -> Result<BTreeMap<u32, u64>, ViewError> {
        let mut counts = BTreeMap::new();
        self.count_left::<[u8; 4]>(&mut counts)?;
        self.count_left::<[u8; 16]>(&mut counts)?;
        Ok(counts)
    }

    fn count_left<A: MapFamily>(&self, counts: &mut BTreeMap<u32, u64>) -> Result<(), ViewError> {
        let rows = self.rows::<A>(|state| state != BACKEND_ACTIVE && state != BACKEND_FREE)?;
        if rows.is_empty() {
            return Ok(());
        }
        let config = self.node_config()?;
        let now = flows::now(config.hz);
        let entries = self.flow_table::<A>()?;
        for (_, flow) in flows::numbered_in_use::<A>(&entries) {
            let is_open = bits_of(flow.state) & STATE_DIRECT == 0
                && !is_closed(flow.bits())
                && !flow.is_expired(flows::not_before(&flow, &config, now), &config);
            if is_open && rows.get(&flow.backend_id).is_some_and(|row| is_of(&flow, row)) {
                *counts.entry(flow.backend_id).or_default() += 1;
            }
        }
        Ok(())
    }

    /// Returns the rows whose state `is_meant` accepts, by id.
    pub(super) fn rows<A: MapFamily>(
        &self,
        is_meant: impl Fn(u8) -> bool,
    ) -> Result<BTreeMap<u32, BackendEntry<A>>, ViewError> {
        let rows = self.pin(A::BACKENDS, MapType::Array)?.mapped::<BackendEntry<A>>()?;
        let state = offset_of!(BackendEntry<A>, state);
        let meant = (0..rows.len()).filter(|id| rows.byte(*id, state).is_some_and(&is_meant));
        Ok(meant.filter_map(|id| Some((id as u32, rows.read(id)?))).collect())
    }
}

/// Whether a flow goes to the endpoint of a row: the id may belong to another endpoint by now.
pub(super) fn is_of<A: Address>(flow: &FlowEntry<A>, row: &BackendEntry<A>) -> bool {
    flow.service == row.service && flow.backend == row.addr && flow.backend_port == row.port
}

/// Marks the flow that has the generation of `seen`: changes its bits to those that `change` returns, unless it has a mark already.
/// Returns whether it did.
pub(super) fn mark(word: &AtomicU64, seen: u64, change: impl Fn(u32) -> Option<u32>) -> bool {
    let marked = |state| {
        let bits = bits_of(state);
        if bits & STATE_RESET == 0 { Some(with_bits(state, change(bits)?)) } else { None }
    };
    exchange(word, generation_of(seen), marked).is_some()
}

/// Changes the state of the flow with this generation to what `change` returns, and returns the state before. `None`: `change`
/// returns none, the flow is gone, or the entry is claimed, which means that it is being filled or freed.
pub(super) fn exchange(
    word: &AtomicU64,
    generation: u32,
    change: impl Fn(u64) -> Option<u64>,
) -> Option<u64> {
    for _ in 0..TRIES {
        let state = word.load(Ordering::SeqCst);
        if generation_of(state) != generation || !holds_flow(state) {
            return None;
        }
        if word.compare_exchange(state, change(state)?, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            return Some(state);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proxy_common::flow::{STATE_CLAIMED, STATE_USED};

    use super::*;

    #[test]
    fn only_the_flow_that_was_meant_is_marked_and_only_once() {
        let state = 7 << 32 | u64::from(STATE_USED);
        let word = AtomicU64::new(state);
        let reset = |bits: u32| Some(bits | STATE_RESET);
        assert!(!mark(&word, 6 << 32, reset), "another flow has the entry by now");
        assert!(mark(&word, state, reset));
        assert_eq!(word.load(Ordering::SeqCst), state | u64::from(STATE_RESET));
        assert!(!mark(&word, state, reset), "it is marked");
        let claimed = AtomicU64::new(state | u64::from(STATE_CLAIMED));
        assert!(!mark(&claimed, state, reset), "a CPU owns it");
    }
}
