//! Removes flows by the rules of the programs, while programs use the table.
//!
//! The CPU or the process that sets `STATE_CLAIMED` by compare-and-exchange owns an entry: it subtracts the flow from the
//! open connections of its endpoint, removes the keys of both directions from the index, and frees the entry. The prefilter
//! needs no change: the agent asks the table whether a flow still needs a bit.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use aya::maps::MapType;
use proxy_common::Address;
use proxy_common::abi::Plain;
use proxy_common::conntrack::is_counted;
use proxy_common::flow::{
    BUCKET_WORDS, Bucket, FlowEntry, STATE_USED, TAG_SHIFT, bits_of, claimed, generation_of, holds_flow,
    slot_of, with_bits,
};
use proxy_common::map_names as map;

use super::{FlowRow, View, ViewError, flows};
use crate::maps::mapping::Mapping;

/// Attempts to claim a flow whose state is changed by packets at the same time; then the flow is left to the next call.
const TRIES: usize = 16;

impl View {
    /// Removes the flows for which `is_meant` returns true, and returns them as they were, sorted by client.
    pub fn delete_flows(&self, is_meant: impl Fn(&FlowRow) -> bool) -> Result<Vec<FlowRow>, ViewError> {
        let mut rows = self.delete_family::<[u8; 4]>(map::FLOWS, map::FLOW_INDEX, &is_meant)?;
        rows.extend(self.delete_family::<[u8; 16]>(map::FLOWS6, map::FLOW_INDEX6, &is_meant)?);
        rows.sort_by_key(|row| (row.client, row.frontend, row.protocol));
        Ok(rows)
    }

    fn delete_family<A>(
        &self,
        table: &'static str,
        index: &'static str,
        is_meant: &impl Fn(&FlowRow) -> bool,
    ) -> Result<Vec<FlowRow>, ViewError>
    where
        A: Address + Into<IpAddr>,
        FlowEntry<A>: Plain,
    {
        let config = self.node_config()?;
        let entries = self.pin(table, MapType::Array)?.shared::<FlowEntry<A>>()?;
        let buckets = self.pin(index, MapType::Array)?.shared::<Bucket>()?;
        let open = self.pin(map::CONNECTIONS, MapType::Array)?.shared::<u64>()?;
        let mut removed = Vec::new();
        for number in 0..entries.len() {
            let Some(word) = entries.word64(number) else { break };
            if bits_of(word.load(Ordering::SeqCst)) & STATE_USED == 0 {
                continue;
            }
            let Some(flow) = entries.read::<FlowEntry<A>>(number) else { break };
            let Some(row) = flows::row(&flow, &config, flows::now(config.hz)) else { continue };
            if !is_meant(&row) {
                continue;
            }
            let Some(state) = claim(word, generation_of(flow.state)) else { continue };
            // The positions may have changed before the entry was claimed.
            let Some(flow) = entries.read::<FlowEntry<A>>(number) else { break };
            if is_counted(bits_of(state))
                && let Some(count) = open.word64(flow.backend_id as usize)
            {
                count.fetch_sub(1, Ordering::SeqCst);
            }
            remove_keys(&buckets, number as u32, &flow);
            // No other CPU or process changes the state of a claimed entry.
            word.store(with_bits(word.load(Ordering::SeqCst), 0), Ordering::SeqCst);
            removed.push(row);
        }
        Ok(removed)
    }
}

/// Claims the entry of the flow with this generation. Returns the state before that, or `None` if the flow is gone or a CPU
/// owns the entry.
fn claim(word: &AtomicU64, generation: u32) -> Option<u64> {
    for _ in 0..TRIES {
        let state = word.load(Ordering::SeqCst);
        if generation_of(state) != generation || !holds_flow(state) {
            return None;
        }
        if word.compare_exchange(state, claimed(state), Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            return Some(state);
        }
    }
    None
}

/// Removes both keys of a flow. If a slot is another flow's by now, it differs and stays.
fn remove_keys<A>(buckets: &Mapping, number: u32, flow: &FlowEntry<A>) {
    for (position, tag) in flow.positions.into_iter().zip(flow.tags) {
        let slot = buckets.word32((position / BUCKET_WORDS) as usize, (position % BUCKET_WORDS) as usize);
        if let Some(slot) = slot {
            let own = slot_of(u32::from(tag) << TAG_SHIFT, number);
            // If this fails, the slot is another flow's, and has to stay.
            let _ = slot.compare_exchange(own, 0, Ordering::SeqCst, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_flow_that_was_meant_is_claimed() {
        let word = AtomicU64::new(7 << 32 | u64::from(STATE_USED));
        assert_eq!(claim(&word, 6), None, "another flow has the entry by now");
        assert_eq!(claim(&word, 7), Some(7 << 32 | u64::from(STATE_USED)));
        assert_eq!(generation_of(word.load(Ordering::SeqCst)), 8, "readers notice that the flow is gone");
        assert_eq!(claim(&word, 8), None, "a CPU owns it");
    }
}
