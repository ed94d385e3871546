//! Removes flows by the rules of the programs, while programs use the table.
//!
//! The CPU or the process that sets `STATE_CLAIMED` by compare-and-exchange owns an entry: it subtracts the flow from the
//! open connections of its endpoint, removes the keys of both directions from the index, and frees the entry. The prefilter
//! needs no change: the agent asks the table whether a flow still needs a bit.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use aya::maps::MapType;
use proxy_common::conntrack::is_counted;
use proxy_common::flow::{
    BUCKET_WORDS, Bucket, FlowEntry, STATE_CLAIMED, STATE_USED, TAG_SHIFT, bits_of, claimed, generation_of,
    slot_of, with_bits,
};
use proxy_common::map_names as map;
use proxy_core::model::FlowState;

use super::removal::exchange;
use super::{FlowRow, View, ViewError, flows};
use crate::maps::family::MapFamily;
use crate::maps::mapping::Mapping;

impl View {
    /// Removes the flows for which `is_meant` returns true, and returns them as they were, sorted by client.
    pub fn delete_flows(&self, is_meant: impl Fn(&FlowRow) -> bool) -> Result<Vec<FlowRow>, ViewError> {
        let mut rows = self.delete_family::<[u8; 4]>(&is_meant)?;
        rows.extend(self.delete_family::<[u8; 16]>(&is_meant)?);
        rows.sort_by_key(|row| (row.client, row.frontend, row.protocol));
        Ok(rows)
    }

    /// Removes the flows that have expired and been silent for a day, and returns their number. The time of a flow's last packet is right
    /// for 2^32 ticks only (49 days at 1,000 a second): later, the flow would not have expired.
    pub fn delete_expired(&self) -> Result<usize, ViewError> {
        const SILENT: Duration = Duration::from_hours(24);
        let is_old = |flow: &FlowRow| flow.state == FlowState::Expired && flow.idle >= SILENT;
        self.delete_flows(is_old).map(|removed| removed.len())
    }

    /// Returns the entries that a CPU or a process has claimed. A CPU holds an entry for microseconds only.
    pub fn claimed(&self) -> Result<Claimed, ViewError> {
        let claimed_in = |entries: Mapping| {
            let words = (0..entries.len())
                .filter_map(|number| Some((number, entries.word64(number)?.load(Ordering::SeqCst))));
            words.filter(|(_, state)| bits_of(*state) & STATE_CLAIMED != 0).collect()
        };
        let v4 = self.pin(map::FLOWS, MapType::Array)?.shared::<FlowEntry<[u8; 4]>>()?;
        let v6 = self.pin(map::FLOWS6, MapType::Array)?.shared::<FlowEntry<[u8; 16]>>()?;
        Ok(Claimed { v4: claimed_in(v4), v6: claimed_in(v6) })
    }

    /// Frees the entries that are still claimed as they were `before`, seconds ago: the process that removed their flows has ended.
    /// Returns their number.
    pub fn free_claimed(&self, before: &Claimed) -> Result<usize, ViewError> {
        Ok(self.free_family::<[u8; 4]>(&before.v4)? + self.free_family::<[u8; 16]>(&before.v6)?)
    }

    fn free_family<A: MapFamily>(&self, before: &[(usize, u64)]) -> Result<usize, ViewError> {
        if before.is_empty() {
            return Ok(0);
        }
        let entries = self.pin(A::FLOWS, MapType::Array)?.shared::<FlowEntry<A>>()?;
        let buckets = self.pin(A::FLOW_INDEX, MapType::Array)?.shared::<Bucket>()?;
        let is_freed = |(number, state): &&(usize, u64)| {
            let (Some(word), Some(flow)) = (entries.word64(*number), entries.read::<FlowEntry<A>>(*number))
            else {
                return false;
            };
            if word.load(Ordering::SeqCst) != *state {
                return false;
            }
            remove_keys(&buckets, *number as u32, &flow);
            free(word, *state)
        };
        Ok(before.iter().filter(is_freed).count())
    }

    fn delete_family<A: MapFamily>(
        &self,
        is_meant: &impl Fn(&FlowRow) -> bool,
    ) -> Result<Vec<FlowRow>, ViewError> {
        let config = self.node_config()?;
        let entries = self.pin(A::FLOWS, MapType::Array)?.shared::<FlowEntry<A>>()?;
        let buckets = self.pin(A::FLOW_INDEX, MapType::Array)?.shared::<Bucket>()?;
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
            free(word, claimed(state));
            removed.push(row);
        }
        Ok(removed)
    }
}

/// Claimed entries of both tables: number and state.
#[derive(Debug, Default)]
pub struct Claimed {
    v4: Vec<(usize, u64)>,
    v6: Vec<(usize, u64)>,
}

/// Frees an entry that is claimed with this state; returns whether it was.
fn free(word: &AtomicU64, claimed: u64) -> bool {
    word.compare_exchange(claimed, with_bits(claimed, 0), Ordering::SeqCst, Ordering::SeqCst).is_ok()
}

/// Claims the entry of the flow with this generation. Returns the state before that, or `None` if the flow is gone or a CPU
/// owns the entry.
fn claim(word: &AtomicU64, generation: u32) -> Option<u64> {
    exchange(word, generation, |state| Some(claimed(state)))
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
